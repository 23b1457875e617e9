"""Prints the watcher's lines on standard error without ever waiting for a reader.

A terminal stopped with Ctrl-S, or a pager that nobody scrolls, accepts no more output.
The ranks' own output goes there too, so this is exactly when a watcher is needed.
"""

import os
import threading
from collections import deque
from contextlib import suppress

from .processes import accepts
from .untrusted import one_line

_MOST = 64  # maximum texts kept while nobody reads


class Voice:
    """Prints texts in order, from a daemon thread."""

    def __init__(self, program: str, file: int = 2) -> None:
        self.program, self.file = program, file
        # A full queue drops its oldest text.
        self._texts: deque[str] = deque(maxlen=_MOST)
        self._changed = threading.Condition()
        self._open = 0  # texts not printed yet
        self._thread: threading.Thread | None = None

    def say(self, text: str) -> None:
        """Print a text of one or more lines later."""
        lines = [one_line(line) for line in text.strip().split("\n")]
        with self._changed:
            # Only if none was dropped: a text that is gone will not be
            # printed.
            self._open += len(self._texts) < _MOST
            self._texts.append(f"{self.program}: " + "\n  ".join(lines) + "\n")
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._print, name="voice", daemon=True
                )
                self._thread.start()

    def flush(self, seconds: float) -> bool:
        """Wait at most `seconds` until everything is printed; return True if it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._open, seconds)

    def _print(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._texts)
                text = self._texts.popleft()
            with suppress(OSError):  # nobody will ever read it
                # Outside the lock: writing may block for as long as nobody
                # reads.
                self._write(text.encode())
            with self._changed:
                self._open -= 1
                self._changed.notify_all()

    def _write(self, raw: bytes) -> None:
        left = memoryview(raw)
        while left:
            try:
                # A write may take a part only.
                left = left[os.write(self.file, left) :]
            # somebody has made the stream non-blocking for all its users
            except BlockingIOError:
                accepts(self.file)
