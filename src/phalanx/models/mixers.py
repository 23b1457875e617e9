"""The table of mixers: the layers between tokens that a block of the decoder may have.

A block calls its mixer as `mixer(x, positions, documents, noise, angles, document_ids)`
and adds what it returns, (B, T, hidden), to the residual stream. The last two are
tensors that are derived from a batch once and used by all blocks: see `derived`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import attention, delta
from .attention import Attention, HeadsAttention, LatentAttention
from .delta import GatedDelta
from .rope import SharedAngles
from .sizes import DecoderSizes

# Makes a tensor for all blocks from a batch and the activations' dtype, or None if the
# batch lacks its source.
Derive = Callable[[Mapping[str, Any], torch.dtype], Tensor | None]
# Fills a weight that only this mixer has with its initial values; False for any other.
Draw = Callable[[str, Tensor, torch.Generator | None], bool]


class Mixer(NamedTuple):
    """A kind of mixer: how a block gets one, and its lines of the decoder's rule table."""

    kind: type[nn.Module]  # of all modules that `make` returns
    # From the model's sizes and the tokens to which the block attends, 0 for all.
    make: Callable[[DecoderSizes, int], nn.Module]
    rules: str
    # Tensors that all blocks share, by the names of arguments.
    derived: Callable[[DecoderSizes], dict[str, Derive]]
    draw: Draw | None = None  # None: as the decoder draws all weights


def _attention(sizes: DecoderSizes, window: int) -> nn.Module:
    kind = LatentAttention if sizes.kv_latent else Attention
    return kind(sizes, window)


def _angles(sizes: DecoderSizes) -> dict[str, Derive]:
    if not sizes.ropes:
        return {}
    return {"angles": SharedAngles(sizes.ropes, sizes.turned_dim)}


def _gated_delta(sizes: DecoderSizes, window: int) -> nn.Module:
    return GatedDelta(sizes)


def _ids(sizes: DecoderSizes) -> dict[str, Derive]:
    return {"document_ids": delta.shared_ids}


# By its word in `DecoderSizes.mixers`. The first one is in models without that list.
MIXERS = {
    "attention": Mixer(HeadsAttention, _attention, attention.RULES, _angles),
    "delta": Mixer(GatedDelta, _gated_delta, delta.RULES, _ids, delta.draw),
}
RULES = "".join(mixer.rules for mixer in MIXERS.values())
KINDS = tuple(mixer.kind for mixer in MIXERS.values())


def _names(sizes: DecoderSizes) -> tuple[str, ...]:
    return sizes.mixers or tuple(MIXERS)[:1]


def derived(sizes: DecoderSizes) -> dict[str, Derive]:
    """The tensors derived from a batch that the mixers of a model take."""
    found = dict[str, Derive]()
    for name in dict.fromkeys(_names(sizes)):
        found |= MIXERS[name].derived(sizes)
    return found


def mixer_of(sizes: DecoderSizes, number: int) -> nn.Module:
    """The mixer of the block of this number."""
    names = _names(sizes)
    windows = sizes.windows or (0,)
    mixer = MIXERS[names[number % len(names)]]
    return mixer.make(sizes, windows[number % len(windows)])


def draw(name: str, weight: Tensor, generator: torch.Generator | None) -> bool:
    """Fill a weight that only one mixer has with its initial values."""
    draws = (mixer.draw for mixer in MIXERS.values() if mixer.draw)
    return any(each(name, weight, generator) for each in draws)
