"""Cost of a piece, from formulas in the sizes of its model. It runs in a browser,
without torch and numpy.

`formulas.py` computes the formulas. A number is a sum of products of a rank's sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from phalanx.cost import cost_of_row
from phalanx.layout import Layout, Shape, piece_layout
from phalanx.program import CostedPiece, PieceCost, PieceKinds, at_rows

# Settings that decide which operations a decoder runs; the rest of a shape are sizes.
STRUCTURE = (
    "norm", "norms", "positions", "gated", "activation", "tied", "bias", "qk_norm", "qk_norm_wide",
)  # fmt: skip


def structure(shape: Shape) -> str:
    """Return a key for all shapes that run the same operations, or "" without a
    formula."""
    caps = shape.softcap or shape.logit_softcap
    if (
        shape.kind != "decoder"
        or shape.experts
        or shape.windows
        or shape.sinks
        or shape.mtp
        or caps
    ):
        return ""
    return " ".join(str(getattr(shape, name)) for name in STRUCTURE)


def cut_key(shape: Shape, cut: Layout) -> str:
    """Return a key for all cuts that run the same operations; only tp's number of ranks
    is a size."""
    few = "one head" if cut.cp > 1 and shape.heads == cut.tp else ""
    tensor = "seq" if cut.seq else "tp" if cut.tp > 1 else ""
    context = ".".join(
        f"{part}{cut.mesh.of(f'cp.{part}')}" for part in ("ring", "ulysses")
    )
    words = (
        tensor,
        few,
        context,
        cut.schedule,
        cut.recompute,
        cut.precision,
        cut.matmul,
    )
    return " ".join(filter(None, words))


def local(
    shape: Shape,
    cut: Layout,
    rows: float,
    sequence: int,
    numbers: Mapping[str, int],
) -> dict[str, float]:
    """Return the sizes on one rank. `numbers` has the sizes of a chunk of logits, and of
    a tile of a chunk, in the loss."""
    tp, multiple = cut.tp, cut.cp * 2 * (cut.tp if cut.seq else 1)
    whole = (
        -(-sequence // multiple) * multiple
        if cut.cp > 1 or cut.seq
        else sequence
    )
    s, d = whole / cut.cp, shape.head_dim
    groups, words, tokens = (
        max(1, shape.kv_heads // tp),
        -(-shape.vocab // tp),
        rows * s,
    )
    chunk = min(tokens, max(1, numbers["chunk"] // words))
    tile = min(chunk, max(1, numbers["tile"] // words))
    return {
        "b": rows, "s": s, "u": s / tp, "h": shape.hidden, "f": shape.ffn / tp,
        "a": shape.heads / tp, "g": groups, "q": shape.heads * d / tp, "k": groups * d,
        "v": words, "d": d, "p": shape.sequence,
        "c": chunk, "t": tile,
    }  # fmt: skip


def features(x: Mapping[str, float], *, seq: bool) -> list[float]:
    """Return the products of sizes that a formula may use."""
    wide = [1.0, *(x[n] for n in "hfqkvagd")]
    tokens = [x["b"] * x[n] for n in ("su" if seq else "s")]
    weights = [x["h"] * x[n] for n in "fqkv"]
    once = [x["s"] * x["d"], x["p"] * x["h"], x["s"], x["b"], *(wide[1:])]
    once += [x["c"] * x["v"], x["c"], x["t"] * x["v"], x["t"]]
    return [*(t * w for t in tokens for w in wide), *weights, *once, 1.0]


# A value is a number, a string, a list of values, {"f": [[feature, factor], ...]}, or
# {"max": [...]}.
def _value(form: Any, at: Sequence[float]) -> Any:
    if isinstance(form, list):
        return [_value(each, at) for each in form]
    if isinstance(form, dict):
        if "max" in form:
            return max(_value(each, at) for each in form["max"])
        return sum(at[n] * factor for n, factor in form["f"])
    return form


class NoFormula(ValueError):
    """Raised for a model or cut without formulas."""


def costs_from(
    table: Mapping[str, Any],
    model: Shape | str,
    layouts: Iterable[Layout],
    *,
    sequence: int = 0,
) -> dict[Layout, PieceKinds]:
    """Return the same costs as `phalanx.cost.cached_costs`, from a table of
    formulas."""
    assert isinstance(model, Shape)
    found, kind = {}, structure(model)
    for cut in dict.fromkeys(map(piece_layout, layouts)):
        kinds = table.get(kind, {}).get(cut_key(model, cut))
        if kinds is None:
            raise NoFormula(
                f"This page has no prices of {cut} for {model.name}; `phalanx plan` has."
            )

        def at(form: Any, rows: float, cut: Layout) -> PieceCost:
            # the part that is independent of rows, as for a model that is costed
            if not rows:
                return at_rows(at(form, 1.0, cut), at(form, 2.0, cut))(rows)
            sizes = local(model, cut, rows, sequence or model.sequence, table)
            return cost_of_row(_value(form, features(sizes, seq=cut.seq)))

        each = (CostedPiece((partial(at, form, cut=cut),)) for form in kinds)
        found[cut] = PieceKinds.equal_blocks(*each, model.layers)
    return found
