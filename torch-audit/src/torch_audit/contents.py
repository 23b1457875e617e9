"""Shards that nobody declares, found by their contents: the rows and columns of a reference's weights.

The reference writes a hash of each row and each column of its initial weights. Another run hashes those of
its own tensors, before its first update, and looks them up. So a rank knows which elements it holds, also
if a library cuts a weight as it likes, joins several in one tensor, or counts layers anew in each stage.

Contents must be distinct. Where they are not, as in biases of zeros, a parameter follows the weights of
its module: it has the rows that they have, if it has the values of these rows. What stays ambiguous is
refused.
"""

import json
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .megatron import is_cut
from .parameters import Named, Refused
from .records import RecordError
from .shards import Place
from .sketch import mixed

FILE = "contents"
_BLOCK = 1 << 20  # elements that are hashed at once


def slice_hashes(tensor: Tensor, axis: int) -> Tensor:
    """A hash of each slice along an axis, such as each row of a matrix: of its bits and their order."""
    slices = tensor.detach().movedim(axis, 0)
    size = math.prod(slices.shape[1:])  # 1 in a vector
    rows = slices.reshape(slices.shape[0], size)
    order = mixed(torch.arange(size, device=rows.device))
    found = [torch.zeros(0, dtype=torch.int64)]
    height = max(1, _BLOCK // max(1, size))
    for block in torch.split(rows, height):
        # In float64, which all dtypes have without rounding.
        bits = block.double().view(torch.int64)
        found.append(mixed(bits + order).sum(1).cpu())
    return torch.cat(found)


@dataclass(frozen=True)
class Weight:
    """A weight of the reference."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    hashes: tuple[Tensor, ...]  # of the slices along each axis

    @classmethod
    def of(cls, named: Named) -> "Weight":
        local = named.part(named.tensor)
        hashes = tuple(slice_hashes(local, x) for x in range(local.ndim))
        return cls(named.names, tuple(local.shape), hashes)

    @property
    def module(self) -> str:
        return self.names[0].rpartition(".")[0]

    def is_whole(self, other: "Weight") -> bool:
        """True if another tensor has all of these values."""
        return self.shape == other.shape and all(
            torch.equal(a, b)
            for a, b in zip(self.hashes, other.hashes, strict=True)
        )


@dataclass(frozen=True)
class _Part:
    """Slices of a local tensor that are slices of one weight of the reference."""

    weight: Weight
    axis: int
    local: list[int]
    indices: list[int]  # in the weight

    def has_values_of(self, own: Weight) -> bool:
        """True if a vector has, at these places, the values of the reference."""
        if max(self.local) >= own.shape[0]:
            return False
        if max(self.indices) >= self.weight.shape[0]:
            return False
        values = own.hashes[0][torch.tensor(self.local)]
        expected = self.weight.hashes[0][torch.tensor(self.indices)]
        return torch.equal(values, expected)


@dataclass
class _Found:
    """The parts found so far, and what follows from them for parameters with ambiguous contents."""

    parts: dict[int, list[_Part]] = field(default_factory=dict)
    # By module: the rows that a parameter of the module has.
    rows: dict[str, list[_Part]] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)  # prefixes

    def add(self, index: int, own: Weight, parts: list[_Part]) -> None:
        self.parts[index] = parts
        # The rows of a matrix that is cut along its columns are not those of its bias.
        if all(part.axis == 0 for part in parts):
            self.rows.setdefault(own.module, parts)
        self._note_name(own.names[0], parts[0].weight.names[0])

    def _note_name(self, ours: str, theirs: str) -> None:
        """Notes that "layers.0." is "layers.2." in the reference, where a stage counts from 0."""
        a, b = ours.split("."), theirs.split(".")
        while a and b and a[-1] == b[-1]:
            a, b = a[:-1], b[:-1]
        if a != b:
            self.renamed.setdefault(".".join(a), ".".join(b))

    def name(self, own: str) -> str:
        """The name that a parameter of ours has in the reference."""
        parts = own.split(".")
        for length in range(len(parts), 0, -1):
            prefix = ".".join(parts[:length])
            if prefix in self.renamed:
                rest = parts[length:]
                return ".".join([self.renamed[prefix], *rest]).strip(".")
        return own


class Contents:
    """The slices of all initial weights of a reference."""

    def __init__(self, weights: Iterable[Weight] = ()) -> None:
        self.weights = list(weights)
        self._tables: dict[
            tuple[int, tuple[int, ...]], dict[int, list[tuple[int, int]]]
        ] = {}

    @classmethod
    def read(cls, folder: Path) -> "Contents":
        path = folder / FILE
        if not path.exists():
            raise RecordError(
                f"{folder} holds no contents of weights: record it again with --one --contents."
            )
        # The first line lists the weights; the hashes of each axis follow, one weight after the other.
        line, _, rest = path.read_bytes().partition(b"\n")
        try:
            listed = json.loads(line)
            numbers = torch.tensor(array("q", rest), dtype=torch.int64)
            sizes = [size for _, shape in listed for size in shape]
            parts = list(torch.split(numbers, sizes))
        except (ValueError, TypeError, RuntimeError) as error:
            raise RecordError(f"{path} holds no contents.") from error
        weights = []
        for names, shape in listed:
            hashes = [parts.pop(0) for _ in shape]
            weights.append(Weight(tuple(names), tuple(shape), tuple(hashes)))
        return cls(weights)

    def add(self, parameters: Iterable[Named]) -> None:
        """Adds weights that this process holds whole."""
        for named in parameters:
            if named.place.count == math.prod(named.place.shape):
                self.weights.append(Weight.of(named))

    def write(self, folder: Path) -> None:
        listed = [(x.names, x.shape) for x in self.weights]
        numbers = array("q")
        for weight in self.weights:
            for hashes in weight.hashes:
                numbers.extend(hashes.tolist())
        line = json.dumps(listed).encode() + b"\n"
        # A reader never sees half a file.
        made = folder / f"{FILE}.tmp"
        made.write_bytes(line + numbers.tobytes())
        made.replace(folder / FILE)

    def placed(self, parameters: Sequence[Named]) -> list[Named]:
        """The parameters with their names and places in the reference; several for a joined tensor."""
        declared = [x for x in parameters if _is_declared(x)]
        parameters = [x for x in parameters if not _is_declared(x)]
        own = [Weight.of(each) for each in parameters]
        found = _Found()
        unclear = {}
        for index, each in enumerate(own):
            parts, reason = self._search(each)
            if parts:
                found.add(index, each, parts)
            else:
                unclear[index] = reason
        for index, reason in unclear.items():
            parts = self._follow(own[index], found)
            if not parts and self._named(own[index].names):
                raise Refused(reason)
            # A parameter that only this run has stays as it is: the comparison tells of it.
            found.parts[index] = parts
        placed: list[Named] = list(declared)
        for index, named in enumerate(parameters):
            parts = found.parts[index]
            placed += [_placed(named, part) for part in parts] or [named]
        return placed

    def _named(self, names: Sequence[str]) -> Weight | None:
        for weight in self.weights:
            if set(names) & set(weight.names):
                return weight
        return None

    # ---- contents that are distinct

    def _search(self, own: Weight) -> tuple[list[_Part], str]:
        """The parts of a matrix, or the reason why its contents do not tell them."""
        name = own.names[0]
        if len(own.shape) < 2:
            # A single number is no content to search for among all weights.
            return (
                [],
                f"the values of {name} are not distinct, or not the reference's",
            )
        reasons = []
        for axis in range(len(own.shape)):
            parts, reason = self._along(own, axis)
            if parts:
                return parts, ""
            reasons.append(reason)
        return [], "; ".join(dict.fromkeys(reasons))

    def _along(self, own: Weight, axis: int) -> tuple[list[_Part], str]:
        name = own.names[0]
        kind = {0: "rows", 1: "columns"}.get(axis, f"slices of axis {axis}")
        table = self._table(axis, _without(own.shape, axis))
        hashes = own.hashes[axis].tolist()
        places = [table.get(each, []) for each in hashes]
        missing = sum(not each for each in places)
        if missing:
            return [], (
                f"{missing} of {len(places)} {kind} of {name} are none of the reference's: it starts from"
                " other weights, in another dtype, or is cut along two axes"
            )
        # Two weights may have equal rows: those of the same name come first.
        same = self._named(own.names)
        if same is not None:
            places = [
                [x for x in each if self.weights[x[0]] is same] or each
                for each in places
            ]
        several = sum(len(each) > 1 for each in places)
        if several:
            return [], (
                f"{several} of {len(places)} {kind} of {name} occur more than once in the reference,"
                " so their position is ambiguous"
            )
        by_weight: dict[int, _Part] = {}
        for local, ((weight, index),) in enumerate(places):
            part = by_weight.setdefault(
                weight, _Part(self.weights[weight], axis, [], [])
            )
            part.local.append(local)
            part.indices.append(index)
        return list(by_weight.values()), ""

    def _table(
        self, axis: int, others: tuple[int, ...]
    ) -> Mapping[int, list[tuple[int, int]]]:
        """The weights and indices of each hash along an axis, where the other axes have these sizes."""
        key = axis, others
        if key not in self._tables:
            table = self._tables[key] = {}
            for number, weight in enumerate(self.weights):
                same_axes = len(weight.shape) == len(others) + 1
                if not same_axes or _without(weight.shape, axis) != others:
                    continue
                for index, each in enumerate(weight.hashes[axis].tolist()):
                    table.setdefault(each, []).append((number, index))
        return self._tables[key]

    # ---- contents that are not

    def _follow(self, own: Weight, found: _Found) -> list[_Part]:
        """The place of a parameter by the rows of its module's weights, or by its name."""
        parts = self._rows_of_module(own, found)
        if parts:
            return parts
        weight = self._named([found.name(each) for each in own.names])
        if weight is None:
            return []
        if weight.is_whole(own):
            every = list(range(own.shape[0] if own.shape else 1))
            return [_Part(weight, 0, every, every)]
        return _by_values(own, weight)

    def _rows_of_module(self, own: Weight, found: _Found) -> list[_Part]:
        """The parts of a vector that has a value for each row of a weight beside it."""
        if len(own.shape) != 1:
            return []
        parts = []
        last = own.names[0].rpartition(".")[2]
        for part in found.rows.get(own.module, []):
            name = f"{part.weight.module}.{last}".strip(".")
            other = self._named([name])
            if other is None or len(other.shape) != 1:
                return []
            followed = _Part(other, 0, part.local, part.indices)
            if not followed.has_values_of(own):
                return []
            parts.append(followed)
        covered = sum(len(part.local) for part in parts)
        return parts if covered == own.shape[0] else []


def _by_values(own: Weight, weight: Weight) -> list[_Part]:
    """The place of a vector whose values are distinct in the reference."""
    if len(own.shape) != 1 or len(weight.shape) != 1:
        return []
    places: dict[int, list[int]] = {}
    for index, value in enumerate(weight.hashes[0].tolist()):
        places.setdefault(value, []).append(index)
    found = [places.get(each, []) for each in own.hashes[0].tolist()]
    if any(len(each) != 1 for each in found):
        return []
    indices = [index for (index,) in found]
    return [_Part(weight, 0, list(range(len(indices))), indices)]


def _is_declared(named: Named) -> bool:
    """True for a tensor that tells its place itself.

    It is a DTensor, a run of a flat buffer, or has Megatron's attributes.
    """
    tensor = named.tensor
    in_buffer = named.run is not None
    return isinstance(tensor, DTensor) or in_buffer or is_cut(tensor)


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]


def _placed(named: Named, part: _Part) -> Named:
    """One part of a local tensor, with the name and the place that it has in the reference."""
    shape = part.weight.shape
    indices = [torch.arange(size) for size in shape]
    if shape:
        indices[part.axis] = torch.tensor(part.indices)
    place = Place.of(shape, tuple(indices))
    chosen = None
    if len(part.local) < (named.tensor.shape or (1,))[part.axis]:
        chosen = part.axis, torch.tensor(part.local)
    return Named(
        named.tensor, part.weight.names, place, named.run, chosen=chosen
    )
