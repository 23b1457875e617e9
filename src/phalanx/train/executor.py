"""Carries out one rank's row of a program, operation by operation, and measures it.

Compute operations run where they stand. What is issued beside them (gathers, sums, messages) is
begun where it stands and waited for by the first operation that needs it: the order of the list is
all the synchronisation there is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm import CommError, Group, Work
from ..parallel import Unit, count_valid
from ..parallel.batch import edge_shape
from ..parallel.data import Precision, Sum
from ..parallel.local import Holding
from ..parallel.pieces import Box
from ..program import Op, Program, Span, Timeline
from ..program.needs import lane
from .optimizer import Optimizer
from .precision import LossScale

__all__ = ["Executor", "StepResult"]

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class StepResult:
    """What a rank knows after a step. `loss` is its own sum, and zero where none is counted."""

    loss: float
    count: float
    norm: float | None
    timeline: Timeline

    @property
    def finite(self) -> bool:
        return self.norm is None or math.isfinite(self.norm)


class Executor:
    """One rank at work. The program has been checked; what it needs is there when it says so."""

    def __init__(
        self,
        holding: Holding,
        program: Program,
        rank: int,
        optimizer: Optimizer,
        *,
        width: int,
        clip: float = 0.0,
        time_cut: int = 1,
        scaling: LossScale | None = None,
    ) -> None:
        self.holding, self.program, self.rank = holding, program, rank
        self.row = program.rows[program.owner[rank]]
        self.lanes = {op: lane(op, program, program.owner[rank]) for op in self.row}
        self.ops = frozenset(self.row)
        self.updates = {n: optimizer.of(u) for n, u in holding.units.items()}
        self.width, self.clip, self.time_cut = width, clip, time_cut
        self.scaling = scaling
        self.precision = next((u.precision for u in holding.units.values()), Precision())
        self.handlers: dict[str, Callable[[Op], Work | None]] = {
            "N": self._count, "F": self._forward, "R": self._again, "B": self._backward,
            "G": self._gather, "D": self._drop, "S": self._sum, "T": self._tie, "A": self._agree,
            "U": self._update, ">": self._send, "<": self._receive,
            "I": self._backward, "W": self._weight_gradient,
            "O": self._leave, "Z": self._come_back,
        }  # fmt: skip

    def step(self, batches: Sequence[Batch], lr: float) -> StepResult:
        """One training step on this rank's microbatches."""
        self.batches, self.lr = batches, lr
        self.inputs: dict[tuple[int, int], Tensor] = {}  # what a forward is waiting for
        self.gradients: dict[tuple[int, int], Tensor] = {}  # what a backward is waiting for
        self.segments: dict[tuple[int, int], Tensor] = {}  # inputs kept for recomputation
        self.away: dict[tuple[int, int], Box] = {}  # those of them that are on the host
        self.coming: dict[tuple[str, int, int], Work] = {}
        self.leaving: list[Work] = []
        self.outgoing: dict[tuple[str, int, int], Tensor] = {}
        self.fetching: dict[int, Work] = {}
        self.sums: list[tuple[int, Sum]] = []
        self.ties: dict[int, Work] = {}
        self.late: list[Op] = []
        self.loss, self.count, self.scale = 0.0, 1.0, 1.0
        self.norm: float | None = None
        self.spans: list[Span] = []
        self.began: dict[Work, tuple[Op, float]] = {}
        for op in self.row:
            if op.kind == "U" and self._under_way(op.piece):
                # On a lane of its own: what is computed next does not wait for the sum with it.
                self.late.append(op)
            else:
                self._perform(op)
        self._catch_up(everything=True)
        for work in self.leaving:
            self._wait(work)
        for wire in (self.holding.wires.activations, self.holding.wires.gradients):
            wire.flush()
        if self.norm is not None and self.scaling:
            self.scaling.saw(finite=math.isfinite(self.norm))
        return StepResult(self.loss, self.count, self.norm, Timeline(tuple(self.spans)))

    def _perform(self, op: Op) -> None:
        try:
            self.ready = time.perf_counter()
            work = self.handlers[op.kind](op)
        except CommError as error:
            # Every rank says for itself at which operation it lost the others.
            error.args = (f"{error} Rank {self.rank} was at {op}.",)
            raise
        except Exception as error:
            error.add_note(f"rank {self.rank} was at {op}.")
            raise
        if work is None:
            self.spans.append(Span(self.rank, self.lanes[op], op, self.ready, time.perf_counter()))
        else:
            self.began[work] = (op, self.ready)

    def _wait(self, work: Work) -> None:
        """Wait for something begun earlier; its span ends here, and ours starts here."""
        work.wait()
        if work in self.began:
            op, start = self.began.pop(work)
            self.spans.append(Span(self.rank, self.lanes[op], op, start, time.perf_counter()))
        self.ready = time.perf_counter()

    # ---- tokens and agreement

    def _count(self, op: Op) -> None:
        total = torch.tensor(
            [float(sum(map(count_valid, self.batches)))],
            dtype=torch.float64,
            device=self.holding.pool.device,
        )
        self.holding.wires.count.all_reduce(total)
        # A step without a single valid token has zero loss and zero gradients.
        self.count = max(1.0, float(total))

    def _agree(self, op: Op) -> None:
        self._settle(None)
        squares = torch.zeros(1, dtype=torch.float64, device=self.holding.pool.device)
        for number, unit in self.holding.units.items():
            if self._counts(number):
                squares += _squares(unit)
        said = torch.cat((squares, squares.new_tensor(self._said())))
        self.holding.wires.everyone.all_reduce(said)
        total, *heard = said.tolist()
        self.norm = math.sqrt(total) / self._loss_scale
        self._heard(heard)
        self.scale = 1.0 / self._loss_scale
        if self.clip:
            # As torch's clip_grad_norm_ does, with its 1e-6.
            self.scale *= min(1.0, self.clip / (self.norm + 1e-6))

    def _said(self) -> Sequence[float]:
        """What else this rank says when all agree; every rank says as many numbers."""
        return ()

    def _heard(self, sums: Sequence[float]) -> None:
        """The sums over all ranks of what each has said."""

    def _counts(self, unit: int) -> bool:
        """Each logical weight is counted by one rank of its copies, and on one stage."""
        home = self.program.host[unit] == self.program.owner[self.rank]
        return home and self.holding.wires.replica.rank == 0

    @property
    def _loss_scale(self) -> float:
        return self.scaling.scale if self.scaling else 1.0

    # ---- computing

    def _forward(self, op: Op) -> None:
        p, m = op.piece, op.index
        piece = self.holding.pieces[p]
        self._weights(p)
        x = None if piece.first else self._take(self.inputs, "F", p, m)
        again = Op("R", p, m) in self.ops
        if again and x is not None and self._heads_segment(p, m):
            self.segments[p, m] = x
        y = piece.forward(m, x, self.batches[m], keep=not again and self._trains)
        if piece.last:
            self.loss += self._own_loss(y)
        else:
            self._pass_on("F", p, p + 1, m, y)

    @property
    def _trains(self) -> bool:
        return any(op.kind in "BI" for op in self.row)

    def _own_loss(self, y: Tensor) -> float:
        # Every rank of tp computes the same loss; one of them tells it.
        return float(y) if self.holding.wires.tp.rank == 0 else 0.0

    def _heads_segment(self, p: int, m: int) -> bool:
        before = Op("R", p - 1, m)
        return before not in self.ops or self.row.index(before) > self.row.index(Op("R", p, m))

    def _again(self, op: Op) -> None:
        p, m = op.piece, op.index
        piece = self.holding.pieces[p]
        self._weights(p)
        x = None if piece.first else self.segments.pop((p, m))
        y = piece.forward(m, x, self.batches[m], keep=True)
        if Op("R", p + 1, m) in self.ops and not self._heads_segment(p + 1, m):
            self.segments[p + 1, m] = y

    def _backward(self, op: Op) -> None:
        p, m = op.piece, op.index
        piece = self.holding.pieces[p]
        self._weights(p)
        if piece.last:
            gradient = piece.seed(m, self._loss_scale / self.count)
        else:
            gradient = self._take(self.gradients, "B", p, m)
        into = (piece.backward if op.kind == "B" else piece.input_gradient)(m, gradient)
        if into is not None:
            self._pass_on("B", p, p - 1, m, into)

    def _weight_gradient(self, op: Op) -> None:
        self.holding.pieces[op.piece].weight_gradient(op.index)

    def _leave(self, op: Op) -> None:
        key = op.piece, op.index
        if key in self.segments:  # recomputed later: its input is all that was kept
            self.away[key] = Box(self.segments.pop(key))
            self.away[key].leave()
        elif Op("R", *key) not in self.ops:  # the first piece, recomputed, keeps nothing at all
            self.holding.pieces[op.piece].leave(op.index)

    def _come_back(self, op: Op) -> None:
        key = op.piece, op.index
        if key in self.away:
            self.away[key].come_back()
            self.segments[key] = self.away.pop(key).content()
        elif Op("R", *key) not in self.ops:
            self.holding.pieces[op.piece].come_back(op.index)

    def _weights(self, piece: int) -> None:
        for unit in self.program.units(piece):
            if unit in self.fetching:
                self._wait(self.fetching.pop(unit))

    def _take(self, where: dict[tuple[int, int], Tensor], way: str, p: int, m: int) -> Tensor:
        if (way, p, m) in self.coming:
            self._wait(self.coming.pop((way, p, m)))
        return where.pop((p, m))

    def _pass_on(self, way: str, p: int, to: int, m: int, x: Tensor) -> None:
        if to in self.holding.pieces:
            (self.inputs if way == "F" else self.gradients)[to, m] = x
        else:
            self.outgoing[way, p, m] = x.contiguous()

    # ---- messages between stages

    def _flow(self, op: Op) -> Group:
        wires = self.holding.wires
        return wires.activations if op.of == "F" else wires.gradients

    def _send(self, op: Op) -> Work:
        x = self.outgoing.pop(("F" if op.of == "F" else "B", op.piece, op.index))
        work = self._flow(op).send(x, self.program.host[op.peer], wait=False)
        self.leaving.append(work)
        return work

    def _receive(self, op: Op) -> Work:
        p, m = op.piece, op.index
        x = torch.empty(
            edge_shape(self.batches[m], self.width, self.time_cut),
            dtype=self.precision.compute,
            device=self.holding.pool.device,
        )
        way = "F" if op.of == "F" else "B"
        work = self._flow(op).receive(x, self.program.host[op.peer], wait=False)
        (self.inputs if way == "F" else self.gradients)[p, m] = x
        self.coming[way, p, m] = work
        return work

    # ---- weights and gradients

    def _gather(self, op: Op) -> Work:
        work = self.holding.units[op.piece].gather()
        self.fetching[op.piece] = work
        return work

    def _drop(self, op: Op) -> None:
        self.holding.units[op.piece].drop()

    def _sum(self, op: Op) -> Work:
        # A sum on its way holds a whole gradient. Two may be under way; more would be the model's.
        while len(self.sums) >= 2 or any(unit == op.piece for unit, _ in self.sums):
            self._wait(self.sums.pop(0)[1])
        wires = self.holding.wires
        if wires.replica.size > 1 and wires.reduce.size > 1 and self.sums:
            self.sums[-1][1].go_on()
        self._catch_up()
        work = self.holding.units[op.piece].reduce()
        if wires.reduce.size == 1:
            work.go_on()
        self.sums.append((op.piece, work))
        return work

    def _under_way(self, unit: int) -> bool:
        return unit in self.ties or any(number == unit for number, _ in self.sums)

    def _catch_up(self, *, everything: bool = False) -> None:
        """Carry out the updates whose sums have arrived, or all of them."""
        for op in [u for u in self.late if everything or not self._under_way(u.piece)]:
            self.late.remove(op)
            self._perform(op)

    def _settle(self, unit: int | None) -> None:
        """Wait for the sums of a unit, or of all."""
        for number, work in self.sums:
            if unit is None or number == unit:
                self._wait(work)
        self.sums = [s for s in self.sums if unit is not None and s[0] != unit]
        for number in [n for n in self.ties if unit is None or n == unit]:
            self._wait(self.ties.pop(number))

    def _tie(self, op: Op) -> Work:
        # Not waited for here: the other stage may need a message from us before it gets there.
        self._settle(op.piece)
        gradient = self.holding.units[op.piece].gradient
        assert gradient is not None
        self.ties[op.piece] = self.holding.wires.tie.all_reduce(gradient, wait=False)
        return self.ties[op.piece]

    def _update(self, op: Op) -> None:
        self._settle(op.piece)
        self.ready = time.perf_counter()
        if self.norm is None or math.isfinite(self.norm):
            self.updates[op.piece](self.lr, self.scale)
        else:
            # Every rank has the same norm, so all of them leave their weights as they are.
            self.holding.units[op.piece].spend()


def _squares(unit: Unit) -> Tensor:
    gradient = unit.gradient
    assert gradient is not None
    total = torch.zeros(1, dtype=torch.float64, device=gradient.device)
    for run in unit.counted_runs():
        total += gradient[run].double().square().sum()
    return total
