"""The watcher's process, seen by the rank that started it.

It is restarted when it dies, is stopped, or makes no progress itself.
"""

import logging
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from .hosted import Hosted
from .positions import LOOKED, RANK, Positions
from .processes import stat_of

# Without the launcher's variables, so that a search for ranks by environment finds only
# ranks.
_ENVIRONMENT = {
    name: os.environ[name]
    for name in ("PATH", "LD_LIBRARY_PATH")
    if name in os.environ
}
_START = "import sys; sys.path.insert(0, {!r}); from rank_watch.watcher import main; sys.exit(main())"
_LOOK_EVERY = 1.0  # seconds
_STOPPED = 3.0  # seconds that the watcher may be stopped while this rank runs
_SILENT = 20.0  # seconds without a look by the watcher
_SHORT = 10.0  # seconds that a watcher must live for its start to count as successful
_ATTEMPTS = 3  # failures in a row


class WatcherProcess:
    """Starts this host's watcher and supervises it in a thread until `close`.

    Problems are reported to `positions.notices`, for the run's log, and to this rank's
    log.
    """

    def __init__(self, hosted: Hosted, positions: Positions) -> None:
        self.hosted, self.positions = hosted, positions
        self._closed = threading.Event()
        self._process = self._start()
        self._thread = threading.Thread(
            target=self._look_after, name="watcher", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop supervising, as this rank is over; the watcher ends when all ranks of
        the host have."""
        self._closed.set()

    def _start(self) -> "subprocess.Popen[str] | None":
        root = str(Path(__file__).parents[1])
        # -S: without site-packages Python starts in less time, and nothing in
        # them can fail.
        command = [sys.executable, "-S", "-c", _START.format(root)]
        self._started = time.monotonic()
        self._heard = self._started
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env=_ENVIRONMENT,
                text=True,
            )
        except OSError:
            return None
        assert process.stdin is not None
        with suppress(OSError):  # it has been killed already
            # On standard input, as a command line is limited and visible to
            # everybody.
            process.stdin.write(str(self.hosted))
            process.stdin.close()
        return process

    def _look_after(self) -> None:
        failed = 0
        last = time.monotonic()
        stopped_since: float | None = None
        while not self._closed.wait(_LOOK_EVERY):
            now = time.monotonic()
            # this process itself was stopped, or got no CPU time
            if now - last > 2 * _LOOK_EVERY:
                self._heard, stopped_since = now, None
            last = now
            stopped = (
                self._process is not None and _state(self._process.pid) == "T"
            )
            stopped_since = (stopped_since or now) if stopped else None
            # In milliseconds of the same machine's monotonic clock.
            self._heard = max(self._heard, self.positions.words[LOOKED] / 1e3)
            what = self._what_is_wrong(now, stopped_since)
            if not what or self._closed.is_set():
                continue
            # Failures in a row: one that has lived for a while starts the
            # count again.
            failed = failed + 1 if now - self._started < _SHORT else 1
            self._end()
            if self._closed.is_set():
                # this rank has ended meanwhile: a new watcher would find nothing to do
                return
            if failed > _ATTEMPTS:
                self._say(
                    f"{what} and cannot be started again: hangs are not noticed from here on"
                )
                # `positions.watched` tells the run that a hang will not end
                # it.
                self.positions.watched = False
                return
            self._say(f"{what}; it is started again")
            self._process, stopped_since = self._start(), None
        if self._process is not None:
            # reap the watcher if this process lives on
            self._process.wait()

    def _what_is_wrong(self, now: float, stopped_since: float | None) -> str:
        """Describe the watcher's failure, as the beginning of a sentence; "" if it
        works."""
        process, who = self._process, f"the watcher of host {self.hosted.host}"
        if process is None:
            return f"{who} could not be started"
        if (code := process.poll()) is not None:
            how = (
                f"was killed by signal {-code}"
                if code < 0
                else f"ended with code {code}"
            )
            return f"{who} {how}"
        if stopped_since is not None and now - stopped_since >= _STOPPED:
            return f"{who} was stopped by a signal"
        if now - self._heard > _SILENT:
            return f"{who} has not looked at the ranks for {now - self._heard:.0f} s"
        return ""

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            with suppress(
                subprocess.TimeoutExpired
            ):  # the kernel may not release it
                self._process.wait(1.0)

    def _say(self, text: str) -> None:
        self.positions.notices.append(text)
        rank = self.positions.words[RANK]
        logging.getLogger(f"{self.hosted.program}.rank{rank}").warning(
            "%s", text
        )


def _state(pid: int) -> str:
    return stat_of(f"/proc/{pid}")[0]
