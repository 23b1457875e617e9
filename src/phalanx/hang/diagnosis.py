"""Which rank is not doing what the program says, from the positions of all ranks.

A rank that waits in a call waits for the members of the group that have not made it. Whoever is waited
for, directly or over others, and waits for nobody itself, is why the run stands still; where all wait
for each other, the calls of a group differ, and the first that does is shown.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .positions import DEVICE, KNOWN, OVER, Made

PATIENCE = 30  # times the limit that a save, a start or a compilation may do nothing at all
STOPPED = 2.0  # seconds that one rank may be stopped (SIGSTOP) while others are not
CALLS_SENT = 256
_FRAMES, _RANKS = 6, 16  # shown on the screen


@dataclass(frozen=True)
class RankState:
    """One rank, as its host's watcher sees it. `still`: seconds since it last went on; `waits`: the
    number of the call that it waits in, `DEVICE` for its own GPU, 0 for none."""

    rank: int
    host: str
    pid: int
    step: int
    phase: str
    note: str
    op: str
    still: float
    longest: float
    waits: int
    state: str  # of the process, as /proc shows it: R, S, D, T; X: it is gone
    doing: str = ""  # what its thread does by the kernel: a system call, a file, computing
    memory: int = 0  # bytes of the host's that it holds
    locked: bool = False  # none of its threads gets the interpreter's lock
    calls: tuple[Made, ...] = ()
    stack: tuple[str, ...] = ()

    @property
    def call(self) -> Made | None:
        """The call it waits in."""
        return next((call for call in self.calls if call.number == self.waits), None)

    @property
    def over(self) -> bool:
        return self.state == "X" or self.phase in OVER

    @property
    def where(self) -> str:
        """What it does, by itself."""
        if self.state == "X":
            return f"its process {self.pid} has ended"
        if self.phase in OVER:
            return "it has ended" if self.phase == "ended" else "it has failed"
        at = f"at {self.op}" if self.op else self.phase
        note = f", {self.note}" if self.note and not self.op else ""
        stopped = "stopped (SIGSTOP), " if self.state == "T" else ""
        return f"it is {stopped}{at}{note}"

    @property
    def lines(self) -> list[str]:
        """All that is known, with the whole stack."""
        waits = f", waits in {self.call}" if self.call else ""
        doing = f" [{self.doing}]" if self.doing else ""
        who = f"rank {self.rank} on {self.host}, process {self.pid}"
        where = self.where.removeprefix("it is ")
        line = f"{who}: step {self.step + 1}, {where}{waits}, for {self.still:.1f} s{doing}"
        return [line, *_frames(self, 100)]

    def to_json(self) -> dict[str, Any]:
        return asdict(replace(self, calls=self.calls[-CALLS_SENT:]))

    @classmethod
    def from_json(cls, table: Mapping[str, Any]) -> "RankState":
        calls = []
        for call in table["calls"]:
            name, ranks, before = call["group"]
            calls.append(Made(**{**call, "group": (name, tuple(ranks), before)}))
        return cls(**{**table, "calls": tuple(calls), "stack": tuple(table["stack"])})


@dataclass(frozen=True)
class Diagnosis:
    """Whether the run hangs, and in one screen why; `ranks` are those that are the cause."""

    hangs: bool
    ranks: tuple[int, ...]
    lines: tuple[str, ...]
    full: tuple[str, ...] = field(default=(), compare=False)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def diagnose(ranks: Sequence[RankState], timeout: float, missing: Sequence[str] = ()) -> Diagnosis:
    """Why ranks stand still, if they do. `missing`: hosts whose watchers do not answer."""
    world = {r.rank: r for r in ranks}
    awaited = {r.rank: waited_for(r, world) for r in ranks}
    limit = timeout + max((r.longest for r in ranks), default=0.0)
    stuck = [r for r in ranks if _is_cause(r, world, awaited, limit)]
    live = [r for r in ranks if not r.over]
    late = [r for r in live if r.still > limit]
    all_wait = bool(live) and late == live and all(awaited[r.rank] for r in live)
    if not (stuck or all_wait or (missing and late)):
        slow = [r for r in live if r.still > timeout and r.phase in KNOWN and r.waits == 0]
        lines = [
            f"rank {r.rank} is {r.phase}{' ' * bool(r.note)}{r.note} for {r.still:.0f} s; it is not"
            " ended for that"
            for r in slow
        ]
        return Diagnosis(False, (), tuple(lines))
    step = max((r.step for r in live), default=0)
    longest = max((r.still for r in ranks if r.phase not in OVER), default=0.0)
    lines = [f"the run hangs at step {step + 1}: it stands still since {longest:.0f} s"]
    lines[0] += f" (hang.timeout = {timeout:g} s, longest operation {limit - timeout:.1f} s)"
    lines += [f"host {host} does not answer" for host in missing]
    for r in stuck[:4]:
        lines += _cause(r, ranks, awaited)
    if not stuck and not missing:
        lines += _differing(ranks, awaited)
        for r in [r for r in live if r.stack][:2]:
            lines += [f"rank {r.rank}:", *_frames(r, 3)]
    lines += _waiters(ranks, awaited)
    full = (*lines, "", *(line for r in ranks for line in r.lines))
    return Diagnosis(True, tuple(r.rank for r in stuck), tuple(lines), full)


def waited_for(r: RankState, world: Mapping[int, RankState]) -> tuple[int, ...]:
    """The ranks that a rank waits for, of those that are known; its own, if it is for its GPU."""
    if r.waits == 0 or r.over or r.state == "T":
        return ()
    if r.waits == DEVICE:
        behind = [o.rank for o in world.values() if o.waits != DEVICE and o.rank != r.rank]
        return tuple(behind) or (r.rank,)
    call = r.call
    if call is None:
        return (r.rank,)
    if call.peer >= 0:
        return (call.peer,)
    others = [m for m in call.group[1] if m != r.rank and m in world]
    made = {
        m: [c.nth for c in world[m].calls if c.group == call.group and c.peer < 0] for m in others
    }
    absent = [m for m in others if max(made[m], default=-1) < call.nth]
    # All have made it: one that does not wait may have to move its part of it.
    idle = [m for m in others if world[m].waits == 0]
    return tuple(absent or idle or [m for m in call.group[1] if m != r.rank])


def _is_cause(
    r: RankState,
    world: Mapping[int, RankState],
    awaited: Mapping[int, tuple[int, ...]],
    limit: float,
) -> bool:
    if r.over:
        return any(o.still > limit for o in world.values() if r.rank in awaited[o.rank])
    if r.state == "T":
        alone = len(world) == 1 or any(o.state != "T" for o in world.values())
        return alone and r.still > min(limit, STOPPED)
    return not awaited[r.rank] and r.still > (PATIENCE * limit if r.phase in KNOWN else limit)


def _cause(
    r: RankState, ranks: Sequence[RankState], awaited: Mapping[int, tuple[int, ...]]
) -> Iterator[str]:
    """What a rank should be doing by the calls of those that wait for it, and what it does."""
    calls = [o.call for o in ranks if r.rank in awaited[o.rank] and o.rank != r.rank]
    call = next((c for c in calls if c is not None), None)
    should = f" should be in {call};" if call else ""
    for_ = "" if r.over else f", for {r.still:.0f} s"
    yield f"rank {r.rank}{should or ':'} {r.where}{for_}"
    if r.doing:
        lock = "; it holds the interpreter's lock" if r.locked and r.state != "T" else ""
        yield f"    process {r.pid} on {r.host}: {r.doing}{lock}"
    yield from _frames(r, _FRAMES)


def _frames(r: RankState, most: int) -> list[str]:
    return [f"      {frame}" for frame in r.stack[:most]]


def _waiters(ranks: Sequence[RankState], awaited: Mapping[int, tuple[int, ...]]) -> Iterator[str]:
    """A line for all that wait for the same in the same call."""
    alike: dict[str, list[RankState]] = {}
    for r in ranks:
        if awaited[r.rank]:
            what = str(r.call or f"its own GPU, {r.op or r.phase}")
            who = span([o for o in awaited[r.rank] if o != r.rank])
            alike.setdefault(f"for {who}, in {what}" if who else f"for {what}", []).append(r)
    for count, (what, waiting) in enumerate(alike.items()):
        if count == _RANKS:
            yield f"and {len(alike) - count} more"
            return
        verb = "waits" if len(waiting) == 1 else "wait"
        since = max(r.still for r in waiting)
        yield f"{span([r.rank for r in waiting])} {verb} {what}, for {since:.0f} s"


def span(ranks: Sequence[int]) -> str:
    """rank 3; ranks 0-2, 5."""
    if not ranks:
        return ""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs[:8])
    more = f" and {len(runs) - 8} more" if len(runs) > 8 else ""
    return f"rank{'s' * (len(ranks) > 1)} {text}{more}"


def _differing(ranks: Sequence[RankState], awaited: Mapping[int, tuple[int, ...]]) -> Iterator[str]:
    """The first call of a group that two of its members have made otherwise, or not both."""
    yield "all ranks wait for each other: they do not make the same calls"
    sides: dict[tuple[Any, int], dict[str, list[tuple[int, int]]]] = {}  # of each call
    for r in ranks:
        for call in (c for c in r.calls if c.peer < 0):
            text = f"{call.text} of {call.op}" if call.op else call.text
            of_call = sides.setdefault((call.group, call.nth), {})
            of_call.setdefault(text, []).append((call.number, r.rank))
    differ = [
        (min(min(who) for who in made.values()), nth, group[0], made)
        for (group, nth), made in sides.items()
        if len(made) > 1
    ]
    if differ:
        _, nth, group, made = min(differ, key=lambda each: each[0])
        text = "; ".join(f"{span([rank for _, rank in who])}: {of}" for of, who in made.items())
        yield f"the first that differs is call {nth} of {group}: {text}"
    elif absent := [(r, o) for r in ranks for o in awaited[r.rank] if r.call and o != r.rank]:
        r, rank = absent[0]
        yield f"rank {rank} has not made {r.call}, where rank {r.rank} waits"
