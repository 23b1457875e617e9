"""Pieces of a model under many cuts, priced once each; what is not costed yet is told by its base.

Costing runs a model, so a search asks for a cut only when a layout with it may be among the best.
Until then its pieces are those of the cut without context parallelism, without selective
recomputation and with its backward whole: they compute as much, and what they leave out (messages
of context parallelism, operations that are computed again) only costs time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..layout import Shape
from ..program import Costs, Program, ops, schedule
from ..program.passes import messages
from .candidates import Cut
from .hardware import Hardware, Network, Numbers
from .kinds import CostFunction, PieceKinds
from .price import Times, Trio, trio
from .profile import Profile

__all__ = ["Priced", "Three", "pipeline", "pipeline_costs", "remembering"]

Three = tuple[Trio, Trio, Trio]  # embedding, block, head


@dataclass(frozen=True)
class _Remembering:
    """A network that tells the time of one message at once when it is asked again."""

    network: Network
    known: dict[tuple[str, float, float, float], Numbers] = field(default_factory=dict)

    @property
    def hops(self) -> Sequence[object]:
        return self.network.hops

    def seconds(self, op: str, size: Numbers, ranks: Numbers, apart: Numbers) -> Numbers:
        if np.ndim(size) or np.ndim(ranks) or np.ndim(apart):
            return self.network.seconds(op, size, ranks, apart)
        key = (op, float(size), float(ranks), float(apart))
        if key not in self.known:
            self.known[key] = self.network.seconds(op, size, ranks, apart)
        return self.known[key]


def remembering(hardware: Hardware) -> Hardware:
    """The hardware with a network that prices each message inside a block once."""
    return (
        replace(hardware, network=_Remembering(hardware.network))
        if isinstance(hardware.network, Network)
        else hardware
    )


class Priced:
    """Pieces by cut and rows, costed and priced when they are first needed."""

    def __init__(
        self, shape: Shape, hardware: Hardware, profile: Profile, piece_costs: CostFunction, *,
        sequence: int, precision: str, model: str = "",
    ) -> None:  # fmt: skip
        self.shape, self.profile = shape, profile
        self.hardware = remembering(hardware)
        self.sequence, self.precision = sequence, precision
        self._weigh, self._model = piece_costs, model or shape
        self._pieces: dict[Cut, PieceKinds] = {}
        self._trios: dict[tuple[Cut, float], Three] = {}

    def known(self, cut: Cut) -> bool:
        return cut in self._pieces

    @property
    def cuts(self) -> int:
        """How many cuts have been costed."""
        return len(self._pieces)

    def piece_costs(self, cuts: Iterable[Cut]) -> None:
        """CostFunction those that are not, together."""
        names = {c: self._felt(c).layout(self.precision) for c in cuts if c not in self._pieces}
        if names:
            found = self._weigh(self._model, list(names.values()), sequence=self.sequence)
            self._pieces |= {cut: found[name] for cut, name in names.items()}

    def _felt(self, cut: Cut) -> Cut:
        """Where scores are kept, to be selective means to drop them alone: nothing else differs."""
        return cut if self.profile.fused_attention else cut._replace(selective=False)

    def three(self, cut: Cut, rows: float) -> Three:
        """Embedding, block and head, exact when the cut is known and else at least so dear."""
        if cut in self._pieces:
            return self._priced(cut, rows)
        near = cut._replace(ring=1, ulysses=1)
        for name in ("split", "selective"):
            if near not in self._pieces:
                near = near._replace(**{name: False})
        embed, block, head = self._priced(near, rows / cut.cp)
        if cut.selective and not near.selective:
            block = replace(block, again=Times(), kept=block.input)
        return embed, block, head

    def _priced(self, cut: Cut, rows: float) -> Three:
        if (cut, rows) not in self._trios:
            pieces, felt = self._pieces[cut], cut.layout(self.precision)
            self._trios[cut, rows] = (
                trio(pieces.embed(rows), self.hardware, self.profile, felt, self.precision),
                trio(pieces.block(rows), self.hardware, self.profile, felt, self.precision),
                trio(pieces.head(rows), self.hardware, self.profile, felt, self.precision),
            )
        return self._trios[cut, rows]


def pipeline_costs(three: Three, stages: Sequence[int], again: bool) -> Costs:
    """Times of whole virtual stages. `again`: what a block computed is computed again."""
    embed, block, head = three
    pieces: dict[tuple[str, int], float] = {}
    ends = {0: embed, len(stages) - 1: head}
    for stage, blocks in enumerate(stages):
        held = [(block, float(blocks))] + ([(ends[stage], 1.0)] if stage in ends else [])
        pieces[ops.FORWARD, stage] = sum(n * t.forward.total for t, n in held)
        pieces[ops.WEIGHT_GRADIENT, stage] = sum(n * t.weights_.total for t, n in held)
        repeated = blocks * block.again.total if again else 0.0
        pieces[ops.INPUT_GRADIENT, stage] = sum(n * t.inputs.total for t, n in held) + repeated
    return Costs(kinds={}, pieces=pieces)


def pipeline(name: str, pp: int, microbatches: int, chunks: int) -> Program:
    """The order of computing and its messages, a piece for each virtual stage."""
    return messages(schedule(name, pp, microbatches, chunks))
