"""One watched rank of this host: since when it makes no progress, and what prevents
it."""

import time
from collections.abc import Sequence

from .diagnosis import PATIENCE, STOPPED, patience
from .effort import Effort
from .hosted import RankProcess
from .positions import (
    BEAT,
    BEATS,
    DEVICE,
    DEVICE_AT,
    DEVICE_LONGEST,
    DEVICE_WAITS,
    HEARTBEAT,
    KNOWN,
    LONGEST,
    LOOKED,
    NATIVE,
    OVER,
    PHASE,
    SINCE,
    STEP,
    WAITS,
    phase_named,
)
from .processes import (
    Process,
    memory_held,
    stat_of,
    thread_by_kernel,
    tracer_of,
    unread_output,
)
from .rank_state import RankState
from .reader import PositionReader

# Multiple of its patience for which a save, a start, a read or a compilation may
# compute without reading or writing a byte.
COMPUTING = 10
_HELD_EVERY = (
    0.5  # seconds between two checks of what a rank's threads wait for
)


class WatchedRank:
    """A rank and its clock.

    `owner`: the user who must own the rank, as for `PositionReader`; None for ranks of
    the watcher's own run, in whose memory it stores its times for others and for its
    successor.

    `since` is the time of the rank's last progress, by its position or its work. It
    advances while the rank is stopped, traced by a debugger, or blocked by unread
    output.
    """

    def __init__(
        self, entry: RankProcess, host: str, owner: int | None = None
    ) -> None:
        self.entry, self.host, self.watches = entry, host, owner is None
        self.process = Process(entry.pid, entry.started)
        self.reader = PositionReader(
            self.process, entry.files, owner, writes=self.watches
        )
        now = time.monotonic()
        words = self.reader.words()
        self.mark = self.reader.mark()
        self.since = self.moved = self.looked = now
        self.beat, self.beat_since = words[BEAT], now
        # a killed watcher has left the longest operation that it saw
        self.longest = self.device_longest = 0.0
        self.device_waits = 0
        if self.watches:
            self.longest = max(words[LONGEST], 0) / 1e3
            self.device_longest = max(words[DEVICE_LONGEST], 0) / 1e3
            self.device_waits = max(words[DEVICE_WAITS], 0)
        self.behind = False  # the rank's device has operations left
        self.effort = Effort(entry.pid, now)
        self.held_since: float | None = None
        self.output = ""
        self._held_looked = 0.0

    # ---- the clock

    def look(self, now: float, timeout: float = 0.0) -> None:
        """Update the clock. A rank without progress may be working, or be held."""
        words, mark = self.reader.words(), self.reader.mark()
        elapsed, self.looked = now - self.looked, now
        # The heartbeat needs the GIL: if it stops, something holds it.
        if words[BEAT] != self.beat:
            self.beat, self.beat_since = words[BEAT], now
        if mark != self.mark:
            self._progressed(now, mark)
            self.behind = words[DEVICE_AT] >= 0
        # Time in which it could not run does not count against it.
        elif self._is_held(now):
            self.skip(elapsed)
        elif words[DEVICE_AT] >= 0:
            self.behind = True
        # Only a rank that waits for nobody: one in a call makes no progress of
        # its own.
        elif words[WAITS] == 0:
            self._see_work(now, timeout, words[NATIVE], words[HEARTBEAT])
        if self.watches:
            # Milliseconds, for observers and for the watcher that follows this
            # one.
            self.reader.write(SINCE, int(self.since * 1e3))
            self.reader.write(LONGEST, int(self.longest * 1e3))
            self.reader.write(DEVICE_LONGEST, int(self.device_longest * 1e3))
            self.reader.write(DEVICE_WAITS, self.device_waits)
            self.reader.write(LOOKED, int(now * 1e3))

    def _progressed(self, now: float, mark: tuple[int, ...]) -> None:
        waited, phase = (
            self.mark[WAITS - STEP],
            phase_named(self.mark[PHASE - STEP]),
        )
        if waited == DEVICE or (waited == 0 and self.behind):
            # A wait for the device that ended was healthy, however long it took.
            self.device_longest = max(self.device_longest, now - self.moved)
            # Counted once, when the wait ends rather than at each event within
            # it.
            self.device_waits += (
                waited == DEVICE and mark[WAITS - STEP] != DEVICE
            )
        # Known phases are left out: a long save must not raise the limit for a
        # step.
        elif waited == 0 and phase not in (*KNOWN, *OVER):
            self.longest = max(self.longest, now - self.moved)
        self.mark, self.since, self.moved = mark, now, now
        self.held_since, self.output = None, ""
        self.effort.begin(now)

    def _is_held(self, now: float) -> bool:
        """True if the rank could not run even if it wanted to."""
        held = self.kernel_state in ("T", "t")
        # Reading every thread's call is slow: only after a second without
        # progress.
        if (
            not held
            and now - self.moved > 1.0
            and now - self._held_looked > _HELD_EVERY
        ):
            self._held_looked = now
            self.output = unread_output(self.entry.pid)
        held = held or bool(self.output)
        if held and self.held_since is None:
            self.held_since = now
        elif not held:
            self.held_since = None
        return held

    def _see_work(
        self, now: float, timeout: float, thread: int, heartbeat: int
    ) -> None:
        """Count work as progress, in the phases and within the limits in which it
        counts."""
        effort, phase = self.effort, self.reader.phase
        if phase not in (*KNOWN, "first step", "loading data"):
            return
        effort.thread, effort.heartbeat = thread, heartbeat
        effort.look(now)
        if phase in KNOWN:
            # Nothing computes forever without reading or writing a byte.
            last, most = (
                max(self.moved, effort.moved_at),
                COMPUTING * patience(timeout),
            )
            computes = not timeout or effort.computed_at - last < most
            self.since = max(self.since, effort.moved_at)
        else:
            # No first step and no read of data takes this long: the rank is stuck in a
            # loop.
            if timeout and now - self.moved > patience(timeout, PATIENCE - 2):
                return
            computes = phase == "first step"  # which loads code
            self.since = max(self.since, effort.moved_at)
        if computes:
            self.since = max(self.since, effort.computed_at)

    def skip(self, seconds: float) -> None:
        """Exclude seconds in which the rank could not run."""
        self.since += seconds
        self.moved += seconds
        self.beat_since += seconds
        self.effort.skip(seconds)

    def slept(self, seconds: float) -> None:
        """Exclude seconds in which the watcher itself, and perhaps everything else,
        stood still."""
        self.skip(seconds)
        self.looked += seconds

    # ---- state

    @property
    def gone(self) -> bool:
        return self.process.gone

    @property
    def over(self) -> bool:
        return self.reader.phase in OVER or self.gone

    @property
    def kernel_state(self) -> str:
        """The state of the rank's own thread, as in /proc."""
        return stat_of(
            f"/proc/{self.entry.pid}/task/{self.reader.word(NATIVE)}"
        )[0]

    def stands(self, now: float, seconds: float) -> bool:
        """True if the rank has made no progress for `seconds`, for whatever reason."""
        if self.reader.phase in OVER:
            return False
        held = now - self.held_since if self.held_since is not None else 0.0
        return now - self.since + held > seconds

    def is_stopped(self, now: float) -> bool:
        """True if the rank has been stopped (SIGSTOP) for longer than one rank alone
        may be."""
        held = self.held_since is not None and now - self.held_since > STOPPED
        return held and self.kernel_state == "T"

    def state(self, now: float, stack: Sequence[str] = ()) -> RankState:
        reader, words = self.reader, self.reader.words()
        state, doing, traced = "X", "", ""
        if not self.gone:
            state, doing = thread_by_kernel(self.entry.pid, words[NATIVE])
            traced = tracer_of(self.entry.pid)
        return RankState(
            rank=self.entry.rank,
            host=self.host,
            pid=self.entry.pid,
            step=words[STEP],
            phase=reader.phase,
            note=reader.note,
            op=reader.operation,
            still=max(0.0, now - self.since),
            longest=self.longest,
            waits=max(words[WAITS], -1),
            state=state,
            doing=doing,
            memory=memory_held(self.entry.pid) if state != "X" else 0,
            # Four missed heartbeats; a stopped process or one in the kernel
            # cannot beat either.
            locked=now - self.beat_since > 4 * BEATS and state not in "TtDX",
            held=now - self.held_since if self.held_since is not None else 0.0,
            traced=traced,
            output=self.output,
            device_op=reader.device_operation,
            device_longest=self.device_longest,
            device_waits=self.device_waits,
            made=tuple(reader.made()),
            calls=tuple(reader.calls()),
            stack=tuple(stack),
        )
