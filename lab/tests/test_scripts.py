"""Scripts to copy: each runs under torchrun with gloo, and needs torch alone."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.cli.usage import UsageError
from phalanx_lab import command
from phalanx_lab.catalogue import NAMES, experiment, scripted
from phalanx_lab.exercises import exercises

SCRIPTED = scripted()


def copied(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> Path:
    """The script as a student copies it: what the command prints, in a file."""
    assert command.run([name, "--script"]) == 0
    file = folder / f"{name.replace('-', '_')}.py"
    file.write_text(capsys.readouterr().out)
    return file


def end(started: subprocess.Popen[str]) -> None:
    """End torchrun with its ranks. Each rank has a session of its own, so torchrun must end them."""
    started.terminate()
    try:
        started.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGKILL)
        started.communicate()


def torchrun(
    file: Path, ranks: int, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    words = [
        "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
    ]  # fmt: skip
    # In a folder of its own, and without the packages of this repository.
    started = subprocess.Popen(
        [sys.executable, "-m", *words, file.name],
        cwd=file.parent,
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = started.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        end(started)
        raise
    return subprocess.CompletedProcess(
        started.args, started.returncode, out, err
    )


def test_every_chapter_of_an_exercise_has_a_script() -> None:
    assert {each.chapter for each in exercises().values()} <= set(SCRIPTED)
    assert len(SCRIPTED) == 11


@pytest.mark.parametrize("name", SCRIPTED)
def test_a_script_imports_torch_alone_and_says_how_to_run_it(
    name: str,
) -> None:
    tree = ast.parse(experiment(name).script)
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).split(".")[0])
    assert imported == {"torch"}
    file = f"{name.replace('-', '_')}.py"
    said = ast.get_docstring(tree) or ""
    assert f"torchrun --nproc-per-node 4 {file}" in said


def test_a_copied_script_runs_under_torchrun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = torchrun(copied("zero-3", tmp_path, capsys), 2)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"rank {rank}: its shards' gradients are" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTED)
def test_every_copied_script_runs_on_two_and_four_ranks(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = copied(name, tmp_path, capsys)
    for ranks in (2, 4):
        done = torchrun(file, ranks)
        assert done.returncode == 0, done.stderr
        # Lines of several processes may be joined.
        said = {int(rank) for rank in re.findall(r"rank (\d+): ", done.stdout)}
        assert said == set(range(ranks))


@pytest.mark.slow
def test_a_script_that_is_wrong_fails(tmp_path: Path) -> None:
    """The scripts check themselves: without its all-reduce, data parallel does not agree."""
    whole = experiment("data-parallel").script
    broken = whole.replace("dist.all_reduce(w.grad)", "pass")
    assert broken != whole
    file = tmp_path / "data_parallel.py"
    file.write_text(broken)
    done = torchrun(file, 2)
    assert done.returncode != 0
    assert "Tensor-likes are not close" in done.stderr


def test_a_chapter_without_a_script_names_those_that_have_one() -> None:
    bare = next(name for name in NAMES if name not in SCRIPTED)
    with pytest.raises(UsageError, match="these have one: point-to-point"):
        command.run([bare, "--script"])
    with pytest.raises(UsageError, match="name of one chapter"):
        command.run(["--script"])


def test_options_that_a_script_does_not_read_are_refused(
    tmp_path: Path,
) -> None:
    page = tmp_path / "lab.html"
    words = ["zero-3", "--script", "--html", str(page), "--width", "8"]
    with pytest.raises(UsageError, match=r"leave out --html, --width\."):
        command.run(words)
    # Numbers of the command line are compared as numbers.
    assert command.run(["zero-3", "--script", "--ranks", "4"]) == 0
