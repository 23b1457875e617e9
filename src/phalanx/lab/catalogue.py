"""The experiments by name, in the order in which they are best read."""

from __future__ import annotations

import ast
import difflib
from dataclasses import dataclass
from pathlib import Path

from .claims import LabError

__all__ = ["NAMES", "Entry", "entry"]

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
    "fsdp": "zero-3", "zero": "zero-3", "fully-sharded": "zero-3", "ddp": "data-parallel",
    "dp": "data-parallel", "hsdp": "hybrid-sharding", "tp": "tensor-parallel",
    "megatron": "tensor-parallel", "pp": "pipeline", "gpipe": "pipeline", "1f1b": "one-f-one-b",
    "cp": "ring-attention", "context-parallel": "ring-attention", "ring": "ring-attention",
    "checkpointing": "recompute", "activation-checkpointing": "recompute", "amp": "mixed-precision",
    "bf": "mixed-precision", "fp": "mixed-precision", "offload": "swap",
}  # fmt: skip


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
        other = _ELSEWHERE.get(name.lower().rstrip("0123456789").rstrip("-_ "))
        close = difflib.get_close_matches(name[:60].lower(), NAMES, n=1, cutoff=0.4)
        near = [other] if other else close
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise LabError(f"there is no experiment {name[:60]!r}.{hint} `phalanx lab` lists them.")
    stem = name.replace("-", "_")
    path = Path(__file__).parent / "experiments" / f"{stem}.py"
    source = path.read_text(encoding="utf-8")
    title, _, story = (ast.get_docstring(ast.parse(source)) or "").partition("\n")
    return Entry(name, f"{__package__}.experiments.{stem}", title, story.strip(), source)
