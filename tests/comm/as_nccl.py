"""A world of gloo processes that takes every branch written for NCCL: a communicator for each flow,
torch's own all-gather and reduce-scatter, batches of sends and receives. Only the device differs.

It also keeps NCCL's rule of connections: a communicator is connected inside its first collective, and
inside its first send or receive, and there the host waits until its peers have come as well. Here that
wait is a barrier of the communicator. Ranks that make first calls in crossed orders hang, as on GPUs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from phalanx.comm import Group, World, process, workers
from phalanx.comm.base import Work
from phalanx.comm.process import Pending, ProcessWorld, TorchGroup
from phalanx.layout import Layout
from phalanx.parallel import build_model, open_groups
from phalanx.training.program import program_of
from phalanx.verification import SHAPES
from torch_shm.calls import Call


class AsNccl(ProcessWorld):
    """The same ranks as `world`, whose default group it uses."""

    def __init__(self, world: ProcessWorld) -> None:
        World.__init__(self, world.rank, world.size, world.device)
        self.native, self._timeout = True, world._timeout

    def _connect(
        self, line: dist.ProcessGroup, source: int, target: int
    ) -> None:
        connect(line, "peers")
        super()._connect(line, source, target)

    def _connect_all(self, group: dist.ProcessGroup) -> None:
        connect(group, "collectives")
        super()._connect_all(group)


# What each communicator is connected for: "peers" or "collectives".
_connected: weakref.WeakKeyDictionary[Any, set[str]] = (
    weakref.WeakKeyDictionary()
)


def connect(group: Any, kind: str) -> None:
    """Wait for the members of a communicator if this is its first call of a kind."""
    kinds = _connected.setdefault(group, set())
    if kind not in kinds:
        kinds.add(kind)
        dist.barrier(group=group)


class ConnectingGroup(TorchGroup):
    """A group whose first collective, and first send or receive, waits for all members."""

    def _begin(self, call: Call) -> Work:
        if not self._alone(call) and call.kind not in ("send", "receive"):
            connect(self._group, "collectives")
        return super()._begin(call)

    def _transfer(
        self, begin: Callable[..., Any], call: Call, x: torch.Tensor
    ) -> Pending:
        connect(self._communicator(call), "peers")
        return super()._transfer(begin, call, x)


def split_group(
    split_ranks: list[list[int]],
    timeout: timedelta,
    pg_options: Any,
    group_desc: str,
) -> Any:
    """In place of torch's, which is for NCCL only: the groups part all ranks; this rank's own."""
    members = sorted(rank for ranks in split_ranks for rank in ranks)
    assert members == list(range(dist.get_world_size())), split_ranks
    made = [
        dist.new_group(ranks, timeout, group_desc=group_desc)
        for ranks in split_ranks
    ]
    return next(
        group
        for group in made
        if group is not dist.GroupMember.NON_GROUP_MEMBER
    )


def as_nccl(world: ProcessWorld, fn: Callable[..., Any], *args: Any) -> Any:
    with (
        patch.object(dist, "split_group", split_group),
        patch.object(process, "TorchGroup", ConnectingGroup),
    ):
        return fn(AsNccl(world), *args)


@contextmanager
def nccl_worlds(size: int) -> Iterator[Callable[..., list[Any]]]:
    """What `verify` takes in place of the name of a transport."""
    with workers(size, backend="gloo", timeout=60.0) as run:
        yield lambda fn, *args: run(as_nccl, fn, *args)


def use_every_group(world: World, texts: list[str]) -> list[int]:
    """Open the groups of each layout, sum on each of them, send along each flow of its program; the
    number of groups of more than one rank that this rank was in, for each layout."""
    # With DETAIL torch compares what the members of a group call, and raises where they differ.
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    counts = []
    for text in texts:
        layout = Layout.parse(text)
        model = build_model(SHAPES["gpt"])
        program = program_of(model, layout)
        groups = open_groups(world, layout, model, program)
        counts.append(0)
        units = [
            group
            for unit in groups.units
            for group in (*vars(unit).values(), *unit.also.values())
        ]
        every = [
            group
            for group in (*vars(groups).values(), *units)
            if isinstance(group, Group)
        ]
        for group in dict.fromkeys(every):
            x = torch.tensor([1.0 + world.rank])
            group.all_reduce(x)
            assert x.item() == sum(1.0 + rank for rank in group.ranks), (
                text,
                group.name,
            )
            counts[-1] += group.size > 1
        sends = [op for row in program.rows for op in row if op.kind == ">"]
        for group, forward in (
            (groups.activations, True),
            (groups.gradients, False),
        ):
            ends = {
                (op.piece, op.peer)
                for op in sends
                if (op.of == "F") == forward
            }
            stages = {
                (program.host[piece], program.host[peer])
                for piece, peer in ends
            }
            assert bool(stages) == (layout.pp > 1), text
            for i, j in sorted(stages):
                send_along(group, i, j)
        for i in range(groups.ring.size if groups.ring.size > 1 else 0):
            send_along(groups.ring, i, (i + 1) % groups.ring.size)
        world.clear()
    dist.set_debug_level(dist.DebugLevel.OFF)
    return counts


def send_along(group: Any, i: int, j: int) -> None:
    if group.rank == i:
        group.send(torch.tensor([10.0 * i + j]), j)
    if group.rank == j:
        x = torch.empty(1)
        group.receive(x, i)
        assert x.item() == 10.0 * i + j
