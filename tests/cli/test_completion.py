"""TAB completion: its words are those of the parsers, in real shells."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.cli import main
from phalanx.cli.completion import candidates
from phalanx.cli.main import VERBS
from phalanx.layout import Shape
from phalanx.layout.choices import BACKENDS

BASH = """
eval "$(phalanx completion bash)"
COMP_WORDS=(phalanx {words}); COMP_CWORD={last}; _phalanx; echo "${{COMPREPLY[@]}}"
"""
ZSH = """
compdef() {{ :; }}; compadd() {{ shift; echo "$@"; }}; _files() {{ echo FILES; }}
eval "$(phalanx completion zsh)"
words=(phalanx {words}); CURRENT={current}; _phalanx
"""


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["ver"], ["verify"]),
        (["train", "--backend", ""], sorted(BACKENDS)),
        (
            ["check", "dp2", "--model", "1"],
            [n for n in Shape.names() if n.startswith("1")],
        ),
        (["plan", "c"], ["calibrate", "cost"]),
        (["plan", "cost", "--pri"], ["--price"]),
        (["checkpoint", "export", "--fam"], ["--family"]),
        (["check", "--device", "h2"], ["h20", "h200"]),
        (["nonsense", ""], []),
        (["check", "--batch", ""], []),
    ],
)
def test_words_are_those_that_the_parser_takes(
    words: list[str], found: list[str]
) -> None:
    assert candidates(words) == found


def test_every_command_has_options_to_complete() -> None:
    assert candidates([""]) == sorted(VERBS)
    for verb in VERBS:
        assert {"--help", "--quiet", "--verbose"} <= set(
            candidates([verb, "--"])
        )


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes(shell: str, tmp_path: Path) -> None:
    if not shutil.which(shell):
        pytest.skip(f"no {shell} here")
    command = tmp_path / "phalanx"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m phalanx "$@"\n')
    command.chmod(0o755)
    script = BASH if shell == "bash" else ZSH
    text = "\n".join(
        script.format(words=words, last=n, current=n + 1)
        for words, n in (("verify --ba", 2), ("train --backend g", 3))
    )
    done = subprocess.run(
        [shell, "-c", text], capture_output=True, text=True, timeout=120,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert done.stdout.split() == ["--backend", "gloo"], done.stderr


def test_fish_gets_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fish"]) == 0
    assert 'complete -c phalanx -a "(__phalanx)"' in capsys.readouterr().out
