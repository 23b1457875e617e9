"""Prints the table of docs/audited.md: python -m audited [--write] [--missing] [WORD ...]

Each cell is a small training program, recorded as one process and in a layout, and compared. A cell
that is refuted in float64 is repeated in float32. Words choose the cells whose row has one of them; cells
of libraries that are not installed are left out. `--write` puts the rows into the page, in the place of
older ones; `--missing` leaves out cells that have one. `make audited` makes the environment and runs
this with `--write`.
"""

import argparse
import platform
import subprocess
import sys
import tempfile
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from . import forks, libraries
from .cells import Cell, cells
from .libraries import ScriptCell
from .rows import PAGE, Row, rows_of, with_row


def installed(library: str) -> str:
    """The version of a library, or "" if it is not installed."""
    try:
        return version(library).replace("+cpu", "")
    except PackageNotFoundError:
        return ""


def row_of(cell: Cell | ScriptCell) -> Row:
    """Records and compares a cell."""
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(cell, ScriptCell):
            result, seen = libraries.conduct(cell, Path(folder))
        else:
            result, seen = forks.conduct(cell, Path(folder))
    if result == "refuted" and cell.repro:
        seen += f"; repro `{cell.repro}`"
    library = f"{cell.library} {installed(cell.library)}"
    return Row(library, cell.model, cell.layout, cell.conditions, result, seen)


def made_by() -> str:
    """The sentence about the commit, date and command that last wrote the table."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=PAGE.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return (
        f"Last written on {date.today()} at commit {commit.stdout.strip() or 'unknown'} by `make audited`,"
        f" with Python {platform.python_version()} on CPU over gloo."
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m audited")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--missing", action="store_true")
    parser.add_argument("words", nargs="*", metavar="WORD")
    given = parser.parse_args()
    torch.set_num_threads(1)
    listed: list[Cell | ScriptCell] = [*cells(), *libraries.cells()]
    order = [cell.row for cell in listed]
    made = made_by()
    for cell in listed:
        chosen = not given.words or any(x in cell.row for x in given.words)
        if not chosen or not installed(cell.library):
            continue
        there = {each.cell for each in rows_of(PAGE.read_text())}
        if given.missing and cell.row in there:
            continue
        row = row_of(cell)
        print(row.text(), flush=True)
        if given.write:
            # At once, so that a run that is stopped keeps what it has.
            page = with_row(PAGE.read_text(), row, order, made)
            PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
