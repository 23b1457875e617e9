"""The update of whole matrices: the part that all such optimizers share.

Elements of a matrix lie on many ranks, but an update needs the whole matrix. Its owner
collects the parts, computes the update and sends every rank its part of the result. A
kind of optimizer says what a rank sends and what the owner computes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from ..comm import Work
from ..layout.choices import BF16
from ..layout.optimizer_row import MatrixRow
from ..parallel import Unit
from ..parallel.groups import UnitPlace
from ..parallel.matrices import Matrix, matrices_of
from ..parallel.tensor import Weight
from ..parallel.works import ChainedWork
from .optimizer import AdamW, Scale, Update


class MatrixOptimizer(Protocol):
    """The settings of an optimizer that updates matrices whole.

    `rate` is the matrices' learning rate as a multiple of the others', and `others` updates
    all other weights. The first `prepares` steps only prepare a matrix's state, and make no
    update of it.
    """

    name: ClassVar[str]
    row: ClassVar[MatrixRow]
    prepares: ClassVar[int]

    @property
    def rate(self) -> float: ...

    @property
    def decay(self) -> float: ...

    @property
    def others(self) -> AdamW: ...


class MatrixPart(NamedTuple):
    """One rank's part of a matrix, as it is sent.

    `inside` is relative to the start of the matrix in the rank's tp shard, `at` to the
    start of the rank's data-parallel shard.
    """

    matrix: Matrix
    place: UnitPlace
    inside: slice
    at: slice

    @property
    def length(self) -> int:
        return int(self.at.stop - self.at.start)


class OwnedMatrix(NamedTuple):
    """A matrix on its owner: its name in a checkpoint, and a view of its elements.

    The elements are first the ranks' contributions and later the update.
    """

    name: str
    elements: Tensor


class MatrixUpdate(Update, ABC):
    """The update of a unit that may contain matrices.

    Each element of a matrix is sent to the owner once: from the first of its copies
    along tp, in the owner's replica. The result goes to all ranks that hold it. Parts
    are sent in flat order, matrix by matrix, including padding.
    """

    def __init__(self, unit: Unit, optimizer: MatrixOptimizer) -> None:
        segments = unit.own_segments(matrices=True)
        # Elementwise weights are AdamW's; matrices have runs of their own.
        super().__init__(
            unit, optimizer.others, [s for s in segments if not s.matrices]
        )
        self.settings: MatrixOptimizer = optimizer
        self.name = optimizer.name
        runs = (slice(s.start, s.stop) for s in segments if s.matrices)
        self.matrix_runs = [(run, unit.home[run]) for run in runs]
        self.every_run = [*self.runs, *self.matrix_runs]
        self.device = unit.pool.device
        # bf16 on GPUs, whose matrix units compute it, if the row says so; a CPU keeps
        # the weights' dtype.
        wide = (
            self.device.type == "cpu"
            or unit.home.dtype == torch.float64
            or optimizer.row.gpu_dtype != BF16
        )
        self.dtype = unit.home.dtype if wide else torch.bfloat16
        self.group, self.places = unit.groups.matrices, unit.groups.places
        if self.group is None:
            assert not self.matrix_runs, (
                f"unit {unit.number} has no group for its matrices"
            )
            return
        matrices = matrices_of(unit, optimizer.row)
        me, ranks = self.group.rank, range(len(self.places))
        self.mine = [matrix for matrix in matrices if matrix.owner == me]
        # By rank: parts that it owns of this rank's matrices, and parts of this rank's
        # own matrices from it; then the same for the results, in the opposite
        # direction.
        self.to_owner = [
            self._parts(me, [b for b in matrices if b.owner == r], r)
            for r in ranks
        ]
        self.of_mine = [self._parts(r, self.mine, me) for r in ranks]
        self.results = [self._parts(r, self.mine) for r in ranks]
        self.of_theirs = [
            self._parts(me, [b for b in matrices if b.owner == r])
            for r in ranks
        ]
        kept = optimizer.row.owned
        for part in (p for matrix in self.mine for p in matrix.parts()):
            shapes = {each.kind: each.shape(*part.sides) for each in kept}
            if shapes:
                self.owned_shapes[part.name] = shapes

    @abstractmethod
    def contribution(
        self, view: Tensor, gradient: Tensor, scale: Scale | None
    ) -> Tensor:
        """This rank's elements of a run of matrices, as the owners need them."""

    @abstractmethod
    def replace_by_updates(self, matrices: Sequence[OwnedMatrix]) -> None:
        """Compute the updates of the matrices that this rank owns, in their place."""

    def rate_of(self, weight: Weight, lr: float, made: float) -> float:
        if not weight.matrices:
            return super().rate_of(weight, lr, made)
        if made <= self.settings.prepares:
            return 0.0
        return lr * self.settings.rate

    def _parts(
        self, rank: int, matrices: list[Matrix], owner: int | None = None
    ) -> list[MatrixPart]:
        """Return the parts of these matrices on a rank; with `owner`, only those to
        send to this owner."""
        place, parts = self.places[rank], list[MatrixPart]()
        for matrix in matrices:
            copies, at = (
                matrix.weight.copies,
                matrix.span(self.unit, place.shard),
            )
            # One of the tp ranks with equal copies sends, from the owner's own
            # replica.
            first = place.tp % copies == 0 if copies else place.tp == 0
            if owner is None or (
                first and place.replica == self.places[owner].replica
            ):
                # From the shard's numbering to that of the matrix.
                shift = self.unit.part * place.shard - matrix.start
                inside = slice(at.start + shift, at.stop + shift)
                parts.append(MatrixPart(matrix, place, inside, at))
        return parts

    # ---- gradients to the owners

    @torch.no_grad()
    def to_owners(self, scale: Scale | None) -> Work:
        """Start sending this rank's elements of matrices to the owners."""
        gradient = self.unit.gradient
        assert gradient is not None
        # The shard's elements in the dtype of the exchange.
        moved = torch.empty(
            self.unit.part, dtype=self.dtype, device=self.device
        )
        for run, view in self.matrix_runs:
            moved[run] = self.contribution(view, gradient[run], scale)
        own = [moved[part.at] for parts in self.to_owner for part in parts]
        # An empty slice, so that `cat` has at least one tensor.
        sent = torch.cat([moved[:0], *own])
        self.received, work = self._exchange(sent, self.to_owner, self.of_mine)
        return work

    def _exchange(
        self,
        sent: Tensor,
        to: list[list[MatrixPart]],
        of: list[list[MatrixPart]],
    ) -> tuple[Tensor, Work]:
        """Start an all-to-all of matrix parts. Return the receive buffer and the
        pending work."""
        assert self.group is not None
        # Elements to each rank and from each rank.
        sends, takes = (
            [sum(p.length for p in parts) for parts in side]
            for side in (to, of)
        )
        came = sent.new_empty(sum(takes))
        return came, self.group.all_to_all(
            came, sent, takes, sends, wait=False
        )

    # ---- the update

    @torch.no_grad()
    def __call__(self, lr: float, scale: Scale | None = None) -> None:
        self.lr, self.scale = lr, scale
        if self.group is not None:
            self.result = self._updates()
            # Nothing received is needed any more: free the buffer.
            self.received = self.result[:0]
        super().__call__(lr, scale)

    def _updates(self) -> Tensor:
        """Return the updates of this rank's matrices, packed for the exchange."""
        wholes = self._wholes()
        owned = [
            OwnedMatrix(
                part.name, wholes[matrix.start][part.rows, part.columns]
            )
            for matrix in self.mine
            for part in matrix.parts()
        ]
        self.replace_by_updates(owned)
        parts = (part for parts in self.results for part in parts)
        own = (
            _local(part, wholes[part.matrix.start]).flatten()[part.inside]
            for part in parts
        )
        return torch.cat([self.received[:0], *own])

    def _wholes(self) -> dict[int, Tensor]:
        """Assemble the matrices that this rank owns from the received parts, keyed by
        start."""
        parts = [part for parts in self.of_mine for part in parts]
        came = torch.split(self.received, [part.length for part in parts])
        new, wholes = self.received.new_zeros, dict[int, Tensor]()
        by_tp: dict[tuple[int, int], Tensor] = {}
        # First each tp rank's part, in its own order.
        for part, numbers in zip(parts, came, strict=True):
            key = part.matrix.start, part.place.tp
            if key not in by_tp:
                by_tp[key] = new(part.matrix.stop - part.matrix.start)
            by_tp[key][part.inside] = numbers
        # Then the parts at their places; padding is left out.
        for matrix in self.mine:
            whole = wholes[matrix.start] = new(matrix.weight.shape[-2:])
            for tp in (tp for start, tp in by_tp if start == matrix.start):
                box = matrix.weight.box_at(tp)[-2:]
                inside = tuple(
                    slice(0, side.stop - side.start) for side in box
                )
                whole[box] = by_tp[matrix.start, tp].view(matrix.shape)[inside]
        return wholes

    # ---- results from the owners

    def from_owners(self) -> Work:
        """Start sending every rank its part of the results; after the wait they are in
        its weights."""
        came, work = self._exchange(self.result, self.results, self.of_theirs)
        return ChainedWork(work, lambda: self._apply(came))

    @torch.no_grad()
    def _apply(self, came: Tensor) -> None:
        unit, lr = self.unit, self.lr * self.settings.rate
        # Decoupled weight decay: w <- (1 - lr decay) w - lr update.
        kept = torch.full_like(
            unit.home[:1], 1.0 - lr * self.settings.decay
        ).view(())
        if (
            self.scale is not None
        ):  # the results of a skipped step are undefined
            came.masked_fill_(
                self.scale.on(came.device).skip.view(()) > 0, 0.0
            )
            kept.masked_fill_(
                self.scale.on(kept.device).skip.view(()) > 0, 1.0
            )
        self.result = came[:0]
        parts = [part for parts in self.of_theirs for part in parts]
        wide = came.to(unit.home.device, unit.home.dtype)
        results = torch.split(wide, [part.length for part in parts])
        for part, numbers in zip(parts, results, strict=True):
            # In place, on the slice of the home.
            own = unit.home[part.at]
            own *= kept
            own -= lr * numbers
        # The copy for computing follows the home.
        unit.refresh()


def _local(part: MatrixPart, whole: Tensor) -> Tensor:
    """Return a tp rank's part of a matrix, padded."""
    own = whole[part.matrix.weight.box_at(part.place.tp)[-2:]]
    if own.shape == part.matrix.shape:
        return own
    padded = whole.new_zeros(part.matrix.shape)
    padded[: own.shape[0], : own.shape[1]] = own
    return padded
