"""Models of others as values: of a file's class, of a class that is here, in transformers' own code."""

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
    """A stranger's model from `FILE.py:Class`: the class made without arguments on the meta device,
    described by the file's `describe(model)`, which returns a `Model`. Or transformers' from
    `hf:FOLDER`."""
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
    """A model of a class that is here already, as one of a notebook."""
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
