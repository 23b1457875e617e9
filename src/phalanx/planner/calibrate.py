"""Refits a profile's numbers on a user's runs: run folders, or timed layouts.

A run's metrics.jsonl has its layout and its step times. The caller supplies the
hardware: a measured machine or a catalogued cluster, as a `Hardware`.

A step is the length of the longest path through its program, and a path is a count of
operations. A fit moves the profile under the paths that it has met so far, simulates
all runs anew, and adds the paths that have become the longest, until none does.
"""

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..layout import ByKind, Layout, Shape, piece_layout
from ..layout.codec import decode
from ..layout.journal import read_journal
from ..program import Op, ops
from .case import Case
from .corrections import costed_as
from .device import MachineError, MachineFileError
from .hardware import Hardware
from .piece_price import PieceParts, parts_of
from .price import Priced
from .profile import FITTED, NUMBERS, SoftwareProfile
from .step import Choice, CostFunction, case_of, choice, longest

Item = TypeVar("Item")
# Seconds of the operations on one path through a run's program, under a profile.
LongestPath = Callable[[SoftwareProfile], float]
# Runs with a larger error (in log time) count as pathological and pull no further.
_CLIP = 0.4
# Strength with which numbers are held at their start, in units of one run.
_HELD = 0.5
_ROUNDS = 3  # simulations of all runs
_SMALL = 0.01  # step of a numerical derivative
# Deviations between kinds of runs, and between runs of one kind: medians over other families.
_APART, _OWN = 0.04, 0.05
_TAILS, _TURNS = 3, 20  # degrees of freedom; iterations until nothing moves
_FOLDS = 5  # folds in which many runs are left out, to see whether a fit helps
_ALONE = 8  # up to this many runs, each is left out by itself
LEAST = 3  # fewest runs for such a test
_WORTH = 0.8  # more is moved if the remaining error falls below this share
# Numbers are moved if the error of left-out runs falls below this share. In 30 draws of
# five runs from a table of layouts, gains of up to 7 % made other runs worse in three
# draws and better in two.
_GAIN = 0.9
_MOVES = 40
# The computations in each operation, by the names of `PieceTimes.computed`.
_COMPUTED = {
    **{
        kind: (kind,)
        for kind in (ops.FORWARD, ops.INPUT_GRADIENT, ops.WEIGHT_GRADIENT)
    },
    ops.BACKWARD: (ops.INPUT_GRADIENT, ops.WEIGHT_GRADIENT),
    ops.RECOMPUTE: (ops.RECOMPUTE,),
    ops.RECOMPUTE_PART: (ops.RECOMPUTE,),
}


@dataclass(frozen=True)
class Measured:
    """A layout of a model that was run, and its seconds per step; 0 if not measured."""

    name: str
    case: Case
    seconds: float = 0.0


@dataclass(frozen=True)
class CostedRun:
    """A run on some hardware, costed once for simulations under many profiles.

    Costs use the facts of its software.
    """

    run: Measured
    hardware: Hardware
    facts: SoftwareProfile
    parts: ByKind[PieceParts]

    @property
    def measured(self) -> float:
        return self.run.seconds

    def priced(self, numbers: SoftwareProfile) -> Priced:
        profile = replace(
            self.facts, **{name: getattr(numbers, name) for name in NUMBERS}
        )
        piped = self.run.case.layout.pp > 1
        times = self.parts.map(lambda part: part.under(profile, piped))
        return Priced(self.run.case, times, self.hardware, profile)

    def choice(self, numbers: SoftwareProfile) -> Choice:
        return choice(self.priced(numbers))

    def step(self, numbers: SoftwareProfile) -> float:
        return self.choice(numbers).step

    def longest(self, numbers: SoftwareProfile) -> LongestPath:
        """The longest path of its program, as a function of the profile."""
        # If ranks share cores, no path is independent of the others.
        if self.hardware.cores:
            return self.step
        priced = self.priced(numbers)
        # A block is several pieces of the program.
        if self.run.case.layout.parts_apart:
            return _PricedPath(self, _by_piece(longest(priced)))
        costs = priced.costs()
        # by kind of piece and of computation
        often: dict[tuple[int, str], float] = defaultdict(float)
        rest = 0.0  # messages and updates, which depend on no fitted number
        for (rank, op), count in longest(priced).items():
            rest += count * costs.of(op, rank)
            for kind in _COMPUTED.get(op.kind, ()):
                often[self.parts.kinds[op.piece], kind] += count
        # So far `rest` is 0: subtract the path's computation from the whole
        # path.
        path = _ComputedPath(self, dict(often), 0.0)
        return replace(path, rest=rest - path(numbers))


@dataclass(frozen=True)
class _ComputedPath:
    """Seconds of a path through a program: its computation by numbers, and the rest."""

    run: CostedRun
    often: Mapping[tuple[int, str], float]
    rest: float

    def __call__(self, numbers: SoftwareProfile) -> float:
        times = [t.computed for t in self.run.priced(numbers).times.values]
        computed = (
            count * times[which][kind]
            for (which, kind), count in self.often.items()
        )
        return self.rest + math.fsum(computed)


@dataclass(frozen=True)
class _PricedPath:
    """Seconds of a path through a program, all of its operations priced anew."""

    run: CostedRun
    often: Mapping[tuple[int, Op], float]

    def __call__(self, numbers: SoftwareProfile) -> float:
        costs = self.run.priced(numbers).costs()
        return math.fsum(
            count * costs.of(op, rank)
            for (rank, op), count in self.often.items()
        )


def _by_piece(
    path: Mapping[tuple[int, Op], float],
) -> dict[tuple[int, Op], float]:
    """A path with its operations of one kind, piece and rank counted as one."""
    # All microbatches of a piece take the same time.
    first: dict[tuple[int, str, int], tuple[int, Op]] = {}
    often: dict[tuple[int, Op], float] = defaultdict(float)
    for (rank, op), count in path.items():
        alike = first.setdefault((rank, op.kind, op.piece), (rank, op))
        often[alike] += count
    return dict(often)


def costed(
    runs: Sequence[Measured],
    hardware: Hardware,
    costs: CostFunction,
    profile: SoftwareProfile,
) -> list[CostedRun]:
    """Cost runs of one model and sequence, as the profile's software runs them."""
    first, found = runs[0].case, []
    cuts = [piece_layout(run.case.layout) for run in runs]
    names = [costed_as(cut, profile) for cut in cuts]
    made = costs(first.shape, names, sequence=first.sequence)
    for run, cut, name in zip(runs, cuts, names, strict=True):
        parts = parts_of(made[name], run.case, hardware, profile, cut)
        found.append(CostedRun(run, hardware, profile, parts))
    return found


def fit(
    base: SoftwareProfile,
    runs: Sequence[CostedRun],
    *,
    weights: Sequence[float] = (),
    moves: int = 80,
    clip: float = _CLIP,
    met: dict[int, list[LongestPath]] | None = None,
    each: Callable[..., Iterable[LongestPath]] = map,
    physics: float = 0.0,
) -> SoftwareProfile:
    """Fit the profile's numbers to the measured steps: least mean absolute log error.

    Numbers are held where `base` has them, the more strongly the fewer runs there are.
    `weights` of the runs default to one. `moves` is the number of moves of the search
    in a round. `clip` is the largest error that still pulls. `met` holds the paths of
    each run that earlier fits met: with it, nothing is simulated where paths are known.
    `each` maps simulations over runs. `physics` holds `traffic` at 1 and `host` at 2:
    software of many kinds moves what it was costed with, and takes 10 us to start an
    operation, which only shows in runs of small models.
    """
    known = [
        (run, weight)
        for run, weight in zip(runs, weights or [1.0] * len(runs), strict=True)
        if weight > 0 and run.measured > 0
    ]
    if not known:
        return base
    # Each number is searched in units of its span: 0 is the low end, 1 the
    # high one.
    low = [span[0] for span in FITTED.values()]
    wide = [span[1] - span[0] for span in FITTED.values()]
    rest = [
        (getattr(base, n) - a) / b
        for n, a, b in zip(FITTED, low, wide, strict=True)
    ]

    def at(x: Sequence[float]) -> SoftwareProfile:
        numbers = {
            name: round(a + b * min(max(each, 0.0), 1.0), 3)
            for name, a, b, each in zip(FITTED, low, wide, x, strict=True)
        }
        return replace(base, **numbers)  # type: ignore[arg-type]

    met = {} if met is None else met
    paths = [met.setdefault(id(run), []) for run, _ in known]
    held = _HELD / len(known)

    def loss(x: Sequence[float]) -> float:
        # The mean clipped error of the runs, in log time.
        profile, total, count = at(x), 0.0, 0.0
        for (run, weight), those in zip(known, paths, strict=True):
            step = max(path(profile) for path in those)
            total += weight * min(abs(math.log(step / run.measured)), clip)
            count += weight
        # Penalties keep numbers inside their spans and near their start.
        outside = sum(max(each - 1, 0.0) + max(-each, 0.0) for each in x)
        apart = math.fsum(
            (a - b) * (a - b) for a, b in zip(x, rest, strict=True)
        )
        usual = physics * (
            (profile.traffic - 1) ** 2 + (profile.host / 2 - 1) ** 2
        )
        return total / count + outside + held * apart + usual

    # Begin inside the spans, so that the simplex can move either way.
    best = [min(max(each, 0.05), 0.95) for each in rest]
    simulated = not all(paths)
    for number in range(_ROUNDS if simulated else 1):
        if simulated:
            # A step is the longest of its known paths, so far a lower bound:
            # add each run's longest here.
            all_runs, here = [run for run, _ in known], [at(best)] * len(known)
            for path, those in zip(
                each(CostedRun.longest, all_runs, here), paths, strict=True
            ):
                those.append(path)
        # Later rounds begin near the answer, with a smaller simplex.
        best = _simplex(loss, best, 0.2 if not number else 0.1, moves)
    return at(best)


def _simplex(
    f: Callable[[Sequence[float]], float],
    start: list[float],
    step: float,
    moves: int,
) -> list[float]:
    """The lowest point found by Nelder and Mead's simplex search (1965) from a start."""

    def at(x: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        return f(x.tolist()), x

    first = np.array(start)
    # One more vertex for each number, moved away from the upper end of its
    # span.
    moves_out = step * np.where(
        first + step <= 1, np.eye(len(start)), -np.eye(len(start))
    )
    known = [at(first), *(at(first + move) for move in moves_out)]
    for _ in range(moves):
        known.sort(key=operator.itemgetter(0))
        if known[-1][0] - known[0][0] < 1e-5:
            break
        # Reflect the worst point through the centre of the others.
        most, worst = known.pop()
        centre = np.mean([x for _, x in known], axis=0)
        new = at(centre + (centre - worst))
        # The best so far: try twice as far in this direction.
        if new[0] < known[0][0]:
            new = min(
                at(centre + 2 * (centre - worst)),
                new,
                key=operator.itemgetter(0),
            )
        # No better than the second worst: contract, outside or inside the
        # reflected point.
        elif new[0] >= known[-1][0]:
            limit = min(new[0], most)
            new = at(
                centre + (0.5 if new[0] < most else -0.5) * (centre - worst)
            )
            if new[0] >= limit:  # shrink all points towards the best
                best = known[0][1]
                known = [
                    known[0],
                    *(at(best + 0.5 * (x - best)) for _, x in known[1:]),
                ]
                new = at(best + 0.5 * (worst - best))
        known.append(new)
    return [float(x) for x in min(known, key=operator.itemgetter(0))[1]]


@dataclass(frozen=True)
class Calibration:
    """A calibrated profile, and the errors of its runs.

    An error is the logarithm of measured over predicted step: `before` calibration, and
    `left_out`, calibrated without the run. `tried` has the errors of left-out runs after
    the best calibration; if it was `declined` the profile stays as it was, so `left_out`
    is `before`.
    """

    like: Callable[[CostedRun | None], SoftwareProfile]
    before: tuple[float, ...] = ()
    left_out: tuple[float, ...] = ()
    tried: tuple[float, ...] = ()
    declined: bool = False


def calibrated(
    base: SoftwareProfile, runs: Sequence[CostedRun]
) -> Callable[[CostedRun | None], SoftwareProfile]:
    """Calibrate a profile on runs; returns a function from a run to its profile.

    If calibration hardly helps left-out runs, the profile stays as it was.
    """
    return calibration(base, runs).like


def calibration(
    base: SoftwareProfile, runs: Sequence[CostedRun]
) -> Calibration:
    """Calibrate a profile: computing is slower or faster by one factor.

    With three runs or more each number may move by itself, if that helps runs that are
    left out in turn. Nothing moves if even the best way leaves such runs nearly as far
    off: a gain of a few percent among five runs is chance, and is a loss among others.
    """
    timed = [run for run in runs if run.measured > 0]
    # Without a fit yet, each run's longest path under the start profile stands
    # for its step.
    paths = {id(run): run.longest(base) for run in timed}
    met: dict[int, list[LongestPath]] = {}

    def slower(
        some: Sequence[CostedRun],
    ) -> Callable[[CostedRun | None], SoftwareProfile]:
        factor = _slower(base, some, [paths[id(run)] for run in some])
        return lambda like: replace(
            base, slower=round(base.slower * factor(like), 4)
        )

    def fitted(
        some: Sequence[CostedRun],
    ) -> Callable[[CostedRun | None], SoftwareProfile]:
        # A user's own run is never clipped: on a machine file that is twice too fast,
        # all are far off.
        found = fit(
            slower(some)(None), some, clip=math.inf, moves=_MOVES, met=met
        )
        return lambda like: found

    def off(run: CostedRun, numbers: SoftwareProfile) -> float:
        return math.log(run.measured / paths[id(run)](numbers))

    def left_out(
        way: Callable[..., Callable[[CostedRun | None], SoftwareProfile]],
    ) -> tuple[float, ...]:
        """Each run's error after a fit to the others, or to 4/5 if there are many."""
        # Leave-one-out, or five folds where each run would take too many fits.
        count = len(timed) if len(timed) <= _ALONE else _FOLDS
        found = dict[int, float]()
        for fold in range(count):
            moved = way(
                [run for n, run in enumerate(timed) if n % count != fold]
            )
            found |= {
                n: off(timed[n], moved(timed[n]))
                for n in range(fold, len(timed), count)
            }
        return tuple(found[n] for n in range(len(timed)))

    before = tuple(off(run, base) for run in timed)
    # One run cannot be predicted from others.
    if len(timed) < 2:
        return Calibration(slower(timed), before)
    way, tried = slower, left_out(slower)
    if len(timed) >= LEAST:
        more = left_out(fitted)
        # An improvement must show in most runs, not only in one outlier.
        better = [
            middle([abs(x) for x in more])
            < _WORTH * middle([abs(x) for x in tried])
            for middle in (fmean, median)
        ]
        if all(better):
            way, tried = fitted, more
    error_before = fmean(abs(x) for x in before)
    if fmean(abs(x) for x in tried) > _GAIN * error_before:
        return Calibration(lambda like: base, before, before, tried, True)
    return Calibration(way(timed), before, tried, tried)


def kind(run: CostedRun) -> tuple[Any, ...]:
    """A run's device, software and model, which it may share with others."""
    shape, hardware = run.run.case.shape, run.hardware
    device = hardware.memory, *sorted(hardware.peak.items())
    return device, run.facts.name, (shape.layers, shape.hidden, shape.total)


def _slower(
    base: SoftwareProfile,
    runs: Sequence[CostedRun],
    paths: Sequence[LongestPath],
) -> Callable[[CostedRun | None], float]:
    """The posterior mean of the slowdown of computing, for runs like a given one.

    Its logarithm is a sum of a common term and of terms for device, software and model,
    each with mean 0, and each run adds its own error. All have the long tails of
    Student's distribution, because a machine file or a run may be wrong by half.
    """
    # Without runs nothing is known: no factor.
    if not runs:
        return lambda like: 1.0
    kinds, steps = [kind(run) for run in runs], [path(base) for path in paths]
    # The elasticity of each path: the growth of its log time with that of
    # computing.
    more = replace(base, slower=base.slower * math.exp(_SMALL))
    part = np.array(
        [
            math.log(p(more) / s) / _SMALL
            for p, s in zip(paths, steps, strict=True)
        ]
    )
    off = np.array(
        [
            math.log(run.measured / s)
            for run, s in zip(runs, steps, strict=True)
        ]
    )

    # Prior covariance: one variance in common, and one for each of device,
    # software and model shared.
    def alike(own: tuple[Any, ...]) -> NDArray[np.float64]:
        shared = [1 + sum(map(operator.eq, own, other)) for other in kinds]
        return np.asarray(_APART**2 * np.array(shared) * part)

    between = part[:, None] * np.array([alike(own) for own in kinds])
    # Student's distributions as normal ones whose variances are found by
    # reweighting.
    rest, wider = off - np.median(off), 1.0
    for _ in range(_TURNS):
        noise = _OWN**2 * (_TAILS + (rest / _OWN) ** 2) / (_TAILS + 1)
        # Kriging weights: the posterior mean is the prior's covariance times
        # these.
        weights = np.linalg.solve(wider * between + np.diag(noise), off)
        rest = off - wider * between @ weights
        far = wider**2 * float(weights @ between @ weights)
        wider = (_TAILS + far) / (_TAILS + len(set(kinds)))
    # A run of unknown kind has the mean of the known ones.
    common = float(np.mean([wider * alike(own) @ weights for own in kinds]))
    return lambda like: math.exp(
        float(wider * alike(kind(like)) @ weights) if like else common
    )


def spread_over(runs: Sequence[Item], count: int) -> list[Item]:
    """A sample of `count` runs, spread evenly; all if `count` is 0 or too large."""
    if not 0 < count < len(runs):
        return list(runs)
    return [
        runs[round(i * (len(runs) - 1) / max(count - 1, 1))]
        for i in range(count)
    ]


# ---- run folders


def read_run(folder: Path) -> Measured:
    """Read a run of `phalanx train`: its layout, and the median of its step times.

    The first line is left out, as the process warms up in it.
    """
    file = folder / "metrics.jsonl"
    if not file.is_file():
        raise MachineError(
            f"cannot read the run {file}: there is no such file."
        )
    records = read_journal(file)
    begins = [
        i for i, record in enumerate(records) if record["event"] == "start"
    ]
    if not begins:
        raise MachineError(
            f"{file} has no start record: it is not a run of phalanx train."
        )
    # A run may have been resumed, perhaps in another layout. Use its last stretch that
    # is long enough: a resumption with nothing left to do has no times.
    ends = [*begins[1:], len(records)]

    def timed(some: Sequence[Any]) -> list[Any]:
        return [
            r for r in some if r["event"] == "step" and r.get("seconds", 0) > 0
        ]

    stretches = [
        (records[i], timed(records[i:end]))
        for i, end in zip(begins, ends, strict=True)
    ]
    start, steps = next(
        (s for s in reversed(stretches) if len(s[1]) > 1), stretches[-1]
    )
    if len(steps) < 2:
        raise MachineError(
            f"{file} has {len(steps)} lines of steps since its last start; at least 2 are needed,"
            " since the first warms up. Run longer, or with metrics.every=1."
        )
    if start.get("own"):
        raise MachineError(
            f"{file} is of a model of your own, {start['own']}. Calibrate on runs of built-in models:"
            " what a profile costs is not the model's."
        )
    model, layout = start.get("model"), Layout.parse(str(start["layout"]))
    if not isinstance(model, dict):
        raise MachineError(f"{file} does not give the sizes of its model.")
    shape = decode(Shape, model, f"{file}, model", MachineFileError)
    # A record stands for several steps and counts as often. The first one
    # warmed up.
    seconds = median(
        float(r["seconds"]) for r in steps[1:] for _ in range(int(r["steps"]))
    )
    sequence = int(start.get("sequence", shape.sequence))
    return Measured(
        str(folder), case_of(shape, layout, sequence=sequence), seconds
    )


def by_model(trials: Sequence[Measured]) -> list[list[Measured]]:
    """The runs of each model, sequence, precision and number of ranks."""
    found: dict[Any, list[Measured]] = defaultdict(list)
    for t in trials:
        found[t.case.shape, t.case.sequence, t.case.layout.ranks].append(t)
    return list(found.values())
