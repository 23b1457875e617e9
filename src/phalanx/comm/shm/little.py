"""Small all-reduces that are waited for at once, which is what tensor parallelism of small models and
agreeing on a number are made of: one round, as `rounds.py` has it, in as few steps as Python allows.

Members may come to the same call by this way and by the other; what they lay down is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.comm.base import HALVES, Call, Group, check
from phalanx.comm.settle import STEPS, reduce_into
from phalanx.comm.shm.rounds import LITTLE
from phalanx.comm.shm.table import Table, keep_order


class Plan(NamedTuple):
    """What such a call touches, in one of the two turns."""

    promise: tuple[bytes, int]
    mine: Tensor
    parts: list[Tensor]  # of all members, in group order
    step: Callable[..., Tensor] | None  # two parts into one


class Little:
    """The small all-reduces of one member. `wait` is called when the others are not there soon."""

    def __init__(self, table: Table, group: Group, wait: Callable[[], None]) -> None:
        self._table, self._group, self._wait = table, group, wait
        self._plans: dict[tuple[str, torch.Size, torch.dtype, int], Plan] = {}

    def all_reduce(self, x: Tensor, op: str) -> bool:
        """True when it is done; False if this call has to go the other way."""
        t = self._table
        if t.calls or t.owed or x.requires_grad:
            return False
        turn = (t.count + 1) & 1
        key = op, x.shape, x.dtype, turn
        plan = self._plans.get(key) or self._plan(x, op, key)
        if plan is None or not x.is_contiguous():
            return False
        plan.mine.copy_(x)
        t.note(plan.promise, -1)
        t.come()
        for _ in range(20):
            if t.ready():
                break
        else:
            self._wait()
        keep_order()
        t.compare()
        t.made += 1
        if plan.step is None:
            reduce_into(x, plan.parts, op)
        else:
            plan.step(*plan.parts, out=x)
        return True

    def _plan(
        self, x: Tensor, op: str, key: tuple[str, torch.Size, torch.dtype, int]
    ) -> Plan | None:
        call = Call("all_reduce", x, op=op)
        check(self._group, call)
        n = x.numel()
        if not n or n * x.itemsize > LITTLE:
            return None
        t = self._table
        parts = [t.view(i, key[3], 0, n, x.dtype).view(x.shape) for i in range(t.size)]
        plain = t.size == 2 and x.dtype not in HALVES and op != "average"
        if len(self._plans) > 500:
            self._plans.clear()
        plan = Plan(t.promise(call), parts[t.rank], parts, STEPS[op] if plain else None)
        self._plans[key] = plan
        return plan
