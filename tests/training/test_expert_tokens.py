"""How often a run's experts were chosen: in routing.json after each validation, as the planner reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from loop_worlds import records, small, trained

from phalanx.layout import LayoutError, Shape
from phalanx.models import Router
from phalanx.parallel.model import decoder_of
from phalanx.planner.routing import Routing

EXPERTS = ("model.experts=5", "model.top_k=2", "model.expert_ffn=8")


def routing(out: Path, layout: str) -> list[list[int]]:
    trained(small(out, *EXPERTS, "steps=2", "validation.batches=2"), layout)
    counts: list[list[int]] = json.loads((out / "routing.json").read_text())
    return counts


def test_a_router_counts_what_it_chooses() -> None:
    shape = Shape.of(
        {"layers": 1, "hidden": 8, "vocab": 9, "experts": 5, "top_k": 2}
    )
    router = next(
        x for x in decoder_of(shape).modules() if isinstance(x, Router)
    )
    torch.nn.init.normal_(router.weight)
    router.tally = torch.zeros(5, dtype=torch.int64)
    chosen = router(torch.randn(3, 7, 8)).chosen
    assert (
        router.tally.tolist()
        == torch.bincount(chosen.flatten(), minlength=5).tolist()
    )
    valid = torch.rand(3, 7) < 0.5  # the others pad
    router.tally.zero_()
    chosen = router(torch.randn(3, 7, 8), valid).chosen
    assert (
        router.tally.tolist()
        == torch.bincount(chosen[valid].flatten(), minlength=5).tolist()
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    return routing(tmp_path_factory.mktemp("alone") / "run", "fp64")


@pytest.mark.parametrize(
    "layout",
    [
        "dp2",
        "ep2",
        "tp2",
        "tp2 seq",
        "tp2 seq experts:tp",
        "cp2",
        "pp2 1f1b:2",
        "recompute:all",
    ],
)
def test_every_layout_counts_the_choices_of_all_tokens_once(
    layout: str, alone: list[list[int]], tmp_path: Path
) -> None:
    assert routing(tmp_path / "run", f"{layout} fp64") == alone


def test_the_planner_reads_what_a_run_has_counted(
    alone: list[list[int]], tmp_path: Path
) -> None:
    # batches, rows, tokens, top_k
    assert [sum(layer) for layer in alone] == [2 * 6 * 18 * 2] * 3
    file = tmp_path / "routing.json"
    file.write_text(json.dumps(alone))
    shape = Shape.of(
        {"layers": 3, "hidden": 16, "vocab": 256, "experts": 5, "top_k": 2}
    )
    # Of ranks with three and two experts, the one with more tokens, in each layer.
    most = [max(sum(x[:3]), sum(x[3:])) / sum(x) for x in alone]
    assert Routing.parse(str(file), shape).busiest(2) == pytest.approx(
        2 * sum(most) / 3
    )
    for text in (
        "[[1, 2]]",
        "[[1, 1, 1, 1, 1], 3]",
        "[]",
        "{}",
        "[[]]",
        "[1, 1, 1, 1, 1e999]",
    ):
        file.write_text(text)
        with pytest.raises(LayoutError, match="not a list of 5 counts"):
            Routing.parse(str(file), shape)


def test_a_run_says_how_busy_its_busiest_expert_is(tmp_path: Path) -> None:
    counts = routing(tmp_path / "run", "fp64")
    (record,) = records(tmp_path / "run", "validation")
    assert record["busiest_expert"] == max(max(x) * 5 / sum(x) for x in counts)
