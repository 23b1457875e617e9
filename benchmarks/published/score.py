"""How far predictions are from published runs, family by family: errors, order, regret, memory.

A family is the sources that are siblings; families are never pooled, since their conventions, their
noise and their software differ. Each is predicted with numbers that were fitted on all others
(held out), with those of its own profile (fitted), and after five of its own rows (calibrated).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.fit import Path, fit
from phalanx.plan.profile import SoftwareProfile, profile

from .predict import MOST, PublishedRun, logged
from .rules import RULES
from .table import Row

__all__ = ["Errors", "Held", "Run", "Score", "hold_out", "score", "shared", "some"]

# How much repeats of one configuration differ in a source; pairs that are closer have no order.
NOISE = {"llm": 0.015, "ultrascale": 0.12}
_USUAL_NOISE = 0.02
_FULL = 0.9  # of a device's memory: above it a run is predicted to fail
_ROWS = 8  # of a profile on a device that a fit takes
_FIVE = 5  # rows of its own that a family is calibrated with
_MISS = 1.0  # regret of a pick that ran out of memory


@dataclass(frozen=True)
class Errors:
    """Relative errors of step time."""

    median: float
    mean: float
    p80: float
    p90: float
    within_5: float
    within_10: float

    @classmethod
    def of(cls, ratios: NDArray[np.float64]) -> Errors | None:
        """From predicted over measured; None where there is nothing to compare."""
        if not len(ratios):
            return None
        off = np.abs(ratios - 1)
        return cls(
            float(np.median(off)), float(np.mean(off)), float(np.quantile(off, 0.8)),
            float(np.quantile(off, 0.9)),
            float(np.mean(off <= 0.05)), float(np.mean(off <= 0.10)),
        )  # fmt: skip


@dataclass(frozen=True)
class Held:
    """The numbers of a family that has not been seen, and after five rows of it."""

    numbers: SoftwareProfile
    after: SoftwareProfile
    seen: tuple[Row, ...]


@dataclass(frozen=True)
class Run:
    """A row with what was predicted of it."""

    row: Row
    step: float
    memory: float  # of the fullest rank
    reported: float  # of the rank whose memory the software reports
    parts: Mapping[str, float]  # of the step, with the family held out where it was
    held: float = 0.0  # the step with the family held out of the fit; 0: it was not
    after: float = 0.0  # the step after five other rows of the family; 0: it is one of them

    @property
    def per_token(self) -> float:
        assert self.row.case is not None
        return self.row.step / self.row.case.tokens

    @property
    def predicted_per_token(self) -> float:
        """Held out, where it was."""
        assert self.row.case is not None
        return (self.held or self.step) / self.row.case.tokens

    @property
    def fits(self) -> bool:
        assert self.row.hardware is not None
        return self.memory <= _FULL * self.row.hardware.memory and not self.row.empty

    def plain(self) -> dict[str, Any]:
        """The run as JSON has it; null where the table, or a fit, has no such number."""
        row = self.row
        assert row.case is not None
        return {
            "row": row.name, "model": row.model, "devices": row.ranks,
            "layout": str(row.case.layout), "sequence": row.case.sequence,
            "measured_s": row.step or None, "predicted_s": self.step,
            "held_out_s": self.held or None, "parts": dict(self.parts),
            "measured_gb": row.memory / 1e9 or None, "predicted_gb": self.reported / 1e9,
            "fullest_gb": self.memory / 1e9,
            "out_of_memory": row.out_of_memory, "fits": self.fits,
        }  # fmt: skip


@dataclass(frozen=True)
class Score:
    """One family. What its tables have no data for is None. Order and regret are of predictions with
    the family held out, where it was."""

    family: str
    rows: int
    predicted: int
    errors: Errors | None = None
    held_out: Errors | None = None
    after_five: Errors | None = None
    scaled: Errors | None = None
    tau: float | None = None
    groups: int = 0
    regret: Mapping[int, float] | None = None  # by how many picks may be tried
    misses: int = 0  # first picks that ran out of memory
    rule_regrets: Mapping[str, float] | None = None
    memory_error: float | None = None
    oom: Mapping[str, float] | None = None  # precision, recall, accuracy, and `refused` of what ran
    left_out: Mapping[str, int] = field(default_factory=dict)  # why, and how many
    runs: tuple[Run, ...] = ()

    def plain(self) -> dict[str, Any]:
        """The score as JSON has it."""
        regret = self.regret or {}
        figures: dict[str, Any] = {"family": self.family, "rows": self.rows}
        figures["predicted"] = self.predicted
        for name in ("median", "mean", "p90"):
            figures[f"{name}_error"] = getattr(self.errors, name) if self.errors else None
        for name in ("within_5", "within_10"):
            figures[name] = getattr(self.errors, name) if self.errors else None
        figures["held_out"] = asdict(self.held_out) if self.held_out else None
        figures["after_five"] = asdict(self.after_five) if self.after_five else None
        figures["after_one_scalar"] = asdict(self.scaled) if self.scaled else None
        figures["tau"], figures["groups"] = self.tau, self.groups
        figures |= {f"regret_top{k}": regret.get(k) for k in (1, 3, 5)}
        figures["misses"] = self.misses if self.regret else None
        figures["rule_regrets"] = dict(self.rule_regrets) if self.rule_regrets else None
        figures["memory_error"] = self.memory_error
        oom = self.oom or {}
        figures |= {
            f"oom_{name}": oom.get(name) for name in ("precision", "recall", "accuracy", "refused")
        }
        figures["left_out"] = dict(self.left_out)
        return figures


def score(
    published: Sequence[PublishedRun],
    refused: Mapping[int, str],
    rows: Sequence[Row],
    *,
    most_ranks: int = 0,
    held: Mapping[str, Held] | None = None,
) -> tuple[Score, ...]:
    """Every family of the rows. `held` are the numbers of each without it; `most_ranks` leaves
    larger runs out."""
    scored: dict[str, dict[int, Run]] = defaultdict(dict)
    left: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for i, why in refused.items():
        left[rows[i].family][why] += 1
    # Runs of one program one after the other: it is built once.
    order = sorted(range(len(published)), key=lambda n: _program(published[n].row))
    for n in order:
        each = published[n]
        row = each.row
        most = most_ranks or MOST.get(row.family, row.ranks)
        if row.ranks > most:
            left[row.family][f"more than {most} devices"] += 1
            continue
        choice = each.choice(row.profile)
        scored[row.family][n] = Run(
            row, choice.step, choice.bytes, logged(choice, row.profile), choice.parts
        )
        if held and row.family in held and row.step:
            without, after = held[row.family].numbers, held[row.family].after
            other = each.choice(without)
            own = each.row not in held[row.family].seen
            scored[row.family][n] = replace(
                scored[row.family][n], parts=other.parts, held=other.step,
                after=each.choice(after).step if own else 0.0,
            )  # fmt: skip
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


def _program(row: Row) -> Any:
    assert row.case is not None
    x = row.case.layout
    return x.pp, row.case.shape.layers, x.schedule, x.chunks, x.microbatches, str(x.stages), x.zero


def _score(family: str, runs: list[Run], rows: int, left: Mapping[str, int]) -> Score:
    timed = [x for x in runs if x.row.step > 0]
    ratios = np.array([x.step / x.row.step for x in timed])
    regret, misses, rules, count = _regrets(runs)
    return Score(
        family=family,
        rows=rows,
        predicted=len(runs),
        errors=Errors.of(ratios),
        held_out=Errors.of(np.array([x.held / x.row.step for x in timed if x.held])),
        after_five=Errors.of(np.array([x.after / x.row.step for x in timed if x.after])),
        scaled=Errors.of(ratios / np.median(ratios)) if len(ratios) else None,
        tau=_tau(timed, _noise(family)),
        groups=count,
        regret=regret,
        misses=misses,
        rule_regrets=rules,
        memory_error=_memory_error(runs),
        oom=_oom(runs),
        left_out=dict(left),
        runs=tuple(runs),
    )


def _noise(family: str) -> float:
    return next((v for k, v in NOISE.items() if k == family), _USUAL_NOISE)


def _by_group(runs: Sequence[Run]) -> list[list[Run]]:
    """Rows of equal model, devices and sequence."""
    found: dict[Any, list[Run]] = defaultdict(list)
    for x in runs:
        found[x.row.group].append(x)
    return list(found.values())


def _tau(timed: Sequence[Run], noise: float) -> float | None:
    """Kendall's, over pairs of one group that are further apart than the source's own noise."""
    agree = differ = 0
    for group in _by_group(timed):
        measured = np.array([x.per_token for x in group])
        predicted = np.array([x.predicted_per_token for x in group])
        i, j = np.triu_indices(len(group), 1)
        apart = np.abs(np.log(measured[i] / measured[j])) > noise
        same = (measured[i] > measured[j]) == (predicted[i] > predicted[j])
        agree += int(np.sum(apart & same))
        differ += int(np.sum(apart & ~same))
    return (agree - differ) / (agree + differ) if agree + differ else None


def _regrets(
    runs: Sequence[Run],
) -> tuple[dict[int, float] | None, int, dict[str, float] | None, int]:
    """Mean loss of the first pick, and of the best of the first 3 and 5, over groups of three
    layouts or more; how many first picks ran out of memory; and the same of plain rules."""
    mine: dict[int, list[float]] = {1: [], 3: [], 5: []}
    rules: dict[str, list[float]] = {name: [] for name in (*RULES, "random")}
    misses = count = 0
    for group in _by_group([x for x in runs if x.row.step > 0 or x.row.out_of_memory]):
        ran = [x.per_token for x in group if x.row.step > 0]
        if len(ran) < 3:
            continue
        count += 1
        best = min(ran)

        def lost(x: Run, best: float = best) -> float:
            return x.per_token / best - 1 if x.row.step > 0 else _MISS

        order = sorted(group, key=lambda x: (not x.fits, x.predicted_per_token))
        misses += order[0].row.step <= 0
        for k, losses in mine.items():
            losses.append(min(lost(x) for x in order[:k]))
        for name, rule in RULES.items():
            rules[name].append(lost(min(group, key=lambda x: rule(x.row))))
        rules["random"].append(float(np.mean([lost(x) for x in group])))
    if not count:
        return None, 0, None, 0
    mean = {k: float(np.mean(v)) for k, v in mine.items()}
    return mean, misses, {k: float(np.mean(v)) for k, v in rules.items()}, count


def _memory_error(runs: Sequence[Run]) -> float | None:
    """Median relative error of peak memory."""
    known = [x for x in runs if x.row.memory > 0]
    off = [abs(x.reported / x.row.memory - 1) for x in known]
    return float(np.median(off)) if off else None


def _oom(runs: Sequence[Run]) -> dict[str, float] | None:
    """Out of memory, as predicted and as it was."""
    if not runs:
        return None
    # A figure's memory that no device has was computed by its authors.
    runs = [x for x in runs if x.row.hardware and x.row.memory < x.row.hardware.memory]
    was = np.array([x.row.out_of_memory for x in runs], bool)
    failing = np.array([not x.fits for x in runs], bool)
    both = float(np.sum(was & failing))
    return {
        "precision": both / max(1.0, float(failing.sum())),
        "recall": both / max(1.0, float(was.sum())),
        "accuracy": float(np.mean(was == failing)),
        "refused": float(np.sum(failing & ~was)) / max(1.0, float(np.sum(~was))),
    }


def shared(
    runs: Sequence[PublishedRun], met: dict[int, list[Path]], base: SoftwareProfile
) -> SoftwareProfile:
    """One set of numbers for runs of many profiles; every family counts one, however many rows."""
    sizes = Counter(run.row.family for run in runs)
    weights = [1 / sizes[run.row.family] for run in runs]
    return fit(base, runs, weights=weights, moves=30, met=met)


def hold_out(published: Sequence[PublishedRun]) -> dict[str, Held]:
    """For each family the numbers of `default` as they are without it, and then with five rows."""
    met: dict[int, list[Path]] = {}
    known = some(published)
    base = shared(known, met, profile("default"))
    found = {}
    for family in dict.fromkeys(run.row.family for run in known):
        others = [run for run in known if run.row.family != family]
        own = [run for run in published if run.row.family == family and run.counts]
        if not others:
            continue
        without = shared(others, met, base)
        five = _even(own, _FIVE)
        after = fit(without, five, met=met, clip=math.inf)
        found[family] = Held(without, after, tuple(run.row for run in five))
    return found


def some(published: Sequence[PublishedRun]) -> list[PublishedRun]:
    """Some rows of every profile on every device: more tell a fit little that is new."""
    kinds: dict[Any, list[PublishedRun]] = defaultdict(list)
    for run in published:
        if run.counts and run.row.case is not None:
            kinds[run.row.family, run.row.profile.name, run.row.device, run.row.case.dtype].append(
                run
            )
    return [run for those in kinds.values() for run in _even(those, _ROWS)]


def _even(runs: Sequence[PublishedRun], count: int) -> list[PublishedRun]:
    picked = np.linspace(0, len(runs) - 1, min(count, len(runs))).round().astype(int)
    return [runs[i] for i in picked]
