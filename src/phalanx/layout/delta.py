"""Sizes, weights and work of gated delta rule layers (Yang et al. 2024).

Such a layer is linear attention with a state. It takes the place of
attention in a block. `models/delta.py` is the layer itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from .codec import Mistake, key

if TYPE_CHECKING:
    from .shape import Shape

ATTENTION, DELTA = "attention", "delta"


@dataclass(frozen=True, kw_only=True)
class DeltaKeys:
    """The keys of a shape about these layers."""

    mixers: tuple[str, ...] = key(
        (),
        "attention or delta for each block, repeated over the blocks; empty: attention",
    )
    delta_heads: int = key(0, "value heads of a delta layer", maximum=1 << 16)
    delta_key_heads: int = key(
        0, "its query and key heads; 0: delta_heads", maximum=1 << 16
    )
    delta_key_dim: int = key(
        0, "features of its keys; 0: head_dim", maximum=1 << 16
    )
    delta_value_dim: int = key(
        0, "features of its values; 0: delta_key_dim", maximum=1 << 16
    )
    delta_width: int = key(
        4, "tokens that its convolution covers", minimum=2, maximum=64
    )
    delta_chunk: int = key(
        64, "tokens that it computes at once", minimum=1, maximum=1 << 12
    )


# The sizes of a layer, and their values in a shape without one.
DELTA_SIZES: dict[str, Any] = {
    each.name: each.default
    for each in fields(DeltaKeys)
    if each.name != "mixers"
}


class DeltaWeight(NamedTuple):
    """A weight of a layer: its name in the block, its dims by name, their lengths."""

    name: str
    dims: str
    lengths: tuple[int, ...]


def fill_delta(shape: Shape) -> None:
    """Put the values that follow from others in place of 0."""
    if not shape.delta_heads:
        return
    fill = object.__setattr__
    if not shape.delta_key_heads:
        fill(shape, "delta_key_heads", shape.delta_heads)
    if not shape.delta_key_dim:
        fill(shape, "delta_key_dim", shape.head_dim)
    if not shape.delta_value_dim:
        fill(shape, "delta_value_dim", shape.delta_key_dim)


def delta_mistakes(shape: Shape) -> Iterator[Mistake]:
    """Conflicts between sizes that are valid alone."""
    for name in shape.mixers:
        if name not in (ATTENTION, DELTA):
            what = f"mixers names {name[:40]!r}"
            yield Mistake("mixers", what, "Write attention or delta")
    if len(shape.mixers) > shape.layers:
        what = (
            f"mixers has {len(shape.mixers)} words for {shape.layers} blocks"
        )
        yield Mistake("mixers", what, "Write at most one for each block")
    if shape.mixers and shape.kind != "decoder":
        yield Mistake("mixers", "mixers in an MLP", "Leave them out")
    if DELTA not in shape.mixers:
        yield from _unused(shape)
        return
    if not shape.delta_heads:
        what = "delta_heads is missing"
        yield Mistake("delta_heads", what, "Write how many a delta layer has")
    elif shape.delta_heads % shape.delta_key_heads:
        what = f"delta_key_heads = {shape.delta_key_heads} does not divide"
        what += f" delta_heads = {shape.delta_heads}"
        yield Mistake("delta_key_heads", what, "Write a divisor")


def _unused(shape: Shape) -> Iterator[Mistake]:
    """Sizes of delta layers in a shape without one."""
    for name, default in DELTA_SIZES.items():
        if getattr(shape, name) == default:
            continue
        what = f"{name} without a delta layer"
        yield Mistake(name, what, "Write mixers, or leave it out")
        # The values that follow from it were not written.
        if name == "delta_heads":
            return


def delta_weights(shape: Shape) -> Iterator[DeltaWeight]:
    """The weights of a layer in order of use, as in `models/delta.py`."""
    hidden, heads = shape.hidden, shape.delta_heads
    narrow = shape.delta_key_heads * shape.delta_key_dim
    wide = heads * shape.delta_value_dim
    linears = {"q": narrow, "k": narrow, "v": wide, "z": wide}
    for name, out in (linears | {"b": heads, "a": heads}).items():
        lengths = (out, hidden)
        yield DeltaWeight(f"attn.in_{name}.weight", "groups embed", lengths)
    for name in ("q", "k", "v"):
        taps = (linears[name], 1, shape.delta_width)
        yield DeltaWeight(f"attn.taps_{name}", "groups - -", taps)
    yield DeltaWeight("attn.decay", "groups", (heads,))
    yield DeltaWeight("attn.step", "groups", (heads,))
    head = (shape.delta_value_dim,)
    yield DeltaWeight("attn.head_norm.weight", "head", head)
    yield DeltaWeight("attn.out.weight", "embed groups", (hidden, wide))


def token_work(shape: Shape) -> int:
    """Multiply-adds of the rule for one token: the state corrected, written and read."""
    state = shape.delta_key_dim * shape.delta_value_dim
    return 3 * shape.delta_heads * state
