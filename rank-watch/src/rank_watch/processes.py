"""Processes of this host as shown in /proc, and signals that reach no other process.

A number alone does not identify a process: it may be reused after the process has
ended, and a negative number names whole groups, -1 every process of the machine.
`Process` identifies a process by number and start time, and by a pidfd where the kernel
has them.
"""

import errno
import os
import select
import signal
from contextlib import suppress
from pathlib import Path

# Names of the system calls in which ranks' threads are typically seen, by machine and
# number.
_X86_64 = """
    0 read, 1 write, 2 open, 7 poll, 17 pread64, 18 pwrite64, 19 readv, 20 writev, 23 select,
    35 nanosleep, 45 recvfrom, 56 clone, 61 wait4, 74 fsync, 75 fdatasync, 82 rename,
    202 futex (a lock), 230 clock_nanosleep, 232 epoll_wait, 257 openat, 270 pselect6, 271 ppoll,
    435 clone3"""
_AARCH64 = """
    22 epoll_pwait, 38 renameat, 56 openat, 63 read, 64 write, 65 readv, 66 writev, 67 pread64,
    68 pwrite64, 72 pselect6, 73 ppoll, 82 fsync, 83 fdatasync, 98 futex (a lock), 101 nanosleep,
    115 clock_nanosleep, 207 recvfrom, 220 clone, 260 wait4, 276 renameat2, 435 clone3"""


def _named(table: str) -> dict[str, str]:
    # "0 read, 1 write" -> {"0": "read", "1": "write"}
    pairs = (each.split(None, 1) for each in table.split(","))
    return {number: name.strip() for number, name in pairs}


_CALLS = {"x86_64": _named(_X86_64), "aarch64": _named(_AARCH64)}.get(
    os.uname().machine, {}
)
# calls whose first argument is a file descriptor
_WRITES = ("write", "writev")
_ON_FILES = (
    *_WRITES,
    "read",
    "readv",
    "pread64",
    "pwrite64",
    "fsync",
    "fdatasync",
)
# Kernel functions in which a write to a pipe or terminal sleeps, for kernels that hide
# system calls.
_WRITES_IN_KERNEL = (
    "pipe_write",
    "anon_pipe_write",
    "n_tty_write",
    "tty_write",
    "wait_woken",
)
_STREAMS = {1: "standard output", 2: "standard error"}


class Process:
    """A process of this host, held so that a later one with the same number is not
    mistaken for it.

    Raises OSError if no such process runs. `started` is in clock ticks since boot.
    """

    def __init__(self, pid: int, started: int) -> None:
        # 0 is the caller's group, -1 every process, and 1 would end a container.
        if not 1 < pid < 1 << 31:
            raise OSError(
                errno.EINVAL, "no rank can have this process number", str(pid)
            )
        self.pid, self.started = pid, started
        self._descriptor = _descriptor_of(pid)
        # Checked only now: the descriptor stays with the process examined here.
        if self.gone:
            self.close()
            raise ProcessLookupError(
                errno.ESRCH, "the process has ended", str(pid)
            )

    @property
    def gone(self) -> bool:
        return not alive(self.pid, self.started)

    def send(self, number: int) -> bool:
        """Send a signal to this process and to no other; return False if that is
        impossible."""
        with suppress(OSError):
            # With a pidfd the signal cannot reach another process that has
            # taken over the number.
            if self._descriptor >= 0:
                signal.pidfd_send_signal(self._descriptor, number)
                return True
            # Without one, a process could still end between these two lines.
            if not self.gone:
                os.kill(self.pid, number)
                return True
        return False

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _descriptor_of(pid: int) -> int:
    """Return a pidfd of a process; -1 if the system has none."""
    if not hasattr(os, "pidfd_open"):
        return -1
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        # A kernel before 5.3, or a container that forbids the call.
        if error.errno in (errno.ENOSYS, errno.EPERM) and status_of(pid).get(
            "Tgid"
        ) == str(pid):
            return -1
        raise  # it has ended, or this is the number of a thread


def alive(pid: int, started: int) -> bool:
    """True if the process with this number still is the one started at this tick."""
    return started > 0 and started_at(pid) == started


def started_at(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot; 0 if it has
    ended."""
    if pid <= 0:
        return 0
    fields = stat_of(f"/proc/{pid}")
    # Z: a zombie, X: dead. Field 19 after the name is the start time.
    return 0 if fields[0] in "ZX" else int(fields[19])


def stat_of(path: str) -> list[str]:
    """Return the fields of /proc/PID/stat after the name, state first; ["X"] if the
    process has ended."""
    with suppress(OSError):
        text = Path(path, "stat").read_text(errors="replace")
        # The last parenthesis: a process may have ")" in its name.
        return text.rpartition(")")[2].split() or ["X"]
    return ["X"]


def status_of(pid: int) -> dict[str, str]:
    """Return the lines of /proc/PID/status by name; empty if the process has ended."""
    with suppress(OSError):
        lines = (
            Path(f"/proc/{pid}/status")
            .read_text(errors="replace")
            .splitlines()
        )
        return {
            name: value.strip()
            for name, _, value in (each.partition(":") for each in lines)
        }
    return {}


def users_of(pid: int) -> set[int]:
    """Return the real, effective, saved and file system users of a process; they differ
    in setuid programs."""
    return set(map(int, status_of(pid).get("Uid", "").split()))


def catches(pid: int, number: int) -> bool:
    """True if a process has a handler for a signal; without one the signal may end
    it."""
    caught = int(status_of(pid).get("SigCgt", "0"), 16)
    # Bit n - 1 of the mask stands for signal n.
    return bool(caught >> (number - 1) & 1)


def memory_held(pid: int) -> int:
    """Return the bytes of host memory that a process holds."""
    with suppress(OSError, IndexError, ValueError):
        # The second number is the resident set, in pages.
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0


def thread_by_kernel(pid: int, thread: int) -> tuple[str, str]:
    """Return a thread's scheduler state, and a description of it with the system
    call."""
    state = stat_of(f"/proc/{pid}/task/{thread}")[0]
    words = {
        "R": "computing",
        "S": "asleep",
        "D": "waits for a disk or the kernel",
        "T": "stopped",
        "t": "stopped by a debugger",
    }
    if state == "X":
        return state, ""
    return state, f"{words.get(state, state)}{_system_call(pid, thread)}"


def _system_call(pid: int, thread: int) -> str:
    """Describe the system call that a thread is in, and its file, as the end of a
    sentence."""
    name, arguments = system_call_of(pid, thread)
    if name:
        of = ""
        if name in _ON_FILES:
            with suppress(OSError):
                of = f" of {os.readlink(f'/proc/{pid}/fd/{arguments[0]}')}"
        return f" in {name}{of}"
    # A hidden call still has a kernel function, such as futex_wait_queue.
    channel = _channel(pid, thread)
    return f" in {channel}" if channel else ""


def system_call_of(pid: int, thread: int) -> tuple[str, tuple[int, ...]]:
    """Return the name and arguments of the system call that a thread is in.

    The name is "" if it is in none, or if the kernel hides it (Yama's ptrace_scope
    hides it for processes other than children).
    """
    with suppress(OSError, ValueError):
        text = Path(f"/proc/{pid}/task/{thread}/syscall").read_text()
        # "-1" is a thread that sleeps outside any call.
        call, *values = text.split()
        if call not in ("running", "-1") and _CALLS:
            arguments = tuple(int(value, 16) for value in values)
            return _CALLS.get(call, f"system call {call}"), arguments
    return "", ()


def _channel(pid: int, thread: int) -> str:
    """Return the kernel function in which a thread sleeps."""
    with suppress(OSError):
        name = Path(f"/proc/{pid}/task/{thread}/wchan").read_text()
        return "" if name == "0" else name
    return ""


# ---- reasons why a process cannot run


def tracer_of(pid: int) -> str:
    """Return the process that traces a process, such as a debugger, or ""."""
    tracer = int(status_of(pid).get("TracerPid", "0"))
    if not tracer:
        return ""
    return f"{status_of(tracer).get('Name', 'a process')} (process {tracer})"


def unread_output(pid: int) -> str:
    """Return the output stream that a thread of the process waits on for a reader, or
    "".

    Any thread counts: the others may wait for a lock that it holds.
    """
    # By target, as a process may hold the same pipe under several numbers.
    streams = {
        target: number
        for number in _STREAMS
        if (target := _stream(pid, number))
    }
    for thread in _threads(pid) if streams else ():
        name, arguments = system_call_of(pid, thread)
        number = None
        if name in _WRITES:
            with suppress(OSError):
                number = streams.get(
                    os.readlink(f"/proc/{pid}/fd/{arguments[0]}")
                )
        # The kernel hides the call: a full stream and a thread asleep in a
        # write are the evidence.
        elif not name and _channel(pid, thread) in _WRITES_IN_KERNEL:
            full = (each for each in streams.values() if _is_full(pid, each))
            number = next(full, None)
        if number is not None:
            target = _stream(pid, number).partition(":")[0]
            # "standard output, a pipe", but "standard output, /dev/pts/3".
            return f"{_STREAMS[number]}, {'a ' * (target[0] != '/')}{target}"
    return ""


def _threads(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    return []


def _stream(pid: int, number: int) -> str:
    """Return the target of an output stream; "" for files, which need no reader."""
    with suppress(OSError):
        target = os.readlink(f"/proc/{pid}/fd/{number}")
        if target.startswith(
            ("pipe:", "socket:", "/dev/pts/", "/dev/tty", "/dev/console")
        ):
            return target
    return ""


def accepts(file: int, milliseconds: int | None = None) -> bool:
    """Wait until a stream accepts data or has lost its reader; return False if the time
    is over first."""
    # Not `select`, which refuses a file numbered 1,024 or above.
    poll = select.poll()
    poll.register(file, select.POLLOUT)
    return bool(poll.poll(milliseconds))


def _is_full(pid: int, number: int) -> bool:
    """True if an output stream accepts no more data at present."""
    with suppress(OSError):
        # Opened anew: O_NONBLOCK on the process's own descriptor would change
        # it for the process.
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        file = os.open(f"/proc/{pid}/fd/{number}", flags)
        try:
            return not accepts(file, 0)
        finally:
            os.close(file)
    return False
