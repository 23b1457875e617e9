"""A decoder's pieces costed by closed forms: an oracle that has never seen the model's code.

Products and messages are exact. Bytes moved and kept follow Korthikanti et al. 2022 (34 bytes a
token and feature of a block in 16 bits, scores never kept), adapted to gated blocks.
"""

from __future__ import annotations

from functools import partial

from phalanx.layout import Layout, Shape
from phalanx.program import (
    AttentionLoad,
    CostedPiece,
    Load,
    MessageLoad,
    PieceCost,
    PieceKinds,
    Product,
)

WIDTH = 2  # bytes of a number


def block(s: Shape, cut: Layout, sequence: int, rows: float) -> PieceCost:
    t, c = cut.tp, cut.cp
    tokens = rows * sequence / c
    wide, narrow = (
        s.heads * s.head_dim / t,
        max(1.0, s.kv_heads / t) * s.head_dim,
    )
    cols = [
        (s.hidden, wide),
        (s.hidden, narrow),
        (s.hidden, narrow),
        (wide, s.hidden),
    ]
    cols += [(s.hidden, s.ffn / t)] * (2 if s.gated else 1) + [
        (s.ffn / t, s.hidden)
    ]
    core = AttentionLoad(
        rows,
        s.heads / t,
        max(1.0, s.kv_heads / t),
        sequence / c,
        sequence,
        s.head_dim,
    )
    whole = tokens / (t if cut.seq else 1)  # tokens of norms and residuals
    ups = 3 if s.gated else 2
    moved = WIDTH * (
        whole * s.hidden * 16 + tokens * (ups * s.ffn / t + 4 * wide)
    )
    kept = WIDTH * (
        whole * s.hidden * 5
        + tokens * ((ups + 1) * s.ffn / t + 2 * wide + 4 * narrow)
    )
    params = sum(a * b for a, b in cols) + 2 * s.hidden
    return PieceCost(
        forward=Load(
            tuple(Product(tokens, a, b) for a, b in cols),
            (core,), moved, 40, _messages(s, cut, tokens, narrow),
        ),
        input_gradient=Load(
            tuple(Product(tokens, b, a) for a, b in cols),
            (AttentionLoad(rows, s.heads / t, s.kv_heads / t, sequence / c, sequence, s.head_dim, 1, 5),),
            2 * moved, 60, _messages(s, cut, tokens, narrow),
        ),
        weight_gradient=Load(tuple(Product(a, tokens, b) for a, b in cols), (), 0.0, 20),
        recompute=Load(
            tuple(Product(tokens, a, b) for a, b in cols),
            (core,), moved, 40, _messages(s, cut, tokens, narrow),
        ),
        kept=kept, kept_after_i=kept, input=WIDTH * whole * s.hidden, temporary=kept / 4,
        weights=params, edge=WIDTH * whole * s.hidden,
        selected=kept / 2 * (cut.recompute == "selective"),
    )  # fmt: skip


def _messages(
    s: Shape, cut: Layout, tokens: float, narrow: float
) -> tuple[MessageLoad, ...]:
    size = WIDTH * tokens * s.hidden
    found: list[MessageLoad] = []
    if cut.tp > 1 and cut.seq:
        found += [
            MessageLoad("tp", "all_gather", size),
            MessageLoad("tp", "reduce_scatter", size),
        ] * 2
    elif cut.tp > 1:
        found += [MessageLoad("tp", "all_reduce", size)] * 2
    if cut.cp > 1:
        found += [MessageLoad("cp", "send", 2 * WIDTH * tokens * narrow)] * (
            cut.cp - 1
        )
    return tuple(found)


def embed(s: Shape, cut: Layout, sequence: int, rows: float) -> PieceCost:
    tokens = rows * sequence / cut.cp
    out = WIDTH * tokens / (cut.tp if cut.seq else 1) * s.hidden
    load = Load((), (), 3 * WIDTH * tokens * s.hidden, 4)
    weights = s.vocab / cut.tp * s.hidden
    return PieceCost(
        load, load, Load(), load, 0.0, 0.0, 8 * tokens, out, weights, out
    )


def head(s: Shape, cut: Layout, sequence: int, rows: float) -> PieceCost:
    tokens = rows * sequence / cut.cp
    part = s.vocab / cut.tp
    logits = tokens * part
    forward = Load((Product(tokens, s.hidden, part),), (), 16 * logits, 12)
    back = Load((Product(tokens, part, s.hidden),), (), 12 * logits, 8)
    weight = Load((Product(s.hidden, tokens, part),), (), 0.0, 1)
    weights = 0.0 if s.tied else part * s.hidden
    return PieceCost(
        forward, back, weight, forward, 6 * logits, 6 * logits, WIDTH * tokens * s.hidden,
        6 * logits, weights + s.hidden, 0.0,
    )  # fmt: skip


def pieces(
    s: Shape, cut: Layout, sequence: int, rows: float
) -> tuple[PieceCost, ...]:
    """Embedding, one block, head."""
    return tuple(f(s, cut, sequence, rows) for f in (embed, block, head))


def piece_kinds(s: Shape, cut: Layout, sequence: int) -> PieceKinds:
    """The same as functions of a microbatch's rows, of a model whose blocks are alike."""
    each = (
        CostedPiece((partial(f, s, cut, sequence),))
        for f in (embed, block, head)
    )
    return PieceKinds.equal_blocks(*each, s.layers)
