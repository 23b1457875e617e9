"""Map of the source: each package with its level, and each file with the first sentence of its docstring.

`make map` prints it; `make map FOLDER=src/phalanx/planner` prints one folder.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "phalanx"
# A package imports those of lower levels only.
LEVELS: dict[str, int] = {
    "layout": 0, "program": 1, "drawing": 2, "planner": 2, "models": 3, "comm": 3, "parallel": 4,
    "cost": 5, "bench": 5, "generate": 5, "training": 6, "verification": 7, "report": 7, "api": 9, "cli": 10,
}  # fmt: skip
# Packages that stand alone, with those that their files may import.
APART = {
    "torch-shm/src/torch_shm": {"torch", "torch_shm"},
    "rank-watch/src/rank_watch": {"torch", "rank_watch"},
    "torch-audit/src/torch_audit": {"torch", "torch_audit"},
    "lab/src/phalanx_lab": {
        "torch",
        "safetensors",
        "torch_shm",
        "rank_watch",
        "phalanx",
        "phalanx_lab",
    },
}


def sentence(path: Path) -> str:
    """The first sentence of a file's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return (
        " ".join(text.split("\n\n")[0].split()).partition(". ")[0].rstrip(".")
    )


def package_table() -> list[str]:
    """Lines of the table of packages in docs/architecture.md."""
    rows = [
        f"| {level} | `{name}` | {sentence(SOURCE / name / '__init__.py')} |"
        for name, level in LEVELS.items()
    ]
    return ["| level | package | what it holds |", "|---|---|---|", *rows]


def map_lines(folder: Path) -> Iterator[str]:
    """The folder's files and subfolders, indented, each with its sentence."""
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        here = path.parent if path.name == "__init__.py" else path
        if path.name == "__init__.py":
            yield f"\n{here.relative_to(ROOT)}/  {sentence(path)}"
        else:
            yield f"  {name}: {sentence(path)}"


if __name__ == "__main__":
    named = sys.argv[1:] or ["src/phalanx", *APART]
    for name in named:
        print("\n".join(map_lines((ROOT / name).resolve())))
