"""The weights of the built-in models: for each piece of a shape the names, dims and lengths, without torch.

`models/decoder.py` and `models/mlp.py` make the weights themselves; a test compares both for every size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from .rules import AXIS_OF, LORA

if TYPE_CHECKING:
    from .shape import Shape


class Lengths(NamedTuple):
    """One weight: its name in its piece, its dims by name, their lengths."""

    name: str
    dims: tuple[str, ...]
    lengths: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.lengths)

    @property
    def routed(self) -> bool:
        """True for a weight of routed experts, which ep distributes."""
        return "experts" in self.dims

    @property
    def adapts(self) -> bool:
        """True for a factor of a low-rank adapter."""
        return ".lora." in self.name


def _weight(name: str, dims: str, *lengths: int) -> Lengths:
    return Lengths(name, tuple(dims.split()), lengths)


def piece_weights(shape: Shape, piece: int) -> Iterator[Lengths]:
    """The weights of one piece, in the order in which they are used."""
    if shape.kind == "mlp":
        if 0 < piece <= shape.layers:
            yield _weight("weight", "embed ffn", shape.hidden, shape.hidden)
    elif piece == 0:
        yield _weight("tokens.weight", "vocab embed", shape.vocab, shape.hidden)
        if shape.positions == "learned":
            yield _weight("positions.weight", "position embed", shape.sequence, shape.hidden)
    elif piece <= shape.layers:
        for weight in _block(shape, piece):
            yield weight
            yield from _adapter(shape, weight)
    else:
        yield from _norm(shape, "norm", "embed", shape.hidden)
        # A tied output weight is the embedding's.
        if not shape.tied:
            yield _weight("output.weight", "vocab embed", shape.vocab, shape.hidden)


def _norm(shape: Shape, name: str, dim: str, length: int) -> Iterator[Lengths]:
    yield _weight(f"{name}.weight", dim, length)
    if shape.norm == "layer":
        yield _weight(f"{name}.bias", dim, length)


def _block(shape: Shape, piece: int) -> Iterator[Lengths]:
    norms = ["attn_norm", "mlp_norm"] if shape.norms != "post" else []
    norms += ["attn_post_norm", "mlp_post_norm"] if shape.norms != "pre" else []
    for name in norms:
        yield from _norm(shape, name, "embed", shape.hidden)
    yield from _latent_attention(shape) if shape.kv_latent else _attention(shape)
    if shape.sparse(piece):
        yield from _experts(shape)
    else:
        yield from _mlp(shape, "mlp", shape.ffn)


def _linear(name: str, into: int, out: int, dims: str, *, bias: bool) -> Iterator[Lengths]:
    """A linear layer; `dims` are those of its weight: features out, features in."""
    yield _weight(f"{name}.weight", dims, out, into)
    if bias:
        yield _weight(f"{name}.bias", dims.split()[0], out)


def _output(shape: Shape) -> Iterator[Lengths]:
    """The end of attention of any kind, and the learned score beside those of a head's tokens."""
    if shape.sinks:
        yield _weight("attn.sinks", "heads", shape.heads)
    wide = shape.heads * shape.valued
    yield from _linear("attn.wo", wide, shape.hidden, "embed heads", bias=shape.bias == "all")


def _attention(shape: Shape) -> Iterator[Lengths]:
    hidden, head = shape.hidden, shape.head_dim
    wide, narrow = shape.heads * head, shape.kv_heads * head
    bias = shape.bias != "none"
    yield from _linear("attn.wq", hidden, wide, "heads embed", bias=bias)
    yield from _linear("attn.wk", hidden, narrow, "kv embed", bias=bias)
    yield from _linear("attn.wv", hidden, narrow, "kv embed", bias=bias)
    if shape.qk_norm and shape.qk_norm_wide:
        yield _weight("attn.q_wide_norm.weight", "heads", wide)
        yield _weight("attn.k_wide_norm.weight", "kv", narrow)
    elif shape.qk_norm:
        yield _weight("attn.q_norm.weight", "head", head)
        yield _weight("attn.k_norm.weight", "head", head)
    yield from _output(shape)


def _latent_attention(shape: Shape) -> Iterator[Lengths]:
    """Latent attention: queries, keys and values are made of narrow vectors (DeepSeek-V2 2024)."""
    hidden, latent, wide = shape.hidden, shape.kv_latent, shape.heads * shape.head_dim
    if shape.q_latent:
        yield _weight("attn.wq_a.weight", "latent embed", shape.q_latent, hidden)
        yield _weight("attn.q_a_norm.weight", "latent", shape.q_latent)
        yield _weight("attn.wq_b.weight", "heads latent", wide, shape.q_latent)
    else:
        yield _weight("attn.wq.weight", "heads embed", wide, hidden)
    yield _weight("attn.wkv_a.weight", "latent embed", latent + shape.turned, hidden)
    yield _weight("attn.kv_a_norm.weight", "latent", latent)
    both = shape.heads * (shape.head_dim - shape.turned + shape.valued)
    yield _weight("attn.wkv_b.weight", "heads latent", both, latent)
    yield from _output(shape)


def _mlp(shape: Shape, name: str, width: int) -> Iterator[Lengths]:
    bias, hidden = shape.bias == "all", shape.hidden
    if shape.gated:
        yield from _linear(f"{name}.gate", hidden, width, "ffn embed", bias=bias)
    yield from _linear(f"{name}.up", hidden, width, "ffn embed", bias=bias)
    yield from _linear(f"{name}.down", width, hidden, "embed ffn", bias=bias)


def _experts(shape: Shape) -> Iterator[Lengths]:
    count, hidden, width = shape.experts, shape.hidden, shape.expert_ffn
    yield _weight("mlp.router.weight", "- embed", count, hidden)
    if shape.bias == "all":
        yield _weight("mlp.router.logit_bias", "-", count)
    if shape.balance == "bias":
        yield _weight("mlp.router.bias", "-", count)
    yield _weight("mlp.routed.gate", "experts ffn embed", count, width, hidden)
    yield _weight("mlp.routed.up", "experts ffn embed", count, width, hidden)
    yield _weight("mlp.routed.down", "experts embed ffn", count, hidden, width)
    if shape.bias == "all":
        yield _weight("mlp.routed.gate_bias", "experts ffn", count, width)
        yield _weight("mlp.routed.up_bias", "experts ffn", count, width)
        yield _weight("mlp.routed.down_bias", "experts partial", count, hidden)
    if shape.shared_experts:
        yield from _mlp(shape, "mlp.shared", shape.shared_experts * width)


def _adapter(shape: Shape, weight: Lengths) -> Iterator[Lengths]:
    """The low-rank factors beside a linear's weight, if the shape gives it any."""
    path, _, own = weight.name.rpartition(".")
    if own != "weight" or path.rpartition(".")[2] not in shape.adapters or len(weight.dims) != 2:
        return
    (out_dim, into_dim), (out, into) = weight.dims, weight.lengths
    # Beside a weight that is cut, the factor that is whole did different work on each rank of tp.
    rank_dim = LORA if {out_dim, into_dim} & AXIS_OF.keys() else "-"
    yield _weight(f"{path}.lora.a.weight", f"{rank_dim} {into_dim}", shape.lora_r, into)
    yield _weight(f"{path}.lora.b.weight", f"{out_dim} {rank_dim}", out, shape.lora_r)
