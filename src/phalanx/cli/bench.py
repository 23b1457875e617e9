"""`phalanx bench`: what this machine can do: collectives, matrix products, whole steps, overlap."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .usage import Parser, UsageError, complain, print_json, say

if TYPE_CHECKING:
    from ..bench import Overlap

__all__ = ["run"]

_WIRES = ("threads", "shared", "gloo", "nccl", "auto")

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
        from ..comm import RankFailed

        try:
            return benches[argv[0]](argv[1:])
        except RankFailed as failed:
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
    from ..bench import growths
    from ..bench.tell import as_json, collectives_chart, collectives_text
    from ..plan.size import sizes_of

    parser = _parser("collectives", "Times collectives, checks their results, fits curves.")
    add = parser.add_argument
    add("--ranks", type=int, metavar="N", help="default: the GPUs, else 2")
    add("--ops", default="all", help="separated by commas; default all of them")
    add(
        "--sizes", default="1K:64M", help="1K:512M (steps of 4), 1K:64M:2 or 1K,64K; default 1K:64M"
    )
    add("--groups", metavar="N,NxD", help="group sizes; 2x4: 2 ranks 4 apart; default --ranks")
    add("--dtype", default="fp32", help="bf16, fp16, fp32, fp64")
    add("--wire", default="auto", help=", ".join(_WIRES))
    add("--repeats", type=int, default=7)
    add("--limit", type=float, default=4.0, help="seconds for an operation at a size")
    add("--total", type=float, default=600.0, help="seconds after which no larger size is begun")
    add("--out", metavar="FILE.svg", help="bandwidth over size, with what was fitted")
    said = parser.read(argv)
    world = _World(said.ranks, said.wire)
    ask = _ask(said, world.ranks, sizes_of(said.sizes))
    found = world.run("measure_collectives", ask)
    if found is None:
        return 0
    wrong = [s for s in found if not s.correct]
    if said.out:
        _write(said.out, collectives_chart(found, world.wire))
    if said.json:
        print_json(as_json(found, world.wire))
    else:
        say(collectives_text(found, world.wire, growths(found)), end="")
    return 1 if wrong else 0


def _ask(said: argparse.Namespace, ranks: int, sizes: tuple[int, ...]) -> Any:
    import torch

    from ..bench import OPERATIONS, Ask
    from ..bench.found import dtype_of

    ops = tuple(OPERATIONS) if said.ops == "all" else tuple(said.ops.split(","))
    unknown = [op for op in ops if op not in OPERATIONS]
    if unknown:
        raise UsageError(f"--ops {unknown[0]}: there are {', '.join(OPERATIONS)}.")
    if said.repeats < 1 or said.limit <= 0:
        raise UsageError("--repeats is 1 or more, --limit more than 0.")
    dtype = dtype_of(said.dtype, "cpu")
    if 2 * ranks > 2 / torch.finfo(dtype).eps:
        raise UsageError(
            f"--dtype {said.dtype}: sums over {ranks} ranks cannot be checked exactly; use fp32."
        )
    name = str(dtype).removeprefix("torch.")
    groups = _groups(said.groups or str(ranks), ranks)
    return Ask(ops, sizes, groups, name, said.repeats, said.limit, said.total)


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

    def __init__(self, ranks: int | None, wire: str) -> None:
        import torch

        from ..comm import choose
        from ..comm.join import find

        self.place = find(os.environ)
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        self.ranks = self.place.size if self.place else ranks or max(gpus, 2)
        if self.ranks < 2:
            raise UsageError(f"--ranks is {self.ranks}; a collective needs 2 ranks or more.")
        if self.place and ranks not in (None, self.ranks):
            raise UsageError(f"--ranks {ranks}: the launcher has started {self.ranks}.")
        self.asked = wire
        self.wire = wire if self.place else choose(wire, self.ranks)

    def run(self, name: str, *args: object) -> Any:
        """What a function of bench returns on rank 0; None on the other ranks of a launcher."""
        from .. import bench
        from ..comm import join, workers

        work = getattr(bench, name)
        if self.place is None:
            with workers(self.ranks, wire=self.asked, threads_per_rank=1) as run:
                return run(work, *args)[0]
        world = join(self.ranks, wire=self.asked)
        self.wire = "nccl" if world.device.type == "cuda" else "gloo"
        found = work(world, *args)
        world.close()
        return found if self.place.rank == 0 else None


# ---- matrix products


def _matmul(argv: list[str]) -> int:
    from ..bench import decoder_products, find, measure_products, square_products
    from ..bench.found import dtype_of
    from ..bench.tell import PRODUCT_HEAD, product_line, products_chart, products_summary
    from ..layout import Shape

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
    said = parser.read(argv)
    found = find(said.device)
    gpu = found.kind == "cuda"
    _threads(said.threads)
    dtypes = (said.dtype or ("bf16,fp16,tf32,fp32" if gpu else "fp32,bf16")).split(",")
    for dtype in dtypes:
        dtype_of(dtype, found.kind)
    shape = Shape.load(said.model or ("8b" if gpu else "124m"))
    squares = square_products(dtypes, _lengths(said.sizes))
    wide = decoder_products(shape, said.tokens or (8192 if gpu else 512), dtypes)
    done = []
    if not said.json:
        say(f"{found.known()}\n\n{PRODUCT_HEAD}")
    for wanted, share in ((squares, 0.7), (wide, 0.3)):
        for product in measure_products(found, wanted, limit=said.limit * share):
            done.append(product)
            if not said.json:
                say(product_line(product, found, done), flush=True)
    if said.out:
        _write(said.out, products_chart(done, found))
    if said.json:
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
    if not all(part.isdigit() and int(part) for part in parts):
        raise UsageError(f"--sizes {text}: write 512:32768 or 512,768,4096.")
    if not colon:
        return sorted({int(part) for part in parts})
    found = [int(first)]
    while found[-1] * 2 <= int(last):
        found.append(found[-1] * 2)
    return found


# ---- whole steps


def _mfu(argv: list[str]) -> int:
    from ..bench import Mlp, find, measure_block, measure_mlp, measure_products, square_products
    from ..bench.tell import iterations_text
    from ..layout import Shape

    parser = _parser("mfu", "Times whole iterations: model FLOPs utilisation (MFU).")
    _add_device(parser)
    add = parser.add_argument
    add("--dtype", help="bf16, fp16, tf32, fp32; default bf16 on a GPU, fp32 on a CPU")
    add("--layers", type=int, default=8, help="of the MLP")
    add("--width", type=int, help="of the MLP; default 8192 on a GPU, 1024 on a CPU")
    add("--rows", type=int, help="of the MLP; default its width")
    add("--model", default="", metavar="SHAPE", help="whose block; default by device")
    add("--batch", type=int, default=1, help="sequences for the block")
    add("--seq", type=int, help="their length; default 4096 on a GPU, 512 on a CPU")
    add("--limit", type=float, default=20.0, help="seconds for each")
    said = parser.read(argv)
    found = find(said.device)
    gpu = found.kind == "cuda"
    _threads(said.threads)
    dtype = said.dtype or ("bf16" if gpu else "fp32")
    width = said.width or (8192 if gpu else 1024)
    if min(said.layers, width, said.rows or 1, said.batch, said.seq or 1) < 1:
        raise UsageError("--layers, --width, --rows, --batch and --seq are 1 or more.")
    products = square_products([dtype], (2048, 4096, 8192) if gpu else (512, 1024, 2048))
    best = max(p.rate for p in measure_products(found, products, limit=said.limit))
    mlp = Mlp(said.layers, width, said.rows or width)
    shape = Shape.load(said.model or ("8b" if gpu else "124m"))
    sequence = said.seq or (4096 if gpu else 512)
    done = [
        measure_mlp(found, mlp, dtype, limit=said.limit),
        measure_block(found, shape, said.batch, sequence, dtype, limit=said.limit),
    ]
    if said.json:
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
    from ..bench import find, measure_copies
    from ..bench.tell import overlaps_text
    from ..plan.size import bytes_of

    parser = _parser("overlap", "How much of a copy or a message disappears behind a product.")
    _add_device(parser)
    add = parser.add_argument
    add("--size", type=int, help="N of the product; default 16384 on a GPU, 1024 on a CPU")
    add("--copy", default="", help="bytes of the copy; default 1G on a GPU, 32M on a CPU")
    add("--dtype", help="default bf16 on a GPU, fp32 on a CPU")
    add("--ranks", type=int, metavar="N", help="for the message; default the GPUs, else 2")
    add("--wire", default="auto", help=", ".join(_WIRES))
    add("--limit", type=float, default=20.0, help="seconds for each")
    said = parser.read(argv)
    found = find(said.device)
    gpu = found.kind == "cuda"
    _threads(said.threads)
    size = said.size or (16384 if gpu else 1024)
    copied = bytes_of(said.copy or ("1G" if gpu else "32M"))
    dtype = said.dtype or ("bf16" if gpu else "fp32")
    world = _World(said.ranks, said.wire)
    # Of ranks that a launcher has started one copies and tells; all of them send.
    quiet = world.place is not None and world.place.rank > 0
    done: list[Overlap] = []
    if not quiet:
        done = measure_copies(found, size=size, copied=copied, dtype=dtype, limit=said.limit)
    if not gpu or found.count > 1 or said.ranks or world.place:
        done += world.run("measure_messages", size, copied, dtype, said.limit) or []
    if quiet:
        return 0
    if said.json:
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
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda")
    parser.add_argument("--threads", type=int, help="of the CPU; default those torch takes")


def _threads(count: int | None) -> None:
    if count is not None:
        import torch

        if count < 1:
            raise UsageError(f"--threads is {count}; at least 1 computes.")
        torch.set_num_threads(count)


def _write(path: str, picture: str) -> None:
    from .usage import write

    write(path, {".svg": str}, picture)
