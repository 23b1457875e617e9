"""`phalanx schema`: what a command prints with --json, as JSON Schema with its version.

Without a name the commands are listed that have one.

  phalanx schema check
  phalanx schema plan-explain    of `phalanx plan --explain`
"""

from pathlib import Path

from .usage import Parser, UsageError, nearest_word, say

# `python tests/cli/test_schemas.py` writes them from what commands print; a key that goes or changes its
# type makes a new version.
_FOLDER = Path(__file__).parent / "schemas"


def run(argv: list[str]) -> int:
    parser = Parser(__doc__, json=False)
    parser.add("name", nargs="*", metavar="COMMAND", help="as check, or plan cost")
    name = "-".join(parser.read(argv).name)
    files = {file.stem: file for file in sorted(_FOLDER.glob("*.json"))}
    if not name:
        say("\n".join(files))
        return 0
    if name not in files:
        raise UsageError(f"unknown schema {name[:60]!r}.{nearest_word(name, files)}")
    say(files[name].read_text(encoding="utf-8"), end="")
    return 0
