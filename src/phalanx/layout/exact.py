"""The choices that `exact` does not cover yet, each with its reason.

With `exact` in a layout, a step has the same bits as on one process: each sum has one
order that does not depend on the layout. `program/tree.py` defines the order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .choices import BF16, FP16, FP32

if TYPE_CHECKING:
    from .layout import Layout
    from .shape import Shape

EXACT = "exact"  # the word of a layout
COVERED = (FP32, BF16, FP16)
NOT_MATRICES = (
    "exact does not cover optimizers of whole matrices yet: their products have not been"
    " compared bit by bit. Use adamw or sgd."
)
EXPERTS_IN_PARTS = (
    "exact does not cover experts in parts yet: their products have not been compared"
    " with those of tp. Use exact, without tp."
)
_AXES = {
    "cp": "weight gradients are sums over the tokens of each rank",
}


def uncovered(x: Layout) -> list[str]:
    """Every reason why this layout cannot give the bits of one process."""
    found = [
        f"exact does not cover {axis} yet: {why}. Use dp, ZeRO or pp"
        for axis, why in _AXES.items()
        if x.mesh.of(axis) > 1
    ]
    found += _unsplit(x)
    found += _shared_experts(x)
    if x.precision not in COVERED:
        found.append(
            f"exact does not cover {x.precision} yet: only {', '.join(COVERED)}"
            " have been compared bit by bit"
        )
    if x.matmul:
        found.append(
            f"exact does not cover {x.matmul} yet: its scales have not been compared"
            " bit by bit"
        )
    if x.compile:
        found.append(
            "exact does not cover compile yet: a compiler may fuse the same piece"
            " in two ways"
        )
    if x.reduce == "micro":
        found.append(
            "exact does not cover reduce:micro: a rank adds its own microbatches"
            " before it exchanges sums. Use reduce:step"
        )
    return found


def _shared_experts(x: Layout) -> list[str]:
    """Explain why tokens of an expert cannot be told apart by sender, or return []."""
    if others := [axis for axis in x.experts if axis != "ep"]:
        words = f"experts:{','.join(others)}"
        return [
            f"exact does not cover {words} yet: an expert's tokens of one microbatch come"
            " from several ranks. Use ep"
        ]
    names = [axis.name for axis in x.mesh.axes]
    if x.dp > 1 and x.ep > 1 and names.index("ep") < names.index("dp"):
        return [
            "exact with ep before dp: the microbatches of an expert's rank are no subtree."
            " Write dp before ep"
        ]
    return []


def _unsplit(x: Layout) -> list[str]:
    """Explain why the parts cannot be divided among the tp ranks, or return []."""
    parts = x.exact
    if parts & (parts - 1):
        lower = 1 << parts.bit_length() - 1
        return [
            f"exact:{parts}: the parts of a product are added in pairs. Use a power"
            f" of two: exact:{lower} or exact:{2 * lower}"
        ]
    tp = x.mesh.of("tp")
    if parts % tp == 0:
        return []
    if tp & (tp - 1):
        return [
            f"exact does not cover tp{tp}: the parts of a product are added in pairs."
            " Use tp2, tp4 or tp8"
        ]
    word = EXACT if parts == 1 else f"{EXACT}:{parts}"
    return [
        f"{word} with tp{tp}: each rank computes whole parts of a product. Write"
        f" exact:{tp}, or exact:{2 * tp}"
    ]


def exact_batch(x: Layout) -> int:
    """A small batch for comparisons: two rows in each microbatch."""
    return 2 * x.data * x.microbatches


def no_subtree(x: Layout) -> tuple[str, str] | None:
    """Why a rank's microbatches are no subtree of those of all ranks, and a way out."""
    count = x.microbatches
    if not x.exact or x.data == 1 or count & (count - 1) == 0:
        return None
    lower = 1 << count.bit_length() - 1
    what = (
        f"exact: {count} microbatches a rank are no subtree of the {count * x.data} of"
        f" {x.data} ranks."
    )
    return what, f"Use a power of two: {lower} or {2 * lower}; or dp1."


def uneven_microbatches(x: Layout, batch: int) -> tuple[str, str] | None:
    """Why microbatches would have different sizes, and a way out."""
    count = x.data * x.microbatches
    if not x.exact or batch % count == 0:
        return None
    what = (
        f"exact: a batch of {batch} is no multiple of {count} microbatches, and products"
        " of different sizes round differently."
    )
    lower = batch // count * count
    fits = [str(size) for size in (lower, lower + count) if size]
    return what, f"Use a batch of {' or '.join(fits)}."


def unequal_parts(x: Layout, s: Shape) -> list[tuple[str, str]]:
    """Explain why a model's matmuls cannot have equal parts, with ways out."""
    parts = x.exact
    if parts < 2:
        return []
    uncompared = {
        "the mlp": s.kind == "mlp",
        "qk_norm_wide": s.qk_norm_wide,
        "LoRA": s.lora_r,
    }
    for which, has_it in uncompared.items():
        if has_it:
            what = f"exact:{parts} does not cover {which} yet: its bits have not been compared."
            return [(what, "Use exact, without tp.")]
    uneven = _uneven_sizes(s, parts)
    fits = parts
    while fits > 1 and _uneven_sizes(s, fits):
        fits //= 2
    way_out = f"Use exact:{fits}" if fits > 1 else "Use exact, without tp"
    return [
        (
            f"exact:{parts} does not divide {name}={size}, and parts of different"
            " sizes round differently.",
            f"{way_out}; or {name}={-(-size // parts) * parts}.",
        )
        for name, size in uneven.items()
    ]


def _uneven_sizes(s: Shape, parts: int) -> dict[str, int]:
    """The sizes of a model that so many parts do not divide, by name."""
    sizes = {"heads": s.heads, "ffn": s.ffn, "vocab": s.vocab}
    uneven = {name: size for name, size in sizes.items() if size % parts}
    # Key heads may also be repeated, if there are fewer of them than parts.
    if not uneven and s.kv_heads % parts and parts % s.kv_heads:
        return {"kv_heads": s.kv_heads}
    return uneven
