"""Compares torch's collectives over gloo and over shared memory: `python -m torch_shm`.

Both backends are timed in turn, call by call, in one run of the same processes. A time
is that of the slowest rank; a cell shows the median of all rounds.
"""

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import NAME

SIZES = {
    "1 KB": 1 << 10,
    "32 KB": 1 << 15,
    "1 MB": 1 << 20,
    "16 MB": 1 << 24,
    "64 MB": 1 << 26,
}
# call, size, seconds over gloo, seconds over shm
Timing = tuple[str, str, float, float]
# torch's stubs of distributed lack some of what is used here.
_dist: Any = dist
_torch: Any = torch


def calls(
    whole: Tensor, part: Tensor, other: Tensor, group: Any
) -> dict[str, Callable[[], Any]]:
    """Return one call of each kind. `whole` and `other` have the full size; `part` is
    one rank's share."""
    rank, size = dist.get_rank(), dist.get_world_size()

    # A ring: every rank sends to the next and receives from the one before.
    def ring() -> None:
        sent = _dist.isend(whole, (rank + 1) % size, group=group)
        _dist.recv(other, (rank - 1) % size, group=group)
        sent.wait()

    return {
        "all_reduce": lambda: _dist.all_reduce(whole, group=group),
        "all_gather": lambda: _dist.all_gather_into_tensor(
            whole, part, group=group
        ),
        "reduce_scatter": lambda: _dist.reduce_scatter_tensor(
            part, whole, group=group
        ),
        "all_to_all": lambda: _dist.all_to_all_single(
            other, whole, group=group
        ),
        "broadcast": lambda: _dist.broadcast(whole, 0, group=group),
        "send and receive": ring,
    }


def seconds(call: Callable[[], Any]) -> float:
    """Return the slowest rank's time of a call that all ranks start together."""
    dist.barrier()
    start = time.perf_counter()
    call()
    taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def measure(rank: int, size: int, store: str, rounds: int) -> list[Timing]:
    """Measure all calls; every rank returns the same timings."""
    torch.set_num_threads(1)
    # torch 2.13 has new names for two of these calls; 2.11 has only the old ones.
    warnings.simplefilter("ignore", FutureWarning)
    dist.init_process_group(
        "gloo", store=_dist.FileStore(store, size), rank=rank, world_size=size
    )
    groups = {
        name: dist.new_group(list(range(size)), backend=name)
        for name in ("gloo", NAME)
    }
    timings = []
    for text, bytes_ in SIZES.items():
        # Elements of float32, in equal parts for all ranks.
        numel = bytes_ // 4 // size * size
        whole, other = torch.ones(numel), torch.ones(numel)
        part = torch.ones(numel // size)
        ways = {
            name: calls(whole, part, other, group)
            for name, group in groups.items()
        }
        for kind in ways[NAME]:
            times: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(rounds + 1):  # the first round warms up
                for name, way in ways.items():
                    times[name].append(seconds(way[kind]))
                    # Sums would grow without bound from call to call.
                    whole.fill_(1.0)
            gloo, shm = (
                statistics.median(times[name][1:]) for name in ("gloo", NAME)
            )
            timings.append((kind, text, gloo, shm))
    dist.destroy_process_group()
    return timings


def table(timings: list[Timing]) -> str:
    """Format a row for each call and a column for each size, in microseconds: gloo /
    shared memory."""
    kinds = list(dict.fromkeys(kind for kind, _, _, _ in timings))
    cells = {(kind, size): (gloo, shm) for kind, size, gloo, shm in timings}
    lines = [
        "microseconds, gloo / shm".ljust(26)
        + "".join(size.rjust(20) for size in SIZES)
    ]
    for kind in kinds:
        pairs = [cells[kind, size] for size in SIZES]
        texts = [
            f"{gloo * 1e6:,.0f} / {shm * 1e6:,.0f}" for gloo, shm in pairs
        ]
        lines.append(
            kind.ljust(26) + "".join(text.rjust(20) for text in texts)
        )
    return "\n".join(lines)


def _rank(rank: int, size: int, store: str, rounds: int) -> None:
    timings = measure(rank, size, store, rounds)
    if rank == 0:
        print(
            f"{size} ranks, {os.cpu_count()} cores, median of {rounds} rounds"
        )
        print(table(timings))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m torch_shm", description=__doc__
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    if args.ranks < 2 or args.rounds < 1:
        parser.error("at least two ranks and one round are needed")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        _torch.multiprocessing.spawn(
            _rank,
            (args.ranks, os.path.join(folder, "store"), args.rounds),
            nprocs=args.ranks,
        )
