"""The experiments by name, in the order in which they are best read."""

from __future__ import annotations

import ast
import difflib
from dataclasses import dataclass
from pathlib import Path

from ..draw import text_table
from .claims import LabError

__all__ = ["NAMES", "Entry", "entry", "listing"]

_NAMES = """
    collectives point-to-point objects process-groups one-process asynchronous-launch
    data-parallel threads-data-parallel sampler save-and-barrier
    zero-1 zero-2 zero-3 hybrid-sharding
    tensor-parallel tensor-parallel-pair ring-attention ulysses
    model-sharding pipeline pipeline-async one-f-one-b
    recompute mixed-precision swap
    grid arithmetic"""
NAMES = tuple(_NAMES.split())
# What other libraries call them.
_ELSEWHERE = {
    "zero-3": "fsdp zero fully-sharded",
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


@dataclass(frozen=True)
class Entry:
    """An experiment's file: its title and story are its docstring."""

    name: str
    module: str
    title: str
    story: str
    source: str


def entry(name: str) -> Entry:
    """The experiment of that name, read without being imported."""
    if name not in NAMES:
        word = name.lower().rstrip("0123456789").rstrip("-_ ")
        other = next((ours for ours, theirs in _ELSEWHERE.items() if word in theirs.split()), "")
        close = difflib.get_close_matches(name[:60].lower(), NAMES, n=1, cutoff=0.4)
        near = [other] if other else close
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise LabError(f"there is no experiment {name[:60]!r}.{hint} `phalanx lab` lists them.")
    stem = name.replace("-", "_")
    path = Path(__file__).parent / "experiments" / f"{stem}.py"
    source = path.read_text(encoding="utf-8")
    title, _, story = (ast.get_docstring(ast.parse(source)) or "").partition("\n")
    return Entry(name, f"{__package__}.experiments.{stem}", title, story.strip(), source)


def listing() -> str:
    """All experiments, a line each."""
    return text_table((), [(name, entry(name).title) for name in NAMES], left="ll")
