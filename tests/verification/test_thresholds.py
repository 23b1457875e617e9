"""Sizes at which code takes another way: below, at and beyond each, layouts agree with one process."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.layout import Layout
from phalanx.layout.cases import LARGER
from phalanx.layout.choices import MATMULS
from phalanx.models import kernels, loss
from phalanx.parallel import model
from phalanx.training import totals
from phalanx.verification import verify
from seeded import swapped

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Threshold:
    """A constant of a file, its value, and a shape with three values of one size around it."""

    file: str
    name: str
    value: Any
    shape: str
    size: str
    sizes: tuple[int, int, int]  # just below, at, just beyond
    layouts: str


THRESHOLDS = (
    Threshold(
        "models/kernels.py", "STRIP", 128, "strips", "sequence", (127, 128, 129), "dp2; cp2"
    ),
    Threshold(
        "models/loss.py", "NUMBERS", {"cpu": 1 << 20}, "chunks", "sequence", (255, 256, 257), "dp2"
    ),
    Threshold(
        "parallel/model.py", "COLUMNS", 256, "tiles", "hidden", (255, 256, 257), "dp2 zero3; tp2"
    ),
    Threshold("parallel/model.py", "NUMBERS", 1 << 16, "tiles", "ffn", (255, 256, 257), "dp2 zero1"),
    Threshold("training/totals.py", "_SHORT", 1024, "runs", "vocab", (63, 64, 65), "dp2; dp2 zero1"),
    Threshold(
        "layout/choices.py", "fp8:tile", 128, "squares", "hidden", (127, 128, 129),
        "dp2 zero3 fp8:tile",
    ),
    Threshold("layout/choices.py", "mxfp8", 32, "squares", "ffn", (31, 32, 33), "dp2 mxfp8"),
)  # fmt: skip

# Other constants of the code that a step runs, with the reason why no size of a model crosses them here.
ELSEWHERE = {
    "models/loss.py LARGE": "on a GPU",
    "models/loss.py CHUNK": "chunks of logits: tests/models/test_loss.py",
    "models/loss.py LARGE_CHUNK": "on a GPU",
    "models/fused_kernels.py _PAIRS": "on a GPU: tests/models/test_fused.py",
    "models/fused_kernels.py _BLOCK": "on a GPU: tests/models/test_fused.py",
    "models/fused_kernels.py _WORDS": "on a GPU: tests/models/test_fused.py",
    "models/flex.py FEWEST_ROWS": "on a GPU: tests/models/test_flex.py",
    "models/flex.py _BLOCK": "on a GPU: tests/models/test_flex.py",
    "models/flex.py _ENTRIES": "a number of compiled graphs",
    "training/totals.py _FRACTION": "bits of float32",
    "training/totals.py _BIAS": "bits of float32",
    "training/totals.py _EXPONENTS": "bits of float32",
    "training/totals.py _LIMB": "bits of a sum",
    "training/totals.py _RUN": "sums without rounding: tests/verification/test_exact.py",
    "training/totals.py _CHUNK": "sums without rounding: tests/verification/test_exact.py",
    "training/totals.py _LARGE_CHUNK": "on a GPU",
    "models/noise.py EMBEDDING": "a number beyond those of blocks",
    "parallel/exact.py ALIGNED": "elements between weights: tests/verification/test_exact.py",
    "models/noise.py _WORD": "a mask of 32 bits",
    "parallel/compile.py _ENTRIES": "compiled graphs: tests/parallel/test_compile.py",
    "parallel/described.py _LONGEST": "a trial before the first step",
    "parallel/mixing.py _LONGEST": "a trial before the first step",
    "parallel/mixing.py _SHORTEST": "a trial before the first step",
    "parallel/own_module.py _SEQUENCE": "a length where nobody says one",
    "parallel/own_module.py _TOKENS": "a trial before the first step",
    "parallel/probe.py _PLAIN": "a trial before the first step",
    "parallel/transformers_apart.py _RUN": "a trial before the first step",
    "comm/agree.py MOST": "lines of an error",
    "comm/agree.py LONGEST": "characters of an error",
    "comm/agree.py ERROR": "characters of an error",
    "comm/agree.py PIECE": "bytes of a text before the first step",
    "comm/colours.py _MODULUS": "names of groups: tests/comm/test_colours.py",
    "comm/network.py _SIOCGIFADDR": "a number of Linux",
    "comm/process.py FLOW_BLOCKS": "a setting of NCCL",
    "torch_shm/arena.py PAGE": "every size around it: tests/comm/test_shm_waits.py",
    "torch_shm/arena.py LINE": "every size around it: tests/comm/test_shm_waits.py",
    "torch_shm/arena.py CHUNK": "every size around it: tests/comm/test_shm_waits.py",
    "torch_shm/lines.py PAYLOAD": "every size around it: tests/comm/test_shm_waits.py",
    "torch_shm/rounds.py SMALL": "every size around it: tests/comm/test_shm_waits.py",
    "torch_shm/compare.py SIZES": "sizes that a benchmark measures",
    "torch_shm/direct.py _SET_PTRACER": "a number of Linux",
    "torch_shm/watch.py TEXT": "characters of a message",
    "torch_shm/watch.py ROOM": "characters of a message",
    "training/copies.py COLUMNS": "a comparison of checkpoints: tests/training/test_weight_copies.py",
    "training/copies.py CHUNK": "a comparison of checkpoints: tests/training/test_weight_copies.py",
    "training/copies.py LARGE_CHUNK": "on a GPU",
}


def failures(shape: Any, layouts: str) -> list[str]:
    found = verify(shape, Layout.parse_many(layouts), steps=1)
    return [f"{v.layout}: {v.first_difference}" for v in found if not v.passed]


@pytest.mark.parametrize(
    "threshold", THRESHOLDS, ids=lambda t: f"{t.file} {t.name}"
)
def test_layouts_agree_below_at_and_beyond_a_threshold(
    threshold: Threshold,
) -> None:
    for size in threshold.sizes:
        shape = replace(LARGER[threshold.shape], **{threshold.size: size})
        assert failures(shape, threshold.layouts) == [], size


def _one_key_more_in_later_strips(
    q: Any, k: Any, documents: Any, window: int
) -> Any:
    first, *later = _right_blocks(q, k, documents, window)
    wider = [
        x._replace(band=(x.band[0], x.band[1] + 1)) for x in later if x.band
    ]
    return [first, *wider]


_right_blocks = kernels._own_blocks


def test_a_mistake_beyond_a_threshold_is_found_there_and_not_below() -> None:
    shape = replace(LARGER["strips"], softcap=0.0)
    with swapped(kernels, "_own_blocks", _one_key_more_in_later_strips):
        assert failures(replace(shape, sequence=128), "dp2") == []
        assert failures(shape, "dp2") != []


def test_the_values_in_the_table_are_those_of_the_code() -> None:
    known = {
        ("models/kernels.py", "STRIP"): kernels.STRIP,
        ("models/loss.py", "NUMBERS"): loss.NUMBERS,
        ("parallel/model.py", "COLUMNS"): model.COLUMNS,
        ("parallel/model.py", "NUMBERS"): model.NUMBERS,
        ("training/totals.py", "_SHORT"): totals._SHORT,
        ("layout/choices.py", "fp8:tile"): MATMULS["fp8:tile"].run,
        ("layout/choices.py", "mxfp8"): MATMULS["mxfp8"].run,
    }
    assert {(t.file, t.name): t.value for t in THRESHOLDS} == known


# ---- the table is complete

FOLDERS = (
    "src/phalanx/models",
    "src/phalanx/parallel",
    "src/phalanx/comm",
    "torch-shm/src/torch_shm",
)
# of `train`: what a step runs
FILES = ("executor", "totals", "optimizer", "muon", "precision", "copies")


def large_constants(path: Path) -> Iterator[str]:
    """The names of a file's constants that are, or have, a whole number of eight or more."""
    for node in ast.parse(path.read_text()).body:
        if (
            not isinstance(node, ast.Assign | ast.AnnAssign)
            or node.value is None
        ):
            continue
        target = (
            node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        )
        pairs: list[tuple[ast.expr, ast.expr]] = [(target, node.value)]
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = list(zip(target.elts, node.value.elts, strict=True))
        for name, value in pairs:
            if (
                isinstance(name, ast.Name)
                and name.id.strip("_").isupper()
                and _is_large(value)
            ):
                yield name.id


def _is_large(node: ast.expr) -> bool:
    if isinstance(node, ast.Dict):
        return any(_is_large(value) for value in node.values)
    if isinstance(node, ast.BinOp):
        return isinstance(
            node.op, ast.LShift | ast.Pow | ast.Sub | ast.Mult
        ) and (_is_whole(node.left) and _is_whole(node.right))
    return (
        isinstance(node, ast.Constant)
        and type(node.value) is int
        and node.value >= 8
    )


def _is_whole(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_whole(node.left) and _is_whole(node.right)
    return isinstance(node, ast.Constant) and type(node.value) is int


def test_every_large_constant_of_a_step_is_in_the_table_or_has_a_reason() -> (
    None
):
    paths = [
        path
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    paths += [
        ROOT / "src" / "phalanx" / "training" / f"{name}.py" for name in FILES
    ]
    found = set()
    for path in paths:
        file = path.as_posix().rpartition("/src/")[2].removeprefix("phalanx/")
        found |= {f"{file} {name}" for name in large_constants(path)}
    listed = {
        f"{t.file} {t.name}"
        for t in THRESHOLDS
        if t.file != "layout/choices.py"
    }
    assert found == listed | set(ELSEWHERE)
    assert not listed & set(ELSEWHERE)
