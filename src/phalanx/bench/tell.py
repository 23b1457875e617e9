"""What was measured, for people: tables, sentences, pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from ..draw import Axis, Series, chart, text_table
from ..layout.numbers import binary_text, flops_text, rate_text, seconds_text
from .collectives import Sample
from .fit import Growth, fit_all, growths
from .found import Found
from .matmul import Product, judged
from .mfu import Iteration
from .overlap import Overlap

__all__ = [
    "PRODUCT_HEAD",
    "as_json",
    "collectives_chart",
    "collectives_text",
    "iterations_text",
    "overlaps_text",
    "product_line",
    "products_chart",
    "products_summary",
]


def collectives_text(samples: Sequence[Sample], backend: str, forms: Sequence[Growth]) -> str:
    """The table, the all-reduce beside its halves, the fitted curves, which form describes growth."""
    if not samples:
        return "nothing was measured: --total was over before the first size.\n"
    head = ("operation", "group", "S", "time", "least..most", "S/t", "factor", "bus", "result")
    rows = [
        (
            s.op,
            _group(s.ranks, s.apart),
            binary_text(s.bytes),
            seconds_text(s.seconds),
            f"{seconds_text(s.least)}..{seconds_text(s.most)}",
            f"{s.algorithm / 1e9:.3f} GB/s",
            f"{s.factor:.3f}",
            f"{s.bus / 1e9:.3f}",
            "right" if s.correct else "WRONG",
        )
        for s in samples
    ]
    parts = [
        f"backend {backend}. S is a rank's input of all_reduce, reduce_scatter, reduce and all_to_all, its\n"
        "output of all_gather, the root's whole of scatter and gather. GB = 1e9 bytes.\n",
        text_table(head, rows),
        _halves(samples),
        _curves(samples, backend),
        _forms(forms),
    ]
    return "\n".join(part for part in parts if part)


def _group(ranks: int, apart: int) -> str:
    return f"{ranks}x{apart}" if apart > 1 else str(ranks)


def _halves(samples: Sequence[Sample]) -> str:
    rows = [
        (
            s.ranks,
            binary_text(s.bytes),
            seconds_text(s.seconds),
            seconds_text(s.halves),
            f"{s.halves / s.seconds:.2f}",
        )
        for s in samples
        if s.halves
    ]
    head = ("ranks", "S", "all-reduce", "in two steps", "ratio")
    title = "all-reduce = reduce-scatter then all-gather: the same values, these times\n"
    return title + text_table(head, rows, indent=2) if rows else ""


def _curves(samples: Sequence[Sample], backend: str) -> str:
    head = ("operation", "ranks", "latency", "bandwidth", "error", "beyond")
    rows = [
        (
            c.op,
            _group(c.ranks, c.apart),
            seconds_text(c.latency),
            rate_text(c.bandwidth),
            f"{c.error:.0%}",
            f"{rate_text(c.beyond)} beyond {binary_text(c.bend)}" if c.bend else "",
        )
        for c in fit_all(samples, backend)
    ]
    title = (
        "fitted: latency of a step, bus bandwidth for large S, median error on what was fitted\n"
    )
    return title + text_table(head, rows, left="lrrrrl", indent=2)


def _forms(forms: Sequence[Growth]) -> str:
    if not forms:
        return "ring or tree: one group size cannot tell; measure two, as with --groups 2,4.\n"
    rows = [
        (g.op, ",".join(map(str, g.ranks)), f"{g.ring:.0%}", f"{g.tree:.0%}", g.better)
        for g in forms
    ]
    title = "ring or tree: error with one latency and one bandwidth for all group sizes\n"
    return title + text_table(("operation", "ranks", "ring", "tree", "better"), rows, indent=2)


def collectives_chart(samples: Sequence[Sample], backend: str) -> str:
    """Bus bandwidth over size as SVG, each operation with its fitted curve."""
    curves = {(c.op, c.ranks, c.apart): c for c in fit_all(samples, backend)}
    series = []
    for (op, ranks, apart), curve in curves.items():
        mine = [s for s in samples if (s.op, s.ranks, s.apart) == (op, ranks, apart)]
        name = f"{op} {ranks}" + (f"x{apart}" if apart > 1 else "")
        sizes = [s.bytes * part for s in mine for part in (1, 2)][:-1]
        line = tuple((float(n), curve.bus(n) / 1e9) for n in sizes)
        series.append(Series(name, tuple((s.bytes, s.bus / 1e9) for s in mine), line))
    notes = [
        "Points: measured, medians, the slowest rank counts. Dashed: latency and bandwidth fitted."
    ]
    across, up = (
        Axis("S", binary_text, 4),
        Axis("bus bandwidth in GB/s", lambda y: f"{y:g}"),
    )
    return chart(f"collectives over {backend}", series, across, up, notes)


def as_json(samples: Sequence[Sample], backend: str) -> Mapping[str, object]:
    """Everything that the table says, and the curves."""
    rows = [
        asdict(s) | {"algorithm": s.algorithm, "factor": s.factor, "bus": s.bus} for s in samples
    ]
    forms = [asdict(g) | {"better": g.better} for g in growths(samples)]
    curves = [asdict(c) for c in fit_all(samples, backend)]
    return {"backend": backend, "samples": rows, "curves": curves, "forms": forms}


PRODUCT_HEAD = (
    "product                  dtype      m x n x k            time        rate   of peak  "
    "of best  unsynchronised clock"
)


def product_line(product: Product, found: Found, done: Sequence[Product]) -> str:
    """One row: `of best` is against the fastest so far in its dtype."""
    peak = found.peak(product.dtype)
    best = max(p.rate for p in done if p.dtype == product.dtype)
    shape = f"{product.m} x {product.n} x {product.k}"
    of_peak = f"{product.rate / peak:.0%}" if peak else "unknown"
    return (
        f"{product.name[:24]:24} {product.dtype:5} {shape:>22} {seconds_text(product.seconds):>8}"
        f" {flops_text(product.rate):>13} {of_peak:>8} {product.rate / best:>8.0%}"
        f"  {flops_text(product.claimed_rate)}"
    )


def products_summary(done: Sequence[Product], found: Found, asked: int) -> str:
    """The best of each dtype against the peak, and what was left out."""
    lines = [""]
    for dtype in dict.fromkeys(p.dtype for p in done):
        best = max((p for p in done if p.dtype == dtype), key=lambda p: p.rate)
        said = judged(best.rate, found.peak(dtype))
        lines.append(
            f"{dtype}: best {flops_text(best.rate)} ({best.m} x {best.n} x {best.k}); HFU {said}."
        )
    if found.kind == "cuda":
        lines.append(
            "The unsynchronised clock reads the launch only: it returns before the product is there."
            " With CUDA_LAUNCH_BLOCKING=1 both agree, and nothing overlaps any more."
        )
    else:
        lines.append("On a CPU a call returns when it is done: the unsynchronised clock agrees.")
    if len(done) < asked:
        lines.append(f"{asked - len(done)} of {asked} products were left out: time or memory.")
    return "\n".join(lines) + "\n"


def products_chart(done: Sequence[Product], found: Found) -> str:
    """Rate of square products over N as SVG."""
    squares = [p for p in done if p.name == "square"]
    series = [
        Series(dtype, tuple((float(p.n), p.rate / 1e12) for p in squares if p.dtype == dtype))
        for dtype in dict.fromkeys(p.dtype for p in squares)
    ]
    up = Axis("TFLOP/s", lambda y: f"{y:g}")
    across = Axis("N of N x N", lambda x: f"{x:g}", 2)
    return chart(f"matrix products on {found.name}", series, across, up, [found.known()])


def iterations_text(done: Sequence[Iteration], found: Found, best: float) -> str:
    """Each iteration's time against the time its products need."""
    dtype = done[0].dtype
    peak = found.peak(dtype)
    lines = [found.known(), f"best product measured in {dtype}: {flops_text(best)}"]
    if peak:
        lines.append(f"peak of the catalogue in {dtype}: {flops_text(peak)}; {judged(best, peak)}")
    for x in done:
        of = peak or best
        lines += [
            "",
            x.name,
            f"  iteration {seconds_text(x.seconds)}, forward alone {seconds_text(x.forward)};"
            f" products need {seconds_text(x.flops / of)} at {'the peak' if peak else 'the best rate'}",
            f"  {'MFU' if peak else 'of the best measured rate'} {x.share(of):.1%}"
            + (f", {x.share(best):.1%} of the best measured rate" if peak else "")
            + (
                ""
                if x.flops == x.flops_full
                else f" (attention causal; {x.flops_full / of / x.seconds:.1%} counted full)"
            ),
        ]
        if x.share(of) > 1:
            lines.append(
                "  More than all of it: the peak is wrong, or too low a rate was measured."
            )
    lines += [
        "",
        "MFU = FLOPs of forward x 3, over the peak, over the time of the whole iteration with its",
        "update. For a real training run 30 % is good, 40 % excellent.",
    ]
    return "\n".join(lines) + "\n"


def overlaps_text(done: Sequence[Overlap]) -> str:
    """How much of the shorter activity is hidden."""
    head = ("", "first", "second", "one by one", "together", "hidden")
    rows = [
        (x.name, *map(seconds_text, (x.first, x.second, x.after, x.together)), f"{x.hidden:.0%}")
        for x in done
    ]
    note = (
        "hidden: what together saves, as part of the shorter one; below 0 they hinder each other."
    )
    return f"{text_table(head, rows)}{note}\n"
