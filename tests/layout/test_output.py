"""Writing to standard output and error returns at once, whatever reads them, and loses nothing of what
somebody reads."""

from __future__ import annotations

import errno
import fcntl
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator

import pytest

from phalanx.layout import output
from phalanx.layout.output import (
    ROOM,
    Outlet,
    UnblockedStream,
    flush_output,
    output_scope,
    put_line,
    settle_output,
    unblock_output,
    unblocked,
)


class Reader:
    """A file whose reader may pause; `broken` is the error of every write."""

    def __init__(self) -> None:
        self.reads = threading.Event()
        self.begun = threading.Event()
        self.broken: OSError | None = None
        self.texts: list[str] = []

    def write(self, text: str) -> None:
        self.begun.set()
        self.reads.wait()
        if self.broken:
            raise self.broken
        self.texts.append(text)

    @property
    def lines(self) -> list[str]:
        return "".join(self.texts).splitlines()


def _paused() -> tuple[Reader, Outlet]:
    reader = Reader()
    return reader, Outlet(reader.write)


def test_a_reader_gets_every_line_in_order() -> None:
    reader, outlet = _paused()
    reader.reads.set()
    for n in range(3000):
        outlet.put(f"line {n}\n")
    assert outlet.flush() == 0
    assert reader.lines == [f"line {n}" for n in range(3000)]


def test_lines_that_do_not_fit_are_dropped_counted_and_told_where_they_are_missing() -> (
    None
):
    reader, outlet = _paused()
    line = "x" * 1000 + "\n"
    outlet.put("first\n")
    reader.begun.wait()
    count = 0
    while outlet._dropped < 37:  # nobody reads
        outlet.put(line)
        count += 1
    assert count - 37 == ROOM // len(line)
    reader.reads.set()
    outlet.flush()
    outlet.put("last\n")
    assert outlet.flush() == 0
    kept = count - 37
    assert reader.lines[0] == "first"
    assert reader.lines[1 : 1 + kept] == [line.strip()] * kept
    assert reader.lines[1 + kept :] == [
        "37 lines were not shown: nobody read the output",
        "last",
    ]


def test_the_end_of_a_process_waits_only_as_long_as_something_moves() -> None:
    reader, outlet = _paused()
    outlet.put("one\n")
    reader.begun.wait()
    outlet.put("two\nthree\n")
    assert outlet.flush(grace=0.01) == 3
    assert outlet.flush(grace=60.0, longest=0.01) == 3
    reader.reads.set()
    while not outlet.idle:
        pass
    assert outlet.flush() == 0
    assert reader.lines == ["one", "two", "three"]


def test_a_reader_that_was_waited_for_in_vain_is_not_waited_for_as_long_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader, outlet = _paused()
    outlet.put("one\n")
    reader.begun.wait()
    assert outlet.flush(grace=0.01) == 1
    outlet.put("two\n")
    assert outlet.flush(grace=1e9, longest=1e9) == 2
    monkeypatch.setattr(output, "AGAIN", 1e9)
    threading.Timer(0.0, reader.reads.set).start()
    assert outlet.flush(grace=1e9, longest=1e9) == 0  # it has come back
    while not outlet.idle:
        pass
    outlet.put("three\n")
    assert outlet.flush() == 0
    assert reader.lines == ["one", "two", "three"]


def test_a_file_that_cannot_be_written_for_a_while_costs_those_lines_only() -> (
    None
):
    reader, outlet = _paused()
    reader.reads.set()
    outlet.put("before\n")
    outlet.flush()
    reader.broken = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    outlet.put("lost\n")
    outlet.flush()
    outlet.put("lost\nas well\n")
    assert outlet.flush() == 3
    assert outlet.error == "No space left on device"
    reader.broken = None
    outlet.put("after\n")
    assert outlet.flush() == 0
    assert reader.lines == [
        "before",
        "3 lines were not shown: nobody read the output",
        "after",
    ]


def test_a_pipe_that_is_closed_takes_everything_without_a_word() -> None:
    reader, outlet = _paused()
    reader.reads.set()
    reader.broken = BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
    for _ in range(5):
        outlet.put("line\n")
    assert outlet.flush() == 0


def test_a_thread_is_there_only_while_something_is_written() -> None:
    reader, outlet = _paused()
    outlet.put("line\n")
    reader.begun.wait()
    assert not outlet.idle
    reader.reads.set()
    outlet.flush()
    while not outlet.idle:  # the kernel may take a moment
        pass
    assert threading.active_count() == 1 or "work" not in str(
        threading.enumerate()
    )


def test_the_thread_that_writes_receives_no_signals() -> None:
    """A signal that it received would not wake the main thread, which calls the handlers."""
    masks: list[set[int]] = []

    def write(text: str) -> None:
        masks.append(
            {
                int(each)
                for each in signal.pthread_sigmask(signal.SIG_BLOCK, ())
            }
        )

    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    outlet = Outlet(write)
    outlet.put("a line\n")
    assert outlet.flush() == 0
    assert {
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGUSR1,
    } <= masks[0]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_a_signal_handler_may_write_while_a_line_is_being_queued() -> None:
    reader, outlet = _paused()
    stream = UnblockedStream(sys.__stdout__, outlet)
    with outlet.lock:  # where the signal has come between
        put_line(stream, "from the handler")
    reader.reads.set()
    assert outlet.flush() == 0
    assert reader.lines == ["from the handler"]


def test_no_more_threads_are_no_reason_to_lose_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(*given: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(output._thread, "start_new_thread", none)
    reader, outlet = _paused()
    reader.reads.set()
    outlet.put("line\n")
    assert reader.lines == ["line"]


def test_a_forked_child_writes_though_its_parent_s_reader_has_paused() -> None:
    reader, outlet = _paused()
    outlet.put("the parent's\n")
    reader.begun.wait()
    outlet.put("still queued\n")
    child = os.fork()
    if not child:
        reader.reads = threading.Event()
        reader.reads.set()
        outlet.put("the child's\n")
        outlet.flush()
        os._exit(0 if reader.lines == ["the child's"] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    reader.reads.set()
    assert outlet.flush() == 0
    assert reader.lines == ["the parent's", "still queued"]


# ---- streams


def test_print_gives_whole_lines_and_a_flush_what_has_no_end_yet() -> None:
    reader, outlet = _paused()
    reader.reads.set()
    stream = UnblockedStream(io.StringIO(), outlet)
    print("a", 1, file=stream)
    print("b", end="", file=stream)
    assert outlet.flush() == 0
    assert reader.texts == ["a 1\n"]
    print("c\nd", end="", file=stream)
    stream.flush()
    outlet.flush()
    assert "".join(reader.texts) == "a 1\nbc\nd"
    assert (stream.isatty(), stream.writable(), stream.encoding) == (
        False,
        True,
        "utf-8",
    )


@pytest.fixture
def pipe() -> Iterator[tuple[int, io.TextIOWrapper]]:
    """A pipe of one page: its end to read, and its end to write as a stream."""
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    stream = os.fdopen(write, "w", encoding="ascii")
    before = set(output._OUTLETS)
    yield read, stream
    os.close(read)
    # A thread that still writes does so by number: once closed, the number may be another test's file.
    for outlet in set(output._OUTLETS) - before:
        outlet.flush()
    stream.close()


def _all(descriptor: int, lines: int) -> list[str]:
    data = b""
    while data.count(b"\n") < lines:
        data += os.read(descriptor, 65536)
    return data.decode().splitlines()


@pytest.mark.parametrize("blocking", [True, False])
def test_a_full_pipe_blocks_nobody_and_keeps_the_order(
    blocking: bool, pipe: tuple[int, io.TextIOWrapper]
) -> None:
    read, plain = pipe
    os.set_blocking(plain.fileno(), blocking)
    error = unblocked(os.fdopen(os.dup(plain.fileno()), "w", encoding="ascii"))
    stream = unblocked(plain, error)
    wanted = []
    for n in range(2000):
        print("out", n, file=stream)
        print("err", n, "über", file=error)  # which ASCII cannot write
        wanted += [f"out {n}", f"err {n} \\xfcber"]
    assert _all(read, 4000) == wanted
    assert isinstance(stream, UnblockedStream)
    assert stream.outlet.flush() == 0
    error.plain.close()  # type: ignore[attr-defined]


def test_streams_of_different_files_do_not_wait_for_each_other(
    pipe: tuple[int, io.TextIOWrapper], tmp_path: object
) -> None:
    _, plain = pipe
    read, write = os.pipe()
    error = unblocked(os.fdopen(write, "w"))
    stream = unblocked(plain, error)
    stream.write("x" * 8192 + "\n")  # more than the pipe takes
    error.write("an error\n")
    assert _all(read, 1) == ["an error"]
    error.plain.close()  # type: ignore[attr-defined]
    os.close(read)


def test_the_streams_of_a_process_are_replaced_until_the_outermost_scope_ends(
    capfd: pytest.CaptureFixture[str],
) -> None:
    plain = sys.stdout, sys.stderr
    handler = logging.StreamHandler(sys.stderr)
    logging.root.addHandler(handler)
    try:
        with output_scope():
            assert (sys.stdout, sys.stderr) == plain
            with output_scope():
                unblock_output()
                unblock_output()  # once is enough
                print("inside")
            print("between")
            assert isinstance(sys.stdout, UnblockedStream)
            assert handler.stream is sys.stderr
            handler.emit(logging.makeLogRecord({"msg": "logged"}))
        assert (sys.stdout, sys.stderr) == plain
        assert handler.stream is plain[1]
    finally:
        logging.root.removeHandler(handler)
    told = capfd.readouterr()
    assert told.out == "inside\nbetween\n"
    assert told.err == "logged\n"


def test_a_notebook_s_stream_is_written_by_its_own_method() -> None:
    class Cell(io.StringIO):
        def fileno(self) -> int:
            return 1  # of the server's terminal

    cell = Cell()
    stream = unblocked(cell)
    stream.write("shown\n")
    assert isinstance(stream, UnblockedStream)
    assert stream.outlet.flush() == 0
    assert cell.getvalue() == "shown\n"


def test_what_nobody_has_read_is_told_on_the_other_stream(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with output_scope(), open("/dev/full", "w") as full:
        unblock_output()
        before, sys.stdout = sys.stdout, unblocked(full)
        print("one\ntwo")
        flush_output()
        sys.stdout = before
    text = "phalanx: 2 lines of standard output were not shown: No space left on device\n"
    assert capfd.readouterr() == ("", text)


def test_a_process_is_without_threads_before_it_forks_ranks(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with output_scope():
        unblock_output()
        print("a line")
        settle_output()
        assert isinstance(sys.stdout, UnblockedStream)
        assert sys.stdout.outlet.idle
    assert capfd.readouterr().out == "a line\n"


def test_a_signal_in_a_plain_process_is_written_past_the_buffer(
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = signal.signal(
        signal.SIGUSR2, lambda *_: put_line(sys.stderr, "asked")
    )
    try:
        os.kill(os.getpid(), signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert capfd.readouterr().err == "asked\n"
