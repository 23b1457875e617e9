"""The row of experts: MLPs among which a router distributes the tokens of a block.

`models/experts.py` is the layer itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .block_weight import BlockWeight
from .codec import Mistake, key
from .dense import dense_weights
from .layout import Layout
from .mlp_row import ChoiceLosses, MlpRow, RoutedMlps
from .violation import Violation, divisor_list

if TYPE_CHECKING:
    from .shape import Shape

_NAME = "experts"


@dataclass(frozen=True, kw_only=True)
class ExpertKeys:
    """The keys of a shape about experts."""

    experts: int = key(
        0, "routed experts in a block; 0: an MLP", maximum=1 << 14
    )
    top_k: int = key(
        1, "experts that each token uses", minimum=1, maximum=1 << 14
    )
    expert_ffn: int = key(0, "width of an expert; 0: ffn", maximum=1 << 23)
    shared_experts: int = key(
        0, "experts that all tokens use, merged into one", maximum=1 << 10
    )
    shared_gate: bool = key(
        False, "their output is multiplied by a sigmoid gate of the token"
    )
    expert_groups: int = key(
        1, "groups into which experts are divided", minimum=1, maximum=1 << 14
    )
    top_groups: int = key(
        1,
        "groups that a token may choose experts from",
        minimum=1,
        maximum=1 << 14,
    )
    dense_layers: int = key(0, "first blocks without experts", maximum=10_000)
    scores: str = key(
        "softmax", "the router's scores", choices=("softmax", "sigmoid")
    )
    normalized: bool = key(
        True, "a token's chosen scores are divided by their sum"
    )
    routed_scale: float = key(1.0, "factor of the chosen scores", above=0)
    balance: str = key(
        "none",
        "bias: moved so that experts get equally many tokens",
        choices=("none", "bias"),
    )
    balance_rate: float = key(0.001, "change of that bias in a step", above=0)
    # Losses of each router: experts x sum of (share of choices x mean score), and the
    # z-loss.
    sequence_loss: float = key(
        0.0, "factor of that loss, averaged over sequences"
    )
    batch_loss: float = key(0.0, "factor of that loss over the whole batch")
    z_loss: float = key(
        0.0, "factor of the mean squared log-sum-exp of the scores"
    )


def _in_block(shape: Shape, number: int) -> bool:
    return shape.experts > 0 and number >= shape.dense_layers


def _sizes_of_blocks(names: Sequence[str]) -> Mapping[str, int]:
    others = sum(name != _NAME for name in names)
    # In a model without experts, the key has its default.
    return {"dense_layers": others if _NAME in names else 0}


def _fill(shape: Shape) -> None:
    """Put the width that follows from another in place of 0."""
    if shape.experts and not shape.expert_ffn:
        object.__setattr__(shape, "expert_ffn", shape.ffn)


def _mistakes(shape: Shape) -> Iterator[Mistake]:
    """Conflicts between sizes that are valid alone."""
    if shape.shared_gate and not shape.shared_experts:
        what = "shared_gate without shared_experts"
        yield Mistake("shared_gate", what, "Write both, or none of them")
    if not shape.experts:
        return
    yield from _unequal_groups(shape)
    if shape.top_k > shape.experts:
        what = f"top_k = {shape.top_k} is more than experts = {shape.experts}"
        yield Mistake("top_k", what, f"Write at most {shape.experts}")
    if shape.dense_layers >= shape.layers:
        what = f"dense_layers = {shape.dense_layers} leaves no block"
        what += f" of {shape.layers} for experts"
        way_out = f"Write at most {shape.layers - 1}, or experts = 0"
        yield Mistake("dense_layers", what, way_out)
    if shape.kind == "mlp" or not shape.gated:
        what = "experts are gated MLPs, in a decoder"
        yield Mistake("experts", what, "Leave out kind and gated, or experts")


def _unequal_groups(shape: Shape) -> Iterator[Mistake]:
    experts, groups = shape.experts, shape.expert_groups
    each, chosen = experts // groups, shape.top_groups
    if groups > 1 and (experts % groups or each < 2):
        what = f"experts = {experts} do not form {groups} equal groups of two or more"
        way_out = "Write a divisor of experts that leaves at least two"
        yield Mistake("expert_groups", what, way_out)
    # The chosen groups must have enough experts for a token.
    elif chosen > groups or (groups > 1 and shape.top_k > each * chosen):
        what = (
            f"top_groups = {chosen} of {groups} have {each * chosen} experts"
        )
        way_out = f"Write more, for at least top_k = {shape.top_k} experts"
        yield Mistake("top_groups", what, way_out)


def _weights(shape: Shape) -> Iterator[BlockWeight]:
    """The weights of a layer in order of use, as in `models/experts.py`."""
    count, hidden, width = shape.experts, shape.hidden, shape.expert_ffn
    biases = shape.bias == "all"
    yield BlockWeight("mlp.router.weight", "- embed", (count, hidden))
    if biases:
        yield BlockWeight("mlp.router.logit_bias", "-", (count,))
    if shape.balance == "bias":
        yield BlockWeight("mlp.router.bias", "-", (count,))
    into, out = (count, width, hidden), (count, hidden, width)
    yield BlockWeight("mlp.routed.gate", "experts ffn embed", into)
    yield BlockWeight("mlp.routed.up", "experts ffn embed", into)
    yield BlockWeight("mlp.routed.down", "experts embed ffn", out)
    if biases:
        inside = (count, width)
        yield BlockWeight("mlp.routed.gate_bias", "experts ffn", inside)
        yield BlockWeight("mlp.routed.up_bias", "experts ffn", inside)
        # A bias after the down projection is added once, so ranks of tp each
        # hold a share.
        behind = (count, hidden)
        yield BlockWeight("mlp.routed.down_bias", "experts partial", behind)
    if shape.shared_experts:
        beside = shape.shared_experts * width
        yield from dense_weights(shape, "mlp.shared", beside)
    if shape.shared_gate:
        yield BlockWeight("mlp.shared_gate.weight", "- embed", (1, hidden))


def _widths(shape: Shape) -> Mapping[str, int]:
    return {"expert_ffn": shape.expert_ffn}


def _violations(layout: Layout, shape: Shape) -> Iterator[Violation]:
    # Ranks of tp hold either whole experts or a part of each.
    tp, width = layout.tp, shape.expert_ffn
    if "tp" in layout.ep_axes or width % tp == 0:
        return
    what = f"tp={tp} does not divide expert_ffn={width} in layers.*.mlp.routed.up."
    whole = ", or experts:tp, which leaves experts whole."
    fits = divisor_list(math.gcd(width, shape.heads))
    way_out = f"Use tp {fits}{whole if layout.seq else '.'}"
    yield Violation("experts", what, way_out)


def sharing_violations(layout: Layout, shape: Shape) -> Iterator[Violation]:
    """The rules that axes which share experts break, also in models without experts."""
    mesh, count = layout.mesh, shape.experts
    # The axes that share experts beside ep, for the text.
    over = "".join(f" x {axis}={mesh.of(axis)}" for axis in layout.experts)
    # A rank without an expert would only send its tokens away.
    if layout.ep_ranks > max(1, count):
        what = (
            f"ep={layout.ep}{over} for a model with {count or 'no'} experts."
        )
        way_out = "Use dp in place of ep."
        if over:
            way_out = "Leave experts: out, or use fewer ranks there."
        elif count:
            way_out = f"Use ep {count} or less, and dp for the rest."
        yield Violation("ep", what, way_out)
    for axis in layout.experts:
        if mesh.of(axis) == 1:
            what = (
                f"experts:{axis} has no ranks to share experts with: {axis}=1."
            )
            way_out = f"Leave {axis} out of it, or use {axis}2."
            yield Violation("experts", what, way_out)
        elif axis == "tp" and not layout.seq:
            what = "experts:tp without seq: all ranks of tp have the same tokens, and would send"
            what += f" each token {layout.tp} times to its experts."
            way_out = "Add seq, or leave tp out: tp then shards each expert."
            yield Violation("experts", what, way_out)


def _routed(shape: Shape) -> RoutedMlps:
    width = shape.expert_ffn
    beside = shape.shared_experts * width
    return RoutedMlps(shape.experts, shape.top_k, width, beside)


def _results(shape: Shape) -> tuple[str, ...]:
    beside = ("shared",) if shape.shared_experts else ()
    return ("gates", "order", *beside)


def _losses(shape: Shape) -> ChoiceLosses:
    return ChoiceLosses(shape.sequence_loss > 0, shape.batch_loss > 0)


def _shrunk(shape: Shape, shrink: Callable[[int], int]) -> Mapping[str, Any]:
    """Eight experts, in up to two groups."""
    groups = min(shape.expert_groups, 2)
    return {
        "dense_layers": min(shape.dense_layers, 1),
        "experts": 8,
        "top_k": min(shape.top_k, 2),
        "expert_groups": groups,
        "top_groups": min(shape.top_groups, groups),
        "expert_ffn": shrink(shape.expert_ffn),
        "shared_experts": min(shape.shared_experts, 1),
    }


EXPERTS = MlpRow(
    name=_NAME,
    in_block=_in_block,
    sizes_of_blocks=_sizes_of_blocks,
    weights=_weights,
    linears=(),
    widths=_widths,
    violations=_violations,
    routed=_routed,
    routed_prefix="mlp.routed.",
    results=_results,
    losses=_losses,
    fill=_fill,
    mistakes=_mistakes,
    shrunk=_shrunk,
)
