"""What runs on launchers are compared by."""

from __future__ import annotations

from pathlib import Path

from phalanx.layout.journal import read_journal


def losses(out: Path) -> dict[int, str]:
    """The loss of each step as it was last done, bit by bit."""
    records = read_journal(out / "metrics.jsonl")
    return {
        r["step"]: float(r["loss"]).hex()
        for r in records
        if r["event"] == "step"
    }
