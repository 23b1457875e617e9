"""A user's module, as an instance with weights, made a Model for one rank.

The module stays as it is: a copy of it on the meta device becomes the Model. Parameters keep their identity
in the copy, so each is known by both of its names: the one in the module's `state_dict`, and the one in
the Model.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..layout import LayoutError, Rules, Shape
from ..models import Decoder, decoder
from .load import model_of_class
from .model import Model
from .own_apart import take_apart

Describe = Callable[[Any], object]
WHOLE = "model"  # the only piece of a module that is not described


@dataclass(frozen=True, eq=False)
class OwnModule:
    """A module with its weights, and what describes it; None if nothing does. Then an example batch, if
    there is one, is run to find its blocks."""

    module: nn.Module
    describe: Describe | None
    example: Mapping[str, Tensor] | None = None

    @classmethod
    def of(
        cls,
        module: object,
        describe: Describe | None,
        example: Mapping[str, Tensor] | None = None,
    ) -> OwnModule:
        if not isinstance(module, nn.Module):
            raise LayoutError(
                f"prepare takes a torch.nn.Module, not a {type(module).__name__}."
            )
        if meta := [name for name, x in module.named_parameters() if x.is_meta]:
            raise LayoutError(f"{meta[0]} is on the meta device and has no values.")
        beside = getattr(sys.modules[type(module).__module__], "describe", None)
        if isinstance(module, Decoder):
            beside = _describe_decoder
        return cls(module, describe or beside, example)

    @cached_property
    def names(self) -> dict[str, nn.Parameter]:
        """Every parameter once, by its name in the module."""
        return dict(self.module.named_parameters())

    def model(self) -> tuple[Model, dict[str, str]]:
        """A new Model on the meta device, and the module's name of each of its weights."""
        memo: dict[int, Any] = {}
        made: dict[nn.Parameter, str] = {}
        for name, parameter in self.names.items():
            like = torch.empty_like(parameter, device="meta")
            twin = nn.Parameter(like, requires_grad=parameter.requires_grad)
            memo[id(parameter)], made[twin] = twin, name
        twin_module = copy.deepcopy(self.module, memo)
        if self.describe is None and self.example is not None:
            _refuse_batch_statistics(twin_module)
            model = take_apart(twin_module, self.example)
        elif self.describe is None:
            model = _one_piece(twin_module)
        else:
            model = model_of_class(lambda: twin_module, self.describe)
        own = {name: made[weight] for name, weight in model.weights.items()}
        if lost := self.names.keys() - own.values():
            raise LayoutError(
                f"the parameter {min(lost)} is in no piece of describe(), so no layout would train it."
                " Give it to the piece that computes with it."
            )
        return model, own

    def values(self, names: Mapping[str, str]) -> dict[str, Tensor]:
        """The weights' values, by their names in the Model."""
        return {name: self.names[own].detach() for name, own in names.items()}


def _refuse_batch_statistics(module: nn.Module) -> None:
    batch_norms = (
        nn.modules.batchnorm._BatchNorm,
        nn.modules.instancenorm._InstanceNorm,
    )
    for name, child in module.named_modules():
        if isinstance(child, batch_norms) and child.training:
            raise LayoutError(
                f"{name} is a {type(child).__name__}, whose statistics depend on how the batch is cut."
                " Use GroupNorm or LayerNorm, or put it into eval()."
            )


def _one_piece(module: nn.Module) -> Model:
    """A module of which only its parameters are known: one piece, and nothing of it is cut."""
    _refuse_batch_statistics(module)
    tensors = (*module.named_parameters(), *module.named_buffers())
    lines = [f"{WHOLE}.{name} : {' '.join('-' * x.dim())}" for name, x in tensors]
    return Model(((WHOLE, module),), Rules.parse("\n".join(lines)))


def _describe_decoder(model: Decoder) -> Model:
    """The description of a built-in decoder that the user has made."""
    pieces, rules = decoder.describe(model)
    sizes = model._sizes
    names = {each.name for each in fields(Shape)} & vars(sizes).keys()
    known: dict[str, Any] = {name: getattr(sizes, name) for name in names}
    known.pop("rope_scaling", None)  # a shape has a word of that name
    if not sizes.kv_latent:  # then the model has filled in what follows from the heads
        for name in ("q_latent", "rope_dim", "value_dim"):
            known.pop(name, None)
    shape = Shape("decoder", **known)
    counts = {"heads": shape.heads, "kv": shape.kv_heads}
    return Model(
        pieces, Rules.parse(rules), counts, model.draw, shape, derived=model.derived
    )
