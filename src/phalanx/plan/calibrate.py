"""The numbers of a profile refitted on runs of one's own: run folders, or any timed layouts.

A run tells its layout and its step times in metrics.jsonl. What it ran on is the caller's to say:
a measured machine or a catalogued cluster, as a `Hardware`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from ..layout import Layout, Shape, piece_layout
from ..layout.codec import decode
from ..layout.journal import read_journal
from .device import MachineError, MachineFileError
from .fit import Path as LongestPath
from .fit import fit
from .hardware import Hardware
from .price import PieceParts
from .profile import SoftwareProfile
from .step import (
    Case,
    Choice,
    CostFunction,
    Three,
    case_of,
    choice,
    costs_of,
    longest,
    parts_of,
)

_BIAS_STEP, _BIAS_STEPS = 0.05, 14  # of the factor's logarithm: from a half to twice


@dataclass(frozen=True)
class Measured:
    """A layout of a model that was run, and its seconds a step; 0 where it has not been run."""

    name: str
    case: Case
    seconds: float = 0.0


@dataclass(frozen=True)
class CostedRun:
    """A run on some hardware, costed once, to be simulated under many profiles."""

    run: Measured
    hardware: Hardware
    parts: tuple[PieceParts, PieceParts, PieceParts]  # embedding, block, head

    @property
    def measured(self) -> float:
        return self.run.seconds

    def choice(self, profile: SoftwareProfile) -> Choice:
        """What its step takes and holds."""
        return choice(self.run.case, self._three(profile), self.hardware, profile)

    def step(self, profile: SoftwareProfile) -> float:
        return self.choice(profile).step

    def longest(self, profile: SoftwareProfile) -> LongestPath:
        """The longest path of its program, as a function of the profile."""
        if self.hardware.cores:  # ranks share cores: no path is independent of the others
            return self.step
        case = self.run.case
        counts = longest(case, self._three(profile), self.hardware, profile)

        def seconds(other: SoftwareProfile) -> float:
            costs = costs_of(case, self._three(other), self.hardware, other)
            return sum(count * costs.of(op, rank) for (rank, op), count in counts.items())

        return seconds

    def _three(self, profile: SoftwareProfile) -> Three:
        slower = profile.pipe_host if self.run.case.layout.pp > 1 else 1.0
        embed, block, head = (part.under(profile, slower) for part in self.parts)
        return embed, block, head


def costed(
    runs: Sequence[Measured], hardware: Hardware, costs: CostFunction, profile: SoftwareProfile
) -> list[CostedRun]:
    """Runs of one model and sequence, as software with the profile's facts runs them."""
    first = runs[0].case
    cuts = {run.name: piece_layout(run.case.layout) for run in runs}
    made = costs(first.shape, list(cuts.values()), sequence=first.sequence)
    found = []
    for run in runs:
        cut, kinds = cuts[run.name], made[cuts[run.name]]
        found.append(CostedRun(run, hardware, parts_of(kinds, run.case, hardware, profile, cut)))
    return found


def calibrated(base: SoftwareProfile, runs: Sequence[CostedRun]) -> SoftwareProfile:
    """The profile whose fitted numbers come nearest to the runs: first all of computing slower or
    faster by one factor, then each number by itself. What few runs do not decide stays near there."""
    timed = [run for run in runs if run.measured > 0]
    if not timed:
        return base
    # No run of one's own is clipped: on a machine file that is twice too fast all of them are far off.
    return fit(_biased(base, timed), timed, clip=math.inf)


def _biased(base: SoftwareProfile, runs: Sequence[CostedRun]) -> SoftwareProfile:
    paths = [(run.longest(base), run.measured) for run in runs]
    factors = [math.exp(_BIAS_STEP * k) for k in range(-_BIAS_STEPS, _BIAS_STEPS + 1)]

    def off(factor: float) -> float:
        profile = _slower(base, factor)
        return math.fsum(abs(math.log(path(profile) / seconds)) for path, seconds in paths)

    return _slower(base, min(sorted(factors, key=lambda factor: abs(math.log(factor))), key=off))


def _slower(base: SoftwareProfile, factor: float) -> SoftwareProfile:
    """The profile with products, memory traffic and the host slower by one factor."""
    return replace(
        base, speed=base.speed / factor, traffic=base.traffic * factor, host=base.host * factor
    )


def spread_over(runs: Sequence[CostedRun], count: int) -> list[CostedRun]:
    """So many of the runs, evenly over their order; all where `count` is 0 or there are no more."""
    if not 0 < count < len(runs):
        return list(runs)
    return [runs[round(i * (len(runs) - 1) / max(count - 1, 1))] for i in range(count)]


# ---- run folders


def read_run(folder: Path) -> Measured:
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
    return Measured(str(folder), case_of(shape, layout, sequence=sequence), seconds)


def _steps(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [r for r in records if r["event"] == "step" and r.get("seconds", 0) > 0]


def _shape(start: Mapping[str, Any], file: Path) -> Shape:
    model = start.get("model")
    if not isinstance(model, dict):
        raise MachineError(f"{file} does not tell the sizes of its model.")
    return decode(Shape, model, f"{file}, model", MachineFileError)


def by_model(trials: Sequence[Measured]) -> list[list[Measured]]:
    """The runs of each model, sequence, precision and number of ranks."""
    found: dict[Any, list[Measured]] = defaultdict(list)
    for t in trials:
        found[t.case.shape, t.case.sequence, t.case.layout.ranks].append(t)
    return list(found.values())
