"""The command behind docs/audited.md gives the results that stand there, in the versions that it names."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "audited.md"


def results(text: str) -> dict[str, str]:
    """The result of each row, by its library, model, layout and corner."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if re.match(r"\| (torch|transformers) [\d.]+", line):
            row = " | ".join([*cells[:1], *cells[1:4]]).replace("+cpu", "")
            found[row] = cells[4]
    return found


def library_results(text: str) -> dict[str, str]:
    """The result of each row about other libraries, and their versions."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        named = re.match(
            r"\| (accelerate|lightning|trl|deepspeed) [\d.]+", line
        )
        if named:
            found[" | ".join(cells[:4])] = cells[4]
    return found


def test_the_page_counts_its_rows() -> None:
    text = PAGE.read_text()
    counted = list(results(text).values())
    equal, refuted = counted.count("equal"), counted.count("refuted")
    assert equal + refuted == len(counted)
    summary = (
        f"Of {len(counted)} cells {equal} are equal and {refuted} are refuted"
    )
    assert summary in " ".join(text.split())


@pytest.mark.slow
@pytest.mark.skipif(
    not version("torch").startswith("2.13")
    or version("transformers") != "5.23.0",
    reason="the table is of these versions",
)
def test_the_command_prints_the_results_of_the_page() -> None:
    paths = [ROOT / "benchmarks", ROOT / "torch-audit" / "src"]
    environment = os.environ | {
        "PYTHONPATH": ":".join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "audited"],
        env=environment, capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert results(done.stdout) == results(PAGE.read_text())


@pytest.mark.slow
@pytest.mark.skipif(
    version("accelerate") != "1.15.0",
    reason="the rows are of this version",
)
def test_the_libraries_that_are_installed_give_the_results_of_the_page() -> (
    None
):
    """accelerate is in the development environment; the others where somebody installs them."""
    paths = [ROOT / "benchmarks", ROOT / "torch-audit" / "src"]
    environment = os.environ | {"PYTHONPATH": ":".join(map(str, paths))}
    done = subprocess.run(
        [sys.executable, "-m", "audited.libraries"],
        env=environment, capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    printed = library_results(done.stdout)
    page = library_results(PAGE.read_text())
    assert any(row.startswith("accelerate") for row in printed)
    assert printed == {row: page[row] for row in printed}
