"""Predicts published runs: costs, prices and simulates rows of tables."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..layout import piece_layout
from ..program import PieceKinds
from .calibrate import CostedRun, Measured
from .corrections import costed_as
from .hardware import PredictionError
from .piece_price import parts_of
from .plausible import refuse_too_long
from .profile import SoftwareProfile
from .step import Choice, CostFunction
from .table import PublishedRow

# Families whose large runs are pathological: the most devices of a run that counts, and
# the share of memory above which the device's allocator thrashes.
MOST = {"ultrascale": 64}
FULL = 0.8


@dataclass(frozen=True)
class PublishedRun(CostedRun):
    """A costed row of a table."""

    row: PublishedRow

    @property
    def counts(self) -> bool:
        """True if the run is representative of its software.

        It completed, and neither its memory nor its network was exhausted.
        """
        row = self.row
        if row.step <= 0 or row.ranks > MOST.get(row.family, row.ranks):
            return False
        return (
            row.memory < FULL * self.hardware.memory or row.family not in MOST
        )


def logged(choice: Choice, profile: SoftwareProfile) -> float:
    """Bytes of the rank whose memory the profile's software logs.

    torch's own statistics lack the driver's context.
    """
    found = choice.bytes
    if profile.logs_first_rank and choice.stages:
        found = sum(choice.stages[0].values())
    return found if profile.logs_context else found - profile.context


def at_line(row: PublishedRow, error: Exception) -> str:
    """Explain why a row is left out, in one line with its place."""
    return f"line {row.line}: {' '.join(str(error).split())}"


def predict(run: PublishedRun, numbers: SoftwareProfile) -> Choice:
    """The prediction of a row with a profile's numbers; raises if it is implausible."""
    found = run.choice(numbers)
    refuse_too_long(found.case, run.hardware, found.parts)
    return found


def why_not(run: PublishedRun, numbers: SoftwareProfile) -> str:
    """Explain why a row has no plausible prediction; empty if it has one."""
    try:
        predict(run, numbers)
    except (ValueError, PredictionError) as error:
        return at_line(run.row, error)
    return ""


def runs_of(
    rows: Sequence[PublishedRow], piece_costs: CostFunction
) -> tuple[list[PublishedRun], dict[int, str]]:
    """The rows that can be predicted, and the reason for each of the others."""
    refused, found = {}, dict[int, PublishedRun]()
    known: dict[Any, PieceKinds] = {}
    for i, row in enumerate(rows):
        case, hardware = row.case, row.hardware
        if case is None or hardware is None:
            refused[i] = row.why
            continue
        # A name or a source does not change a cost: rows of one model share
        # it.
        shape = replace(case.shape, name="", batch=1, source="")
        cut = piece_layout(case.layout)
        name = costed_as(cut, row.profile)
        key = shape, case.sequence, name
        try:
            known[key] = (
                known.get(key)
                or piece_costs(shape, [name], sequence=case.sequence)[name]
            )
            parts = parts_of(known[key], case, hardware, row.profile, cut)
        # A row that cannot be priced is left out with its reason; the others
        # go on.
        except (ValueError, PredictionError) as error:
            refused[i] = at_line(row, error)
            continue
        run = Measured(row.name, case, row.step)
        found[i] = PublishedRun(run, hardware, row.profile, parts, row)
    return list(found.values()), refused
