"""Layouts that others trained with fit, by what each token of a block keeps, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.cost import cached_costs
from phalanx.layout import Layout, Shape, piece_layout
from phalanx.planner.calibrate import CostedRun, Measured, costed
from phalanx.planner.hardware import hardware_of
from phalanx.planner.link import cluster
from phalanx.planner.profile import profile
from phalanx.planner.published import runs_of
from phalanx.planner.step import case_of
from phalanx.planner.table import read_table

UNSEEN = Path(__file__).parents[2] / "benchmarks/published/unseen.csv"
GPU = 80 * 2**30


def kept_per_token(run: CostedRun) -> float:
    """Bytes that the last kind of block keeps for each token of a rank."""
    block = run.parts.values[-2]
    rank_tokens = run.run.case.rows * run.run.case.sequence
    rank_tokens /= run.run.case.layout.cp
    parts = block.parts or (block,)
    selective = run.run.case.layout.recompute == "selective"
    each = (p.cost.selected if selective else p.cost.kept for p in parts)
    return sum(each) / rank_tokens


def test_llama_3_s_three_layouts_fit() -> None:
    """405B on tp8 with seq: hidden 16,384, MLP 53,248, 128 heads and 8 of keys, in 2 bytes.

    A rank of tp has an eighth of the block's input, of both norms' outputs, of the queries,
    of attention's output and of the stream between: 6 x 2,048 features. It has one head each
    of keys and values (256), a 4-byte sum for each of 16 heads (32), and gate and up
    (2 x 6,656). That is 25,888 features, 51,776 bytes.
    """
    rows = [row for row in read_table(UNSEEN) if row.family == "llama"]
    runs, refused = runs_of(rows, cached_costs)
    assert len(runs) == 3
    assert not refused
    for run in runs:
        features = 6 * 2048 + 2 * 128 + 2 * 16 + 2 * 6656
        assert kept_per_token(run) == pytest.approx(2 * features, rel=0.02)
        held = run.choice(run.row.profile).bytes
        assert 0.5 * GPU < held < GPU, run.row.name


def test_deepseek_v3_s_layout_fits() -> None:
    """61 layers on 2,048 H800 with pp16 and ep64, fp8, microbatches of one sequence of 4,096.

    Between forward and recomputation a token keeps the block's input and the stream after
    attention (2 x 7,168 features), its latents (1,536, 512, and 64 for rope), attention's
    output (128 heads, padded from 128 to 192) with a sum of 4 bytes for each head, and the
    gate and up of the shared expert (2 x 2,048), in 2 bytes. Each of its 8 routed copies
    keeps 7,168 features in 1 byte and gate and up in 2.
    """
    shape, software = Shape.load("deepseek-v3"), profile("deepseek")
    text = "dp2 ep64 pp16 zero1 dualpipe-v:120 recompute:selective bf16"
    layout = Layout.parse(f"{text} fp8:tile,experts")
    case = case_of(shape, layout, batch=15360, sequence=4096)
    assert case.rows == 1
    run = Measured("deepseek", case)
    (found,) = costed(
        [run], hardware_of(cluster("h800x2048")), cached_costs, software
    )
    dense = 2 * 7168 + 1536 + 512 + 64 + 128 * 192 + 2 * 128 + 2 * 2048
    routed = 8 * (7168 + 2 * 2 * 2048)
    assert kept_per_token(found) == pytest.approx(2 * dense + routed, rel=0.02)
    held = found.choice(software).bytes
    assert 0.5 * GPU < held < GPU
    assert piece_layout(layout).recompute == "selective"
