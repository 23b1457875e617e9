"""Steps of a small run, and what they ask of the device, as JSON: losses, the order in which batches are
read and operations issued, and how many events are made and read."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from phalanx.comm.alone import AloneWorld
from phalanx.layout import Layout
from phalanx.layout.run import Run
from phalanx.training.data.token_files import DataError
from phalanx.training.executor import DeviceClock, Executor
from phalanx.training.rank import Rank
from phalanx.training.step import make_step
from rank_watch import Positions

RUN = """
steps = 4
batch = 4
sequence = 16
model = {layers = 1, hidden = 16, heads = 2, ffn = 24, vocab = 256}
metrics = {every = 2}
"""


def watch(owner: Any, name: str, note: Callable[..., None]) -> None:
    """Calls `note` with the arguments of each call of a method."""
    right = getattr(owner, name)

    def called(*args: Any, **more: Any) -> Any:
        note(*args)
        return right(*args, **more)

    setattr(owner, name, called)


def main(out: str) -> None:
    gpu = torch.cuda.is_available()
    order: list[str] = []
    counts = {"made": 0, "read": 0, "kept": 0}

    def stream() -> str:
        if not gpu:
            return ""
        own = torch.cuda.current_stream() == torch.cuda.default_stream()
        return " beside" if not own else ""

    def note_of(name: str) -> Callable[..., None]:
        def note(*_: Any) -> None:
            counts[name] += 1

        return note

    watch(
        Rank, "batch", lambda _, step: order.append(f"read {step}{stream()}")
    )
    watch(Executor, "_perform", lambda *_: order.append("operation"))
    watch(Executor, "_numbers", lambda _: order.append("all queued"))
    watch(torch.Tensor, "record_stream", note_of("kept"))
    if gpu:
        watch(torch.cuda.Stream, "wait_event", lambda *_: order.append("wait"))
        watch(torch.cuda, "Event", note_of("made"))
        watch(DeviceClock, "seconds", note_of("read"))
    run = Run.parse(RUN, "watched", (f"out={out}",))
    device = "cuda:0" if gpu else "cpu"
    rank, positions = Rank(AloneWorld(device), run, Layout()), Positions(0)
    rank.write_to(positions)
    steps = []
    for number in range(run.steps):
        counts |= dict.fromkeys(counts, 0)
        loss = make_step(rank, positions, number).result.total
        steps.append({"loss": loss, **counts})

    def unreadable(*_: Any) -> None:
        raise DataError("no such file")

    rank.batches = type("Broken", (), {"batch": unreadable})()
    rank.next_batch.read_ahead(7)
    try:
        rank.next_batch.take(7)
    except DataError as error:
        order.append(str(error))
    positions.close("ended")
    threads = torch.get_num_threads()
    Rank(AloneWorld(device), run, Layout.parse("offload:optimizer"))
    updating = torch.get_num_threads()
    row = len(rank.part.trainer.row)
    print(
        json.dumps(
            {
                "steps": steps,
                "order": order,
                "row": row,
                "threads": [threads, updating],
            }
        )
    )


if __name__ == "__main__":
    main(str(Path(sys.argv[1])))
