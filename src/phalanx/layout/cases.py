"""What layouts are compared on when nothing is named: small shapes with every awkward trait, and
all legal layouts up to a number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, cycle, product
from typing import Any

from .choices import ACCUM, FP64, SCHEDULES
from .layout import Layout
from .legal import divisors, legal
from .mesh import Axis, Mesh
from .shape import Shape

AXES = ("dp", "pp", "cp", "tp", "ep")
_WORDS = """; recompute:selective; offload:activations; gather:step; offload:weights; recompute:sqrt;
    reduce:micro; prefetch:0; offload:optimizer,activations prefetch:3; gather:micro; reduce:step"""
_BESIDES = [Layout.written(words) for words in _WORDS.split(";")]
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
    # Gemma's parts: soft caps, windows in two of three blocks, norms on both sides, scaled vectors.
    "gemma": replace(
        _SMALL, name="gemma", norm="rms1", norms="both", windows=(5, 3, 0), softcap=1.5,
        logit_softcap=2.0, query_scalar=6.0, embed_scale=4.0, rope_local_theta=100.0,
        activation="gelu", qk_norm=True, tied=True,
    ),
    # Norms behind attention and MLP, those of q and k over all heads; stretched rope; an odd length.
    "olmo": replace(
        _SMALL, name="olmo", norms="post", qk_norm=True, qk_norm_wide=True, sequence=11,
        rope_scaling="yarn", rope_factor=4.0, rope_high=32.0, rope_original=64, rope_attention=1.1,
    ),
    # Nine experts, which leave some of eight ranks without, for three of a token; one that all tokens
    # meet; a first block without; a bias that balances; scores that need not add up to one.
    "experts": replace(
        _SMALL, name="experts", ffn=20, experts=9, top_k=3, expert_ffn=12, shared_experts=1,
        dense_layers=1, scores="sigmoid", routed_scale=1.5, balance="bias", balance_rate=0.01,
        sequence=11,
    ),
    # Latents of odd widths, values narrower than keys; experts in groups, of which a token meets two; an
    # odd length and scaled scores.
    "latent": replace(
        _SMALL, name="latent", layers=2, kv_heads=4, ffn=20, head_dim=10, kv_latent=7, q_latent=9,
        rope_dim=4, value_dim=6, rope_pairs="neighbours", query_scalar=7.0, experts=6, top_k=3,
        expert_ffn=12, shared_experts=1, expert_groups=3, top_groups=2, dense_layers=1,
        scores="sigmoid", balance="bias", balance_rate=0.01, sequence=11,
        sequence_loss=0.3, z_loss=0.1,
    ),
    # gpt-oss's parts: sinks, biases of all products and of routers, clamped experts of which no number of
    # ranks has as many, a window in every second block, rope stretched between any indices.
    "sinks": replace(
        _SMALL, name="sinks", layers=2, ffn=20, bias="all", sinks=True, activation="clamped",
        windows=(5, 0), experts=5, top_k=2, sequence=11, rope_scaling="yarn", rope_factor=4.0,
        rope_high=32.0, rope_original=64, rope_attention=1.1, rope_truncated=False,
        z_loss=0.1,
    ),
    "mlp": Shape("mlp", kind="mlp", layers=4, hidden=16, batch=25),
}  # fmt: skip


def every_layout(
    shape: Shape, ranks: int, *, axes: str = " ".join(AXES), besides: bool = False
) -> tuple[Layout, ...]:
    """All legal layouts of 1 to `ranks` ranks over these axes, each once; over ep where there are
    experts. With `besides` each has one more option, in turn, where it can have that one: as many
    layouts, in which every option occurs with every choice."""
    free = set(axes.split()) - ({"ep"} if not shape.experts else set())
    plain = tuple(x for x in dict.fromkeys(_all(shape, ranks, free)) if not legal(x, shape))
    turns: Any = zip(plain, cycle(_BESIDES if besides else [{}]), strict=False)
    each = [(x, replace(x, **option)) for x, option in turns]
    return tuple(dict.fromkeys(x if legal(y, shape) else y for x, y in each))


def _all(shape: Shape, ranks: int, axes: set[str]) -> Iterator[Layout]:
    recomputes = ("none", "all", "every=2") if "pp" in axes else ("none",)
    for dp, pp, cp, tp, ep in _grids(ranks, [name in axes for name in AXES]):
        for inner, ulysses in product(divisors(dp), divisors(cp)):
            mesh = Mesh((
                Axis("dp", (dp // inner, inner)), Axis("pp", (pp,)),
                Axis("cp", (cp // ulysses, ulysses)), Axis("tp", (tp,)), Axis("ep", (ep,)),
            ))  # fmt: skip
            if inner == 1 and dp > 1:
                continue
            for zero, seq, order, recompute, overlap in product(
                range(4), (False, True), _orders(pp), recomputes, (False, True)[:ep]
            ):
                x = Layout(mesh, seq, zero, *order, precision=FP64)
                yield replace(x, recompute=recompute, overlap=overlap)


def _grids(ranks: int, free: list[bool]) -> Iterator[tuple[int, ...]]:
    """The sizes of the axes whose product is at most `ranks`; an axis that is not free has one."""
    if not free:
        yield ()
        return
    for size in range(1, ranks + 1) if free[0] else (1,):
        for others in _grids(ranks // size, free[1:]):
            yield size, *others


def _orders(pp: int) -> list[tuple[str, int, int]]:
    """(schedule, chunks, microbatches): 3, which no number of stages here divides."""
    if pp == 1:
        return [(ACCUM, 1, 1), (ACCUM, 1, 3)]
    kinds = [(name, kind) for name, kind in SCHEDULES.items() if kind.pipelined]
    return [(name, kind.least, 1 if kind.whole_batch else 3) for name, kind in kinds]


def _features(x: Layout) -> dict[str, object]:
    return {
        "dp": x.dp, "shard": x.mesh.of("dp.shard"), "pp": x.pp, "ring": x.mesh.of("cp.ring"),
        "ulysses": x.mesh.of("cp.ulysses"), "tp": x.tp, "ep": x.ep, "seq": x.seq, "zero": x.zero,
        "experts": x.experts, "overlap": x.overlap, "order": (x.schedule, x.chunks, x.microbatches),
        "recompute": x.recompute, "offload": x.offload, "gather": x.gather, "reduce": x.reduce,
        "prefetch": x.prefetch,
    }  # fmt: skip


def covering(layouts: tuple[Layout, ...], least: int) -> tuple[Layout, ...]:
    """Few of these layouts in which every two choices that occur together still do; at least so
    many, filled up evenly."""
    bits: dict[object, int] = {}  # the pairs of a layout as bits of one number
    pairs = {
        x: sum(1 << bits.setdefault(p, len(bits)) for p in combinations(_features(x).items(), 2))
        for x in layouts
    }
    missing = (1 << len(bits)) - 1
    chosen: dict[Layout, None] = {}
    while missing:
        best = max(layouts, key=lambda x: (pairs[x] & missing).bit_count())
        chosen[best] = None
        missing &= ~pairs[best]
    step = max(1, len(layouts) // max(1, least))
    for x in layouts[::step]:
        if len(chosen) >= least:
            break
        chosen[x] = None
    return tuple(chosen)
