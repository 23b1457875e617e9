"""Appends each line of some files that a process runs to a file: first on the path of a recorded command.

A line is written when it is first run, so that processes which are forked or ended early lose nothing.
Lines that run at import are left out: every command runs them.
"""

from __future__ import annotations

import os
import sys
import threading
from types import CodeType, FrameType
from typing import Any

IN_FUNCTION = 1  # CO_OPTIMIZED: neither a module nor a class
ROOT = os.environ["RECORDED_ROOT"] + os.sep
OUT = os.open(
    os.environ["RECORDED_LINES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT
)

missing: dict[CodeType, set[int]] = {}


def called(frame: FrameType, event: str, argument: object) -> Any:
    """Follows a function of these files while it has lines that have not run."""
    code = frame.f_code
    if not code.co_flags & IN_FUNCTION or not code.co_filename.startswith(
        ROOT
    ):
        return None
    if code not in missing:
        missing[code] = {line for _, _, line in code.co_lines() if line}
        missing[code].discard(code.co_firstlineno)
    return ran if missing[code] else None


def ran(frame: FrameType, event: str, argument: object) -> Any:
    code, line = frame.f_code, frame.f_lineno
    if line in missing[code]:
        missing[code].discard(line)
        os.write(
            OUT, f"{code.co_filename.removeprefix(ROOT)}:{line}\n".encode()
        )
    return ran


threading.settrace(called)
sys.settrace(called)
