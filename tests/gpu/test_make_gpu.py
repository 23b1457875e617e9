"""`make gpu` itself, on a CPU: its cases are commands that exist, and one that fails ends no other."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from gpu import Case, Finding, agreement, cases, main, perform, table

PYTHON = sys.executable


def finding(output: str) -> Finding:
    return Finding(output.strip(), True)


def test_a_case_that_fails_or_hangs_is_reported_with_its_last_lines() -> None:
    listed = [
        Case("fails", (PYTHON, "-c", "raise SystemExit('out of memory')"), agreement),
        Case("hangs", (PYTHON, "-c", "import time; time.sleep(60)"), finding, limit=1.0),
        Case("lacks", (PYTHON, "-c", ""), finding, needs=("no_such_module",)),
        Case("works", (PYTHON, "-c", "print('done')"), finding),
    ]
    rows = [perform(case, dict(os.environ)) for case in listed]
    rows.append(perform(listed[3], dict(os.environ), left=0.0))
    assert [row.met for row in rows] == [False, False, False, True, False]
    text = table(rows, ["a machine"])
    for part in (
        "exit code 1",
        "out of memory",
        "stopped after 1 s",
        "no module no_such_module",
        "time of all cases",
    ):
        assert part in text
    assert "| works | done |  | yes |" in text


def test_a_case_runs_from_the_tree_and_its_table_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "gpu.md"
    words = ["gpu.py", "--device", "cpu", "--out", str(out), "--only"]
    for case in ("verify over threads, float64", "1b, bf16, recompute:all"):
        monkeypatch.setattr(sys, "argv", [*words, case])
        assert main() == 0, capsys.readouterr().out
        assert f"| {case} |" in out.read_text()
    assert "GiB promised" in out.read_text()


def test_ranks_over_nccl_are_verified_where_there_are_several_gpus(tmp_path: Path) -> None:
    names = [case.name for case in cases("cuda", 4, tmp_path)]
    assert "verify over nccl, float64" in names


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="there is a GPU")
def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    assert main() == 2
    assert "no GPU" in capsys.readouterr().out
