"""`phalanx bench`: what this machine can do: collectives, matrix products, whole steps, overlap."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..layout import Shape
from ..layout.choices import BACKENDS, DEVICES, FP64, PRECISIONS, TF32
from ..layout.numbers import parse_byte_sizes, parse_bytes
from ..plan.curve import FACTORS
from .before import refuse_large, refuse_ranks
from .outputs import try_file
from .usage import Parser, UsageError, complain, print_json, say

if TYPE_CHECKING:
    from ..bench import Overlap

__all__ = ["run"]

_SUMMED = tuple(name for name in PRECISIONS if name != TF32)
_TRAINED = tuple(name for name in PRECISIONS if name != FP64)
_LONGEST = 1 << 20  # the side of a matrix product
_THREADS = 4096

_EPILOG = """\
  phalanx bench collectives --ranks 2 --sizes 1K:64M --out bandwidth.svg
  phalanx bench collectives --ranks 4 --groups 2,4,2x2 --ops all_reduce,all_gather
  phalanx bench matmul --dtype bf16,fp32 --model 8b
  phalanx bench mfu
  phalanx bench overlap --ranks 2

`phalanx doctor --out machine.toml` runs all of it in short and writes what plans read.
`phalanx bench BENCH --help` tells the options of one. Under torchrun the ranks it started are used.
Exit code 0: done; 1: a collective gave wrong numbers, or a rank failed; 2: wrong usage."""


def run(argv: list[str]) -> int:
    """Run one bench."""
    benches: dict[str, Callable[[list[str]], int]] = {
        "collectives": _collectives,
        "matmul": _matmul,
        "mfu": _mfu,
        "overlap": _overlap,
    }
    if argv and argv[0] in benches:
        try:
            return benches[argv[0]](argv[1:])
        except RuntimeError as failed:
            from ..comm import RankFailed

            if not isinstance(failed, RankFailed):
                raise
            complain(str(failed))
            return 1
    parser = Parser(
        "phalanx bench",
        "Measures this machine; every result is checked or has its method told.",
        _EPILOG,
    )
    parser.add_argument("bench", choices=benches, metavar="BENCH", help=", ".join(benches))
    parser.add_argument("--json", action="store_true", help="every bench takes it")
    parser.read(argv)
    return 2


# ---- collectives


def _collectives(argv: list[str]) -> int:
    parser = _parser("collectives", "Times collectives, checks their results, fits curves.")
    add = parser.add_argument
    add("--ranks", type=int, metavar="N", help="default: the GPUs, else 2")
    add("--ops", default="all", help="separated by commas; default all of them")
    add(
        "--sizes", default="1K:64M", help="1K:512M (steps of 4), 1K:64M:2 or 1K,64K; default 1K:64M"
    )
    add("--groups", metavar="N,NxD", help="group sizes; 2x4: 2 ranks 4 apart; default --ranks")
    add("--dtype", default="fp32", choices=_SUMMED, help="default fp32")
    add("--backend", default="auto", choices=BACKENDS, help="what carries messages; default auto")
    add("--repeats", type=int, default=7)
    add("--limit", type=float, default=4.0, help="seconds for an operation at a size")
    add("--total", type=float, default=600.0, help="seconds after which no larger size is begun")
    add("--out", metavar="FILE.svg", help="bandwidth over size, with what was fitted")
    args = parser.read(argv)
    refuse_ranks(args.ranks, 2)
    sizes, ops = parse_byte_sizes(args.sizes), _operations(args.ops)
    if args.repeats < 1 or not args.limit > 0:
        raise UsageError("--repeats is 1 or more, --limit more than 0.")
    # Each rank has what it sends, what it receives, and what should have come.
    need = 3.0 * max(sizes) * (args.ranks or 2)
    refuse_large(need, f"--sizes {args.sizes[:60]}", "Write smaller sizes, as 1K:64M")
    if args.groups and args.ranks:
        _groups(args.groups, args.ranks)
    try_file(args.out, formats=(".svg",))
    from ..bench import growths
    from ..bench.tell import as_json, collectives_chart, collectives_text

    world = _World(args.ranks, args.backend)
    ask = _ask(args, world.ranks, sizes, ops)
    found = world.run("measure_collectives", ask)
    if found is None:
        return 0
    wrong = [s for s in found if not s.correct]
    if args.out:
        _write(args.out, collectives_chart(found, world.backend))
    if args.json:
        print_json(as_json(found, world.backend))
    else:
        say(collectives_text(found, world.backend, growths(found)), end="")
    return 1 if wrong else 0


def _operations(text: str) -> tuple[str, ...]:
    ops = tuple(FACTORS) if text == "all" else tuple(text.split(","))
    unknown = [op for op in ops if op not in FACTORS]
    if unknown:
        raise UsageError(f"--ops {unknown[0][:60]}: there are {', '.join(FACTORS)}.")
    return ops


def _ask(args: argparse.Namespace, ranks: int, sizes: tuple[int, ...], ops: tuple[str, ...]) -> Any:
    import torch

    from ..bench import Ask
    from ..bench.found import dtype_of

    dtype = dtype_of(args.dtype, "cpu")
    if 2 * ranks > 2 / torch.finfo(dtype).eps:
        raise UsageError(
            f"--dtype {args.dtype}: sums over {ranks} ranks cannot be checked exactly; use fp32."
        )
    name = str(dtype).removeprefix("torch.")
    groups = _groups(args.groups or str(ranks), ranks)
    return Ask(ops, sizes, groups, name, args.repeats, args.limit, args.total)


def _groups(text: str, ranks: int) -> tuple[tuple[int, int], ...]:
    found = []
    for part in text.split(","):
        size, _, apart = part.partition("x")
        if not (f"{size}{apart}".isascii() and size.isdecimal() and (apart or "1").isdecimal()):
            raise UsageError(f"--groups {part!r}: write 4 for neighbours, 2x4 for 2 ranks 4 apart.")
        shape = int(size), int(apart or 1)
        if shape[0] < 2 or shape[1] < 1 or shape[0] * shape[1] > ranks:
            raise UsageError(
                f"--groups {part!r}: a group has 2 ranks or more and fits the {ranks} of the world."
            )
        found.append(shape)
    return tuple(found)


class _World:
    """The ranks that measure: those that torchrun or Slurm has started, else new ones."""

    def __init__(self, ranks: int | None, backend: str) -> None:
        import torch

        from ..comm import choose
        from ..comm.join import rendezvous

        self.launched = rendezvous(os.environ)
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        self.ranks = self.launched.size if self.launched else ranks or max(gpus, 2)
        if self.ranks < 2:
            raise UsageError("the launcher has started 1 rank; a collective needs 2 or more.")
        if self.launched and ranks not in (None, self.ranks):
            raise UsageError(f"--ranks {ranks}: the launcher has started {self.ranks}.")
        self.asked = backend
        self.backend = backend if self.launched else choose(backend, self.ranks)

    def run(self, name: str, *args: object) -> Any:
        """What a function of bench returns on rank 0; None on the other ranks of a launcher."""
        from .. import bench
        from ..comm import join, workers

        work = getattr(bench, name)
        if self.launched is None:
            with workers(self.ranks, backend=self.asked, threads_per_rank=1) as run:
                return run(work, *args)[0]
        world = join(self.ranks, backend=self.asked)
        self.backend = "nccl" if world.device.type == "cuda" else "gloo"
        found = work(world, *args)
        world.close()
        return found if self.launched.rank == 0 else None


# ---- matrix products


def _matmul(argv: list[str]) -> int:
    parser = _parser("matmul", "Times matrix products: TFLOP/s and hardware utilisation (HFU).")
    _add_device(parser)
    add = parser.add_argument
    add("--dtype", help="separated by commas: bf16, fp16, tf32, fp32, fp64; default by device")
    add("--sizes", default="512:32768", help="N of N x N: 512:32768 by doubling, or 512,768,4096")
    add(
        "--model", default="", metavar="SHAPE", help="whose rectangular products; default by device"
    )
    add("--tokens", type=int, default=0, help="rows of those; default by device")
    add("--limit", type=float, default=60.0, help="seconds; what would pass them is left out")
    add("--out", metavar="FILE.svg", help="rate over size")
    args = parser.read(argv)
    _refuse_device(args)
    lengths = _lengths(args.sizes)
    if args.tokens < 0 or not args.limit > 0:
        raise UsageError("--tokens is 1 or more, --limit more than 0.")
    try_file(args.out, formats=(".svg",))
    from ..bench import decoder_products, find, measure_products, square_products
    from ..bench.found import dtype_of
    from ..bench.tell import PRODUCT_HEAD, product_line, products_chart, products_summary

    found = find(args.device)
    gpu = found.kind == "cuda"
    _threads(args.threads)
    dtypes = (args.dtype or ("bf16,fp16,tf32,fp32" if gpu else "fp32,bf16")).split(",")
    for dtype in dtypes:
        dtype_of(dtype, found.kind)
    shape = Shape.load(args.model or ("8b" if gpu else "124m"))
    squares = square_products(dtypes, lengths)
    wide = decoder_products(shape, args.tokens or (8192 if gpu else 512), dtypes)
    done = []
    if not args.json:
        say(f"{found.known()}\n\n{PRODUCT_HEAD}")
    for wanted, share in ((squares, 0.7), (wide, 0.3)):
        for product in measure_products(found, wanted, limit=args.limit * share):
            done.append(product)
            if not args.json:
                say(product_line(product, found, done), flush=True)
    if args.out:
        _write(args.out, products_chart(done, found))
    if args.json:
        rows = [
            asdict(p) | {"flops": p.flops, "rate": p.rate, "claimed_rate": p.claimed_rate}
            for p in done
        ]
        print_json({"device": found.name, "known": found.entry is not None, "products": rows})
    else:
        say(products_summary(done, found, len(squares) + len(wide)), end="")
    return 0


def _lengths(text: str) -> list[int]:
    first, colon, last = text.partition(":")
    parts = [first, last] if colon else text.split(",")
    # A limit on digits: Python itself refuses to read very many.
    if not all(re.fullmatch("[0-9]{1,7}", part) and 0 < int(part) <= _LONGEST for part in parts):
        raise UsageError(
            f"--sizes {text[:60]}: write 512:32768 or 512,768,4096, numbers of 1 to {_LONGEST:,}."
        )
    if not colon:
        return sorted({int(part) for part in parts})
    found = [int(first)]
    while found[-1] * 2 <= int(last):
        found.append(found[-1] * 2)
    return found


# ---- whole steps


def _mfu(argv: list[str]) -> int:
    parser = _parser("mfu", "Times whole iterations: model FLOPs utilisation (MFU).")
    _add_device(parser)
    add = parser.add_argument
    add("--dtype", choices=_TRAINED, help="default bf16 on a GPU, fp32 on a CPU")
    add("--layers", type=int, default=8, help="of the MLP")
    add("--width", type=int, help="of the MLP; default 8192 on a GPU, 1024 on a CPU")
    add("--rows", type=int, help="of the MLP; default its width")
    add("--model", default="", metavar="SHAPE", help="whose block; default by device")
    add("--batch", type=int, default=1, help="sequences for the block")
    add("--seq", type=int, help="their length; default 4096 on a GPU, 512 on a CPU")
    add("--limit", type=float, default=20.0, help="seconds for each")
    args = parser.read(argv)
    _refuse_device(args)
    least = (args.layers, args.width, args.rows, args.batch, args.seq)
    if min(1 if x is None else x for x in least) < 1 or not args.limit > 0:
        raise UsageError(
            "--layers, --width, --rows, --batch and --seq are 1 or more, --limit more than 0."
        )
    wide = args.width or 1024
    # Weights and their gradients, and what each layer keeps, two bytes a number.
    need = 2.0 * args.layers * wide * (2 * wide + (args.rows or wide))
    refuse_large(
        need, f"an MLP of {args.layers:,} layers", "Write less --width, --layers or --rows"
    )
    shape = Shape.load(args.model or "124m")
    kept = 2.0 * args.batch * (args.seq or 512) * shape.hidden
    refuse_large(kept, f"a batch of {args.batch:,}", "Write less --batch or --seq")
    from ..bench import Mlp, find, measure_block, measure_mlp, measure_products, square_products
    from ..bench.tell import iterations_text

    found = find(args.device)
    gpu = found.kind == "cuda"
    _threads(args.threads)
    dtype = args.dtype or ("bf16" if gpu else "fp32")
    width = args.width or (8192 if gpu else 1024)
    products = square_products([dtype], (2048, 4096, 8192) if gpu else (512, 1024, 2048))
    best = max(p.rate for p in measure_products(found, products, limit=args.limit))
    mlp = Mlp(args.layers, width, args.rows or width)
    shape = Shape.load(args.model or ("8b" if gpu else "124m"))
    sequence = args.seq or (4096 if gpu else 512)
    done = [
        measure_mlp(found, mlp, dtype, limit=args.limit),
        measure_block(found, shape, args.batch, sequence, dtype, limit=args.limit),
    ]
    if args.json:
        peak = found.peak(dtype)
        rows = [
            asdict(x) | {"mfu": x.share(peak) if peak else None, "of_best_measured": x.share(best)}
            for x in done
        ]
        print_json(
            {"device": found.name, "peak": peak or None, "best_measured": best, "iterations": rows}
        )
    else:
        say(iterations_text(done, found, best), end="")
    return 0


# ---- overlap


def _overlap(argv: list[str]) -> int:
    parser = _parser("overlap", "How much of a copy or a message disappears behind a product.")
    _add_device(parser)
    add = parser.add_argument
    add("--size", type=int, help="N of the product; default 16384 on a GPU, 1024 on a CPU")
    add("--copy", default="", help="bytes of the copy; default 1G on a GPU, 32M on a CPU")
    add("--dtype", choices=PRECISIONS, help="default bf16 on a GPU, fp32 on a CPU")
    add("--ranks", type=int, metavar="N", help="for the message; default the GPUs, else 2")
    add("--backend", default="auto", choices=BACKENDS, help="what carries messages; default auto")
    add("--limit", type=float, default=20.0, help="seconds for each")
    args = parser.read(argv)
    _refuse_device(args)
    refuse_ranks(args.ranks, 2)
    if (args.size is not None and args.size < 1) or not args.limit > 0:
        raise UsageError("--size is 1 or more, --limit more than 0.")
    ranks = args.ranks or 2
    refuse_large(
        6.0 * (args.size or 1024) ** 2 * ranks, f"--size {args.size}", "Write a smaller one"
    )
    if args.copy:
        need = 2.0 * parse_bytes(args.copy) * ranks
        refuse_large(need, f"--copy {args.copy[:60]}", "Write fewer bytes, as 32M")
    from ..bench import find, measure_copies
    from ..bench.tell import overlaps_text

    found = find(args.device)
    gpu = found.kind == "cuda"
    _threads(args.threads)
    size = args.size or (16384 if gpu else 1024)
    copied = parse_bytes(args.copy or ("1G" if gpu else "32M"))
    dtype = args.dtype or ("bf16" if gpu else "fp32")
    world = _World(args.ranks, args.backend)
    # Of ranks that a launcher has started one copies and tells; all of them send.
    quiet = world.launched is not None and world.launched.rank > 0
    done: list[Overlap] = []
    if not quiet:
        done = measure_copies(found, size=size, copied=copied, dtype=dtype, limit=args.limit)
    if not gpu or found.count > 1 or args.ranks or world.launched:
        done += world.run("measure_messages", size, copied, dtype, args.limit) or []
    if quiet:
        return 0
    if args.json:
        print_json(
            {"device": found.name, "overlaps": [asdict(x) | {"hidden": x.hidden} for x in done]}
        )
    else:
        say(overlaps_text(done), end="")
    return 0


# ---- what all share


def _parser(name: str, description: str) -> Parser:
    parser = Parser(f"phalanx bench {name}", description)
    parser.add_argument("--json", action="store_true", help="everything that was measured, as JSON")
    return parser


def _add_device(parser: Parser) -> None:
    parser.add_argument("--device", default="auto", choices=DEVICES, help="default auto")
    parser.add_argument("--threads", type=int, help="of the CPU; default those torch takes")


def _refuse_device(args: argparse.Namespace) -> None:
    """Refuse precisions, models and threads that no device has."""
    if args.threads is not None and not 1 <= args.threads <= _THREADS:
        raise UsageError(f"--threads is {args.threads:,}; write 1 to {_THREADS:,}.")
    for dtype in (args.dtype or "fp32").split(","):
        if dtype not in PRECISIONS:
            raise UsageError(
                f"--dtype: there is no precision {dtype[:60]!r}; use {', '.join(PRECISIONS)}."
            )
        if dtype == "tf32" and args.device == "cpu":
            raise UsageError("--dtype tf32 is how GPUs multiply fp32; on a CPU use fp32 or bf16.")
    if getattr(args, "model", ""):
        Shape.load(args.model)


def _threads(count: int | None) -> None:
    if count is not None:
        import torch

        torch.set_num_threads(count)


def _write(path: str, picture: str) -> None:
    from .usage import write

    write(path, {".svg": str}, picture)
