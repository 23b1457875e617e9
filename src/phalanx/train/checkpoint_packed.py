"""Experts' weights as gpt-oss keeps them: all in one tensor, rows of gate and up alternating, in 16 bits
or as mxfp4. One expert is read at a time.

mxfp4 (OCP Microscaling 1.0) has numbers of 4 bits, two in a byte, and for 32 of them a power of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import BinaryIO

import torch
from torch import Tensor

from ..layout.families import HubTensor
from .checkpoint_format import BYTES, DTYPES, NAMES, CheckpointError, HeaderEntry, read_into

Placed = tuple[str, HeaderEntry, int]  # the file, what it is, where it begins
_BLOCKS, _SCALES = "_blocks", "_scales"
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class ExpertsTensor:
    """A weight of ours of all experts, in a tensor of theirs, or in two of mxfp4."""

    name: str
    source: HubTensor
    stored: tuple[Placed, ...]

    def expert(self, number: int, opened: Callable[[str], BinaryIO]) -> Tensor:
        parts = []
        for file, entry, offset in self.stored:
            slab = torch.empty(entry.shape[1:], dtype=(DTYPES | BYTES)[entry.dtype])
            read_into(opened(file), offset + number * slab.nbytes, slab.view(-1))
            parts.append(slab)
        whole = parts[0].mT if self.source.transposed else parts[0]
        whole = decode_fp4(*parts) if len(parts) == 2 else whole  # which is (out, in) already
        packed = self.source.packed
        return whole[packed.index(self.name) :: len(packed)]


def decode_fp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Numbers (..., 32 n) in bfloat16, which has them exactly, of bytes (..., n, 16) and the exponents of
    their scales (..., n), counted from -127."""
    known = torch.tensor([*_FP4, *(-x for x in _FP4)], dtype=torch.bfloat16)
    low_first = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    exponents = scales.to(torch.int32).unsqueeze(-1) - 127
    return torch.ldexp(known[low_first.to(torch.int64)], exponents).flatten(-2)


def decoded_names(tensors: Mapping[str, Placed], where: str) -> Iterator[tuple[str, Placed]]:
    """All tensors by the names and sizes that they have when they are no mxfp4."""
    for name, (file, entry, offset) in tensors.items():
        plain, of = name.removesuffix(_BLOCKS), name.removesuffix(_SCALES)
        if plain != name and plain + _SCALES in tensors:
            *rows, groups, width = entry.shape if len(entry.shape) > 1 else (0, 0)
            scales = tensors[plain + _SCALES][1]
            right = width == 16 and scales.shape == (*rows, groups) and len(rows) == 2
            if not right or {entry.dtype, scales.dtype} != {*BYTES}:
                raise CheckpointError(
                    f"{where}: {name} {list(entry.shape)} and its scales {list(scales.shape)} are no"
                    " mxfp4, which has (experts, rows, n, 16) and (experts, rows, n) bytes."
                )
            shape = (rows[0], groups * 2 * width, rows[1])
            yield plain, (file, replace(entry, dtype=NAMES[torch.bfloat16], shape=shape), offset)
        elif of == name or of + _BLOCKS not in tensors:
            yield name, (file, entry, offset)


def stored_as(tensors: Mapping[str, Placed], name: str) -> tuple[Placed, ...]:
    """Where the numbers of a tensor are."""
    if name in tensors:
        return (tensors[name],)
    return tensors[name + _BLOCKS], tensors[name + _SCALES]
