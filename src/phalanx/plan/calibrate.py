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
from statistics import fmean, median
from typing import Any, TypeVar

from ..layout import Layout, Shape, piece_layout
from ..layout.codec import decode
from ..layout.journal import read_journal
from ..program import ops
from .device import MachineError, MachineFileError
from .fit import Path as LongestPath
from .fit import TimedRun, fit
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
    computed,
    costs_of,
    kind_of,
    longest,
    parts_of,
)

Item = TypeVar("Item")
_BIAS_STEP, _BIAS_STEPS = 0.025, 28  # of the factor's logarithm: from a half to twice
_PRIOR = 0.25  # runs that one guess of no bias counts as
_FOLDS = 5  # in which runs are left out to see whether more numbers help
_LEAST = 3  # runs with which that can be seen
_WORTH = 0.8  # of the error that is left before, if more is moved
_MOVES = 40


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
        return choice(self.run.case, self.three(profile), self.hardware, profile)

    def step(self, profile: SoftwareProfile) -> float:
        return self.choice(profile).step

    def longest(self, profile: SoftwareProfile) -> LongestPath:
        """The longest path of its program, as a function of the profile."""
        # Ranks that share cores have no path that is independent of the others.
        if self.hardware.cores or self.run.case.layout.ep > 1:
            return self.step
        case = self.run.case
        three, last = self.three(profile), case.shape.pieces - 1
        costs = costs_of(case, three, self.hardware, profile)
        often: dict[tuple[int, str], float] = defaultdict(float)  # of the three, what is computed
        rest = 0.0  # messages and updates, which no fitted number changes
        for (rank, op), count in longest(case, three, self.hardware, profile).items():
            rest += count * costs.of(op, rank)
            for kind in _COMPUTED.get(op.kind, ()):
                often[kind_of(op.piece, last), kind] += count
        return _ComputedPath(self, dict(often), rest - _seconds(often, three))

    def three(self, profile: SoftwareProfile) -> Three:
        piped = self.run.case.layout.pp > 1
        embed, block, head = (part.under(profile, piped) for part in self.parts)
        return embed, block, head


@dataclass(frozen=True)
class _ComputedPath:
    """Seconds of a path through a run's program: what is computed on it, under any numbers, and the
    rest."""

    run: CostedRun
    often: Mapping[tuple[int, str], float]
    rest: float

    def __call__(self, profile: SoftwareProfile) -> float:
        return self.rest + _seconds(self.often, self.run.three(profile))


# What each operation computes, as `computed` names it.
_COMPUTED = {
    **{kind: (kind,) for kind in (ops.FORWARD, ops.INPUT_GRADIENT, ops.WEIGHT_GRADIENT)},
    ops.BACKWARD: (ops.INPUT_GRADIENT, ops.WEIGHT_GRADIENT),
    ops.RECOMPUTE: (ops.RECOMPUTE,),
    ops.RECOMPUTE_PART: (ops.RECOMPUTE,),
}


def _seconds(often: Mapping[tuple[int, str], float], three: Three) -> float:
    times = [computed(t) for t in three]
    return math.fsum(count * times[which][kind] for (which, kind), count in often.items())


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


def calibrated(base: SoftwareProfile, runs: Sequence[TimedRun]) -> SoftwareProfile:
    """The profile whose fitted numbers come nearest to the runs: as they are, all of computing slower
    or faster by one factor, or each number by itself. The more is moved, the more it has to help:
    with runs that are left out in turn. What few runs do not decide stays near where it is."""
    timed = [run for run in runs if run.measured > 0]
    if not timed:
        return base
    paths: dict[int, LongestPath] = {id(run): run.longest(base) for run in timed}
    met: dict[int, list[LongestPath]] = {}

    def biased(some: Sequence[TimedRun]) -> SoftwareProfile:
        return _biased(base, [(paths[id(run)], run.measured) for run in some])

    def fitted(some: Sequence[TimedRun]) -> SoftwareProfile:
        # No run of one's own is clipped: on a machine file that is twice too fast all are far off.
        return fit(biased(some), some, clip=math.inf, moves=_MOVES, met=met)

    if len(timed) < _LEAST:
        return biased(timed)
    folds = range(min(_FOLDS, len(timed)))
    best, least = base, _off(base, timed, paths)
    for way in (biased, fitted):
        off: list[float] = []
        for fold in folds:
            moved = way([run for n, run in enumerate(timed) if n % len(folds) != fold])
            off += _off(moved, timed[fold :: len(folds)], paths)
        # Of most runs, and not of one that is far off.
        if all(middle(off) < _WORTH * middle(least) for middle in (fmean, median)):
            best, least = way(timed), off
    return best


def _off(
    profile: SoftwareProfile, runs: Sequence[TimedRun], paths: Mapping[int, LongestPath]
) -> list[float]:
    """Relative errors, as logarithms."""
    return [abs(math.log(paths[id(run)](profile) / run.measured)) for run in runs]


def _biased(base: SoftwareProfile, known: Sequence[tuple[LongestPath, float]]) -> SoftwareProfile:
    """With the factor of computing that comes nearest, nearer to none the fewer runs say so."""
    factors = [math.exp(_BIAS_STEP * k) for k in range(-_BIAS_STEPS, _BIAS_STEPS + 1)]

    def off(factor: float) -> float:
        profile = _slower(base, factor)
        return math.fsum(abs(math.log(path(profile) / seconds)) for path, seconds in known)

    found = min(sorted(factors, key=lambda factor: abs(math.log(factor))), key=off)
    return _slower(base, found ** (len(known) / (len(known) + _PRIOR)))


def _slower(base: SoftwareProfile, factor: float) -> SoftwareProfile:
    """The profile with products, memory traffic and the host slower by one factor."""
    return replace(
        base, speed=base.speed / factor, traffic=base.traffic * factor, host=base.host * factor
    )


def spread_over(runs: Sequence[Item], count: int) -> list[Item]:
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
