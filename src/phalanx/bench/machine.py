"""Short versions of all benchmarks, as one measured machine: `phalanx doctor --out`
writes it for plans."""

import platform
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import date

import torch

from ..comm import choose, workers
from ..layout import Shape
from ..layout.choices import BF16, FP16, FP32, TF32
from ..planner import (
    Hidden,
    Machine,
    Rate,
    Topology,
    TopologyError,
    read_topology,
)
from .clock import Clock
from .collectives import OPERATIONS, Sample, Sweep, measure_collectives
from .device import LocalDevice
from .fit import fit_all
from .matmul import decoder_products, measure_products, square_products
from .overlap import measure_copies, measure_messages
from .stores import measure_stores


class WrongResult(RuntimeError):
    """Raised if a collective gave wrong values, so that its time is meaningless."""


@dataclass(frozen=True)
class Thoroughness:
    """The extent of a measurement: total seconds, ranks of the largest group, and the
    model whose matmuls are measured."""

    limit: float = 60.0
    ranks: int = 0  # 0: the number of GPUs, or 4 on a CPU
    backend: str = "auto"
    model: str = "124m"
    # To 16 MiB.
    sizes: tuple[int, ...] = tuple(4096 << 2 * i for i in range(7))
    with_host: bool = False

    def worlds(self, device: LocalDevice) -> tuple[int, ...]:
        """Return the group sizes 2, 4, 8, ... up to the largest."""
        most = self.ranks or (device.count if device.kind == "cuda" else 4)
        # 2, 4, 8, ... below the largest, and the largest itself.
        powers = [2**i for i in range(1, most.bit_length()) if 2**i < most]
        return (*powers, most) if most > 1 else ()


def topology_of(device: LocalDevice) -> Topology:
    """Return the links among the GPUs; empty if there are none or the driver does not
    list them."""
    # Unknown links are omitted from the file; everything else is still valid.
    with suppress(TopologyError, OSError):
        if device.kind == "cuda":
            return read_topology()
    return Topology((), ())


def measure_machine(
    device: LocalDevice,
    options: Thoroughness,
    report: Callable[[str], None] = lambda line: None,
) -> Machine:
    """Measure this machine. `report` gets a line for each part."""
    report("memory bandwidth")
    # Shares of the whole time: most goes to collectives.
    stores = measure_stores(device, limit=options.limit / 30)
    report("matmuls")
    rates = _rates(device, options)
    report("overlap of matmuls and copies")
    # Side of the matmul, bytes of the copy, and dtype.
    size, copied, dtype = (
        (16384, 1 << 30, BF16)
        if device.kind == "cuda"
        else (768, 32 << 20, FP32)
    )
    limit = options.limit / 20
    overlaps = measure_copies(
        device, size=size, copied=copied, dtype=dtype, limit=limit
    )
    hidden = tuple(each.as_hidden() for each in overlaps)
    samples: list[Sample] = []
    backend = ""
    for ranks in options.worlds(device):
        report(f"collectives of {ranks} ranks")
        backend = choose(options.backend, ranks)
        more, messages = _collectives(device, options, ranks, backend)
        samples, hidden = samples + more, hidden + messages
    # A wrong result makes its time worthless.
    if wrong := sorted(
        {f"{s.op} of {s.ranks} ranks" for s in samples if not s.correct}
    ):
        raise WrongResult(
            f"{', '.join(wrong)} gave wrong values; nothing was written."
        )
    # One element: only the start of a kernel takes time.
    x = torch.zeros(1, device=device.device)
    (launch,) = Clock(device.device).measure(lambda: x.add_(1.0), limit=1.0)
    return Machine(
        name="this",
        date=date.today().isoformat(),
        method=Clock(device.device).method,
        device=device.name,
        kind=device.kind,
        count=device.count,
        cores=device.cores,
        memory=float(device.memory),
        host=platform.node() if options.with_host else "",
        catalogue=device.entry.name if device.entry else "",
        threads=torch.get_num_threads(),
        torch=str(torch.__version__),
        launch=launch.median,
        stores=stores,
        rates=rates,
        hidden=hidden,
        curves=fit_all(samples, backend),
        links=topology_of(device).kinds,
    )


def _rates(device: LocalDevice, options: Thoroughness) -> tuple[Rate, ...]:
    gpu = device.kind == "cuda"
    dtypes = (BF16, FP16, TF32, FP32) if gpu else (FP32, BF16)
    squares = square_products(
        dtypes, [(512 if gpu else 128) << i for i in range(6 if gpu else 5)]
    )
    wide = decoder_products(
        Shape.load(options.model), 8192 if gpu else 512, dtypes
    )
    # Small ones first: their rate tells how long large ones will take.
    products = sorted([*squares, *wide], key=lambda product: product.flops)
    measured = measure_products(
        device, products, limit=options.limit / 4, repeats=5
    )
    return tuple(Rate(p.dtype, p.m, p.n, p.k, p.rate) for p in measured)


def _collectives(
    device: LocalDevice, options: Thoroughness, ranks: int, backend: str
) -> tuple[list[Sample], tuple[Hidden, ...]]:
    """Measure collectives and overlap in a world of this size.

    Each number of ranks gets its own world, as idle ranks would compete for the cores.
    """
    # Also both groups of every other rank at once, like an outer mesh axis.
    groups = (
        ((ranks, 1), (ranks // 2, 2))
        if ranks > 2 and ranks % 2 == 0
        else ((ranks, 1),)
    )
    # Half of the time for all worlds, in equal parts.
    share = options.limit / 2 / max(1, len(options.worlds(device)))
    each = share / len(OPERATIONS) / len(options.sizes) / len(groups)
    sweep = Sweep(
        OPERATIONS, options.sizes, groups, repeats=5, limit=each, total=share
    )
    size, dtype = (8192, BF16) if device.kind == "cuda" else (512, FP32)
    # Fresh processes for each world, with one thread for each rank.
    with workers(ranks, backend=backend, threads_per_rank=1) as run:
        samples: list[Sample] = run(measure_collectives, sweep)[0]
        messages = run(
            measure_messages, size, 16 << 20, dtype, options.limit / 20
        )[0]
    return samples, tuple(each.as_hidden() for each in messages)
