"""Weights for a model on the meta device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..parallel import Model
from ..parallel.probe import bind_weights, frozen_parameters
from .sampling import GenerateError


def fill(
    model: Model, weights: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, nn.Parameter]:
    """Give a model on the meta device these weights, and its buffers their values.
    Return its parameters by name."""
    # Both before anything is bound, so that a wrong checkpoint leaves the
    # model as it was.
    missing = sorted(model.weights.keys() - weights.keys())
    if missing:
        raise GenerateError(
            f"the checkpoint has no {missing[0]} ({len(missing)} weights missing)."
        )
    for name, like in model.weights.items():
        given = weights[name].shape
        if given != like.shape:
            raise GenerateError(
                f"{name} is {tuple(given)} in the checkpoint, and {tuple(like.shape)} in the model."
            )
    # The checkpoint may have another dtype than the one to compute in.
    values = {name: weights[name].to(dtype) for name in model.weights}
    parameters = frozen_parameters(values)
    bind_weights(model, parameters)
    return parameters
