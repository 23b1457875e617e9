"""A torch profiler trace of some steps, with a range for each operation of the
program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ..layout.run import Profiling
from .rank import Rank
from .step import Listener


@contextmanager
def traced(rank: Rank) -> Iterator[Listener]:
    """Yield the listener that advances the profiler, which writes the trace of the
    run's profiled steps."""
    wanted = rank.run.profile
    trainer = rank.part.trainer
    if wanted.nvtx and rank.world.device.type == "cuda":
        trainer.ranges = lambda op: torch.cuda.nvtx.range(str(op))
    if not wanted.steps:
        yield lambda step: None
        return

    def export(trace: torch.profiler.profile) -> None:
        folder = Path(rank.run.out, "profile")
        folder.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(str(folder / f"rank-{rank.world.rank}.json"))

    # Replaces NVTX ranges: one of them at a time.
    trainer.ranges = lambda op: torch.profiler.record_function(str(op))
    schedule = _schedule(wanted)
    with torch.profiler.profile(
        schedule=schedule, on_trace_ready=export
    ) as trace:
        yield lambda step: trace.step()


def _schedule(
    wanted: Profiling,
) -> Callable[[int], torch.profiler.ProfilerAction]:
    """Return the profiler's action for each step, counted from the first one of this
    start."""
    action = torch.profiler.ProfilerAction

    def of(step: int) -> torch.profiler.ProfilerAction:
        # Counted from this start of the run.
        into = step - wanted.start
        if into == wanted.steps - 1:
            return action.RECORD_AND_SAVE
        return action.RECORD if 0 <= into < wanted.steps else action.NONE

    return of
