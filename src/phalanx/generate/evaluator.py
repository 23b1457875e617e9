"""Loss of a trained model on a batch of sequences, on one process."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..parallel import Model
from ..parallel.forward import forward_loss
from .filled import fill


class Evaluator:
    """Model with weights that computes the loss of whole sequences."""

    def __init__(
        self,
        model: Model,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model, self.dtype = model, dtype
        fill(model, weights, dtype)

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the summed loss of a batch's targets. Documents, if given, do not see
        each other."""
        return forward_loss(self.model, batch, self.dtype)
