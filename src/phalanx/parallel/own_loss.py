"""A loss that the user gives, in place of the one that a model's last piece computes.

The loss of a microbatch is a sum: ranks and microbatches add up theirs, and training divides by a count
over all of them (`Measure`). A mean would be divided twice, so the first call tries the loss on both halves
of its rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from inspect import Parameter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ..layout import LayoutError
from .batch import count_valid
from .model import Model
from .whole import returned_loss

Batch = Mapping[str, Tensor]
# (output, batch) to the loss as a sum, alone or with the sums of metrics by name
LossFunction = Callable[[Any, dict[str, Tensor]], Any]

METRICS = "metrics"  # what the last piece gives beside its loss
_APART = 1e-3  # relative; sums of other parts in float32 differ by less


@dataclass(frozen=True)
class Measure:
    """The count that losses are divided by, and the names of the metrics that come with them."""

    count: Callable[[Batch], Tensor] = count_valid
    metrics: tuple[str, ...] = ()


BY_TARGETS = Measure()


class OwnLoss:
    """A user's loss of one microbatch, with its metrics in the order of their names."""

    def __init__(self, compute: LossFunction, measure: Measure) -> None:
        self.compute, self.measure = compute, measure
        self.tried = False

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnLoss:
        # copies share the function and what it holds, such as a teacher
        return OwnLoss(self.compute, self.measure)

    def __call__(
        self, output: Any, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        entries = dict(batch)
        # On meta a trial shows nothing, so the first call with values makes it.
        if not self.tried:
            self.tried = not _has_no_values(entries)
            self._refuse_other_than_sums(output, entries)
        return self._sums(output, entries)

    def _sums(
        self, output: Any, batch: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        returned = self.compute(output, batch)
        loss, metrics = (
            returned if isinstance(returned, tuple) else (returned, {})
        )
        if not isinstance(loss, Tensor) or not loss.is_floating_point():
            raise LayoutError(
                f"the loss returns a {type(loss).__name__}: return a tensor, alone or in a tuple with"
                " a dict of metrics."
            )
        # All ranks sum metrics under these names, so each must return all of them.
        names = self.measure.metrics
        if {*metrics} != {*names}:
            raise LayoutError(
                f"the loss returns the metrics {sorted(metrics)}, and metrics={list(names)} was given"
                " to prepare. All ranks sum them up, so all must know their names before."
            )
        total = loss.sum() if loss.dim() else loss
        if not names:
            return total, None
        each = [
            torch.as_tensor(metrics[name], device=loss.device)
            for name in names
        ]
        # In float64 and without a graph: counts of tokens may exceed 2^24.
        sums = torch.stack([x.detach().sum(dtype=torch.float64) for x in each])
        return total, sums

    @torch.no_grad()
    def _refuse_other_than_sums(
        self, output: Any, batch: dict[str, Tensor]
    ) -> None:
        rows = next(iter(batch.values())).shape[0]
        if rows < 2 or _has_no_values(batch):
            return  # nothing to cut
        # loss(all rows) = loss(first half) + loss(second half) for a sum alone.
        middle = rows // 2
        whole, _ = self._sums(_detached(output), batch)
        apart = _apart(whole)
        parts = []
        for part in (slice(0, middle), slice(middle, rows)):
            own, _ = self._sums(
                _cut(output, part, rows), _cut(batch, part, rows)
            )
            parts.append(float(own))
        total = float(whole)
        if not _adds_up([total, *parts], apart):
            raise LayoutError(
                f"the loss of {rows} rows is {total:.6g}, and {parts[0]:.6g} and {parts[1]:.6g} of its"
                " two parts: it is no sum over rows. Return a sum (reduction='sum'): ranks and"
                " microbatches add up their losses, and training divides by the count of all rows or"
                " targets, or by what count=... gives."
            )


def _has_no_values(batch: Batch) -> bool:
    """True on meta, where pieces are costed."""
    return next(iter(batch.values())).is_meta


def _detached(output: Any) -> Any:
    return tree_map_only(Tensor, Tensor.detach, output)


def _cut(values: Any, part: slice, rows: int) -> Any:
    """The same values of some of the rows."""

    def cut(x: Tensor) -> Tensor:
        # Whatever has one entry for each row; scalars and weights stay whole.
        each = x.dim() > 0 and x.shape[0] == rows
        return x.detach()[part] if each else x.detach()

    return tree_map_only(Tensor, cut, values)


class _LossHere(nn.Module):
    """Stands where the model's loss was, and computes the user's."""

    def __init__(self, own: OwnLoss, taken: tuple[str, ...]) -> None:
        super().__init__()
        self.own = own
        self.taken = taken  # of the batch, by the head's own forward
        self.batch: dict[str, Tensor] = {}
        self.metrics: Tensor | None = None

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        loss, self.metrics = self.own(output, self.batch)
        return loss


def give_loss(model: Model, own: OwnLoss) -> None:
    """Makes the last piece of a described model compute this loss of what its child `loss` is called
    with first."""
    name, head = model.pieces[-1]
    if "loss" not in head._modules:
        raise LayoutError(
            f"{name} has no child `loss`, in whose place the loss that was given could stand. Compute"
            " its loss by a module self.loss(output, targets), or give no loss."
        )
    # The head's own forward takes some entries of the batch; the loss may take all.
    _, *others = inspect.signature(head.forward).parameters
    head._modules["loss"] = _LossHere(own, tuple(others))
    _with_forward(head, _by_its_child)


@cache
def _kind_with(kind: Any, forward: Callable[..., Any]) -> type[nn.Module]:
    # A subclass with the same name: isinstance, attributes and weights' names remain.
    members = {"forward": forward, "theirs": kind.forward, "takes_batch": True}
    return type(kind.__name__, (kind,), members)


def _with_forward(module: Any, forward: Callable[..., Any]) -> None:
    """Gives a module another forward. It stays the module that it is: names of weights remain."""
    kind: Any = type(module)
    module.__class__ = _kind_with(kind, forward)


def make_whole(
    module: nn.Module, own: OwnLoss | None, measure: Measure
) -> None:
    """Makes a module as it is the only piece of a model: its forward gets the entries of the batch that
    its arguments name, and what it returns goes into this loss. Without one its own loss is taken."""
    module.__dict__["loss_of"] = own or _ReturnedLoss(measure)
    _with_forward(module, _by_itself)


def make_head(head: nn.Module, own: OwnLoss | None, measure: Measure) -> None:
    """Makes the last piece of a module that was taken apart compute this loss of what the module
    returns."""
    head.__dict__["loss_of"] = own or _ReturnedLoss(measure)
    _with_forward(head, _by_the_head)


def _by_itself(self: Any, **batch: Tensor) -> dict[str, Tensor]:
    """A module's own forward, and the loss of what it returns."""

    def run(x: Tensor | None, entries: Batch) -> Any:
        return self.theirs(**arguments_for(self.theirs, entries))

    return _with_loss(self, run, None, batch)


def _by_the_head(
    self: Any, x: Tensor, /, **batch: Tensor
) -> dict[str, Tensor]:
    """The end of a module's forward after its blocks, with the loss of what it returns."""

    def run(activations: Tensor | None, entries: Batch) -> Any:
        return self.theirs(activations, **entries)

    return _with_loss(self, run, x, batch)


_Run = Callable[[Tensor | None, Batch], Any]  # of activations and a batch


def _with_loss(
    module: Any, run: _Run, x: Tensor | None, batch: Batch
) -> dict[str, Tensor]:
    loss_of: OwnLoss | _ReturnedLoss = module.loss_of
    # A loss that was given has its own precision; the model's is widened.
    if isinstance(loss_of, OwnLoss):
        return _as_bundle(*loss_of(run(x, batch), batch))
    dtype = next((each.dtype for each in module.parameters()), torch.float32)
    narrow = dtype.is_floating_point and dtype.itemsize < 4
    with _WideLosses() if narrow else nullcontext():
        return {"x": loss_of(run, x, batch)}


_LOSSES: tuple[Callable[..., Tensor], ...] = (
    F.cross_entropy,
    F.nll_loss,
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.kl_div,
    F.binary_cross_entropy_with_logits,
)


class _WideLosses(TorchFunctionMode):
    """Computes a module's own loss in float32 where its weights have 16 bits, as torch.autocast does."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Targets of classes are integers and stay as they are.
        if func in _LOSSES:
            args = tuple(x.float() if _is_narrow(x) else x for x in args)
        return func(*args, **(kwargs or {}))


def _is_narrow(x: Any) -> bool:
    floating = isinstance(x, Tensor) and x.is_floating_point()
    return floating and x.element_size() < 4


class _ReturnedLoss:
    """The loss that a module's forward returns, as a sum: the first call finds out if it is one, or the
    mean over what the measure counts."""

    def __init__(self, measure: Measure) -> None:
        self.measure = measure
        self.mean: bool | None = None

    def __call__(self, run: _Run, x: Tensor | None, batch: Batch) -> Tensor:
        if self.measure.metrics:
            raise LayoutError(
                "metrics come from a loss that is given: prepare(..., loss=my_loss)."
            )
        if self.mean is None and not _has_no_values(batch):
            self.mean = self._is_mean(run, x, batch)
        loss = self._loss(run, x, batch)
        return self._summed(loss, batch) if self.mean else loss

    def _summed(self, loss: Tensor, batch: Batch) -> Tensor:
        """The sum of what a loss is the mean of; 0 where that is nothing, whose mean is no number."""
        # A count of thousands has too many digits for 16 bits.
        wide = loss.to(torch.promote_types(loss.dtype, torch.float32))
        count = self.measure.count(batch).to(wide.dtype)
        return torch.where(count > 0, wide * count, torch.zeros_like(wide))

    def _loss(self, run: _Run, x: Tensor | None, batch: Batch) -> Tensor:
        loss = returned_loss(run(x, batch))
        if loss is None:
            raise LayoutError(
                "the model's forward returns no loss. Give one: prepare(..., loss=my_loss), called with"
                " what the forward returns and the batch."
            )
        return loss

    @torch.no_grad()
    def _is_mean(self, run: _Run, x: Tensor | None, batch: Batch) -> bool:
        rows = next(iter(batch.values())).shape[0]
        # Two rows are needed for two halves; a single one is repeated.
        if rows < 2:
            batch = {
                name: torch.cat((each, each)) for name, each in batch.items()
            }
            x = None if x is None else torch.cat((x, x))
            rows *= 2
        middle = rows // 2
        whole = x, dict(batch)
        halves = (slice(0, middle), slice(middle, rows))
        # A sum: whole = a + b. A mean: whole n = a n_a + b n_b, with n what is counted.
        parts = [whole, *(_cut(whole, half, rows) for half in halves)]
        losses = [self._loss(run, *part) for part in parts]
        each, apart = [float(loss) for loss in losses], _apart(losses[0])
        counts = [float(self.measure.count(part)) for _, part in parts]
        weighted = [loss * n for loss, n in zip(each, counts, strict=True)]
        if _adds_up(each, apart):
            return False
        if _adds_up(weighted, apart):
            return True
        raise LayoutError(
            f"the loss of {rows} rows is {each[0]:.6g}, and {each[1]:.6g} and {each[2]:.6g} of its two"
            " parts: it is neither a sum over rows nor a mean over what is counted"
            f" ({', '.join(f'{n:g}' for n in counts)}). Give the loss and what it is divided by:"
            " prepare(..., loss=my_loss, count=my_count)."
        )


def _apart(loss: Tensor) -> float:
    """The relative distance below which two losses are equal: rounding in bf16 is 0.4 %."""
    return max(_APART, 4 * torch.finfo(loss.dtype).eps)


def _adds_up(values: Sequence[float], apart: float) -> bool:
    """True if the first value is the sum of the others."""
    whole, *parts = values
    return abs(whole - sum(parts)) <= apart * (
        abs(whole) + sum(map(abs, parts))
    )


# Reading a signature takes 0.1 ms, and each step needs it once for each piece.
_arguments: WeakKeyDictionary[Any, tuple[Parameter, ...]] = WeakKeyDictionary()


def _arguments_of(forward: Callable[..., Any]) -> tuple[Parameter, ...]:
    """The arguments of a function, or of a method without `self`."""
    # A bound method is made at each access, so its function is the key.
    function = getattr(forward, "__func__", forward)
    known = _arguments.get(function)
    if known is None:
        known = tuple(inspect.signature(forward).parameters.values())
        _arguments[function] = known
    return known


def arguments_for(
    forward: Callable[..., Any], batch: Batch
) -> dict[str, Tensor]:
    """The entries of a batch that a forward takes, by its arguments' names. Its first argument takes
    the first entry if none has its name."""
    arguments = _arguments_of(forward)
    named = {
        each.name: batch[each.name] for each in arguments if each.name in batch
    }
    # The first argument is the model's input under any name.
    first = arguments[0].name if arguments else ""
    free = [name for name in batch if name not in named]
    if first and first not in named and free:
        named[first] = batch[free[0]]
    # Only arguments without a default must be in the batch.
    missing = [
        each.name
        for each in arguments
        if each.default is each.empty
        and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        and each.name not in named
    ]
    if missing:
        raise LayoutError(
            f"the model's forward needs {', '.join(missing)}, and the batch has {', '.join(batch)}."
            " Give a batch that is a dict with the names of the forward's arguments."
        )
    return named


def _by_its_child(
    self: Any, x: Tensor, /, **batch: Tensor
) -> dict[str, Tensor]:
    """A head's own forward, with the user's loss in it."""
    # The batch and the metrics pass beside the head's own forward, which knows neither.
    here: _LossHere = self._modules["loss"]
    here.batch = batch
    named = {name: batch[name] for name in here.taken if name in batch}
    loss = self.theirs(x, **named)
    # Cleared, so that the batch does not live until the next call.
    metrics, here.batch, here.metrics = here.metrics, {}, None
    return _as_bundle(loss, metrics)


def _as_bundle(loss: Tensor, metrics: Tensor | None) -> dict[str, Tensor]:
    return {"x": loss} if metrics is None else {"x": loss, METRICS: metrics}
