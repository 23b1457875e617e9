"""Multi-token prediction (DeepSeek-V3 2024, section 2.2): modules after the last block.

At token i, module k predicts token i + k + 1. Its inputs are the hidden state of the
previous module (for the first, of the last block) and the embedding of token i + k. It
normalizes both, concatenates them and projects them to the model's width. A block like
the model's follows, then a norm of the module's own and the model's output projection.
So a module is two pieces, `Join` and a block, and the decoder's `PredictingHead`
computes both losses.

`ahead.py` makes the modules' entries of a batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .ahead import HIDDEN
from .ends import LossHead, scaled
from .loss import ExtraLoss, soft_cap
from .norm import norm_of
from .sizes import DecoderSizes

# Lines of the decoder's rule table: see `decoder.py`.
RULES = """\
mtp.*.tokens.weight : vocab embed
mtp.*norm.* : embed
mtp.*.proj.weight : embed embed
head.predicted.*.norm.* : embed
"""
SECOND_LOSS = "mtp_loss"  # the head's second output, and its name in the log


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
        token = scaled(token, self.scale)
        both = torch.cat((self.token_norm(token), self.hidden_norm(x)), -1)
        # (modules so far * B, T, hidden)
        before = x if hidden is None else torch.cat((hidden, x))
        return {"x": self.proj(both), HIDDEN: before}


class PredictingHead(LossHead):
    """A head with the losses of the next token and of the modules' tokens.

    `x` is the hidden state of the last module. `hidden` holds the states of the last
    block and of the earlier modules. The second loss is a sum over all modules. Without
    `hidden`, `x` is the state of the last block, and there is only the next token's
    loss.
    """

    by_chunks = "output"

    def __init__(
        self,
        hidden: int,
        vocab: int,
        norm: nn.Module,
        softcap: float,
        norms: list[nn.Module],
        weight: float,
    ) -> None:
        super().__init__(hidden, vocab, norm, softcap)
        self.predicted = nn.ModuleList(
            nn.ModuleDict({"norm": each}) for each in norms
        )
        self.extra_losses = {SECOND_LOSS: ExtraLoss(1 / len(norms), weight)}

    def forward(
        self,
        x: Tensor,
        targets: Tensor,
        ahead_targets: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> dict[str, Tensor]:
        if ahead_targets is None or hidden is None:
            return {"x": self.loss(self.logits(x), targets)}
        modules = len(self.predicted)
        first, *others = hidden.chunk(modules)
        states = zip(self.predicted, (*others, x), strict=True)
        normed = [self._normed(module, state) for module, state in states]
        # One product with the output projection for all modules.
        logits = soft_cap(self.output(torch.cat(normed)), self.softcap)
        later = ahead_targets.permute(2, 0, 1).flatten(0, 1)
        return {
            "x": self.loss(self.logits(first), targets),
            SECOND_LOSS: self.loss(logits, later),
        }

    @staticmethod
    def _normed(module: Any, x: Tensor) -> Tensor:
        y: Tensor = module["norm"](x)
        return y


def join(sizes: DecoderSizes, tokens: nn.Embedding, depth: int) -> Join:
    """The input of the block of module `depth`, from the model's own embedding."""
    token_norm = norm_of(sizes.norm, sizes.hidden, sizes.eps)
    hidden_norm = norm_of(sizes.norm, sizes.hidden, sizes.eps)
    return Join(depth, tokens, sizes.embed_scale, token_norm, hidden_norm)


def head(sizes: DecoderSizes) -> PredictingHead:
    """The head of a model with modules that predict later tokens."""
    norms = [
        norm_of(sizes.norm, sizes.hidden, sizes.eps) for _ in range(sizes.mtp)
    ]
    parts = PredictingHead.parts_of(sizes)
    return PredictingHead(*parts, norms, sizes.mtp_weight)
