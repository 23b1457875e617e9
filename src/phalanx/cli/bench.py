"""`phalanx bench`: measures collectives, matmuls, whole steps and overlap on this
machine. Every result is checked, or its method is shown.

  phalanx bench collectives --ranks 2 --sizes 1K:64M --out bandwidth.svg
  phalanx bench collectives --groups 2,4,2x2 --ranks 4 --ops all_reduce,send
  phalanx bench matmul --dtype bf16,fp32 --model 8b
  phalanx bench mfu
  phalanx bench overlap --ranks 2

`phalanx doctor --out machine.toml` runs short versions of all of them and writes the
file that plans read. `phalanx bench BENCH --help` lists the options of a benchmark.
Under torchrun, the ranks that it started are used. Exit code 0: done; 1: a collective
gave wrong values, or a rank failed; 2: wrong usage.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from ..drawing import ChartAxis, Series, chart, figure, frame, text_table
from ..layout import Shape
from ..layout.choices import (
    BF16,
    DTYPES,
    FP16,
    FP32,
    FP64,
    GLOO,
    LOCAL_RANKS,
    NCCL,
    PRECISIONS,
    TF32,
)
from ..layout.numbers import (
    binary_text,
    flops_text,
    parse_byte_sizes,
    parse_bytes,
    rate_text,
    seconds_text,
)
from ..planner.curve import FACTORS, Curve
from .before import refuse_large
from .bench_chart import curves_svg
from .parser import POSITIVE, Parser, chosen, whole
from .usage import UsageError, result, save, say, write

if TYPE_CHECKING:
    from ..bench import (
        Growth,
        Iteration,
        LocalDevice,
        MatrixProduct,
        Overlap,
        Sample,
    )

LONGEST = 1 << 20  # maximum side of a square matmul
# Option defaults that depend on the device: on a CPU, on a GPU.
_DEFAULTS: dict[str, tuple[Any, Any]] = {
    "dtypes": ((FP32, BF16), (BF16, FP16, TF32, FP32)),
    "dtype": (FP32, BF16),
    "model": ("124m", "8b"),
    "tokens": (512, 8192),
    "seq": (512, 4096),
    "width": (1024, 8192),
    "size": (1024, 16384),
    "copy": (32 << 20, 1 << 30),
    "squares": ((512, 1024, 2048), (2048, 4096, 8192)),
}


def run(argv: list[str]) -> int:
    parser = Parser(__doc__, json=False)
    benches = {
        "collectives": _collectives,
        "matmul": _matmul,
        "mfu": _mfu,
        "overlap": _overlap,
    }
    return chosen(parser, argv, benches)


def _parser(
    text: str | None, limit: float, of: str = "time limit for each"
) -> Parser:
    parser = Parser(text)
    parser.add("--limit", default=limit, help=of)
    return parser


def _add_device(parser: Parser) -> None:
    parser.add("--device")
    parser.add(
        "--threads", type=whole(1, 4096), help="CPU threads; default torch's"
    )


def _default(name: str, kind: str = "cpu") -> Any:
    return _DEFAULTS[name][kind == "cuda"]


def _device(args: argparse.Namespace, options: Sequence[str]) -> LocalDevice:
    """Return the device to measure, and fill in the options that the command line left
    out."""
    import torch

    from ..bench import local_device

    device = local_device(args.device)
    if args.threads:
        torch.set_num_threads(args.threads)
    for name in options:
        if getattr(args, name) is None:
            setattr(args, name, _default(name, device.kind))
    return device


def _add_ranks(parser: Parser) -> None:
    parser.add(
        "--ranks",
        type=whole(2, LOCAL_RANKS),
        help="ranks in the group; default: one for each GPU, else 2",
    )
    parser.add("--backend")


class _Ranks:
    """The ranks that measure: those that torchrun or Slurm started, otherwise new
    ones."""

    def __init__(self, ranks: int | None, backend: str) -> None:
        import torch

        from ..comm import choose
        from ..layout.environment import rendezvous

        self.launched = rendezvous(os.environ)
        # Without GPUs two ranks show what messages cost.
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        self.count = (
            self.launched.size if self.launched else ranks or max(gpus, 2)
        )
        if self.count < 2:
            raise UsageError(
                "the launcher started 1 rank; a collective needs at least 2."
            )
        if self.launched and ranks not in (None, self.count):
            raise UsageError(
                f"--ranks {ranks}: the launcher started {self.count}."
            )
        # Under a launcher the backend is that of `join`.
        self.requested = backend
        self.backend = (
            backend if self.launched else choose(backend, self.count)
        )

    @property
    def quiet(self) -> bool:
        """True if another rank of the launcher prints."""
        return self.launched is not None and self.launched.rank > 0

    def run(self, work: Callable[..., Any], *args: object) -> Any:
        """Run a function of bench and return rank 0's result; None on the launcher's
        other ranks."""
        from ..comm import join, workers

        if self.launched is None:
            with workers(
                self.count, backend=self.requested, threads_per_rank=1
            ) as run:
                return run(work, *args)[0]
        # Ranks of a launcher: each calls this command.
        world = join(self.count, backend=self.requested)
        self.backend = NCCL if world.device.type == "cuda" else GLOO
        value = work(world, *args)
        world.close()
        return None if self.quiet else value


# ---- collectives


def _collectives(argv: list[str]) -> int:
    """`phalanx bench collectives`: times collectives, checks their results and fits
    curves."""
    parser = _parser(
        _collectives.__doc__, 4.0, "time limit for one operation and size"
    )
    add = parser.add
    _add_ranks(parser)
    add(
        "--ops",
        default="all",
        type=_operations,
        metavar="OPS",
        help="operations, separated by commas",
    )
    sizes = "1K:512M (in steps of 4), 1K:64M:2 or 1K,64K"
    add(
        "--sizes",
        type=parse_byte_sizes,
        default="1K:64M",
        metavar="SIZES",
        help=sizes,
    )
    add(
        "--groups",
        metavar="N,NxD",
        help="group sizes; 2x4 is 2 ranks, 4 apart; default --ranks",
    )
    add(
        "--dtype",
        default=FP32,
        choices=[x for x in PRECISIONS if x != TF32],
        help="dtype of the data",
    )
    add(
        "--repeats",
        type=whole(),
        default=7,
        help="number of measurements of each",
    )
    more = "no larger size starts after this time"
    add("--total", type=POSITIVE, default=600.0, metavar="SECONDS", help=more)
    parser.add_output(
        "--out",
        ".svg",
        ".html",
        help="chart of bandwidth over size, with the fit",
    )
    args = parser.read(argv)
    # Each rank holds what it sends, what it receives, and the expected result.
    need = 3.0 * max(args.sizes) * (args.ranks or 2)
    refuse_large(
        need,
        f"--sizes to {binary_text(max(args.sizes))}",
        "Write smaller sizes, such as 1K:64M",
    )
    # Checked early where the number of ranks is known already.
    if args.groups and args.ranks:
        _groups(args.groups, args.ranks)
    import torch

    from ..bench import Sweep, fit_all, growths, measure_collectives

    ranks = _Ranks(args.ranks, args.backend)
    groups = _groups(args.groups or str(ranks.count), ranks.count)
    dtype = DTYPES[args.dtype].torch
    # Sums of 0 to 2 over all ranks must be exact in the dtype.
    if 2 * ranks.count > 2 / torch.finfo(getattr(torch, dtype)).eps:
        raise UsageError(
            f"--dtype {args.dtype}: sums over {ranks.count} ranks cannot be checked exactly; use fp32."
        )
    sweep = Sweep(
        args.ops,
        args.sizes,
        groups,
        dtype,
        args.repeats,
        args.limit,
        args.total,
    )
    # Other ranks of a launcher print nothing.
    samples = ranks.run(measure_collectives, sweep)
    if samples is None:
        return 0
    curves, forms = fit_all(samples, ranks.backend), growths(samples)
    if args.out:
        draw = partial(
            curves_svg, curves, samples=samples, backend=ranks.backend
        )
        page = partial(frame, f"collectives over {ranks.backend}")
        write(
            args.out,
            {".svg": lambda draw: draw(), ".html": lambda d: page(figure(d))},
            draw,
        )
    figures = {
        "backend": ranks.backend,
        "samples": [
            asdict(s)
            | {"algorithm": s.algorithm, "factor": s.factor, "bus": s.bus}
            for s in samples
        ],
        "curves": [asdict(curve) for curve in curves],
        "forms": [
            asdict(growth) | {"better": growth.better} for growth in forms
        ],
    }
    right = all(sample.correct for sample in samples)
    return result(
        args,
        figures,
        collectives_text(samples, ranks.backend, forms),
        good=right,
    )


def _operations(text: str) -> tuple[str, ...]:
    ops = tuple(FACTORS) if text == "all" else tuple(text.split(","))
    for op in ops:
        if op not in FACTORS:
            raise UsageError(
                f"unknown operation {op[:60]!r}; choose from {', '.join(FACTORS)}."
            )
    return ops


def _groups(text: str, ranks: int) -> tuple[tuple[int, int], ...]:
    groups = []
    for part in text.split(","):
        # "4" -> (4, 1), "2x4" -> (2, 4).
        match = re.fullmatch("([0-9]{1,6})(?:x([0-9]{1,6}))?", part)
        if not match:
            raise UsageError(
                f"--groups {part!r}: write 4 for neighbours, 2x4 for 2 ranks 4 apart."
            )
        size, apart = int(match[1]), int(match[2] or 1)
        if size < 2 or apart < 1 or size * apart > ranks:
            raise UsageError(
                f"--groups {part!r}: a group has at least 2 ranks and fits into the {ranks} of the world."
            )
        groups.append((size, apart))
    return tuple(groups)


def group_text(of: Sample | Curve) -> str:
    return f"{of.ranks}x{of.apart}" if of.apart > 1 else str(of.ranks)


def collectives_text(
    samples: Sequence[Sample], backend: str, forms: Sequence[Growth]
) -> str:
    """Return the table, all-reduce beside its two halves, the fitted curves, and ring
    against tree."""
    from ..bench import fit_all

    if not samples:
        return "nothing was measured: --total elapsed before the first size.\n"
    rows, halves, curves, grown = [], [], [], []
    for s in samples:
        size, time = binary_text(s.bytes), seconds_text(s.seconds)
        span = f"{seconds_text(s.least)}..{seconds_text(s.most)}"
        rates = (
            f"{s.algorithm / 1e9:.3f} GB/s",
            f"{s.factor:.3f}",
            f"{s.bus / 1e9:.3f}",
        )
        right = "right" if s.correct else "WRONG"
        rows.append((s.op, group_text(s), size, time, span, *rates, right))
        if s.halves:
            # Two steps over one: above 1, the whole all-reduce is faster.
            ratio = f"{s.halves / s.seconds:.2f}"
            halves.append((s.ranks, size, time, seconds_text(s.halves), ratio))
    for c in fit_all(samples, backend):
        found = (
            seconds_text(c.latency),
            rate_text(c.bandwidth),
            f"{c.error:.0%}",
        )
        beyond = (
            f"{rate_text(c.beyond)} beyond {binary_text(c.bend)}"
            if c.bend
            else ""
        )
        curves.append((c.op, group_text(c), *found, beyond))
    for g in forms:
        ranks = ",".join(map(str, g.ranks))
        grown.append((g.op, ranks, f"{g.ring:.0%}", f"{g.tree:.0%}", g.better))
    text = (
        f"backend {backend}. S is a rank's input of all_reduce, reduce_scatter, reduce and all_to_all,"
        "\nits output of all_gather, the root's whole of scatter and gather. GB = 1e9 bytes.\n\n"
        f"{text_table(_SAMPLES, rows)}"
    )
    if halves:
        text += "\nall-reduce = reduce-scatter then all-gather: the same values, these times\n"
        text += text_table(
            ("ranks", "S", "all-reduce", "in two steps", "ratio"),
            halves,
            indent=2,
        )
    if curves:
        text += "\nfitted: latency of a step, bus bandwidth for large S, median error of the fit\n"
        curve = (
            "operation",
            "ranks",
            "latency",
            "bandwidth",
            "error",
            "beyond",
        )
        text += text_table(curve, curves, left="lrrrrl", indent=2)
    # One group size cannot tell a ring from a tree.
    if not forms:
        more = "one group size cannot tell; measure two, as with --groups 2,4."
        return f"{text}\nring or tree: {more}\n"
    head = ("operation", "ranks", "ring", "tree", "better")
    title = "ring or tree: error with one latency and one bandwidth for all group sizes"
    return f"{text}\n{title}\n{text_table(head, grown, indent=2)}"


_SAMPLES = (
    "operation",
    "group",
    "S",
    "time",
    "least..most",
    "S/t",
    "factor",
    "bus",
    "result",
)


# ---- matrix products


def _matmul(argv: list[str]) -> int:
    """`phalanx bench matmul`: times matmuls and shows TFLOP/s and hardware FLOPs
    utilization (HFU)."""
    parser = _parser(_matmul.__doc__, 60.0, "time limit in total")
    _add_device(parser)
    add = parser.add
    dtypes = "dtypes, separated by commas: bf16, fp16, tf32, fp32, fp64; default by device"
    add("--dtype", dest="dtypes", type=_dtypes, metavar="DTYPE", help=dtypes)
    sizes = "sides of square matmuls: 512:32768 (doubling), or 512,768"
    add(
        "--sizes",
        type=_lengths,
        default="512:32768",
        metavar="SIZES",
        help=sizes,
    )
    add("--model", help="model whose matmuls are measured; default by device")
    add(
        "--tokens",
        type=whole(),
        help="tokens in the model's matmuls; default by device",
    )
    parser.add_output("--out", ".svg", help="chart of the rate over size")
    args = parser.read(argv)
    shape = Shape.load(args.model) if args.model else None
    from ..bench import decoder_products, measure_products, square_products

    device = _device(args, ("dtypes", "model", "tokens"))
    squares = square_products(args.dtypes, args.sizes)
    wide = decoder_products(
        shape or Shape.load(args.model), args.tokens, args.dtypes
    )
    done: list[MatrixProduct] = []
    if not args.json:
        # Lines appear as they are measured; JSON is printed at the end.
        say(f"{device.known()}\n\n{PRODUCT_HEAD}")
    for products, share in ((squares, 0.7), (wide, 0.3)):
        for product in measure_products(
            device, products, limit=args.limit * share
        ):
            done.append(product)
            if not args.json:
                say(product_line(product, device, done), flush=True)
    if args.out:
        across = ChartAxis("N of N x N", "{:g}".format, 2)
        up = ChartAxis("TFLOP/s", "{:g}".format)
        square = [p for p in done if p.name == "square"]
        series = [
            Series(
                name,
                tuple(
                    (float(p.n), p.rate / 1e12)
                    for p in square
                    if p.dtype == name
                ),
            )
            for name in dict.fromkeys(p.dtype for p in square)
        ]
        title = f"matmuls on {device.name}"
        save(args.out, chart(title, series, across, up, [device.known()]))
    rows = [
        asdict(p)
        | {"flops": p.flops, "rate": p.rate, "claimed_rate": p.claimed_rate}
        for p in done
    ]
    figures = {
        "device": device.name,
        "known": device.entry is not None,
        "products": rows,
    }
    return result(
        args, figures, products_summary(done, device, len(squares) + len(wide))
    )


def _dtypes(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in PRECISIONS:
            raise UsageError(
                f"unknown precision {name[:60]!r}; use {', '.join(PRECISIONS)}."
            )
    return names


def _lengths(text: str) -> tuple[int, ...]:
    lengths = parse_byte_sizes(text, step=2)
    if max(lengths) > LONGEST:
        raise UsageError(
            f"{text[:60]}: write 512:32768 or 512,768, with values from 1 to {LONGEST:,}."
        )
    return lengths


PRODUCT_HEAD = (
    "product                  dtype      m x n x k            time        rate   of peak  "
    "of best  unsynchronised clock"
)


def product_line(
    product: MatrixProduct, device: LocalDevice, done: Sequence[MatrixProduct]
) -> str:
    """Return one row; `of best` is relative to the fastest so far in its dtype."""
    peak = device.peak(product.dtype)
    best = max(p.rate for p in done if p.dtype == product.dtype)
    shape = f"{product.m} x {product.n} x {product.k}"
    share = f"{product.rate / peak:.0%}" if peak else "unknown"
    return (
        f"{product.name[:24]:24} {product.dtype:5} {shape:>22} {seconds_text(product.seconds):>8}"
        f" {flops_text(product.rate):>13} {share:>8} {product.rate / best:>8.0%}"
        f"  {flops_text(product.claimed_rate)}"
    )


def products_summary(
    done: Sequence[MatrixProduct], device: LocalDevice, planned: int
) -> str:
    """Summarize the best of each dtype relative to the peak, and what was left out."""
    lines = [""]
    for dtype in dict.fromkeys(p.dtype for p in done):
        best = max((p for p in done if p.dtype == dtype), key=lambda p: p.rate)
        lines.append(
            f"{dtype}: best {flops_text(best.rate)} ({best.m} x {best.n} x {best.k});"
            f" HFU {of_peak(best.rate, device.peak(dtype))}."
        )
    lines.append(
        "On a CPU a call returns when it has finished: the unsynchronised clock agrees."
        if device.kind == "cpu"
        else "The unsynchronised clock measures only the launch: the call returns before the result is ready."
        " With CUDA_LAUNCH_BLOCKING=1 both agree, but nothing overlaps."
    )
    if len(done) < planned:
        lines.append(
            f"{planned - len(done)} of {planned} matmuls were skipped for lack of time or memory."
        )
    return "\n".join(lines) + "\n"


def of_peak(rate: float, peak: float) -> str:
    """Return a rate as a share of a peak. More than 100 % shows that the peak is
    wrong."""
    if not peak:
        return "peak unknown"
    more = (
        " (above 100 %: the catalogue's peak is wrong)" if rate > peak else ""
    )
    return f"{rate / peak:.0%} of the catalogue's peak{more}"


# ---- whole steps


def _mfu(argv: list[str]) -> int:
    """`phalanx bench mfu`: times whole iterations and shows model FLOPs utilization
    (MFU)."""
    parser = _parser(_mfu.__doc__, 20.0)
    _add_device(parser)
    add = parser.add
    add(
        "--dtype",
        choices=[x for x in PRECISIONS if x != FP64],
        help="default by device",
    )
    add("--layers", default=8, help="layers of the MLP")
    add(
        "--width",
        type=whole(1, LONGEST),
        help="width of the MLP; default by device",
    )
    add(
        "--rows",
        type=whole(),
        help="rows of the MLP's input; default: its width",
    )
    add("--model", help="model whose block is measured; default by device")
    add("--batch", default=1, help="sequences in the block's batch")
    add("--seq", help="tokens in each sequence; default by device")
    args = parser.read(argv)
    # The least that is asked for: the device is not known yet.
    wide = args.width or _default("width")
    # Weights, their gradients and each layer's activations, two bytes an element.
    need = 2.0 * args.layers * wide * (2 * wide + (args.rows or wide))
    way_out = "Write a smaller --width, --layers or --rows"
    refuse_large(need, f"an MLP of {args.layers:,} layers", way_out)
    hidden = Shape.load(args.model or _default("model")).hidden
    kept = 2.0 * args.batch * (args.seq or _default("seq")) * hidden
    refuse_large(
        kept, f"a batch of {args.batch:,}", "Write a smaller --batch or --seq"
    )
    from ..bench import (
        WideMlp,
        measure_block,
        measure_mlp,
        measure_products,
        square_products,
    )

    device = _device(args, ("dtype", "width", "model", "seq"))
    products = square_products([args.dtype], _default("squares", device.kind))
    best = max(
        p.rate for p in measure_products(device, products, limit=args.limit)
    )
    mlp = WideMlp(args.layers, args.width, args.rows or args.width)
    shape = Shape.load(args.model)
    done = [
        measure_mlp(device, mlp, args.dtype, limit=args.limit),
        measure_block(
            device, shape, args.batch, args.seq, args.dtype, limit=args.limit
        ),
    ]
    peak = device.peak(args.dtype)
    rows = [
        asdict(x)
        | {
            "mfu": x.share(peak) if peak else None,
            "of_best_measured": x.share(best),
        }
        for x in done
    ]
    figures = {
        "device": device.name,
        "peak": peak or None,
        "best_measured": best,
    }
    return result(
        args,
        figures | {"iterations": rows},
        iterations_text(done, device, best),
    )


def iterations_text(
    done: Sequence[Iteration], device: LocalDevice, best: float
) -> str:
    """Return each iteration's time beside the time that its matmuls need."""
    dtype = done[0].dtype
    peak = device.peak(dtype)
    lines = [
        device.known(),
        f"best matmul measured in {dtype}: {flops_text(best)}",
    ]
    if peak:
        share = of_peak(best, peak)
        lines.append(
            f"the catalogue's peak in {dtype}: {flops_text(peak)}; {share}"
        )
    # An unknown device is compared with its best matmul.
    of = peak or best
    for x in done:
        shares = [
            f"{'MFU' if peak else 'of the best measured rate'} {x.share(of):.1%}"
        ]
        shares += [f"{x.share(best):.1%} of the best measured rate"] * bool(
            peak
        )
        full = f" (attention causal; {x.flops_full / of / x.seconds:.1%} counted full)"
        lines += [
            "",
            x.name,
            f"  iteration {seconds_text(x.seconds)}, forward alone {seconds_text(x.forward)};"
            f" matmuls need {seconds_text(x.flops / of)} at {'the peak' if peak else 'the best rate'}",
            "  " + ", ".join(shares) + full * (x.flops != x.flops_full),
        ]
        if x.share(of) > 1:
            lines.append(
                "  Above 100 %: the peak is wrong, or the measured rate is too low."
            )
    lines += [
        "",
        "MFU = FLOPs of forward x 3, over the peak, over the time of the whole iteration with its",
        "update. For a real training run 30 % is good, 40 % excellent.",
    ]
    return "\n".join(lines) + "\n"


# ---- overlap


def _overlap(argv: list[str]) -> int:
    """`phalanx bench overlap`: measures how much of a copy or a message is hidden
    behind a matmul."""
    parser = _parser(_overlap.__doc__, 20.0)
    _add_device(parser)
    _add_ranks(parser)
    add = parser.add
    add(
        "--size",
        type=whole(1, LONGEST),
        help="side of the square matmul; default by device",
    )
    add(
        "--copy",
        type=parse_bytes,
        metavar="BYTES",
        help="bytes to copy, such as 1G; default by device",
    )
    add("--dtype", choices=PRECISIONS, help="default by device")
    args = parser.read(argv)
    # Two ranks at least, each with three squares of two bytes an element.
    count = args.ranks or 2
    need = 6.0 * (args.size or _default("size")) ** 2 * count
    refuse_large(need, f"--size {args.size}", "Write a smaller one")
    if args.copy:
        need = 2.0 * args.copy * count
        refuse_large(
            need,
            f"--copy {binary_text(args.copy)}",
            "Write fewer bytes, as 32M",
        )
    from ..bench import measure_copies, measure_messages

    device = _device(args, ("size", "copy", "dtype"))
    ranks = _Ranks(args.ranks, args.backend)
    done: list[Overlap] = []
    # Of a launcher's ranks one copies and prints; all of them send.
    if not ranks.quiet:
        sizes = {"size": args.size, "copied": args.copy}
        done = measure_copies(
            device, **sizes, dtype=args.dtype, limit=args.limit
        )
    # One GPU has nobody to send messages to.
    if (
        device.kind == "cpu"
        or device.count > 1
        or args.ranks
        or ranks.launched
    ):
        done += (
            ranks.run(
                measure_messages, args.size, args.copy, args.dtype, args.limit
            )
            or []
        )
    if not ranks.quiet:
        rows = [asdict(x) | {"hidden": x.hidden} for x in done]
        result(
            args,
            {"device": device.name, "overlaps": rows},
            overlaps_text(done),
        )
    return 0


def overlaps_text(done: Sequence[Overlap]) -> str:
    """Return a table of overlaps: the share of the shorter activity that is hidden."""
    head = ("", "first", "second", "one by one", "together", "hidden")
    rows = [
        (
            x.name,
            *map(seconds_text, (x.first, x.second, x.after, x.together)),
            f"{x.hidden:.0%}",
        )
        for x in done
    ]
    note = (
        "time saved by running together, as a share of the shorter one; negative: they"
        " slow each other down."
    )
    return f"{text_table(head, rows)}hidden: {note}\n"
