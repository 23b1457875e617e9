"""The rows of softmax attention: grouped-query attention, and latent attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from .block_weight import BlockWeight, linear_weights
from .layout import Layout
from .mixer_row import MixerRow
from .violation import Violation, divisor_list

if TYPE_CHECKING:
    from .shape import Shape


def _output(shape: Shape) -> Iterator[BlockWeight]:
    """The end of any attention, and the learned score that each head adds."""
    if shape.sinks:
        yield BlockWeight("attn.sinks", "heads", (shape.heads,))
    # The values of all heads, which the output projection takes.
    wide = shape.heads * shape.valued
    yield from linear_weights(
        "attn.wo", wide, shape.hidden, "embed heads", bias=shape.bias == "all"
    )


def _grouped(shape: Shape) -> Iterator[BlockWeight]:
    hidden, head = shape.hidden, shape.head_dim
    # Features of all query heads, and of all KV heads.
    wide, narrow = shape.heads * head, shape.kv_heads * head
    bias = shape.bias != "none"
    yield from linear_weights(
        "attn.wq", hidden, wide, "heads embed", bias=bias
    )
    yield from linear_weights("attn.wk", hidden, narrow, "kv embed", bias=bias)
    yield from linear_weights("attn.wv", hidden, narrow, "kv embed", bias=bias)
    if shape.qk_norm and shape.qk_norm_wide:
        yield BlockWeight("attn.q_wide_norm.weight", "heads", (wide,))
        yield BlockWeight("attn.k_wide_norm.weight", "kv", (narrow,))
    elif shape.qk_norm:
        yield BlockWeight("attn.q_norm.weight", "head", (head,))
        yield BlockWeight("attn.k_norm.weight", "head", (head,))
    if shape.output_gate:
        yield BlockWeight("attn.wg.weight", "heads embed", (wide, hidden))
    yield from _output(shape)


def _latent(shape: Shape) -> Iterator[BlockWeight]:
    """Latent attention: q, k, v come from narrow vectors (DeepSeek-V2 2024)."""
    hidden, latent = shape.hidden, shape.kv_latent
    wide = shape.heads * shape.head_dim
    down, up = "latent embed", "heads latent"
    # Down to the latent and up again, with a norm in between.
    if shape.q_latent:
        narrow = shape.q_latent
        yield BlockWeight("attn.wq_a.weight", down, (narrow, hidden))
        yield BlockWeight("attn.q_a_norm.weight", "latent", (narrow,))
        yield BlockWeight("attn.wq_b.weight", up, (wide, narrow))
    else:
        yield BlockWeight("attn.wq.weight", "heads embed", (wide, hidden))
    # The latent, and the rotated part of the key, which all heads share.
    both = latent + shape.turned
    yield BlockWeight("attn.wkv_a.weight", down, (both, hidden))
    yield BlockWeight("attn.kv_a_norm.weight", "latent", (latent,))
    # Unrotated features of the keys, and the values, of all heads.
    both = shape.heads * (shape.head_dim - shape.turned + shape.valued)
    yield BlockWeight("attn.wkv_b.weight", up, (both, latent))
    yield from _output(shape)


def _work(shape: Shape, sequence: int) -> int:
    """Causal attention: half of all pairs of tokens."""
    return sequence * shape.pair_work // 2


def _counts(shape: Shape) -> Mapping[str, int]:
    return {"heads": shape.heads, "kv": shape.kv_heads}


def _violations(layout: Layout, shape: Shape) -> Iterator[Violation]:
    tp, heads, kv = layout.tp, shape.heads, shape.kv_heads
    if heads % tp:
        name = "w*_b" if shape.kv_latent else "wq"
        what = f"tp={tp} does not divide heads={heads} in layers.*.attn.{name}.weight."
        yield Violation("heads", what, f"Use tp {divisor_list(heads)}.")
    # Either each rank has whole KV heads, or each KV head has whole ranks.
    elif kv % tp and tp % kv:
        what = f"tp={tp} does not divide kv={kv} in layers.*.attn.wk.weight, nor kv tp."
        fits = f"tp {divisor_list(kv)}, or a multiple of {kv} that divides {heads}"
        whole = 'keep k and v whole: "layers.*.attn.w[kv].weight : - embed".'
        yield Violation("kv", what, f"Use {fits}; or {whole}")
    ulysses, own = layout.mesh.of("cp.ulysses"), heads // tp
    if heads % tp == 0 and own % ulysses:
        what = f"ulysses={ulysses} does not divide the {own} heads of a rank"
        fits = divisor_list(own)
        way_out = (
            f"Use ulysses {fits}, and a ring for the rest: cp{layout.cp}:ring."
        )
        yield Violation(
            "ulysses", f"{what} (heads={heads}, tp={tp}).", way_out
        )


ATTENTION = MixerRow(
    name="attention",
    work_name="attention",
    hub_name="full_attention",
    weights=_grouped,
    linears=("wq", "wk", "wv", "wg", "wo"),
    work=_work,
    violations=_violations,
    pairs=True,
    cached=True,
    unit_counts=_counts,
)
# What `attention` means in a shape with `kv_latent`.
LATENT_ATTENTION = replace(
    ATTENTION, weights=_latent, linears=("wq", "wo", "wq_b", "wkv_b")
)
