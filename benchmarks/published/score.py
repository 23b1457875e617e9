"""How far predictions are from published runs, source by source: errors, order, regret, memory.

Sources are never pooled: their conventions, their noise and their software differ. Beside the error
of the one set of constants stand the error with the source held out of the fit, and the error after
one scalar, which is what is left when only a source's overall speed is unknown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from phalanx.plan.estimate import Estimates
from phalanx.plan.fit import fit
from phalanx.plan.hardware import Numbers
from phalanx.plan.profile import FITTED, Profile

from .predict import RunGroup
from .rules import RULES
from .table import Row

__all__ = ["Errors", "Run", "Score", "hold_out", "score"]

# How much repeats of one configuration differ in a source; pairs that are closer have no order.
NOISE = {"llm-foundry": 0.015, "ultrascale": 0.12}
_USUAL_NOISE = 0.02
_FULL = 0.85  # of a device's memory: above it an allocator may fail, and a plan is refused
_HARDWARE, _ROWS = 3, 12  # of a profile on a device: more tell a fit little that is new
_MISS = 1.0  # regret of a pick that ran out of memory


@dataclass(frozen=True)
class Errors:
    """Relative errors of step time."""

    median: float
    mean: float
    p90: float
    within_5: float
    within_10: float

    @classmethod
    def of(cls, ratios: Numbers) -> Errors | None:
        """From predicted over measured; None where there is nothing to compare."""
        if not len(ratios):
            return None
        off = np.abs(ratios - 1)
        return cls(
            float(np.median(off)), float(np.mean(off)), float(np.quantile(off, 0.9)),
            float(np.mean(off <= 0.05)), float(np.mean(off <= 0.10)),
        )  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A row with what was predicted of it."""

    row: Row
    step: float
    memory: float  # of the fullest rank
    told: float  # of the rank whose memory the software tells
    parts: Mapping[str, float]  # of the step, with the source held out where it was
    held: float = 0.0  # the step with the source held out of the fit; 0: it was not

    @property
    def per_token(self) -> float:
        assert self.row.case is not None
        return self.row.step / self.row.case.tokens

    @property
    def predicted_per_token(self) -> float:
        assert self.row.case is not None
        return self.step / self.row.case.tokens

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
            "measured_gb": row.memory / 1e9 or None, "predicted_gb": self.told / 1e9,
            "fullest_gb": self.memory / 1e9,
            "out_of_memory": row.out_of_memory, "fits": self.fits,
        }  # fmt: skip


@dataclass(frozen=True)
class Score:
    """One source. What a table has no data for is None."""

    source: str
    profile: str
    rows: int
    predicted: int
    errors: Errors | None = None
    held_out: Errors | None = None
    scaled: Errors | None = None
    tau: float | None = None
    groups: int = 0
    regret: Mapping[int, float] | None = None  # by how many picks may be tried
    misses: int = 0  # first picks that ran out of memory
    rule_regrets: Mapping[str, float] | None = None
    memory_error: float | None = None
    oom: Mapping[str, float] | None = None  # precision, recall, accuracy
    left_out: Mapping[str, int] = field(default_factory=dict)  # why, and how many
    runs: tuple[Run, ...] = ()

    def plain(self) -> dict[str, Any]:
        """The score as JSON has it."""
        regret = self.regret or {}
        said: dict[str, Any] = {"source": self.source, "profile": self.profile, "rows": self.rows}
        said["predicted"] = self.predicted
        for name in ("median", "mean", "p90"):
            said[f"{name}_error"] = getattr(self.errors, name) if self.errors else None
        for name in ("within_5", "within_10"):
            said[name] = getattr(self.errors, name) if self.errors else None
        said["held_out"] = asdict(self.held_out) if self.held_out else None
        said["after_one_scalar"] = asdict(self.scaled) if self.scaled else None
        said["tau"], said["groups"] = self.tau, self.groups
        said |= {f"regret_top{k}": regret.get(k) for k in (1, 3, 5)}
        said["misses"] = self.misses if self.regret else None
        said["rule_regrets"] = dict(self.rule_regrets) if self.rule_regrets else None
        said["memory_error"] = self.memory_error
        oom = self.oom or {}
        said |= {f"oom_{name}": oom.get(name) for name in ("precision", "recall", "accuracy")}
        said["left_out"] = dict(self.left_out)
        return said


def score(
    groups: Sequence[RunGroup],
    refused: Mapping[int, str],
    rows: Sequence[Row],
    *,
    most_ranks: int = 0,
    held: Mapping[str, Callable[[Profile], Profile]] | None = None,
) -> tuple[Score, ...]:
    """Every source of the rows. `held` gives the profile that a source's is replaced by when the
    source is held out; `most_ranks` leaves larger runs out."""
    told: dict[str, list[Run]] = defaultdict(list)
    for group in groups:
        found = group.under(group.rows[0].profile)
        step, memory, ranks = found.step, found.bytes, found.told(group.rows[0].profile)
        other: dict[str, Estimates] = {}
        for i, row in enumerate(group.rows):
            if held and row.source in held and row.source not in other:
                other[row.source] = group.under(held[row.source](row.profile))
            late = float(other[row.source].step[i]) if row.source in other else 0.0
            parts = other.get(row.source, found).breakdown(i)
            run = Run(row, float(step[i]), float(memory[i]), float(ranks[i]), parts, late)
            told[row.source].append(run)
    sources = list(dict.fromkeys(row.source for row in rows))
    return tuple(_score(source, told[source], rows, refused, most_ranks) for source in sources)


def _score(
    source: str,
    told: list[Run],
    rows: Sequence[Row],
    refused: Mapping[int, str],
    most_ranks: int,
) -> Score:
    mine = [row for row in rows if row.source == source]
    left: dict[str, int] = defaultdict(int)
    for i, why in refused.items():
        if rows[i].source == source:
            left[why] += 1
    if most_ranks:
        more = [x for x in told if x.row.ranks > most_ranks]
        told = [x for x in told if x.row.ranks <= most_ranks]
        if more:
            left[f"more than {most_ranks} devices"] += len(more)
    timed = [x for x in told if x.row.step > 0]
    ratios = np.array([x.step / x.row.step for x in timed])
    held = np.array([x.held / x.row.step for x in timed if x.held])
    regret, misses, rules, count = _regrets(told)
    return Score(
        source=source,
        profile=mine[0].profile.name,
        rows=len(mine),
        predicted=len(told),
        errors=Errors.of(ratios),
        held_out=Errors.of(held),
        scaled=Errors.of(ratios / np.median(ratios)) if len(ratios) else None,
        tau=_tau(timed, _noise(source)),
        groups=count,
        regret=regret,
        misses=misses,
        rule_regrets=rules,
        memory_error=_memory_error(told),
        oom=_oom(told),
        left_out=dict(left),
        runs=tuple(told),
    )


def _noise(source: str) -> float:
    return next((v for k, v in NOISE.items() if source.startswith(k)), _USUAL_NOISE)


def _by_group(told: Sequence[Run]) -> list[list[Run]]:
    """Rows of equal model, devices and sequence."""
    found: dict[Any, list[Run]] = defaultdict(list)
    for x in told:
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
    told: Sequence[Run],
) -> tuple[dict[int, float] | None, int, dict[str, float] | None, int]:
    """Mean loss of the first pick, and of the best of the first 3 and 5, over groups of three
    layouts or more; how many first picks ran out of memory; and the same of plain rules."""
    mine: dict[int, list[float]] = {1: [], 3: [], 5: []}
    rules: dict[str, list[float]] = {name: [] for name in (*RULES, "random")}
    misses = count = 0
    for group in _by_group([x for x in told if x.row.step > 0 or x.row.out_of_memory]):
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


def _memory_error(told: Sequence[Run]) -> float | None:
    """Median relative error of peak memory."""
    known = [x for x in told if x.row.memory > 0]
    off = [abs(x.told / x.row.memory - 1) for x in known]
    return float(np.median(off)) if off else None


def _oom(told: Sequence[Run]) -> dict[str, float] | None:
    """Out of memory, as said before and as it was."""
    was = np.array([x.row.out_of_memory for x in told], bool)
    if not was.any():
        return None
    said = np.array([not x.fits for x in told], bool)
    both = float(np.sum(was & said))
    return {
        "precision": both / max(1.0, float(said.sum())),
        "recall": both / max(1.0, float(was.sum())),
        "accuracy": float(np.mean(was == said)),
    }


def hold_out(groups: Sequence[RunGroup], source: str) -> Callable[[Profile], Profile]:
    """How a source's profile looks when the source has not been seen: the numbers fitted on other
    sources of the same profile and device, or, where there are none, on all other profiles."""
    profile = next(g.rows[0].profile for g in groups if any(r.source == source for r in g.rows))
    others = _some([g for g in groups if any(r.source != source for r in g.rows)])
    same = [g for g in others if g.rows[0].profile.name == profile.name]

    sizes: dict[str, int] = defaultdict(int)
    for row in (row for group in others for row in group.rows):
        sizes[row.source] += row.step > 0

    def use(group: RunGroup) -> Numbers:
        # Every source counts one, however many rows it has.
        return np.array(
            [(r.step > 0 and r.source != source) / max(1, sizes[r.source]) for r in group.rows]
        )

    known = same if sum(float(np.sum(use(g) > 0)) for g in same) >= 8 else others
    found = fit(Profile(), known, use=use, most=50)
    numbers = {name: getattr(found, name) for name in FITTED}
    return lambda each: replace(each, **numbers)


def _some(groups: Sequence[RunGroup]) -> list[RunGroup]:
    """A few hardware of every profile on every device, and some rows of each, evenly taken."""
    kinds: dict[Any, list[RunGroup]] = defaultdict(list)
    for group in groups:
        kinds[group.rows[0].profile.name, group.rows[0].device].append(group)
    found = []
    for those in kinds.values():
        picked = np.linspace(0, len(those) - 1, min(_HARDWARE, len(those))).round().astype(int)
        found += [those[i].part(_ROWS) for i in picked]
    return found
