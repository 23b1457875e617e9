"""The table of mixers: the layers between tokens that a block of the decoder may have.

A block calls its mixer as `mixer(x, positions, documents, noise, angles)` and adds what
it returns, (B, T, hidden), to the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from . import attention, delta
from .attention import Attention, HeadsAttention, LatentAttention
from .delta import GatedDelta
from .sizes import DecoderSizes

# Fills a weight that only this mixer has with its initial values; False for any other.
Draw = Callable[[str, Tensor, torch.Generator | None], bool]


class Mixer(NamedTuple):
    """A kind of mixer: how a block gets one, and its lines of the decoder's rule table."""

    kind: type[nn.Module]  # of all modules that `make` returns
    # From the model's sizes and the tokens to which the block attends, 0 for all.
    make: Callable[[DecoderSizes, int], nn.Module]
    rules: str
    draw: Draw | None = None  # None: as the decoder draws all weights


def _attention(sizes: DecoderSizes, window: int) -> nn.Module:
    kind = LatentAttention if sizes.kv_latent else Attention
    return kind(sizes, window)


def _gated_delta(sizes: DecoderSizes, window: int) -> nn.Module:
    return GatedDelta(sizes)


# By its word in `DecoderSizes.mixers`. The first one is in models without that list.
MIXERS = {
    "attention": Mixer(HeadsAttention, _attention, attention.RULES),
    "delta": Mixer(GatedDelta, _gated_delta, delta.RULES, delta.draw),
}
RULES = "".join(mixer.rules for mixer in MIXERS.values())
KINDS = tuple(mixer.kind for mixer in MIXERS.values())


def mixer_of(sizes: DecoderSizes, number: int) -> nn.Module:
    """The mixer of the block of this number."""
    names = sizes.mixers or tuple(MIXERS)[:1]
    windows = sizes.windows or (0,)
    mixer = MIXERS[names[number % len(names)]]
    return mixer.make(sizes, windows[number % len(windows)])


def draw(name: str, weight: Tensor, generator: torch.Generator | None) -> bool:
    """Fill a weight that only one mixer has with its initial values."""
    draws = (mixer.draw for mixer in MIXERS.values() if mixer.draw)
    return any(each(name, weight, generator) for each in draws)
