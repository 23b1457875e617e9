"""Sums over all ranks of a step's counts, losses and squared gradients.

Ordinary ones are added in the order of arrival. Those of an `exact` layout have the same
bits in every layout: each microbatch's number travels in a slot of its own, to which all
other ranks add zero, and then each rank adds the slots in the tree. Squares of a gradient
are split into whole numbers, whose sums have no rounding, so their order does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..parallel import Unit
from ..parallel.local import ExactPlace, LocalModel

_SHORT = 1024  # elements of a run whose norm is computed in float32
# A float32 is (1 + fraction) * 2 ** (exponent - 127), with 23 stored bits of fraction.
_EXPONENTS = 256
_FRACTION = 23
_BIAS = 127
_ONE = _BIAS << _FRACTION  # the bits of 1.0
# The square of a mantissa is below 4 and rounded to float32: an integer of 25 bits
# times 2^-23. So float64 (53 bits) adds 2^27 of them without rounding. Such a sum is
# split into limbs, of which 2^27 add without rounding.
_RUN = 1 << 27
_LIMB, _LIMBS = 26, 2
# Elements whose squares are computed at once: they fit in a CPU's cache, or keep a GPU
# busy.
_CHUNK, _LARGE_CHUNK = {"cpu": 1 << 15}, 1 << 22


class Totals:
    """Sums over ranks in the order of arrival."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def begin(self, microbatches: int, losses: int) -> None:
        """Start a step with so many microbatches, and values of each one's loss.

        The first value is the loss itself, the others are its metrics.
        """

    def record(self, microbatch: int, first: int, values: Tensor) -> None:
        """Note values of a microbatch's loss, from the first of them on.

        They are (values, parts of time), or (values,) of the whole sequence.
        """

    def counts(self, each: Tensor) -> Tensor:
        """The numbers to reduce for counts (kind, microbatch)."""
        return each.sum(1, dtype=torch.float64)

    def counted(self, reduced: Tensor, kinds: int) -> Tensor:
        """The count of each kind, from the reduced numbers."""
        return reduced

    def squares(self, unit: Unit) -> Tensor:
        """Numbers of a unit's gradient that are finite only if all its elements are."""
        return norms_of(unit)

    def own_losses(self, losses: Tensor) -> Tensor:
        """The numbers to reduce for the losses, whose sums on this rank are given."""
        return losses

    def summed_losses(self, reduced: Tensor) -> Tensor:
        """The losses over all ranks, from the reduced numbers."""
        return reduced

    def own(
        self, squares: Iterable[Tensor], losses: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The numbers to reduce: the squares of all units, and the losses."""
        total = sum_of_squares(squares, self.device).view(1)
        return total, self.own_losses(losses)

    def agreed(self, reduced: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of squares and the losses, from the reduced numbers."""
        return reduced[:1], self.summed_losses(reduced[1:])


class ExactTotals(Totals):
    """Sums over ranks that have the same bits in every layout."""

    def __init__(self, device: torch.device, place: ExactPlace) -> None:
        super().__init__(device)
        self.place = place

    def begin(self, microbatches: int, losses: int) -> None:
        own = self.place.own
        size = losses, own.stop - own.start, microbatches
        self.losses = torch.zeros(
            size, dtype=torch.float64, device=self.device
        )

    def record(self, microbatch: int, first: int, values: Tensor) -> None:
        stop = first + len(values)
        self.losses[first:stop, :, microbatch] = values.view(len(values), -1)

    def counts(self, each: Tensor) -> Tensor:
        # Whole numbers, whose sums are the same in every order.
        counts = each.new_zeros(
            each.shape[0], self.losses.shape[1], each.shape[1]
        )
        counts[:, 0] = each
        return self._in_slots(counts)

    def counted(self, reduced: Tensor, kinds: int) -> Tensor:
        return sum_in_tree(reduced.view(kinds, -1))

    def squares(self, unit: Unit) -> Tensor:
        size = _LIMBS, _EXPONENTS
        found = torch.zeros(size, dtype=torch.float64, device=self.device)
        for run in unit.counted():
            found += squares_by_exponent(run.view(-1))
        # infinity and NaN have the last exponent
        last = found[:, -1]
        last.copy_(torch.where(last > 0, torch.inf, last))
        return found

    def own_losses(self, losses: Tensor) -> Tensor:
        return self._in_slots(self.losses)

    def summed_losses(self, reduced: Tensor) -> Tensor:
        return sum_in_tree(reduced.view(self.losses.shape[0], -1))

    def own(
        self, squares: Iterable[Tensor], losses: Tensor
    ) -> tuple[Tensor, Tensor]:
        size = _LIMBS, _EXPONENTS
        total = torch.zeros(size, dtype=torch.float64, device=self.device)
        for each in squares:
            total += each
        return total.view(-1), self.own_losses(losses)

    def agreed(self, reduced: Tensor) -> tuple[Tensor, Tensor]:
        size = _LIMBS * _EXPONENTS
        squares = sum_of_limbs(reduced[:size])
        return squares.view(1), self.summed_losses(reduced[size:])

    def _in_slots(self, own: Tensor) -> Tensor:
        """Own numbers (kind, part of time, microbatch) among all ranks', flattened."""
        place = self.place
        kinds, _, count = own.shape
        size = kinds, place.time_parts, place.ranks, count
        every = torch.zeros(size, dtype=torch.float64, device=self.device)
        every[:, place.own, place.rank] = own.double()
        return every.view(-1)


def totals_of(local: LocalModel) -> Totals:
    """The sums over ranks of a rank's part of a model."""
    device, place = local.pool.device, local.exact_place
    return Totals(device) if place is None else ExactTotals(device, place)


def sum_in_tree(x: Tensor) -> Tensor:
    """The sums over the last dim of x, in the order of `program/tree.py`."""
    while x.shape[-1] > 1:
        even = x.shape[-1] // 2 * 2
        pairs = x[..., 0:even:2] + x[..., 1:even:2]
        x = torch.cat((pairs, x[..., even:]), -1)
    return x[..., 0]


def squares_by_exponent(x: Tensor) -> Tensor:
    """The sums of squares of a flat float32 tensor, one for each exponent, as integers.

    Each sum is stored in limbs: row i has bits 26 i to 26 i + 25 of the sums
    of squared mantissas. Each square is rounded to float32, whatever its neighbours.
    Numbers below 2^-126 count as zero.
    """
    size = _LIMBS, _EXPONENTS
    limbs = torch.zeros(size, dtype=torch.float64, device=x.device)
    width = _CHUNK.get(x.device.type, _LARGE_CHUNK)
    for run in torch.split(x, _RUN):
        sums = limbs.new_zeros(_EXPONENTS)
        for chunk in torch.split(run, width):
            bits = chunk.view(torch.int32)
            exponent = (bits >> _FRACTION) & (_EXPONENTS - 1)
            fraction = bits & ((1 << _FRACTION) - 1)
            mantissa = (fraction | _ONE).view(torch.float32)
            squares = (mantissa * mantissa).double()
            # Not `bincount`, which torch's deterministic mode refuses on a GPU.
            sums.index_add_(0, exponent, squares)
        sums[0] = 0.0  # zeros, whose mantissa has no leading bit
        whole = sums * 2.0**_FRACTION
        high = (whole / 2.0**_LIMB).floor()
        limbs[0] += whole - high * 2.0**_LIMB
        limbs[1] += high
    return limbs


def sum_of_limbs(limbs: Tensor) -> Tensor:
    """The sum of squares from the sums of `squares_by_exponent`, in float64."""
    device = limbs.device
    exponents = torch.arange(_EXPONENTS, dtype=torch.float64, device=device)
    places = torch.arange(_LIMBS, dtype=torch.float64, device=device) * _LIMB
    scales = 2.0 * (exponents - _BIAS) - _FRACTION
    powers = torch.exp2(places.view(-1, 1) + scales)
    digits = _carried(limbs.view(_LIMBS, _EXPONENTS))
    return sum_in_tree((digits * powers).view(-1))


def _carried(limbs: Tensor) -> Tensor:
    """Whole numbers with their carries: all limbs but the last are below 2^26.

    Sums over other shards have other limbs of the same numbers.
    """
    digits = [*limbs.unbind()]
    for limb in range(_LIMBS - 1):
        over = (digits[limb] / 2.0**_LIMB).floor()
        digits[limb] = digits[limb] - over * 2.0**_LIMB
        digits[limb + 1] = digits[limb + 1] + over
    return torch.stack(digits)


def norms_of(unit: Unit) -> Tensor:
    """Return the norms of short runs of the gradient elements that this rank counts.

    A fused kernel computes them in float32, and their squares are summed in float64.
    That needs no wide copy of the gradient; the error is 1e-9, against 1e-4 of one
    float32 sum over 4M elements.
    """
    wide = torch.promote_types(unit.precision.reduce, torch.float32)
    # An empty tensor, so that `cat` has at least one.
    norms = [torch.empty(0, dtype=wide, device=unit.pool.device)]
    for x in unit.counted():
        if not x.numel():
            continue
        parts: Sequence[Tensor] = [x]  # the rows of a matrix are short enough
        if x.dim() < 2 and x.numel() <= _SHORT:
            parts = [x.view(1, -1)]
        elif x.dim() < 2:
            # Rows of `_SHORT` elements, and the rest.
            whole = x.numel() // _SHORT * _SHORT
            parts = [x[:whole].view(-1, _SHORT)]
            if whole < x.numel():
                parts = [*parts, x[whole:].view(1, -1)]
        for part in parts:
            norm = torch.linalg.vector_norm(part, dim=-1, dtype=wide)
            norms.append(norm if norm.dim() == 1 else norm.flatten())
    return torch.cat(norms)


def sum_of_squares(norms: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squared norms in float64, in which squares of float32 norms are
    exact."""
    none = torch.empty(0, device=device)
    return torch.cat((none, *norms)).double().square_().sum()
