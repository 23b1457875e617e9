"""docs/limits.md states the limits that the code has."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from phalanx.api import TEXT
from phalanx.api.plan import SEQUENCES
from phalanx.cli import bench, draw
from phalanx.cli import verify as verify_command
from phalanx.layout import (
    Shape,
    choices,
    files,
    journal,
    layout,
    mesh,
    numbers,
    source,
)
from phalanx.report import page, step
from phalanx.training import checkpoint_format as manifest
from phalanx.training.data import token_files
from phalanx.verification.verify import LOG

PAGE = Path(__file__).parents[2] / "docs" / "limits.md"
LIMITS = {
    "ranks of a layout": mesh.RANKS,
    "ranks that one command starts on this machine": choices.LOCAL_RANKS,
    "ranks of which `verify --ranks` lists all layouts": verify_command.MOST,
    "ranks in `draw mesh`": draw.MOST,
    "ranks in the mesh of `report`": page.MOST_RANKS,
    "microbatches of a step": layout.MICROBATCHES,
    **{
        f"`{field.name}` of a model": field.metadata["maximum"]
        for field in fields(Shape)
        if field.metadata.get("maximum")
    },
    "steps of `verify`": verify_command.STEPS,
    "side of a product of `bench matmul`": bench.LONGEST,
    "sequences of a step in `plan`": SEQUENCES,
    "tokens of a run in `plan cost`": numbers.MOST,
    "tables or lists inside each other, in TOML and JSON": files.DEPTH,
    "whole number in TOML and JSON": files.INTEGER - 1,
    "bytes of a TOML file": files.SMALL,
    "bytes of a program, a recorded step or a topology": TEXT,
    "bytes of a Python file of your own": source.LIMIT,
    "bytes of a run's `timeline.json`": step.TIMELINE,
    "bytes of a run's `metrics.jsonl`": journal.LIMIT,
    "bytes of one line of it": journal.LINE,
    "bytes of a log of `verify`": LOG,
    "bytes of a checkpoint's manifest": manifest.LIMIT,
    "dims of a tensor in a checkpoint": manifest.DIMS,
    "parts of a tensor in a checkpoint": manifest.PARTS,
    "bytes of a corpus's `index.json`": token_files.LIMIT,
}


def rows() -> list[str]:
    return [f"| {what} | {most:,} |" for what, most in LIMITS.items()]


def test_the_page_of_limits_states_those_of_the_code() -> None:
    stated = [
        line for line in PAGE.read_text().splitlines() if line.startswith("| ")
    ][1:]
    assert stated == rows()


if __name__ == "__main__":
    head = PAGE.read_text().partition("|---|---|\n")
    PAGE.write_text(head[0] + head[1] + "\n".join(rows()) + "\n")
