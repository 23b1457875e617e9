"""Loads models of users: from a file, from a class, or in transformers' own code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..layout import LayoutError
from ..layout.shape import HUB
from ..layout.source import arguments_of, load_module, running, split_name
from .model import Model
from .own_class import maker_with, parameters_on_meta
from .own_module import as_it_is, described
from .transformers_code import load_transformers

Describe = Callable[[Any], object]


def load_model(text: str) -> Model:
    """Load a model from `FILE.py:Class`, `FILE.py:Class(n_layer=6)` or `hf:FOLDER`.

    If the file has a `describe(model)`, which returns a `Model`, the class is created on
    the meta device and described by it. Otherwise its pieces are found by running it.
    """
    if text.startswith(HUB):
        return load_transformers(text.removeprefix(HUB))
    path, name = split_name(text)
    module = load_module(path, (name,), LayoutError)
    arguments = arguments_of(text, LayoutError)
    make = maker_with(getattr(module, name), arguments, vars(module))
    describe = getattr(module, "describe", None)
    # Nothing could refill the buffers, so only parameters are on meta.
    if describe is None:
        with running(path, LayoutError), parameters_on_meta():
            instance = make()
        plan = getattr(module, "tp_plan", None)
        return as_it_is(
            instance, make, plan(instance) if callable(plan) else plan
        )
    # A described model refills its buffers in `reset_buffers`, so all is on meta.
    with running(path, LayoutError), torch.device("meta"):
        instance = make()
        made = describe(instance)
    return described(made, path, instance)


def model_of_class(
    kind: Callable[[], object], describe: Describe | None = None
) -> Model:
    """A model from a class that is already loaded, for example in a notebook."""
    if describe is None:
        with parameters_on_meta():
            instance = kind()
        return as_it_is(instance, kind)
    with torch.device("meta"):
        instance = kind()
        made = describe(instance)
    return described(made, getattr(kind, "__name__", "the model"), instance)
