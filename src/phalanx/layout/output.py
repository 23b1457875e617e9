"""Standard output and error that never wait for their reader.

A paused pager, a terminal after Ctrl-S, a full pipe or a full disk would block `print`,
and with it the training. So text is queued, and a thread writes it. If the queue is
full, lines are dropped and counted, and the count is written once the reader continues.
The thread exists only while text is queued: a process without threads can be forked at
once.
"""

import _thread
import io
import logging
import os
import select
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from .files import reason
from .signals import signals_held_back

ROOM = 1 << 20  # the most characters in the queue
# Beyond this, text that ends no line is dropped: a progress bar is redrawn anyway.
_FEW = ROOM // 4
# Seconds without progress after which the end of a process leaves text unwritten.
GRACE = 3.0
AGAIN = 0.3  # the same for a reader that took nothing during an earlier wait
LONGEST = 30.0  # seconds in total, for a very slow reader


class Outlet:
    """The text on its way to one open file. `put` may be called in a signal handler."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = (
            write  # may block forever; raises OSError if it cannot write
        )
        self.error = ""  # the reason why the last text could not be written
        self._reset()
        _OUTLETS.add(self)

    def _reset(self) -> None:
        """Forget the queue. A forked child has a copy of it, but not the thread."""
        self.lock = threading.RLock()
        # texts, and the number of lines in each
        self._queue: deque[tuple[str, int]] = deque()
        self._size = 0  # characters in the queue
        self._dropped = 0  # dropped lines that no notice has counted yet
        self._writing = False
        self._thread = 0
        self.moved = time.monotonic()  # time of the file's last progress
        self._given_up = -1.0  # `moved` when the last flush gave up

    def put(self, text: str) -> None:
        """Queue a text. It is dropped if the queue is full."""
        lines = text.count("\n")
        with self.lock:
            # Unfinished lines, such as progress bars, must leave room for
            # whole ones.
            room = ROOM if lines else _FEW
            # An empty queue takes any text, however long.
            if self._queue and self._size + len(text) > room:
                self._dropped += lines
                return
            # The notice stands where lines are missing, before the text that
            # found room.
            if self._dropped:
                self._append(_notice(self._dropped), self._dropped)
                self._dropped = 0
            self._append(text, lines)
            # One thread writes, and it takes what is queued meanwhile.
            if self._writing:
                return
            self._writing = True
            self.moved = time.monotonic()
        try:
            # Not `threading.Thread`: a signal handler may interrupt while its locks are
            # held. Python calls handlers in the main thread only. A signal delivered to
            # another thread would not wake the main thread, so a command that waits for
            # its ranks would miss Ctrl-C.
            with signals_held_back():
                _thread.start_new_thread(self._work, ())
        # No thread can start: write here, even if that may block.
        except RuntimeError:  # the limit on processes
            self._work()

    def _append(self, text: str, lines: int) -> None:
        self._queue.append((text, lines))
        self._size += len(text)

    def _next(self) -> tuple[str, int] | None:
        """The next text to write, or None if the thread is to end."""
        with self.lock:
            if self._queue:
                text, lines = self._queue.popleft()
                self._size -= len(text)
                return text, lines
            # A notice at the end of the queue, unless writing fails anyway.
            if self._dropped and not self.error:
                lines, self._dropped = self._dropped, 0
                return _notice(lines), lines
            # Inside the lock: a text that is put after this starts a new
            # thread.
            self._writing = False
            return None

    def _work(self) -> None:
        self._thread = threading.get_native_id()
        while (work := self._next()) is not None:
            text, lines = work
            try:
                self._write(text)
                self.error = ""
            except (
                OSError,
                ValueError,
            ) as error:  # ValueError: the stream was closed
                self.error = (
                    reason(error) if isinstance(error, OSError) else str(error)
                )
                gone = isinstance(error, BrokenPipeError)
                # A reader that has gone misses nothing; on a full disk the
                # lines count as lost.
                with self.lock:
                    self._dropped += 0 if gone else lines
            self.moved = time.monotonic()

    def flush(self, grace: float = GRACE, longest: float = LONGEST) -> int:
        """Wait until everything is written, or nothing progresses any more.

        Returns the number of lines that could not be written.
        """
        began = time.monotonic()
        # A reader that took nothing during an earlier wait gets little time again, as
        # the end of a process flushes several times. It gets some, as it may have
        # returned just now.
        patience = min(grace, AGAIN) if self.moved == self._given_up else grace
        while self._writing:
            now = time.monotonic()
            if (
                now > began + longest
                or now > max(began, self.moved) + patience
            ):
                self._given_up = self.moved
                break
            time.sleep(0.002)
        # The text being written has left the queue, but may not have arrived:
        # it counts as a line.
        with self.lock:
            waiting = sum(lines for _, lines in self._queue)
            return waiting + self._dropped + int(self._writing)

    @property
    def idle(self) -> bool:
        """True if no thread of this outlet is left."""
        return (
            # The thread has ended when the kernel no longer lists it.
            not self._writing
            and not Path(f"/proc/self/task/{self._thread or '-'}").exists()
        )


def _notice(lines: int) -> str:
    what = "line was" if lines == 1 else "lines were"
    return f"{lines:,} {what} not shown: nobody read the output\n"


_OUTLETS: "weakref.WeakSet[Outlet]" = weakref.WeakSet()


def _after_fork() -> None:
    for outlet in list(_OUTLETS):
        outlet._reset()


os.register_at_fork(after_in_child=_after_fork)


class UnblockedStream(io.TextIOBase):
    """A replacement for a text stream that writes through an outlet."""

    def __init__(self, plain: TextIO, outlet: Outlet) -> None:
        self.plain, self.outlet = plain, outlet
        self._begun = ""  # an unfinished line

    def write(self, text: str) -> int:
        with self.outlet.lock:
            # Whole lines only, so that lines of threads and ranks are not
            # mixed.
            whole, newline, rest = (self._begun + text).rpartition("\n")
            self._begun = rest
            if newline:
                self.outlet.put(whole + newline)
        return len(text)

    def flush(self) -> None:
        """Queue an unfinished line. This does not wait until it is written."""
        with self.outlet.lock:
            begun, self._begun = self._begun, ""
            if begun:
                self.outlet.put(begun)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.plain.encoding or "utf-8"

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self.plain.errors

    @property
    def buffer(self) -> object:
        """The stream's own bytes. Writing to them may block."""
        return self.plain.buffer

    @property
    def name(self) -> str:
        return str(getattr(self.plain, "name", ""))

    def fileno(self) -> int:
        return self.plain.fileno()

    def isatty(self) -> bool:
        return self.plain.isatty()

    def writable(self) -> bool:
        return True


def unblocked(stream: TextIO, *beside: TextIO) -> TextIO:
    """Replace a stream by one that never blocks.

    Streams `beside` it that write to the same file, as after `2>&1`, share its outlet,
    so the order of lines stays.
    """
    if isinstance(stream, UnblockedStream):
        return stream
    # A closed stream cannot be flushed, and needs not be.
    with suppress(OSError, ValueError):
        stream.flush()  # text buffered before
    for other in beside:
        if isinstance(other, UnblockedStream) and _same_file(stream, other):
            return UnblockedStream(stream, other.outlet)
    return UnblockedStream(stream, Outlet(_writer(stream)))  # type: ignore[return-value]


def _same_file(one: TextIO, other: TextIO) -> bool:
    try:
        return os.path.sameopenfile(one.fileno(), other.fileno())
    except (OSError, ValueError):
        return False


def _writer(stream: TextIO) -> Callable[[str], None]:
    """The function with which the thread writes to a stream.

    A file of this process is written past its buffer: Python aborts if a thread blocks
    in the buffer when the process ends.
    """
    descriptor = -1
    # A notebook's stream returns a file number that is not its own.
    if isinstance(stream, io.TextIOWrapper):
        with suppress(OSError, ValueError):
            descriptor = stream.fileno()
    encoding, errors = (
        getattr(stream, "encoding", None) or "utf-8",
        "backslashreplace",
    )

    def write(text: str) -> None:
        if descriptor < 0:
            stream.write(text)
            stream.flush()
            return
        left = memoryview(text.encode(encoding, errors))
        # A write may take only a part of the text.
        while left:
            try:
                left = left[os.write(descriptor, left) :]
            # Another process has made the terminal non-blocking.
            except BlockingIOError:
                # Wait until the terminal takes more, as a blocking write
                # would.
                waiting = select.poll()
                waiting.register(descriptor, select.POLLOUT)
                waiting.poll()

    return write


# ---- the streams of this process

_SCOPES: list[tuple[TextIO, TextIO]] = []  # each open scope's plain streams


@contextmanager
def output_scope() -> Iterator[None]:
    """A context that restores the streams replaced by `unblock_output`.

    At the end of the outermost scope it writes queued output, as far as the reader
    takes it.
    """
    _SCOPES.append((sys.stdout, sys.stderr))
    try:
        yield
    finally:
        plain = _SCOPES.pop()
        # Only the outermost scope restores, and only streams that were
        # replaced in it.
        if not _SCOPES and (sys.stdout, sys.stderr) != plain:
            try:
                flush_output()
            finally:
                _replace(*plain)


def unblock_output() -> None:
    """Make standard output and error non-blocking until the end of the scope."""
    error = unblocked(sys.stderr)
    _replace(unblocked(sys.stdout, error), error)


def _replace(output: TextIO, error: TextIO) -> None:
    # Log handlers hold the stream that they were created with.
    before = sys.stderr
    sys.stdout, sys.stderr = output, error
    for handler in logging.root.handlers:
        if (
            isinstance(handler, logging.StreamHandler)
            and handler.stream is before
        ):
            handler.setStream(error)


def flush_output(grace: float = GRACE) -> None:
    """Write queued output, as far as the reader takes it.

    Lost lines are reported on standard error if that is another file.
    """
    output, error = sys.stdout, sys.stderr
    for stream in (output, error):
        stream.flush()
    if isinstance(output, UnblockedStream) and isinstance(
        error, UnblockedStream
    ):
        # Output first: its losses are reported on standard error, which is
        # flushed last.
        lost, outlet = output.outlet.flush(grace), output.outlet
        if lost and outlet is not error.outlet:
            why = outlet.error or "nobody read it"
            what = (
                "line of standard output was"
                if lost == 1
                else "lines of standard output were"
            )
            error.write(f"phalanx: {lost:,} {what} not shown: {why}\n")
    if isinstance(error, UnblockedStream):
        error.outlet.flush(grace)


def flush_stream(stream: TextIO) -> None:
    """Write one stream's queue, as far as the reader takes it."""
    stream.flush()
    if isinstance(stream, UnblockedStream):
        stream.outlet.flush()


def put_line(stream: TextIO, line: str) -> None:
    """Write a line in a signal handler, where a plain stream's buffer may be in use."""
    if isinstance(stream, UnblockedStream):
        stream.outlet.put(f"{line}\n")
    else:
        with suppress(OSError, ValueError):
            os.write(stream.fileno(), f"{line}\n".encode())


def settle_output() -> None:
    """Write queued output and end the writing thread, so that the process can fork."""
    flush_output()
    # The thread ends soon after its last text; do not wait for longer than
    # this.
    end = time.monotonic() + 0.2
    outlets = [
        each.outlet
        for each in (sys.stdout, sys.stderr)
        if isinstance(each, UnblockedStream)
    ]
    while not all(each.idle for each in outlets) and time.monotonic() < end:
        time.sleep(0.001)
