"""Sampling of the next token from its logits."""

from dataclasses import dataclass

import torch
from torch import Tensor


class GenerateError(ValueError):
    """Raised for a request that cannot be met; suggests a way out."""


@dataclass(frozen=True)
class Sampling:
    """Settings for sampling the next token. With temperature 0 it is the most likely
    one.

    `top_k` keeps the k most likely tokens; 0 keeps all. `top_p` keeps the most likely
    tokens with at least this total probability (nucleus sampling, Holtzman et al.
    2020).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:  # nor a number
            raise GenerateError(
                f"temperature is {self.temperature}; it must be 0 or more."
            )
        if self.top_k < 0:
            raise GenerateError(
                f"top_k is {self.top_k}; it must be 0 (all tokens) or more."
            )
        if not 0 < self.top_p <= 1:
            raise GenerateError(
                f"top_p is {self.top_p}; it must be above 0 and at most 1."
            )

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def choose(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """Return the next token of each row, from logits (rows, vocabulary)."""
        # Dividing by a temperature of 0 would give infinities.
        if not logits.isfinite().any(-1).all():
            raise GenerateError("the model's logits are not numbers.")
        if self.temperature == 0:
            return logits.argmax(-1)
        probabilities = self.kept(logits.float() / self.temperature).softmax(
            -1
        )
        return torch.multinomial(
            probabilities, 1, generator=generator
        ).squeeze(-1)

    def kept(self, logits: Tensor) -> Tensor:
        """Return the logits, with -inf for excluded tokens."""
        # The k-th largest logit is the least that stays; ties with it stay,
        # too.
        if 0 < self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k, -1).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        # Nucleus: sorted, and cut where the more likely tokens already have
        # top_p together.
        if self.top_p < 1:
            ordered, order = logits.sort(-1, descending=True)
            shares = ordered.softmax(-1)
            # total probability of more likely tokens
            before = shares.cumsum(-1) - shares
            # Back from sorted order to the vocabulary's.
            beyond = (before >= self.top_p).scatter(
                -1, order, before >= self.top_p
            )
            logits = logits.masked_fill(beyond, -torch.inf)
        return logits
