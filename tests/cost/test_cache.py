"""PieceCost pieces kept on disk: found again without torch, costed again when anything has changed."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.cost import cached_costs, piece_costs
from phalanx.layout import Layout, Shape, piece_layout
from phalanx.parallel import build_model
from phalanx.program import PieceCost

TINY = Shape.load("tiny")
STRANGER = str(Path(__file__).parents[2] / "examples" / "stranger.py") + ":Stranger"
LAYOUTS = Layout.parse_many("dp2 tp2 seq bf16; pp2 tp2 zero1 seq bf16 1f1b:4; cp2; pp2 zb-h1:4")


def test_a_cut_is_what_a_piece_can_feel() -> None:
    cuts = [str(piece_layout(x)) for x in LAYOUTS]
    assert cuts == ["tp2 seq bf16", "tp2 seq bf16", "cp2", "zb-h1:1"]
    every = piece_layout(
        Layout.parse("dp2 tp2 cp4:2x2 zero3 accum:4 recompute:every=2 offload:weights")
    )
    assert every == Layout.parse("cp4:2x2 tp2")
    assert piece_layout(every) == every


def test_the_cache_gives_what_weighing_gives(tmp_path: Path) -> None:
    for found in (cached_costs(TINY, LAYOUTS, place=tmp_path) for _ in range(2)):
        assert list(found) == list(dict.fromkeys(map(piece_layout, LAYOUTS)))
        for cut, pieces in found.items():
            assert len(pieces) == TINY.pieces
            for rows in (1, 2, 5):
                real = piece_costs(build_model(TINY), cut, rows)
                for number, costed in enumerate(real):
                    told = pieces[number](rows)
                    assert replace(told, temporary=0) == replace(costed, temporary=0)
                    assert costed.temporary <= told.temporary
                    assert rows == 5 or costed.temporary == told.temporary
            assert pieces.head(1) == piece_costs(build_model(TINY), cut, 1)[-1]


CODE = """
import sys
from pathlib import Path
from phalanx.layout import Layout, Shape
from phalanx.cost import cached_costs
model, place, layouts = sys.argv[1:]
model = model if ":" in model else Shape.load(model)
found = cached_costs(model, Layout.parse_many(layouts), place=Path(place))
print("torch" in sys.modules, sum(p.block(3).forward.flops for p in found.values()))
"""


def _ask(*argv: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", CODE, *argv], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.split()


@pytest.mark.parametrize("model", [TINY, STRANGER], ids=["shape", "file"])
def test_what_is_cached_is_found_without_torch(model: Shape | str, tmp_path: Path) -> None:
    layouts = "tp2; dp2 cp2"
    found = cached_costs(model, Layout.parse_many(layouts), place=tmp_path)
    work = sum(p.block(3).forward.flops for p in found.values())
    name = model.name if isinstance(model, Shape) else model
    assert _ask(name, str(tmp_path), "dp4 tp2 zero3; cp2") == ["False", str(work)]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_changed_module_behind_a_model_s_file_is_costed_again(tmp_path: Path) -> None:
    source = Path(STRANGER.rpartition(":")[0]).read_text()
    find = "import os, sys\nsys.path.insert(0, os.path.dirname(__file__))\nimport costed_part\n"
    (tmp_path / "mine.py").write_text(f"{source}\n{find}")
    (tmp_path / "costed_part.py").write_text("")
    for _ in range(2):
        cached_costs(f"{tmp_path}/mine.py:Stranger", [Layout()], place=tmp_path / "costs")
        assert len([*(tmp_path / "costs").iterdir()]) == 1
    (tmp_path / "costed_part.py").write_text("# changed")
    cached_costs(f"{tmp_path}/mine.py:Stranger", [Layout()], place=tmp_path / "costs")
    assert len([*(tmp_path / "costs").iterdir()]) == 2


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"tp2": 3}', '{"tp2": {"kinds": [[1, 2]]}}'])
def test_a_damaged_file_is_weighed_again_and_written_whole(damage: str, tmp_path: Path) -> None:
    layouts = [Layout.parse("tp2")]
    good = cached_costs(TINY, layouts, place=tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_text(damage)
    again = cached_costs(TINY, layouts, place=tmp_path)
    assert again[layouts[0]].block(2) == good[layouts[0]].block(2)
    assert file.read_bytes() == whole


def test_a_place_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = cached_costs(TINY, [Layout()], place=tmp_path / "file" / "cached_costs")
    assert found[Layout()].block(1).weights == TINY.parameters(1)


def test_layers_and_names_share_a_file_and_sizes_do_not(tmp_path: Path) -> None:
    for shape in (TINY, replace(TINY, layers=9, name="other", batch=3)):
        found = cached_costs(shape, [Layout()], place=tmp_path)[Layout()]
        assert len(found) == shape.pieces
        assert len(list(tmp_path.iterdir())) == 1
    cached_costs(replace(TINY, ffn=64), [Layout()], place=tmp_path)
    cached_costs(TINY, [Layout()], sequence=16, place=tmp_path)
    cached_costs(TINY, [Layout()], target="cpu", place=tmp_path)
    assert len(list(tmp_path.iterdir())) == 4
    assert all(json.loads(file.read_text()) for file in tmp_path.iterdir())


def test_a_block_with_windows_in_every_second_costs_the_mean_of_both_kinds(tmp_path: Path) -> None:
    def block(windows: tuple[int, ...]) -> PieceCost:
        shape = replace(TINY, layers=2, windows=windows)
        (pieces,) = cached_costs(shape, LAYOUTS[2:3], place=tmp_path).values()
        return pieces.block(2)

    narrow, wide, mixed = block((4,)), block((0,)), block((4, 0))
    attention = [cost.forward.attention[0].flops for cost in (narrow, wide)]
    assert attention[0] < attention[1]
    assert mixed.forward.products == narrow.forward.products
    for of in ("forward", "input_gradient", "weight_gradient"):
        flops = [getattr(cost, of).flops for cost in (narrow, wide, mixed)]
        assert flops[2] == pytest.approx((flops[0] + flops[1]) / 2)
    assert block((4, 4)) == narrow


def test_experts_in_blocks_with_windows_cost_the_mean_of_each_part(tmp_path: Path) -> None:
    def parts(windows: tuple[int, ...]) -> list[PieceCost]:
        shape = replace(TINY, experts=4, top_k=2, gated=True, layers=4, windows=windows)
        (pieces,) = cached_costs(shape, [Layout.parse("ep2")], place=tmp_path).values()
        return [part(2) for part in pieces.parts]

    narrow, wide, mixed = parts((4, 4)), parts((0, 0)), parts((4, 0))
    assert narrow[1:] == wide[1:] == mixed[1:]
    middle = (narrow[0].forward.flops + wide[0].forward.flops) / 2
    assert mixed[0].forward.flops == pytest.approx(middle)
