"""Context parallelism of gated delta rule layers: ranks gather their changes of the state.

The state at the end of a run of tokens is `M S + N`, where S is the state at its start
and M and N depend on the run's own tokens alone. So each rank computes M and N of its
runs, all ranks gather them, and each combines those before its own: no rank waits for
another one's state. Keys and values do not travel. A message holds M and N;
its size does not grow with the sequence.

A rank of a ring holds one chunk of each half of the sequence (`batch.held_times`), so
it has two runs; the ranks of Ulysses alone hold one each. The convolution needs the last
tokens before each run, which are gathered too.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..comm import Group, regions
from ..models.delta import ChunkTerms, DeltaCore
from .batch import held_times


class SpreadDeltaCore(DeltaCore):
    """A delta rule whose sequence is spread over the ranks of a ring and of Ulysses."""

    def __init__(self, plain: DeltaCore, ring: Group, ulysses: Group) -> None:
        super().__init__(plain.key_dim, plain.value_dim, plain.chunk)
        self.ring, self.ulysses = ring, ulysses
        # Ulysses divides the two chunks of a ring's rank. An even number of ranks cuts
        # between them, an odd number leaves both in the middle one.
        self.runs = 2 if ring.size > 1 and ulysses.size % 2 else 1

        self.own = ring.rank * ulysses.size + ulysses.rank
        # Two tokens for each run are enough to tell their order.
        firsts = self._times_of_all(2 * self.runs)[:, 0]
        self.order: list[int] = firsts.argsort().tolist()
        mine = range(self.own * self.runs, (self.own + 1) * self.runs)
        # The places of this rank's runs in the order of time.
        self.places = [self.order.index(run) for run in mine]
        # The indices of held tokens, by their number, those before them and the device.
        self._wanted: dict[tuple[int, int, torch.device], Tensor] = {}

    def _times_of_all(self, length: int) -> Tensor:
        """The token indices of all runs, those of one rank after another's."""
        ring, ulysses = self.ring.size, self.ulysses.size
        ranks = ring * ulysses
        every = [
            held_times(length * ranks, ring, ulysses, rank)
            for rank in range(ranks)
        ]
        return torch.cat(every).view(ranks * self.runs, -1)

    def held_ids(self, ids: Tensor, length: int, before: int) -> Tensor:
        known = length, before, ids.device
        if known not in self._wanted:
            first = self.own * self.runs
            times = self._times_of_all(length)[first : first + self.runs]
            # The padding in front moves all of them by `before`.
            early = times[:, :1] + torch.arange(before)
            both = torch.cat((early, times + before), 1)
            self._wanted[known] = both.to(ids.device)
        wanted = self._wanted[known]
        every = super().held_ids(ids, length, before)
        return every[:, wanted.flatten()].view(-1, wanted.shape[1])

    def in_order(self, x: Tensor) -> list[Tensor]:
        """Gather (B * runs, ...) of all ranks: (B, ...) for each run, ordered by time."""
        x = x.reshape(-1, self.runs, *x.shape[1:]).transpose(0, 1)
        x = x.contiguous()
        x = regions.gather_sum(x, self.ulysses, 0)
        every = regions.gather_sum(x, self.ring, 0).unbind()
        return [every[run] for run in self.order]

    def tokens_before(self, x: Tensor, count: int) -> Tensor:
        kept = min(count, x.shape[1])
        tails = self.in_order(x[:, x.shape[1] - kept :])
        # (B, all runs * kept, channels), behind as many zeros as tokens are needed
        line = F.pad(torch.cat(tails, 1), (0, 0, count, 0))
        starts = [place * kept for place in self.places]
        found = [line[:, start : start + count] for start in starts]
        return torch.stack(found, 1).flatten(0, 1)

    def states_before(self, terms: ChunkTerms) -> Tensor:
        moves, adds = terms.total()
        # One message for both: (B, heads ..., key_dim, key_dim + value_dim) of each run
        every = self.in_order(torch.cat((moves, adds), -1))
        state = torch.zeros_like(adds[: len(every[0])])
        found = []
        for run in every:
            found.append(state)
            move, add = torch.split(run, [adds.shape[-2], adds.shape[-1]], -1)
            state = move @ state + add
        # From the states of all runs: the first rank's state before its first run is zero
        # and needs no message, but its backward has to send as all others do.
        states = torch.stack(found, 1)
        own = [states[:, place] for place in self.places]
        return torch.stack(own, 1).flatten(0, 1)
