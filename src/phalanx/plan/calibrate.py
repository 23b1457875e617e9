"""The six numbers of a profile refitted on runs of one's own: run folders, or any timed layouts.

A run tells its layout and its step times in metrics.jsonl. What it ran on is the caller's to say:
a measured machine or a catalogued cluster, as a `Hardware`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ..layout import Layout, Shape
from ..layout.codec import decode
from ..layout.journal import read_journal
from .columns import Case, case_of, columns_of
from .device import MachineError, MachineFileError
from .estimate import Estimates, estimate
from .fit import fit
from .hardware import Hardware
from .kinds import CostFunction, PieceKinds
from .local import crowded
from .price import RawTrio, raw_trio
from .profile import Profile

__all__ = ["Timed", "Trial", "by_model", "calibrated", "read_run"]


@dataclass(frozen=True)
class Trial:
    """A layout of a model that was run, and its seconds a step; 0 where it has not been run."""

    name: str
    case: Case
    seconds: float = 0.0


class Timed:
    """Runs of one model on one hardware, costed once, to be estimated under many profiles."""

    def __init__(
        self,
        trials: Sequence[Trial],
        hardware: Hardware,
        piece_costs: CostFunction,
        cut_of: Callable[[Layout], Layout],
    ) -> None:
        self.trials, self.hardware = tuple(trials), hardware
        first = self.trials[0].case
        cuts = {t.name: cut_of(t.case.layout) for t in self.trials}
        pieces = piece_costs(first.shape, list(cuts.values()), sequence=first.sequence)
        self.raws: list[tuple[RawTrio, ...]] = []
        known: dict[Any, int] = {}
        keys = []
        for trial in self.trials:
            cut, rows = cuts[trial.name], trial.case.rows
            if (cut, rows) not in known:
                known[cut, rows] = len(self.raws)
                self.raws.append(_raws(pieces[cut], cut, rows, hardware))
            keys.append(known[cut, rows])
        self.columns = columns_of([t.case for t in self.trials], keys)
        self.measured = np.array([t.seconds for t in self.trials])

    def under(self, profile: Profile) -> Estimates:
        table = [(a.under(profile), b.under(profile), c.under(profile)) for a, b, c in self.raws]
        found = estimate(self.columns, table, self.hardware, profile)
        return crowded(found, self.columns, self.hardware)


def _raws(pieces: PieceKinds, cut: Layout, rows: float, hardware: Hardware) -> tuple[RawTrio, ...]:
    three = (pieces.embed(rows), pieces.block(rows), pieces.head(rows))
    return tuple(raw_trio(w, hardware, Profile(), cut, cut.precision) for w in three)


def calibrated(base: Profile, groups: Sequence[Timed]) -> Profile:
    """The profile whose six numbers come nearest to the runs. Few runs tell few of them: what they
    do not tell stays near where a new profile has it."""
    # No run of one's own is clipped: on a machine file that is twice too fast all of them are far off.
    return fit(base, groups, clip=math.inf)


# ---- run folders


def read_run(folder: Path) -> Trial:
    """A run of `phalanx train`: its layout, and the median of its step times without the first
    line, in which the process warms up."""
    file = folder / "metrics.jsonl"
    if not file.is_file():
        raise MachineError(f"cannot read the run {file}: there is no such file.")
    records = read_journal(file)
    begins = [i for i, record in enumerate(records) if record["event"] == "start"]
    if not begins:
        raise MachineError(f"{file} tells of no start: it is not a run of phalanx train.")
    # A run that was resumed, perhaps in another layout, is told by its last stretch that is long
    # enough: a resumption that had nothing left to do tells nothing.
    ends = [*begins[1:], len(records)]
    stretches = [(records[i], _steps(records[i:end])) for i, end in zip(begins, ends, strict=True)]
    start, told = next((s for s in reversed(stretches) if len(s[1]) > 1), stretches[-1])
    if len(told) < 2:
        raise MachineError(
            f"{file} has {len(told)} lines of steps since its last start; 2 are the least,"
            " since the first warms up. Run longer, or with metrics.every=1."
        )
    if start.get("own"):
        raise MachineError(
            f"{file} is of a model of your own, {start['own']}. Calibrate on runs of built-in models:"
            " what a profile costs is not the model's."
        )
    shape, layout = _shape(start, file), Layout.parse(str(start["layout"]))
    seconds = median(float(r["seconds"]) for r in told[1:] for _ in range(int(r["steps"])))
    sequence = int(start.get("sequence", shape.sequence))
    return Trial(str(folder), case_of(shape, layout, sequence=sequence), seconds)


def _steps(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [r for r in records if r["event"] == "step" and r.get("seconds", 0) > 0]


def _shape(start: Mapping[str, Any], file: Path) -> Shape:
    model = start.get("model")
    if not isinstance(model, dict):
        raise MachineError(f"{file} does not tell the sizes of its model.")
    return decode(Shape, model, f"{file}, model", MachineFileError)


def by_model(trials: Sequence[Trial]) -> list[list[Trial]]:
    """The runs of each model, sequence, precision and number of ranks."""
    found: dict[Any, list[Trial]] = defaultdict(list)
    for t in trials:
        found[t.case.shape, t.case.sequence, t.case.layout.ranks].append(t)
    return list(found.values())
