"""The lines of the engine that each of some `phalanx verify` commands runs, recorded once.

A mutation is judged by commands that run its statement: the first is the one that runs most of the
function around it.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .operators import Mutation, mutations_of

ROOT = Path(__file__).parents[2]
PHALANX = Path("src", "phalanx")
# Each package that a layout runs, and its folder.
PACKAGES = {
    name: PHALANX / name
    for name in (
        "models",
        "parallel",
        "comm",
        "program",
        "training",
        "layout",
        "verification",
    )
} | {"torch_shm": Path("torch-shm", "src", "torch_shm")}
# Folders that Python imports from.
IMPORTED = (
    "src",
    "torch-shm/src",
    "rank-watch/src",
    "torch-audit/src",
    "lab/src",
)

# Each shape, option, schedule and backend, in commands that take some seconds each.
CASES = (
    '--model gqa --layouts "dp2 tp2 seq zero3; pp2 cp2 1f1b:3 recompute:all; dp2x2 zero2 accum:3; tp4"',
    '--model gqa --packed --layouts "cp4:2x2; cp2 tp2; pp2 cp2 zb-v:3 zero2"',
    '--model gqa --layouts "pp2 interleaved2:3; pp2 zb-h2:3; pp2 dualpipe-v:3; pp4 gpipe:3"',
    '--model gqa --layouts "dp2 zero3 offload:weights,optimizer accum:2; accum:3 offload:activations;'
    ' pp2 zb-h2:4 zero3 gather:micro dp2; dp2 zero2 reduce:step accum:3; dp2 zero3 prefetch:3 accum:2"',
    '--model gqa --layouts "recompute:fit accum:3; tp2 seq recompute:selective; recompute:sqrt;'
    ' accum:2 recompute:every=3; pp2 stages:1-3"',
    '--model gqa --dropout 0.2 --optimizer sgd --layouts "dp2 tp2 seq; cp2 recompute:all; pp2 zb-h1:3"',
    '--model gpt --layouts "pp2 zb-h1:3 dp2 zero1; tp2 seq recompute:selective; cp2:ulysses; tp4"',
    '--model qwen --layouts "tp4; dp2 tp2 seq zero3 accum:2; pp2 cp2 1f1b:3"',
    '--model odd --layouts "tp2; dp3 zero3; cp2 tp2 seq; pp3 1f1b:3"',
    '--model gemma --layouts "tp2 seq; cp2; pp2 zb-h1:3; dp2 zero2 accum:3 recompute:selective"',
    '--model gemma --packed --layouts "cp4:2x2; cp2:ulysses tp2"',
    '--model olmo --layouts "tp4; dp2 tp2 seq zero1; cp2; pp2 1f1b:3"',
    '--model experts --layouts "ep2 tp2 seq experts:tp; dp2 ep2 overlap accum:3; pp2 ep2 1f1b:3; tp4"',
    '--model experts --optimizer muon --packed --layouts "ep2 dp2 zero2; cp2 experts:cp; pp2 zb-h1:3"',
    '--model latent --layouts "cp2 tp2 accum:2; ep2 tp2 seq; dp2 zero3 recompute:selective; pp2 ep2"',
    '--model sinks --packed --layouts "tp4 zero1; cp2 tp2 seq; ep2 recompute:all; cp2:ulysses"',
    '--model mlp --layouts "dp2 tp2 zero3; pp2 gpipe:3; tp2 accum:2; pp2 zb-v:3"',
    '--dtype bfloat16 --layouts "dp2 zero1; dp2 tp2 seq zero3; pp2 cp2 1f1b:3"',
    '--model experts --dtype bfloat16 --layouts "ep2 tp2 seq; dp2 zero2 accum:3"',
    '--dtype float16 --layouts "dp2 zero1; pp2 tp2 1f1b:3; accum:3"',
    '--model odd --dtype bfloat16 --layouts "tp2; dp2 zero3 accum:3"',
    '--model gemma --dtype bfloat16 --packed --layouts "tp2 seq; cp2"',
    '--model sinks --dtype bfloat16 --layouts "tp4 zero1; cp2"',
    '--model latent --dtype bfloat16 --layouts "ep2 tp2 seq; dp2 zero3"',
    '--model balanced --layouts "dp2 zero1; ep2; cp2 tp2 seq"',
    '--model mlp --dtype bfloat16 --layouts "dp2 tp2; pp2 1f1b:3"',
    '--optimizer muon --layouts "dp2 zero1; tp2 zero3 dp2; pp2 zb-v:3"',
    '--optimizer muon:original --layouts "dp3 zero2; tp2"',
    '--optimizer muon --dtype float16 --layouts "dp2 zero1; pp2 tp2 1f1b:3"',
    '--model tiles --lora 2 --layouts "dp2 zero1; tp2"',
    '--model strips --layouts "cp2; tp2 recompute:selective"',
    '--model chunks --z-loss 0.1 --layouts "tp2; dp2 zero1"',
    # runs, by the loop that trains them: their schedule, journal, checkpoint and data
    'model=tiny steps=100 batch=16 optimizer.warmup_steps=20 optimizer.schedule=wsd packing=bfd'
    ' layout="dp2 tp2 seq zero1 accum:2"',
    'model=tiny steps=100 batch=16 optimizer.name=muon packing=none layout="pp2 dp2 1f1b:4 fp16"',
    'model=deepseek-v3 weights=random batch=16 lora.r=4 layout="ep2 dp2 zero3 bf16"',
    '--lora 2 --layouts "dp2 tp2 seq zero3; pp2 zb-h1:3; cp2 accum:2"',
    '--z-loss 0.1 --layouts "tp2; pp2 1f1b:3; cp2"',
    '--layouts "dp2 fp8; dp2 zero3 fp8:tile; tp2 seq fp8; cp2 mxfp8; tp4 fp8:tile"',
    '--model experts --layouts "ep2 fp8:experts; dp2 zero1 accum:2 fp8:tile,experts"',
    '--backend gloo --layouts "dp2 tp2 seq zero3; pp2 cp2 1f1b:3; cp4:2x2"',
    '--model experts --backend shm --layouts "ep2 tp2 seq experts:tp; pp2 cp2 1f1b:3; dp4 zero2"',
    '--backend shm --layouts "dp2 tp2 seq zero3; cp4:2x2; dp2 offload:activations"',
)  # fmt: skip


@dataclass(frozen=True)
class Recorded:
    """The lines of each file that a command runs, and the seconds that it took while recorded."""

    command: str
    seconds: float
    lines: Mapping[str, frozenset[int]]

    def runs(self, mutation: Mutation) -> bool:
        if mutation.binds:
            return bool(mutation.binds & self.reads)
        lines = self.lines.get(mutation.path, frozenset())
        return not lines.isdisjoint(mutation.lines)

    def share_of(self, around: range, path: str) -> int:
        """The number of these lines that the command runs."""
        return len(self.lines.get(path, frozenset()).intersection(around))

    @cached_property
    def reads(self) -> frozenset[str]:
        """The names of attributes and variables in the lines that are run."""
        found = set()
        for path, lines in self.lines.items():
            for node in ast.walk(ast.parse((ROOT / path).read_bytes())):
                name = getattr(node, "id", getattr(node, "attr", None))
                if name and getattr(node, "lineno", 0) in lines:
                    found.add(name)
        return frozenset(found)


def recorded(folder: Path) -> list[Recorded]:
    """What every case runs; recorded where the folder has it not yet for this source."""
    folder.mkdir(parents=True, exist_ok=True)
    return [_recorded(case, folder) for case in CASES]


def digest() -> str:
    """A name for the source as it is."""
    total = hashlib.sha256()
    for folder in PACKAGES.values():
        for path in sorted((ROOT / folder).rglob("*.py")):
            total.update(path.read_bytes())
    return total.hexdigest()[:12]


def _recorded(case: str, folder: Path) -> Recorded:
    key = hashlib.sha256(case.encode()).hexdigest()[:12]
    kept = folder / f"lines-{digest()}-{key}.json"
    if not kept.exists():
        kept.write_text(json.dumps(_record(case, folder)))
    found = json.loads(kept.read_text())
    lines = {
        path: frozenset(numbers) for path, numbers in found["lines"].items()
    }
    return Recorded(case, found["seconds"], lines)


def _record(case: str, folder: Path) -> Mapping[str, object]:
    """Runs a command once, and notes each line of the packages that it runs."""
    raw = folder / "recording.txt"
    raw.unlink(missing_ok=True)
    recorder = Path(__file__).parent / "recorder"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(recorder), search_path(ROOT)]),
        "RECORDED_ROOT": str(ROOT),
        "RECORDED_LINES": str(raw.resolve()),
        "OMP_NUM_THREADS": "1",
    }
    begun = time.monotonic()
    done = subprocess.run(
        [*VERIFY, *shlex.split(case)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    seconds = time.monotonic() - begun
    if done.returncode:
        raise RuntimeError(
            f"verify {case} does not agree before any mutation:\n{done.stderr}"
        )
    print(f"recorded in {seconds:.0f} s: {case}", file=sys.stderr, flush=True)
    lines: dict[str, set[int]] = {}
    for entry in raw.read_text().split():
        path, _, line = entry.rpartition(":")
        if package_of(path):
            lines.setdefault(path, set()).add(int(line))
    return {
        "seconds": seconds,
        "lines": {path: sorted(of) for path, of in lines.items()},
    }


def search_path(root: Path) -> str:
    """The folders of a tree that Python imports from, as PYTHONPATH has them."""
    return os.pathsep.join(str(root / folder) for folder in IMPORTED)


def package_of(path: str) -> str:
    """The package that a file is of, or "" if it is of none of these."""
    folders = PACKAGES.items()
    return next(
        (name for name, at in folders if Path(path).is_relative_to(at)), ""
    )


VERIFY = (sys.executable, "-m", "phalanx", "verify", "--json")


@dataclass(frozen=True)
class Candidate:
    """A mutation, with the commands that run it, the most suited first."""

    mutation: Mutation
    cases: tuple[Recorded, ...]


def candidates(
    cases: Iterable[Recorded], packages: Iterable[str]
) -> list[Candidate]:
    """Every mutation of code that some case runs."""
    cases = tuple(cases)
    found = []
    for path in sorted({path for case in cases for path in case.lines}):
        if package_of(path) not in packages:
            continue
        source = (ROOT / path).read_bytes()
        functions = _functions(source)
        for mutation in mutations_of(path, source):
            suited = [case for case in cases if case.runs(mutation)]
            around = functions.get(mutation.function, mutation.lines)
            draw = random.Random(mutation.name)
            suited.sort(
                key=lambda case: (-case.share_of(around, path), draw.random())
            )
            if suited:
                found.append(Candidate(mutation, tuple(suited)))
    return found


def _functions(source: bytes) -> dict[str, range]:
    """The lines of each function and class, by its qualified name."""
    found: dict[str, range] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                name = f"{prefix}.{child.name}" if prefix else child.name
                found[name] = range(child.lineno, (child.end_lineno or 0) + 1)
            visit(child, name)

    visit(ast.parse(source), "")
    return found


def sample(every: Iterable[Candidate], seed: int) -> list[Candidate]:
    """The mutations in an order drawn by a seed: each next one is of an operator drawn at random, as
    there are a hundred times as many constants as waits."""
    draw = random.Random(seed)
    by_operator: dict[str, list[Candidate]] = {}
    for candidate in every:
        by_operator.setdefault(candidate.mutation.operator, []).append(
            candidate
        )
    for group in by_operator.values():
        draw.shuffle(group)
    order = []
    while by_operator:
        name = draw.choice(sorted(by_operator))
        order.append(by_operator[name].pop())
        if not by_operator[name]:
            del by_operator[name]
    return order
