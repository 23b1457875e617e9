"""What a run has told: the records of its metrics.jsonl, for whoever reads it after or while it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["Record", "read_journal"]

Record = dict[str, Any]


def read_journal(path: Path) -> list[Record]:
    """The records of a run, without lines that are cut."""
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # a line that a dying process left unfinished
        if isinstance(record, dict) and "event" in record:
            found.append(record)
    return found
