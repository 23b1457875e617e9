"""A world of one rank: every collective with oneself, so that one process is a size and not a branch."""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.comm.base import Call, CommError, Group, Work, World
from phalanx.comm.settle import settle


class AloneGroup(Group):
    """A group of one. What it sends to itself waits until it is received."""

    def __init__(self, name: str, rank: int, device: torch.device) -> None:
        super().__init__(name, 0, (rank,), device)
        self._sent: deque[Tensor] = deque()

    def _begin(self, call: Call) -> Work:
        if call.kind == "send":
            self._sent.append(call.x.detach().clone())
        elif call.kind == "receive":
            if not self._sent:
                raise CommError(f"receive on {self.name}: the only rank waits for itself.")
            settle([Call("send", self._sent.popleft()), call])
        else:
            settle([call])
        return Work()


class AloneWorld(World):
    """One rank, which is everybody."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__(0, 1, torch.device(device))

    def _split(
        self, name: str, groups: list[tuple[int, ...]], flows: Sequence[tuple[int, int]]
    ) -> Group:
        return AloneGroup(name, self.rank, self.device)
