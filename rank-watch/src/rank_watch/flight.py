"""The record of NCCL calls that torch keeps in each rank (its flight recorder), read
after a hang.

A rank's host queues calls and continues; the record shows which of them its GPU has
started and ended. If a GPU has not started a call that the other members' GPUs are in,
they wait for it.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from .untrusted import Untrusted, items, line, parse_object, whole

_MOST = 1 << 14  # maximum entries read
_SHOWN = 40  # maximum lines for a rank
_RANKS = 1 << 24
_STATES = ("scheduled", "started", "completed")


@dataclass(frozen=True)
class Flight:
    """The collectives of one group on one rank's GPU.

    `ended`, `started` and `queued` are the numbers of the last collective in each
    state; `name` is that of the first that has not ended.
    """

    group: str
    ranks: tuple[int, ...]
    ended: int
    started: int
    queued: int
    name: str = ""

    def __str__(self) -> str:
        state = (
            "has started" if self.started > self.ended else "waits to start"
        )
        first = (
            f"{self.name} {self.ended + 1} {state}; "
            if self.queued > self.ended
            else ""
        )
        return f"{self.group}: {first}collective {self.ended} is the last that has ended"


def parse_flights(raw: bytes) -> tuple[Flight, ...]:
    """Parse the groups in a rank's record; empty if the record is empty or invalid."""
    found: dict[tuple[str, tuple[int, ...]], Flight] = {}
    with suppress(Untrusted, KeyError, TypeError, AttributeError):
        table = parse_object(raw)
        for entry in items(table["entries"][-_MOST:], _MOST):
            # Messages have numbers of their own, which members other than the
            # two do not share.
            if entry.get("is_p2p") is not False:
                continue
            name, group = (
                line(each, 200) for each in items(entry["process_group"], 2)
            )
            number = whole(entry["collective_seq_id"])
            # By description and members: several groups may have the same
            # description.
            key = group or name, _ranks_of(table, name)
            known = found.get(key, Flight(*key, 0, 0, 0))
            found[key] = _with(
                known,
                number,
                _state(entry),
                line(entry["profiling_name"], 200),
            )
    return tuple(found.values())


def _state(entry: Mapping[str, Any]) -> int:
    """Return 0 for queued, 1 for started, 2 for ended."""
    # Retired entries have ended, even if the record never saw the state
    # change.
    if entry.get("retired") is True:
        return 2
    return _STATES.index(entry["state"]) if entry["state"] in _STATES else 0


def _with(known: Flight, number: int, state: int, name: str) -> Flight:
    """Add a call to a group's calls; it was queued after the known ones."""
    # The first call that has not ended is where the GPU is.
    first = (
        name.removeprefix("nccl:")
        if state < 2 and not known.name
        else known.name
    )
    return Flight(
        known.group,
        known.ranks,
        max(known.ended, number) if state == 2 else known.ended,
        max(known.started, number) if state else known.started,
        max(known.queued, number),
        first,
    )


def _ranks_of(table: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Return the members of a group as ranks of the world; empty if the record does not
    say."""
    with suppress(KeyError, TypeError, ValueError):
        ranks = table["pg_config"][name]["ranks"]
        # A list, or a text such as "[0, 1]".
        parsed = json.loads(ranks) if isinstance(ranks, str) else ranks
        return tuple(whole(rank, 0, _RANKS) for rank in items(parsed, 1 << 16))
    return ()


def flight_lines(flights: tuple[Flight, ...]) -> list[str]:
    """Format the groups as lines, those with pending calls first."""
    # False sorts first: groups with pending calls.
    order = sorted(flights, key=lambda each: each.queued <= each.ended)
    return [f"      NCCL, {each}" for each in order[:_SHOWN]]
