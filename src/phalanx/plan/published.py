"""Published runs predicted: rows of tables costed, priced and simulated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..layout import Layout, Shape, piece_layout
from .calibrate import CostedRun, Measured
from .price import PieceKinds, costed_as, parts_of
from .profile import SoftwareProfile
from .step import Choice, CostFunction
from .table import PublishedRow

# Families with a pathological tail: the most devices of a run that is judged, and the part of a
# device's memory above which its allocator thrashes.
MOST = {"ultrascale": 64}
FULL = 0.8


@dataclass(frozen=True)
class PublishedRun(CostedRun):
    """A row of a table, costed."""

    row: PublishedRow

    @property
    def counts(self) -> bool:
        """Whether it tells of its software: it ended, and was not starved of memory or network."""
        row = self.row
        if row.step <= 0 or row.ranks > MOST.get(row.family, row.ranks):
            return False
        return row.memory < FULL * self.hardware.memory or row.family not in MOST


def logged(choice: Choice, profile: SoftwareProfile) -> float:
    """Bytes of the rank whose memory the profile's software logs."""
    if profile.logs_first_rank and choice.stages:
        return sum(choice.stages[0].values())
    return choice.bytes


def runs_of(
    rows: Sequence[PublishedRow], piece_costs: CostFunction
) -> tuple[list[PublishedRun], dict[int, str]]:
    """All rows that can be predicted; and why the others cannot."""
    refused, found = {}, dict[int, PublishedRun]()
    alike: dict[Any, dict[Layout, list[int]]] = defaultdict(lambda: defaultdict(list))
    for i, row in enumerate(rows):
        if row.case is None:
            refused[i] = row.why
            continue
        shape = replace(row.case.shape, name="", layers=1, batch=1, source="")
        cut = costed_as(piece_layout(row.case.layout), row.profile)
        alike[shape, row.case.sequence][cut].append(i)
    for (shape, sequence), by_cut in alike.items():
        for cut, kinds in _costed(piece_costs, shape, sequence, by_cut, refused).items():
            for i in by_cut[cut]:
                found[i] = _run(rows[i], kinds)
    return [found[i] for i in sorted(found)], refused


def _run(row: PublishedRow, kinds: PieceKinds) -> PublishedRun:
    case, hardware = row.case, row.hardware
    assert case is not None
    assert hardware is not None
    parts = parts_of(kinds, case, hardware, row.profile, piece_layout(case.layout))
    run = Measured(row.name, case, row.step)
    return PublishedRun(run, hardware, row.profile, parts, row)


def _costed(
    piece_costs: CostFunction,
    shape: Shape,
    sequence: int,
    cuts: Mapping[Layout, list[int]],
    refused: dict[int, str],
) -> dict[Layout, PieceKinds]:
    """The cuts of one shape together; where one cannot be, each by itself."""
    try:
        return dict(piece_costs(shape, list(cuts), sequence=sequence))
    except ValueError:
        found: dict[Layout, PieceKinds] = {}
        for cut, members in cuts.items():
            try:
                found |= piece_costs(shape, [cut], sequence=sequence)
            except ValueError as error:
                refused.update(dict.fromkeys(members, str(error)))
        return found
