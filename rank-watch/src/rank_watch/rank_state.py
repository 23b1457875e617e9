"""The state of one rank at one moment, as a value that can be sent between hosts."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from typing import Any

from .flight import Flight, flight_lines
from .positions import CALLS_KEPT, DEVICE, GROUPS, OVER
from .reader import FRAMES, MOST_RANKS, TEXT, GroupKey, Made
from .untrusted import LARGEST, Untrusted, flag, items, line, number, whole

CALLS_SENT = 256
_MOST_GROUPS = 1 << 16


@dataclass(frozen=True)
class RankState:
    """The state of one rank.

    `still`: seconds since it last made progress, excluding those in which it could not
    (`held`). `waits`: the number of the call that it waits in, `DEVICE` for its own
    GPU, 0 for none. `held`: seconds for which it has been stopped, traced, or blocked
    by unread output.
    """

    rank: int
    host: str
    pid: int
    step: int
    phase: str
    note: str
    op: str
    still: float
    longest: float  # seconds of its longest operation so far
    waits: int
    state: str  # of its thread, as in /proc: R, S, D, T or t; X: ended
    # activity of its thread: a system call, a file, or computing
    doing: str = ""
    memory: int = 0  # bytes of host memory that it holds
    locked: bool = False  # none of its threads gets the GIL
    held: float = 0.0
    traced: str = ""  # the process that traces it, such as a debugger
    output: str = ""  # the output stream that it waits on for a reader
    # the operation that its GPU is at, while the rank itself makes no progress
    device_op: str = ""
    # longest time without progress from which its GPU recovered, in seconds
    device_longest: float = 0.0
    device_waits: int = 0  # number of ended waits for its GPU
    # number of collectives made on each group
    made: tuple[tuple[GroupKey, int], ...] = ()
    calls: tuple[Made, ...] = ()
    stack: tuple[str, ...] = ()
    # NCCL calls on its GPU, known once the run has been ended
    flights: tuple[Flight, ...] = ()

    @property
    def call(self) -> Made | None:
        """The call that it waits in, if any."""
        return next(
            (call for call in self.calls if call.number == self.waits), None
        )

    @property
    def over(self) -> bool:
        return self.state == "X" or self.phase in OVER

    @property
    def on_device(self) -> bool:
        """True if it waits for its own GPU: for a result, or for room in the GPU's
        queue."""
        # `locked` rules out the second case: the heartbeat that reports the
        # GPU does not run.
        queued = self.waits == 0 and self.device_op != "" and not self.locked
        return (self.waits == DEVICE or queued) and not self.over

    @property
    def place(self) -> str:
        """Its operation, or its phase with the note on it."""
        if self.op:
            return f"at {self.op}"
        phase = (
            "in the first step" if self.phase == "first step" else self.phase
        )
        return f"{phase} ({self.note})" if self.note else phase

    @property
    def where(self) -> str:
        """Describe in a sentence where the rank is and for how long."""
        if self.state == "X":
            return f"its process {self.pid} has ended"
        if self.phase in OVER:
            return "it has ended" if self.phase == "ended" else "it has failed"
        if self.state == "T":
            return f"it has been stopped (SIGSTOP) for {self.held:.0f} s, {self.place}"
        if self.on_device and self.device_op:
            return (
                f"its GPU has been at {self.device_op} for {self.still:.0f} s"
            )
        if self.on_device:
            return f"it has waited for its GPU for {self.still:.0f} s, {self.place}"
        return f"it has been {self.place} for {self.still:.0f} s"

    @property
    def lines(self) -> list[str]:
        """Everything known about the rank as lines, with the whole stack."""
        waits = f", waits in {self.call}" if self.call else ""
        if self.on_device:
            waits = (
                f", its GPU is at {self.device_op}"
                if self.device_op
                else ", waits for its GPU"
            )
        doing = f" [{self.doing}]" if self.doing else ""
        who = f"rank {self.rank} on {self.host}, process {self.pid}"
        when = "ended" if self.over else f"no progress for {self.still:.1f} s"
        line = (
            f"{who}: step {self.step + 1}, {self.place}{waits}, {when}{doing}"
        )
        return [
            line,
            *(f"      {frame}" for frame in self.stack),
            *flight_lines(self.flights),
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the state as a table for `--json`."""
        # The last calls alone, and no counts of every group.
        table = asdict(replace(self, calls=self.calls[-CALLS_SENT:], made=()))
        del table["made"]
        return table


_NESTED = ("made", "calls", "stack", "flights")
_PLAIN = [
    field.name for field in fields(RankState) if field.name not in _NESTED
]


def pack(states: Sequence[RankState]) -> dict[str, Any]:
    """Convert states to JSON for another host.

    Each group is stored once: at 1,024 ranks one takes 5 kB.
    """
    # In the order of first use; calls and counts below refer to groups by
    # number.
    groups: dict[GroupKey, int] = {}

    def number_of(group: GroupKey) -> int:
        return groups.setdefault(group, len(groups))

    ranks = []
    for state in states:
        calls = [
            [
                c.number,
                number_of(c.group),
                c.text,
                c.op,
                c.peer,
                c.sends,
                c.nth,
            ]
            for c in state.calls[-CALLS_SENT:]
        ]
        made = [[number_of(group), count] for group, count in state.made]
        plain = {name: getattr(state, name) for name in _PLAIN}
        flights = [list(astuple(flight)) for flight in state.flights]
        more = {
            "made": made,
            "calls": calls,
            "stack": list(state.stack),
            "flights": flights,
        }
        ranks.append(plain | more)
    return {"groups": [list(group) for group in groups], "ranks": ranks}


def unpack(table: Mapping[str, Any], host: str) -> list[RankState]:
    """Parse states written by another host. Raises `Untrusted` for anything else."""
    try:
        groups = [
            _group(each) for each in items(table["groups"], _MOST_GROUPS)
        ]
        return [
            _state(each, groups, host)
            for each in items(table["ranks"], MOST_RANKS)
        ]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise Untrusted(f"not the states of ranks: {error}") from None


def _group(table: Any) -> GroupKey:
    name, ranks, before = items(table, 3)
    members = tuple(
        whole(rank, 0, MOST_RANKS) for rank in items(ranks, MOST_RANKS)
    )
    return line(name), members, whole(before)


def _state(table: Any, groups: Sequence[GroupKey], host: str) -> RankState:
    made = [items(each, 2) for each in items(table["made"], 2 * GROUPS)]
    return RankState(
        rank=whole(table["rank"], 0, MOST_RANKS),
        # The host is the one that the file's name states, not what the file
        # says.
        host=host,
        pid=whole(table["pid"]),
        step=whole(table["step"], -LARGEST),
        phase=line(table["phase"], 100),
        note=line(table["note"]),
        op=line(table["op"], 2 * TEXT),
        still=number(table["still"]),
        longest=number(table["longest"]),
        waits=whole(table["waits"], DEVICE),
        state=line(table["state"], 1),
        doing=line(table["doing"]),
        memory=whole(table["memory"]),
        locked=flag(table["locked"]),
        held=number(table["held"]),
        traced=line(table["traced"]),
        output=line(table["output"]),
        device_op=line(table["device_op"], 2 * TEXT),
        device_longest=number(table["device_longest"]),
        device_waits=whole(table["device_waits"]),
        made=tuple(
            (groups[whole(group)], whole(count)) for group, count in made
        ),
        calls=tuple(
            _call(each, groups) for each in items(table["calls"], CALLS_KEPT)
        ),
        stack=tuple(line(frame) for frame in items(table["stack"], FRAMES)),
        flights=tuple(_flight(each) for each in items(table["flights"], 1024)),
    )


def _flight(table: Any) -> Flight:
    group, ranks, ended, started, queued, name = items(table, 6)
    members = tuple(
        whole(rank, 0, MOST_RANKS) for rank in items(ranks, MOST_RANKS)
    )
    return Flight(
        line(group),
        members,
        whole(ended),
        whole(started),
        whole(queued),
        line(name),
    )


def _call(table: Any, groups: Sequence[GroupKey]) -> Made:
    number_, group, text, op, peer, sends, nth = items(table, 7)
    return Made(
        whole(number_),
        groups[whole(group)],
        line(text, 2 * TEXT),
        line(op, 2 * TEXT),
        whole(peer, -1, MOST_RANKS),
        flag(sends),
        whole(nth),
    )
