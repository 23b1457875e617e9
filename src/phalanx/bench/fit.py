"""From samples to curves: latency and bandwidth by least squares on relative error.

Relative, since a kilobyte must be predicted as well as a gigabyte, whose absolute errors are a
million times larger. One straight line often is not enough: past a cache's end or a protocol's
threshold bytes cost another amount, so a line may have one bend, where that pays for itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from ..plan import Curve
from ..plan.curve import moved, steps
from .collectives import Sample

__all__ = ["Growth", "fit", "fit_all", "growths"]

# A bend has to lower the squared error by this factor, or it describes noise; and where a straight
# line is already this near (relative, mean square), none is looked for.
WORTH = 0.6
NEAR = 0.01


@dataclass(frozen=True)
class Growth:
    """Which form describes one operation over several group sizes: median relative errors of one
    latency and one bandwidth for all of them."""

    op: str
    ranks: tuple[int, ...]
    ring: float
    tree: float

    @property
    def better(self) -> str:
        return "tree" if self.tree < self.ring else "ring"


def fit_all(samples: Sequence[Sample], backend: str) -> tuple[Curve, ...]:
    """A curve for each operation and shape of group; its form is how the operation grows."""
    forms = {growth.op: growth.better for growth in growths(samples)}
    return tuple(
        fit(list(found), backend, forms.get(op, "ring")) for (op, _, _), found in _shapes(samples)
    )


def growths(samples: Sequence[Sample]) -> tuple[Growth, ...]:
    """Ring against tree, for every operation measured over two or more sizes of neighbours' groups.
    With one size there is nothing to say: both forms are the same line."""
    found = []
    near = [sample for sample in samples if sample.apart == 1 and sample.op != "send"]
    for op, its in groupby(sorted(near, key=lambda s: s.op), lambda s: s.op):
        mine = list(its)
        ranks = tuple(sorted({sample.ranks for sample in mine}))
        if len(ranks) > 1:
            errors = {}
            for form in ("ring", "tree"):
                rows = [_row(sample, form) for sample in mine]
                errors[form] = _error(rows, _line(rows))
            found.append(Growth(op, ranks, errors["ring"], errors["tree"]))
    return tuple(found)


def fit(samples: Sequence[Sample], backend: str, form: str = "ring") -> Curve:
    """The curve of one operation over one shape of group."""
    ordered = sorted(samples, key=lambda sample: sample.bytes)
    rows = [_row(sample, form) for sample in ordered]
    first = ordered[0]
    latency, slope = _line(rows)
    line = Curve(
        first.op,
        backend,
        first.ranks,
        form,
        latency,
        1 / slope,
        0.0,
        first.bytes,
        ordered[-1].bytes,
        first.apart,
    )
    line = replace(line, error=_off(line, ordered))
    if _squares(line, ordered) < NEAR**2 * len(ordered):
        return line
    bent = [_bent(line, ordered, ordered[i].bytes) for i in range(2, len(ordered) - 2)]
    best = min(bent, key=lambda curve: _squares(curve, ordered), default=line)
    worth = _squares(best, ordered) < WORTH * _squares(line, ordered)
    return best if worth else line


def _bent(line: Curve, samples: Sequence[Sample], bend: int) -> Curve:
    """The line up to `bend` bytes, then another slope that starts where it ends."""
    near = [_row(sample, line.form) for sample in samples if sample.bytes <= bend]
    latency, slope = _line(near)
    curve = replace(line, latency=latency, bandwidth=1 / slope, bend=bend, beyond=1 / slope)
    passes = moved(line.op, line.form, line.ranks)
    far = [sample for sample in samples if sample.bytes > bend]
    start = curve.seconds(bend)
    # One unknown, the slope beyond: t = start + passes (S - bend) slope, errors relative to t.
    above = [passes * (s.bytes - bend) / s.seconds for s in far]
    rest = [1 - start / s.seconds for s in far]
    beyond = sum(a * r for a, r in zip(above, rest, strict=True)) / sum(a * a for a in above)
    curve = replace(curve, beyond=1 / max(beyond, slope * 1e-3))
    return replace(curve, error=_off(curve, samples))


Row = tuple[float, float, float]  # steps, bytes passed, seconds


def _row(sample: Sample, form: str) -> Row:
    passes = moved(sample.op, form, sample.ranks)
    return steps(sample.op, form, sample.ranks), passes * sample.bytes, sample.seconds


def _line(rows: Sequence[Row]) -> tuple[float, float]:
    """(latency, seconds a byte) with the least sum of squared relative errors, neither negative."""
    scaled = [(a / t, b / t) for a, b, t in rows]
    aa = sum(a * a for a, _ in scaled)
    ab = sum(a * b for a, b in scaled)
    bb = sum(b * b for _, b in scaled)
    sum_a, sum_b = sum(a for a, _ in scaled), sum(b for _, b in scaled)
    whole = aa * bb - ab * ab
    latency = (sum_a * bb - sum_b * ab) / whole if whole > 1e-12 * aa * bb else 0.0
    if latency <= 0:
        return 0.0, sum_b / bb
    slope = (sum_b * aa - sum_a * ab) / whole
    if slope > 0:
        return latency, slope
    # Such sizes cost their latency alone and tell no bandwidth: the largest is taken to cost a
    # tenth more than the smallest, so that it stays finite.
    latency = sum_a / aa
    return latency, 0.1 * latency * max(a for a, _, _ in rows) / max(b for _, b, _ in rows)


def _error(rows: Iterable[Row], line: tuple[float, float]) -> float:
    return statistics.median(abs((a * line[0] + b * line[1]) / t - 1) for a, b, t in rows)


def _off(curve: Curve, samples: Sequence[Sample]) -> float:
    return statistics.median(abs(curve.seconds(s.bytes) / s.seconds - 1) for s in samples)


def _squares(curve: Curve, samples: Sequence[Sample]) -> float:
    return sum((curve.seconds(s.bytes) / s.seconds - 1) ** 2 for s in samples)


def _shapes(samples: Sequence[Sample]) -> list[tuple[tuple[str, int, int], list[Sample]]]:
    found: dict[tuple[str, int, int], list[Sample]] = {}
    for sample in samples:
        found.setdefault((sample.op, sample.ranks, sample.apart), []).append(sample)
    return list(found.items())
