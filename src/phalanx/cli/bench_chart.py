"""Charts of bus bandwidth over size, with measured points and fitted curves, one for
each operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..drawing import WIDE, ChartAxis, Html, Series, panels
from ..layout.numbers import binary_text, rate_text, seconds_text
from ..planner import Curve

if TYPE_CHECKING:
    from ..bench import Sample


def curves_svg(
    curves: Sequence[Curve],
    width: float = WIDE,
    samples: Sequence[Sample] = (),
    backend: str = "",
) -> Html:
    """Return one SVG document. `samples` are the measurements that the curves were
    fitted to, if known."""
    series = []
    for curve in curves:
        key = (curve.op, curve.ranks, curve.apart)
        mine = [s for s in samples if (s.op, s.ranks, s.apart) == key]
        ends = [s.bytes for s in mine] or _sizes(curve)
        # Twice as many points as sizes, so that a bend shows in the line.
        sizes = [size * part for size in ends for part in (1, 2)][:-1]
        apart = f", {curve.apart} apart" if curve.apart > 1 else ""
        fit = f"{seconds_text(curve.latency)} and {rate_text(curve.bandwidth)}"
        tips = [
            f"{binary_text(s.bytes)}: {s.bus / 1e9:.4g} GB/s measured,"
            f" {curve.bus(s.bytes) / 1e9:.4g} GB/s fitted ({fit})"
            for s in mine
        ]
        points = tuple((float(s.bytes), s.bus / 1e9) for s in mine)
        line = tuple((float(n), curve.bus(n) / 1e9) for n in sizes)
        series.append(
            Series(
                f"{curve.op} x {curve.ranks}{apart}", points, line, tips=tips
            )
        )
    backend = backend or ", ".join(sorted({curve.backend for curve in curves}))
    note = (
        "Points: measured medians of the slowest rank. Dashed: fitted latency and bandwidth."
        if samples
        else "Latency and bandwidth fitted to the measurements."
    )
    across, up = (
        ChartAxis("S", binary_text, 16),
        ChartAxis("bus bandwidth in GB/s", "{:g}".format),
    )
    return panels(
        f"collectives over {backend}", series, across, up, [note], width
    )


def _sizes(curve: Curve) -> list[int]:
    """Return sizes over the measured range, in powers of four."""
    sizes = [curve.least]
    while sizes[-1] < curve.most:
        sizes.append(min(4 * sizes[-1], curve.most))
    return sizes
