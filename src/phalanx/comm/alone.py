"""A world of one rank, so that running on one process is a size and not a special case."""

from collections.abc import Sequence

import torch

from phalanx.comm.base import Group, World


class AloneWorld(World):
    """A world whose only rank is this process."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__(0, 1, torch.device(device))

    def _split(
        self,
        name: str,
        groups: list[tuple[int, ...]],
        flows: Sequence[tuple[int, int]],
    ) -> Group:
        # `Group` itself is a group of one: a call is computed on this rank's tensors.
        return Group(name, 0, (0,), self.device)
