"""Running an experiment on real ranks, and judging what they hand back."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from ..comm import RankFailed, World
from ..comm.launch import workers
from .catalogue import Entry, entry
from .claims import Claim, Held, LabError, Size
from .note import Note
from .record import Record

__all__ = ["Trial", "conduct", "judge", "traced", "wire_for"]


@dataclass(frozen=True)
class Trial:
    """One experiment that has been run: what was written down of every rank, and the verdict."""

    entry: Entry
    size: Size
    ranks: int
    wire: str
    records: tuple[Record, ...]
    held: tuple[Held, ...]
    claims: tuple[Claim, ...]

    @property
    def holds(self) -> bool:
        return all(claim.holds for claim in self.claims)


def conduct(
    names: Sequence[str], size: Size | None = None, *, ranks: int = 4, wire: str = "threads"
) -> Iterator[Trial]:
    """The experiments one after another, all in one world of ranks."""
    size = size or Size()
    entries = [entry(name) for name in names]
    wire = wire_for(wire)
    with workers(ranks, wire=wire, timeout=60.0) as run:
        for each in entries:
            try:
                told = run(on_a_rank, each.module, size)
            except RankFailed as failed:
                raise _sentence(each.name, failed) from None
            records, held = zip(
                *((record, _opened(packed)) for record, packed in told), strict=True
            )
            claims = judge(each.module, held, size)
            yield Trial(each, size, ranks, wire, records, held, claims)


def _sentence(name: str, failed: RankFailed) -> Exception:
    """What does not fit is the user's to change; anything else is told with its traceback."""
    kind, _, text = failed.reports[0].error.partition(": ")
    return LabError(f"{name}: {text}") if kind == "LabError" else failed


def judge(module: str, held: Sequence[Held], size: Size) -> tuple[Claim, ...]:
    """Every claim of an experiment about what its ranks hold at the end."""
    return tuple(importlib.import_module(module).check(list(held), size))


def on_a_rank(world: World, module: str, size: Size) -> tuple[Record, dict[str, Any]]:
    """What one rank does: the experiment, under watch."""
    experiment = importlib.import_module(module)
    note = Note(world.rank)
    with note.live:
        held = experiment.run(note.watched(world), size, note)
    world.clear()
    return note.close(), {name: _packed(x) for name, x in held.items()}


def traced() -> bool:
    """True under a debugger, or anything else that follows every line."""
    monitoring = getattr(sys, "monitoring", None)  # what debuggers use from Python 3.12 on
    if monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None:
        return True
    return sys.gettrace() is not None


def wire_for(wire: str) -> str:
    """The wire that was asked for; under a debugger threads, so that every rank can be stopped."""
    return "threads" if traced() else wire


# Tensors cross a process's pipe as arrays: torch would pass on a file descriptor for each.
def _packed(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.detach().to("cpu").numpy().copy()
    return [_packed(each) for each in x] if isinstance(x, (list, tuple)) else x


def _opened(x: Any) -> Any:
    if isinstance(x, dict):
        return {name: _opened(each) for name, each in x.items()}
    if isinstance(x, numpy.ndarray):
        return torch.from_numpy(x)
    return [_opened(each) for each in x] if isinstance(x, list) else x
