"""Speed of collectives on one machine: gloo, shared memory, and a plain copy.

    python benchmarks/backends.py --ranks 2 4 --sizes 1K 32K 1M 16M 64M 256M

Compares five ways, interleaved in one run: torch's own functions over gloo; our group
over gloo, which sends parts for most collectives; our group over shared memory with
ordinary tensors, and with buffers allocated in shared memory; and, as the limit, a copy
of the same number of bytes within each rank. Each rank uses one thread.

A size is that of the whole buffer of a call on one rank: the output of an all-gather,
the input of a reduce-scatter. A time is that of the slowest rank. A cell shows the
median, minimum and maximum of all runs, and the bus bandwidth of the median: the bytes
exchanged between ranks by the convention of nccl-tests, so that it compares with the
copy's.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm import Group, World, workers

KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "send/receive",
)
WAYS = {
    "gloo": ("gloo", "own"),
    "group over gloo": ("gloo", "group"),
    "shm": ("shm", "group"),
    "shared buffers": ("shm", "buffers"),
    "copy": ("shm", "copy"),
}


def calls(
    group: Group, kind: str, how: str, x: Tensor, part: Tensor, y: Tensor
) -> Callable[[], object]:
    """Return the call to measure; x and y are whole buffers, part is one rank's
    part."""
    before, after = (
        (group.rank - 1) % group.size,
        (group.rank + 1) % group.size,
    )
    if how == "copy":
        return lambda: y.copy_(x)
    if how == "own":
        return {
            "all_reduce": lambda: dist.all_reduce(x),
            "all_gather": lambda: dist.all_gather_into_tensor(x, part),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, x),
            "all_to_all": lambda: dist.all_to_all_single(y, x),
            "broadcast": lambda: dist.broadcast(x, 0),
            "send/receive": lambda: own_ring(x, y, before, after),
        }[kind]

    def ring() -> None:
        group.send(x, after)
        group.receive(y, before)

    return {
        "all_reduce": lambda: group.all_reduce(x),
        "all_gather": lambda: group.all_gather(x, part),
        "reduce_scatter": lambda: group.reduce_scatter(part, x),
        "all_to_all": lambda: group.all_to_all(y, x),
        "broadcast": lambda: group.broadcast(x, 0),
        "send/receive": ring,
    }[kind]


def own_ring(x: Tensor, y: Tensor, before: int, after: int) -> None:
    sent = dist.isend(x, after)
    dist.recv(y, before)
    sent.wait()


def measure(
    world: World, kind: str, how: str, size: int, repeats: int
) -> list[float]:
    """Return the seconds of each call on this rank, after a warm-up call."""
    group = world.split("all", [range(world.size)])
    numel = size // 4
    make = world.empty if how == "buffers" else torch.empty
    x, y, part = (
        make(n, dtype=torch.float32).fill_(1.0)
        for n in (numel, numel, numel // world.size)
    )
    call = calls(group, kind, how, x, part, y)
    # Time several short calls together, so that waiting at the barrier is not measured.
    many = max(1, min(50, (1 << 18) // size))
    seconds = []
    for turn in range(repeats + 1):
        group.barrier()
        start = time.perf_counter()
        for _ in range(many):
            call()
        if turn:
            seconds.append((time.perf_counter() - start) / many)
    world.clear()
    return seconds


def crossing(kind: str, ranks: int) -> float:
    """Return the bytes sent to or from a rank for each byte of the buffer."""
    if kind in ("broadcast", "send/receive"):
        return 1.0
    return (2.0 if kind == "all_reduce" else 1.0) * (ranks - 1) / ranks


def table(
    ranks: int,
    sizes: Sequence[int],
    kinds: Sequence[str],
    rounds: int,
    repeats: int,
) -> None:
    print(
        f"\n{ranks} ranks, float32: ms (least - most) and GB/s of the bus; {rounds} interleaved",
        end="",
    )
    print(
        f" rounds of {repeats}\n\n| collective | size |"
        + "".join(f" {way} | |" for way in WAYS),
        end="",
    )
    print(
        " shared x | buffers x |\n|---|--:|"
        + "--:|--:|" * len(WAYS)
        + "--:|--:|"
    )
    with ExitStack() as stack:
        runs = {
            backend: stack.enter_context(
                workers(ranks, backend=backend, threads_per_rank=1)
            )
            for backend in ("gloo", "shm")
        }
        for kind in kinds:
            for size in sizes:
                seconds: dict[str, list[float]] = {way: [] for way in WAYS}
                for _ in range(rounds):
                    for way, (group, how) in WAYS.items():
                        by_rank = runs[group](
                            measure, kind, how, size, repeats
                        )
                        seconds[way] += map(max, zip(*by_rank, strict=True))
                print(row(kind, size, ranks, seconds), flush=True)


def row(
    kind: str, size: int, ranks: int, seconds: dict[str, list[float]]
) -> str:
    text = f"| {kind} | {name_of(size)} |"
    middle = {way: statistics.median(times) for way, times in seconds.items()}
    for way, times in seconds.items():
        bus = (
            size
            * (1.0 if way == "copy" else crossing(kind, ranks))
            / middle[way]
            / 1e9
        )
        low, high = min(times) * 1e3, max(times) * 1e3
        text += (
            f" {middle[way] * 1e3:.3g} ({low:.3g} - {high:.3g}) | {bus:.2f} |"
        )
    return text + "".join(
        f" {middle['gloo'] / middle[way]:.1f} |"
        for way in ("shm", "shared buffers")
    )


def name_of(size: int) -> str:
    return f"{size >> 20} MB" if size >> 20 else f"{size >> 10} KB"


def bytes_of(text: str) -> int:
    return int(text[:-1]) << {"K": 10, "M": 20}[text[-1].upper()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[2, 4])
    add(
        "--sizes",
        type=bytes_of,
        nargs="+",
        default=[1 << k for k in (10, 15, 20, 24, 26, 28)],
    )
    add("--kinds", nargs="+", choices=KINDS, default=KINDS)
    add("--rounds", type=int, default=3)
    add("--repeats", type=int, default=5)
    args = parser.parse_args()
    for ranks in args.ranks:
        table(ranks, args.sizes, args.kinds, args.rounds, args.repeats)


if __name__ == "__main__":
    main()
