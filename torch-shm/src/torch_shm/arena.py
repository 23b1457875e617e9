"""Memory that all ranks of a machine map at the same offsets, with an area owned by
each rank.

An arena is one sparse, anonymous file: only written pages take memory, and the kernel
frees them when the last process that maps the file has ended, for whatever reason. Each
rank's area consists of a page about itself, a segment for each group (see `lines.py`),
and a heap. Where anonymous files do not exist (outside Linux) a small file is allocated
at once, so that a full file system causes an error message instead of a crash at the
first write.
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
NOWHERE = -1  # the place of a tensor that other ranks cannot read
# Bytes that a rank writes at once. Larger chunks fall out of the caches; with smaller
# ones, ranks that share cores wait for each other too often: 64 MB over 2 ranks of a
# busy machine took 10 times as long with 256 KiB and twice as long with 1 MiB; 4 and 16
# MiB were equal.
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
        """Bytes about one round of a call: three words, two counts for each rank, and a
        text."""
        # COUNTS words, splits of 2 words a rank, and a text of up to 1000 bytes.
        return 1024 + 16 * self.ranks

    @property
    def segment(self) -> int:
        """Bytes of a flag, two headers, a queue for each peer, and two buffers of two
        chunks."""
        # In the order of `lines.py`: flag, headers, queues; then whole pages.
        return (
            whole(
                LINE + 2 * whole(self.header, LINE) + LINE * self.ranks, PAGE
            )
            + 4 * self.chunk
        )

    @property
    def area(self) -> int:
        return PAGE + self.segments * self.segment + self.heap

    @property
    def total(self) -> int:
        return PAGE + self.ranks * self.area


def whole(size: int, unit: int) -> int:
    """Round up to a multiple of `unit`."""
    return -(-size // unit) * unit


class Reserved:
    """An arena that nobody has mapped yet. `path` is where ranks open it until it is
    closed."""

    def __init__(self, ranks: int, heap: int = 1 << 36) -> None:
        self._fd, self._file = -1, ""
        if hasattr(os, "memfd_create"):
            # 64 GiB of addresses for each rank, which cost nothing until they are
            # written.
            self.extent = Extent(ranks, CHUNK, 256, heap)
            self._fd = os.memfd_create("torch-shm")
            try:
                _resize(self._fd, self.extent.total)
                # Tried at once: a limit on address space shows here, and not in a rank.
                _map(self._fd, self.extent.total).close()
            except CommMisuse:
                self.close()
                raise
            # Through /proc, so that other processes can open a file without a name.
            self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        else:
            # All blocks of this file are allocated, so its parts are small.
            self.extent = Extent(ranks, 1 << 18, 32, 1 << 26)
            self.path = self._file = filled_file(self.extent.total)

    def close(self) -> None:
        """Remove the arena's name. Ranks that have mapped it keep it; it is freed with
        the last of them."""
        if self._fd >= 0:
            os.close(self._fd)
        elif self._file:
            forget(self._file)
        self._fd, self._file = -1, ""


def why_not(ranks: int) -> str:
    """Explain why this process and its children cannot share memory, or return ""."""
    if not hasattr(os, "memfd_create"):
        return ""  # finding out would take filling a file
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
            f"shared memory needs a sparse file of {size >> 30} GiB "
            f"({error.strerror}); lift the limit (ulimit -f unlimited), or use gloo."
        ) from error


def _map(fd: int, size: int) -> mmap.mmap:
    try:
        return mmap.mmap(fd, size)
    except OSError as error:
        raise CommMisuse(
            f"shared memory needs {size >> 30} GiB of address space "
            f"({error.strerror}); lift the limit (ulimit -v unlimited), or use gloo."
        ) from error


def forget(path: str) -> None:
    """Remove an arena's name, if it has one."""
    if not path.startswith("/proc/"):
        Path(path).unlink(missing_ok=True)


def filled_file(
    size: int, folders: tuple[str, ...] = ("/dev/shm", tempfile.gettempdir())
) -> str:
    """Create a file with allocated blocks, in memory if there is room, otherwise on
    disk."""
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
        f"in {' or '.join(tried)}; start the container with a larger --shm-size, or use backend gloo."
    )


class Arena:
    """An arena as mapped by one rank: `words` for signals, `bytes`, and tensors over
    it."""

    def __init__(self, path: str, extent: Extent, rank: int) -> None:
        self.extent = extent
        self.rank = rank
        fd = os.open(path, os.O_RDWR)
        try:
            self._map = _map(fd, extent.total)
        # The mapping outlives the file descriptor.
        finally:
            os.close(fd)
        # The same memory as bytes for texts, and as 64-bit words for signals.
        self.bytes = memoryview(self._map)
        self.words = self.bytes.cast("q")
        # of all ranks, if they can read each other's memory
        self.processes: list[int] = []
        self.base = torch.frombuffer(
            self._map, dtype=torch.uint8, count=1
        ).data_ptr()
        # The heap is the last part of this rank's area.
        heap = self.page(rank) + PAGE + extent.segments * extent.segment
        self.heap = Heap(heap, heap + extent.heap)

    def page(self, rank: int) -> int:
        """Return the offset of a rank's page. The arena's own page precedes all
        areas."""
        return PAGE + rank * self.extent.area

    def segment(self, rank: int, number: int) -> int:
        """Return the offset of a rank's segment for a group."""
        return self.page(rank) + PAGE + number * self.extent.segment

    def at(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor over the memory at an offset."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(
            self._map, dtype=dtype, count=numel, offset=offset
        )

    def place(self, x: Tensor) -> int:
        """Return the place from which other ranks can read a tensor.

        It is the tensor's offset in the arena, or minus its address in this process if
        processes can read each other's memory.
        """
        # An offset in the arena means the same to all ranks, whatever their mapping.
        offset = x.data_ptr() - self.base
        if 0 <= offset < self.extent.total:
            return offset
        return -x.data_ptr() if self.processes else NOWHERE

    def fetch(
        self, rank: int, place: int, into: Tensor, skip: int = 0
    ) -> None:
        """Copy into a tensor from a place of a rank, without the first `skip` bytes
        there."""
        if place >= 0:
            into.copy_(self.at(place + skip, into.numel(), into.dtype))
        else:
            # A negative place is an address in that process: -place + skip.
            direct.read(self.processes[rank], skip - place, into)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor that all ranks can read in place; its memory is freed
        with the tensor.

        When the heap is full it is an ordinary tensor, which costs copies and changes
        no result.
        """
        size = numel * dtype.itemsize
        offset = self.heap.take(size) if size else None
        if offset is None:
            return torch.empty(numel, dtype=dtype)
        # Only the storage refers to the view, so the view ends with the storage.
        room = self.bytes[offset : offset + size]
        weakref.finalize(room, self.heap.give, offset, size).atexit = False
        return torch.frombuffer(room, dtype=dtype)

    def write_text(self, offset: int, text: str, room: int) -> None:
        """Write a text for other ranks: its length as a word, then as much as fits into
        `room`."""
        raw = text.encode()[: room - 8]
        self.bytes[offset + 8 : offset + 8 + len(raw)] = raw
        # The length last: a reader looks at it first.
        self.words[offset >> 3] = len(raw)

    def read_text(self, offset: int) -> str:
        length = self.words[offset >> 3]
        return bytes(self.bytes[offset + 8 : offset + 8 + length]).decode(
            errors="replace"
        )


class Heap:
    """The free memory of one rank. Sizes are rounded up slightly, so that freed blocks
    fit again."""

    def __init__(self, start: int, stop: int) -> None:
        self._next, self._stop = start, stop
        self._free: dict[int, list[int]] = {}

    def take(self, size: int) -> int | None:
        """Allocate `size` bytes and return their offset, or None if there is no
        room."""
        size = rounded(size)
        # Freed blocks serve their own rounded size alone.
        if waiting := self._free.get(size):
            return waiting.pop()
        if self._next + size > self._stop:
            return None
        self._next += size
        return self._next - size

    def give(self, offset: int, size: int) -> None:
        self._free.setdefault(rounded(size), []).append(offset)


def rounded(size: int) -> int:
    """Round up to an eighth of the next power of two: few distinct sizes, and little
    waste."""
    return whole(size, max(LINE, (1 << max(size - 1, 1).bit_length()) >> 3))
