"""All benches in short, as one measured machine: what `phalanx doctor --out` writes and plans read."""

import platform
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import date

import torch

from ..comm import choose, workers
from ..layout import Shape
from ..layout.choices import BF16, FP16, FP32, TF32
from ..plan import Hidden, Machine, Rate, Topology, TopologyError, read_topology
from .clock import Clock
from .collectives import OPERATIONS, Sample, Sweep, measure_collectives
from .device import LocalDevice
from .fit import fit_all
from .matmul import decoder_products, measure_products, square_products
from .overlap import measure_copies, measure_messages
from .stores import measure_stores


class WrongResult(RuntimeError):
    """A collective gave wrong numbers: whatever its time was, it means nothing."""


@dataclass(frozen=True)
class Thoroughness:
    """Thoroughness of a measurement: seconds in all, ranks of the largest group, the model whose
    products count."""

    limit: float = 60.0
    ranks: int = 0  # 0: the GPUs, or 4 on a CPU
    backend: str = "auto"
    model: str = "124m"
    sizes: tuple[int, ...] = tuple(4096 << 2 * i for i in range(7))  # to 16 MiB
    with_host: bool = False

    def worlds(self, device: LocalDevice) -> tuple[int, ...]:
        """2, 4, 8, ... up to the largest."""
        most = self.ranks or (device.count if device.kind == "cuda" else 4)
        powers = [2**i for i in range(1, most.bit_length()) if 2**i < most]
        return (*powers, most) if most > 1 else ()


def topology_of(device: LocalDevice) -> Topology:
    """Links among the GPUs; empty if there are none or the driver is silent."""
    # What is not known is left out of the file; everything measured stands without it.
    with suppress(TopologyError, OSError):
        if device.kind == "cuda":
            return read_topology()
    return Topology((), ())


def measure_machine(
    device: LocalDevice,
    options: Thoroughness,
    report: Callable[[str], None] = lambda line: None,
) -> Machine:
    """The measured machine. `report` gets a line for each part."""
    report("memory bandwidth")
    stores = measure_stores(device, limit=options.limit / 30)
    report("matrix products")
    rates = _rates(device, options)
    report("overlap of products and copies")
    size, copied, dtype = (
        (16384, 1 << 30, BF16) if device.kind == "cuda" else (768, 32 << 20, FP32)
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
    if wrong := sorted(
        {f"{s.op} of {s.ranks} ranks" for s in samples if not s.correct}
    ):
        raise WrongResult(
            f"wrong numbers came from {', '.join(wrong)}; nothing was written."
        )
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
    wide = decoder_products(Shape.load(options.model), 8192 if gpu else 512, dtypes)
    products = sorted([*squares, *wide], key=lambda product: product.flops)
    measured = measure_products(device, products, limit=options.limit / 4, repeats=5)
    return tuple(Rate(p.dtype, p.m, p.n, p.k, p.rate) for p in measured)


def _collectives(
    device: LocalDevice, options: Thoroughness, ranks: int, backend: str
) -> tuple[list[Sample], tuple[Hidden, ...]]:
    """A world of its own for each number of ranks, since ranks that idle would share the cores."""
    # In a world of 4 also the two groups of every other rank, both at once: an outer axis.
    groups = (
        ((ranks, 1), (ranks // 2, 2)) if ranks > 2 and ranks % 2 == 0 else ((ranks, 1),)
    )
    share = options.limit / 2 / max(1, len(options.worlds(device)))
    each = share / len(OPERATIONS) / len(options.sizes) / len(groups)
    sweep = Sweep(OPERATIONS, options.sizes, groups, repeats=5, limit=each, total=share)
    size, dtype = (8192, BF16) if device.kind == "cuda" else (512, FP32)
    with workers(ranks, backend=backend, threads_per_rank=1) as run:
        samples: list[Sample] = run(measure_collectives, sweep)[0]
        messages = run(measure_messages, size, 16 << 20, dtype, options.limit / 20)[0]
    return samples, tuple(each.as_hidden() for each in messages)
