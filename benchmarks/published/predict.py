"""Published runs predicted: rows of tables costed, priced and estimated together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np

from phalanx.layout import Layout, LayoutError, Shape
from phalanx.plan.columns import Columns, columns_of
from phalanx.plan.estimate import Estimates, estimate
from phalanx.plan.hardware import Hardware
from phalanx.plan.kinds import CostFunction, PieceKinds
from phalanx.plan.price import RawTrio, raw_trio
from phalanx.plan.profile import Profile

from .table import Row

__all__ = ["RunGroup", "groups_of"]


class RunGroup:
    """Rows of one hardware and one kind of attention, ready to be estimated under many profiles."""

    def __init__(
        self, rows: Sequence[tuple[int, Row]], kinds: Mapping[int, tuple[Layout, PieceKinds]]
    ) -> None:
        self.numbers = [number for number, _ in rows]
        self.rows = [row for _, row in rows]
        hardware = self.rows[0].hardware
        assert hardware is not None
        self.hardware: Hardware = hardware
        profile = self.rows[0].profile
        self.raws: list[tuple[RawTrio, ...]] = []
        known: dict[Any, int] = {}
        keys, cases = [], []
        for number, row in rows:
            case = row.case
            assert case is not None
            felt, pieces = kinds[number]
            cut = replace(felt, recompute="selective") if _selective(row) else felt
            dtype = case.dtype or case.layout.precision
            key = (id(pieces), cut, case.rows, dtype)
            if key not in known:
                known[key] = len(self.raws)
                three = (pieces.embed(case.rows), pieces.block(case.rows), pieces.head(case.rows))
                self.raws.append(tuple(raw_trio(w, hardware, profile, cut, dtype) for w in three))
            keys.append(known[key])
            cases.append(case)
        self.columns: Columns = columns_of(cases, keys)
        self.measured = np.array([row.step for row in self.rows])

    def part(self, most: int) -> RunGroup:
        """At most so many of the rows, evenly taken: enough to fit on."""
        if len(self.rows) <= most:
            return self
        picked = np.linspace(0, len(self.rows) - 1, most).round().astype(int)
        some = copy(self)
        some.numbers = [self.numbers[i] for i in picked]
        some.rows = [self.rows[i] for i in picked]
        some.measured = self.measured[picked]
        used, keys = np.unique(self.columns.key[picked].astype(int), return_inverse=True)
        some.raws = [self.raws[i] for i in used]
        some.columns = replace(self.columns.take(picked), key=keys.astype(float))
        return some

    def under(self, profile: Profile) -> Estimates:
        table = [(a.under(profile), b.under(profile), c.under(profile)) for a, b, c in self.raws]
        return estimate(self.columns, table, self.hardware, profile)


def groups_of(
    rows: Sequence[Row], piece_costs: CostFunction, cut_of: Callable[[Layout], Layout]
) -> tuple[list[RunGroup], dict[int, str]]:
    """All rows that can be predicted, in groups; and why the others cannot."""
    refused = {i: row.why for i, row in enumerate(rows) if row.case is None}
    alike: dict[Any, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        if row.case is not None:
            felt = replace(row.case.shape, name="", layers=1, batch=1, source="")
            alike[felt, row.case.sequence].append(i)
    kinds: dict[int, tuple[Layout, PieceKinds]] = {}
    for (shape, sequence), members in alike.items():
        by_cut: dict[Layout, list[int]] = defaultdict(list)
        for i in members:
            case = rows[i].case
            assert case is not None
            by_cut[_felt(cut_of(case.layout), rows[i].profile)].append(i)
        for cut, those in _costed(piece_costs, shape, sequence, by_cut, refused).items():
            kinds |= dict.fromkeys(by_cut[cut], (cut, those))
    joined: dict[Any, list[tuple[int, Row]]] = defaultdict(list)
    for i in sorted(kinds):
        row = rows[i]
        joined[id(row.hardware), row.profile.name, row.device].append((i, row))
    return [RunGroup(members, kinds) for members in joined.values()], refused


def _selective(row: Row) -> bool:
    return row.case is not None and row.case.layout.recompute == "selective"


def _felt(cut: Layout, profile: Profile) -> Layout:
    """The cut that is costed: where scores are kept, to be selective means to drop them alone."""
    return cut if profile.fused_attention else replace(cut, recompute="none")


def _costed(
    piece_costs: CostFunction, shape: Shape, sequence: int, cuts: Mapping[Layout, list[int]],
    refused: dict[int, str],
) -> dict[Layout, PieceKinds]:  # fmt: skip
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
