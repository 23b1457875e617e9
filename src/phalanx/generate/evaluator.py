"""A trained model that reads sequences, on one process: the loss of a batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..parallel import Model
from .filled import fill


class Evaluator:
    """A decoder with its weights, which computes the loss of whole sequences."""

    def __init__(
        self,
        model: Model,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = model
        fill(model, weights, dtype)

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The sum of the losses of a batch's targets. Documents, where it has them, are kept apart."""
        (_, embed), *blocks, (_, head) = self.model.pieces
        positions, documents = batch["positions"], batch.get("documents")
        x = embed(batch["tokens"], positions)  # (batch, time, hidden)
        derived = self.model.derived.items()
        shared = {name: make(batch, x.dtype) for name, make in derived}
        for _, block in blocks:
            x = block(x, positions=positions, documents=documents, **shared)
        loss: Tensor = head(x, batch["targets"])
        return loss
