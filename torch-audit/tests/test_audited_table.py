"""The command behind docs/audited.md gives the results that stand there, in the versions that it names."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from audited.rows import LIBRARIES, PAGE, rows_of, summary, with_row

ROOT = Path(__file__).parents[2]
REPROS = ROOT / "benchmarks" / "audited" / "repros"


def is_installed(library: str) -> bool:
    """True for a library of this Python in the version that the page names."""
    try:
        found = f"{library} {version(library)}".replace("+cpu", "")
    except PackageNotFoundError:
        return False
    return any(row.library == found for row in rows_of(PAGE.read_text()))


def test_the_page_counts_its_rows_and_tells_who_made_them() -> None:
    text = PAGE.read_text()
    assert summary(rows_of(text)) in text
    made = (
        r"Last written on [\d-]{10} at commit [0-9a-f]{7,} by `make audited`"
    )
    assert re.search(made, text)


def test_each_refuted_row_names_a_repro_and_each_other_one_a_reason() -> None:
    rows = rows_of(PAGE.read_text())
    assert {row.library.split()[0] for row in rows} <= set(LIBRARIES)
    for row in rows:
        assert row.seen, row.text()
        if row.result == "refuted":
            found = re.search(r"; repro `(\w+\.py)`$", row.seen)
            assert found, row.text()
            assert (REPROS / found[1]).exists()


def test_a_row_takes_the_place_of_that_of_an_older_version() -> None:
    text = PAGE.read_text()
    rows = rows_of(text)
    first, second = rows[:2]
    newer = replace(first, library="torch 99.0", result="refused", seen="no")
    # Cells that are listed no more lose their rows; the order is that of the list.
    page = with_row(text, newer, [second.cell, first.cell], "Made today.")
    assert rows_of(page) == [second, newer]
    assert f"Made today.\n\n2 cells: 1 {second.result}, 1 refused." in page
    assert page.startswith(text.partition("<!-- `make audited`")[0])


@pytest.mark.slow
@pytest.mark.skipif(
    not is_installed("torch") or not is_installed("transformers"),
    reason="the table is of other versions",
)
def test_the_command_prints_the_results_of_the_page() -> None:
    """The libraries of the development environment; `make audited` has all of them."""
    paths = [ROOT / "benchmarks", ROOT / "torch-audit" / "src"]
    environment = os.environ | {
        "PYTHONPATH": ":".join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "audited"],
        env=environment, capture_output=True, text=True, timeout=3600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    printed = {row.cell: row.result for row in rows_of(done.stdout)}
    page = {
        row.cell: row.result
        for row in rows_of(PAGE.read_text())
        if is_installed(row.library.split()[0])
    }
    assert page
    # A new cell may still lack its row; none is lost.
    assert page == {cell: printed.get(cell) for cell in page}


@pytest.mark.slow
def test_the_cost_of_several_ranks_is_measured() -> None:
    """All ranks meet in one store, and the first one prints."""
    paths = [ROOT / "benchmarks", ROOT / "torch-audit" / "src"]
    environment = os.environ | {
        "PYTHONPATH": ":".join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "audited.overhead", "2"],
        env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert lines[0] == "2 ranks"
    found = re.search(r"a file: (\d+) bytes a parameter", lines[-1])
    assert found
    assert 0 < int(found[1]) <= 1000
