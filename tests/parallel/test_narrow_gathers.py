"""Weights that travel in 8 bits: which, in how many bytes, and what is said of them beforehand."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.comm import Group, Work, World
from phalanx.comm.launch import launch
from phalanx.layout import Layout
from phalanx.parallel import Precision, build_model, microbatches
from phalanx.parallel.local import build_local
from phalanx.parallel.low_precision import matmul_named
from phalanx.report.sizes import sizes_of_run
from phalanx.training.executor import Executor
from phalanx.training.optimizer import AdamW
from phalanx.training.program import program_of
from phalanx.verification import SHAPES, batch_of

GQA = SHAPES["gqa"]
BF16 = torch.bfloat16
# Of a block by hand: q, k, v, o of 16 with 4 heads of 4, of which 2 for keys; three of 16 x 24; two norms.
MATRICES = 16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 24
NUMBERS = MATRICES + 2 * 16


def gathered(world: World, layout: Layout) -> list[tuple[torch.dtype, int]]:
    """Dtype and size of what a rank gets in the gathers of one step, and the kinds of its weights."""
    model = build_model(GQA)
    program = program_of(model, layout)
    precision = Precision(
        BF16, torch.float32, torch.float32, matmul_named(layout.matmul)
    )
    local = build_local(
        world, layout, model, program, precision=precision, poison=True
    )
    executor = Executor(local, program, world.rank, AdamW())
    seen: list[tuple[torch.dtype, int]] = []

    def gather(group: Group, out: Tensor, x: Tensor, **more: Any) -> Work:
        seen.append((out.dtype, out.numel()))
        return Group.all_gather(group, out, x, **more)

    for unit in local.every_unit:
        own: Any = unit.groups.gather
        own.all_gather = partial(gather, own)
    executor.step(
        microbatches(batch_of(GQA, 0), layout, local.coordinates["dp"]), 1e-3
    )
    return sorted(seen, key=str)


def on_ranks(text: str) -> list[tuple[torch.dtype, int]]:
    layout = Layout.parse(text)
    first, *others = launch(gathered, layout.ranks, layout, backend="threads")
    assert all(each == first for each in others)
    return list(first)


def padded(n: int, ranks: int) -> int:
    return -(-n // ranks) * ranks


def test_matrices_of_blocks_travel_as_bytes_and_the_rest_in_the_layout_s_precision() -> (
    None
):
    embed, head = 37 * 16, 37 * 16 + 16
    # The embedding is gathered for its forward, a block for both, the head once for the two.
    ends = [(BF16, padded(embed, 3)), (BF16, padded(head, 3))]
    seen = on_ranks("dp3 zero3 fp8:tile")
    assert {s for s in seen if s[0] != torch.uint8} == set(ends)
    blocks = [size for dtype, size in seen if dtype == torch.uint8]
    assert set(blocks) == {padded(NUMBERS, 3)}
    # the last block's forward and backward follow each other
    assert len(blocks) in (7, 8)
    wide = on_ranks("dp3 zero3 fp8")
    assert {dtype for dtype, _ in wide} == {BF16}
    assert [size for _, size in wide if size == padded(NUMBERS, 3)] == blocks


@pytest.mark.parametrize(
    "text",
    ["dp3 zero3 fp8", "dp3 zero3 mxfp8", "dp3 zero3 offload:weights fp8:tile"],
)
def test_where_one_copy_does_not_serve_weights_travel_in_16_bits(
    text: str,
) -> None:
    assert {dtype for dtype, _ in on_ranks(text)} == {BF16}


@pytest.mark.parametrize("zero", [1, 3])
def test_bytes_that_are_promised_are_those_of_8_bits(zero: int) -> None:
    def sizes(word: str) -> tuple[float, float]:
        layout = Layout.parse(f"dp3 zero{zero} bf16 {word}")
        make = partial(build_model, GQA)
        program = program_of(make(), layout)
        found = sizes_of_run(make, layout, program, GQA.sequence, "cpu")
        return found.gathered[1], found.home[1]

    (wide, home), (narrow, home_narrow) = sizes("fp8"), sizes("fp8:tile")
    size, shard = padded(NUMBERS, 3), padded(NUMBERS, 3) // 3 * 4
    squares = 7  # each matrix is less than one
    # Norms and largest numbers; scales.
    beside = 2 * (2 * 16 + squares) + 4 * squares
    if zero == 3:
        assert (wide, narrow) == (2 * size, size)
        assert (home, home_narrow) == (shard, shard + beside)
    else:
        assert (wide, narrow) == (0, 0)
        assert (home, home_narrow) == (shard + 2 * size, shard + size + beside)
