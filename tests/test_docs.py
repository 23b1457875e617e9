"""Every command and every block of Python in README and docs runs as it stands, or is listed here with
the reason why it does not.

A page's commands run in order in one folder that looks like a clone; its blocks of Python in one
interpreter. docs/api.md runs by default, the other pages with `make slow`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long_file

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    p.relative_to(ROOT)
    for p in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
)
QUICK = {"docs/api.md", "docs/your-own-loop.md"}

# What does not run: a page and a pattern of its commands.
NOT_RUN = {
    ("", r"^(make|git clone|cd |python3 -m venv|pip install)"): "it sets the machine up, or takes an hour",
    ("", r"-m pytest|^\.venv/bin/pip "): "tests, which run by themselves; an installation",
    ("", r"^(torchrun|sbatch|kubectl|ray|sky) "): "tests/clusters starts these launchers",
    ("docs/continue-a-model.md", ""): "needs a model of 16 GB; tests/training/test_continue_a_model.py "
    "runs the page with a small one",
    ("docs/verified.md", r"--ranks 8|--cover|shm"): "hours; what it printed stands there with its date",
    ("docs/verified.md", r"^\.venv/bin/python -c"): "several lines; it lists layouts for the next command",
    ("docs/bring-your-model.md", "--cover"): "minutes",
    ("docs/add-a-way-to-split.md", "--cover"): "minutes",
    ("docs/add-a-technique.md", "--cover"): "minutes",
    ("docs/training.md", "# as rank 1 of 2"): "an example of ranks that were started wrongly",
    ("docs/planning.md", "machine.toml"): "measures for a minute; tests/planner/test_local.py plans on one",
    ("docs/your-own-loop.md", "ten_modules.py"): "tests/training/test_ten_modules.py compares its table",
    ("docs/scored.md", ""): "minutes each; benchmarks/planner_score.py runs them",
    ("docs/shared-memory.md", "benchmarks/backends.py"): "measures for an hour",
    ("docs/collectives.md", ""): "measures for minutes",
    ("docs/numbers.md", "bench"): "measures for minutes; needs a GPU to mean something",
}  # fmt: skip
# What ends with another code than 0, as the page shows.
FAILS = {
    "check broken.txt": 1, "check early.txt": 1, "draw stuck.py:early": 2, "--model wrong.py": 2,
    "--for deepspeed": 1, "--from ds.json": 1,
    "train steps=many": 2, "--model 70b --cluster h100x8 --limit 0.5": 1, 'check "pp3 tp5"': 1,
}  # fmt: skip
# Python that is a part of something, and does not run by itself.
PARTS = {
    "docs/add-a-schedule.md": "quotes examples/early.py, which tests/cli/test_examples.py compares",
    "docs/add-a-technique.md": "quotes layout/soap.py, which tests/test_house.py compares",
    "docs/bring-your-model.md": "quotes examples/stranger.py, likewise",
    "docs/clusters.md": "is for a task of Ray",
    "docs/shared-memory.md": "sketches a protocol",
}


def _blocks(page: Path, kinds: str) -> list[tuple[str, str]]:
    return re.findall(
        rf"^```({kinds})\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S
    )


def _commands(page: Path) -> list[str]:
    """The command lines of a page's shell blocks; in a console block they begin with `$`."""
    lines = []
    for kind, block in _blocks(page, "sh|bash|shell|console"):
        for line in block.replace("\\\n", " ").splitlines():
            command = line.removeprefix("$ ").strip()
            if (kind != "console" or line.startswith("$ ")) and command[
                :1
            ] not in (
                "",
                "#",
            ):
                lines.append(command)
    return lines


def _reason(page: Path, command: str) -> str:
    reasons = (
        r
        for (p, x), r in NOT_RUN.items()
        if p in ("", str(page)) and re.search(x, command)
    )
    return next(reasons, "")


def _pages(runs: object) -> list[object]:
    return [
        pytest.param(
            page,
            id=str(page),
            marks=[] if str(page) in QUICK else [pytest.mark.slow],
        )
        for page in PAGES
        if runs(page)  # type: ignore[operator]
    ]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder that looks like the project's, with the files that pages say are the reader's own."""
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and path.name not in (
            "runs",
            "build",
        ):
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    # Scripts: a link to the interpreter would be one without this environment's packages.
    for name, words in (("python", ""), ("phalanx", "-m phalanx")):
        command = tmp_path / ".venv" / "bin" / name
        command.write_text(
            f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n'
        )
        command.chmod(0o755)
    (tmp_path / "run.toml").write_text(
        'steps = 3\nbatch = 64\nsequence = 16\nlayout = "auto"\n'
    )
    return tmp_path


def _environment(clone: Path) -> dict[str, str]:
    path = f"{clone / '.venv' / 'bin'}:{os.environ['PATH']}"
    inherited = os.environ.get("PYTHONPATH", "")
    sources = [
        str(ROOT / folder)
        for folder in (
            "src",
            "torch-shm/src",
            "rank-watch/src",
            "torch-audit/src",
            "lab/src",
        )
    ]
    python_path = os.pathsep.join([*sources, inherited])
    return os.environ | {
        "PATH": path,
        "PYTHONPATH": python_path,
        "COLUMNS": "80",
    }


@pytest.mark.parametrize("page", _pages(_commands))
def test_every_command_of_a_page_runs(page: Path, clone: Path) -> None:
    for command in (c for c in _commands(page) if not _reason(page, c)):
        done = subprocess.run(
            ["bash", "-c", command], cwd=clone, env=_environment(clone),
            capture_output=True, text=True, timeout=900, check=False,
        )  # fmt: skip
        code = next(
            (code for part, code in FAILS.items() if part in command), 0
        )
        assert done.returncode == code, (
            f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        )


@pytest.mark.parametrize("page", _pages(lambda page: _blocks(page, "python")))
def test_the_python_of_a_page_runs(page: Path, clone: Path) -> None:
    if str(page) in PARTS:
        return
    code = "\n".join(block for _, block in _blocks(page, "python"))
    done = subprocess.run(
        [sys.executable, "-"], input=code, cwd=clone, env=_environment(clone),
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_reason_is_of_something_that_is_there() -> None:
    commands = [
        (str(page), command) for page in PAGES for command in _commands(page)
    ]
    for (page, pattern), reason in NOT_RUN.items():
        found = [
            c for p, c in commands if page in ("", p) and re.search(pattern, c)
        ]
        assert found or page == "", f"{page} {pattern}: {reason}"
    assert [p for p in PARTS if not _blocks(Path(p), "python")] == []
    assert [
        part
        for part in FAILS
        if not any(part in command for _, command in commands)
    ] == []
