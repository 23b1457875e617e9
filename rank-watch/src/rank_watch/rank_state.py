"""One rank at one moment, as its host's watcher sees it: a value that travels between hosts."""

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
    """One rank. `still`: seconds since it last made progress, without those in which it could make none
    (`held`). `waits`: the number of the call that it waits in, `DEVICE` for its own GPU, 0 for none.
    `held`: seconds for which it has been stopped, traced, or has waited for its output to be read."""

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
    state: str  # of its thread, as /proc shows it: R, S, D, T, t; X: it is gone
    # what its thread does by the kernel: a system call, a file, computing
    doing: str = ""
    memory: int = 0  # bytes of the host's that it holds
    locked: bool = False  # none of its threads gets the interpreter's lock
    held: float = 0.0
    traced: str = ""  # the process that traces it, as a debugger does
    output: str = ""  # the stream that it waits for somebody to read
    # the operation that its GPU is at, while the rank itself makes no progress
    device_op: str = ""
    # seconds that its GPU was waited for without progress, and went on
    device_longest: float = 0.0
    device_waits: int = 0  # waits for its GPU that have ended
    made: tuple[tuple[GroupKey, int], ...] = ()  # how many collectives of each group
    calls: tuple[Made, ...] = ()
    stack: tuple[str, ...] = ()
    # NCCL's calls on its GPU, known once the run is ended
    flights: tuple[Flight, ...] = ()

    @property
    def call(self) -> Made | None:
        """The call it waits in."""
        return next((call for call in self.calls if call.number == self.waits), None)

    @property
    def over(self) -> bool:
        return self.state == "X" or self.phase in OVER

    @property
    def on_device(self) -> bool:
        """True if it waits for its own GPU: in a read, or as no more operations can be queued there."""
        queued = self.waits == 0 and self.device_op != "" and not self.locked
        return (self.waits == DEVICE or queued) and not self.over

    @property
    def place(self) -> str:
        """Its operation, or its phase and what that works on."""
        if self.op:
            return f"at {self.op}"
        phase = "in the first step" if self.phase == "first step" else self.phase
        return f"{phase} ({self.note})" if self.note else phase

    @property
    def where(self) -> str:
        """Describes in a sentence where the rank is and for how long."""
        if self.state == "X":
            return f"its process {self.pid} has ended"
        if self.phase in OVER:
            return "it has ended" if self.phase == "ended" else "it has failed"
        if self.state == "T":
            return f"it has been stopped (SIGSTOP) for {self.held:.0f} s, {self.place}"
        if self.on_device and self.device_op:
            return f"its GPU has been at {self.device_op} for {self.still:.0f} s"
        if self.on_device:
            return f"it has waited for its GPU for {self.still:.0f} s, {self.place}"
        return f"it has been {self.place} for {self.still:.0f} s"

    @property
    def lines(self) -> list[str]:
        """All that is known, with the whole stack."""
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
        line = f"{who}: step {self.step + 1}, {self.place}{waits}, {when}{doing}"
        return [
            line,
            *(f"      {frame}" for frame in self.stack),
            *flight_lines(self.flights),
        ]

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        table = asdict(replace(self, calls=self.calls[-CALLS_SENT:], made=()))
        del table["made"]
        return table


_NESTED = ("made", "calls", "stack", "flights")
_PLAIN = [field.name for field in fields(RankState) if field.name not in _NESTED]


def pack(states: Sequence[RankState]) -> dict[str, Any]:
    """The states as JSON for another host. Groups stand there once: at 1,024 ranks one has 5 kB."""
    groups: dict[GroupKey, int] = {}

    def number_of(group: GroupKey) -> int:
        return groups.setdefault(group, len(groups))

    ranks = []
    for state in states:
        calls = [
            [c.number, number_of(c.group), c.text, c.op, c.peer, c.sends, c.nth]
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
    """The states that another host has written. Raises `Untrusted` for anything else."""
    try:
        groups = [_group(each) for each in items(table["groups"], _MOST_GROUPS)]
        return [
            _state(each, groups, host) for each in items(table["ranks"], MOST_RANKS)
        ]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise Untrusted(f"not the states of ranks: {error}") from None


def _group(table: Any) -> GroupKey:
    name, ranks, before = items(table, 3)
    members = tuple(whole(rank, 0, MOST_RANKS) for rank in items(ranks, MOST_RANKS))
    return line(name), members, whole(before)


def _state(table: Any, groups: Sequence[GroupKey], host: str) -> RankState:
    made = [items(each, 2) for each in items(table["made"], 2 * GROUPS)]
    return RankState(
        rank=whole(table["rank"], 0, MOST_RANKS),
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
        made=tuple((groups[whole(group)], whole(count)) for group, count in made),
        calls=tuple(_call(each, groups) for each in items(table["calls"], CALLS_KEPT)),
        stack=tuple(line(frame) for frame in items(table["stack"], FRAMES)),
        flights=tuple(_flight(each) for each in items(table["flights"], 1024)),
    )


def _flight(table: Any) -> Flight:
    group, ranks, ended, started, queued, name = items(table, 6)
    members = tuple(whole(rank, 0, MOST_RANKS) for rank in items(ranks, MOST_RANKS))
    return Flight(
        line(group), members, whole(ended), whole(started), whole(queued), line(name)
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
