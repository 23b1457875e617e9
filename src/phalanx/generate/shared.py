"""The built-in decoder over the ranks of tp and pp, with a cache of keys and values.

All ranks take part in each pass and get the same logits, so each chooses the same next
token: no token is sent. A stage computes its pieces as in training, with the sums over
tp inside. Then its first rank broadcasts the activations of the new tokens to all ranks.
At the end each tp rank of the last stage fills in the logits of its words, and all ranks
sum them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..comm import World
from ..layout import Layout
from ..layout.mixers import rows_in
from ..layout.rules import Cut
from ..models.ends import LossHead
from ..models.loss import whole_logits
from ..parallel import Model
from ..parallel.local import build_local, model_stages
from ..program import Program
from .cached import CachingReader, cached_core, is_cacheable
from .sampling import GenerateError


class SharedReader(CachingReader):
    """One rank's part of a decoder that reads tokens together with the other ranks.

    `weights` are read by name, one at a time: this rank keeps its parts alone.
    """

    def __init__(
        self,
        world: World,
        layout: Layout,
        model: Model,
        program: Program,
        weights: Mapping[str, Tensor],
    ) -> None:
        mixers = rows_in(model.shape) if model.shape is not None else ()
        for mixer in mixers:
            if not mixer.cached:
                raise GenerateError(
                    f"{mixer.name} layers have no cache, so the model is not sampled over"
                    " ranks. Leave --layout out."
                )
        if not is_cacheable(model):
            raise GenerateError(
                "only the built-in decoder is sampled over ranks. Leave --layout out."
            )
        assert model.shape is not None  # set for every built-in decoder
        self.shape, self.layout = model.shape, layout
        self.stages = model_stages(model, layout)
        self.last = len(model.pieces) - 1
        # A module that is changed for tp no longer shows what it was.
        self.local = build_local(world, layout, model, program, seed=None)
        self.local.fill(weights)
        self.everyone = self.local.groups.everyone
        # Embedding and head have no attention, and later tokens are not predicted.
        self.cores = [
            cached_core(piece.module)
            for number, piece in self.local.pieces.items()
            if 0 < number <= self.shape.layers
        ]

    def logits(self, tokens: Tensor, last: int) -> Tensor:
        positions = self.advance(tokens)
        derived = self.local.complete({"positions": positions})
        # On ranks that do not hold the stage, these are filled by the
        # broadcast and the sum.
        x = torch.zeros(*tokens.shape, self.shape.hidden)  # (B, new, hidden)
        every = torch.zeros(len(tokens), last, self.shape.vocab)
        for stage, pieces in enumerate(self.stages):
            # A rank computes while its own stage is at work, and waits in the
            # broadcast of others.
            mine = self.local.coordinates["pp"] == stage
            for number in pieces if mine else ():
                module = self.local.pieces[number].module
                if number == 0:
                    x = module(tokens, positions)
                elif number <= self.shape.layers:
                    x = module(x, **derived)
                elif number == self.last:
                    self._fill_own_words(module, x[:, -last:], every)
            # After the last stage only logits are needed.
            if stage + 1 < len(self.stages):
                x = x.contiguous()
                # Within a stage all tp ranks have the same activations, so its
                # first rank sends them.
                self.everyone.broadcast(x, self._first_of(stage))
        # Each word's logits are on one rank and zero on the others, so the sum
        # puts them together.
        self.everyone.all_reduce(every)
        return every

    def _fill_own_words(
        self, head: nn.Module, x: Tensor, every: Tensor
    ) -> None:
        """Write the logits of this rank's words into those of all words."""
        assert isinstance(head, LossHead)
        tp = self.local.coordinates["tp"]
        own = Cut.of(self.shape.vocab, self.layout.tp, tp)
        width = own.stop - own.start  # the columns after them are padding
        logits = whole_logits(head.logits(x))
        every[..., own.start : own.stop] = logits[..., :width]

    def _first_of(self, stage: int) -> int:
        """The first rank of a stage."""
        places = map(self.layout.mesh.coordinates, range(self.layout.ranks))
        return next(
            rank
            for rank, place in enumerate(places)
            if place.get("pp", 0) == stage
        )
