"""The progress of each start of a run, for the command that starts its ranks again.

The number of steps done lies in a file of the run's folder, which outlives ranks that are killed. The
journal would not do: it has a line for every few steps only.
"""

import os
import struct
from contextlib import suppress
from pathlib import Path

from ..layout.files import open_regular

FILE = ".run.steps"
IN_VAIN = 3  # starts in a row that end at the same step: so does the next one
_NUMBER = struct.Struct("<q")


class DoneSteps:
    """The steps that a run has done, in a file. The command makes it, and rank 0 writes it; the other ranks
    have it not `opened`."""

    def __init__(
        self, folder: Path, *, make: bool = False, opened: bool = True
    ) -> None:
        self._descriptor = -1
        if not opened:
            return
        path = folder / FILE
        flags = os.O_RDWR | os.O_NOFOLLOW
        # A run that is never started again has no file.
        with (
            suppress(OSError),
            open_regular(path, flags | (os.O_CREAT if make else 0)) as file,
        ):
            self._descriptor = os.dup(file.fileno())

    def write(self, step: int) -> None:
        if self._descriptor < 0:
            return
        try:
            os.pwrite(self._descriptor, _NUMBER.pack(step), 0)
        except OSError:  # a full disk: then it is not known how far a start has come
            self.close()

    def read(self) -> int | None:
        """The steps done; 0 before the first one; None where there is no file."""
        if self._descriptor < 0:
            return None
        raw = os.pread(self._descriptor, _NUMBER.size, 0)
        return _NUMBER.unpack(raw)[0] if len(raw) == _NUMBER.size else 0

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Starts:
    """The starts of a run's ranks by one command, and at which step each of them ended."""

    def __init__(self, folder: Path, restarts: int) -> None:
        self._path = folder / FILE
        self._done = DoneSteps(folder, make=restarts > 0)
        self._ends: list[int | None] = []

    def begin(self) -> None:
        """Forget the steps of the start before."""
        self._done.write(0)

    def in_vain(self) -> str:
        """Counts a start that has failed; returns why another one would fail too, or ""."""
        self._ends.append(self._done.read())
        last = self._ends[-IN_VAIN:]
        step = last[0]
        if step is None or last != [step] * IN_VAIN:
            return ""
        where = f"after step {step}" if step else "before their first step was done"
        return f"the last {IN_VAIN} starts all failed {where}"

    def close(self) -> None:
        self._done.close()
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
