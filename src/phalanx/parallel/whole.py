"""A user's model as one module, computed by its own forward.

A layout computes with the pieces of `describe()`. The class's own forward defines what
these compute together. It is called with the entries of a batch that its arguments
name; its first argument gets the tokens, whatever its name. It returns the loss, as a
sum or as a mean over the valid tokens, or the logits, from which the cross-entropy is
computed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..layout import LayoutError
from ..models import IGNORED
from .batch import DOCUMENTS

TOKENS, TARGETS, INPUTS = "tokens", "targets", "inputs"
ENTRIES = (TOKENS, INPUTS, TARGETS, "positions", DOCUMENTS, "noise")


@dataclass(frozen=True)
class ParameterPlace:
    """The module and attribute that hold a parameter, and its name in the description."""

    module: nn.Module
    key: str
    name: str


@dataclass(frozen=True, eq=False)
class Whole:
    """A model that is not taken apart.

    `arguments` maps the arguments of its forward to entries of a batch. `mean` is True
    if the returned loss is a mean over the valid tokens. `missing` names its parameters
    that are in no piece. `parts` are its modules that do the work of a piece, by the
    piece's number.
    """

    name: str
    module: nn.Module
    arguments: Mapping[str, str]
    places: tuple[ParameterPlace, ...]
    parts: Mapping[int, nn.Module]
    missing: tuple[str, ...] = ()
    mean: bool = False

    def bind(self, weights: Mapping[str, nn.Parameter]) -> None:
        """Replace the meta weights by real ones, by their names in the description."""
        for place in self.places:
            place.module._parameters[place.key] = weights[place.name]

    def unread(self, entries: Iterable[str]) -> set[str]:
        """Batch entries that change pieces, but that this forward does not take."""
        taken = set(self.arguments.values())
        # Without documents, positions count from 0, as in a forward without an argument
        # for them.
        implied = {TARGETS} if DOCUMENTS in taken else {TARGETS, "positions"}
        return set(entries) - taken - implied

    def given(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The arguments of its forward for a batch."""
        return {
            name: batch[key]
            for name, key in self.arguments.items()
            if key in batch
        }

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Compute the loss of a batch, as a sum over its valid tokens."""
        count = valid_count(batch)
        if self.mean and not count:  # a mean over no tokens is not a number
            # A zero that depends on every weight, so that each still gets a gradient.
            return torch.stack(
                [x.flatten()[:1].sum() * 0 for x in self.module.parameters()]
            ).sum()
        returned = self.module(**self.given(batch))
        loss = returned_loss(returned)
        if loss is not None:
            return loss * count if self.mean else loss
        # Logits: the cross-entropy of phalanx's own heads, as a sum.
        logits = logits_in(returned, self.name).flatten(0, -2)
        targets = batch[TARGETS].flatten()
        return F.cross_entropy(
            logits, targets, ignore_index=IGNORED, reduction="sum"
        )


def whole_of_class(
    module: object,
    pieces: Sequence[tuple[str, nn.Module]],
    weights: Mapping[str, nn.Parameter],
) -> Whole | None:
    """Wrap an instance of a class, or return None if it has no forward of its own.

    `weights` are the description's, by name and still on meta. They identify the
    class's parameters.
    """
    if (
        not isinstance(module, nn.Module)
        or type(module).forward is nn.Module.forward
    ):
        return None
    names = {parameter: name for name, parameter in weights.items()}
    places, missing = parameter_places(module, names)
    # Modules of the class that are pieces too can be compared call by call.
    inside = set(module.modules())
    parts = {
        number: piece
        for number, (_, piece) in enumerate(pieces)
        if piece in inside
    }
    name = f"{type(module).__name__}.forward"
    return Whole(
        name, module, entries_for(module, name), places, parts, missing
    )


def parameter_places(
    module: nn.Module, names: Mapping[nn.Parameter, str]
) -> tuple[tuple[ParameterPlace, ...], tuple[str, ...]]:
    """The places of a module's parameters, and names missing from `names`."""
    places, missing = list[ParameterPlace](), list[str]()
    for path, child in module.named_modules():
        for key, parameter in child._parameters.items():
            if parameter is None:
                continue
            if parameter in names:
                places.append(ParameterPlace(child, key, names[parameter]))
            else:
                missing.append(f"{path}.{key}".lstrip("."))
    return tuple(places), tuple(missing)


def valid_count(batch: Mapping[str, Tensor]) -> int:
    """The number of tokens in a batch's loss, or of rows if targets are not tokens."""
    targets = batch.get(TARGETS)
    if targets is None or targets.is_floating_point():
        return next(iter(batch.values())).shape[0]
    return int((targets != IGNORED).sum())


def entries_for(module: nn.Module, name: str) -> dict[str, str]:
    """The batch entry that each argument of a forward gets."""
    signature = inspect.signature(type(module).forward).parameters
    open_kinds = (
        inspect.Parameter.VAR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
    )
    # Without `self` and the open-ended arguments.
    arguments = [
        p for p in list(signature.values())[1:] if p.kind not in open_kinds
    ]
    known = {p.name: p.name for p in arguments if p.name in ENTRIES}
    # The first argument may have any name, such as `idx`: it gets the tokens.
    if (
        arguments
        and not {TOKENS, INPUTS} & known.keys()
        and arguments[0].name not in known
    ):
        known[arguments[0].name] = TOKENS
    needed = [
        p.name
        for p in arguments
        if p.default is p.empty and p.name not in known
    ]
    if needed:
        raise LayoutError(
            f"{name} needs {', '.join(needed)}, which no batch has: it has {', '.join(ENTRIES)}."
            f" Give {needed[0]} a default, or name it like the batch entry that it is."
        )
    return known


def returned_loss(returned: Any) -> Tensor | None:
    """The loss that a forward returned: alone, in a tuple, or as `loss`."""
    if isinstance(returned, Mapping):
        candidates = [returned.get("loss")]
    elif isinstance(returned, tuple | list):
        candidates = list(returned)
    else:
        candidates = [returned, getattr(returned, "loss", None)]
    # A loss is the first floating-point scalar, wherever the logits stand.
    scalars = [
        x
        for x in candidates
        if isinstance(x, Tensor) and x.is_floating_point()
    ]
    return next((x for x in scalars if not x.dim()), None)


def logits_in(returned: Any, name: str) -> Tensor:
    """The logits (B, T, vocab) that a forward returned."""
    if isinstance(returned, Mapping):
        candidates = [returned.get("logits")]
    elif isinstance(returned, tuple | list):
        candidates = list(returned)
    else:
        candidates = [returned, getattr(returned, "logits", None)]
    for each in candidates:
        # (B, T, vocab)
        if isinstance(each, Tensor) and each.dim() == 3:
            return each
    raise LayoutError(
        f"{name} returns a {type(returned).__name__}, neither a loss nor logits. Return the loss of the"
        " batch, or logits of (batch, time, vocabulary)."
    )
