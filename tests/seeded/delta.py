"""Seeded faults of gated delta rule layers: states, documents, decay and ranks of cp."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from phalanx.models import delta
from phalanx.models.delta import ChunkTerms, DeltaCore
from phalanx.parallel.delta import SpreadDeltaCore

from .fault import fault, swapped

FIRST = "step 0: the output of layers.0"


@fault(
    "delta: the state passes the end of a document",
    "delta",
    "dp2",
    FIRST,
    packed=True,
)
def _() -> AbstractContextManager[None]:
    right = delta._in_chunks_of_ids

    def all_same(ids: Tensor, chunk: int) -> Any:
        return right(torch.zeros_like(ids), chunk)

    return swapped(delta, "_in_chunks_of_ids", all_same)


@fault(
    "delta: documents are apart within a chunk only",
    "delta",
    "dp2",
    FIRST,
    packed=True,
)
def _() -> AbstractContextManager[None]:
    right = delta._in_chunks_of_ids

    def inside(ids: Tensor, chunk: int) -> Any:
        found = right(ids, chunk)
        through = torch.ones_like(found.through)
        return found._replace(through=through)

    return swapped(delta, "_in_chunks_of_ids", inside)


@fault(
    "delta: the convolution reads the document before",
    "delta",
    "dp2",
    FIRST,
    packed=True,
)
def _() -> AbstractContextManager[None]:
    right = delta.short_convolution

    def unaware(x: Tensor, taps: Tensor, ids: Tensor | None) -> Tensor:
        return right(x, taps, None)

    return swapped(delta, "short_convolution", unaware)


@fault("delta: decay is applied twice", "delta", "dp2", FIRST)
def _() -> AbstractContextManager[None]:
    right = delta.chunk_terms

    def faster(
        q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *more: Any
    ) -> ChunkTerms:
        return right(q, k, v, 2 * log_decay, *more)

    return swapped(delta, "chunk_terms", faster)


@fault("delta: chunks start with an empty state", "delta", "tp2", FIRST)
def _() -> AbstractContextManager[None]:
    def states(self: ChunkTerms, first: Tensor) -> Tensor:
        return torch.zeros_like(self.adds)

    return swapped(ChunkTerms, "states", states)


@fault(
    "cp: a run starts with the state of another rank", "delta", "cp2", FIRST
)
def _() -> AbstractContextManager[None]:
    right = SpreadDeltaCore.in_order

    def in_order(self: SpreadDeltaCore, x: Tensor) -> list[Tensor]:
        found = right(self, x)
        return [found[place] for place in self.order]

    return swapped(SpreadDeltaCore, "in_order", in_order)


@fault("cp: a run starts with an empty state", "delta", "cp2:ulysses", FIRST)
def _() -> AbstractContextManager[None]:
    return swapped(SpreadDeltaCore, "states_before", DeltaCore.states_before)


@fault("cp: the convolution of a run starts with zeros", "delta", "cp2", FIRST)
def _() -> AbstractContextManager[None]:
    return swapped(SpreadDeltaCore, "tokens_before", DeltaCore.tokens_before)


@fault(
    "cp: the gradient of a state is not returned",
    "delta",
    "cp2",
    "step 0: the gradient of layers.",
)
def _() -> AbstractContextManager[None]:
    right = SpreadDeltaCore.states_before

    def states_before(self: SpreadDeltaCore, terms: ChunkTerms) -> Tensor:
        return right(self, terms).detach()

    return swapped(SpreadDeltaCore, "states_before", states_before)


@fault(
    "cp: documents are those of the first tokens",
    "delta",
    "cp2",
    FIRST,
    packed=True,
)
def _() -> AbstractContextManager[None]:
    def held_ids(
        self: SpreadDeltaCore, ids: Tensor, length: int, before: int
    ) -> Tensor:
        every = DeltaCore.held_ids(self, ids, length, before)
        first = every[:, : before + length // self.runs]
        return first.repeat_interleave(self.runs, 0)

    return swapped(SpreadDeltaCore, "held_ids", held_ids)
