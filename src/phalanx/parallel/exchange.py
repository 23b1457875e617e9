"""Expert parallelism: ranks of `ep` hold different sequences and share the experts.

A block with experts becomes three pieces, so that the program contains the messages
between them: tokens to the ranks that hold their experts, and back. The number of
tokens depends on the data, so ranks exchange counts first, and then that many tokens.
An expert may receive none. Not here: what the pieces compute.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..comm import Group, Work
from .groups import Groups
from .pieces import Bundle
from .works import ChainedWork, WorkGroup

SENT = "sent"  # the bundle's name for tokens that travel


class Choices:
    """The number of times each expert was chosen in a microbatch.

    Counted per sequence, (B, experts), and over the batch, (1, experts). First over
    this rank's tokens, after `sum` over those of all ranks.
    """

    def __init__(self, own: Tensor) -> None:
        self.of_sequences = own.clone()
        self.of_batch = own.sum(0, keepdim=True)

    def sum(self, groups: Groups) -> Work:
        """Start summing over ranks with other tokens of the sequences or the batch."""
        # A group is None if no router has that loss.
        both = (
            (groups.sequences, self.of_sequences),
            (groups.batch, self.of_batch),
        )
        return WorkGroup(
            [group.all_reduce(x, wait=False) for group, x in both if group]
        )


def in_runs(counts: Tensor, ranks: int) -> Tensor:
    """Counts ((parts of time,) experts) by rank: (ranks, parts of time, its experts).

    Every rank gets as many entries as the first; missing experts have a count of zero.
    """
    mlps = counts.shape[-1]
    each = -(-mlps // ranks)
    padded = F.pad(counts, (0, each * ranks - mlps))
    return padded.view(-1, ranks, each).transpose(0, 1).contiguous()


class Routes(NamedTuple):
    """The number of tokens that this rank sends to each rank of ep, and receives."""

    sends: Sequence[int]
    takes: Sequence[int]


class Exchange:
    """Microbatches' tokens on their way to the experts and back, over the ranks of ep."""

    def __init__(
        self, tokens: Group, counts: Group, receivers: Collection[int]
    ) -> None:
        self.tokens, self.counts, self.receivers = (
            tokens,
            counts,
            frozenset(receivers),
        )
        # by (expert piece, microbatch)
        self.pending_counts: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.routes: dict[tuple[int, int], Routes] = {}

    def exchange_counts(
        self, piece: int, microbatch: int, bundle: Bundle
    ) -> Work:
        """Exchange counts of tokens: each rank learns those for its experts.

        Counts are (experts), or (parts of time, experts), and arrive in runs."""
        counts, size = bundle.pop("counts"), self.counts.size
        # One rank holds all experts: nothing to send.
        if size == 1:
            bundle["routes"] = counts.view(-1, counts.shape[-1])
            return Work()
        # (ranks, parts of time, experts of a rank): to send
        ours = in_runs(counts, size)
        # (ranks, parts of time, experts of this rank): the counts that arrive
        theirs = torch.empty_like(ours)
        self.pending_counts[piece, microbatch] = ours, theirs
        bundle["routes"] = theirs.flatten(0, 1)
        return self.counts.all_to_all(theirs, ours, wait=False)

    def begin(
        self, piece: int, microbatch: int, bundle: Bundle, *, gradient: bool
    ) -> Work:
        """Start sending a bundle's tokens into a piece, or their gradients out of it."""
        if self.tokens.size == 1:
            return Work()
        # Tokens enter the piece of experts, or leave it for the piece behind it. The
        # routes of both belong to the piece of experts.
        key = piece if piece in self.receivers else piece - 1, microbatch
        if pending_counts := self.pending_counts.pop(key, None):
            # One read for both: the host waits here until the device has the counts.
            # both: (2, ranks), the tokens sent to each rank and received from it
            both = torch.stack(
                [counts.sum((1, 2)) for counts in pending_counts]
            )
            self.routes[key] = Routes(*both.tolist())
        sends, takes = self.routes[key]
        if (piece in self.receivers) == gradient:  # home from the experts
            sends, takes = takes, sends
        x = bundle[SENT].contiguous()  # (tokens, hidden)
        y = x.new_empty(sum(takes), *x.shape[1:])

        def arrived() -> None:
            bundle[SENT] = y

        return ChainedWork(
            self.tokens.all_to_all(y, x, takes, sends, wait=False), arrived
        )
