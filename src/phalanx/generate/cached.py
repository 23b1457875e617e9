"""The built-in decoder with a cache of keys and values."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..models import Core
from ..models.ends import LossHead
from ..parallel import Model


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
        # The cache grows by concatenation, which copies it once for each pass.
        if self.keys is not None and self.values is not None:
            k = torch.cat((self.keys, k), 1)
            v = torch.cat((self.values, v), 1)
        self.keys, self.values = k, v
        # Grouped queries: each head of keys and values serves several heads of
        # queries.
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
        # Without the sink's column, so that the weights of a row sum to less
        # than 1.
        weights = scores.softmax(-1)[..., : k.shape[1]]
        return torch.einsum("bhnt,bthd->bnhd", weights, v.float()).to(v.dtype)

    def visible(self, new: int, total: int, device: torch.device) -> Tensor:
        """Return a mask (new, total), True where a new token sees an earlier one inside
        its window."""
        # The new tokens are the last of all.
        token = torch.arange(total - new, total, device=device).unsqueeze(1)
        other = torch.arange(total, device=device)
        seen = other <= token
        if self.window:
            seen &= token - other < self.window
        return seen


class CachingReader:
    """A reader whose cores keep the keys and values of the tokens read so far."""

    cores: Sequence[CachedCore]
    read = 0  # tokens read, equal for all rows

    def reset(self) -> None:
        self.read = 0
        for core in self.cores:
            core.reset()

    def advance(self, tokens: Tensor) -> Tensor:
        """Count these tokens (B, T) as read, and return their positions."""
        time = torch.arange(self.read, self.read + tokens.shape[1])
        self.read += tokens.shape[1]
        return time.expand_as(tokens)


class DecoderReader(CachingReader):
    """The built-in decoder, which caches the keys and values of the tokens read so
    far."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.blocks = blocks_of(model)
        head = model.pieces[-1][1]
        assert isinstance(head, LossHead)
        self.embed, self.head = model.pieces[0][1], head
        self.cores = [cached_core(block) for block in self.blocks]

    def logits(self, tokens: Tensor, last: int) -> Tensor:
        positions = self.advance(tokens)
        x = self.embed(tokens, positions)
        shared = {
            # Derived values, such as rotary angles, are the same for all
            # blocks.
            name: make({"positions": positions}, x.dtype)
            for name, make in self.model.derived.items()
        }
        for block in self.blocks:
            x = block(x, positions=positions, **shared)
        # (B, new, hidden) -> (B, last, vocabulary)
        return self.head.logits(x[:, -last:])


def blocks_of(model: Model) -> list[nn.Module]:
    """The blocks up to the next token; modules that predict later ones are left out."""
    layers = model.shape.layers if model.shape else len(model.pieces) - 2
    return [piece for _, piece in model.pieces[1 : 1 + layers]]


def is_cacheable(model: Model) -> bool:
    """True if a model consists of the built-in decoder's pieces."""
    blocks = blocks_of(model)
    attentions = [getattr(block, "attn", None) for block in blocks]
    cores = [getattr(attention, "core", None) for attention in attentions]
    ends_as_decoder = isinstance(model.pieces[-1][1], LossHead)
    return ends_as_decoder and all(isinstance(core, Core) for core in cores)


def cached_core(block: nn.Module) -> CachedCore:
    """Replace a block's attention core by one with a cache, and return it."""
    attention = block.attn
    # The model's own core has no cache; its weights are outside of it.
    assert isinstance(attention, nn.Module)
    assert isinstance(attention.core, Core)
    attention.core = CachedCore(attention.core)
    return attention.core
