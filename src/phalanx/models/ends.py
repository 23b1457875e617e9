"""The ends of a decoder: the embedding of tokens, and the head with the loss."""

from __future__ import annotations

from torch import Tensor, nn

from .loss import CrossEntropy, soft_cap
from .noise import EMBEDDING, Dropout, block_noise
from .norm import norm_of
from .sizes import DecoderSizes


def scaled(x: Tensor, scale: float) -> Tensor:
    """Token embeddings times a factor, rounded to their dtype as in Gemma's training."""
    return x if scale == 1 else x * x.new_full((), scale)


class Embed(nn.Module):
    """Token embeddings times `scale`, plus learned position embeddings, if any."""

    def __init__(
        self,
        vocab: int,
        hidden: int,
        sequence: int | None = None,
        scale: float = 1.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.scale = scale
        self.dropout = Dropout(dropout, place=0)
        self.tokens = nn.Embedding(vocab, hidden)
        self.positions = (
            None if sequence is None else nn.Embedding(sequence, hidden)
        )

    @property
    def uncompiled(self) -> bool:
        """True if this is only a lookup, which a compiled graph would slow down."""
        plain = self.scale == 1 and not self.dropout.rate
        return plain and self.positions is None

    def forward(
        self, tokens: Tensor, positions: Tensor, noise: Tensor | None = None
    ) -> Tensor:
        # (B, T) becomes (B, T, hidden)
        x = scaled(self.tokens(tokens), self.scale)
        if self.positions is not None:
            x = x + self.positions(positions)
        keys = None if noise is None else block_noise(noise, EMBEDDING)
        dropped: Tensor = self.dropout(x, keys)
        return dropped


class LossHead(nn.Module):
    """Last norm and output projection; a subclass computes the summed loss.

    `output.weight` may be the embedding's own parameter or another of the same shape.
    With a `softcap` c, a logit l becomes c tanh(l / c).

    In a piece, the output projection may return `ChunkedLogits` in place of the logits.
    """

    # The child that may do so. Empty in a class that computes further with the loss.
    by_chunks = ""

    def __init__(
        self, hidden: int, vocab: int, norm: nn.Module, softcap: float = 0.0
    ) -> None:
        super().__init__()
        self.norm, self.softcap = norm, softcap
        self.output = nn.Linear(hidden, vocab, bias=False)
        self.loss = CrossEntropy()

    def logits(self, x: Tensor) -> Tensor:
        y = self.output(self.norm(x))  # (B, T, vocab)
        capped: Tensor = soft_cap(y, self.softcap)
        return capped

    @classmethod
    def parts_of(
        cls, sizes: DecoderSizes
    ) -> tuple[int, int, nn.Module, float]:
        """The arguments of this class for a model's sizes."""
        norm = norm_of(sizes.norm, sizes.hidden, sizes.eps)
        return sizes.hidden, sizes.vocab, norm, sizes.logit_softcap


class Head(LossHead):
    """A head with the summed loss of the next token."""

    by_chunks = "output"

    @classmethod
    def of(cls, sizes: DecoderSizes) -> Head:
        return cls(*cls.parts_of(sizes))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.loss(self.logits(x), targets)
        return loss
