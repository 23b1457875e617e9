"""Fits latency and bandwidth to measurements, by least squares of relative errors.

Errors are relative, since a kilobyte must be predicted as well as a gigabyte, whose
absolute errors are a million times larger. One straight line is often not enough:
beyond a cache size or a protocol threshold the cost per byte changes. So a line may
have one bend, if that improves the fit enough.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import mul

from ..planner import Curve
from ..planner.curve import moved, steps
from .collectives import Sample

# A bend must lower the squared error by this factor, or it fits noise. If a straight
# line is already this close (relative, mean square), no bend is tried.
WORTH = 0.6
NEAR = 0.01


@dataclass(frozen=True)
class Growth:
    """The form, ring or tree, that describes one operation over several group sizes.

    Both errors are medians of relative errors, with one latency and one bandwidth for
    all sizes.
    """

    op: str
    ranks: tuple[int, ...]
    ring: float
    tree: float

    @property
    def better(self) -> str:
        return "tree" if self.tree < self.ring else "ring"


def fit_all(samples: Sequence[Sample], backend: str) -> tuple[Curve, ...]:
    """Fit a curve for each operation and group shape; its form is how the operation
    scales."""
    forms = {growth.op: growth.better for growth in growths(samples)}
    shapes: dict[tuple[str, int, int], list[Sample]] = defaultdict(list)
    for sample in samples:
        shapes[sample.op, sample.ranks, sample.apart].append(sample)
    return tuple(
        fit(mine, backend, forms.get(op, "ring"))
        for (op, *_), mine in shapes.items()
    )


def growths(samples: Sequence[Sample]) -> tuple[Growth, ...]:
    """Compare ring with tree for every operation measured over at least two sizes of
    adjacent groups.

    With one size there is nothing to compare: both forms are the same line.
    """
    result = []
    # Groups of neighbours alone: distance would add an effect of its own.
    near = [
        sample
        for sample in samples
        if sample.apart == 1 and sample.op != "send"
    ]
    for op in sorted({sample.op for sample in near}):
        mine = [sample for sample in near if sample.op == op]
        ranks = tuple(sorted({sample.ranks for sample in mine}))
        if len(ranks) > 1:
            errors = []
            for form in ("ring", "tree"):
                # Least squares of (steps x latency + bytes x slope) / t - 1.
                rows = [_row(sample, form) for sample in mine]
                latency, slope = _line(rows)
                off = [
                    abs((a * latency + b * slope) / t - 1) for a, b, t in rows
                ]
                errors.append(statistics.median(off))
            result.append(Growth(op, ranks, *errors))
    return tuple(result)


def fit(samples: Sequence[Sample], backend: str, form: str = "ring") -> Curve:
    """Fit the curve of one operation over one group shape."""
    samples = sorted(samples, key=lambda sample: sample.bytes)
    first, most = samples[0], samples[-1].bytes
    latency, slope = _line([_row(sample, form) for sample in samples])
    of, lengths = (first.op, backend, first.ranks, form), (first.bytes, most)
    line = Curve(*of, latency, 1 / slope, 0.0, *lengths, first.apart)
    best = line
    # A line this close needs no bend.
    if _squares(line, samples) >= NEAR**2 * len(samples):
        # Two sizes at least on each side of a bend.
        bent = [_bent(line, samples, bend.bytes) for bend in samples[2:-2]]
        best = min(
            bent, key=lambda curve: _squares(curve, samples), default=line
        )
        # Not much better than the straight line: keep that.
        if _squares(best, samples) >= WORTH * _squares(line, samples):
            best = line
    return replace(
        best, error=statistics.median(map(abs, _residuals(best, samples)))
    )


def _bent(line: Curve, samples: Sequence[Sample], bend: int) -> Curve:
    """Fit the line up to `bend` bytes, then a second slope that continues from
    there."""
    latency, slope = _line(
        [_row(sample, line.form) for sample in samples if sample.bytes <= bend]
    )
    curve = replace(
        line, latency=latency, bandwidth=1 / slope, bend=bend, beyond=1 / slope
    )
    passes, start = moved(line.op, line.form, line.ranks), curve.seconds(bend)
    # One unknown, the second slope: t = start + passes (S - bend) slope, with errors
    # relative to t.
    far = [s for s in samples if s.bytes > bend]
    scaled = [passes * (s.bytes - bend) / s.seconds for s in far]
    rests = (1 - start / s.seconds for s in far)
    # Least squares in one unknown.
    beyond = sum(map(mul, scaled, rests)) / sum(a * a for a in scaled)
    return replace(curve, beyond=1 / max(beyond, slope * 1e-3))


Row = tuple[float, float, float]  # steps, bytes passed, seconds


def _row(sample: Sample, form: str) -> Row:
    passes = moved(sample.op, form, sample.ranks)
    return (
        steps(sample.op, form, sample.ranks),
        passes * sample.bytes,
        sample.seconds,
    )


def _line(rows: Sequence[Row]) -> tuple[float, float]:
    """Fit (latency, seconds per byte), both non-negative, with the least squared
    relative errors."""
    # Divided by the time: errors become relative.
    left, right = [a / t for a, _, t in rows], [b / t for _, b, t in rows]
    aa, ab, bb = (
        sum(map(mul, *p))
        for p in ((left, left), (left, right), (right, right))
    )
    sum_a, sum_b = sum(left), sum(right)
    # Cramer's rule for the normal equations; all sizes alike have no solution.
    whole = aa * bb - ab * ab
    latency = (
        (sum_a * bb - sum_b * ab) / whole if whole > 1e-12 * aa * bb else 0.0
    )
    # A negative latency has no meaning: a line through 0.
    if latency <= 0:
        return 0.0, sum_b / bb
    slope = (sum_b * aa - sum_a * ab) / whole
    if slope > 0:
        return latency, slope
    # All sizes cost their latency alone and show no bandwidth. Assume that the largest
    # costs a tenth more than the smallest, so that the bandwidth stays finite.
    latency = sum_a / aa
    return latency, 0.1 * latency * max(a for a, _, _ in rows) / max(
        b for _, b, _ in rows
    )


def _residuals(curve: Curve, samples: Sequence[Sample]) -> list[float]:
    return [curve.seconds(s.bytes) / s.seconds - 1 for s in samples]


def _squares(curve: Curve, samples: Sequence[Sample]) -> float:
    return sum(error**2 for error in _residuals(curve, samples))
