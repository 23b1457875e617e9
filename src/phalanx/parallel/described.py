"""Compares the pieces of a description with the forward of the class they describe.

Every layout computes with the pieces. A description that leaves out a scale, lists
blocks in another order or drops a residual would train another model, and all layouts
would agree on it. So before anything else the class's own forward runs once on a small
batch with random weights, and the pieces run one after the other on the same batch.
Their outputs, the loss and every gradient must be equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..layout import LayoutError
from ..models import IGNORED
from .batch import DOCUMENTS
from .model import Model
from .probe import (
    CallNotes,
    ModuleCall,
    ProbeFailed,
    ProbeRun,
    bind_weights,
    error_text,
    loss_of,
    make_buffers,
    probe_dtype,
    random_weight,
    refuse_not_finite,
    run_pieces,
)
from .whole import INPUTS, TARGETS, TOKENS, Whole, valid_count

# Multiply-adds of all weights. Models with more weights are tried with shorter
# sequences.
_WORK = 2e11
_LONGEST, _SHORTEST = 16, 4  # tokens in a sequence
# Tolerance relative to the largest value. Rounding differs by less, even in a float32
# loss.
_APART = {torch.float64: 1e-6, torch.float32: 1e-3}


class UntriedPieces(LayoutError):
    """Raised for pieces that do not run on a CPU, and cannot be compared there."""


@dataclass(frozen=True)
class _OwnRun:
    """A forward and backward: the summed loss, and one number per row of gradients."""

    loss: float
    gradients: Mapping[str, Tensor]


def described_whole(model: Model) -> Whole | None:
    """Return a model's class, if its forward computes what the pieces do.

    Returns None if the class has no forward or the model is built in. Raises a
    LayoutError that names the first piece, or the first parameter, that differs. The
    model's weights are replaced: create a new model to continue.
    """
    if model.whole is None:
        return None
    whole = model.whole()
    if whole and whole.missing:
        raise LayoutError(
            f"the parameter {whole.missing[0]} of {whole.name.partition('.')[0]} is in no piece of"
            " describe(), so no layout would train it. Give it to the piece that computes with it."
        )
    with torch.device("cpu"):
        trial = _PieceTrial(model, whole)
        pieces = trial.run()
        return _Comparison(trial, whole, pieces).agreeing() if whole else None


class _PieceTrial:
    """The pieces on one small batch, with weights that hide no mistake."""

    def __init__(self, model: Model, whole: Whole | None) -> None:
        self.model = model
        self.dtype = probe_dtype(model)
        elements = sum(weight.numel() for weight in model.weights.values())
        # Fewer tokens for larger models: work is about parameters times tokens.
        tokens = min(_LONGEST, max(_SHORTEST, int(_WORK / max(1, elements))))
        entries = set(whole.arguments.values()) if whole else set()
        self.batch = _batch(model, entries, tokens, self.dtype)
        self.weights = {
            name: nn.Parameter(
                random_weight(name, x.shape, self.dtype),
                name not in model.frozen,
            )
            for name, x in model.weights.items()
        }
        bind_weights(model, self.weights)

    def run(self) -> ProbeRun:
        """Run the pieces one after the other, and check that their loss is a sum."""
        # A sum doubles with every sequence twice; a mean would stay the same.
        twice = {name: torch.cat((x, x)) for name, x in self.batch.items()}
        try:
            pieces = run_pieces(self.model, self.batch)
            refuse_not_finite(pieces)
            with torch.no_grad():
                doubled = run_pieces(self.model, twice)
        except Exception as error:
            text = (
                str(error)
                if isinstance(error, ProbeFailed)
                else error_text(error)
            )
            raise UntriedPieces(
                f"The pieces cannot be run on one process: {text}"
            ) from error
        once, both = (
            float(loss_of(run).detach()) for run in (pieces, doubled)
        )
        if abs(both - 2 * once) > _APART[self.dtype] * abs(once):
            name = self.model.pieces[-1][0]
            raise LayoutError(
                f"the loss of {name} is {once:.10g}, and {both:.10g} with every sequence repeated: it is"
                " not a sum over the tokens. Return a sum: ranks and microbatches add up their losses, and"
                " training divides by the count of all tokens."
            )
        return pieces


class _Comparison:
    """A class compared with the pieces of its description, which have already run."""

    def __init__(
        self, trial: _PieceTrial, whole: Whole, pieces: ProbeRun
    ) -> None:
        self.model, self.dtype, self.batch = (
            trial.model,
            trial.dtype,
            trial.batch,
        )
        self.weights, self.whole, self.pieces = trial.weights, whole, pieces
        # The class computes with the very weights of the pieces.
        whole.bind(self.weights)
        for module in whole.module.modules():
            make_buffers(module)

    def agreeing(self) -> Whole:
        """Return the class, if its forward computes what the pieces do."""
        described = self._backward(loss_of(self.pieces))
        notes = CallNotes(self.whole.module)
        try:
            loss = self.whole.loss(self.batch)
        except LayoutError:
            raise
        except Exception as error:
            raise LayoutError(self._failure(notes.inside, error)) from error
        finally:
            notes.close()
        # Modules before the loss: the first wrong one says more than a wrong loss.
        if wrong := self._other_values(notes.calls):
            raise LayoutError(f"{wrong} {self._way_out()}")
        own = self._backward(loss)
        # A mean is accepted: its factor is known, so it only changes the scale.
        mean = self._is_mean(own, described)
        if wrong := self._other_loss(own, described, mean=mean):
            raise LayoutError(f"{wrong} {self._way_out()}")
        return replace(self.whole, mean=mean)

    def _way_out(self) -> str:
        if self.model.original:
            return "transformers' code was not understood: this model cannot be trained."
        return (
            "Change describe(), or the forward, until both compute the same."
        )

    def _failure(self, inside: str, error: Exception) -> str:
        where = f" in {inside}" if inside else ""
        return (
            f"{self.whole.name} cannot be run{where}: {error_text(error)}. It is compared with the"
            " pieces. If the class has no forward, the pieces alone define it."
        )

    # ---- a run

    def _backward(self, loss: Tensor) -> _OwnRun:
        """Run backward, and reduce each gradient at once to save memory."""
        gradients: dict[str, Tensor] = {}
        hooks: list[Any] = []
        for name, weight in self.weights.items():
            if weight.requires_grad:
                register: Any = weight.register_post_accumulate_grad_hook
                # Keeps one number per row and frees the gradient.
                hooks.append(register(_Collector(name, gradients)))
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        for hook in hooks:
            hook.remove()
        return _OwnRun(float(loss.detach()), gradients)

    # ---- differences, in the order in which a forward makes them

    def _other_order(self, ran: list[int], listed: list[int]) -> str:
        """Name the first piece that the class runs in another place, or return ""."""
        names = [name for name, _ in self.model.pieces]
        for own, ours in zip(ran, listed, strict=False):
            if own != ours:
                return (
                    f"{self.whole.name} runs {names[own]} where the list of pieces has {names[ours]}:"
                    " list pieces in the order in which the forward runs them."
                )
        if more := ran[len(listed) :]:
            return f"{self.whole.name} runs {names[more[0]]} more often than the list of pieces has it."
        if less := listed[len(ran) :]:
            return f"{self.whole.name} runs {names[less[0]]} less often than the list of pieces has it."
        return ""

    def _other_values(self, calls: list[ModuleCall]) -> str:
        """Name the first piece with other place or values in the class, or ""."""
        pieces = self.pieces
        numbers = {part: number for number, part in self.whole.parts.items()}
        # In the order of the class's calls, restricted to modules that are pieces.
        own = [call for call in calls if call.module in numbers]
        ran = [numbers[call.module] for call in own]
        # A forward may do the work of a piece without calling its module: only results
        # are compared then.
        listed = [
            numbers[part]
            for part in self.whole.parts.values()
            if numbers[part] in ran
        ]
        if wrong := self._other_order(ran, listed):
            return wrong
        places = [
            number
            for number, part in self.whole.parts.items()
            if numbers[part] in ran
        ]
        for number, call in zip(places, own, strict=True):
            name = self.model.pieces[number][0]
            # What a module as it is computes between two blocks is the later one's.
            if number and not self.model.as_it_is:
                before = self.model.pieces[number - 1][0]
                if apart := self._apart(
                    call.took, pieces.gave[number - 1].get("x")
                ):
                    return (
                        f"{name} gets an input in {self.whole.name} that differs from the"
                        f" output of the piece {before} ({apart}): the forward computes"
                        " something between the two, such as a scale or a residual, that is"
                        " in no piece."
                    )
            given = call.gave.get("x", call.gave.get("0"))
            if apart := self._apart(given, pieces.gave[number].get("x")):
                return (
                    f"{name} has a different output in {self.whole.name} than as a piece ({apart}), from"
                    " the same activations: the forward calls it with other arguments."
                )
        return ""

    def _other_loss(
        self, own: _OwnRun, described: _OwnRun, *, mean: bool
    ) -> str:
        """Compare the loss, then gradients from the last weight; returns text."""
        count = valid_count(self.batch)
        factor = count if mean else 1
        if not self._close(own.loss * factor, described.loss):
            return (
                f"the loss of the pieces is {described.loss:.10g}, summed over {count} tokens, and that of"
                f" {self.whole.name} is {own.loss:.10g}, which is neither this sum nor its mean."
            )
        # From the last weight, as the backward goes: the first difference is the cause.
        for name in reversed(self.weights):
            want = own.gradients.get(name)
            got = described.gradients.get(name)
            if want is None and got is None:
                continue
            size = (
                self.weights[name].shape[0] if self.weights[name].dim() else 1
            )
            # No gradient at all counts as zeros, on either side.
            zeros = torch.zeros(size, dtype=self.dtype)
            want = zeros if want is None else want * factor
            if apart := self._apart(want, zeros if got is None else got):
                return (
                    f"the gradient of {name} differs between {self.whole.name} and the pieces"
                    f" ({apart}), although the losses are equal."
                )
        return ""

    def _is_mean(self, own: _OwnRun, described: _OwnRun) -> bool:
        count = valid_count(self.batch)
        # A sum over one token is its mean too, and counts as a sum.
        summed = self._close(own.loss, described.loss)
        return not summed and self._close(own.loss * count, described.loss)

    def _close(self, a: float, b: float) -> bool:
        return abs(a - b) <= _APART[self.dtype] * max(abs(a), abs(b))

    def _apart(self, own: Tensor | None, ours: Tensor | None) -> str:
        """Describe the largest difference of two tensors; "" if only rounding."""
        if (
            own is None
            or ours is None
            or not own.is_floating_point()
            or not ours.dim()
        ):
            return ""  # not activations: tokens, or a loss
        if own.shape != ours.shape:
            return f"of shape {list(own.shape)} and {list(ours.shape)}"
        difference = (own.detach() - ours.detach()).abs()
        scale = float(ours.detach().abs().max().clamp_min(1e-30))
        worst = float(difference.max())
        if worst <= _APART[self.dtype] * scale:
            return ""
        at = [
            int(i)
            for i in torch.unravel_index(difference.argmax(), difference.shape)
        ]
        return f"{worst / scale:.2g} of the largest value at {at}"


def _batch(
    model: Model, entries: set[str], tokens: int, dtype: torch.dtype
) -> Mapping[str, Tensor]:
    """Two sequences with ignored targets, and documents if the forward takes them."""
    draw = torch.Generator().manual_seed(0)
    shape = model.shape
    if shape is not None and shape.kind == "mlp":
        return {
            INPUTS: torch.randn(2, shape.hidden, generator=draw, dtype=dtype)
        }
    length = min(tokens, shape.sequence) if shape else tokens
    ids = torch.randint(
        shape.vocab if shape else 2, (2, 2, length), generator=draw
    )
    targets = ids[1]
    # Ignored targets tell a mean over valid tokens from one over all.
    targets[1, : length // 4] = IGNORED
    positions = torch.arange(length).repeat(2, 1)
    batch = {TOKENS: ids[0], TARGETS: targets, "positions": positions}
    if DOCUMENTS in entries:
        # Two documents in the second row, with positions that start again.
        second = positions >= length // 2
        second[0] = False
        batch[DOCUMENTS] = second.long()
        if "positions" in entries:
            positions[second] -= length // 2
    return batch


class _Collector:
    """Keeps a gradient's product with a fixed vector, and frees the gradient."""

    def __init__(self, name: str, gradients: dict[str, Tensor]) -> None:
        self.name, self.gradients = name, gradients

    def __call__(self, weight: Tensor) -> None:
        gradient = weight.grad
        assert gradient is not None
        width = gradient.shape[-1] if gradient.dim() else 1
        generator = torch.Generator().manual_seed(width)
        # The same vector in both runs: rows with equal products are equal, unless they
        # differ by something orthogonal to it.
        vector = torch.randn(width, generator=generator, dtype=gradient.dtype)
        rows = (
            gradient.reshape(-1, width)
            if gradient.dim() > 1
            else gradient.reshape(-1, 1)
        )
        self.gradients[self.name] = (
            rows @ vector if gradient.dim() > 1 else rows.flatten()
        )
        weight.grad = None
