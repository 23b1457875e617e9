"""Attention with a cache of keys and values."""

import math

import torch
from torch import Tensor, nn

from ..models import Core


class CachedCore(nn.Module):
    """Replacement for `models.Core` in one attention layer during generation.

    Each call passes the queries, keys and values of the next tokens. All rows of a
    batch have the same length.
    """

    def __init__(self, core: Core) -> None:
        super().__init__()
        self.window, self.softcap = core.window, core.softcap
        self.keys: Tensor | None = None  # (batch, time, kv_heads, head_dim)
        self.values: Tensor | None = None

    def reset(self) -> None:
        """Forget all tokens."""
        self.keys = self.values = None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        documents: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if self.keys is not None and self.values is not None:
            k = torch.cat((self.keys, k), 1)
            v = torch.cat((self.values, v), 1)
        self.keys, self.values = k, v
        sharing = q.shape[2] // k.shape[2]  # query heads per key head
        k = k.repeat_interleave(sharing, 2)
        v = v.repeat_interleave(sharing, 2)
        # scores: (batch, heads, new tokens, all tokens), in float32
        scores = torch.einsum(
            "bnhd,bthd->bhnt", q.float(), k.float()
        ) / math.sqrt(q.shape[-1])
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores.masked_fill(
            ~self.visible(q.shape[1], k.shape[1], q.device), -torch.inf
        )
        if sinks is not None:  # one more key per head, whose value is zero
            column = (
                sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
            )
            scores = torch.cat((scores, column), -1)
        weights = scores.softmax(-1)[..., : k.shape[1]]
        return torch.einsum("bhnt,bthd->bnhd", weights, v.float()).to(v.dtype)

    def visible(self, new: int, total: int, device: torch.device) -> Tensor:
        """Return a mask (new, total), True where a new token sees an earlier one inside
        its window."""
        token = torch.arange(total - new, total, device=device).unsqueeze(1)
        other = torch.arange(total, device=device)
        seen = other <= token
        if self.window:
            seen &= token - other < self.window
        return seen
