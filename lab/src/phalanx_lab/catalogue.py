"""The experiments by name, in reading order, and the size they run at.

`chapters.toml` lists them. Their sources are read without being imported.
"""

import ast
import difflib
import itertools
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from phalanx.drawing import text_table

_HERE = Path(__file__).parent
_DATA = tomllib.loads((_HERE / "chapters.toml").read_text(encoding="utf-8"))
NAMES = tuple(_DATA["chapters"])
PAPERS: dict[str, str] = _DATA["papers"]
INTRODUCTION: list[str] = _DATA["introduction"]


class LabError(ValueError):
    """Raised if an experiment cannot run with these settings: says what does not fit,
    and what would."""


@dataclass(frozen=True)
class Size:
    """The size of the deep MLP and the length of its training."""

    batch: int = 128
    width: int = 1024
    layers: int = 4
    steps: int = 5

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise LabError(f"{name} is {value}; it must be 1 or more.")

    @property
    def bytes(self) -> int:
        """The bytes of all weights in float64."""
        return 8 * self.layers * self.width**2

    def part(self, name: str, index: int, parts: int) -> slice:
        """Return range `index` of `batch`, `width` or `layers` divided into `parts`
        equal parts."""
        whole: int = getattr(self, name)
        if whole % parts:
            near = max(parts, whole // parts * parts)
            raise LabError(
                f"{name} {whole} does not divide by {parts}; use --{name} {near}, or fewer ranks."
            )
        length = whole // parts
        return slice(index * length, (index + 1) * length)


@dataclass(frozen=True)
class Chapter:
    """A row of chapters.toml."""

    file: str
    also: str = ""
    papers: list[str] = field(default_factory=list)
    engine: list[str] = field(default_factory=list)
    memory: str = ""
    sends: str = ""
    when: str = ""


@dataclass(frozen=True)
class Cell:
    """Consecutive lines of a source, starting at line `first` of the file, and the
    prose above them."""

    prose: str
    lines: list[str]
    first: int
    part: str = ""  # the function or class, unless it is the experiment itself


@dataclass(frozen=True)
class Experiment:
    """A function of an experiment's file. Its docstring is its title and story.

    Its cells are the other definitions in the file that it uses, and its own body, cut
    at comments that follow an empty line.
    """

    name: str
    module: str
    function: str
    title: str
    story: str
    cells: list[Cell]
    starts: list[int]  # the lines at which statements of its body begin
    chapter: Chapter

    @property
    def source(self) -> str:
        """The experiment's code with the definitions it uses."""
        return "\n".join("\n".join(cell.lines) for cell in self.cells) + "\n"

    @property
    def script(self) -> str:
        """The same idea as a script of torch.distributed alone; "" if there is none."""
        path = _script(self.name)
        return path.read_text(encoding="utf-8") if path.exists() else ""


def _script(name: str) -> Path:
    return _HERE / "scripts" / f"{name.replace('-', '_')}.py"


def experiment(name: str) -> Experiment:
    """Return the experiment of this name, read without being imported."""
    if name not in NAMES:
        word = (
            name.lower().replace("_", "-").rstrip("0123456789").rstrip("-_ ")
        )
        rows = _DATA["chapters"].items()
        also = {
            x: ours for ours, row in rows for x in row.get("also", "").split()
        }
        close = difflib.get_close_matches(
            name[:60].lower(), NAMES, n=1, cutoff=0.4
        )
        nearest = next(iter(close), "")
        near = also.get(name.lower()) or also.get(word) or nearest
        hint = f" Did you mean {near!r}?" if near else ""
        raise LabError(
            f"unknown experiment {name[:60]!r}.{hint} `phalanx lab` lists them."
        )
    chapter = Chapter(**_DATA["chapters"][name])
    lines, parts = _parsed(chapter.file)
    function = name.replace("-", "_")
    used, to_do = set[str](), [function]
    while to_do:
        if (part := to_do.pop()) not in used and part in parts:
            used.add(part)
            to_do += [
                x.id for x in ast.walk(parts[part]) if isinstance(x, ast.Name)
            ]
    node = parts[function]
    assert isinstance(node, ast.FunctionDef)
    title, _, story = (ast.get_docstring(node) or "").partition("\n\n")
    cells: list[Cell] = []
    for other in dict.fromkeys(parts[part] for part in parts if part in used):
        if other is node:
            cells += _cells(node, lines)
        else:
            cells.append(_top_cell(other, lines))
    module = f"{__package__}.experiments.{chapter.file}"
    starts = [statement.lineno for statement in node.body]
    title = " ".join(title.split())
    return Experiment(
        name, module, function, title, story, cells, starts, chapter
    )


@cache
def _parsed(file: str) -> tuple[list[str], dict[str, ast.stmt]]:
    """Return a file's lines, and its top-level statements by the names that they
    define."""
    text = (_HERE / "experiments" / f"{file}.py").read_text(encoding="utf-8")
    return text.splitlines(), {
        x: node for node in ast.parse(text).body for x in _defined(node)
    }


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [
        x.id
        for target in targets
        for x in ast.walk(target)
        if isinstance(x, ast.Name)
    ]


def _top_cell(node: ast.stmt, lines: list[str]) -> Cell:
    """Convert a top-level statement to a cell; its docstring, or the comment above it,
    is the prose."""
    code, prose, name = lines[node.lineno - 1 : node.end_lineno], "", " "
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        name, prose = node.name, ast.get_docstring(node) or ""
        if prose:
            first = node.body[0]
            del code[
                first.lineno - node.lineno : (first.end_lineno or 0)
                - node.lineno
                + 1
            ]
    else:
        above = itertools.takewhile(
            lambda x: x.startswith("# "), lines[node.lineno - 2 :: -1]
        )
        prose = " ".join(reversed([line[2:] for line in above]))
    return Cell(prose, code, node.lineno, name)


def _cells(node: ast.FunctionDef, lines: list[str]) -> Iterator[Cell]:
    """Split an experiment's body into cells: a comment after an empty line starts one
    and is its prose."""
    # from the docstring on
    start, end = node.body[0].end_lineno or 0, node.end_lineno or 0
    cell = Cell("", [lines[node.lineno - 1]], start)
    for number in range(start + 1, end + 1):
        line = lines[number - 1]
        if line.startswith("    # ") and (
            number == start + 1 or not lines[number - 2].strip()
        ):
            yield cell
            cell = Cell("", [], number)
        if line.startswith("    # ") and not "".join(cell.lines).strip():
            cell = Cell(
                f"{cell.prose} {line.strip()[2:]}".strip(), [], number + 1
            )
        else:
            cell.lines.append(line)
    yield cell


def scripted() -> tuple[str, ...]:
    """The names of the experiments that have a script."""
    return tuple(name for name in NAMES if _script(name).exists())


def listing() -> str:
    """List all experiments, one line each."""
    return text_table(
        (), [(name, experiment(name).title) for name in NAMES], left="ll"
    )
