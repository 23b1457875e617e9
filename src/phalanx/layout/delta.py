"""The row of gated delta rule layers (Yang et al. 2024): sizes, weights, rules and work.

Such a layer is linear attention with a state. `models/delta.py` is the layer itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from .block_weight import BlockWeight
from .codec import Mistake, key
from .exact import EXACT, exact_word
from .layout import Layout
from .mixer_row import MixerRow
from .violation import Violation, divisor_list

if TYPE_CHECKING:
    from .shape import Shape

_NAME = "delta"


@dataclass(frozen=True, kw_only=True)
class DeltaKeys:
    """The keys of a shape about these layers."""

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


def _fill(shape: Shape) -> None:
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


def _mistakes(shape: Shape) -> Iterator[Mistake]:
    """Conflicts between sizes that are valid alone."""
    if _NAME not in shape.mixers:
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
    for each in fields(DeltaKeys):
        name = each.name
        if getattr(shape, name) == each.default:
            continue
        what = f"{name} without a delta layer"
        yield Mistake(name, what, "Write mixers, or leave it out")
        # The values that follow from it were not written.
        if name == "delta_heads":
            return


def _weights(shape: Shape) -> Iterator[BlockWeight]:
    """The weights of a layer in order of use, as in `models/delta.py`."""
    hidden, heads = shape.hidden, shape.delta_heads
    narrow = shape.delta_key_heads * shape.delta_key_dim
    wide = heads * shape.delta_value_dim
    linears = {"q": narrow, "k": narrow, "v": wide, "z": wide}
    for name, out in (linears | {"b": heads, "a": heads}).items():
        lengths = (out, hidden)
        yield BlockWeight(f"attn.in_{name}.weight", "groups embed", lengths)
    for name in ("q", "k", "v"):
        taps = (linears[name], 1, shape.delta_width)
        yield BlockWeight(f"attn.taps_{name}", "groups - -", taps)
    yield BlockWeight("attn.decay", "groups", (heads,))
    yield BlockWeight("attn.step", "groups", (heads,))
    head = (shape.delta_value_dim,)
    yield BlockWeight("attn.head_norm.weight", "head", head)
    yield BlockWeight("attn.out.weight", "embed groups", (hidden, wide))


def _work(shape: Shape, sequence: int) -> int:
    """Correcting, writing and reading the state, whatever the length and the chunks."""
    state = shape.delta_key_dim * shape.delta_value_dim
    return 3 * shape.delta_heads * state


def _violations(layout: Layout, shape: Shape) -> Iterator[Violation]:
    key_heads = shape.delta_key_heads
    if key_heads % layout.tp:
        what = f"tp={layout.tp} does not divide delta_key_heads={key_heads}"
        fits = divisor_list(math.gcd(key_heads, shape.heads))
        yield Violation(
            "heads",
            f"{what} in layers.*.attn.in_q.weight.",
            f"Use tp {fits}.",
        )
    if layout.matmul:
        what = f"{layout.matmul} does not support delta layers."
        yield Violation("matmul", what, "Leave it out.")
    if layout.compile:
        what = "compile has not been compared in blocks with delta layers."
        yield Violation("compile", what, "Leave compile out.")
    if layout.exact:
        yield from _other_sums(layout, shape)


def _other_sums(layout: Layout, shape: Shape) -> Iterator[Violation]:
    """Numbers of parts with which delta layers have no fixed order of sums."""
    word = exact_word(layout)
    if layout.time_parts > 1:
        what = (
            f"{word} does not fix the order of sums of states over a sequence."
        )
        yield Violation(
            EXACT, what, "Use exact without parts of the sequence, and no cp."
        )
    elif shape.delta_key_heads % layout.exact:
        what = (
            f"{word} does not divide delta_key_heads={shape.delta_key_heads}."
        )
        yield Violation(EXACT, what, "Use fewer parts, or exact without tp.")


def _shrunk(shape: Shape, head: int) -> Mapping[str, Any]:
    """Two key heads, and up to two value heads for each, on chunks of a few tokens."""
    each = min(2, shape.delta_heads // shape.delta_key_heads)
    return {
        "delta_key_heads": 2,
        "delta_heads": 2 * each,
        "delta_key_dim": head,
        "delta_value_dim": head - 2,
        "delta_chunk": 8,
    }


def _counts(shape: Shape) -> Mapping[str, int]:
    return {"groups": shape.delta_key_heads}


DELTA = MixerRow(
    name=_NAME,
    work_name="delta rule",
    hub_name="linear_attention",
    weights=_weights,
    linears=("in_q", "in_k", "in_v", "in_z", "out"),
    work=_work,
    violations=_violations,
    own_keys=DeltaKeys,
    fill=_fill,
    mistakes=_mistakes,
    shrunk=_shrunk,
    unit_counts=_counts,
)
