"""The record of NCCL's calls that torch keeps in each rank (its flight recorder), read after a hang.

The host of a rank queues calls and goes on; the record says which of them its GPU has started and ended.
A GPU that has not started a call in which the GPUs of the other members are is the one they wait for.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from .untrusted import Untrusted, items, line, parse_object, whole

_MOST = 1 << 14  # entries that are read
_SHOWN = 40  # lines of a rank
_RANKS = 1 << 24
_STATES = ("scheduled", "started", "completed")


@dataclass(frozen=True)
class Flight:
    """The collectives of one group on one rank's GPU: the numbers of the last that has ended, of the last
    that has started, and of the last that was queued; and the name of the first that has not ended."""

    group: str
    ranks: tuple[int, ...]
    ended: int
    started: int
    queued: int
    name: str = ""

    def __str__(self) -> str:
        state = "has started" if self.started > self.ended else "waits to start"
        first = (
            f"{self.name} {self.ended + 1} {state}; "
            if self.queued > self.ended
            else ""
        )
        return (
            f"{self.group}: {first}collective {self.ended} is the last that has ended"
        )


def parse_flights(raw: bytes) -> tuple[Flight, ...]:
    """The groups in a rank's record; none where the record is empty or is not one."""
    found: dict[tuple[str, tuple[int, ...]], Flight] = {}
    with suppress(Untrusted, KeyError, TypeError, AttributeError):
        table = parse_object(raw)
        for entry in items(table["entries"][-_MOST:], _MOST):
            if entry.get("is_p2p") is not False:
                continue
            name, group = (line(each, 200) for each in items(entry["process_group"], 2))
            number = whole(entry["collective_seq_id"])
            key = group or name, _ranks_of(table, name)
            known = found.get(key, Flight(*key, 0, 0, 0))
            found[key] = _with(
                known, number, _state(entry), line(entry["profiling_name"], 200)
            )
    return tuple(found.values())


def _state(entry: Mapping[str, Any]) -> int:
    """0: queued, 1: started, 2: ended."""
    if entry.get("retired") is True:
        return 2
    return _STATES.index(entry["state"]) if entry["state"] in _STATES else 0


def _with(known: Flight, number: int, state: int, name: str) -> Flight:
    """A group's calls with one more, which was queued after those that are known."""
    first = name.removeprefix("nccl:") if state < 2 and not known.name else known.name
    return Flight(
        known.group,
        known.ranks,
        max(known.ended, number) if state == 2 else known.ended,
        max(known.started, number) if state else known.started,
        max(known.queued, number),
        first,
    )


def _ranks_of(table: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """The members of a group as ranks of the world; none where the record does not say."""
    with suppress(KeyError, TypeError, ValueError):
        ranks = table["pg_config"][name]["ranks"]
        parsed = json.loads(ranks) if isinstance(ranks, str) else ranks
        return tuple(whole(rank, 0, _RANKS) for rank in items(parsed, 1 << 16))
    return ()


def flight_lines(flights: tuple[Flight, ...]) -> list[str]:
    """The groups as lines, those first in which something is under way."""
    order = sorted(flights, key=lambda each: each.queued <= each.ended)
    return [f"      NCCL, {each}" for each in order[:_SHOWN]]
