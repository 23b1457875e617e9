"""The parts of a device, and the reason why moving data costs more than computing with
it."""

import time

import torch
from torch.utils.flop_counter import FlopCounterMode

from phalanx.planner import device, hierarchy
from phalanx_lab.lab import Lab
from phalanx_lab.mlp import draw, start

WEIGHTS = 16e9  # bytes: 8 billion values of 2 bytes


def hardware(lab: Lab) -> None:
    """Hardware: how much each level of memory and network holds, how fast it is, and what that means.

    A device computes with what is in its registers. Everything comes from somewhere: from caches on
    the chip, from the memory beside it, from other devices of the machine, from other machines. Each
    level holds more than the one before and is slower. Almost every idea in this lecture exists
    because of one line of this table: work is divided so that much is computed with each byte that
    crosses a slow line.
    """
    h100 = device("h100-sxm")
    places = hierarchy(h100)

    # The levels of an H100 from the inside out, as its makers state them, links in both directions.
    # The last column is what one reading of all weights of a model of 8 billion, 16 GB, takes at that
    # level: 5 ms from the device's own memory, 160 from another machine.
    peak, memory = h100.peak("bf16"), h100.memory.bandwidth
    lab.step("what an H100 has", peak_flops=peak, memory_bytes_a_second=memory)
    rows = []
    for place in places:
        holds = f"{place.bytes / 1e6:,.1f}" if place.bytes else ""
        took = f"{1e3 * WEIGHTS / place.bandwidth:,.1f}"
        rows.append((place.name, holds, f"{place.bandwidth / 1e9:,.0f}", took))
    lab.table(
        "from the inside out", ("level", "MB", "GB/s", "ms for 16 GB"), rows
    )
    speeds = [place.bandwidth for place in places]
    lab.after(bytes_a_second=torch.tensor(speeds, dtype=torch.float64))
    lab.claim(
        "each level is slower than the one before",
        speeds,
        sorted(speeds, reverse=True),
    )

    # While one byte comes from memory, its units can do 295 operations. What does fewer with each
    # byte waits for memory, however fast the units are: norms, activation functions, sums of
    # gradients, the optimizer. A product of two n x n matrices does 2 n^3 operations with 3 n^2
    # numbers, so it does more with each byte the larger it is. Splitting a product makes it
    # smaller: that is what limits how far a layer can be split.
    lab.step("operations for each byte of memory", ridge=h100.ridge)
    lab.claim("an H100 can do 295 for each byte", round(h100.ridge), 295)
    products, counted = [], []
    for n in (16, 64, 256, 1024):
        a = torch.empty(n, n, dtype=torch.bfloat16, device="meta")
        with FlopCounterMode(display=False) as counter:
            product = a @ a
        flops, moved = counter.get_total_flops(), 3 * product.nbytes
        share = f"{flops / peak / max(flops / peak, moved / memory):.0%}"
        products.append(
            (n, f"{flops:,}", f"{moved:,}", f"{flops / moved:.1f}", share)
        )
        counted.append(flops / moved)
        lab.claim(f"torch counts 2 n^3 operations, n = {n}", flops, 2 * n**3)
    header = (
        "n",
        "operations",
        "bytes",
        "for each byte",
        "of the peak at most",
    )
    lab.table("products of n x n in bf16", header, products)
    lab.after(for_each_byte=torch.tensor(counted))
    lab.claim(
        "they grow as n / 3", counted, [n / 3 for n in (16, 64, 256, 1024)]
    )

    # The same on this machine: a product and a sum of equal matrices, the better of three. The sum
    # does one operation for every 24 bytes, and so is bound by memory on every machine.
    n = lab.size.width
    a, b = draw(1, n, n), draw(2, n, n)
    lab.step("a product and a sum, on this machine", a=a, b=b)
    speeds = []
    for name, call, flops in (
        ("product", torch.matmul, 2 * n**3),
        ("sum", torch.add, n * n),
    ):
        seconds = []
        for _ in range(3):
            begin = time.perf_counter()
            with lab.doing(name):
                call(a, b)
            seconds.append(time.perf_counter() - begin)
        speeds.append(flops / min(seconds) / 1e9)
    lab.after(billion_operations_a_second=torch.tensor(speeds))
    lab.note(
        f"Rank {lab.rank}: product {speeds[0]:.3g}, sum {speeds[1]:.3g} billion a second."
    )
    # All ranks together do the product of the whole batch, each that of its rows.
    lab.step(
        "n devices do one product in 1/n of the operations each",
        rows=lab.rows(0),
    )
    with FlopCounterMode(display=False) as counter:
        _ = lab.rows(0) @ start(lab.size)[0]
    own = counter.get_total_flops()
    flops = torch.tensor(float(own), dtype=torch.float64)
    lab.group.all_reduce(flops)
    lab.after(own_operations=float(own), of_all=flops)
    lab.claim(
        "together they do those of one",
        flops,
        2 * lab.size.batch * lab.size.width**2,
    )
