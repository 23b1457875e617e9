"""Ranks that hang, in processes: noticed, named and ended; and slow ones, left alone."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path

import pytest
from hang_worlds import apart, run_in, saves_slowly, sleeps_in_a_backward

from phalanx.cli.main import main
from phalanx.comm import RankFailed, launch
from phalanx.layout.journal import read_journal
from phalanx.report import report
from rank_watch import ask_elsewhere, snapshot
from rank_watch.ranks_folder import FOLDER
from rank_watch.watcher import FILE

OP = "1B0 (backward of layers.0, microbatch 0)"


def test_a_rank_that_sleeps_is_named_with_its_operation_and_stack_and_all_are_ended(
    tmp_path: Path,
) -> None:
    run = run_in(tmp_path / "run", "hang.timeout=1.5")
    with pytest.raises(RankFailed, match="killed by signal 9"):
        launch(
            sleeps_in_a_backward,
            2,
            run,
            "dp2",
            1,
            backend="gloo",
            timeout=600.0,
        )
    out = Path(run.out)
    said = (out / FILE).read_text()
    assert said.startswith("the run hangs at step 2: ")
    assert f"it has been at {OP} for " in said
    assert "rank 1 should be in " in said
    assert "asleep in clock_nanosleep" in said
    assert "in performed" in said
    assert "rank 0 waits for rank 1, in " in said
    hung = [
        record
        for record in read_journal(out / "metrics.jsonl")
        if record["event"] == "hang"
    ]
    assert [record["ranks"] for record in hung] == [[1]]
    assert "The run hung" in report(out).html()


def test_from_outside_the_same_is_seen_while_a_run_hangs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_in(tmp_path / "run", "hang.timeout=0")

    def train() -> None:
        with pytest.raises(RankFailed):
            launch(
                sleeps_in_a_backward,
                2,
                run,
                "dp2",
                0,
                backend="shm",
                timeout=15.0,
            )

    training = threading.Thread(target=train)
    training.start()
    end = time.monotonic() + 60
    while time.monotonic() < end:
        states = snapshot(Path(run.out), 0.1).ranks
        if any(state.op == OP and state.still > 0.5 for state in states):
            break
        time.sleep(0.1)
    assert main(["doctor", "hang", run.out, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert main(["top", run.out, "--once"]) == 0
    top = capsys.readouterr().out
    elsewhere, unseen = ask_elsewhere(Path(run.out), [], 4.0)
    training.join()
    assert "step 1/6, running, dp2" in top
    assert any(line.endswith("S  1B0") for line in top.splitlines())
    # what another host is answered
    assert [state.op for state in elsewhere][:1] == [OP]
    assert not unseen
    first, second = figures["ranks"]
    assert first["op"] == OP
    assert any("in performed" in frame for frame in first["stack"])
    assert second["waits"] > 0
    assert not figures["hangs"]
    assert main(["doctor", "hang", run.out]) == 2  # it has ended


def test_a_save_that_takes_longer_than_the_timeout_ends_no_run(
    tmp_path: Path,
) -> None:
    run = run_in(tmp_path / "run", "hang.timeout=0.5", "steps=3")
    outcomes = launch(
        saves_slowly, 2, run, "dp2 zero1", 2.5, backend="gloo", timeout=60.0
    )
    assert [outcome.step for outcome in outcomes] == [3, 3]
    assert not (Path(run.out) / FILE).exists()
    assert not list(Path(run.out, FOLDER).glob("*.json"))


def test_two_hosts_of_one_name_are_two_hosts_and_come_to_one_diagnosis(
    tmp_path: Path,
) -> None:
    run = run_in(tmp_path / "run", "hang.timeout=1.5")
    with pytest.raises(RankFailed):
        launch(
            apart,
            2,
            sleeps_in_a_backward,
            run,
            "dp2",
            1,
            backend="gloo",
            timeout=600.0,
        )
    said = (Path(run.out) / FILE).read_text()
    assert f"it has been at {OP} for " in said
    assert "rank 0 waits for rank 1, in " in said
    hosts = set(re.findall(r"^rank \d on (\S+),", said, re.M))
    assert len(hosts) == 2
    assert len({host.rpartition("-")[0] for host in hosts}) == 1
    # also where the first host is not the one that hangs
    assert said.count("in performed") >= 1


def test_a_save_on_one_host_that_is_waited_for_on_another_ends_no_run(
    tmp_path: Path,
) -> None:
    run = run_in(tmp_path / "run", "hang.timeout=0.5", "steps=3")
    task = (apart, 2, saves_slowly, run, "dp2 zero1", 4.0)
    outcomes = launch(*task, backend="gloo", timeout=60.0)
    assert [outcome.step for outcome in outcomes] == [3, 3]
    assert not (Path(run.out) / FILE).exists()
