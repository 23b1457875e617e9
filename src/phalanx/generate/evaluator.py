"""Loss of a trained model on a batch of sequences, on one process."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..parallel import Model
from .filled import fill


class Evaluator:
    """Decoder with weights that computes the loss of whole sequences."""

    def __init__(
        self,
        model: Model,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = model
        fill(model, weights, dtype)

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the summed loss of a batch's targets. Documents, if given, do not see
        each other."""
        (_, embed), *blocks, (_, head) = self.model.pieces
        positions, documents = batch["positions"], batch.get("documents")
        x = embed(batch["tokens"], positions)  # (batch, time, hidden)
        derived = self.model.derived.items()
        shared = {name: make(batch, x.dtype) for name, make in derived}
        for _, block in blocks:
            x = block(x, positions=positions, documents=documents, **shared)
        loss: Tensor = head(x, batch["targets"])
        return loss
