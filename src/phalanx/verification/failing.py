"""Tests of a transport before layouts train over it: ranks that fail or differ.

When a rank raises, all others must end at their next call, whatever they wait for, and
the report must name that rank first. Ranks exchange their errors and facts, and every
rank must receive those of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NoReturn

import torch

from ..comm import Group, RankFailed, Work, World
from ..comm.agree import (
    PeerFailed,
    RanksDiffer,
    agreement,
    broadcast_text,
    errors_of,
    exchange,
)
from ..comm.launch import Runner
from ..comm.threads import ThreadWorld

# Longer than one message of an exchange. Each character has two bytes.
_LONG = "ä" * 40_000
Faults = Iterator[str]


class _PlannedError(Exception):
    """The error that a rank raises for the test."""


def failure_fault(size: int, run: Runner) -> str:
    """Return the first wrong exchange of texts or report of a failed rank, or "".

    Only threads are made to fail: processes would have to be started again.
    """
    if wrong := next(filter(None, run(agreement_fault)), ""):
        return wrong
    if not all(run(_is_thread)):
        return ""
    for number, call in enumerate(_CALLS):
        # The first rank, or the last.
        bad = (size - 1) * (number % 2)
        try:
            run(_failing, bad, call)
        except RankFailed as error:
            if wrong := next(_report_faults(error, bad, size), ""):
                return wrong
        else:
            return f"rank {bad} raises, and no error reaches the launcher"
    return ""


# Calls in which the others wait for the rank that raises.
_CALLS: tuple[Callable[[Group, int], None], ...] = (
    lambda group, bad: group.all_reduce(torch.ones(1)).wait(),
    lambda group, bad: group.receive(torch.empty(1), bad).wait(),
    lambda group, bad: _gathered(group).wait(),
)


def _gathered(group: Group) -> Work:
    """An all-gather that the caller waits for later."""
    out = torch.empty(group.size)
    return group.all_gather(out, torch.ones(1), wait=False)


def _is_thread(world: World) -> bool:
    return isinstance(world, ThreadWorld)


def _failing(
    world: World, bad: int, call: Callable[[Group, int], None]
) -> None:
    """Raise on one rank, while the others wait for it in a call."""
    ranks = range(world.size)
    links = [(a, b) for a in ranks for b in ranks if a != b]
    group = world.split("failing", [ranks], links)
    group.all_reduce(torch.ones(1))
    if world.rank == bad:
        raise _PlannedError("on purpose")
    call(group, bad)


def _report_faults(error: RankFailed, bad: int, size: int) -> Faults:
    planned = "_PlannedError: on purpose"
    first = f"rank {bad} failed: {planned}"
    if error.rank != bad or not str(error).startswith(first):
        yield f"rank {bad} failed, but the report begins: {str(error).splitlines()[0]}"
    ranks = sorted(report.rank for report in error.reports)
    if ranks != [*range(size)]:
        yield f"rank {bad} failed, and only the ranks {ranks} ended"
    for report in error.reports:
        if report.secondary != (report.rank != bad):
            yield f"rank {bad} failed, and so is said of rank {report.rank}: {report.error}"
        if planned not in report.error:
            yield f"rank {bad} failed, but rank {report.rank} reports: {report.error}"


# ---- texts of all ranks


def agreement_fault(world: World) -> str:
    """Return the first wrong result on this rank of exchanging texts, or ""."""
    group = world.split("agreeing", [range(world.size)])
    # Every rank makes all calls, even after a wrong result.
    found = [*_exchanges(group), *_agreements(world)]
    world.clear()
    return f"rank {world.rank}: {found[0]}" if found else ""


def _exchanges(group: Group) -> Faults:
    n, me = group.size, group.rank
    texts = [f"{rank}: " + _LONG * (rank == n - 1) for rank in range(n)]
    texts[0] = ""
    if exchange(group, texts[me]) != texts:
        yield "exchange gives other texts than the ranks brought"
    for root in range(n):
        wanted = texts if me == root else []
        if exchange(group, texts[me], root) != wanted:
            yield f"exchange for rank {root} gives other texts than the ranks brought"
        if broadcast_text(group, texts[me], root) != texts[root]:
            yield f"rank {root} broadcasts another text than it brought"
        error = "its disk is full" if me == root else ""
        told = errors_of(group, error)
        if told != [f"rank {root}: its disk is full"]:
            yield f"an error of rank {root} becomes {told}"
    if told := errors_of(group, ""):
        yield f"there is no error, but {told} is reported"


def _agreements(world: World) -> Faults:
    """Test equal facts, facts that differ on one rank, and a rank that cannot begin."""
    with agreement(world) as facts:
        facts["layout"] = "dp2"
    odd = world.size - 1
    try:
        with agreement(world) as facts:
            facts["layout"] = "tp2" if world.rank == odd else "dp2"
            facts["seed"] = "0"
    except RanksDiffer as error:
        lines = [line for line in str(error).splitlines() if line[0] == "-"]
        if len(lines) != 1 or "layout" not in lines[0]:
            yield f"the layout differs, but the error lists {lines}"
    else:
        yield f"rank {odd} has another layout, and no error is raised"
    try:
        with agreement(world):
            if world.rank == odd:
                _fail()
    except PeerFailed as error:
        if world.rank == odd or f"rank {odd} could not begin" not in str(
            error
        ):
            yield f"rank {odd} could not begin, but the error is: {error}"
    except _PlannedError:
        if world.rank != odd:
            yield f"rank {odd} could not begin, and its error is raised elsewhere"
    else:
        yield f"rank {odd} could not begin, and no error is raised"


def _fail() -> NoReturn:
    raise _PlannedError("on purpose")
