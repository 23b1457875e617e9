"""A world of processes on one machine over shared memory, by `torch_shm`."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.comm.base import Group, Work, World
from rank_watch.positions import WAITS, Positions
from torch_shm.arena import Extent
from torch_shm.calls import Call
from torch_shm.world import SharedGroup, SharedWorld

_COMPLETE = Work()


class ShmGroup(Group):
    """A group of ranks that share memory, as one of them sees it."""

    def __init__(self, world: "ShmWorld", shared: SharedGroup) -> None:
        super().__init__(shared.name, shared.rank, shared.ranks, world.device)
        self._shared = shared

    def all_reduce(
        self, x: Tensor, op: str = "sum", *, wait: bool = True
    ) -> Work:
        """Reduce over the group; small, urgent tensors take a shorter path."""
        if self._adds_in_tree(op):
            return super().all_reduce(x, op, wait=wait)
        number, positions = 0, self.positions
        if wait and self.size > 1:
            # Recorded once, for the short path and for the long one behind it.
            if positions is not None:
                begun, number = (
                    time.perf_counter(),
                    self.record(positions, "all_reduce", x, op),
                )
                positions.words[WAITS] = number
            if self._shared.small_all_reduce(x, op):
                if positions is not None:
                    positions.words[WAITS] = 0
                    positions.waits.append((begun, time.perf_counter()))
                # In place already: a completed work takes no wait.
                return _COMPLETE
        return self._do(Call("all_reduce", x, op=op), wait, number)

    def _begin(self, call: Call) -> Work:
        return (
            super()._begin(call)
            if self._alone(call)
            else self._shared.begin(call)
        )

    def close(self) -> None:
        """Close with every member, so that none leaves while its data is being read."""
        # After the barrier no member reads another's memory any more.
        if not self._shared.closed:
            self.barrier()
            self._shared.release()


class ShmWorld(World):
    """This process as one rank of an arena. `path` is opened once."""

    def __init__(
        self, path: str, extent: Extent, rank: int, *, timeout: float
    ) -> None:
        super().__init__(rank, extent.ranks, torch.device("cpu"))
        self._shared = SharedWorld(path, extent, rank, timeout=timeout)

    def _split(
        self,
        name: str,
        groups: list[tuple[int, ...]],
        flows: Sequence[tuple[int, int]],
    ) -> Group:
        # Shared memory needs no flows: any pair may send.
        return ShmGroup(self, self._shared.split(name, groups))

    def record(self, positions: Positions | None) -> None:
        super().record(positions)
        self._shared.watch.watched = (
            positions is not None and positions.watched
        )

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._shared.empty(numel, dtype)

    def fail(self, failure: str) -> None:
        """Tell the other ranks why this one ends. They raise it wherever they wait."""
        self._shared.fail(failure)

    def leave(self) -> None:
        """End this rank's calls without waiting for others, who may be gone already."""
        self._shared.leave()

    def close(self) -> None:
        """Leave together, so that no rank takes one that has left for one that is lost."""
        self.clear()
        self._shared.close()
