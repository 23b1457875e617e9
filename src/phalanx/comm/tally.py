"""A group that sends nothing and records what it would have sent.

A piece of a model that runs on meta tensors over tallies counts its messages with the
same code that sends them. Outputs keep their values.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from phalanx.comm.base import Group, Work, World
from torch_shm.calls import Call


@dataclass(frozen=True)
class Message:
    """One call on one group.

    `bytes` is the size of the whole buffer on one rank: the output of an all-gather,
    the input of a reduce-scatter, the root's list for gather and scatter, otherwise
    `x`.
    """

    group: str
    collective: str
    bytes: int
    size: int


class Tally(Group):
    """One rank of a group without other members. Its messages go to `ledger`."""

    ledger: list[Message]

    def _begin(self, call: Call) -> Work:
        if call.kind != "barrier":
            # The buffer that holds every rank's part is the out of an all-gather.
            whole = (
                call.out
                if call.kind == "all_gather" and call.out is not None
                else call.x
            )
            bytes = whole.numel() * whole.element_size()
            # x is one rank's part, and the root has a list of them.
            if call.kind in ("gather", "scatter"):
                bytes *= self.size
            self.ledger.append(Message(self.name, call.kind, bytes, self.size))
        return Work()


class TallyWorld(World):
    """One rank of an imaginary world; `ledger` has all groups' messages in order."""

    def __init__(
        self, rank: int, size: int, device: torch.device | str = "meta"
    ) -> None:
        super().__init__(rank, size, torch.device(device))
        self.ledger: list[Message] = []

    def _split(
        self,
        name: str,
        groups: list[tuple[int, ...]],
        flows: Sequence[tuple[int, int]],
    ) -> Group:
        ranks = self.own(groups)
        group = Tally(name, ranks.index(self.rank), ranks, self.device)
        # All groups of this world write to one list, in the order of the calls.
        group.ledger = self.ledger
        return group
