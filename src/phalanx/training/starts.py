"""The progress of each start of a run, for the command that restarts its ranks.

The number of completed steps is in a file of the run's folder, which outlives killed
ranks. The journal is not enough, as it has a line only every few steps.
"""

import os
import struct
from contextlib import suppress
from pathlib import Path

from ..layout.files import open_regular

FILE = ".run.steps"
# consecutive starts that end at the same step, after which no further one is made
IN_VAIN = 3
_NUMBER = struct.Struct("<q")


class DoneSteps:
    """A file with the number of steps that a run has completed.

    The command creates it and rank 0 writes it; on other ranks it is not `opened`.
    """

    def __init__(
        self, folder: Path, *, make: bool = False, opened: bool = True
    ) -> None:
        self._descriptor = -1
        if not opened:
            return
        path = folder / FILE
        # Never through a link.
        flags = os.O_RDWR | os.O_NOFOLLOW
        # a run that is never restarted has no file
        with (
            suppress(OSError),
            open_regular(path, flags | (os.O_CREAT if make else 0)) as file,
        ):
            # The descriptor outlives the file object.
            self._descriptor = os.dup(file.fileno())

    def write(self, step: int) -> None:
        if self._descriptor < 0:
            return
        try:
            os.pwrite(self._descriptor, _NUMBER.pack(step), 0)
        except OSError:  # on a full disk the progress of a start is unknown
            self.close()

    def read(self) -> int | None:
        """Return the number of completed steps; 0 before the first one, None without a
        file."""
        if self._descriptor < 0:
            return None
        raw = os.pread(self._descriptor, _NUMBER.size, 0)
        # A file that was created and not yet written has no steps.
        return _NUMBER.unpack(raw)[0] if len(raw) == _NUMBER.size else 0

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Starts:
    """The starts of a run's ranks by one command, and the step at which each ended."""

    def __init__(self, folder: Path, restarts: int) -> None:
        self._path = folder / FILE
        self._done = DoneSteps(folder, make=restarts > 0)
        self._ends: list[int | None] = []

    def begin(self) -> None:
        """Reset the count of steps before a start."""
        self._done.write(0)

    def in_vain(self) -> str:
        """Count a failed start; explain why another one would fail too, or return
        ""."""
        self._ends.append(self._done.read())
        last = self._ends[-IN_VAIN:]
        step = last[0]
        # Starts that make progress may go on for ever.
        if step is None or last != [step] * IN_VAIN:
            return ""
        where = (
            f"after step {step}"
            if step
            else "before their first step was done"
        )
        return f"the last {IN_VAIN} starts all failed {where}"

    def close(self) -> None:
        self._done.close()
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
