"""What `verify` runs when nothing is named: small models with every awkward trait, their batches,
and all legal layouts up to a number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations, product

import torch
from torch import Tensor

from ..layout import Axis, Layout, LayoutError, Mesh, Shape, legal
from ..models import token_noise
from ..parallel.tensor import IGNORED

__all__ = ["SHAPES", "batch_of", "covering", "every_layout"]

_SMALL = Shape(
    "small", layers=4, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=37, sequence=12, batch=25
)
SHAPES: dict[str, Shape] = {
    # Two key and value heads (replicated under tp4), odd vocabulary, Llama's parts.
    "gqa": replace(_SMALL, name="gqa"),
    # Tied head, learned positions, biases, LayerNorm, GELU: GPT-2's parts; an odd sequence length.
    "gpt": replace(
        _SMALL, name="gpt", kv_heads=4, norm="layer", positions="learned", gated=False,
        tied=True, bias="all", sequence=11,
    ),
    # Norms of q and k, biases of q, k and v; 7 blocks, which no number of stages divides.
    "qwen": replace(_SMALL, name="qwen", qk_norm=True, bias="qkv", layers=7),
    # Biases and learned positions of an odd width: vector kernels end in a remainder everywhere.
    "odd": replace(
        _SMALL, name="odd", layers=3, hidden=33, head_dim=9, ffn=44, sequence=11,
        norm="layer", positions="learned", gated=False, bias="all",
    ),
    "mlp": Shape("mlp", kind="mlp", layers=4, hidden=16, batch=25),
}  # fmt: skip


def batch_of(
    shape: Shape,
    step: int,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    packed: bool = False,
    noisy: bool = False,
) -> Mapping[str, Tensor]:
    """The batch of a step: the same in every layout, with ignored targets spread unevenly. Every
    token of a small vocabulary is among the inputs: some model treats one of them apart."""
    draw = torch.Generator().manual_seed(1_000_003 * seed + step)
    if shape.kind == "mlp":
        rows = torch.randn(shape.batch, shape.hidden, generator=draw, dtype=torch.float64)
        return {"inputs": rows.to(dtype)}
    size = (shape.batch, shape.sequence + 1)
    tokens = torch.randint(0, shape.vocab, size, generator=draw)
    inputs = tokens[:, :-1]
    every = torch.arange(shape.vocab)[: inputs.numel()]
    somewhere = torch.randperm(inputs.numel(), generator=draw)[: every.numel()]
    inputs[somewhere // shape.sequence, somewhere % shape.sequence] = every
    targets = tokens[:, 1:].clone()
    for row in range(shape.batch):
        targets[row, : row % shape.sequence] = IGNORED
    time = torch.arange(shape.sequence).expand(shape.batch, -1).contiguous()
    batch = {"tokens": inputs.contiguous(), "targets": targets, "positions": time}
    if packed:
        batch |= _documents(batch, draw)
    if noisy:  # what dropout draws from: a key for every token of the step
        token = torch.arange(time.numel()).view(time.shape)
        batch["noise"] = token_noise(seed, step, token)
    return batch


def _documents(batch: Mapping[str, Tensor], draw: torch.Generator) -> dict[str, Tensor]:
    """Cuts at random places: each token's document, and its position from that one's start."""
    size = batch["tokens"].shape
    starts = torch.rand(size, generator=draw) < 0.25
    starts[:, 0] = True
    time = batch["positions"]
    begun = torch.where(starts, time, 0).cummax(1).values
    return {"documents": starts.cumsum(1), "positions": time - begun}


def every_layout(shape: Shape, ranks: int, *, axes: str = "dp pp cp tp") -> tuple[Layout, ...]:
    """All legal layouts of 1 to `ranks` ranks over these axes, each once."""
    found: dict[Layout, None] = {}
    for layout in _all(shape, ranks, set(axes.split())):
        if not legal(layout, shape):
            found[layout] = None
    return tuple(found)


def _all(shape: Shape, ranks: int, axes: set[str]) -> Iterator[Layout]:
    sizes = [range(1, ranks + 1) if name in axes else (1,) for name in ("dp", "pp", "cp", "tp")]
    for dp, pp, cp, tp in product(*sizes):
        if dp * pp * cp * tp > ranks:
            continue
        for inner, ulysses in product(_divisors(dp), _divisors(cp)):
            mesh = Mesh((
                Axis("dp", (dp // inner, inner)), Axis("pp", (pp,)),
                Axis("cp", (cp // ulysses, ulysses)), Axis("tp", (tp,)),
            ))  # fmt: skip
            if inner == 1 and dp > 1:
                continue
            for zero, seq, order, recompute in product(
                range(4), (False, True), _orders(pp), _recomputes(axes)
            ):
                if zero == 0 and inner != dp:
                    continue
                schedule, chunks, m = order
                try:
                    yield Layout(
                        mesh, seq, zero, schedule, chunks, m, recompute=recompute, precision="fp64"
                    )
                except LayoutError:
                    continue


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _orders(pp: int) -> list[tuple[str, int, int]]:
    """(schedule, chunks, microbatches): 3, which no number of stages here divides."""
    if pp == 1:
        return [("accum", 1, 1), ("accum", 1, 3)]
    names = ("gpipe", "1f1b", "zb-h1", "zb-h2")
    return [
        ("naive", 1, 1),
        *((name, 1, 3) for name in names),
        ("interleaved", 2, 3),
        ("zb-v", 2, 3),
        ("searched", 1, 3),
    ]


def _recomputes(axes: set[str]) -> tuple[str, ...]:
    return ("none", "all", "every=2") if "pp" in axes else ("none",)


def _features(x: Layout) -> dict[str, object]:
    return {
        "dp": x.dp, "shard": x.mesh.of("dp.shard"), "pp": x.pp, "ring": x.mesh.of("cp.ring"),
        "ulysses": x.mesh.of("cp.ulysses"), "tp": x.tp, "seq": x.seq, "zero": x.zero,
        "order": (x.schedule, x.chunks, x.microbatches), "recompute": x.recompute,
    }  # fmt: skip


def covering(layouts: tuple[Layout, ...], least: int) -> tuple[Layout, ...]:
    """Few of these layouts in which every two choices that occur together still do; at least so
    many, filled up evenly."""
    pairs = {
        x: set(combinations(sorted(_features(x).items(), key=lambda f: f[0]), 2)) for x in layouts
    }
    missing = set().union(*pairs.values())
    chosen: dict[Layout, None] = {}
    while missing:
        best = max(layouts, key=lambda x: len(pairs[x] & missing))
        chosen[best] = None
        missing -= pairs[best]
    step = max(1, len(layouts) // max(1, least))
    for x in layouts[::step]:
        if len(chosen) >= least:
            break
        chosen[x] = None
    return tuple(chosen)
