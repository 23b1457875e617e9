"""A model in transformers' own code, with transformers' own cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..parallel.whole import Whole


class TransformersReader:
    """A whole model of transformers, with its weights bound.

    A model without a cache reads the whole sequence again for each token.
    """

    def __init__(self, whole: Whole) -> None:
        self.module: Any = whole.module
        self.reset()

    def reset(self) -> None:
        self.cache: Any = None  # what transformers made of the tokens so far
        self.tokens: Tensor | None = None

    def logits(self, tokens: Tensor, last: int) -> Tensor:
        known = self.tokens
        whole = tokens if known is None else torch.cat((known, tokens), 1)
        self.tokens = whole
        # Without a cache everything is unread.
        unread = whole if self.cache is None else tokens
        # Positions continue after the tokens in the cache.
        places = torch.arange(whole.shape[1] - unread.shape[1], whole.shape[1])
        returned = self.module(
            input_ids=unread,
            position_ids=places.expand_as(unread),
            past_key_values=self.cache,
            use_cache=True,
        )
        # Some models return no cache, even if asked.
        self.cache = getattr(returned, "past_key_values", None)
        every: Tensor = returned.logits
        return every[:, -last:]
