"""The choices that `exact` does not cover yet, each with its reason.

With `exact` in a layout, a step has the same bits as on one process: each sum has one
order that does not depend on the layout. `program/tree.py` defines the order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .adapters import ADAPTERS
from .choices import BF16, COMPILE, COMPILE_MAX, FP16, FP32
from .experts_exact import unordered_senders

if TYPE_CHECKING:
    from .layout import Layout
    from .shape import Shape

EXACT = "exact"  # the word of a layout
COVERED = (FP32, BF16, FP16)


def folded(parts: int) -> list[int]:
    """The order of runs of a sequence: first and last, second and last but one, ...

    Every rank of cp holds as many neighbours of this list. So each has early tokens,
    which attend to few keys, and late ones.
    """
    pairs = ((run, parts - 1 - run) for run in range(-(-parts // 2)))
    return list(dict.fromkeys(run for pair in pairs for run in pair))


def held_runs(x: Layout, cp: int) -> list[int]:
    """The runs of a sequence that rank `cp` of context parallelism holds, in its order."""
    own = x.time_parts // x.cp
    return folded(x.time_parts)[cp * own : (cp + 1) * own]


def exact_word(x: Layout) -> str:
    """The word of a layout with its numbers of parts, such as exact:4x2; or ""."""
    if x.time_parts > 1:
        return f"{EXACT}:{x.exact}x{x.time_parts}"
    if x.exact > 1:
        return f"{EXACT}:{x.exact}"
    return EXACT if x.exact else ""


def uncovered(x: Layout) -> list[str]:
    """Every reason why this layout cannot give the bits of one process."""
    found = [*_unsplit(x), *_unsplit_time(x), *unordered_senders(x)]
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
        found += _other_kernels(x)
    if x.reduce == "micro":
        found.append(
            "exact does not cover reduce:micro: a rank adds its own microbatches"
            " before it exchanges sums. Use reduce:step"
        )
    return found


def _other_kernels(x: Layout) -> list[str]:
    """Explain why a compiled piece may have other kernels than on one process, or return []."""
    if x.compile == COMPILE_MAX:
        return [
            f"exact does not cover compile:{COMPILE_MAX}: its tuning may choose other"
            " kernels in each process. Use compile"
        ]
    if x.compile != COMPILE:
        return [
            f"exact does not cover compile:{x.compile} yet: its bits have not been compared."
            " Use compile"
        ]
    if x.exact > 1 or x.time_parts > 1:
        return [
            f"{exact_word(x)} does not cover compile yet: compiled parts have not been"
            " compared bit by bit. Use exact without parts, or leave compile out"
        ]
    if x.recompute != "none":
        return [
            f"exact does not cover compile with recompute:{x.recompute}: a graph that keeps"
            " nothing may be fused in another way. Leave one of them out"
        ]
    return []


def _unsplit_time(x: Layout) -> list[str]:
    """Explain why runs of a sequence cannot be divided among ranks, or return []."""
    parts, cp = x.time_parts, x.mesh.of("cp")
    word = exact_word(x)
    if parts & (parts - 1):
        lower = 1 << parts.bit_length() - 1
        return [
            f"{word}: the runs of a sequence are added in pairs. Use a power of two:"
            f" exact:{x.exact}x{lower} or exact:{x.exact}x{2 * lower}"
        ]
    if cp & (cp - 1):
        return [
            f"exact does not cover cp{cp}: the runs of a sequence are added in pairs. Use"
            " cp2, cp4 or cp8"
        ]
    if parts % cp:
        return [
            f"{word} with cp{cp}: each rank computes whole runs of the sequence. Write"
            f" exact:{x.exact}x{cp}, or exact:{x.exact}x{2 * cp}"
        ]
    names = [axis.name for axis in x.mesh.axes]
    if x.dp > 1 and cp > 1 and names.index("cp") < names.index("dp"):
        return ["exact with cp before dp: write dp before cp"]
    return []


def _unsplit(x: Layout) -> list[str]:
    """Explain why the parts cannot be divided among the tp ranks, or return []."""
    parts = x.exact
    times = f"x{x.time_parts}" if x.time_parts > 1 else ""
    if parts & (parts - 1):
        lower = 1 << parts.bit_length() - 1
        return [
            f"{exact_word(x)}: the parts of a product are added in pairs. Use a power"
            f" of two: exact:{lower}{times} or exact:{2 * lower}{times}"
        ]
    tp = x.mesh.of("tp")
    if parts % tp == 0:
        return []
    if tp & (tp - 1):
        return [
            f"exact does not cover tp{tp}: the parts of a product are added in pairs."
            " Use tp2, tp4 or tp8"
        ]
    return [
        f"{exact_word(x)} with tp{tp}: each rank computes whole parts of a product. Write"
        f" exact:{tp}{times}, or exact:{2 * tp}{times}"
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


def split_heads(x: Layout, s: Shape) -> tuple[str, str] | None:
    """Explain why Ulysses would split the key heads of a part, with a way out."""
    ulysses = x.mesh.of("cp.ulysses")
    own = max(1, s.kv_heads // max(1, x.exact))
    if not x.exact or own % ulysses == 0:
        return None
    what = (
        f"exact: ulysses={ulysses} does not divide the {own} key heads of a part, and the"
        " gradient of a key head has one order of sums."
    )
    return what, f"Use a ring: cp{x.cp}."


def _adapted(s: Shape) -> dict[str, int]:
    return {row.name: row.rank_of(s) for row in ADAPTERS}


def uncut_time(x: Layout, s: Shape) -> tuple[str, str] | None:
    """Explain why a model cannot run on parts of the sequence, with a way out."""
    if x.time_parts == 1:
        return None
    uncompared = {
        "the mlp": s.kind == "mlp",
        **_adapted(s),
        "sinks": s.sinks,
        "output_gate": s.output_gate,
        **s.extra_losses,
        "dropout with seq": s.dropout and x.seq,
    }
    for which, has_it in uncompared.items():
        if has_it:
            what = f"{exact_word(x)} does not cover {which} yet: its bits have not been compared."
            return what, "Use exact without parts of the sequence, and no cp."
    return None


def unequal_parts(x: Layout, s: Shape) -> list[tuple[str, str]]:
    """Explain why a model's matmuls cannot have equal parts, with ways out."""
    parts = x.exact
    if parts < 2:
        return []
    uncompared = {
        "the mlp": s.kind == "mlp",
        "qk_norm_wide": s.qk_norm_wide,
        **_adapted(s),
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
    sizes = {"heads": s.heads, **s.mlp_widths, "vocab": s.vocab}
    uneven = {name: size for name, size in sizes.items() if size % parts}
    # Key heads may also be repeated, if there are fewer of them than parts.
    if not uneven and s.kv_heads % parts and parts % s.kv_heads:
        return {"kv_heads": s.kv_heads}
    return uneven
