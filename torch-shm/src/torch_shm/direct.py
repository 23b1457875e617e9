"""Reads tensors directly from the memory of other processes on this machine.

Linux lets a process read another's memory if it may debug it (`process_vm_readv`). Not
every machine allows that, so ranks try it once when they meet, and copy through the
arena if any fails.
"""

import ctypes
import os
from functools import cache
from typing import Any

from torch import Tensor

_SET_PTRACER = 0x59616D61


class _Iovec(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p), ("size", ctypes.c_size_t))


@cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def allow() -> None:
    """Allow sibling processes to read this one. Linux with Yama requires permission."""
    if hasattr(_libc(), "process_vm_readv"):
        # Yama then allows the parent and its descendants, the other ranks among them.
        _libc().prctl(_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


def read(pid: int, at: int, into: Tensor) -> None:
    """Fill a contiguous tensor from an address in another process."""
    done, size = 0, into.numel() * into.itemsize
    while done < size:
        here = _Iovec(into.data_ptr() + done, size - done)
        there = _Iovec(at + done, size - done)
        # This call releases the GIL. It may read less than requested.
        got = _libc().process_vm_readv(
            pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0
        )
        if got <= 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        done += got


def readable(pid: int, at: int, into: Tensor) -> bool:
    """True if `read` works."""
    try:
        read(pid, at, into)
    except (AttributeError, OSError):
        return False
    return True
