"""Attention over several ranks: ring, Ulysses and a single rank, forward and backward.

    python benchmarks/context.py --ranks 2 --sequence 1024 2048 4096 8192 16384

Each rank uses one thread, and the runs of a sequence length are interleaved. Times are
medians with minimum and maximum. Memory is that of live storages on one rank: kept
between forward and backward, including the result, and the peak, including messages in
flight. Memory that a kernel allocates internally is not counted.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from phalanx.comm import World, workers
from phalanx.comm.alone import AloneWorld
from phalanx.cost import Live
from phalanx.layout import Layout
from phalanx.models import Core
from phalanx.parallel.batch import held_times, time_multiple
from phalanx.parallel.context import RingCore, UlyssesCore, around

HEADS, KV_HEADS, SIZE = 8, 2, 64


def attention(
    world: World, text: str, length: int, documents: int, measured: bool
) -> tuple[float, float]:
    """Return the seconds of a forward and backward pass on this rank or, if `measured`,
    the bytes kept between the two and the peak."""
    layout = Layout.parse(text)
    core, own = (
        _core(world, layout),
        held_times(length, *_grid(layout), world.rank),
    )
    ids = (own * documents // length).unsqueeze(0) if documents else None
    barrier = world.split("all", [range(world.size)]).barrier

    leaf = torch.zeros((), requires_grad=True)

    def forward() -> torch.Tensor:
        # Computed, like the output of a matmul: a leaf tensor would be kept for its
        # gradient.
        made = (
            torch.randn(1, len(own), n, SIZE) + leaf
            for n in (HEADS, KV_HEADS, KV_HEADS)
        )
        return core(*made, None, ids)

    barrier()
    if measured:
        with Live() as live:
            y = forward()
            kept = float(live.now)
            y.backward(torch.ones_like(y))
        result = kept, float(live.most)
    else:
        start = time.perf_counter()
        y = forward()
        y.backward(torch.ones_like(y))
        barrier()
        result = time.perf_counter() - start, 0.0
    world.clear()
    return result


def _grid(layout: Layout) -> tuple[int, int]:
    return layout.mesh.of("cp.ring"), layout.mesh.of("cp.ulysses")


def _core(world: World, layout: Layout) -> nn.Module:
    mesh, (places, _) = layout.mesh, _grid(layout)
    ring = world.split("ring", mesh.groups(["cp.ring"]), around(places))
    ulysses = world.split("ulysses", mesh.groups(["cp.ulysses"]))
    core = RingCore(ring) if ring.size > 1 else Core()
    return UlyssesCore(core, ulysses) if ulysses.size > 1 else core


def table(
    lengths: Sequence[int],
    ranks: int,
    backend: str,
    repeats: int,
    documents: int,
) -> None:
    ways = {
        "one rank": "",
        "ring": f"cp{ranks}:ring",
        "ulysses": f"cp{ranks}:ulysses",
    }
    if ranks == 4:
        ways["2 x 2"] = "cp4:2x2"
    print(
        f"{ranks} ranks over {backend}, {HEADS} heads and {KV_HEADS} k/v heads of {SIZE}, float32,",
        end=" ",
    )
    print(
        f"{documents or 1} document(s), {repeats} runs; ms (least - most) and MiB a rank\n"
    )
    print(
        "| tokens |"
        + "".join(f" {way} ms | x one | kept | x one | peak |" for way in ways)
    )
    print("|--:|" + "--:|--:|--:|--:|--:|" * len(ways))
    with workers(ranks, backend=backend) as run:
        for length in lengths:
            seconds, bytes = _measure(run, ways, length, repeats, documents)
            row, one = f"| {length} |", seconds["one rank"]
            for way in ways:
                middle = statistics.median(seconds[way])
                row += f" {middle * 1e3:.0f} ({min(seconds[way]) * 1e3:.0f} - "
                row += f"{max(seconds[way]) * 1e3:.0f}) | {middle / statistics.median(one):.2f} |"
                kept, peak = bytes[way]
                row += f" {kept / 2**20:.1f} | {kept / bytes['one rank'][0]:.2f} |"
                row += f" {peak / 2**20:.1f} |"
            print(row, flush=True)


def _measure(
    run, ways: dict[str, str], length: int, repeats: int, documents: int
):
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    bytes = {}
    # The first round warms up; the last measures memory.
    for turn in range(repeats + 2):
        for way, text in ways.items():
            asked = (text, length, documents, turn > repeats)
            told = (
                run(attention, *asked)
                if text
                else [attention(AloneWorld(), *asked)]
            )
            most = tuple(map(max, zip(*told, strict=True)))
            if turn > repeats:
                bytes[way] = most
            elif turn:
                seconds[way].append(most[0])
    return seconds, bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    number = partial(parser.add_argument, type=int)
    number("--sequence", nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    number("--ranks", default=2)
    parser.add_argument("--backend", default="shm", choices=("shm", "gloo"))
    number("--repeats", default=5)
    number("--documents", default=0, help="cut the sequence into this many")
    args = parser.parse_args()
    torch.set_num_threads(1)
    multiple = (
        time_multiple(Layout.parse(f"cp{args.ranks}")) if args.ranks > 1 else 1
    )
    if args.ranks < 2 or any(length % multiple for length in args.sequence):
        parser.error(
            f"needs 2 ranks or more, and sequences that divide by {multiple}"
        )
    table(
        args.sequence, args.ranks, args.backend, args.repeats, args.documents
    )


if __name__ == "__main__":
    main()
