"""Scores predictions against published runs, family by family: errors, order, regret, memory.

A family is a set of related sources. Families are never pooled, because their conventions, noise
and software differ. Each is predicted with numbers fitted on all others (held out), with those of
its own profile (fitted), and after five of its own rows (calibrated).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..program.program import uncollected
from .calibrate import calibrated, kind, spread_over
from .case import Case
from .hardware import Hardware, PredictionError
from .profile import SoftwareProfile
from .published import MOST, PublishedRun, at_line, logged, predict, why_not
from .step import LIMIT
from .table import PublishedRow

# The 90th percentile of the distance between repeats of one configuration. Pairs that
# are closer have no order. It is computed from a table's own repeats if it has enough
# pairs of them.
NOISE = {"llm": 0.015, "ultrascale": 0.12}
_USUAL_NOISE = 0.02
_REPEATS = 10
_MISS = 1.0  # regret of a rule's pick that ran out of memory


@dataclass(frozen=True)
class StepErrors:
    """Relative errors of step time."""

    median: float
    mean: float
    p80: float
    p90: float
    within_5: float
    within_10: float

    @classmethod
    def of(cls, ratios: NDArray[np.float64]) -> StepErrors | None:
        """Errors of predicted over measured times; None without any."""
        if not len(ratios):
            return None
        off = np.abs(ratios - 1)
        return cls(
            float(np.median(off)),
            float(np.mean(off)),
            float(np.quantile(off, 0.8)),
            float(np.quantile(off, 0.9)),
            float(np.mean(off <= 0.05)),
            float(np.mean(off <= 0.10)),
        )


@dataclass(frozen=True)
class HeldOut:
    """A family's numbers from a fit without it, and after its rows in `seen`."""

    numbers: SoftwareProfile
    after: Mapping[Any, SoftwareProfile]
    seen: tuple[PublishedRow, ...]


def held_out(
    start: SoftwareProfile, runs: Sequence[PublishedRun], count: int
) -> HeldOut:
    """A family's numbers from a fit without it, and after `count` of its own runs."""
    counted = [run for run in runs if run.counts]
    # Rows spread over the table, as a user's few measurements would be.
    seen = spread_over(counted, count) if count else []
    seen = [run for run in seen if not why_not(run, start)]
    like = calibrated(start, seen)
    # A correction depends on the kind of run: device, software and model.
    after = {
        own: like(run) for own, run in {kind(run): run for run in runs}.items()
    }
    return HeldOut(start, after, tuple(run.row for run in seen))


@dataclass(frozen=True)
class ScoredRow:
    """A row with its predictions."""

    row: PublishedRow
    case: Case
    hardware: Hardware
    step: float
    memory: float  # of the fullest rank
    least: float  # the same, if its allocator wastes nothing
    reported: float  # of the rank whose memory the software logs
    # Of the step; with the family held out, if it was.
    parts: Mapping[str, float]
    held: float = (
        0.0  # the step with the family held out of the fit; 0: it was not
    )
    # the step after some other rows of the family; 0: it is one of them
    after: float = 0.0

    @property
    def per_token(self) -> float:
        return self.row.step / self.case.tokens

    @property
    def predicted_per_token(self) -> float:
        return (self.held or self.step) / self.case.tokens

    def within(self, held: float, limit: float = 1.0) -> bool:
        """True if so many bytes fit in a share of memory, and no stage is empty."""
        return held <= limit * self.hardware.memory and not self.row.empty

    @property
    def fits(self) -> bool:
        return self.within(self.memory)

    @property
    def picked(self) -> bool:
        return self.within(self.memory, LIMIT)

    def plain(self) -> dict[str, Any]:
        """The run as JSON; null for numbers that the table or a fit lacks."""
        row = self.row
        return {
            "row": row.name,
            "model": row.model,
            "devices": row.ranks,
            # 0 stands for "not measured" inside; JSON has null for it.
            "layout": str(self.case.layout),
            "sequence": self.case.sequence,
            "measured_s": row.step or None,
            "predicted_s": self.step,
            "held_out_s": self.held or None,
            "parts": dict(self.parts),
            "measured_gb": row.memory / 1e9 or None,
            "predicted_gb": self.reported / 1e9,
            "fullest_gb": self.memory / 1e9,
            "out_of_memory": row.out_of_memory,
            "fits": self.fits,
        }


@dataclass(frozen=True)
class FamilyScore:
    """The score of one family. None if its tables have no data for a number.

    Order and regret use predictions with the family held out, if there are any.
    """

    family: str
    rows: int
    predicted: int
    errors: StepErrors | None = None
    held_out: StepErrors | None = None
    after_five: StepErrors | None = None
    scaled: StepErrors | None = None
    tau: float | None = None
    groups: int = 0
    # by the number of picks that may be tried
    regret: Mapping[int, float] | None = None
    misses: int = 0  # first picks that ran out of memory
    rule_regrets: Mapping[str, float] | None = None
    memory_error: float | None = None
    # precision, recall and accuracy; `refused`: the share of completed runs predicted
    # not to fit
    oom: Mapping[str, float] | None = None
    # number of rows, by reason
    left_out: Mapping[str, int] = field(default_factory=dict)
    runs: tuple[ScoredRow, ...] = ()

    def plain(self) -> dict[str, Any]:
        """The score as JSON."""
        regret, oom, errors = self.regret or {}, self.oom or {}, self.errors

        def plain(found: StepErrors | None) -> dict[str, float] | None:
            return asdict(found) if found else None

        return {
            "family": self.family,
            "rows": self.rows,
            "predicted": self.predicted,
            **{
                f"{n}_error": getattr(errors, n, None)
                for n in ("median", "mean", "p90")
            },
            **{n: getattr(errors, n, None) for n in ("within_5", "within_10")},
            "held_out": plain(self.held_out),
            "after_five": plain(self.after_five),
            "after_one_scalar": plain(self.scaled),
            "tau": self.tau,
            "groups": self.groups,
            **{f"regret_top{k}": regret.get(k) for k in (1, 3, 5)},
            "misses": self.misses if self.regret else None,
            "rule_regrets": dict(self.rule_regrets)
            if self.rule_regrets
            else None,
            "memory_error": self.memory_error,
            **{
                f"oom_{n}": oom.get(n)
                for n in ("precision", "recall", "accuracy", "refused")
            },
            "left_out": dict(self.left_out),
        }


@uncollected()
def scored_row(run: PublishedRun, held: HeldOut | None) -> ScoredRow:
    """Predictions of a row, with numbers of its own profile and with those of `held`."""
    row, case = run.row, run.run.case
    own = predict(run, row.profile)
    # The end of the range for a perfect allocator.
    least, _ = own.range(row.profile)
    reported = logged(own, row.profile)
    scored = ScoredRow(
        row,
        case,
        run.hardware,
        own.step,
        own.bytes,
        least,
        reported,
        own.parts,
    )
    if not held or not row.step:
        return scored
    # The same row with numbers that no run of its family has moved.
    other = predict(run, held.numbers)
    # Rows that the calibration has seen test nothing.
    seen = not held.seen or row in held.seen
    after = 0.0 if seen else predict(run, held.after[kind(run)]).step
    return replace(scored, parts=other.parts, held=other.step, after=after)


def scored_or_why(run: PublishedRun, held: HeldOut | None) -> ScoredRow | str:
    """A row with its predictions, or the reason why it is left out."""
    try:
        return scored_row(run, held)
    except (ValueError, PredictionError) as error:
        return at_line(run.row, error)


def score(
    published: Sequence[PublishedRun],
    refused: Mapping[int, str],
    rows: Sequence[PublishedRow],
    *,
    most_ranks: int = 0,
    held: Mapping[str, HeldOut] | None = None,
    each: Callable[..., Iterable[ScoredRow | str]] = map,
) -> tuple[FamilyScore, ...]:
    """The scores of all families of the rows.

    `held` are each family's numbers without it. `most_ranks` leaves larger runs out.
    `each` maps `scored_or_why` over the rows.
    """
    scored: dict[str, dict[int, ScoredRow]] = defaultdict(dict)
    # The number of rows left out, by family and reason.
    left: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for i, why in refused.items():
        left[rows[i].family][why] += 1
    # Runs of one program are neighbours: it is built once.
    order = []
    for n in sorted(
        range(len(published)), key=lambda n: _program(published[n])
    ):
        row = published[n].row
        most = most_ranks or MOST.get(row.family, row.ranks)
        if row.ranks > most:
            left[row.family][f"more than {most} devices"] += 1
        else:
            order.append(n)
    numbers = [(held or {}).get(published[n].row.family) for n in order]
    # Predictions in the program's order, results in that of the table.
    found = each(scored_or_why, [published[n] for n in order], numbers)
    for n, run in zip(order, found, strict=True):
        family = published[n].row.family
        if isinstance(run, str):
            left[family][run] += 1
        else:
            scored[family][n] = run
    families = list(dict.fromkeys(row.family for row in rows))
    return tuple(
        _score(
            name,
            [scored[name][n] for n in sorted(scored[name])],
            sum(row.family == name for row in rows),
            left[name],
        )
        for name in families
    )


def _program(run: PublishedRun) -> Any:
    x, layers = run.run.case.layout, run.run.case.shape.layers
    return (
        x.pp,
        layers,
        x.schedule,
        x.chunks,
        x.microbatches,
        str(x.stages),
        x.zero,
    )


def _score(
    family: str, runs: list[ScoredRow], rows: int, left: Mapping[str, int]
) -> FamilyScore:
    timed = [x for x in runs if x.row.step > 0]
    ratios = np.array([x.step / x.row.step for x in timed])
    regret, misses, rules, count = _regrets(runs)
    return FamilyScore(
        family=family,
        rows=rows,
        predicted=len(runs),
        errors=StepErrors.of(ratios),
        held_out=StepErrors.of(
            np.array([x.held / x.row.step for x in timed if x.held])
        ),
        after_five=StepErrors.of(
            np.array([x.after / x.row.step for x in timed if x.after])
        ),
        # One factor for the whole family: what remains is the error of the
        # order.
        scaled=StepErrors.of(ratios / np.median(ratios))
        if len(ratios)
        else None,
        tau=_tau(timed, _noise(family, timed)),
        groups=count,
        regret=regret,
        misses=misses,
        rule_regrets=rules,
        memory_error=_memory_error(runs),
        oom=_oom(runs),
        left_out=dict(left),
        runs=tuple(runs),
    )


def _noise(family: str, timed: Sequence[ScoredRow]) -> float:
    alike: dict[Any, list[float]] = defaultdict(list)
    for x in timed:
        # Repeats: the same case on the same device with the same software.
        alike[x.case, x.row.device, x.row.profile.name].append(
            math.log(x.row.step)
        )
    apart = [
        abs(a - b) for same in alike.values() for a, b in combinations(same, 2)
    ]
    usual = NOISE.get(family, _USUAL_NOISE)
    # Ten pairs suffice for a quantile of the table's own noise.
    return float(np.quantile(apart, 0.9)) if len(apart) >= _REPEATS else usual


def _by_group(runs: Sequence[ScoredRow]) -> list[list[ScoredRow]]:
    """Rows of equal model, devices and sequence."""
    found: dict[Any, list[ScoredRow]] = defaultdict(list)
    for x in runs:
        found[x.row.group].append(x)
    return list(found.values())


def _tau(timed: Sequence[ScoredRow], noise: float) -> float | None:
    """Kendall's tau over pairs in one group further apart than the source's noise.

    Repeats of one layout are no pair.
    """
    agree = differ = 0
    for group in _by_group(timed):
        measured = np.array([x.per_token for x in group])
        predicted = np.array([x.predicted_per_token for x in group])
        # Every pair once: the upper triangle without the diagonal.
        i, j = np.triu_indices(len(group), 1)
        layouts = np.array([hash(x.case) for x in group])
        other = layouts[i] != layouts[j]
        apart = other & (np.abs(np.log(measured[i] / measured[j])) > noise)
        same = (measured[i] > measured[j]) == (predicted[i] > predicted[j])
        # A pair that is measured and predicted in one order agrees.
        agree += int(np.sum(apart & same))
        differ += int(np.sum(apart & ~same))
    return (agree - differ) / (agree + differ) if agree + differ else None


def _regrets(
    runs: Sequence[ScoredRow],
) -> tuple[dict[int, float] | None, int, dict[str, float] | None, int]:
    """Mean regrets over groups of three or more layouts that ran, and misses.

    The regret of the first pick, and of the best among the first 3 and 5. Misses are
    first picks that ran out of memory. The regrets of simple rules come third. Picks
    are made as in a search: layouts that leave the allocator no room come last.
    """
    mine: dict[int, list[float]] = {1: [], 3: [], 5: []}
    rules: dict[str, list[float]] = defaultdict(list)
    misses = count = 0
    for group in _by_group(
        [x for x in runs if x.row.step > 0 or x.row.out_of_memory]
    ):
        ran = [x.per_token for x in group if x.row.step > 0]
        if len(ran) < 3:
            continue
        count += 1
        best = min(ran)

        def lost(x: ScoredRow, best: float = best) -> float:
            return x.per_token / best - 1 if x.row.step > 0 else _MISS

        # Fitting layouts first, the fastest prediction first among them.
        order = sorted(
            group, key=lambda x: (not x.picked, x.predicted_per_token)
        )
        misses += order[0].row.step <= 0
        # Regrets are those of picks that ran; failing first picks count as
        # misses.
        among = [x for x in order if x.row.step > 0]
        for k, losses in mine.items():
            losses.append(min(lost(x) for x in among[:k]))
        for name in _by_rules(group[0]):
            rules[name].append(
                lost(min(group, key=lambda x: _by_rules(x)[name]))
            )
        # The expected regret of a pick by chance.
        rules["random"].append(float(np.mean([lost(x) for x in group])))
    if not count:
        return None, 0, None, 0
    mean = {k: float(np.mean(v)) for k, v in mine.items()}
    return (
        mean,
        misses,
        {k: float(np.mean(v)) for k, v in rules.items()},
        count,
    )


def _by_rules(scored: ScoredRow) -> dict[str, Any]:
    """Sort keys by which simple rules pick a layout, the least first."""
    row, case, x = scored.row, scored.case, scored.case.layout
    large, plain = case.shape.total > 1e9, x.recompute == "none"
    tp = 1 if case.shape.total < 50e9 and row.ranks <= 1000 else 8
    return {
        # The most data parallelism, recomputed, the largest microbatch.
        "data parallel": (-x.dp, plain, -x.zero, -case.rows),
        # The smallest tp and pp that ran, the largest microbatch. It has the advantage
        # of knowing what ran.
        "smallest tp pp": (row.out_of_memory, x.tp * x.pp, x.tp, -case.rows),
        # Large models sharded and recomputed, small ones not; tensor parallelism inside
        # a node.
        "recipe": (
            abs(x.tp - tp),
            x.pp,
            -x.zero if large else x.zero,
            plain == large,
            -case.rows,
        ),
    }


def _memory_error(runs: Sequence[ScoredRow]) -> float | None:
    """Median relative error of peak memory."""
    known = [x for x in runs if x.row.memory > 0]
    off = [abs(x.reported / x.row.memory - 1) for x in known]
    return float(np.median(off)) if off else None


def _oom(runs: Sequence[ScoredRow]) -> dict[str, float] | None:
    """Precision and recall of predicting out of memory, against what happened."""
    # Rows that neither ran nor ran out of memory are their authors' estimates. A case
    # that ran once and failed elsewhere failed for another reason.
    ran = {x.case for x in runs if x.row.step > 0}
    runs = [
        x
        for x in runs
        if x.row.step > 0 or (x.row.out_of_memory and x.case not in ran)
    ]
    if not runs:
        return None
    was = np.array([x.row.out_of_memory for x in runs], bool)
    failing = np.array([not x.fits for x in runs], bool)
    # Runs that were predicted to fail, and did.
    both = float(np.sum(was & failing))
    return {
        "precision": both / max(1.0, float(failing.sum())),
        "recall": both / max(1.0, float(was.sum())),
        "accuracy": float(np.mean(was == failing)),
        # Of the runs that completed: those that a plan would reject.
        "refused": sum(not x.within(x.least) for x in runs if x.row.step > 0)
        / max(1.0, float(np.sum(~was))),
    }
