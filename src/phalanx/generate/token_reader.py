"""The interface by which text is generated: a model that reads tokens and returns their
logits."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class TokenReader(Protocol):
    """A model with its weights, and the tokens that it has read so far."""

    def reset(self) -> None:
        """Forget all tokens."""
        ...

    def logits(self, tokens: Tensor, last: int) -> Tensor:
        """Read new tokens (batch, new) after those read so far; return the logits
        (batch, last, vocabulary) of the last ones."""
        ...
