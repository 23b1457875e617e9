"""PieceCost pieces kept on disk: found again without torch, costed again when anything has changed."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.cost import cached_costs, piece_costs
from phalanx.cost.pieces import cost_kinds
from phalanx.layout import Layout, Shape, cases, piece_layout
from phalanx.parallel import build_model
from phalanx.program import CostedPiece

TINY = Shape.load("tiny")
STRANGER = (
    str(Path(__file__).parents[2] / "examples" / "stranger.py") + ":Stranger"
)
LAYOUTS = Layout.parse_many(
    "dp2 tp2 seq bf16; pp2 tp2 zero1 seq bf16 1f1b:4; cp2; pp2 zb-h1:4"
)


def test_a_cut_is_what_a_piece_can_feel() -> None:
    cuts = [str(piece_layout(x)) for x in LAYOUTS]
    assert cuts == ["tp2 seq bf16", "tp2 seq bf16", "cp2", "zb-h1:1"]
    every = piece_layout(
        Layout.parse(
            "dp2 tp2 cp4:2x2 zero3 accum:4 recompute:every=2 offload:weights"
        )
    )
    assert every == Layout.parse("cp4:2x2 tp2")
    assert piece_layout(every) == every


def test_the_cache_gives_what_weighing_gives(tmp_path: Path) -> None:
    for found in (
        cached_costs(TINY, LAYOUTS, place=tmp_path) for _ in range(2)
    ):
        assert list(found) == list(dict.fromkeys(map(piece_layout, LAYOUTS)))
        for cut, pieces in found.items():
            assert len(pieces) == TINY.pieces
            for rows in (1, 2, 5):
                real = piece_costs(build_model(TINY), cut, rows)
                for number, costed in enumerate(real):
                    told = pieces[number](rows)
                    assert replace(told, temporary=0) == replace(
                        costed, temporary=0
                    )
                    assert costed.temporary <= told.temporary
                    assert rows == 5 or costed.temporary == told.temporary
            assert pieces.head(1) == piece_costs(build_model(TINY), cut, 1)[-1]


def test_the_cache_has_the_memory_of_a_head_whose_logits_fill_a_chunk(
    tmp_path: Path,
) -> None:
    shape, cut = replace(Shape.load("1b"), layers=1), Layout.parse("tp4 seq")
    pieces = cached_costs(shape, [cut], sequence=1024, place=tmp_path)[cut]
    for rows, within in ((2, 0.0), (4, 0.0), (8, 0.0), (11, 0.1), (16, 0.0)):
        due = piece_costs(build_model(shape), cut, rows, sequence=1024)[-1]
        told = pieces.head(rows).temporary
        assert told == pytest.approx(due.temporary, rel=within)


CODE = """
import sys
from pathlib import Path
from phalanx.layout import Layout, Shape
from phalanx.cost import cached_costs
model, place, layouts = sys.argv[1:]
model = model if ":" in model else Shape.load(model)
found = cached_costs(model, Layout.parse_many(layouts), place=Path(place))
print("torch" in sys.modules, sum(p[1](3).forward.flops for p in found.values()))
"""


def _ask(*argv: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", CODE, *argv],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.parametrize("model", [TINY, STRANGER], ids=["shape", "file"])
def test_what_is_cached_is_found_without_torch(
    model: Shape | str, tmp_path: Path
) -> None:
    layouts = "tp2; dp2 cp2"
    found = cached_costs(model, Layout.parse_many(layouts), place=tmp_path)
    work = sum(p[1](3).forward.flops for p in found.values())
    name = model.name if isinstance(model, Shape) else model
    assert _ask(name, str(tmp_path), "dp4 tp2 zero3; cp2") == [
        "False",
        str(work),
    ]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_changed_module_behind_a_model_s_file_is_costed_again(
    tmp_path: Path,
) -> None:
    source = Path(STRANGER.rpartition(":")[0]).read_text()
    find = "import os, sys\nsys.path.insert(0, os.path.dirname(__file__))\nimport costed_part\n"
    (tmp_path / "mine.py").write_text(f"{source}\n{find}")
    (tmp_path / "costed_part.py").write_text("")
    for _ in range(2):
        cached_costs(
            f"{tmp_path}/mine.py:Stranger",
            [Layout()],
            place=tmp_path / "costs",
        )
        assert len([*(tmp_path / "costs").iterdir()]) == 1
    (tmp_path / "costed_part.py").write_text("# changed")
    cached_costs(
        f"{tmp_path}/mine.py:Stranger", [Layout()], place=tmp_path / "costs"
    )
    assert len([*(tmp_path / "costs").iterdir()]) == 2


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", '{"tp2": 3}', '{"tp2": {"costs": [[1, 2]]}}']
)
def test_a_damaged_file_is_weighed_again_and_written_whole(
    damage: str, tmp_path: Path
) -> None:
    layouts = [Layout.parse("tp2")]
    good = cached_costs(TINY, layouts, place=tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_text(damage)
    again = cached_costs(TINY, layouts, place=tmp_path)
    assert again[layouts[0]][1](2) == good[layouts[0]][1](2)
    assert file.read_bytes() == whole


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The number of operations that ran while it was active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_another_size_of_ep_costs_only_the_experts_again(
    tmp_path: Path,
) -> None:
    """A search costs cut after cut, and delta layers run an operation for each chunk."""
    shape = replace(cases.SHAPES["delta"], experts=8, sequence=64)
    first, second = Layout.parse_many("ep2 bf16; ep4 bf16")
    counts = []
    for layout in (first, second):
        with Operations() as operations:
            found = cached_costs(shape, [layout], place=tmp_path)
        counts.append(operations.count)
        (costs,) = cost_kinds(build_model(shape), layout, (2,))
        pieces = found[layout]
        parts = {
            part(2)
            for number in range(len(pieces))
            for part in pieces[number].parts
        }
        assert parts == set(costs)
    assert counts[1] < counts[0] / 4


def test_a_file_is_not_read_again_after_a_cut_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []
    parsed = json.loads

    def counted(text: bytes) -> object:
        reads.append(len(text))
        return parsed(text)

    monkeypatch.setattr(json, "loads", counted)
    for layout in Layout.parse_many("tp2; tp4; tp2 seq; tp4 seq"):
        cached_costs(TINY, [layout], place=tmp_path)
    assert reads == []
    # Another process has written the file since.
    (file,) = tmp_path.iterdir()
    known = parsed(file.read_bytes())
    del known["tp4"]
    file.write_text(json.dumps(known))
    cached_costs(TINY, [Layout.parse("tp2")], place=tmp_path)
    assert len(reads) == 1


def test_a_place_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = cached_costs(
        TINY, [Layout()], place=tmp_path / "file" / "cached_costs"
    )
    assert found[Layout()][1](1).weights == TINY.rows[1].numel


def test_layers_and_names_share_a_file_and_sizes_do_not(
    tmp_path: Path,
) -> None:
    for shape in (TINY, replace(TINY, layers=9, name="other", batch=3)):
        found = cached_costs(shape, [Layout()], place=tmp_path)[Layout()]
        assert len(found) == shape.pieces
        assert len(list(tmp_path.iterdir())) == 1
    cached_costs(replace(TINY, ffn=64), [Layout()], place=tmp_path)
    cached_costs(TINY, [Layout()], sequence=16, place=tmp_path)
    cached_costs(TINY, [Layout()], target="cpu", place=tmp_path)
    assert len(list(tmp_path.iterdir())) == 4
    assert all(json.loads(file.read_text()) for file in tmp_path.iterdir())


def _blocks(place: Path, layout: str, **sizes: object) -> list[CostedPiece]:
    shape = replace(TINY, **sizes)  # type: ignore[arg-type]
    (pieces,) = cached_costs(
        shape, [Layout.parse(layout)], place=place
    ).values()
    return list(pieces)[1:-1]


def test_each_block_costs_what_its_own_window_makes_of_it(
    tmp_path: Path,
) -> None:
    narrow, wide = (
        _blocks(tmp_path, "cp2", windows=(each,))[0](2) for each in (4, 0)
    )
    assert narrow.forward.attention[0].flops < wide.forward.attention[0].flops
    for windows, wanted in (
        ((4, 0), [narrow, wide]),
        ((0, 4, 4), [wide, narrow, narrow]),
    ):
        blocks = _blocks(tmp_path, "cp2", layers=3, windows=windows)
        assert [block(2) for block in blocks] == (wanted * 2)[:3]


EXPERTS = {"experts": 4, "top_k": 2, "gated": True, "expert_ffn": 16}


def test_first_blocks_without_experts_cost_what_a_dense_block_costs(
    tmp_path: Path,
) -> None:
    for layout in ("", "ep2", "tp2 seq"):
        dense, sparse = (
            _blocks(tmp_path, layout, gated=True)[0],
            _blocks(tmp_path, layout, **EXPERTS)[0],
        )
        blocks = _blocks(tmp_path, layout, **EXPERTS, dense_layers=3)
        assert [block(2) for block in blocks] == [*[dense(2)] * 3, sparse(2)]
        assert [len(block.parts) for block in blocks] == [
            1,
            1,
            1,
            3 if layout == "ep2" else 1,
        ]


def test_a_frozen_block_costs_no_gradient_of_its_weights(
    tmp_path: Path,
) -> None:
    blocks = _blocks(tmp_path, "", freeze=("layers.1-2",))
    trained, frozen = blocks[0](2), blocks[1](2)
    assert [block(2) for block in blocks] == [trained, frozen, frozen, trained]
    assert frozen.forward == trained.forward
    products = [
        sum(p.flops for p in cost.backward.products)
        for cost in (trained, frozen)
    ]
    assert products[1] == products[0] / 2
    assert frozen.frozen == frozen.weights == trained.weights


def test_experts_in_blocks_with_windows_cost_the_same_and_their_attention_does_not(
    tmp_path: Path,
) -> None:
    narrow, wide = _blocks(
        tmp_path, "ep2", **EXPERTS, layers=2, windows=(4, 0)
    )
    of_narrow, of_wide = (
        [part(2) for part in block.parts] for block in (narrow, wide)
    )
    assert of_narrow[1:] == of_wide[1:]
    assert of_narrow[0].forward.flops < of_wide[0].forward.flops
