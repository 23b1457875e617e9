"""Memory that all ranks of one machine see at the same offsets, and who owns which part of it.

An arena is one sparse file without a name: only what is written to takes memory, and the kernel
takes it back when the last process that maps it is gone, however it went. Each rank owns an area:
a page about itself, a segment for each group (see `lines.py`), and a heap. Where an
anonymous file cannot be had (no Linux) it is a small file that is filled at once, so that a full
file system is a sentence here and not a crash at the first write.
"""

import mmap
import os
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from . import direct
from .calls import CommMisuse

PAGE = 4096
LINE = 64
NOWHERE = -1  # the place of a tensor that others cannot read
# What a rank writes at once. Larger, it falls out of the caches; smaller, ranks that share cores
# wait for each other too often: 64 MB over 2 ranks of a busy machine took 10 times as long with
# 256 KiB, twice with 1 MiB, and 4 and 16 MiB were alike.
CHUNK = 1 << 22


@dataclass(frozen=True)
class Extent:
    """The sizes of an arena's parts. `chunk`: the bytes that a rank writes at once."""

    ranks: int
    chunk: int
    segments: int
    heap: int

    @property
    def header(self) -> int:
        """About one round of a call: three words, two counts for each rank, and a text."""
        return 1024 + 16 * self.ranks

    @property
    def segment(self) -> int:
        """A flag, two headers, a queue for each peer, and two buffers of two chunks."""
        return (
            whole(LINE + 2 * whole(self.header, LINE) + LINE * self.ranks, PAGE)
            + 4 * self.chunk
        )

    @property
    def area(self) -> int:
        return PAGE + self.segments * self.segment + self.heap

    @property
    def total(self) -> int:
        return PAGE + self.ranks * self.area


def whole(size: int, unit: int) -> int:
    """The next multiple of a unit."""
    return -(-size // unit) * unit


class Reserved:
    """An arena that nobody has mapped yet. `path` is where ranks open it until it is closed."""

    def __init__(self, ranks: int, heap: int = 1 << 36) -> None:
        self._fd, self._file = -1, ""
        if hasattr(os, "memfd_create"):
            # 64 GiB of addresses a rank, which cost nothing until they are written to.
            self.extent = Extent(ranks, CHUNK, 256, heap)
            self._fd = os.memfd_create("torch-shm")
            try:
                _resize(self._fd, self.extent.total)
                _map(self._fd, self.extent.total).close()
            except CommMisuse:
                self.close()
                raise
            self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        else:
            self.extent = Extent(ranks, 1 << 18, 32, 1 << 26)
            self.path = self._file = filled_file(self.extent.total)

    def close(self) -> None:
        """Take the name away: whoever has mapped it keeps it, and it goes with the last of them."""
        if self._fd >= 0:
            os.close(self._fd)
        elif self._file:
            forget(self._file)
        self._fd, self._file = -1, ""


def why_not(ranks: int) -> str:
    """Explains why this process and its children cannot share memory, or returns ""."""
    if not hasattr(os, "memfd_create"):
        return ""  # a file would have to be filled to know
    try:
        Reserved(ranks).close()
    except CommMisuse as error:
        return str(error)
    return ""


def _resize(fd: int, size: int) -> None:
    try:
        os.ftruncate(fd, size)
    except OSError as error:
        raise CommMisuse(
            f"shared memory needs a file of {size >> 30} GiB, which takes no room until it is used "
            f"({error.strerror}); lift the limit (ulimit -f unlimited), or use gloo."
        ) from error


def _map(fd: int, size: int) -> mmap.mmap:
    try:
        return mmap.mmap(fd, size)
    except OSError as error:
        raise CommMisuse(
            f"shared memory needs {size >> 30} GiB of addresses, which take no room until they are "
            f"used ({error.strerror}); lift the limit (ulimit -v unlimited), or use gloo."
        ) from error


def forget(path: str) -> None:
    """Take an arena's name away, if it has one."""
    if not path.startswith("/proc/"):
        Path(path).unlink(missing_ok=True)


def filled_file(
    size: int, folders: tuple[str, ...] = ("/dev/shm", tempfile.gettempdir())
) -> str:
    """A new file that has its bytes already, in memory if it has room and else on disk."""
    tried = []
    for folder in folders:
        if not os.path.isdir(folder):
            continue
        fd, path = tempfile.mkstemp(prefix="torch-shm-", dir=folder)
        try:
            os.posix_fallocate(fd, 0, size)
            return path
        except OSError as error:
            os.unlink(path)
            tried.append(f"{folder} ({error.strerror})")
        finally:
            os.close(fd)
    raise CommMisuse(
        f"backend shm needs {whole(size, 1 << 20) >> 20} MiB of shared memory and there is no room "
        f"in {' or '.join(tried)}; give a container more with --shm-size, or use backend gloo."
    )


class Arena:
    """An arena as one rank has mapped it: `words` to signal with, `bytes`, and tensors over it."""

    def __init__(self, path: str, extent: Extent, rank: int) -> None:
        self.extent = extent
        self.rank = rank
        fd = os.open(path, os.O_RDWR)
        try:
            self._map = _map(fd, extent.total)
        finally:
            os.close(fd)
        self.bytes = memoryview(self._map)
        self.words = self.bytes.cast("q")
        # of all ranks, if they can read each other's memory
        self.processes: list[int] = []
        self.base = torch.frombuffer(self._map, dtype=torch.uint8, count=1).data_ptr()
        heap = self.page(rank) + PAGE + extent.segments * extent.segment
        self.heap = Heap(heap, heap + extent.heap)

    def page(self, rank: int) -> int:
        """The offset of a rank's page. The arena's own page comes before all areas."""
        return PAGE + rank * self.extent.area

    def segment(self, rank: int, number: int) -> int:
        """The offset of a rank's segment for a group."""
        return self.page(rank) + PAGE + number * self.extent.segment

    def at(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """The tensor that lies at an offset."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=offset)

    def place(self, x: Tensor) -> int:
        """The place where others read a tensor: its offset in the arena, or else minus its address in this
        process, if processes read each other's memory."""
        offset = x.data_ptr() - self.base
        if 0 <= offset < self.extent.total:
            return offset
        return -x.data_ptr() if self.processes else NOWHERE

    def fetch(self, rank: int, place: int, into: Tensor, skip: int = 0) -> None:
        """Fill a tensor with what lies at a place of a rank, without its first `skip` bytes."""
        if place >= 0:
            into.copy_(self.at(place + skip, into.numel(), into.dtype))
        else:
            direct.read(self.processes[rank], skip - place, into)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor that all ranks can read where it is; its room is free again when it dies.

        When the heap is full it is an ordinary tensor, which costs copies and changes no result.
        """
        size = numel * dtype.itemsize
        offset = self.heap.take(size) if size else None
        if offset is None:
            return torch.empty(numel, dtype=dtype)
        # The storage holds the view and nothing else does, so that the view's end is the storage's.
        room = self.bytes[offset : offset + size]
        weakref.finalize(room, self.heap.give, offset, size).atexit = False
        return torch.frombuffer(room, dtype=dtype)

    def write_text(self, offset: int, text: str, room: int) -> None:
        """A text that others will read: its length in a word, then what there is room for."""
        raw = text.encode()[: room - 8]
        self.bytes[offset + 8 : offset + 8 + len(raw)] = raw
        self.words[offset >> 3] = len(raw)

    def read_text(self, offset: int) -> str:
        length = self.words[offset >> 3]
        return bytes(self.bytes[offset + 8 : offset + 8 + length]).decode(
            errors="replace"
        )


class Heap:
    """The free room of one rank. Sizes are rounded up a little, so that what is given back fits."""

    def __init__(self, start: int, stop: int) -> None:
        self._next, self._stop = start, stop
        self._free: dict[int, list[int]] = {}

    def take(self, size: int) -> int | None:
        """The offset of `size` bytes, None when there is no room."""
        size = rounded(size)
        if waiting := self._free.get(size):
            return waiting.pop()
        if self._next + size > self._stop:
            return None
        self._next += size
        return self._next - size

    def give(self, offset: int, size: int) -> None:
        self._free.setdefault(rounded(size), []).append(offset)


def rounded(size: int) -> int:
    """Up to an eighth of the power of two above, so that there are few sizes and little is lost."""
    return whole(size, max(LINE, (1 << max(size - 1, 1).bit_length()) >> 3))
