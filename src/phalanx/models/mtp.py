"""Multi-token prediction (DeepSeek-V3 2024, section 2.2): modules behind the last block.

Module k predicts, at token i, token i + k + 1. It takes the hidden state of the module
before it (the first one takes that of the last block) and the embedding of token i + k,
which it normalizes, concatenates and projects to the model's width. A block of the
model's own kind follows, and then the model's own output projection behind a norm of
the module's own. So a module is two pieces, `Join` and a block, and the decoder's
`PredictingHead` computes both losses.

Here a batch's entries for the modules are (B, T, modules): see `look_ahead`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .loss import IGNORED

AHEAD_TOKENS, AHEAD_TARGETS = "ahead_tokens", "ahead_targets"
HIDDEN = "hidden"  # in the bundle: the hidden states that the head needs besides `x`
SECOND_LOSS = "mtp_loss"  # the head's second output, and its name in the log


class ExtraLoss(NamedTuple):
    """A loss that a head returns as a sum beside its own.

    `share` times that sum is what a log divides by the number of targets, and `factor`
    times that is the loss's part of the whole loss.
    """

    share: float
    factor: float


def look_ahead(batch: Mapping[str, Tensor], modules: int) -> dict[str, Tensor]:
    """The tokens and targets that modules take at each token, from whole rows.

    At token i, module k takes token i + k and predicts the target of token i + k. If
    that token is behind the end of the row or in another document, there is nothing to
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
    """x (B, T) with each token's value replaced by that of the token `by` further."""
    y = torch.full_like(x, fill)
    y[:, :-by] = x[:, by:]
    return y


class Join(nn.Module):
    """The input of a module's block: a hidden state and the embedding of a later token.

    `tokens.weight` is the model's own embedding. The order of the projection's inputs
    is that of the published weights: the embedding first.
    """

    def __init__(
        self,
        depth: int,
        tokens: nn.Embedding,
        scale: float,
        token_norm: nn.Module,
        hidden_norm: nn.Module,
    ) -> None:
        super().__init__()
        self.depth, self.scale = depth, scale  # depth: 0 for the first module
        self.tokens = nn.Embedding(tokens.num_embeddings, tokens.embedding_dim)
        self.tokens.weight = tokens.weight
        self.token_norm, self.hidden_norm = token_norm, hidden_norm
        width = tokens.embedding_dim
        self.proj = nn.Linear(2 * width, width, bias=False)

    gives = ("x", HIDDEN)

    def forward(
        self, x: Tensor, ahead_tokens: Tensor, hidden: Tensor | None = None
    ) -> dict[str, Tensor]:
        token = self.tokens(ahead_tokens[..., self.depth])  # (B, T, hidden)
        if self.scale != 1:
            token = token * token.new_full((), self.scale)
        both = torch.cat((self.token_norm(token), self.hidden_norm(x)), -1)
        # (modules so far * B, T, hidden)
        before = x if hidden is None else torch.cat((hidden, x))
        return {"x": self.proj(both), HIDDEN: before}
