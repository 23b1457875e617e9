"""A group that sends nothing and writes down what would have been sent.

A piece of a model run on meta tensors over tallies costs its messages with the very lines that
send them. Outputs keep whatever they held.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from phalanx.comm.base import Group, Work, World
from torch_shm.calls import Call


@dataclass(frozen=True)
class Message:
    """One call on one group.

    `bytes` is the whole buffer the collective is about, on one rank: for all-gather what comes out,
    for reduce-scatter what goes in, for gather and scatter the root's list together, else `x`.
    """

    group: str
    collective: str
    bytes: int
    size: int


class Tally(Group):
    """One rank of a group that has no other members; its messages go to `ledger`."""

    ledger: list[Message]

    def _begin(self, call: Call) -> Work:
        if call.kind != "barrier":
            whole = (
                call.out
                if call.kind == "all_gather" and call.out is not None
                else call.x
            )
            bytes = whole.numel() * whole.element_size()
            if call.kind in ("gather", "scatter"):
                bytes *= self.size
            self.ledger.append(Message(self.name, call.kind, bytes, self.size))
        return Work()


class TallyWorld(World):
    """One rank of a world that is not there; `ledger` holds the messages of all its groups in order."""

    def __init__(
        self, rank: int, size: int, device: torch.device | str = "meta"
    ) -> None:
        super().__init__(rank, size, torch.device(device))
        self.ledger: list[Message] = []

    def _split(
        self, name: str, groups: list[tuple[int, ...]], flows: Sequence[tuple[int, int]]
    ) -> Group:
        ranks = self.own(groups)
        group = Tally(name, ranks.index(self.rank), ranks, self.device)
        group.ledger = self.ledger
        return group
