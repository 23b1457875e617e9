"""Entries of a batch for modules that predict later tokens: (B, T, modules) each."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .loss import IGNORED

AHEAD_TOKENS, AHEAD_TARGETS = "ahead_tokens", "ahead_targets"
HIDDEN = "hidden"  # in the bundle: the hidden states that the head needs besides `x`


def look_ahead(batch: Mapping[str, Tensor], modules: int) -> dict[str, Tensor]:
    """The tokens and targets that modules take at each token, from whole rows.

    At token i, module k takes token i + k and predicts the target of token i + k. If
    that token is beyond the end of the row or in another document, there is nothing to
    predict.
    """
    tokens, targets = batch["tokens"], batch["targets"]
    documents = batch.get("documents")
    found = []
    for k in range(1, modules + 1):
        token, target = _shifted(tokens, k, 0), _shifted(targets, k, IGNORED)
        if documents is not None:
            same = _shifted(documents, k, -1) == documents
            same = same.to(tokens.device)
            token = torch.where(same, token, 0)
            target = torch.where(same, target, IGNORED)
        found.append((token, target))
    ahead_tokens, ahead_targets = zip(*found, strict=True)
    return {
        AHEAD_TOKENS: torch.stack(ahead_tokens, -1),  # (B, T, modules)
        AHEAD_TARGETS: torch.stack(ahead_targets, -1),
    }


def _shifted(x: Tensor, by: int, fill: int) -> Tensor:
    """x (B, T) with every value moved `by` tokens to the left; `fill` at the end."""
    y = torch.full_like(x, fill)
    y[:, :-by] = x[:, by:]
    return y
