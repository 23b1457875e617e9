"""Small runs of which one rank does something else at one operation."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from phalanx.layout.run import Run
from phalanx.program import ops
from phalanx.training import checkpoint
from phalanx.training.executor import Executor
from phalanx.training.loop import train
from rank_watch import watching

WORDS = (
    "model={layers=2,hidden=16,heads=2,ffn=24,vocab=256}", "batch=4", "sequence=12",
    "validation.batches=0", "steps=6",
)  # fmt: skip


def run_in(out: Path, *more: str) -> Run:
    return Run.parse("", "run", (*WORDS, f"out={out}", *more))


def sleeps_in_a_backward(world: Any, run: Run, layout: str, who: int) -> Any:
    perform, backwards = Executor._perform, list[Any]()

    def performed(self: Executor, op: Any) -> None:
        if world.rank == who and op.kind == ops.BACKWARD and op.piece == 1:
            backwards.append(op)
            if len(backwards) == 2:  # of the second step
                time.sleep(1e6)
        perform(self, op)

    Executor._perform = performed  # type: ignore[method-assign]
    return train(world, run, layout, True)


def saves_slowly(world: Any, run: Run, layout: str, seconds: float) -> Any:
    write = checkpoint.write_file

    def written(*given: Any) -> Any:
        time.sleep(seconds * (world.rank == 1))
        return write(*given)

    checkpoint.write_file = written
    return train(world, run, layout, True)


def apart(world: Any, task: Any, *args: Any) -> Any:
    """Runs a task with each rank on a host of its own, of which all have one name."""
    watching.place = lambda: f"machine {world.rank}"
    return task(world, *args)


def saves_for_ever(world: Any, run: Run, layout: str) -> Any:
    lock = threading.Lock()
    lock.acquire()
    checkpoint.write_file = lambda *_: lock.acquire()
    return train(world, run, layout, True)
