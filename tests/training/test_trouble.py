"""A disk that is full, records that are garbage, clocks that jump, files that are cut: what a run says
and what it does."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from checkpoint_worlds import Run as Small
from checkpoint_worlds import hash_tensors
from checkpoint_worlds import run as ranks
from loop_worlds import losses, records, small, trained, weights

from phalanx.cli import data as data_verb
from phalanx.cli import train as train_verb
from phalanx.cli.main import main
from phalanx.comm import RankFailed
from phalanx.layout.journal import read_journal
from phalanx.layout.run import Run, RunError
from phalanx.training import checkpoint, loop
from phalanx.training.checkpoint import steps
from phalanx.training.checkpoint_format import (
    CheckpointError,
    read_manifest,
    verify_checkpoint,
)
from phalanx.training.data.token_files import DataError
from phalanx.training.log import Journal, JournalError
from phalanx.training.rank import Rank, batches_of
from sampled import one_in

WORDS = [
    "model={layers=2,hidden=16,heads=2,ffn=24,vocab=256}", "batch=4", "sequence=12",
    "validation.batches=0", "layout=fp32", "optimizer.schedule=constant",
]  # fmt: skip
GO_ON = "checkpoint.on_disk_full=go-on"


# ---- seeds


def test_a_seed_that_no_checkpoint_can_tell_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    for seed in (2**62, 2**63 - 1, 2**64, 10**30):
        with pytest.raises(
            RunError, match=r"Write (0 to 4,611,686,018,427,387,903|less)"
        ):
            Run.parse("", "run", (f"seed={seed}",))
    out = tmp_path / "run"
    for last in (1, 2):
        trained(small(out, f"seed={2**62 - 1}", f"steps={last}"), "")
    assert read_manifest(steps(out / "checkpoints")[0]).seed == 2**62 - 1


# ---- a disk that is full


def test_go_on_goes_on_when_no_metrics_can_be_written(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(journal: Journal, line: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Journal, "_append", full)
    out = tmp_path / "run"
    assert main(["train", *WORDS, "steps=2", f"out={out}", GO_ON]) == 0
    assert (
        "metrics.jsonl: 6 lines could not be written" in capfd.readouterr().out
    )
    assert verify_checkpoint(steps(out / "checkpoints")[0]) == []
    for layout in ("", "dp2"):
        with pytest.raises((JournalError, RankFailed)) as refused:
            trained(
                Run.parse("", "run", (*WORDS, "steps=3", f"out={out}")), layout
            )
        assert (
            "metrics.jsonl cannot be written: No space left on device"
            in str(refused.value)
        )


def test_a_line_that_the_disk_cuts_costs_no_other_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    journal = Journal(path, goes_on=True)
    journal.write(event="start", step=0)
    plain, room = os.write, [10]

    def write(descriptor: int, data: Any) -> int:
        if descriptor != journal.file.fileno():
            return plain(descriptor, data)
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = plain(descriptor, bytes(data)[: room[0]])
        room[0] -= count
        return count

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write)
        journal.write(event="step", step=1)
        journal.write(event="step", step=2)
    journal.write(event="step", step=3)
    journal.close()
    assert [r.get("step") for r in read_journal(path)] == [0, 3]
    assert journal.lost == 2


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_run_whose_last_save_failed_never_ends_with_0(
    asynchronous: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    plain = checkpoint.write_file

    def write(path: Path, tensors: Any) -> Any:
        if "00000004" in str(path) or "00000005" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return plain(path, tensors)

    monkeypatch.setattr(checkpoint, "write_file", write)
    words = [*WORDS, "checkpoint.every=1", f"checkpoint.async={asynchronous}"]
    out = tmp_path / "run"
    assert main(["train", *words, "steps=5", f"out={out}", GO_ON]) == 1
    said = capfd.readouterr()
    assert "step 5 could not be saved" in said.err
    assert "The newest checkpoint is step-00000003." in said.err
    # One that failed on the way and was made good by a later one is no failure.
    assert main(["train", *words, "steps=6", f"out={out}", GO_ON]) == 0
    assert main(["train", *words, "steps=5", f"out={tmp_path / 'stops'}"]) == 1


# ---- what fails after a save has become a checkpoint


def _fails(function: Any, when: Any) -> Any:
    def failing(*given: Any, **named: Any) -> Any:
        if when(*given):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(given[0]))
        return function(*given, **named)

    return failing


@pytest.mark.parametrize("what", ["sync", "prune"])
def test_an_error_after_the_rename_says_that_the_checkpoint_is_there(
    what: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    folder = out / "checkpoints"
    if what == "sync":
        failing = _fails(checkpoint.sync_folder, lambda path: path == folder)
        monkeypatch.setattr(checkpoint, "sync_folder", failing)
    else:
        failing = _fails(
            checkpoint.shutil.rmtree, lambda path, *_: ".removed-" in str(path)
        )
        monkeypatch.setattr(checkpoint.shutil, "rmtree", failing)
    words = [*WORDS, "checkpoint.every=1", "steps=4", f"out={out}"]
    assert main(["train", *words]) == 0
    said = capfd.readouterr().out
    why = (
        "its folder could not be synced"
        if what == "sync"
        else "old checkpoints could not be"
    )
    assert "it is there and sound, but" in said
    assert why in said
    assert "not saved" not in said
    assert verify_checkpoint(folder / "step-00000004") == []
    assert steps(folder)[0].name == "step-00000004"


def test_a_save_that_cannot_take_its_name_leaves_the_one_that_had_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def work(each: Small) -> None:
        each.steps(1)
        saver = each.saver(tmp_path)
        saver.save(each.progress)
        before = hash_tensors(steps(tmp_path)[0])
        monkeypatch.setattr(
            Path, "rename", _fails(rename, lambda p, *_: ".saving" in p.name)
        )
        with pytest.raises(
            CheckpointError,
            match="could not be saved; the previous checkpoint is intact",
        ):
            saver.save(each.progress)
        monkeypatch.setattr(Path, "rename", rename)
        assert hash_tensors(steps(tmp_path)[0]) == before

    ranks("", work)


# ---- records and clocks


GARBAGE = [
    '{"event": "start"}', '{"event": "step", "time": 1, "step": 1}', '{"event": "step"}',
    '{"event": "start", "time": "x", "step": []}', '{"event": ["step"], "time": null}', "{", "17",
    '{"event": "step", "time": 1, "step": 1, "seconds": NaN, "steps": 1}', "\x00\xff",
    '{"event": "step", "time": 1, "step": 1e999, "seconds": 1, "steps": ' + "9" * 400 + "}",
]  # fmt: skip


def test_records_that_are_not_usable_do_not_keep_a_run_from_going_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    words = [*WORDS, f"out={out}"]
    assert main(["train", *words, "steps=1"]) == 0
    with (out / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write("\n".join(GARBAGE) + "\n")
    capfd.readouterr()
    assert main(["train", *words, "steps=2"]) == 0
    assert "6 lines are unusable and were skipped" in capfd.readouterr().out
    assert 0 < records(out, "step")[-1]["goodput"] <= 1


# ---- data that is cut


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    text = tmp_path / "text"
    text.mkdir()
    for n in range(40):
        (text / f"{n}.txt").write_text(f"document {n} " * 400)
    assert (
        data_verb.run(
            ["prepare", str(text), "--out", str(tmp_path / "tokens")]
        )
        == 0
    )
    return tmp_path / "tokens"


def test_a_token_file_that_is_cut_under_a_run_is_named(tokens: Path) -> None:
    """Reading on would be SIGBUS: the process killed, and no file named."""
    file = tokens / "train.tokens"
    run = Run.parse("", "run", (*WORDS, f"data={tokens}"))
    batches = batches_of(run, run.shape)
    batches.batch(0)
    size = file.stat().st_size
    os.truncate(file, 10)
    with pytest.raises(
        DataError, match=rf"train\.tokens: has 10 bytes, and had {size:,} when"
    ):
        batches.batch(1)
    with pytest.raises(DataError, match=r"train\.tokens: has 10 bytes"):
        batches_of(run, run.shape)
    # Where a rank was killed all the same, the command looks which file it was.
    assert "train.tokens: has 10 bytes" in train_verb._cut_file(run)


def test_offsets_that_are_cut_under_a_run_are_named(tokens: Path) -> None:
    run = Run.parse("", "run", (*WORDS, f"data={tokens}"))
    batches = batches_of(run, run.shape)
    os.truncate(tokens / "train.documents", 8)
    with pytest.raises(DataError, match=r"train\.documents: has 8 bytes"):
        batches.batch(0)


# ---- nobody who reads


def test_a_run_saves_though_its_terminal_or_pipe_is_gone(
    tmp_path: Path,
) -> None:
    out = tmp_path / "run"
    code = "import sys; from phalanx.cli.main import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "train", *WORDS, "layout=dp2", "steps=1000000", f"out={out}"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 1/"):
            break
    process.stdout.close()
    end = time.monotonic() + 60
    while (
        len(records(out, "step")) < 5
        and process.poll() is None
        and time.monotonic() < end
    ):
        time.sleep(0.05)
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 75
    assert len(steps(out / "checkpoints")) == 1


# ---- the loss scale of float16


def test_a_loss_scale_off_its_default_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scales: list[tuple[float, int]] = []

    class Scaled(Rank):
        begins: tuple[float, int] | None = None

        def batch(self, step: int) -> Any:
            scaling = self.part.trainer.scaling
            assert scaling is not None
            if self.begins and step == 0:
                scaling.scale, scaling.steady = self.begins
            scales.append((scaling.scale, scaling.steady))
            return super().batch(step)

    monkeypatch.setattr(loop, "Rank", Scaled)
    monkeypatch.setattr(Scaled, "begins", (256.0, 41))
    out = tmp_path / "run"
    trained(
        small(out, "machine=", "steps=2", "optimizer.schedule=constant"),
        "fp16",
    )
    trained(
        small(out, "machine=", "steps=4", "optimizer.schedule=constant"),
        "fp16",
    )
    assert scales == [(256.0, 41), (256.0, 42), (256.0, 43), (256.0, 44)]
    assert read_manifest(steps(out / "checkpoints")[0]).state == {
        "loss_scale": [256.0, 45]
    }
    whole = tmp_path / "whole"
    trained(
        small(whole, "machine=", "steps=4", "optimizer.schedule=constant"),
        "fp16",
    )
    assert losses(out) == losses(whole)
    assert weights(out, 4) == weights(whole, 4)


@pytest.mark.parametrize(
    "kept",
    one_in(2, [["x", 1], [256.0], [0.0, 1], [math.inf, 1], [-2.0, 0], 7]),
)
def test_a_loss_scale_that_is_none_is_refused(
    kept: Any, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    trained(small(out, "machine=", "steps=1"), "fp16")
    path = steps(out / "checkpoints")[0] / "manifest.json"
    said = json.loads(path.read_text())
    said["body"]["state"]["loss_scale"] = kept
    body = json.dumps(said["body"], sort_keys=True, separators=(",", ":"))
    said["sha256"] = hashlib.sha256(body.encode()).hexdigest()
    path.write_text(json.dumps(said))
    with pytest.raises(
        CheckpointError, match=r"'loss_scale' is|is not JSON|beyond 64 bits"
    ):
        trained(small(out, "machine=", "steps=2"), "fp16")
