"""Reads a rank's position from another process: its host's watcher, or an observer.

The memory belongs to the rank, and the reader may be another user. So it is not mapped
(a file that shrinks under a map kills the reader), every value is checked, and no
number in it is used as a process to signal.
"""

import json
import os
import re
import stat
import struct
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from .positions import (
    ANSWERS,
    ASKS,
    CALL,
    CALLS_KEPT,
    COUNTS,
    DEVICE_AT,
    FILES,
    GROUPS,
    LOG,
    NOTE,
    OP,
    OVER,
    PASSED,
    PHASE,
    RING,
    ROOM,
    SIZE,
    STACKS,
    STEP,
    TEXTS,
    THREAD,
    WORDS,
    phase_named,
)
from .processes import Process, catches, users_of
from .untrusted import items, line, one_line, whole

MOST_RANKS = 1 << 24  # upper bound of a rank's number
TEXT = 2000  # maximum characters of a text
FRAMES = 200  # maximum frames of a stack
FLIGHT = 1 << 24  # maximum bytes of an NCCL record
_PAGE = struct.Struct(f"{WORDS}q")
_WORD = struct.Struct("q")

GroupKey = tuple[str, tuple[int, ...], int]


@dataclass(frozen=True)
class Made:
    """A call that a rank has made.

    Its group is identified by name, ranks, and the number of equal groups made before
    it. `nth` counts the group's collectives, or the messages in one direction between
    the same two ranks.
    """

    number: int
    group: GroupKey
    text: str
    op: str
    peer: int  # as a rank of the world; -1: a collective
    sends: bool
    nth: int

    def __str__(self) -> str:
        way = (
            f" {'to' if self.sends else 'from'} rank {self.peer}"
            if self.peer >= 0
            else ""
        )
        return f"{self.text}{way} on {self.group[0]}{f' of {self.op}' if self.op else ''}"


class PositionReader:
    """A rank's position, read through the open files of its process.

    Raises OSError unless `paths` are memory files that this very process created as one
    of our ranks. `owner`: the user that must own the process and its files; None for
    the ranks of the watcher's own run. `writes`: the watcher stores its times there.
    """

    def __init__(
        self,
        process: Process,
        paths: Sequence[str],
        owner: int | None = None,
        *,
        writes: bool = False,
    ) -> None:
        self.process = process
        self._files: list[int] = []
        try:
            if owner is not None and users_of(process.pid) != {owner}:
                raise PermissionError(
                    f"process {process.pid} is not a rank of user {owner}"
                )
            for path, what in zip(paths, FILES, strict=True):
                # Only the first file, and only by the watcher of the run
                # itself.
                access = (
                    os.O_RDWR if writes and not self._files else os.O_RDONLY
                )
                self._files.append(
                    _open_memory(process.pid, path, what, owner, access)
                )
            # A short file is refused now rather than at the first look.
            self.words()
        except (OSError, ValueError) as error:
            self.close()
            raise (
                error if isinstance(error, OSError) else OSError(str(error))
            ) from None
        self._texts: list[str] = []
        self._groups: dict[int, GroupKey] = {}
        self._alike: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self._read = 0
        self._learning = threading.Lock()

    def close(self) -> None:
        for file in self._files:
            os.close(file)
        self._files = []
        self.process.close()

    def words(self) -> tuple[int, ...]:
        """Return the current words of the page."""
        raw = os.pread(self._files[0], _PAGE.size, 0)
        # The rank may have shrunk its file.
        if len(raw) < _PAGE.size:
            raise OSError("the memory of the rank is too short")
        return _PAGE.unpack(raw)

    def word(self, number: int) -> int:
        return self.words()[number]

    def write(self, number: int, value: int) -> None:
        """Set a word; used for the watcher's own words."""
        os.pwrite(self._files[0], _WORD.pack(value), number * _WORD.size)

    def mark(self) -> tuple[int, ...]:
        """Return the words that change when the rank makes progress."""
        return self.words()[STEP : PASSED + 1]

    @property
    def phase(self) -> str:
        return phase_named(self.word(PHASE))

    @property
    def note(self) -> str:
        raw = os.pread(self._files[0], ROOM, NOTE)
        # The rank may have written any length.
        length = min(int.from_bytes(raw[:8], "little"), ROOM - 8)
        return one_line(raw[8 : 8 + length].decode(errors="replace"))

    def text(self, number: int) -> str:
        with self._learning:
            end = min(self.word(TEXTS), SIZE - LOG)
            # Only what was written since the last call is read.
            if end > self._read:
                raw = os.pread(
                    self._files[0], end - self._read, LOG + self._read
                )
                self._read = end
                # The last element is empty: every text ends with a newline.
                for each in raw.split(b"\n")[:-1]:
                    self._learn(each)
        return self._texts[number] if 0 <= number < len(self._texts) else ""

    def _learn(self, raw: bytes) -> None:
        """Add a line of the log of texts; an invalid one counts as empty."""
        text = ""
        with suppress(ValueError, RecursionError):
            parsed = json.loads(raw)
            text = parsed if isinstance(parsed, str) else ""
        self._texts.append(one_line(text[:TEXT]))
        match = re.fullmatch(r"group (\d{1,9}) (.*)", text)
        if match and len(self._groups) < GROUPS:
            with suppress(ValueError, RecursionError):
                self._add_group(int(match[1]), json.loads(match[2]))

    def _add_group(self, number: int, parsed: object) -> None:
        name, members = items(parsed, 2)
        ranks = tuple(
            whole(rank, 0, MOST_RANKS) for rank in items(members, MOST_RANKS)
        )
        alike = line(name, TEXT), ranks
        # Equal groups are told apart by their order, which is the same on all
        # ranks.
        self._groups[number] = *alike, self._alike[alike]
        self._alike[alike] += 1

    @property
    def operation(self) -> str:
        return self.text(self.word(OP))

    def made(self) -> list[tuple[GroupKey, int]]:
        """Return the number of collectives that the rank has made on each of its
        groups."""
        # Reads the log, so that all groups are known.
        self.text(0)
        raw = os.pread(self._files[0], RING - COUNTS, COUNTS)
        counts = [
            count for (count,) in _WORD.iter_unpack(raw[: len(raw) // 8 * 8])
        ]
        return [
            (group, max(0, counts[number % GROUPS]))
            # Negative counts are not the work of a rank.
            for number, group in self._groups.items()
            if number % GROUPS < len(counts)
        ]

    def calls(self) -> list[Made]:
        """Return the last calls, oldest first."""
        self.text(0)
        made = []
        raw = os.pread(self._files[0], LOG - RING, RING)
        for at in range(0, len(raw) - CALL.size + 1, CALL.size):
            number, group, text, op, peer, nth = CALL.unpack_from(raw, at)
            # 0: this place of the ring was never written.
            if number and group in self._groups:
                of = self._groups[group]
                # The inverse of `Positions.call`: peer * 2 + sends, with the
                # peer as an index in the group.
                other = of[1][peer // 2] if 0 <= peer < 2 * len(of[1]) else -1
                sends = peer >= 0 and bool(peer % 2)
                made.append(
                    Made(
                        number,
                        of,
                        self.text(text),
                        self.text(op),
                        other,
                        sends,
                        nth,
                    )
                )
        return sorted(made, key=lambda call: call.number)[-CALLS_KEPT:]

    def ask_for_stacks(self) -> int:
        """Request stacks from the process and return the offset where they will begin.
        It may be unable to answer."""
        # Stacks are appended, so the offset tells this answer from earlier
        # ones.
        begin = os.fstat(self._files[1]).st_size
        # without the fault handler the signal would end the process
        if self.phase not in OVER and catches(self.process.pid, STACKS):
            self.process.send(STACKS)
        return begin

    @property
    def device_operation(self) -> str:
        """The operation that the rank's device is at, while the rank itself makes no
        progress."""
        return self.text(self.word(DEVICE_AT))

    def ask_for_flight(self) -> None:
        """Request the record of NCCL calls, which the rank may be unable to give."""
        self.write(ASKS, 1)

    def flight(self) -> bytes | None:
        """Return the requested record of NCCL calls; None until it is there."""
        if self.word(ANSWERS) != self.word(ASKS):
            return None
        return os.pread(self._files[2], FLIGHT, 0)

    def stack(self, begin: int) -> list[str]:
        """Return the stack of the rank's own thread, innermost frame first, from what
        was written since `begin`."""
        text = os.pread(self._files[1], 1 << 20, begin).decode(
            errors="replace"
        )
        # As the fault handler writes thread ids: 16 hexadecimal digits,
        # unsigned.
        mine = f"0x{self.word(THREAD) & (1 << 64) - 1:016x}"
        # The thread that handled the signal is titled "Current thread", the
        # others "Thread".
        for part in text.replace("\nCurrent thread", "\nThread").split(
            "\nThread "
        ):
            if mine in part.partition("\n")[0]:
                frames = [
                    one_line(frame.strip()[:TEXT])
                    for frame in part.split("\n")[1:]
                    # Frames of importlib say nothing about the program.
                    if frame.startswith("  File") and "<frozen" not in frame
                ]
                return frames[:FRAMES]
        return []


def _open_memory(
    pid: int, path: str, what: str, owner: int | None, access: int
) -> int:
    """Open one of a rank's memory files. Anything else at the path is refused without
    opening it."""
    match = re.fullmatch(r"/proc/(\d{1,10})/fd/(\d{1,9})", path)
    if not match or int(match[1]) != pid:
        raise OSError(f"{one_line(path)} is not a file of process {pid}")
    if not os.readlink(path).startswith(f"/memfd:rank-watch-{what}-"):
        raise OSError(f"{path} is not the memory of a rank")
    # As a path only at first: opening a device or a pipe may have effects.
    found = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        status = os.fstat(found)
        ours = stat.S_ISREG(status.st_mode)
        if owner is not None:
            # In its own mount namespace a process can give any file such a name.
            ours = (
                ours
                and status.st_uid == owner
                and status.st_dev == _device_of_memory()
            )
        if not ours:
            raise OSError(f"{path} is not the memory of a rank")
        # Through the descriptor just checked, so it is that file whatever the
        # path means now.
        return os.open(f"/proc/self/fd/{found}", access | os.O_CLOEXEC)
    finally:
        os.close(found)


def _device_of_memory() -> int:
    """Return the device number of the file system of all anonymous memory files."""
    file = os.memfd_create("rank-watch-compared")
    try:
        return os.fstat(file).st_dev
    finally:
        os.close(file)
