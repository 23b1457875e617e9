"""`phalanx schema`: the JSON Schema of what a command prints with --json, with its version.

The files stand in `schemas`. `python tests/cli/test_schemas.py` writes them from what commands print; a
key that goes or changes its type makes a new version.
"""

from __future__ import annotations

from pathlib import Path

from .usage import Parser, UsageError, nearest_word, say

_FOLDER = Path(__file__).parent / "schemas"
_EPILOG = """\
  phalanx schema                 the commands that have one
  phalanx schema check
  phalanx schema plan-explain    of `phalanx plan --explain`"""


def run(argv: list[str]) -> int:
    parser = Parser("phalanx schema", "What --json prints, as JSON Schema.", _EPILOG)
    parser.add("name", nargs="*", metavar="COMMAND", help="as check, or plan cost")
    name = "-".join(parser.read(argv).name)
    files = {file.stem: file for file in sorted(_FOLDER.glob("*.json"))}
    if not name:
        say("\n".join(files))
        return 0
    if name not in files:
        raise UsageError(f"there is no schema {name[:60]!r}.{nearest_word(name, files)}")
    say(files[name].read_text(encoding="utf-8"), end="")
    return 0
