"""The README's commands run as they stand."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _readme_lines() -> list[str]:
    """The command lines of the README's shell blocks; in a console block they begin with `$`."""
    text = (ROOT / "README.md").read_text()
    lines: list[str] = []
    for kind, block in re.findall(r"^```(sh|bash|shell|console)\n(.*?)^```", text, re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            if kind == "console" and not line.startswith("$ "):
                continue  # what the command printed
            command = line.removeprefix("$ ").strip()
            if command and not command.startswith("#"):
                lines.append(command)
    return lines


COMMANDS = [line for line in _readme_lines() if line.startswith(".venv/bin/phalanx")]


def test_the_readme_s_commands_are_ours_or_set_the_machine_up() -> None:
    known = (".venv/bin/", "make ", "git clone", "cd ", "python3 -m venv")
    assert not [line for line in _readme_lines() if not line.startswith(known)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like the project's: what commands write there, later ones may read."""
    place = tmp_path_factory.mktemp("readme")
    for path in ROOT.iterdir():
        if not path.name.startswith("."):
            (place / path.name).symlink_to(path)
    return place


@pytest.mark.parametrize("line", COMMANDS or [".venv/bin/phalanx --help"])
def test_every_command_of_the_readme_runs(line: str, folder: Path) -> None:
    words = shlex.split(line, comments=True)[1:]
    code = "import sys; from phalanx.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=folder, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
