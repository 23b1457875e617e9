"""The experiments by name, in the order in which they are best read, and the size they run at."""

from __future__ import annotations

import ast
import difflib
from dataclasses import dataclass
from pathlib import Path

from ..draw import text_table

# Of each file in `experiments` its functions, in the order in which they are best read.
_FILES = {
    "messages": "collectives point-to-point process-groups one-process asynchronous-launch grid",
    "objects": "objects",
    "data_parallel": "data-parallel threads-data-parallel sampler save-and-barrier zero-1 zero-2"
    " zero-3 hybrid-sharding swap",
    "tensor_parallel": "tensor-parallel tensor-parallel-pair",
    "context_parallel": "ring-attention ulysses",
    "experts": "experts",
    "matrices": "muon",
    "pipeline": "model-sharding pipeline pipeline-async one-f-one-b",
    "memory": "recompute mixed-precision arithmetic",
}
NAMES = tuple(name for names in _FILES.values() for name in names.split())
# What other libraries call them.
_ELSEWHERE = {
    "zero-3": "fsdp zero fully-sharded",
    "experts": "ep moe mixture",
    "data-parallel": "ddp dp",
    "hybrid-sharding": "hsdp",
    "tensor-parallel": "tp megatron",
    "pipeline": "pp gpipe",
    "one-f-one-b": "1f1b",
    "ring-attention": "cp context-parallel ring",
    "recompute": "checkpointing activation-checkpointing",
    "mixed-precision": "amp bf fp",
    "swap": "offload",
}


class LabError(ValueError):
    """An experiment that cannot be run like this: what does not fit, and what would."""


@dataclass(frozen=True)
class Size:
    """How large the deep MLP is and how long it trains."""

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
        """Of all weights, in float64."""
        return 8 * self.layers * self.width**2

    def part(self, name: str, index: int, parts: int) -> slice:
        """The range of `batch`, `width` or `layers` that is number `index` of so many equal parts."""
        whole: int = getattr(self, name)
        if whole % parts:
            near = max(parts, whole // parts * parts)
            raise LabError(
                f"{name} {whole} does not divide by {parts}; use --{name} {near}, or fewer ranks."
            )
        length = whole // parts
        return slice(index * length, (index + 1) * length)


@dataclass(frozen=True)
class Experiment:
    """A function of an experiment's file: its title and story are its docstring, its source is with
    what else of the file it uses."""

    name: str
    module: str
    function: str
    title: str
    story: str
    source: str


def experiment(name: str) -> Experiment:
    """The experiment of that name, read without being imported."""
    if name not in NAMES:
        word = name.lower().rstrip("0123456789").rstrip("-_ ")
        other = next((ours for ours, theirs in _ELSEWHERE.items() if word in theirs.split()), "")
        close = difflib.get_close_matches(name[:60].lower(), NAMES, n=1, cutoff=0.4)
        near = [other] if other else close
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise LabError(f"there is no experiment {name[:60]!r}.{hint} `phalanx lab` lists them.")
    file = next(file for file, names in _FILES.items() if name in names.split())
    text = (Path(__file__).parent / "experiments" / f"{file}.py").read_text(encoding="utf-8")
    lines, function = text.splitlines(), name.replace("-", "_")
    body = ast.parse(text).body
    starts = [0, *(node.end_lineno or 0 for node in body)]
    parts = {
        name: (node, lines[at : node.end_lineno])
        for node, at in zip(body, starts, strict=False)
        for name in _defined(node)
    }
    used, to_do = set[str](), [function]
    while to_do:
        if (part := to_do.pop()) not in used and part in parts:
            used.add(part)
            to_do += [x.id for x in ast.walk(parts[part][0]) if isinstance(x, ast.Name)]
    source = "\n".join("\n".join(lines) for part, (_, lines) in parts.items() if part in used)
    node = parts[function][0]
    assert isinstance(node, ast.FunctionDef)
    title, _, story = (ast.get_docstring(node) or "").partition("\n\n")
    module = f"{__package__}.experiments.{file}"
    return Experiment(name, module, function, " ".join(title.split()), story, source.strip() + "\n")


def _defined(node: ast.stmt) -> list[str]:
    """The names that a statement of a file defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [x.id for target in targets for x in ast.walk(target) if isinstance(x, ast.Name)]


def listing() -> str:
    """All experiments, a line each."""
    return text_table((), [(name, experiment(name).title) for name in NAMES], left="ll")
