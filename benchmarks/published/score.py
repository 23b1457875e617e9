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
from numpy.typing import NDArray

from phalanx.plan.fit import fit
from phalanx.plan.profile import FITTED, SoftwareProfile

from .predict import PublishedRun, logged
from .rules import RULES
from .table import Row

__all__ = ["Errors", "Run", "Score", "hold_out", "score", "some"]

# How much repeats of one configuration differ in a source; pairs that are closer have no order.
NOISE = {"llm-foundry": 0.015, "ultrascale": 0.12}
_USUAL_NOISE = 0.02
_FULL = 0.85  # of a device's memory: above it an allocator may fail, and a plan is refused
_ROWS = 24  # of a profile on a device
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
    def of(cls, ratios: NDArray[np.float64]) -> Errors | None:
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
    published: Sequence[PublishedRun],
    refused: Mapping[int, str],
    rows: Sequence[Row],
    *,
    most_ranks: int = 0,
    held: Mapping[str, Callable[[SoftwareProfile], SoftwareProfile]] | None = None,
) -> tuple[Score, ...]:
    """Every source of the rows. `held` gives the profile that a source's is replaced by when the
    source is held out; `most_ranks` leaves larger runs out."""
    told: dict[str, list[Run]] = defaultdict(list)
    for each in published:
        row, profile = each.row, each.row.profile
        if most_ranks and row.ranks > most_ranks:
            told[row.source].append(Run(row, 0.0, 0.0, 0.0, {}))
            continue
        choice = each.choice(profile)
        other = each.choice(held[row.source](profile)) if held and row.source in held else None
        told[row.source].append(
            Run(row, choice.step, choice.bytes, logged(choice, profile),
                (other or choice).parts, other.step if other else 0.0)
        )  # fmt: skip
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


def hold_out(
    published: Sequence[PublishedRun], source: str
) -> Callable[[SoftwareProfile], SoftwareProfile]:
    """How a source's profile looks when the source has not been seen: the numbers fitted on other
    sources of the same profile and device, or, where there are none, on all other profiles."""
    name = next(x.row.profile.name for x in published if x.row.source == source)
    others = some([x for x in published if x.row.source != source and x.measured])
    same = [x for x in others if x.row.profile.name == name]
    known = same if len(same) >= 8 else others
    sizes: dict[str, int] = defaultdict(int)
    for each in known:
        sizes[each.row.source] += 1
    # Every source counts one, however many rows it has.
    found = fit(
        SoftwareProfile(), known, weights=[1 / sizes[x.row.source] for x in known], moves=50
    )
    numbers = {each: getattr(found, each) for each in FITTED}
    return lambda each: replace(each, **numbers)


def some(published: Sequence[PublishedRun]) -> list[PublishedRun]:
    """Some rows of every profile on every device, evenly taken: more tell a fit little that is new."""
    kinds: dict[Any, list[PublishedRun]] = defaultdict(list)
    for each in published:
        kinds[each.row.profile.name, each.row.device].append(each)
    found = []
    for those in kinds.values():
        picked = np.linspace(0, len(those) - 1, min(_ROWS, len(those))).round().astype(int)
        found += [those[i] for i in picked]
    return found
