"""Sketches: 16 numbers of a tensor, to which the sketches of its shards add up.

The sketch of a matrix G is U^T G V, where U and V have four columns of signs. A sign is a hash of an
axis and a global index, so every rank knows the signs of its own shard and no rank needs another's. The
map is linear: shards add up to the whole, and the difference of two sketches is the sketch of the
difference. The root mean square of the 16 numbers estimates the Frobenius norm. A difference in one
element is always seen, as it changes all 16 numbers by its own size.

Signs do not depend on the name of a parameter, so a renamed or a tied parameter has the same sketch.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

RANK = 4  # columns of signs on each side of a matrix
NUMBERS = RANK * RANK
PRIME = (1 << 61) - 1
# Steele, Lea, Flood 2014: the constants of SplitMix64, as signed numbers.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
# Rows are converted to float64 in blocks of so many elements. On a CPU a block stays in the cache, which
# is several times faster than new memory for each; a GPU would wait for its host with small ones.
_BLOCKS = {"cpu": 1 << 16}
_LARGE_BLOCK = 1 << 22


def mixed(values: Tensor) -> Tensor:
    """Hashes of int64 values: SplitMix64's finalizer, modulo 2^64."""
    state = values + _GOLDEN
    state = (state ^ _shifted(state, 30)) * _FIRST
    state = (state ^ _shifted(state, 27)) * _SECOND
    return state ^ _shifted(state, 31)


def _shifted(values: Tensor, bits: int) -> Tensor:
    """A logical shift to the right; torch's own keeps the sign."""
    # The arithmetic shift fills in copies of the sign, which the mask clears.
    mask = (1 << (64 - bits)) - 1
    return (values >> bits) & mask


def _hashes(indices: Tensor, axis: int) -> Tensor:
    # Above all indices, so no two axes share a hash.
    return mixed(indices + ((axis + 1) << 56))


def signs(indices: Tensor, axis: int, columns: int) -> Tensor:
    """Columns of signs for global indices along an axis, in float64: (indices, columns)."""
    hashes = _hashes(indices, axis)
    shifts = torch.arange(columns, device=indices.device)
    # One bit of the hash for each column.
    bits = (hashes[:, None] >> shifts) & 1
    return (1 - 2 * bits).double()


def coverage(indices: Sequence[Tensor]) -> int:
    """A number of a set of elements, to which disjoint shards of a tensor add up, modulo `PRIME`.

    It is the sum over all elements of a product of hashes, one for each axis.
    """
    total = 1
    for axis, along in enumerate(indices):
        # 30 bits each: the sum of 2^31 of them fits in 61 bits.
        weights = _hashes(along, axis) & ((1 << 30) - 1)
        # The sum over a product of sets is the product of their sums.
        total = total * int(weights.sum()) % PRIME
    return total


def sketch(tensor: Tensor, indices: Sequence[Tensor]) -> Tensor:
    """The sum of squares of a shard and its sketch: 17 numbers in float64, on the tensor's device.

    `indices` are the global indices of the shard along each axis.
    """
    result = torch.zeros(
        1 + NUMBERS, dtype=torch.float64, device=tensor.device
    )
    if tensor.numel() == 0:
        return result
    along = [each.to(tensor.device) for each in indices]
    if tensor.ndim < 2:
        values = tensor.reshape(-1).double()
        places = (
            along[0] if along else torch.zeros_like(values, dtype=torch.int64)
        )
        result[0] = values.square().sum()
        # A vector has 16 columns of signs of its own.
        result[1:] = signs(places, 0, NUMBERS).T @ values
        return result
    left = _left_signs(along[:-1])  # (rows, 4)
    right = signs(along[-1], tensor.ndim - 1, RANK)  # (columns, 4)
    # All axes but the last are rows.
    matrix = tensor.reshape(-1, tensor.shape[-1])
    size = _BLOCKS.get(tensor.device.type, _LARGE_BLOCK)
    height = max(1, size // matrix.shape[1])
    room = torch.empty(
        (min(height, len(matrix)), matrix.shape[1]),
        dtype=torch.float64,
        device=tensor.device,
    )
    for first in range(0, matrix.shape[0], height):
        rows = matrix[first : first + height]
        block = room[: len(rows)].copy_(rows)
        # (4, height) @ (height, columns) @ (columns, 4): the small product
        # first.
        part = left[first : first + height].T @ (block @ right)
        flat = block.view(-1)
        result[0] += flat.dot(flat)
        result[1:] += part.reshape(-1)
    return result


def sketch_rows(rows: Tensor, row_signs: Tensor, right: Tensor) -> Tensor:
    """8 numbers of rows that have signs of their own: (4, n) @ (n, features) @ (features, 2)."""
    # In the dtype of the rows: a copy of all activations in float64 would
    # cost more than the products.
    low = rows.dtype in (torch.bfloat16, torch.float16)
    values = rows.float() if low else rows
    narrow = (values @ right.to(values.dtype)).double()
    return (row_signs.T @ narrow).reshape(-1)


@lru_cache(maxsize=256)
def feature_signs(features: int, device: torch.device, columns: int) -> Tensor:
    """Columns of signs for all features of an output."""
    return signs(torch.arange(features, device=device), 1, columns)


def _left_signs(along: Sequence[Tensor]) -> Tensor:
    """Signs of all axes but the last: products over the axes, as one row for each row of the matrix."""
    rows = signs(along[0], 0, RANK)
    for axis, indices in enumerate(along[1:], start=1):
        further = signs(indices, axis, RANK)
        rows = (rows[:, None] * further[None]).reshape(-1, RANK)
    return rows


def norm_of(numbers: Sequence[float]) -> float:
    """The estimate of a Frobenius norm from the 16 numbers of a sketch."""
    # A root mean square: each number has the expectation |G|^2 when squared.
    return math.sqrt(sum(number * number for number in numbers) / len(numbers))
