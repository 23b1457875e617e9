"""Sketches of the outputs of modules, and of their gradients, on one rank.

A row of an output belongs to a token, and has signs that are a hash of the token and its position. So the
sketches of microbatches and of ranks add up to that of all samples, however the samples are divided. Signs
of features are as those of weights.

A later stage of a pipeline sees no tokens, and the rows of an expert are those that were routed to it. So
the sum of all rows is sketched as well, which needs to know nothing of them.
"""

import math
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.nn import Module, Parameter

from .batches import Batch, tensors_in
from .parameters import plain_name
from .records import ROWS_WIDTH, SUM_WIDTH, ModuleRecord
from .shards import local_of, place_of
from .sketch import RANK, feature_signs, signs, sketch_rows

ROOT = "(the model)"


class Outputs:
    """The sketches of all outputs since they were last taken, in the order of execution.

    They tell where a difference begins, and not that there is one. So an error here ends the recording
    of outputs alone, not that of weights and gradients.
    """

    def __init__(self) -> None:
        self.failed = False
        self._sums: dict[tuple[str, bool, str], _Sum] = {}
        self._names: dict[int, str] = {}  # by a module's id
        self._root: Module | None = None  # kept, so that ids stay theirs
        self._rows: _Rows | None = None  # of the call of the model under way

    def begin(self, root: Module, batch: Batch) -> None:
        """Start recording a call of the model."""
        self._guarded(self._begin, root, batch)

    def _guarded(self, act: Callable[..., None], *args: Any) -> None:
        if self.failed:
            return
        try:
            with torch.no_grad():
                act(*args)
        except Exception:
            self.failed = True
            self._rows, self._sums = None, {}
            traceback.print_exc()
            text = "audit: the outputs of modules are left out because of this error"
            print(text, file=sys.stderr)

    def _begin(self, root: Module, batch: Batch) -> None:
        self._rows = _Rows(batch)
        if root is not self._root:
            self._root, self._names = root, _names_of(root)

    def end(self) -> None:
        self._rows = None

    def expects(self, module: Module) -> bool:
        """True if a module's output has a name, and a call of the model is under way."""
        return self._rows is not None and id(module) in self._names

    def add(self, module: Module, output: Any) -> None:
        """Adds the first tensor in a module's output that has a row for each token or sample.

        If there is none, it adds the first one that is trained through.
        """
        self._guarded(self._add_output, module, output)

    def _add_output(self, module: Module, output: Any) -> None:
        name, rows = self._names[id(module)], self._rows
        assert rows is not None
        usual = [x for _, x in tensors_in("", output) if _is_usual(x)]
        fitting = [x for x in usual if rows.fit(x)]
        # What needs no gradient, as rotary embeddings, may be made once for all samples.
        others = [x for x in usual if x.ndim > 1 and x.requires_grad]
        for tensor in (fitting or others)[:1]:
            self._add(name, False, rows, tensor)
            if tensor.requires_grad:
                # The hook stays with the graph, and is gone with it.
                act = partial(self._add_gradient, name, rows)
                graph: Any = tensor  # its stubs are not typed
                graph.register_hook(partial(self._guarded, act))

    def take(self) -> Iterator[tuple[ModuleRecord, Tensor]]:
        """Sums since the last call; they start again at zero."""
        taken, self._sums = self._sums, {}
        for (name, backward, part), total in taken.items():
            record = ModuleRecord(
                name,
                backward,
                total.features,
                total.width,
                total.elements,
                part,
            )
            yield record, total.numbers

    def _add_gradient(
        self, name: str, rows: "_Rows", gradient: Tensor
    ) -> None:
        if _is_usual(gradient) and gradient.ndim > 1:
            self._add(name, True, rows, gradient)

    def _add(
        self, name: str, backward: bool, rows: "_Rows", tensor: Tensor
    ) -> None:
        found = _Sum.of(tensor.detach(), rows)
        key = name, backward, _part_of(tensor)
        if key in self._sums:
            found = found.plus(self._sums[key])
        self._sums[key] = found


@dataclass(frozen=True)
class _Sum:
    """A module's outputs in some calls."""

    features: int
    width: int
    elements: int
    numbers: Tensor

    @classmethod
    def of(cls, tensor: Tensor, rows: "_Rows") -> "_Sum":
        fits = rows.fit(tensor)
        by_rows = tensor.new_zeros(ROWS_WIDTH, dtype=torch.float64)
        if fits:
            by_rows = rows.sketch(tensor)
        numbers = torch.cat([local_of(by_rows), sum_of_rows(tensor)])
        features = rows.features(tensor) if fits else 0
        local = local_of(tensor)
        return cls(features, tensor.shape[-1], local.numel(), numbers)

    def plus(self, other: "_Sum") -> "_Sum":
        # A number of rows may be that of the samples by chance, but not in all calls.
        same = self.features == other.features
        return _Sum(
            self.features if same else 0,
            self.width,
            self.elements + other.elements,
            # A module's calls may be on several devices.
            self.numbers + other.numbers.to(self.numbers.device),
        )


def sum_of_rows(tensor: Tensor) -> Tensor:
    """4 numbers of the sum of all rows of this rank's part of an output."""
    local = local_of(tensor)
    rows = local.reshape(-1, local.shape[-1])
    low = rows.dtype in (torch.bfloat16, torch.float16)
    total = rows.sum(0, dtype=torch.float32 if low else rows.dtype).double()
    if isinstance(tensor, DTensor):
        columns = place_of(tensor).indices[-1].to(local.device)
        return total @ signs(columns, 1, SUM_WIDTH)
    return total @ feature_signs(len(total), local.device, SUM_WIDTH)


class _Rows:
    """Signs of the tokens and samples of one call."""

    def __init__(self, batch: Batch) -> None:
        self.shape = tuple(batch.hashes.shape)
        bits = torch.arange(RANK, device=batch.hashes.device)
        # (samples, tokens, 4); zeros leave padding out.
        by_token = 1 - 2 * ((batch.hashes[..., None] >> bits) & 1)
        self.tokens = (by_token * batch.kept[..., None]).double()
        samples = batch.hashes.sum(1)
        self.samples = (1 - 2 * ((samples[:, None] >> bits) & 1)).double()

    def fit(self, tensor: Tensor) -> bool:
        return self._signs(tuple(tensor.shape)) is not None

    def features(self, tensor: Tensor) -> int:
        return math.prod(tensor.shape[self._axes(tuple(tensor.shape)) :])

    def _axes(self, shape: tuple[int, ...]) -> int:
        """The number of leading axes of an output that count tokens or samples."""
        turned = self.shape[::-1]
        return 2 if shape[:2] in (self.shape, turned) else 1

    def _signs(self, shape: tuple[int, ...]) -> Tensor | None:
        """Signs for the leading axes of an output's shape; None if it has other rows."""
        samples, tokens = self.shape
        if shape[:2] == (samples, tokens):
            return self.tokens
        # Megatron has the sequence first.
        if shape[:2] == (tokens, samples):
            return self.tokens.transpose(0, 1)
        if len(shape) > 1 and shape[0] == samples * tokens:
            return self.tokens.reshape(-1, RANK)
        if len(shape) > 1 and shape[0] == samples:
            return self.samples
        return None

    def sketch(self, tensor: Tensor) -> Tensor:
        """The sketch of this rank's part of an output."""
        shape = tuple(tensor.shape)
        row_signs = self._signs(shape)
        assert row_signs is not None
        axes = self._axes(shape)
        features = math.prod(shape[axes:])
        local = local_of(tensor)
        if isinstance(tensor, DTensor):
            indices = place_of(tensor).indices
            for axis, along in enumerate(indices[:axes]):
                along = along.to(row_signs.device)
                row_signs = row_signs.index_select(axis, along)
            columns = _flat(indices[axes:], shape[axes:])
            right = signs(columns.to(local.device), 1, 2)
        else:
            right = feature_signs(features, local.device, 2)
        rows = local.reshape(-1, right.shape[0])
        # Tokens may be on the CPU, and parts of a model on several devices.
        left = row_signs.reshape(-1, RANK).to(local.device)
        return sketch_rows(rows, left, right)


def _flat(indices: Iterable[Tensor], shape: tuple[int, ...]) -> Tensor:
    """Indices along several axes as those along one."""
    flat = torch.zeros(1, dtype=torch.int64)
    for along, size in zip(indices, shape, strict=True):
        flat = (flat[:, None] * size + along[None]).reshape(-1)
    return flat


def _is_usual(tensor: Tensor) -> bool:
    """True for a tensor of floats with values: no fake one of a trace, and none in nested form."""
    if isinstance(tensor, DTensor) and not all(map(_adds, tensor.placements)):
        return False
    return (
        type(tensor) in (Tensor, Parameter, DTensor)
        and tensor.is_floating_point()
        and tensor.layout == torch.strided
        and tensor.device.type != "meta"
        and tensor.numel() > 0
    )


def _adds(placement: Any) -> bool:
    """True if the local tensors of a placement add up to the whole one, as shards or as summands.

    Those of a split embedding do not: a mask is applied when they are summed.
    """
    if placement.is_partial():
        return type(placement) is Partial and placement.reduce_op == "sum"
    return True


def _part_of(tensor: Tensor) -> str:
    """Coordinates on the mesh dimensions on which ranks have other shards or summands of a tensor."""
    if not isinstance(tensor, DTensor):
        return ""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    parts = [
        f"{dim}:{coordinate[dim]}"
        for dim, placement in enumerate(tensor.placements)
        if not placement.is_replicate()
    ]
    # Replicas are copies for certain, where ranks with plain tensors may hold summands.
    return ",".join(parts) or "whole"


def _names_of(root: Module) -> dict[int, str]:
    """Names of modules by their ids. Of wrappers and the module inside, only the latter has one."""
    modules: dict[str, Module] = {}
    for name, module in root.named_modules():
        # "module" is what DDP calls the model.
        plain = plain_name(f"{name}.x").rpartition(".")[0]
        modules[plain or ROOT] = module
    return {id(module): name for name, module in modules.items()}
