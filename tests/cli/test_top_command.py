"""`phalanx top`: of a run that has ended, and of one on hosts that share its folder."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli.main import main
from rank_watch import Hosted, RankState
from rank_watch.rank_state import pack
from rank_watch.ranks_folder import ASKED, FOLDER

pytestmark = pytest.mark.long_file

Capture = pytest.CaptureFixture[str]


def record(event: str, time: float, **values: Any) -> dict[str, Any]:
    return {"event": event, "time": time, **values}


RECORDS = [
    record("start", 1000.0, step=0, steps=100, layout="dp2 zero1"),
    record("memory", 1000.0, step=1, ranks=[]),
    record("step", 1010.0, step=5, steps=5, seconds=2.0, loss=2.5, tokens_per_second=12345.6,
           mfu=0.412, memory=3 * 2**30, goodput=1.0),
    record("validation", 1015.0, step=5, loss=2.25, spent={"validating": 5.0}),
    record("checkpoint", 1020.0, step=5, path="runs/x/step-5", spent={"saving": 5.0}),
]  # fmt: skip


def run_of(folder: Path, *more: dict[str, Any]) -> Path:
    folder.mkdir()
    lines = [json.dumps(each) + "\n" for each in (*RECORDS, *more)]
    (folder / "metrics.jsonl").write_text("".join(lines) + '{"event": "step"')
    return folder


def shown(capsys: Capture, *words: str) -> list[str]:
    assert main(["top", *words]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_run_that_has_ended_is_shown_by_its_log(
    tmp_path: Path, capsys: Capture
) -> None:
    run = run_of(tmp_path / "run", record("end", 1020.0, step=5, spent={}))
    lines = shown(capsys, str(run))
    assert lines[:4] == [
        "run: step 5/100, ended, dp2 zero1",
        "loss 2.5000  12,346 tokens/s  MFU 41.2 %  3 GiB at most",
        "2 s a step, 0:03 h left at that",
        "goodput 50 % of 20 s: steps 50 %, saving 25 %, validating 25 %",
    ]
    clock = time.strftime("%d %H:%M:%S", time.localtime(1015.0))
    assert f"{clock}  validation  step 5  loss 2.2500" in lines
    assert lines[-1].endswith("  end  step 5")


def test_hosts_that_share_the_folder_answer(
    tmp_path: Path, capsys: Capture
) -> None:
    run = run_of(tmp_path / "run")
    hosted = Hosted("node1", str(run), ("node1", "node2"), 60.0, ())
    hosted.folder.make()
    hosted.folder.write(hosted.name, str(hosted))
    lines = shown(capsys, str(run), "--width", "40")
    assert lines[:2] == ["run: step 5/100, not seen from here, dp2", "  zero1"]
    assert "not seen: the ranks on node1, node2" in lines
    assert max(map(len, lines)) <= 40

    there = RankState(
        7,
        "node1",
        11,
        4,
        "in a step",
        "",
        "1B0 (backward of 1)",
        3.0,
        1.0,
        0,
        "R",
        memory=2**30,
    )
    asked = (run / FOLDER / ASKED).stat().st_mtime_ns
    answer = {"asked": asked, "start": "", **pack([there])}
    (run / FOLDER / "node1.answer.json").write_text(json.dumps(answer))
    lines = shown(capsys, str(run))
    assert lines[0] == "run: step 5/100, running, dp2 zero1"
    assert "    7         11      1 GiB       5    3.0 s  R  1B0" in lines
    assert "not seen: the ranks on node2" in lines
    assert "    7       5    3.0 s  R  1B0" in shown(
        capsys, str(run), "--width", "40"
    )
    assert main(["top", str(run), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["state"] == "running"
    assert [r["rank"] for r in figures["ranks"]] == [7]
    assert figures["parts"]["saving"] == 5.0
    old = {**answer, "asked": asked - 60 * 10**9}
    (run / FOLDER / "node1.answer.json").write_text(json.dumps(old))
    assert "not seen: the ranks on node1, node2" in shown(capsys, str(run))


def test_a_folder_without_a_run_is_refused(
    tmp_path: Path, capsys: Capture
) -> None:
    assert main(["top", str(tmp_path)]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err
