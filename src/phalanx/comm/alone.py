"""A world of one rank: every collective with oneself, so that one process is a size and not a branch."""

from collections.abc import Sequence

import torch

from phalanx.comm.base import Call, Group, Work, World
from phalanx.comm.settle import settle


class AloneGroup(Group):
    """A group of one. What it sends to itself waits until it is received."""

    def _begin(self, call: Call) -> Work:
        if call.kind in ("send", "receive"):
            return self._begin_with_itself(call)
        settle([call])
        return Work()


class AloneWorld(World):
    """One rank, which is everybody."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__(0, 1, torch.device(device))

    def _split(
        self, name: str, groups: list[tuple[int, ...]], flows: Sequence[tuple[int, int]]
    ) -> Group:
        return AloneGroup(name, 0, (0,), self.device)
