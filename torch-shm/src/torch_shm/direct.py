"""Reading tensors in the memory of other processes of this machine, without a copy in between.

Linux lets a process read another's memory where it could debug it (`process_vm_readv`). Not every
machine allows that, so ranks try it once when they meet, and copy through the arena where one fails.
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
    """Let the processes that were started beside this one read it. Linux with Yama wants to be asked."""
    if hasattr(_libc(), "process_vm_readv"):
        _libc().prctl(_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


def read(pid: int, at: int, into: Tensor) -> None:
    """Fill a contiguous tensor with what lies at an address of a process."""
    done, size = 0, into.numel() * into.itemsize
    while done < size:
        here = _Iovec(into.data_ptr() + done, size - done)
        there = _Iovec(at + done, size - done)
        # This call does not hold the interpreter's lock. It may read less than it was asked for.
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
