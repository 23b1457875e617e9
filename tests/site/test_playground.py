"""The playground: formulas of costs, and answers without torch or numpy."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import build
import formulas
import pytest
from formula import NoFormula, costs_from, structure

from phalanx.cost import cached_costs
from phalanx.cost.pieces import cost_kinds
from phalanx.layout import Layout, Shape, piece_layout
from phalanx.layout.numbers import bytes_text, seconds_text
from phalanx.parallel import build_model
from phalanx.planner.hardware import hardware_of
from phalanx.planner.link import cluster
from phalanx.planner.local import profile_for
from phalanx.planner.step import Pricer, Request

CUT = piece_layout(Layout.parse("tp2 seq recompute:selective bf16"))


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    """The formulas of two cuts: with neither tp nor recomputation, and with both."""
    plain = piece_layout(Layout.parse("bf16"))
    return formulas.table_of([("llama", plain), ("llama", CUT)])


def test_pieces_that_families_share_are_costed_once() -> None:
    plain = piece_layout(Layout.parse("bf16"))
    part = piece_layout(Layout.parse("recompute:selective bf16"))
    ran = list[Any]()

    def run(fitted: Any, jobs: Any) -> Any:
        ran.extend(jobs)
        return [(job, dict.fromkeys(pieces, job)) for job, pieces in jobs]

    both = [("qwen2", plain), ("qwen2, tied", plain), ("qwen2", part)]
    found = formulas.table_of([("llama", plain), *both], run)
    # qwen2 has other blocks than llama; tied weights are of the head alone, and
    # recomputation of the block.
    assert dict(ran) == {
        ("llama", plain): [0, 1, 2],
        ("qwen2", plain): [1],
        ("qwen2, tied", plain): [2],
        ("qwen2", part): [1],
    }
    tied = found[structure(formulas.example("qwen2, tied"))]
    assert [*tied.values()] == [
        [("llama", plain), ("qwen2", plain), ("qwen2, tied", plain)]
    ]


@pytest.mark.parametrize("tp, rows", [(2, 1), (8, 3)])
def test_formulas_give_what_costing_a_model_gives(
    table: Any, tp: int, rows: int
) -> None:
    cut = piece_layout(Layout.parse(f"tp{tp} seq recompute:selective bf16"))
    shape = Shape.load("70b")
    found = costs_from(table, shape, [cut], sequence=8192)[cut]
    model = build_model(replace(shape, layers=1))
    (costed,) = cost_kinds(model, cut, (rows,), sequence=8192, target="cuda")
    assert tuple(piece(rows) for piece in found.values) == costed


def test_what_no_formula_knows_is_refused_by_name(table: Any) -> None:
    with pytest.raises(NoFormula, match="no prices of cp2"):
        costs_from(table, Shape.load("8b"), [Layout.parse("cp2 bf16")])
    with pytest.raises(NoFormula, match="no prices of bf16 fp8"):
        costs_from(table, Shape.load("8b"), [Layout.parse("dp8 bf16 fp8")])
    assert structure(replace(Shape.load("8b"), windows=(4096, 0))) == ""
    assert structure(Shape.load("mlp")) == ""


ASK = """
import json, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numpy", "rich", "safetensors"):
            raise ImportError(name)
sys.meta_path.insert(0, Missing())
import play
ground = play.Playground(sys.argv[1])
said = [json.loads(ground.answer(text)) for text in sys.argv[2:]]
later = []
while more := ground.more():
    later.append(json.loads(more))
print(json.dumps([said, later]))
"""


def asked(costs: Path, *texts: str) -> Any:
    """What the page is answered, in a process that has the page's files and none of the
    large packages."""
    packed = costs.parent / "packed"
    with zipfile.ZipFile(io.BytesIO(build.package())) as archive:
        archive.extractall(packed)
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(costs), *texts], env={"PYTHONPATH": str(packed)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def test_answers_are_those_of_plan_and_need_neither_torch_nor_numpy(
    table: Any, tmp_path: Path
) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(table))
    fields: dict[str, Any] = {"model": "8b", "device": "h100", "batch": 16}
    words = "dp2 pp2 tp2 seq zero1 1f1b:4 recompute:selective"
    texts = [
        {"layout": words}, {"layout": words + " tp3"}, {"layout": "dp8 tp3"},
        {"layout": words, "operations": "phalanx program 1\n"},
        {"layout": "dp8", "model": '{"model_type": "llama"'}, {"layout": "dp8"},
    ]  # fmt: skip
    said, later = asked(costs, *(json.dumps(fields | text) for text in texts))

    hardware, shape = (
        hardware_of(cluster("h100x8")),
        replace(Shape.load("8b"), batch=16),
    )
    profile = profile_for(hardware, None, "bf16")
    request = Request(
        shape,
        hardware,
        profile,
        partial(cached_costs, target="cuda"),
        shape.sequence,
        16,
    )
    choice = Pricer(request).choose(Layout.parse(words + " bf16"))
    assert f"{bytes_text(choice.bytes)}, and fits" in said[0]["summary"]
    assert seconds_text(choice.step) in said[0]["step"]
    assert "write it once" in said[1]["error"]
    assert "tp=3 does not divide heads=32" in said[2]["error"]
    assert said[2]["nearest"]
    assert "error" in said[3] or said[3]["verdict"]
    assert said[4]["error"].startswith("config.json: line 1 is no JSON")
    # The last does not fit: what does is found a little later, and is right.
    assert "does not fit" in said[5]["summary"]
    assert later[0] == {"verdict": ""}
    fits = [found["fits"] for found in later if found.get("fits")]
    assert fits
    for layout in fits:
        assert (
            Pricer(request).choose(Layout.parse(layout)).bytes <= request.room
        )


def test_exercises_are_checked_without_torch_and_numpy(tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text("{}")
    deadlock = "rank 0: F0 B0 F1 B1\nrank 1: F0 F1 B0 B1"
    answers = [
        {"exercise": "deadlock", "answer": deadlock},
        {"exercise": "bubble", "answer": "27.3"},
        {"exercise": "nothing", "answer": "1"},
    ]
    (wrong, right, unknown), later = asked(costs, *map(json.dumps, answers))
    assert not wrong["right"]
    assert "rank 0 waits at 0B0" in wrong["words"]
    assert right["right"]
    assert "makespan" in right["page"]
    assert "nothing" in unknown["error"]
    assert later == []
