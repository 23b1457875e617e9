"""Checkpoints in memory: a host that is lost is made good by the next, and a rank by its own host."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from checkpoint_worlds import Run
from loop_worlds import losses, records, weights

from phalanx.comm import launch
from phalanx.layout.run import Run as RunFile
from phalanx.training import checkpoint_memory
from phalanx.training.checkpoint import steps
from phalanx.training.checkpoint_load import load
from phalanx.training.checkpoint_memory import (
    NAME,
    ROOT,
    MemoryCheckpoints,
    newest_in_memory,
    remove_left,
)

CODE = "import sys; from phalanx.cli.train import run; sys.exit(run(sys.argv[1:]))"
WORDS = [
    "model={layers=2,hidden=32,heads=2,ffn=48,vocab=256}", "batch=4", "sequence=16", "steps=12",
    "optimizer.lr=1e-2", "validation.batches=0", "layout=dp2 zero1",
]  # fmt: skip


def hosts_of(world: Any, folder: Path, count: int) -> tuple[Path, str]:
    host = f"host{world.rank * count // world.size}"
    return folder / host, host


def saves(world: Any, layout: str, folder: Path, count: int) -> list[str]:
    """Three steps, saved after the second and the third, and three more."""
    run = Run(world, layout)
    memory = MemoryCheckpoints(
        *hosts_of(world, folder, count), run.local, run.updates
    )
    run.steps(2)
    assert memory.save(run.progress) == []
    run.steps(1)
    assert memory.save(run.progress) == []
    return run.steps(3)


def goes_on(
    world: Any, layout: str, folder: Path, count: int
) -> list[str] | None:
    run = Run(world, layout, seed=1)
    memory = MemoryCheckpoints(
        *hosts_of(world, folder, count), run.local, run.updates
    )
    loaded = load(folder / "disk", run.local, run.updates, memory=memory)
    if loaded is None:
        return None
    assert loaded.path.is_relative_to(hosts_of(world, folder, count)[0])
    run.step = loaded.progress.step
    assert run.step == 3
    return run.steps(3)


@pytest.mark.parametrize(
    ("layout", "lost"),
    [("dp4 zero3", 0), ("dp2 tp2 zero1", 1), ("pp2 dp2 1f1b:3", 0)],
)
def test_a_lost_host_is_made_good_by_the_copies_on_the_next(
    layout: str, lost: int, tmp_path: Path
) -> None:
    (truth, *_) = launch(saves, 4, layout, tmp_path, 2, backend="threads")
    for host in ("host0", "host1"):
        # older ones are gone
        assert [p.name for p in steps(tmp_path / host)] == ["step-00000003"]
        assert (
            len(
                list((tmp_path / host / "step-00000003").glob("*.safetensors"))
            )
            >= 2
        )
    shutil.rmtree(tmp_path / f"host{lost}")
    for each in launch(goes_on, 4, layout, tmp_path, 2, backend="threads"):
        assert each == truth


def test_what_one_host_has_is_enough_for_another_layout_on_it_alone(
    tmp_path: Path,
) -> None:
    (truth, *_) = launch(
        saves, 4, "dp2 tp2 zero1", tmp_path, 2, backend="threads"
    )
    shutil.rmtree(tmp_path / "host1")
    (left, right) = launch(
        goes_on, 2, "pp2 1f1b:3", tmp_path, 1, backend="threads"
    )
    assert left == right
    expected = [float.fromhex(loss) for loss in truth]
    assert [float.fromhex(loss) for loss in left] == pytest.approx(
        expected, rel=1e-12
    )


def test_of_three_hosts_two_neighbours_may_not_be_lost(tmp_path: Path) -> None:
    (truth, *_) = launch(saves, 3, "dp3 zero2", tmp_path, 3, backend="threads")
    kept = tmp_path / "kept"
    shutil.copytree(tmp_path / "host0", kept)
    shutil.rmtree(tmp_path / "host0")
    assert (
        launch(goes_on, 3, "dp3 zero2", tmp_path, 3, backend="threads")
        == [truth] * 3
    )
    for host in ("host0", "host1", "host2"):
        shutil.rmtree(tmp_path / host)
    shutil.copytree(kept, tmp_path / "host0")
    # Of rank 1 nothing is left: host0 has the parts of ranks 0 and 2. There is no disk either.
    assert (
        launch(goes_on, 3, "dp3 zero2", tmp_path, 3, backend="threads")
        == [None] * 3
    )


def resumes(
    world: Any, layout: str, folder: Path, count: int
) -> tuple[int, str] | None:
    """The step that a run resumes at, and the folder that it was in."""
    run = Run(world, layout, seed=1)
    memory = MemoryCheckpoints(
        *hosts_of(world, folder, count), run.local, run.updates
    )
    loaded = load(folder / "disk", run.local, run.updates, memory=memory)
    return loaded and (loaded.progress.step, loaded.path.parent.name)


@pytest.fixture
def both_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two hosts with steps 2 and 3 in memory, as when all are killed before the older one is removed."""
    monkeypatch.setattr(checkpoint_memory.checkpoint, "prune", lambda *_: None)
    launch(saves, 2, "dp2 zero1", tmp_path, 2, backend="threads")
    for host in ("host0", "host1"):
        assert [p.name for p in steps(tmp_path / host)] == [
            "step-00000003",
            "step-00000002",
        ]
    return tmp_path


def test_of_several_steps_in_memory_the_newest_is_resumed(
    both_steps: Path,
) -> None:
    found = launch(resumes, 2, "dp2 zero1", both_steps, 2, backend="threads")
    assert found == [(3, "host0"), (3, "host1")]


@pytest.mark.parametrize("damage", ["removed", "cut", "changed"])
def test_a_newest_step_with_a_part_that_is_nowhere_is_passed_over(
    damage: str, both_steps: Path
) -> None:
    for host in ("host0", "host1"):
        file = both_steps / host / "step-00000003" / "rank-00001.safetensors"
        if damage == "removed":
            file.unlink()
        elif damage == "cut":
            os.truncate(file, 100)
        else:
            raw = bytearray(file.read_bytes())
            raw[-1] ^= 1
            file.write_bytes(raw)
    found = launch(resumes, 2, "dp2 zero1", both_steps, 2, backend="threads")
    assert found == [(2, "host0"), (2, "host1")]


def test_a_newest_step_that_only_one_host_knows_is_brought_to_the_other(
    both_steps: Path,
) -> None:
    """As when a host is lost between the commits of two."""
    shutil.rmtree(both_steps / "host1" / "step-00000003")
    found = launch(resumes, 2, "dp2 zero1", both_steps, 2, backend="threads")
    assert found == [(3, "host0"), (3, "host1")]


@pytest.mark.parametrize(
    "on_disk, expected", [(2, "host0"), (3, "host0"), (4, "disk")]
)
def test_memory_is_resumed_unless_the_disk_is_newer(
    on_disk: int, expected: str, tmp_path: Path
) -> None:
    def saved(world: Any) -> None:
        run = Run(world, "")
        run.steps(on_disk)
        run.saver(tmp_path / "disk").save(run.progress)

    launch(saves, 1, "", tmp_path, 1, backend="threads")
    launch(saved, 1, backend="threads")
    (found,) = launch(resumes, 1, "", tmp_path, 1, backend="threads")
    assert found == (max(3, on_disk), expected)


def test_what_is_damaged_in_memory_is_taken_from_the_copy_or_not_at_all(
    tmp_path: Path,
) -> None:
    (truth, *_) = launch(saves, 2, "dp2 zero1", tmp_path, 2, backend="threads")
    one, other = (
        tmp_path / host / "step-00000003" / "rank-00000.safetensors"
        for host in ("host0", "host1")
    )
    for file, there in ((one, [truth] * 2), (other, [None] * 2)):
        raw = bytearray(file.read_bytes())
        raw[-3] ^= 4
        file.write_bytes(raw)
        if file is other:
            shutil.copy(other, one)  # it had been made good
        assert (
            launch(goes_on, 2, "dp2 zero1", tmp_path, 2, backend="threads")
            == there
        )


def test_a_file_that_cannot_be_read_keeps_no_other_rank_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(saves, 2, "dp2 zero1", tmp_path, 2, backend="threads")
    shutil.rmtree(tmp_path / "host1")

    def unreadable(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(checkpoint_memory.stored, "read_into", unreadable)
    assert (
        launch(goes_on, 2, "dp2 zero1", tmp_path, 2, backend="threads")
        == [None] * 2
    )


def test_where_there_is_no_room_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_memory, "available_memory", lambda: 1000)

    def refused(world: Any) -> list[str]:
        run = Run(world, "dp2")
        memory = MemoryCheckpoints(
            *hosts_of(world, tmp_path, 1), run.local, run.updates
        )
        return memory.save(run.progress)

    for errors in launch(refused, 2, backend="threads"):
        (error,) = errors
        assert re.search(
            r"rank 0: .* are needed in .*host0, but only 1000 B are free",
            error,
        )
    assert not list((tmp_path / "host0").iterdir())


def test_memory_of_a_run_that_is_gone_is_given_back(tmp_path: Path) -> None:
    # this process was not started at that tick
    (tmp_path / f"{NAME}-{os.getpid()}-1-a").mkdir()
    mine = (
        tmp_path
        / f"{NAME}-{os.getpid()}-{checkpoint_memory.started_at(os.getpid())}-a"
    )
    mine.mkdir()
    remove_left(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [mine.name]


def ranks_of(pid: int) -> list[int]:
    """The processes that a process has started, but for watchers."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            watcher = (
                b"rank_watch.watcher" in (stat.parent / "cmdline").read_bytes()
            )
        except OSError:
            continue
        if int(fields[1]) == pid and not watcher:
            found.append(int(stat.parent.name))
    return sorted(found)


@pytest.mark.slow
def test_after_a_rank_was_killed_the_run_goes_on_from_memory_bit_for_bit(
    tmp_path: Path,
) -> None:
    truth, out = tmp_path / "truth", tmp_path / "run"
    command = [sys.executable, "-c", CODE, *WORDS]
    subprocess.run(
        [*command, f"out={truth}"],
        check=True,
        timeout=200,
        capture_output=True,
    )
    words = (f"out={out}", "train.restarts=1", "train.in_memory=1")
    run = RunFile.parse("", "run", words)
    process = subprocess.Popen(
        [*command, *words], stderr=subprocess.PIPE, text=True
    )
    end = time.monotonic() + 120
    while (
        not newest_in_memory(run) >= "step-00000003" and time.monotonic() < end
    ):
        time.sleep(0.005)
    os.kill(ranks_of(process.pid)[-1], signal.SIGKILL)
    said = process.communicate(timeout=200)[1]
    assert process.returncode == 0, said
    assert "was killed by signal 9" in said
    (again,) = records(out, "resume")
    assert re.search(
        rf"resuming at step \d+ from {ROOT}/{NAME}-", again["text"]
    )
    assert records(out, "start")[1]["step"] >= 3
    assert losses(out) == losses(truth)
    assert weights(out, 12) == weights(truth, 12)
    end = time.monotonic() + 20
    while (
        list(ROOT.glob(f"{NAME}-{process.pid}-*")) and time.monotonic() < end
    ):
        time.sleep(0.05)
    assert not list(ROOT.glob(f"{NAME}-{process.pid}-*"))
