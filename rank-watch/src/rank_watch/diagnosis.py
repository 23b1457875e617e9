"""Finds the rank that does not follow the program, from the positions of all ranks.

A rank in a call waits for the group members that have not made it. The cause is a rank
that others wait for, directly or indirectly, and that waits for nobody itself. If all
wait for each other there is no such rank. Then either the calls differ, and the first
difference is shown; or some ranks are in a call that every member has made, and the
network between them has stopped.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .positions import KNOWN, OVER
from .rank_state import RankState
from .reader import GroupKey, Made

# A save, a start, a read or a compilation may be idle for this multiple of the timeout,
# up to a maximum in seconds, unless the timeout itself is longer.
PATIENCE, PATIENCE_MOST = 30, 1800.0
# Seconds for which a GPU may make no progress until enough waits for it have ended to
# estimate it.
DEVICE_LEAST, DEVICE_KNOWN = 600.0, 3
STOPPED = (
    2.0  # seconds that one rank may be stopped (SIGSTOP) while others run
)
_FRAMES, _CAUSES, _LINES = 6, 4, 16  # maxima shown on the screen

World = Mapping[int, RankState]
Awaited = Mapping[int, tuple[int, ...]]


@dataclass(frozen=True)
class Diagnosis:
    """The verdict on a run that may hang, with an explanation that fits on one screen.

    `ranks` are the cause. `notices` are lines about a run that does not hang, each with
    a key that stays the same while the line changes.
    """

    hangs: bool
    ranks: tuple[int, ...]
    lines: tuple[str, ...]
    full: tuple[str, ...] = field(default=(), compare=False)
    notices: tuple[tuple[str, str], ...] = ()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


@dataclass(frozen=True)
class Limits:
    """Seconds without progress after which a rank counts as stuck."""

    timeout: float
    longest: float  # longest operation of any rank so far
    device: float  # longest time without progress from which a GPU recovered

    @classmethod
    def of(cls, ranks: Sequence[RankState], timeout: float) -> "Limits":
        longest = max((r.longest for r in ranks), default=0.0)
        device = max((r.device_longest for r in ranks), default=0.0)
        # Too few waits have ended to know how long this GPU's healthy ones
        # take.
        if max((r.device_waits for r in ranks), default=0) < DEVICE_KNOWN:
            device = max(device, DEVICE_LEAST - timeout)
        return cls(timeout, longest, device)

    @property
    def plain(self) -> float:
        return self.timeout + self.longest

    def of_rank(self, r: RankState) -> float:
        # A GPU's queue and the rank's own operations take different times, so
        # each has its own longest.
        plain = self.timeout + (self.device if r.on_device else self.longest)
        if r.phase in KNOWN:
            return max(plain, patience(self.timeout) + self.longest)
        return plain


def patience(timeout: float, times: int = PATIENCE) -> float:
    """Return the seconds for which a save, a start, a read or a compilation may be
    idle."""
    return max(timeout, min(times * timeout, PATIENCE_MOST))


def diagnose(
    ranks: Sequence[RankState], timeout: float, missing: Sequence[str] = ()
) -> Diagnosis:
    """Explain why the run makes no progress, if it does not. `missing`: hosts whose
    watchers do not answer."""
    world = {r.rank: r for r in ranks}
    awaited = {r.rank: waited_for(r, world) for r in ranks}
    # The timeout counts from the longest operation seen, as a run of long
    # steps is healthy.
    limits = Limits.of(ranks, timeout)
    live = [r for r in ranks if not r.over]
    late = [r for r in live if r.still > limits.of_rank(r)]
    stuck = [r for r in ranks if _is_cause(r, world, awaited, limits)]
    # Deadlock: nobody alive makes progress, and everybody waits for somebody.
    all_wait = (
        bool(live) and late == live and all(awaited[r.rank] for r in live)
    )
    # A rank waits for one on a host that nothing is known about.
    lost = missing and any(_waits_beyond(r, world, awaited) for r in late)
    # A debugger stops one rank, and so all that wait for it: that is no hang.
    traced = any(r.traced for r in live)
    if traced or not (stuck or all_wait or lost):
        notices = tuple(_notices(live, limits))
        return Diagnosis(
            False, (), tuple(text for _, text in notices), notices=notices
        )
    lines = [_headline(ranks, live, limits)]
    lines += [
        f"host {host} does not answer: it is down, or the network to it"
        for host in missing
    ]
    for r in stuck[:_CAUSES]:
        lines += _cause(r, ranks, awaited)
    if len(stuck) > _CAUSES:
        lines.append(f"and {len(stuck) - _CAUSES} more ranks are stuck")
    if not stuck and not missing:
        lines += _deadlock(live, world, awaited)
    lines += _waiters(ranks, awaited)
    full = (*lines, "", *(line for r in ranks for line in r.lines))
    return Diagnosis(True, tuple(r.rank for r in stuck), tuple(lines), full)


def _headline(
    ranks: Sequence[RankState], live: Sequence[RankState], limits: Limits
) -> str:
    step = max((r.step for r in live), default=0)
    # `held` too: a stopped rank makes no progress, although its clock is
    # halted.
    idle = max(
        (max(r.still, r.held) for r in ranks if r.phase not in OVER),
        default=0.0,
    )
    longest = f"longest operation {limits.longest:.1f} s"
    if any(r.on_device for r in live):
        # Both terms of the limit, so that a reader can choose a better
        # timeout.
        longest = (
            f"longest time without progress of a GPU {limits.device:.1f} s"
        )
    terms = f"timeout {limits.timeout:g} s, {longest}"
    return f"the run hangs at step {step + 1}: no progress for {idle:.0f} s ({terms})"


def _notices(
    live: Sequence[RankState], limits: Limits
) -> Iterator[tuple[str, str]]:
    """Yield notices about ranks without progress that are not ended, with the
    reason."""
    for r in live:
        who, goes_on = f"rank {r.rank}", "the run is not ended for that"
        if r.traced and max(r.held, r.still) > limits.timeout:
            yield (
                f"{who} traced",
                f"{who} is traced by {r.traced}; the run is not ended while it is",
            )
        elif r.output and r.held > limits.timeout:
            waits = f"has waited {r.held:.0f} s for somebody to read its output ({r.output})"
            yield f"{who} output", f"{who} {waits}; {goes_on}"
        elif r.phase in KNOWN and r.waits == 0 and r.still > limits.timeout:
            text = f"{who} has been {r.place} for {r.still:.0f} s; {goes_on}"
            yield f"{who} {r.phase} {r.note}", text


# ---- which ranks each rank waits for


def waited_for(r: RankState, world: World) -> tuple[int, ...]:
    """Return the ranks that a rank waits for; the rank itself if it waits for its GPU
    for unknown reasons."""
    # Stopped or ended, it waits for nobody: it can only be the cause.
    if r.over or r.state in "Tt":
        return ()
    if r.on_device:
        return _device_waits_for(r, world)
    if r.waits == 0:
        return ()
    call = r.call
    if call is None:
        # Its call is not among the known ones, so nothing tells whom it waits
        # for.
        return (r.rank,)
    # A message has one possible culprit, a collective all members that are
    # late.
    if call.peer >= 0:
        return (call.peer,)
    others = [m for m in call.group[1] if m != r.rank]
    known = [m for m in others if m in world]
    absent = [m for m in known if not has_made(world[m], call)]
    unknown = [m for m in others if m not in world]
    # All have made it: one that is not waiting may have to advance its part.
    idle = [m for m in known if world[m].waits == 0]
    # The best evidence there is: late members, then those that nothing is
    # known about, then idle ones.
    return tuple(absent or unknown or idle or others)


def _device_waits_for(r: RankState, world: World) -> tuple[int, ...]:
    """Return the ranks that a GPU waits for: those whose hosts have not queued what
    this one has."""
    others = [
        o for o in world.values() if o.rank != r.rank and not o.on_device
    ]
    mine = dict(r.made)
    behind = [
        o.rank
        for o in others
        for group, count in o.made
        if r.rank in group[1] and count < mine.get(group, 0)
    ]
    # Hosts that have queued fewer calls of a common group; without any, all
    # whose ranks do not wait for GPUs.
    if others:
        return tuple(dict.fromkeys(behind)) or tuple(o.rank for o in others)
    if r.flights:
        late = _behind_in_flight(r, world)
        # NCCL's record is more exact than the hosts' calls, as hosts run ahead
        # of their GPUs.
        inside = any(flight.started > flight.ended for flight in r.flights)
        # A GPU outside every NCCL call is stuck in its own work.
        return late or ((r.rank,) if inside else ())
    if not r.device_op:
        return (r.rank,)
    # All hosts wait. A GPU in an operation without a call is stuck in its own work.
    calls = [call for call in r.calls if call.op == r.device_op]
    peers = {call.peer for call in calls if call.peer >= 0}
    members = {m for call in calls if call.peer < 0 for m in call.group[1]}
    return tuple(sorted((peers | members) - {r.rank}))


def _behind_in_flight(r: RankState, world: World) -> tuple[int, ...]:
    """Return the ranks whose GPUs have not started a call that this rank's GPU is
    in."""
    late = set[int]()
    # Only calls that this GPU has started and not ended.
    for mine in r.flights:
        for member in mine.ranks if mine.started > mine.ended else ():
            theirs = world[member].flights if member in world else ()
            same = [
                f
                for f in theirs
                if (f.group, f.ranks) == (mine.group, mine.ranks)
            ]
            if (
                theirs
                and max((f.started for f in same), default=0) < mine.started
            ):
                late.add(member)
    return tuple(sorted(late))


def has_made(r: RankState, call: Made) -> bool:
    """True if a rank has made this collective of one of its groups."""
    counts = dict(r.made)
    # Counts cover every call since the start; the ring below only the last
    # 1,024.
    if call.group in counts:
        # A count of 3 means that calls 0, 1 and 2 have been made.
        return counts[call.group] > call.nth
    seen = [c.nth for c in r.calls if c.group == call.group and c.peer < 0]
    return max(seen, default=-1) >= call.nth


def _has_matched(r: RankState, waiter: RankState, call: Made) -> bool:
    """True if a rank has made its side of the message that `waiter` waits for in
    `call`."""
    sides = (
        c.nth
        for c in r.calls
        if c.group == call.group
        and c.peer == waiter.rank
        # A send matches a receive: the two sides count the same messages.
        and c.sends != call.sends
    )
    return max(sides, default=-1) >= call.nth


def _is_complete(r: RankState, world: World) -> bool:
    """True if a rank waits in a call that every other participant has made too."""
    call = r.call
    if call is None:
        return False
    if call.peer >= 0:
        return call.peer in world and _has_matched(world[call.peer], r, call)
    others = [m for m in call.group[1] if m != r.rank]
    return all(m in world and has_made(world[m], call) for m in others)


def _is_cause(
    r: RankState, world: World, awaited: Awaited, limits: Limits
) -> bool:
    if r.over:
        # Ended with others still waiting: it left the program early, or they
        # do one call too many.
        waiting = (o for o in world.values() if r.rank in awaited[o.rank])
        return any(o.still > limits.plain for o in waiting)
    # Somebody examines it, or does not read its output; neither is the
    # program's fault.
    if r.traced or r.output:
        return False
    if r.state == "T":
        # If all are stopped, as after Ctrl-Z, somebody intends to continue them.
        others_run = any(o.state != "T" and not o.over for o in world.values())
        return others_run and r.held > min(limits.plain, STOPPED)
    return not awaited[r.rank] and r.still > limits.of_rank(r)


def _waits_beyond(r: RankState, world: World, awaited: Awaited) -> bool:
    """True if a rank waits for an unknown rank, or for its GPU and thus perhaps for an
    unknown rank."""
    return r.on_device or any(rank not in world for rank in awaited[r.rank])


# ---- descriptions


def _cause(
    r: RankState, ranks: Sequence[RankState], awaited: Awaited
) -> Iterator[str]:
    """Describe the call that a rank should be in, according to the waiting ranks, and
    where it is."""
    calls = [
        o.call for o in ranks if r.rank in awaited[o.rank] and o.rank != r.rank
    ]
    # Every waiter waits in the same call, as a rule; the first that is known
    # names it.
    call = next((c for c in calls if c is not None), None)
    should = f" should be in {call};" if call else ":"
    yield f"rank {r.rank}{should} {r.where}"
    if r.doing:
        # A thread that holds the GIL, such as a C extension in a loop, shows
        # as a rank without heartbeat.
        lock = (
            "; it holds the interpreter's lock"
            if r.locked and r.state != "T"
            else ""
        )
        yield f"    process {r.pid} on {r.host}: {r.doing}{lock}"
    yield from _frames(r, _FRAMES)


def _frames(r: RankState, most: int) -> list[str]:
    return [f"      {frame}" for frame in r.stack[:most]]


def _waiters(ranks: Sequence[RankState], awaited: Awaited) -> Iterator[str]:
    """Yield one line for all ranks that wait for the same ranks in the same call."""
    # A line for each wait rather than each rank: a thousand ranks may wait in
    # the same call.
    alike: dict[str, list[RankState]] = {}
    for r in ranks:
        if awaited[r.rank]:
            what = str(r.call or f"its GPU, {r.device_op or r.op or r.phase}")
            who = span([o for o in awaited[r.rank] if o != r.rank])
            alike.setdefault(
                f"for {who}, in {what}" if who else f"for {what}", []
            ).append(r)
    for count, (what, waiting) in enumerate(alike.items()):
        if count == _LINES:
            yield f"and {len(alike) - count} more"
            return
        verb = "waits" if len(waiting) == 1 else "wait"
        since = max(r.still for r in waiting)
        yield f"{span([r.rank for r in waiting])} {verb} {what}, for {since:.0f} s"


def span(ranks: Sequence[int]) -> str:
    """Format ranks: rank 3; ranks 0-2, 5."""
    if not ranks:
        return ""
    # Runs of consecutive numbers: [[0, 2], [5, 5]] -> "ranks 0-2, 5".
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs[:8])
    more = f" and {len(runs) - 8} more" if len(runs) > 8 else ""
    return f"rank{'s' * (len(ranks) > 1)} {text}{more}"


def _deadlock(
    live: Sequence[RankState], world: World, awaited: Awaited
) -> Iterator[str]:
    """Explain why all ranks wait for each other."""
    # In the order of certainty: GPUs, calls that differ, the network, and a
    # call that one rank lacks.
    complete = [r for r in live if _is_complete(r, world)]
    different = list(_difference(live))
    if live and all(r.on_device for r in live):
        yield from _devices(live)
    elif different:
        yield "all ranks wait for each other: they do not make the same calls"
        yield from different
    elif complete:
        yield from _network(complete, world)
    else:
        yield from _absence(live, world, awaited)
    # Two stacks are enough to see the code; the rest is in the file.
    for r in [r for r in live if r.stack][:2]:
        yield f"rank {r.rank}:"
        yield from _frames(r, 3)


def _devices(live: Sequence[RankState]) -> Iterator[str]:
    """Describe where the GPUs are, if all ranks wait for them and no single one is the
    cause."""
    hosts = sorted({r.host for r in live})
    between = (
        f", or the network between {', '.join(hosts[:8])}"
        if len(hosts) > 1
        else ""
    )
    yield f"all ranks wait for their GPUs, which make no progress: look at the GPUs{between}"
    at: dict[str, list[int]] = {}
    for r in live:
        # The last call of the operation, as the GPU may be anywhere in it.
        calls = [str(call) for call in r.calls if call.op == r.device_op][-1:]
        at.setdefault(calls[0] if calls else r.device_op, []).append(r.rank)
    for what, ranks in list(at.items())[:_CAUSES]:
        if what:
            yield f"    the GPUs of {span(ranks)} are at {what}"


def _network(complete: Sequence[RankState], world: World) -> Iterator[str]:
    """Describe calls that every member has made but that do not end, with the hosts
    involved."""
    members: dict[str, set[int]] = {}
    for r in complete:
        call = r.call
        assert call is not None
        ranks = {r.rank, call.peer} if call.peer >= 0 else set(call.group[1])
        name = call.text if call.peer >= 0 else str(call)
        members.setdefault(name, set()).update(ranks)
    for name, ranks in list(members.items())[:_CAUSES]:
        hosts: dict[str, list[int]] = {}
        for rank in sorted(ranks):
            hosts.setdefault(world[rank].host, []).append(rank)
        yield f"{span(sorted(ranks))} have all made {name}, and it does not end"
        sides = [f"{host} ({span(on_it)})" for host, on_it in hosts.items()]
        if len(hosts) > 1:
            more = (
                f" and {len(sides) - 8} more hosts" if len(sides) > 8 else ""
            )
            yield f"    no data passes between {', '.join(sides[:8])}{more}: look at the network"
        else:
            yield f"    no data passes between these ranks, which are all on {sides[0]}"


def _difference(
    live: Sequence[RankState], only: GroupKey | None = None
) -> Iterator[str]:
    """Describe the first call of a group that two of its members have made differently.

    Within one group `only`, equal calls also differ if they were made in different
    operations.
    """
    sides: dict[tuple[GroupKey, int], dict[str, list[tuple[int, int]]]] = {}
    for r in live:
        for call in r.calls:
            # Messages have no common number among the members of a group.
            if call.peer >= 0 or only not in (None, call.group):
                continue
            text = (
                f"{call.text} of {call.op}" if call.op and only else call.text
            )
            of_call = sides.setdefault((call.group, call.nth), {})
            of_call.setdefault(text, []).append((call.number, r.rank))
    differ = [
        # By the ranks' own numbering of calls: the earliest difference is
        # shown, as later ones follow from it.
        (
            min(number for who in made.values() for number, _ in who),
            group,
            nth,
            made,
        )
        for (group, nth), made in sides.items()
        if len(made) > 1
    ]
    if differ:
        _, group, nth, made = min(differ, key=lambda each: each[0])
        # Equal texts may stem from different layers: within the group the
        # operations are compared, too.
        if not only and (detailed := list(_difference(live, group))):
            yield detailed[0]
            return
        text = "; ".join(
            f"{span([rank for _, rank in who])}: {of}"
            for of, who in made.items()
        )
        yield f"the first that differs is call {nth} of {group[0]}: {text}"


def _absence(
    live: Sequence[RankState], world: World, awaited: Awaited
) -> Iterator[str]:
    """Describe a call that some members wait in while another member waits
    elsewhere."""
    for r in live:
        call = r.call
        if call is None:
            continue
        for rank in awaited[r.rank]:
            other = world.get(rank)
            if other is None or other is r:
                continue
            done = (
                _has_matched(other, r, call)
                if call.peer >= 0
                else has_made(other, call)
            )
            if not done:
                yield "all ranks wait for each other: they do not make the same calls"
                at = f"; it waits in {other.call}" if other.call else ""
                yield f"rank {rank} has not made {call}, where rank {r.rank} waits{at}"
                yield from _difference(live, call.group)
                return
    yield "all ranks wait for each other"
