"""The records of a run's metrics.jsonl, for whoever reads it after or while it runs."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

from .files import open_regular

Record = dict[str, Any]
LIMIT = 1 << 32  # bytes of a journal: years of a run
LINE = 1 << 24  # bytes of a record


def read_journal(path: Path) -> list[Record]:
    """The records of a run, without lines that are cut or longer than `LINE`."""
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return []
    records = []
    with file:
        if os.fstat(file.fileno()).st_size > LIMIT:
            raise OSError(
                errno.EFBIG, f"it has more than the {LIMIT:,} bytes that are read", str(path)
            )
        while line := file.readline(LINE):
            try:
                record = json.loads(line.decode(errors="replace"))
            except (ValueError, RecursionError):
                continue  # a line that a dying process left unfinished
            if isinstance(record, dict) and "event" in record:
                records.append(record)
    return records
