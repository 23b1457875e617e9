"""Loads models of users: from a file, from a class, or in transformers' own code."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..layout import LayoutError
from ..layout.shape import HUB
from ..layout.source import load_source, running, split_name
from .model import Model
from .transformers_code import load_transformers
from .whole import whole_of_class


def load_model(text: str) -> Model:
    """Load a user's model from `FILE.py:Class`, or transformers' model from
    `hf:FOLDER`.

    The class is created without arguments on the meta device and described by the
    file's `describe(model)`, which returns a `Model`.
    """
    if text.startswith(HUB):
        return load_transformers(text.removeprefix(HUB))
    path, name = split_name(text)
    kind, describe = load_source(path, (name, "describe"), LayoutError)
    with running(path, LayoutError), torch.device("meta"):
        instance = kind()
        made = describe(instance)
    return _only_model(made, path, instance)


def model_of_class(
    kind: Callable[[], object], describe: Callable[[Any], object]
) -> Model:
    """A model from a class that is already loaded, for example in a notebook."""
    with torch.device("meta"):
        instance = kind()
        made = describe(instance)
    return _only_model(made, getattr(kind, "__name__", "the model"), instance)


def _only_model(made: object, where: str, instance: object) -> Model:
    if not isinstance(made, Model):
        raise LayoutError(
            f"{where}: describe() returns a {type(made).__name__}, not a Model;"
            " see docs/bring-your-model.md."
        )
    return replace(
        made, whole=partial(whole_of_class, instance, made.pieces, made.weights)
    )
