"""Expert parallelism: ranks of `ep` have other sequences and share the experts.

A block with experts is three pieces, so that what travels between them is operations of the program:
tokens to the ranks that have their experts, and back. How many go where is data: ranks tell one another
first, then exchange as many, and an expert may have none. Not here: what the pieces compute.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..comm import Group, Work
from ..layout import Layout, LayoutError
from ..models import ExpertBlock, ExpertProducts, ExpertsPart
from .groups import Groups
from .model import Model
from .pieces import Bundle
from .works import Then, Together

SENT = "sent"  # in a bundle: the tokens that travel


def cut_blocks(model: Model, layout: Layout) -> Model:
    """The model with three pieces for each block with experts, if these are apart; else with blocks that
    put out what their routers' losses are made of."""
    pieces: list[tuple[str, nn.Module]] = []
    for name, piece in model.pieces:
        if type(piece) is ExpertBlock:
            parts = piece.parts() if layout.experts_apart else (piece.with_losses(),)
            pieces += [(name, part) for part in parts]
            continue
        if layout.experts_apart and not isinstance(piece, ExpertsPart):
            _refuse_hidden_experts(name, piece, layout)
        pieces.append((name, piece))
    changed = tuple(pieces) != tuple(model.pieces)
    return replace(model, pieces=tuple(pieces)) if changed else model


def _refuse_hidden_experts(name: str, piece: nn.Module, layout: Layout) -> None:
    if any(isinstance(module, ExpertProducts) for module in piece.modules()):
        raise LayoutError(
            f"{layout}: {name} has experts and is a {type(piece).__name__}, which does not say where"
            " tokens leave it. Make it an ExpertBlock, or use dp in place of ep and no compile."
        )


class Choices:
    """Counts of the choices of each expert in a microbatch: by the tokens of each sequence (B, experts), and
    by those of the batch (1, experts). This rank's tokens first, then those of all ranks."""

    def __init__(self, own: Tensor) -> None:
        self.of_sequences = own.clone()
        self.of_batch = own.sum(0, keepdim=True)

    def sum(self, groups: Groups) -> Work:
        """Begin to sum over the ranks that have other tokens of the same sequences, or of the batch."""
        both = (groups.sequences, self.of_sequences), (groups.batch, self.of_batch)
        return Together([group.all_reduce(x, wait=False) for group, x in both if group])


class Routes(NamedTuple):
    """Numbers of tokens that this rank sends to each rank of ep, and receives from each."""

    sends: Sequence[int]
    takes: Sequence[int]


class Exchange:
    """Tokens of microbatches on their way to experts and back, over the ranks of ep."""

    def __init__(self, tokens: Group, counts: Group, experts: Collection[int]) -> None:
        self.tokens, self.counts, self.experts = tokens, counts, frozenset(experts)
        # by experts and microbatch
        self.told: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.routes: dict[tuple[int, int], Routes] = {}

    def tell(self, piece: int, microbatch: int, bundle: Bundle) -> Work:
        """Tell each rank how many tokens come to each of its experts; the bundle gets what comes here.
        A rank has as many experts as the first, the last ones maybe fewer."""
        counts, size = bundle.pop("counts"), self.counts.size
        if size == 1:
            bundle["routes"] = counts.view(1, -1)
            return Work()
        each = -(-len(counts) // size)
        ours = F.pad(counts, (0, each * size - len(counts))).view(size, each)
        # from each rank, how many for each expert of this one
        theirs = torch.empty_like(ours)
        self.told[piece, microbatch] = ours, theirs
        bundle["routes"] = theirs
        return self.counts.all_to_all(theirs, ours, wait=False)

    def begin(
        self, piece: int, microbatch: int, bundle: Bundle, *, gradient: bool
    ) -> Work:
        """Begin to send a bundle's tokens into a piece, or their gradients out of it."""
        if self.tokens.size == 1:
            return Work()
        key = piece if piece in self.experts else piece - 1, microbatch
        if told := self.told.pop(key, None):
            # One read: the host waits here until the device has the counts.
            both = torch.stack([counts.sum(1) for counts in told])
            self.routes[key] = Routes(*both.tolist())
        sends, takes = self.routes[key]
        if (piece in self.experts) == gradient:  # home from the experts
            sends, takes = takes, sends
        x = bundle[SENT].contiguous()
        y = x.new_empty(sum(takes), *x.shape[1:])

        def arrived() -> None:
            bundle[SENT] = y

        return Then(self.tokens.all_to_all(y, x, takes, sends, wait=False), arrived)
