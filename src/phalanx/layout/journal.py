"""The records of a run's metrics.jsonl, for readers during and after the run."""

import errno
import json
import os
from pathlib import Path
from typing import Any

from .files import open_regular
from .url import redacted

Record = dict[str, Any]
LIMIT = 1 << 32  # bytes of a journal: years of a run
LINE = 1 << 24  # bytes of a record
# Bytes at a journal's end that are searched for its last record.
TAIL = 1 << 16


class JournalReader:
    """Reads the records of a journal that may still be growing."""

    def __init__(self, path: Path) -> None:
        # `at` is the byte after the last complete record.
        self.path, self.at = path, 0

    def more(self) -> list[Record]:
        """The records since the last call, without incomplete or too long lines."""
        try:
            file = open_regular(self.path)
        except FileNotFoundError:
            return []
        records = []
        with file:
            if os.fstat(file.fileno()).st_size > LIMIT:
                what = f"it has more than the {LIMIT:,} bytes that are read"
                raise OSError(errno.EFBIG, what, str(self.path))
            # Continue after the records that were read before.
            file.seek(self.at)
            while line := file.readline(LINE):
                if len(line) < LINE and not line.endswith(b"\n"):
                    break  # still being written, or left by a dying process
                # Too long a line is passed over in pieces, none of which is a
                # record.
                self.at += len(line)
                record = _record(line)
                if record is not None:
                    records.append(record)
        return records


def _record(line: bytes) -> Record | None:
    """The record on a line, or None."""
    try:
        # Earlier versions wrote URLs with their passwords.
        record = json.loads(redacted(line.decode(errors="replace")))
    except (ValueError, RecursionError):
        return None
    known = isinstance(record, dict) and isinstance(record.get("event"), str)
    return record if known else None


def last_record(path: Path) -> Record:
    """The last record of a journal, read from its end; empty if there is none."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        # The tail usually has many records; a last one that is longer is not
        # found.
        file.seek(max(0, size - TAIL))
        lines = file.read(TAIL).splitlines()
    # The first line of the tail may be the second half of a record.
    for line in reversed(lines):
        record = _record(line)
        if record is not None:
            return record
    return {}


def read_journal(path: Path) -> list[Record]:
    """The records of a run so far."""
    return JournalReader(path).more()
