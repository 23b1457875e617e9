"""A user's module, as an instance with weights, made a Model for one rank.

The module stays as it is: a copy of it on the meta device becomes the Model. Parameters keep their identity
in the copy, so each is known by both of its names: the one in the module's `state_dict`, and the one in
the Model.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..layout import LayoutError, Rules, Shape
from ..models import Decoder, decoder
from .model import Model
from .own_apart import Apart, OwnWhole, blocks_of, take_apart
from .own_class import Made, OwnStart
from .own_heads import heads_of
from .own_loss import Measure, OwnLoss, make_head
from .own_tp import Plan, mlp_width
from .whole import (
    TARGETS,
    TOKENS,
    Whole,
    entries_for,
    logits_in,
    parameter_places,
    returned_loss,
    whole_of_class,
)

Describe = Callable[[Any], object]
WHOLE = "model"  # the only piece of a module that is not described


@dataclass(frozen=True, eq=False)
class OwnModule:
    """A module with its weights, and what describes it; None if nothing does. Then an example batch, if
    there is one, is run to find its blocks."""

    module: nn.Module
    describe: Describe | None
    example: Mapping[str, Tensor] | None = None
    plan: Plan | None = None  # for tp

    @classmethod
    def of(
        cls,
        module: object,
        describe: Describe | None,
        example: Mapping[str, Tensor] | None = None,
        plan: Plan | None = None,
    ) -> OwnModule:
        if not isinstance(module, nn.Module):
            given = (
                f"the class {module.__name__}: pass an instance"
                if isinstance(module, type)
                else f"a {type(module).__name__}"
            )
            raise LayoutError(f"prepare takes a torch.nn.Module, not {given}.")
        if meta := [
            name for name, x in module.named_parameters() if x.is_meta
        ]:
            raise LayoutError(
                f"{meta[0]} is on the meta device and has no values."
            )
        # The `describe` in the file that defines the module's class.
        beside = getattr(
            sys.modules[type(module).__module__], "describe", None
        )
        if isinstance(module, Decoder):
            beside = _describe_decoder
        return cls(
            module, describe or beside, example, plan or plan_of(module)
        )

    @cached_property
    def names(self) -> dict[str, nn.Parameter]:
        """Every parameter once, by its name in the module."""
        return dict(self.module.named_parameters())

    def undivided(self) -> OwnModule:
        """This module, as one piece if the example does not show how to divide it."""
        if self.describe is not None or self.example is None:
            return self
        try:
            self.apart()
        except LayoutError:
            return replace(self, example=None)
        return self

    def model(self) -> tuple[Model, dict[str, str]]:
        """A new Model on the meta device, and the module's name of each of its weights."""
        # By a description, else by an example's run, else as one piece.
        twin, made = self._twin()
        if self.describe is None and self.example is not None:
            _refuse_batch_statistics(twin)
            model = take_apart(twin, self.example, self.plan).model
        elif self.describe is None:
            model = _one_piece(twin)
        else:
            with torch.device("meta"):
                given = self.describe(twin)
            model = described(given, type(self.module).__name__, twin)
        return model, self._own_names(model, made)

    def apart(self) -> tuple[Apart, dict[str, str]]:
        """The module taken apart by the example, and its name of each weight of the new Model."""
        twin, made = self._twin()
        _refuse_batch_statistics(twin)
        apart = take_apart(twin, self.example or {}, self.plan)
        return apart, self._own_names(apart.model, made)

    def _twin(self) -> tuple[nn.Module, dict[nn.Parameter, str]]:
        """A copy of the module with parameters on meta, and their names."""
        # deepcopy with the parameters replaced by meta ones: no weight is copied.
        memo: dict[int, Any] = {}
        made: dict[nn.Parameter, str] = {}
        for name, parameter in self.names.items():
            like = torch.empty_like(parameter, device="meta")
            twin = nn.Parameter(like, requires_grad=parameter.requires_grad)
            memo[id(parameter)], made[twin] = twin, name
        return copy.deepcopy(self.module, memo), made

    def _own_names(
        self, model: Model, made: Mapping[nn.Parameter, str]
    ) -> dict[str, str]:
        own = {name: made[weight] for name, weight in model.weights.items()}
        # A parameter in no piece would silently keep its initial value.
        if lost := self.names.keys() - own.values():
            raise LayoutError(
                f"the parameter {min(lost)} is in no piece of describe(), so no layout would train it."
                " Give it to the piece that computes with it."
            )
        return own

    def values(self, names: Mapping[str, str]) -> dict[str, Tensor]:
        """The weights' values, by their names in the Model."""
        return {name: self.names[own].detach() for name, own in names.items()}


# ---- classes


def described(made: object, where: str, instance: object) -> Model:
    """What a `describe` has returned for an instance on meta, which has a forward of its own."""
    if not isinstance(made, Model):
        raise LayoutError(
            f"{where}: describe() returns a {type(made).__name__}, not a Model;"
            " see docs/bring-your-model.md."
        )
    return replace(
        made,
        whole=partial(whole_of_class, instance, made.pieces, made.weights),
    )


def plan_of(module: nn.Module) -> Plan | None:
    """The plan for tp that a module has as its attribute or method `tp_plan`, or a model of transformers in
    its configuration."""
    # transformers keeps it in the configuration; it goes before an attribute.
    config = getattr(module, "config", None)
    theirs = getattr(config, "base_model_tp_plan", None)
    own = theirs or getattr(module, "tp_plan", None)
    plan: Plan | None = own() if callable(own) else own
    return plan or None


def as_it_is(instance: object, make: Made, plan: Plan | None = None) -> Model:
    """The Model of a class that nothing describes: it reads tokens, and its own constructor draws its
    weights. `instance` has parameters on meta; `make` makes another one."""
    if not isinstance(instance, nn.Module):
        raise LayoutError(
            f"a model must be a torch.nn.Module, not a {type(instance).__name__}."
        )
    # Token numbers 0 exist in any vocabulary, and only shapes are looked at.
    ids = torch.zeros(2, _TOKENS, dtype=torch.int64)
    positions = torch.arange(_TOKENS).expand(2, -1)
    example = {TOKENS: ids, TARGETS: ids, "positions": positions}
    own = OwnModule(instance, None, example, plan or plan_of(instance))
    apart, names = own.apart()
    name = type(instance).__name__
    # A forward that returns no loss returns logits, for the cross-entropy.
    own_loss = returned_loss(apart.returned) is not None
    loss = (
        None if own_loss else OwnLoss(partial(_cross_entropy, name), Measure())
    )
    make_head(apart.model.pieces[-1][1], loss, Measure())
    return replace(
        apart.model,
        shape=_shape_of(apart, name),
        whole=partial(_whole, own, apart, names),
        own_start=OwnStart(make, names),
    )


_TOKENS = 8  # of the sequences with which a class is tried
_SEQUENCE = 128  # tokens, where neither the model nor the run says how many


def _cross_entropy(
    name: str, returned: Any, batch: Mapping[str, Tensor]
) -> Tensor:
    """The loss of a forward that returns logits."""
    logits = logits_in(returned, f"{name}.forward").flatten(0, -2)
    return F.cross_entropy(logits, batch[TARGETS].flatten(), reduction="sum")


def _shape_of(apart: Apart, name: str) -> Shape:
    """The sizes of a module as it is. Widths of attention and MLP are not known: `ffn` is that of a plain
    decoder with as many weights in its blocks, so that the products of a step are about right."""
    # Without a lookup of the tokens, the logits tell the size of the vocabulary.
    words = apart.words
    if not words:
        words = logits_in(apart.returned, f"{name}.forward").shape[-1]
    numbers = [
        sum(x.numel() for x in each.parameters()) for each in apart.blocks
    ]
    width, heads = apart.width, heads_of(apart.blocks[0])
    planned = mlp_width(apart.cuts)
    # 4 hidden^2 of a block are taken for attention, the rest for two MLP matrices.
    rest = sum(numbers) // len(numbers) - 4 * width * width
    return Shape(
        name.lower(),
        layers=len(apart.blocks),
        hidden=width,
        heads=heads.query,
        kv_heads=heads.key,
        ffn=planned or heads.query * max(1, rest // (2 * width * heads.query)),
        vocab=words,
        sequence=apart.places or _SEQUENCE,
        positions="learned" if apart.places else "rope",
        gated=False,
        tied=bool(apart.model.tied),
    )


def _whole(own: OwnModule, apart: Apart, names: Mapping[str, str]) -> Whole:
    """The module that has not been taken apart."""
    module = own.module
    # From the original's parameter to its name in the Model, by the name in the module.
    ours = {theirs: name for name, theirs in names.items()}
    parameters = {x: ours[theirs] for theirs, x in own.names.items()}
    places, missing = parameter_places(module, parameters)
    _, blocks = blocks_of(module)
    parts = {
        1 + number: block for number, block in enumerate(blocks.children())
    }
    label = f"{type(module).__name__}.forward"
    arguments = entries_for(module, label)
    ignored = apart.frame.ignored
    return OwnWhole(
        label, module, arguments, places, parts, missing, ignored=ignored
    )


# ---- one piece


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
    # "-" for every dim: all ranks hold all weights whole.
    lines = [
        f"{WHOLE}.{name} : {' '.join('-' * x.dim())}" for name, x in tensors
    ]
    return Model(((WHOLE, module),), Rules.parse("\n".join(lines)))


def _describe_decoder(model: Decoder) -> Model:
    """The description of a built-in decoder that the user has made."""
    pieces, rules = decoder.describe(model)
    sizes = model._sizes
    names = {each.name for each in fields(Shape)} & vars(sizes).keys()
    known: dict[str, Any] = {name: getattr(sizes, name) for name in names}
    known.pop("rope_scaling", None)  # a shape has a word of that name
    # The model has filled in what follows from the heads.
    if not sizes.kv_latent:
        for name in ("q_latent", "value_dim"):
            known.pop(name, None)
        if sizes.rope_dim == sizes.head_dim:
            known.pop("rope_dim", None)
    shape = Shape("decoder", **known)
    counts = shape.unit_counts
    return Model(
        pieces,
        Rules.parse(rules),
        counts,
        model.draw,
        shape,
        derived=model.derived,
    )
