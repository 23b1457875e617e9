"""CPU threads for optimizer updates on the host of a GPU.

Launchers such as torchrun give each process one thread, so that ranks on one host do
not compete. `offload:optimizer` updates the weights on the host, whose cores are idle
meanwhile: each rank takes an equal share of the cores it may use.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import torch

from rank_watch.hosts import place

from ..comm import Group
from ..comm.agree import exchange
from ..comm.devices import cores

Home = tuple[str, list[int]]  # a rank's host, and the cores it may use


def use_threads_of_host(everyone: Group) -> None:
    """Set this process's thread count to its share of the host's cores. Collective."""
    own: Home = place(), _allowed_cores()
    texts = exchange(everyone, json.dumps(own))
    homes: list[Home] = [
        (where, allowed) for where, allowed in map(json.loads, texts)
    ]
    torch.set_num_threads(threads_of(own, homes))


def threads_of(own: Home, homes: Sequence[Home]) -> int:
    """Return the number of threads of one rank: its share of the cores that it may use,
    at least one."""
    where, allowed = own
    # Ranks of this host that may use each core.
    users = Counter[int]()
    for other, its in homes:
        if other == where:
            users.update(its)
    # A core that several ranks may use counts in equal parts.
    share = sum(Fraction(1, users[core]) for core in allowed)
    return max(1, int(share))


def _allowed_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(cores()))
