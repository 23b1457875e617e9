"""All benches in short, as one measured machine: what `phalanx doctor --out` writes and plans read."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date

import torch

from ..comm import choose, workers
from ..layout import Shape
from ..plan import Hidden, Machine, Rate, Topology, TopologyError, read_topology
from .clock import Clock
from .collectives import OPERATIONS, Ask, Sample, WrongResult, measure_collectives
from .fit import fit_all
from .found import Found
from .matmul import decoder_products, measure_products, square_products
from .overlap import measure_copies, measure_messages
from .stores import measure_stores

__all__ = ["Examination", "examine", "topology_of"]


_AMONG_RANKS = "among ranks barriers before and after, the slowest rank counts"


@dataclass(frozen=True)
class Examination:
    """How thorough: seconds for all, ranks of the largest group, the model whose products count."""

    limit: float = 60.0
    ranks: int = 0  # 0: the GPUs, or 4 on a CPU
    backend: str = "auto"
    model: str = "124m"
    sizes: tuple[int, ...] = tuple(4096 << 2 * i for i in range(7))  # to 16 MiB
    with_host: bool = False

    def worlds(self, found: Found) -> tuple[int, ...]:
        """2, 4, 8, ... up to the largest."""
        most = self.ranks or (found.count if found.kind == "cuda" else 4)
        powers = [2**i for i in range(1, most.bit_length()) if 2**i < most]
        return (*powers, most) if most > 1 else ()


def topology_of(found: Found) -> Topology:
    """Who is linked to whom among the GPUs; empty where there are none or the driver is silent."""
    if found.kind != "cuda":
        return Topology((), ())
    try:
        return read_topology()
    except (TopologyError, OSError):
        # What cannot be told is left out of the file; everything measured stands without it.
        return Topology((), ())


def examine(
    found: Found, asked: Examination, say: Callable[[str], None] = lambda line: None
) -> Machine:
    """The measured machine. `say` hears what is being done."""
    say("memory bandwidth")
    stores = measure_stores(found, limit=asked.limit / 30)
    say("matrix products")
    rates = _rates(found, asked)
    say("overlap of products and copies")
    hidden = _copies(found, asked)
    samples: list[Sample] = []
    backend = ""
    for ranks in asked.worlds(found):
        say(f"collectives of {ranks} ranks")
        backend = choose(asked.backend, ranks)
        more, messages = _collectives(found, asked, ranks, backend)
        samples, hidden = samples + more, hidden + messages
    _refuse_wrong(samples)
    return Machine(
        name="this",
        date=date.today().isoformat(),
        method=f"{Clock(found.device).method}; {_AMONG_RANKS}",
        device=found.name,
        kind=found.kind,
        count=found.count,
        cores=found.cores,
        memory=float(found.memory),
        host=platform.node() if asked.with_host else "",
        catalogue=found.entry.name if found.entry else "",
        threads=torch.get_num_threads(),
        torch=str(torch.__version__),
        launch=_launch(found),
        stores=stores,
        rates=rates,
        hidden=hidden,
        curves=fit_all(samples, backend),
        links=topology_of(found).kinds,
    )


def _launch(found: Found) -> float:
    x = torch.zeros(1, device=found.device)
    (timing,) = Clock(found.device).measure(lambda: x.add_(1.0), limit=1.0)
    return timing.median


def _rates(found: Found, asked: Examination) -> tuple[Rate, ...]:
    gpu = found.kind == "cuda"
    dtypes = ("bf16", "fp16", "tf32", "fp32") if gpu else ("fp32", "bf16")
    sizes = (512, 1024, 2048, 4096, 8192, 16384) if gpu else (128, 256, 512, 1024, 2048)
    tokens = 8192 if gpu else 512
    shape = Shape.load(asked.model)
    wanted = [*square_products(dtypes, sizes), *decoder_products(shape, tokens, dtypes)]
    wanted.sort(key=lambda product: product.flops)
    limit = asked.limit / 4
    return tuple(p.as_rate() for p in measure_products(found, wanted, limit=limit, repeats=5))


def _copies(found: Found, asked: Examination) -> tuple[Hidden, ...]:
    size, copied, dtype = (
        (16384, 1 << 30, "bf16") if found.kind == "cuda" else (768, 32 << 20, "fp32")
    )
    seen = measure_copies(found, size=size, copied=copied, dtype=dtype, limit=asked.limit / 20)
    return tuple(each.as_hidden() for each in seen)


def _collectives(
    found: Found, asked: Examination, ranks: int, backend: str
) -> tuple[list[Sample], tuple[Hidden, ...]]:
    """A world of its own for each number of ranks, since ranks that idle would share the cores."""
    # In a world of 4 also the two groups of every other rank, both at once: an outer axis.
    groups = ((ranks, 1), (ranks // 2, 2)) if ranks > 2 and ranks % 2 == 0 else ((ranks, 1),)
    share = asked.limit / 2 / max(1, len(asked.worlds(found)))
    each = share / len(OPERATIONS) / len(asked.sizes) / len(groups)
    ask = Ask(tuple(OPERATIONS), asked.sizes, groups, repeats=5, limit=each, total=share)
    size, dtype = (8192, "bf16") if found.kind == "cuda" else (512, "fp32")
    with workers(ranks, backend=backend, threads_per_rank=1) as run:
        samples: list[Sample] = run(measure_collectives, ask)[0]
        messages = run(measure_messages, size, 16 << 20, dtype, asked.limit / 20)[0]
    return samples, tuple(each.as_hidden() for each in messages)


def _refuse_wrong(samples: Sequence[Sample]) -> None:
    wrong = sorted({f"{s.op} of {s.ranks} ranks" for s in samples if not s.correct})
    if wrong:
        raise WrongResult(f"wrong numbers came from {', '.join(wrong)}; nothing was written.")
