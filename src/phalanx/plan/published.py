"""Published runs predicted: rows of tables costed, priced and simulated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..layout import Layout, LayoutError, Shape, piece_layout
from .calibrate import CostedRun, Measured
from .fit import Path
from .profile import FITTED, SoftwareProfile
from .step import Choice, CostFunction, PieceKinds, parts_of
from .table import PublishedRow

# Families with a pathological tail: the most devices of a run that is judged, and the part of a
# device's memory above which its allocator thrashes.
MOST = {"ultrascale": 64}
FULL = 0.8


@dataclass(frozen=True)
class PublishedRun:
    """A row of a table, costed once, to be simulated under many profiles."""

    row: PublishedRow
    costed: CostedRun

    @property
    def measured(self) -> float:
        return self.row.step

    @property
    def counts(self) -> bool:
        """Whether it tells of its software: it ended, and was not starved of memory or network."""
        row = self.row
        if row.step <= 0 or row.hardware is None or row.ranks > MOST.get(row.family, row.ranks):
            return False
        return row.memory < FULL * row.hardware.memory or row.family not in MOST

    def under(self, numbers: SoftwareProfile) -> SoftwareProfile:
        """The facts of its own software, with the fitted numbers of another."""
        return replace(self.row.profile, **{name: getattr(numbers, name) for name in FITTED})

    def choice(self, numbers: SoftwareProfile) -> Choice:
        return self.costed.choice(self.under(numbers))

    def longest(self, numbers: SoftwareProfile) -> Path:
        return _PublishedPath(self, self.costed.longest(self.under(numbers)))


@dataclass(frozen=True)
class _PublishedPath:
    """A path of a run, under the numbers of any profile and the facts of its own."""

    run: PublishedRun
    path: Path

    def __call__(self, profile: SoftwareProfile) -> float:
        return self.path(self.run.under(profile))


def logged(choice: Choice, profile: SoftwareProfile) -> float:
    """Bytes of the rank whose memory the profile's software logs."""
    if profile.logs_first_rank and choice.stages:
        return sum(choice.stages[0].values())
    return choice.bytes


def runs_of(
    rows: Sequence[PublishedRow], piece_costs: CostFunction
) -> tuple[list[PublishedRun], dict[int, str]]:
    """All rows that can be predicted; and why the others cannot."""
    refused = {i: row.why for i, row in enumerate(rows) if row.case is None}
    alike: dict[Any, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        if row.case is not None:
            shape = replace(row.case.shape, name="", layers=1, batch=1, source="")
            alike[shape, row.case.sequence].append(i)
    found: dict[int, PublishedRun] = {}
    for (shape, sequence), members in alike.items():
        by_cut: dict[Layout, list[int]] = defaultdict(list)
        for i in members:
            by_cut[_costed_as(rows[i])].append(i)
        for cut, kinds in _costed(piece_costs, shape, sequence, by_cut, refused).items():
            for i in by_cut[cut]:
                found[i] = _run(rows[i], kinds)
    return [found[i] for i in sorted(found)], refused


def _run(row: PublishedRow, kinds: PieceKinds) -> PublishedRun:
    case, hardware = row.case, row.hardware
    assert case is not None
    assert hardware is not None
    cut = piece_layout(case.layout)
    parts = parts_of(kinds, case, hardware, row.profile, cut)
    return PublishedRun(row, CostedRun(Measured(row.name, case, row.step), hardware, parts))


def _costed_as(row: PublishedRow) -> Layout:
    """The cut that is costed: where scores are kept, to be selective means to drop them alone."""
    assert row.case is not None
    cut = piece_layout(row.case.layout)
    return cut if row.profile.fused_attention else replace(cut, recompute="none")


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
    except (LayoutError, ValueError):
        found: dict[Layout, PieceKinds] = {}
        for cut, members in cuts.items():
            try:
                found |= piece_costs(shape, [cut], sequence=sequence)
            except (LayoutError, ValueError) as error:
                refused.update(dict.fromkeys(members, str(error)))
        return found
