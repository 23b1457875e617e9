"""Running an experiment on real ranks, and checking what they return."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..comm import RankFailed, World
from ..comm.launch import workers
from .catalogue import Entry, entry
from .claims import Claim, LabError, Results, Size, Values
from .lab import Lab
from .record import Record, Step

__all__ = ["Trial", "conduct", "judge", "traced", "backend_for"]


@dataclass(frozen=True)
class Trial:
    """One experiment that has been run: what was recorded of every rank, and the claims."""

    entry: Entry
    size: Size
    ranks: int
    backend: str
    records: tuple[Record, ...]
    values: tuple[Values, ...]
    claims: tuple[Claim, ...]

    @property
    def failed(self) -> list[Claim]:
        return [claim for claim in self.claims if not claim.holds]

    @property
    def holds(self) -> bool:
        return not self.failed

    def steps(self) -> Iterator[tuple[str, list[tuple[int, Step]]]]:
        """Each title with (rank, step) of all ranks, in the order in which a rank first began it."""
        steps: dict[str, list[tuple[int, Step]]] = {}
        for record in self.records:
            for step in record.steps:
                steps.setdefault(step.title, []).append((record.rank, step))
        yield from sorted(steps.items(), key=lambda item: min(s.start for _, s in item[1]))


def conduct(
    names: Sequence[str], size: Size | None = None, *, ranks: int = 4, backend: str = "threads"
) -> Iterator[Trial]:
    """The experiments one after another, all in one world of ranks."""
    size = size or Size()
    entries = [entry(name) for name in names]
    backend = backend_for(backend)
    with workers(ranks, backend=backend, timeout=60.0) as run:
        for each in entries:
            try:
                answers = run(on_a_rank, each.module, size)
            except RankFailed as failed:
                # What does not fit can be changed by the user; anything else keeps its traceback.
                kind, _, text = failed.reports[0].error.partition(": ")
                error = LabError(f"{each.name}: {text}") if kind == "LabError" else failed
                raise error from None
            records = tuple(record for record, _ in answers)
            values = tuple(_unpacked(packed) for _, packed in answers)
            yield Trial(
                each, size, ranks, backend, records, values, judge(each.module, values, size)
            )


def judge(module: str, values: Results, size: Size) -> tuple[Claim, ...]:
    """Every claim of an experiment about what its ranks returned."""
    return tuple(importlib.import_module(module).check(list(values), size))


def on_a_rank(world: World, module: str, size: Size) -> tuple[Record, Values]:
    """What one rank does: the experiment, recorded."""
    experiment = importlib.import_module(module)
    lab = Lab(world, size)
    with lab.memory:
        values = experiment.run(lab)
    world.clear()
    return lab.close(), _packed(values)


def traced() -> bool:
    """True under a debugger, or anything else that follows every line."""
    monitoring = getattr(sys, "monitoring", None)  # what debuggers use from Python 3.12 on
    if monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None:
        return True
    return sys.gettrace() is not None


def backend_for(backend: str) -> str:
    """The backend that was asked for; under a debugger threads, so that every rank can be stopped."""
    return "threads" if traced() else backend


# Tensors go through a process's pipe as arrays: torch would pass on a file descriptor for each.
def _packed(values: Values) -> Values:
    return tree_map_only(Tensor, lambda x: x.detach().to("cpu").numpy().copy(), values)  # type: ignore[no-any-return]


def _unpacked(values: Values) -> Values:
    return tree_map_only(numpy.ndarray, torch.from_numpy, values)  # type: ignore[no-any-return]
