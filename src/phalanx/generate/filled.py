"""Weights for a model on the meta device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..parallel import Model
from .sampling import GenerateError


def fill(
    model: Model, weights: Mapping[str, Tensor], dtype: torch.dtype
) -> None:
    """Give a model on the meta device these weights, and its buffers their values."""
    names = {parameter: name for name, parameter in model.weights.items()}
    if missing := sorted(names[p] for p in names if names[p] not in weights):
        raise GenerateError(
            f"the checkpoint has no {missing[0]} ({len(missing)} weights missing)."
        )
    filled = {
        parameter: nn.Parameter(weights[name].to(dtype), requires_grad=False)
        for parameter, name in names.items()
    }
    for _, piece in model.pieces:
        for module in piece.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = filled[parameter]
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[name] = torch.empty(
                        buffer.shape, dtype=buffer.dtype
                    )
        for module in piece.modules():
            reset = getattr(module, "reset_buffers", None)
            if reset is not None:
                reset()
