"""Threads for updates on the host of a GPU.

Launchers such as torchrun give each process one thread, so that ranks on one host do not crowd each
other. `offload:optimizer` updates the weights on the host, whose cores are idle then: each rank takes
an equal part of the cores it may use.
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

Home = tuple[str, list[int]]  # a rank's host, and the cores that it may use


def use_threads_of_host(everyone: Group) -> None:
    """Computes on this host with as many threads as it has for each rank. All ranks call it."""
    own: Home = place(), _allowed_cores()
    texts = exchange(everyone, json.dumps(own))
    homes: list[Home] = [(where, allowed) for where, allowed in map(json.loads, texts)]
    torch.set_num_threads(threads_of(own, homes))


def threads_of(own: Home, homes: Sequence[Home]) -> int:
    """The threads of one rank: its part of each core that it may use, at least one."""
    where, allowed = own
    users = Counter[int]()
    for other, its in homes:
        if other == where:
            users.update(its)
    share = sum(Fraction(1, users[core]) for core in allowed)
    return max(1, int(share))


def _allowed_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(cores()))
