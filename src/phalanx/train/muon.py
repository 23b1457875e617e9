"""Muon (Jordan et al. 2024): orthogonalized momentum for matrices, AdamW for all other
weights.

The rule table says which weights are matrices (`Rules.matrices`). The momentum is
sharded like AdamW's moments, but an update needs whole matrices. Each matrix has an
owner among the ranks that hold parts of it; the owner collects the parts,
orthogonalizes the matrix and sends every rank its part of the result. Owners are chosen
to balance the cost. The results are those of `torch.optim.Muon`, computed in bfloat16
on a GPU and in the weights' dtype on a CPU.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..comm import Work
from ..layout.choices import MUON, OPTIMIZERS
from ..layout.matrices import STEPS, assign_owners, orthogonal_work
from ..parallel import Unit
from ..parallel.groups import UnitPlace
from ..parallel.tensor import Weight
from ..parallel.works import ChainedWork
from .optimizer import AdamW, Scale, Update

COEFFICIENTS, TINY = (3.4445, -4.7750, 2.0315), 1e-7
(_MOMENTUM,) = OPTIMIZERS[MUON].matrix_moments


def orthogonalized(x: Tensor) -> Tensor:
    """Orthogonalize matrices (n, rows, columns): bring their singular values near 1, by
    Newton-Schulz."""
    # Coefficients of a quintic that brings singular values near 1 in few
    # steps.
    a, b, c = COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    # The Gram matrix of the short side is the smaller one.
    x = x.mT if tall else x
    # The Frobenius norm bounds the largest singular value, so that iteration
    # converges.
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=TINY)
    for _ in range(STEPS):
        # x <- a x + (b G + c G^2) x, with G = x x'.
        gram = x @ x.mT
        x = torch.baddbmm(
            x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a
        )
    return x.mT if tall else x


@dataclass(frozen=True)
class Muon:
    """Settings of Muon.

    `scale` is torch's adjust_lr_fn: `original` (Jordan) or `match_rms_adamw` (Liu et
    al. 2025), with which one learning rate suits matrices and other weights. `rate` is
    the matrices' learning rate as a multiple of the others'.
    """

    name: ClassVar[str] = OPTIMIZERS[MUON].stored
    whole_matrices: ClassVar[bool] = True
    momentum: float = 0.95
    nesterov: bool = True
    scale: str = "match_rms_adamw"
    rate: float = 1.0
    decay: float = 0.1
    others: AdamW = AdamW()  # immutable, so it can be a default

    def of(self, unit: Unit) -> "MuonUpdate":
        return MuonUpdate(unit, self)

    def scale_of(self, rows: int, columns: int) -> float:
        # adjust_lr_fn "original": sqrt(max(1, rows / columns)).
        if self.scale == "original":
            return math.sqrt(max(1.0, rows / columns))
        # The RMS of an AdamW update is about 0.2 (Liu et al. 2025).
        return 0.2 * math.sqrt(max(rows, columns))


class Matrix(NamedTuple):
    """A matrix with one owner: a whole weight, or one expert's part of it."""

    weight: Weight
    start: int  # in the unit's flat order
    owner: int = 0  # rank in the group

    @property
    def shape(self) -> tuple[int, ...]:
        """The matrix's shape on each tp rank, including padding."""
        return self.weight.local[-2:]

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)

    @property
    def work(self) -> float:
        """FLOPs of orthogonalizing the matrix, or all matrices that the weight
        packs."""
        sides = self.weight.matrices
        return sum(
            orthogonal_work(r.stop - r.start, c.stop - c.start)
            for r, c in sides
        )

    def span(self, unit: Unit, shard: int) -> slice:
        """The elements of the matrix in a shard, relative to the shard's start."""
        # The part of [start, stop) that lies in this shard; empty if there is
        # none.
        begin, end = unit.part * shard, unit.part * (shard + 1)
        first = min(max(self.start, begin), end)
        return slice(first - begin, max(min(self.stop, end), first) - begin)


def matrices_of(unit: Unit) -> list[Matrix]:
    """Return the matrices of a unit with their owners.

    Every unit starts with a different rank, since it may have fewer matrices than there
    are ranks.
    """
    found = list[Matrix]()
    for weight, offset in zip(unit.order, unit.offsets, strict=True):
        # padding is not a matrix
        experts = math.prod(cut.stop - cut.start for cut in weight.cuts[:-2])
        starts = range(experts if weight.matrices else 0)
        found += (
            Matrix(weight, offset + n * math.prod(weight.local[-2:]))
            for n in starts
        )
    # Heaviest first, to the rank with least work; units start at different
    # ranks.
    owners = assign_owners(
        [m.work for m in found],
        len(unit.groups.places),
        unit.number * len(found),
    )
    return [
        m._replace(owner=owner) for m, owner in zip(found, owners, strict=True)
    ]


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


class MuonUpdate(Update):
    """The update of a unit that may contain matrices.

    Each element of a matrix is sent to the owner once: from the first of its copies
    along tp, in the owner's replica. The result goes to all ranks that hold it. Parts
    are sent in flat order, matrix by matrix, including padding.
    """

    def __init__(self, unit: Unit, optimizer: Muon) -> None:
        segments = unit.own_segments(matrices=True)
        # Elementwise weights are AdamW's; matrices have runs of their own.
        super().__init__(
            unit, optimizer.others, [s for s in segments if not s.matrices]
        )
        self.muon, self.name = optimizer, optimizer.name
        runs = (slice(s.start, s.stop) for s in segments if s.matrices)
        self.matrix_runs = [(run, unit.home[run]) for run in runs]
        self.every_run = [*self.runs, *self.matrix_runs]
        self.device = unit.pool.device
        # bf16 on GPUs, whose matrix units compute it; a CPU keeps the weights'
        # dtype.
        wide = self.device.type == "cpu" or unit.home.dtype == torch.float64
        self.dtype = unit.home.dtype if wide else torch.bfloat16
        self.group, self.places = unit.groups.matrices, unit.groups.places
        if self.group is None:
            assert not self.matrix_runs, (
                f"unit {unit.number} has no group for its matrices"
            )
            return
        matrices, me, ranks = (
            matrices_of(unit),
            self.group.rank,
            range(len(self.places)),
        )
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

    # ---- momentum to the owners

    @torch.no_grad()
    def to_owners(self, scale: Scale | None) -> Work:
        """Update this rank's momentum shard and start sending it to the matrix
        owners."""
        gradient = self.unit.gradient
        assert gradient is not None
        # The shard's momentum in the dtype of the exchange.
        moved = torch.empty(
            self.unit.part, dtype=self.dtype, device=self.device
        )
        for run, view in self.matrix_runs:
            moved[run] = self._momentum(view, gradient[run], scale)
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

    def _momentum(
        self, view: Tensor, gradient: Tensor, scale: Scale | None
    ) -> Tensor:
        m = self.muon.momentum
        kept = self.state.setdefault(view, {})
        if not kept:
            kept["step"] = torch.zeros(
                (), dtype=torch.float32, device=view.device
            )
            kept[_MOMENTUM] = torch.zeros_like(view)
        own = gradient.to(view.device, view.dtype)
        # A tensor on the device, so that a skipped step needs no read.
        weight = torch.full((), 1.0 - m, dtype=view.dtype, device=view.device)
        kept["step"] += 1
        if scale is not None:
            # A skipped step leaves momentum and count as they were.
            scale = scale.on(view.device)
            skip = scale.skip.view(())
            own = (own * scale.factor.to(own.dtype)).masked_fill_(
                skip > 0, 0.0
            )
            weight = weight * (1.0 - skip).to(weight.dtype)
            kept["step"] -= skip
        # As torch.optim.Muon: an average of gradients, then Nesterov's look
        # ahead.
        buffer = kept[_MOMENTUM].lerp_(own, weight)
        return own.lerp(buffer, m) if self.muon.nesterov else buffer

    # ---- the update

    @torch.no_grad()
    def __call__(self, lr: float, scale: Scale | None = None) -> None:
        self.lr, self.scale = lr, scale
        if self.group is not None:
            self.result = self._orthogonal()
            # Nothing received is needed any more: free the buffer.
            self.received = self.result[:0]
        super().__call__(lr, scale)

    def _orthogonal(self) -> Tensor:
        """Return the orthogonalized matrices of this rank, packed for the exchange."""
        wholes = self._wholes()
        # Matrices of one shape, also those packed into one weight.
        alike: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        for matrix in self.mine:
            for rows, columns in matrix.weight.matrices:
                x = wholes[matrix.start][rows, columns]
                alike[x.shape[0], x.shape[1]].append(x)
        # matrices of one shape in one batched product
        for shape, these in alike.items():
            made = orthogonalized(torch.stack(these)) * self.muon.scale_of(
                *shape
            )
            # Back into the whole weights, of which `these` are views.
            torch._foreach_copy_(these, list(made.unbind()))
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
        unit, lr = self.unit, self.lr * self.muon.rate
        # Decoupled weight decay: w <- (1 - lr decay) w - lr update.
        kept = torch.full_like(unit.home[:1], 1.0 - lr * self.muon.decay).view(
            ()
        )
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
