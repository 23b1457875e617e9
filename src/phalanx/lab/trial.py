"""Running an experiment on real ranks."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..comm import RankFailed, World
from ..comm.launch import workers
from .catalogue import Experiment, LabError, Size, experiment
from .lab import Lab
from .record import Claim, LabStep, RankRecord


@dataclass(frozen=True)
class LabTrial:
    """One experiment that has been run, and what was recorded of every rank."""

    experiment: Experiment
    size: Size
    ranks: int
    backend: str
    records: tuple[RankRecord, ...]

    @property
    def claims(self) -> list[Claim]:
        return [claim for record in self.records for claim in record.claims]

    @property
    def failed(self) -> list[Claim]:
        return [claim for claim in self.claims if not claim.holds]

    @property
    def holds(self) -> bool:
        return not self.failed

    def steps(self) -> Iterator[tuple[str, list[tuple[int, LabStep]]]]:
        """Each title with (rank, step) of all ranks, in the order in which a rank first began it."""
        steps: dict[str, list[tuple[int, LabStep]]] = {}
        for record in self.records:
            for step in record.steps:
                steps.setdefault(step.title, []).append((record.rank, step))
        yield from sorted(steps.items(), key=lambda item: min(s.start for _, s in item[1]))


def conduct(
    names: Sequence[str], size: Size | None = None, *, ranks: int = 4, backend: str = "threads"
) -> Iterator[LabTrial]:
    """The experiments one after another, all in one world of ranks."""
    size = size or Size()
    experiments = [experiment(name) for name in names]
    backend = backend_for(backend)
    with workers(ranks, backend=backend, timeout=60.0) as run:
        for each in experiments:
            try:
                records = run(on_a_rank, each.module, each.function, size)
            except RankFailed as failed:
                # What does not fit can be changed by the user; anything else keeps its traceback.
                kind, _, text = failed.reports[0].error.partition(": ")
                error = LabError(f"{each.name}: {text}") if kind == "LabError" else failed
                raise error from None
            yield LabTrial(each, size, ranks, backend, tuple(records))


def on_a_rank(world: World, module: str, function: str, size: Size) -> RankRecord:
    """What one rank does: the experiment, recorded."""
    lab = Lab(world, size)
    with lab.memory:
        getattr(importlib.import_module(module), function)(lab)
    world.clear()
    return lab.close()


def traced() -> bool:
    """True under a debugger, or anything else that follows every line."""
    monitoring = getattr(sys, "monitoring", None)  # what debuggers use from Python 3.12 on
    if monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None:
        return True
    return sys.gettrace() is not None


def backend_for(backend: str) -> str:
    """The backend that was asked for; under a debugger threads, so that every rank can be stopped."""
    return "threads" if traced() else backend
