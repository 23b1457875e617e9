"""The machine-independent work of a piece's operations: matrix products, bytes, messages.

`cost` finds a Load by running the real piece; `price` converts it to seconds on a machine. Every
amount is linear in the rows of a microbatch, so two costings determine all sizes.
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
    """`batch` matrix products (m, k) @ (k, n)."""

    m: float
    k: float
    n: float
    batch: float = 1.0

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.k * self.n


@dataclass(frozen=True)
class AttentionLoad:
    """softmax(q k) v by a kernel that keeps no scores: two products forward, five backward."""

    batch: float
    heads: float
    kv_heads: float
    queries: float
    keys: float
    head_dim: float
    causal: float = 1.0  # 1: half of the pairs count; 0: all of them
    products: float = 2.0  # how often each pair costs a multiply-add of head_dim

    @property
    def full(self) -> float:
        """FLOPs with every pair counted."""
        pairs = self.queries * self.keys
        return 2.0 * self.products * self.batch * self.heads * self.head_dim * pairs

    @property
    def flops(self) -> float:
        """FLOPs of the pairs that a causal mask leaves."""
        return self.full * (1 - self.causal / 2)


@dataclass(frozen=True)
class MessageLoad:
    """A collective inside an operation, by the axis of the mesh that it runs along. `bytes` is S as
    `Curve` counts it: a rank's input of all-reduce and reduce-scatter, its output of all-gather."""

    axis: str
    op: str
    bytes: float


@dataclass(frozen=True)
class Load:
    """One operation: its products, the bytes that everything else moves, its messages."""

    products: tuple[Product, ...] = ()
    attention: tuple[AttentionLoad, ...] = ()
    # bytes read and written by what is neither product nor attention
    moved: float = 0.0
    launches: float = 0.0  # kernels started
    messages: tuple[MessageLoad, ...] = ()

    @property
    def flops(self) -> float:
        """Products and causal attention."""
        return sum(p.flops for p in self.products) + sum(
            a.flops for a in self.attention
        )

    def __add__(self, other: Load) -> Load:
        return Load(*(getattr(self, n) + getattr(other, n) for n in _names(Load)))


@dataclass(frozen=True)
class PieceCost:
    """One piece on one rank: the load of each of its operations and the bytes of what it holds."""

    forward: Load
    input_gradient: Load  # I
    weight_gradient: Load  # W; a whole backward B is both
    # R, the forward; under `recompute:selective` P, the part of it that is repeated
    again: Load
    kept: float  # bytes between forward and backward, the input among them
    kept_after_i: float  # bytes that W still needs
    input: float  # bytes of what a recomputed piece keeps
    # bytes that come and go within the forward or the backward, at their peak
    temporary: float
    # numbers of the piece's own weights on this rank, whole: before ZeRO cuts them
    weights: float
    edge: float = 0.0  # bytes of its output, sent on to the next stage
    selected: float = 0.0  # bytes that are kept until P, the input among them
    frozen: float = 0.0  # those of its weights that are not trained
    experts: float = 0.0  # numbers of those weights that ranks of ep have parts of
    # bytes that it shares with other pieces: what follows from a microbatch
    derived: float = 0.0

    @property
    def backward(self) -> Load:
        return self.input_gradient + self.weight_gradient


def joined(parts: Sequence[PieceCost]) -> PieceCost:
    """Parts of a block as one piece, without what travels between them. What comes and goes is the least
    of theirs: who has a bound of this has one of each."""
    sums = {
        n: reduce(add, (getattr(part, n) for part in parts)) for n in _names(PieceCost)
    }
    sums |= {"temporary": min(part.temporary for part in parts), "edge": parts[-1].edge}
    return PieceCost(**sums)


@dataclass(frozen=True)
class CostedPiece:
    """The cost of one kind of piece as a function of a microbatch's rows.

    `parts` are the costs of its pieces of the program: three for a block whose experts are apart.
    """

    parts: tuple[Callable[[float], PieceCost], ...]

    def __call__(self, rows: float) -> PieceCost:
        costs = [part(rows) for part in self.parts]
        return joined(costs) if len(costs) > 1 else costs[0]


@dataclass(frozen=True)
class PieceKinds(ByKind[CostedPiece]):
    """The costs of a model's pieces under one cut.

    `rows` are those of its program, of a model that no shape describes; else they follow from the shape.
    """

    rows: tuple[PieceRow, ...] = ()


def at_rows(one: PieceCost, two: PieceCost) -> Callable[[float], PieceCost]:
    """The piece for any number of rows, from costings at one row and at two."""
    return partial(_line, one, two)


def _line(a: Any, b: Any, rows: float) -> Any:
    if a == b:  # words, and all that is the same for any number of rows
        return a
    if isinstance(a, float | int):
        return a + (b - a) * (rows - 1)
    if isinstance(a, tuple):
        return tuple(_line(x, y, rows) for x, y in zip(a, b, strict=True))
    kind: Any = type(a)
    return kind(*(_line(getattr(a, n), getattr(b, n), rows) for n in _names(kind)))


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind))
