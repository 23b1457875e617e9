"""A trial run of a model's pieces on a CPU, with weights that hide no mistake.

Two refusals rely on it before a layout starts: modules that mix tokens (`mixing.py`),
and descriptions that compute something else than the class they describe
(`described.py`). Weights are random, and large ones overlap in memory, so a trial needs
little of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..layout import Layout
from .batch import DOCUMENTS
from .forward import Inputs, tensors_of
from .model import Model
from .tensor import Weight, cut_of
from .whole import TARGETS, TOKENS

_PLAIN = 1 << 20  # weights with more elements overlap in memory
_NARROW = 1e8  # models with at least as many weights are tried in float32


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module: its first tensor argument, and its outputs."""

    path: str
    module: nn.Module
    took: Tensor | None
    gave: Mapping[str, Tensor]


@dataclass
class ProbeRun:
    """One run of the pieces: their outputs, and module calls in the order they end."""

    gave: list[Mapping[str, Tensor]] = field(default_factory=list)
    calls: list[list[ModuleCall]] = field(default_factory=list)


def probe_dtype(model: Model) -> torch.dtype:
    """The dtype of a trial: float64, or float32 for many weights."""
    elements = sum(weight.numel() for weight in model.weights.values())
    return torch.float64 if elements < _NARROW else torch.float32


def frozen_parameters(
    tensors: Mapping[str, Tensor],
) -> dict[str, nn.Parameter]:
    return {
        name: nn.Parameter(x, requires_grad=False)
        for name, x in tensors.items()
    }


def random_weight(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A random weight without zeros, whatever the model's own initialization."""
    # Seeded by the name: a weight has the same values in every run of a trial.
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
    draw = torch.Generator().manual_seed(seed)
    if shape.numel() <= _PLAIN:
        x = torch.randn(shape, generator=draw, dtype=dtype)
    else:  # element [i, j, ...] is element i + j + ... of a line
        # Overlapping: shape.numel() elements in sum(shape) elements of memory.
        line = torch.randn(sum(shape), generator=draw, dtype=dtype)
        x = line.as_strided(shape, (1,) * len(shape))
        line *= shape[0] ** 0.5 / shape.numel() ** 0.5
        return x
    # Vectors near 1, as norms are; matrices scaled by 1 / sqrt(inputs).
    return (
        1 + 0.1 * x
        if len(shape) < 2
        else x * (shape[0] / shape.numel()) ** 0.5
    )


def bind_weights(model: Model, weights: Mapping[str, nn.Parameter]) -> None:
    """Replace the modules' meta weights by real ones, and create their buffers."""
    names = {parameter: name for name, parameter in model.weights.items()}
    for _, piece in model.pieces:
        for module in piece.modules():
            for key, parameter in list(module._parameters.items()):
                if parameter is not None:
                    module._parameters[key] = weights[names[parameter]]
            make_buffers(module)


def bind_part(
    model: Model,
    layout: Layout,
    held: Mapping[str, Weight],
    weights: Mapping[str, Tensor],
    at: Mapping[str, int],
    *,
    trained: bool = False,
) -> dict[str, nn.Parameter]:
    """Put a rank's parts of weights into the modules, and its parts of their buffers."""
    parts = {
        name: nn.Parameter(_part(weights[name], weight), requires_grad=trained)
        for name, weight in held.items()
    }
    bind_weights(model, parts)
    # Buffers are created whole by `bind_weights`, and sharded here.
    for prefix, piece in model.pieces:
        for path, module in piece.named_modules():
            for key, x in list(module._buffers.items()):
                if x is not None:
                    name = f"{prefix}.{path}".rstrip(".") + f".{key}"
                    cuts = cut_of(model, layout, name, x.shape, at)
                    module._buffers[key] = x[
                        tuple(slice(c.start, c.stop) for c in cuts)
                    ]
    return parts


def _part(whole: Tensor, weight: Weight) -> Tensor:
    """A rank's part of a weight, with zeros where it is padded."""
    part = whole[weight.box]
    if tuple(part.shape) == weight.local:
        return part.clone()
    padded = part.new_zeros(weight.local)
    padded[tuple(slice(0, size) for size in part.shape)] = part
    return padded


def make_buffers(module: nn.Module) -> None:
    buffers = {key: x for key, x in module._buffers.items() if x is not None}
    for key, x in buffers.items():
        if x.is_meta:
            module._buffers[key] = torch.empty(x.shape, dtype=x.dtype)
    # A buffer from meta has memory now, and values only after `reset_buffers`.
    reset = getattr(module, "reset_buffers", None)
    if buffers and callable(reset):
        reset()


def probe_batch(model: Model, tokens: int) -> Mapping[str, Tensor]:
    """One sequence, with every entry that a batch of text may have."""
    draw = torch.Generator().manual_seed(0)
    # Without a shape the vocabulary is unknown, but it has at least two tokens.
    vocab = model.shape.vocab if model.shape else 2
    ids = torch.randint(vocab, (2, 1, tokens), generator=draw)
    positions = torch.arange(tokens).expand(1, -1)
    batch = {TOKENS: ids[0], TARGETS: ids[1], "positions": positions}
    return {**batch, DOCUMENTS: torch.zeros(1, tokens, dtype=torch.int64)}


def refuse_not_finite(run: ProbeRun) -> None:
    """Raise an error if a piece returns values that cannot be compared."""
    for gave in run.gave:
        if not all(bool(x.isfinite().all()) for x in gave.values()):
            raise ValueError(
                "with random weights it returns values that are not finite"
            )


def error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


class ProbeFailed(RuntimeError):
    """Raised with the path of a module and the error that it raised."""


def run_pieces(model: Model, batch: Mapping[str, Tensor]) -> ProbeRun:
    """Run the pieces in turn as `Piece.forward` would, recording every module call."""
    run, inputs = ProbeRun(), Inputs(model, batch)
    for number, (prefix, piece) in enumerate(model.pieces):
        mine, named = inputs.of(number)
        notes = CallNotes(piece)
        try:
            gave = tensors_of(piece(*mine, **named))
        except Exception as error:
            # The innermost open module is where the error was raised.
            raise ProbeFailed(
                f"{prefix}.{notes.inside}".rstrip(".")
                + f": {error_text(error)}"
            ) from error
        finally:
            notes.close()
        inputs.gave(number, gave)
        run.gave.append(gave)
        run.calls.append(notes.calls)
    return run


def loss_of(run: ProbeRun) -> Tensor:
    """The output of the last piece."""
    return next(iter(run.gave[-1].values()))


class CallNotes:
    """Records the calls of all modules of a piece while it runs."""

    def __init__(self, piece: nn.Module) -> None:
        self.calls: list[ModuleCall] = []
        self._open: list[str] = []
        self._handles: list[Any] = []
        for path, module in piece.named_modules():
            enter, leave = (
                partial(self._enter, path),
                partial(self._leave, path),
            )
            self._handles += [
                module.register_forward_pre_hook(enter, with_kwargs=True),
                module.register_forward_hook(leave, with_kwargs=True),
            ]

    @property
    def inside(self) -> str:
        """The path of the innermost module that has not returned."""
        return self._open[-1] if self._open else ""

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(
        self, path: str, module: nn.Module, args: Any, named: Any
    ) -> None:
        self._open.append(path)

    def _leave(
        self,
        path: str,
        module: nn.Module,
        args: tuple[Any, ...],
        named: dict[str, Any],
        out: Any,
    ) -> None:
        self._open.pop()
        took = next(
            (x for x in (*args, *named.values()) if isinstance(x, Tensor)),
            None,
        )
        self.calls.append(ModuleCall(path, module, took, tensors_of(out)))
