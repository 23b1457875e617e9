"""docs/commands.md has the help of every command, as the commands print it.

python tests/cli/test_commands_page.py    # writes the page again
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from phalanx.cli.completion import parser_of
from phalanx.cli.main import VERBS, main

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"
HEAD = """# Commands

The help of every command, as `--help` prints it. Each also takes `--json`, `--quiet` and `-v`. The
keys of a run are in [training](training.md#the-keys), those of a model in [model
keys](model-keys.md). `python tests/cli/test_commands_page.py` writes this page.
"""


def commands() -> Iterator[list[str]]:
    """Every command, followed by its subcommands."""
    for verb in VERBS:
        yield [verb]
        parser = parser_of([verb])
        for sub in parser.subverbs if parser else ():
            yield [verb, sub]


def page() -> str:
    """The whole page; COLUMNS must be 80."""
    parts, texts = [HEAD], set[str]()
    for words in commands():
        printed = io.StringIO()
        with redirect_stdout(printed):
            assert main([*words, "--help"]) == 0
        text = printed.getvalue().strip()
        if text in texts:
            continue  # a word of its command, such as a schedule of `draw`
        texts.add(text)
        mark = "#" * (1 + len(words))
        parts.append(f"{mark} {' '.join(words)}\n\n```text\n{text}\n```\n")
    return "\n".join(parts)


def test_the_page_of_commands_is_what_the_commands_print(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert PAGE.read_text() == page()


if __name__ == "__main__":
    os.environ["COLUMNS"] = "80"
    PAGE.write_text(page())
