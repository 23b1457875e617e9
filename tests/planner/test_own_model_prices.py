"""A model of somebody's own is priced by its own pieces and weights, not by the sizes that it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.api.plan import request
from phalanx.cost import cached_costs
from phalanx.layout import Layout, Shape, staged_pieces
from phalanx.parallel import Model, load_model
from phalanx.parallel.rows import model_pieces
from phalanx.planner.profile import profile
from phalanx.planner.step import Pricer, planned_program
from phalanx.program import options_for
from phalanx.training.program import program_of

EXAMPLES = Path(__file__).parents[2] / "examples"
# One block is frozen, one is twice as wide, and the output weight is the embedding's.
MINE = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import stranger
from torch import nn

class Mine(stranger.Stranger):
    def __init__(self):
        super().__init__()
        wide = self.blocks[2].mlp
        wide.up = nn.Linear(stranger.HIDDEN, 2 * stranger.FFN)
        wide.down = nn.Linear(2 * stranger.FFN, stranger.HIDDEN)
        self.head.output.weight = self.embed.words.weight
        self.blocks[1].requires_grad_(False)

def describe(model):
    return stranger.describe(model)
"""
LAYOUTS = (
    "dp2", "dp2 zero1 accum:2", "dp2 zero3", "tp2", "tp2 seq", "pp2 1f1b:3", "pp2 dp2 zero2 1f1b:2",
)  # fmt: skip


@pytest.fixture(scope="module")
def name(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("own") / "mine.py"
    path.write_text(MINE)
    return f"{path}:Mine"


@pytest.fixture(scope="module")
def model(name: str) -> Model:
    return load_model(name)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("text", LAYOUTS)
def test_the_program_that_is_priced_is_the_one_that_runs(
    text: str, optimizer: str, name: str, model: Model
) -> None:
    layout = Layout.parse(f"{text} bf16")
    software = "phalanx-muon" if optimizer == "muon" else "phalanx"
    pricer = Pricer(request(name, f"h100x{layout.ranks}", profile=software))
    planned = planned_program(pricer.priced(layout), layout.microbatches)
    ran = program_of(model, layout, options_for(optimizer))
    assert [[*map(str, row)] for row in planned.rows] == [
        [*map(str, row)] for row in ran.rows
    ]
    assert planned.frozen == ran.frozen
    assert planned.tied == ran.tied


def test_its_weights_are_those_that_torch_counts(
    name: str, model: Model
) -> None:
    layout = Layout.parse("pp2 1f1b:3 stages:2-2 bf16")
    choice = Pricer(request(name, "h100x2")).choose(layout)
    two = profile("phalanx").weight_bytes
    sizes = [
        sum(p.numel() for p in module.parameters())
        for _, module in model.pieces
    ]
    words = model.weights["embed.words.weight"].numel()
    # The head uses the embedding's unit, of which the last stage holds a copy.
    held = [sum(sizes[:3]), sum(sizes[3:]) - words + sizes[0]]
    assert [stage["weights"] for stage in choice.stages] == pytest.approx(
        [two * n for n in held]
    )


def test_rows_that_are_kept_on_disk_are_those_of_the_model(
    name: str, model: Model, tmp_path: Path
) -> None:
    layout = Layout.parse("tp2 seq bf16")
    for _ in range(2):
        (costs,) = cached_costs(name, [layout], place=tmp_path).values()
        assert costs.rows == model_pieces(model, layout).rows
    shape = model.shape
    assert isinstance(shape, Shape)
    assert costs.rows != staged_pieces(layout, shape).rows
    assert [row.frozen for row in costs.rows] == [n == 2 for n in range(6)]


def test_blocks_of_its_own_kinds_take_their_own_time(name: str) -> None:
    times = Pricer(request(name, "h100x1")).times(
        Layout.parse("bf16"), 64.0, False
    )
    plain, frozen, wide = (times[piece] for piece in (1, 2, 3))
    assert frozen.forward == plain.forward
    assert frozen.backward < plain.backward
    assert wide.forward.device > plain.forward.device
    assert times[4] == plain
    assert times.kinds == (0, 1, 2, 3, 1, 4)
