"""The machine-independent work of a piece's operations: matmuls, bytes, messages.

`cost` finds a Load by running the real piece; `price` converts it to seconds on a
machine. Every amount is linear in the rows of a microbatch, so two costings determine
all sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial, reduce
from operator import add
from typing import Any

from ..layout import ByKind, PieceRow


@dataclass(frozen=True)
class Product:
    """A batch of `batch` matmuls (m, k) @ (k, n)."""

    m: float
    k: float
    n: float
    batch: float = 1.0

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.k * self.n


@dataclass(frozen=True)
class AttentionLoad:
    """Attention by a fused kernel: two matmuls forward, five backward."""

    batch: float
    heads: float
    kv_heads: float
    queries: float
    keys: float
    head_dim: float
    causal: float = 1.0  # 1 if half of the pairs count, 0 if all do
    products: float = 2.0  # multiply-adds of size head_dim for each pair

    @property
    def full(self) -> float:
        """FLOPs with every pair counted."""
        pairs = self.queries * self.keys
        return (
            2.0
            * self.products
            * self.batch
            * self.heads
            * self.head_dim
            * pairs
        )

    @property
    def flops(self) -> float:
        """FLOPs of the pairs that a causal mask leaves."""
        return self.full * (1 - self.causal / 2)


@dataclass(frozen=True)
class MessageLoad:
    """A collective inside an operation, by the mesh axis that it runs along.

    `bytes` is S as `Curve` counts it: a rank's input for all-reduce and reduce-scatter,
    its output for all-gather.
    """

    axis: str
    op: str
    bytes: float


@dataclass(frozen=True)
class Load:
    """The work of one operation: matmuls, bytes moved by everything else, messages."""

    products: tuple[Product, ...] = ()
    attention: tuple[AttentionLoad, ...] = ()
    # Bytes read and written by everything but matmuls and attention.
    moved: float = 0.0
    launches: float = 0.0  # kernel launches
    messages: tuple[MessageLoad, ...] = ()

    @property
    def flops(self) -> float:
        """FLOPs of matmuls and causal attention."""
        return sum(p.flops for p in self.products) + sum(
            a.flops for a in self.attention
        )

    def __add__(self, other: Load) -> Load:
        return Load(
            *(getattr(self, n) + getattr(other, n) for n in _names(Load))
        )


@dataclass(frozen=True)
class PieceCost:
    """The work of each operation of one piece on one rank, and the bytes that it holds."""

    forward: Load
    input_gradient: Load  # I
    weight_gradient: Load  # W; a whole backward B is both
    # R, the forward. Under `recompute:selective` it is P, the part that is repeated.
    recompute: Load
    kept: float  # bytes between forward and backward, the input included
    kept_after_i: float  # bytes that W still needs
    input: float  # bytes that a recomputed piece keeps
    # Peak bytes allocated and freed within the forward or the backward.
    temporary: float
    # Elements of the piece's own weights on this rank, before ZeRO shards them.
    weights: float
    edge: float = 0.0  # bytes of its output, as sent to the next stage
    selected: float = 0.0  # bytes kept until P, the input included
    frozen: float = 0.0  # elements of `weights` that are not trained
    routed: float = 0.0  # elements of `weights` that ep shards
    # Bytes derived from a microbatch that it shares with other pieces.
    derived: float = 0.0

    @property
    def backward(self) -> Load:
        return self.input_gradient + self.weight_gradient


def joined(parts: Sequence[PieceCost]) -> PieceCost:
    """Parts of a block as one piece, without the messages between them.

    The temporary bytes are the smallest of the parts': callers that need a bound have
    one for each part.
    """
    # Amounts add up; the output of a block is that of its last part.
    sums = {
        n: reduce(add, (getattr(part, n) for part in parts))
        for n in _names(PieceCost)
    }
    sums |= {
        "temporary": min(part.temporary for part in parts),
        "edge": parts[-1].edge,
    }
    return PieceCost(**sums)


@dataclass(frozen=True)
class CostedPiece:
    """The cost of one kind of piece as a function of a microbatch's rows.

    `parts` are the costs of its pieces in the program: three for a block whose MLPs
    are apart.
    """

    parts: tuple[Callable[[float], PieceCost], ...]

    def __call__(self, rows: float) -> PieceCost:
        costs = [part(rows) for part in self.parts]
        return joined(costs) if len(costs) > 1 else costs[0]


@dataclass(frozen=True)
class PieceKinds(ByKind[CostedPiece]):
    """The costs of a model's pieces under one sharding.

    `rows` are those of its program if no shape describes the model; otherwise they
    follow from the shape.
    """

    rows: tuple[PieceRow, ...] = ()


def at_rows(one: PieceCost, two: PieceCost) -> Callable[[float], PieceCost]:
    """The cost of a piece for any number of rows, from its costs at one row and at two."""
    return partial(_line, one, two)


def _line(a: Any, b: Any, rows: float) -> Any:
    if a == b:  # words, and amounts that do not depend on the rows
        return a
    # A line through (1, a) and (2, b), number by number.
    if isinstance(a, float | int):
        return a + (b - a) * (rows - 1)
    if isinstance(a, tuple):
        return tuple(_line(x, y, rows) for x, y in zip(a, b, strict=True))
    kind: Any = type(a)
    return kind(
        *(_line(getattr(a, n), getattr(b, n), rows) for n in _names(kind))
    )


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind))
