"""What is saved is what was there, to the bit, and going on with it is to have never stopped. From
one layout to another: `test_any_layout.py`."""

from __future__ import annotations

import json
import math
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_worlds import (
    SHAPE,
    WIDE,
    Run,
    hash_tensors,
    resaved,
    run,
    trained,
)

from phalanx.parallel import build_model, start
from phalanx.training import checkpoint_load
from phalanx.training.checkpoint import steps
from phalanx.training.checkpoint_format import (
    CheckpointError,
    StoredShard,
    StoredTensor,
    read_manifest,
    verify_checkpoint,
)
from phalanx.training.checkpoint_load import TensorReader
from phalanx.training.muon import Muon
from phalanx.training.optimizer import AdamW, Sgd
from phalanx.verification import SHAPES

# Two key and value heads over four places: copies that are written once.
GQA = replace(SHAPES["gqa"], layers=4, batch=8, sequence=8, vocab=38, ffn=22)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run saved after two steps."""
    folder = tmp_path_factory.mktemp("saved")
    trained(folder, "dp1")
    return folder


@pytest.mark.parametrize(
    "layout, optimizer",
    [
        ("tp4 seq zero0", AdamW()), ("dp2 tp4 zero3", AdamW()), ("dp3 zero3", AdamW()),
        ("pp2 interleaved2:2", Sgd(momentum=0.9)), ("dp2 tp4 zero3", Muon()),
    ],
)  # fmt: skip
def test_copies_of_heads_padding_and_other_optimizers(
    tmp_path: Path, layout: str, optimizer: object
) -> None:
    trained(tmp_path / "a", layout, shape=GQA, optimizer=optimizer)
    path = tmp_path / "a" / "step-00000002"
    manifest = read_manifest(path)
    # No number is written twice, and all of them are.
    for tensor in manifest.tensors:
        numbers = sum(p.stop - p.start for p in tensor.shards)
        padding = {"embed.tokens.weight", "head.output.weight"} | {
            t.name for t in manifest.tensors if ".mlp." in t.name
        }
        whole = math.prod(tensor.shape)
        assert numbers == whole or (
            numbers > whole and tensor.name in padding
        ), tensor.title
    resaved(
        tmp_path / "a",
        "dp2 pp2 tp2",
        tmp_path / "b",
        shape=GQA,
        optimizer=optimizer,
    )
    resaved(
        tmp_path / "b", layout, tmp_path / "c", shape=GQA, optimizer=optimizer
    )
    assert hash_tensors(tmp_path / "c" / "step-00000002") == hash_tensors(path)


@pytest.mark.parametrize(
    "layout, asynchronous",
    [
        ("tp2 narrow", False), ("dp2", True), ("dp2 zero3", False), ("dp2 zero3", True),
        ("tp2", False), ("pp2 1f1b:3", True), ("cp2", False), ("dp2 tp2 zero2", True),
    ],
)  # fmt: skip
def test_to_go_on_in_the_same_layout_is_to_have_never_stopped(
    tmp_path: Path, layout: str, asynchronous: bool
) -> None:
    def through(each: Run) -> list[str]:
        losses = each.steps(2)
        saver = each.saver(tmp_path / "a", asynchronous=asynchronous)
        saver.save(each.progress)
        losses += each.steps(3)  # while it is being written
        saver.finish()
        each.saver(tmp_path / "end").save(each.progress)
        return losses

    def again(each: Run) -> list[str]:
        loaded = each.resume(tmp_path / "a")
        wanted = vars(replace(each.progress, step=2, cursor=2 * SHAPE.batch))
        assert {
            name: getattr(loaded.progress, name) for name in wanted
        } == wanted
        losses = each.steps(3)
        each.saver(tmp_path / "other").save(each.progress)
        return losses

    # Weights computed in less than they are kept in are copies, and must be made anew too.
    compute = torch.float32 if "narrow" in layout else WIDE
    layout = layout.removesuffix(" narrow")
    undisturbed = run(layout, through, compute=compute)[0]
    resumed = run(layout, again, seed=5, compute=compute)[0]
    assert resumed == undisturbed[2:]
    ends = [
        hash_tensors(tmp_path / name / "step-00000005")
        for name in ("end", "other")
    ]
    assert ends[0] == ends[1]


def test_an_asynchronous_save_is_decided_at_a_later_step_by_all_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from phalanx.training import checkpoint

    gate = threading.Event()
    plain = checkpoint.write_file

    def slow(path, tensors):  # type: ignore[no-untyped-def]
        if path.name == "rank-00001.safetensors":
            gate.wait(20)
        return plain(path, tensors)

    monkeypatch.setattr(checkpoint, "write_file", slow)

    def work(each: Run) -> list[int]:
        saver = each.saver(tmp_path, asynchronous=True)
        each.steps(1)
        assert saver.save(each.progress) == ()
        decided = []
        for step in range(2, 200):
            each.steps(1)
            if step == 4 and each.world.rank == 0:
                assert steps(tmp_path) == [], (
                    "not before the last rank has written"
                )
                gate.set()
            decided += [step for _ in saver.poll()]
            if decided:
                break
        return decided

    first, second = run("dp2 zero3", work)
    assert first == second
    assert len(first) == 1
    assert first[0] >= 4
    assert verify_checkpoint(tmp_path / "step-00000001") == []


def test_the_newest_stay_and_what_was_begun_and_left_goes(
    tmp_path: Path,
) -> None:
    (tmp_path / ".saving-00000009").mkdir()
    (tmp_path / ".saving-00000009" / "rank-00000.safetensors").write_bytes(
        b"half"
    )
    (tmp_path / ".removed-step-00000001").mkdir()

    def work(each: Run) -> None:
        saver = each.saver(tmp_path, keep=2)
        for _ in range(4):
            each.steps(1)
            saver.save(each.progress)

    run("dp2", work)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step-00000003",
        "step-00000004",
    ]
    before = hash_tensors(tmp_path / "step-00000004")
    # The same step once more, where it already is.
    resaved(tmp_path, "tp2", tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step-00000003",
        "step-00000004",
    ]
    assert hash_tensors(tmp_path / "step-00000004") == before


def test_a_course_that_was_left_is_not_gone_back_to(tmp_path: Path) -> None:
    trained(tmp_path, "dp1", 5)
    trained(tmp_path, "dp1", 3)
    assert [p.name for p in steps(tmp_path)] == ["step-00000003"]
    assert verify_checkpoint(tmp_path / "set-aside-step-00000005") == []


def test_another_model_or_optimizer_is_refused_and_nothing_is_touched(
    saved: Path,
) -> None:
    def work(each: Run) -> str:
        before = each.steps(1)
        weights = {n: u.home.clone() for n, u in each.local.units.items()}
        with pytest.raises(CheckpointError) as refused:
            each.resume(saved)
        assert all(
            bool((weights[n] == u.home).all())
            for n, u in each.local.units.items()
        )
        assert before
        return str(refused.value)

    for options, words in (
        (
            {"shape": replace(SHAPE, hidden=24)},
            "embed.tokens.weight is [37, 16]",
        ),
        ({"shape": replace(SHAPE, layers=3)}, "has no weight layers.2"),
        (
            {"optimizer": Sgd(momentum=0.9)},
            "state of AdamW, but the run's optimizer is SGD",
        ),
        (
            {"optimizer": Muon()},
            "state of AdamW, but the run's optimizer is Muon",
        ),
    ):
        said = run("dp2 zero3", work, **options)
        assert said[0] == said[1]
        assert words in said[0]


def test_a_folder_without_checkpoints_gives_none(tmp_path: Path) -> None:
    assert run("dp2", lambda each: each.resume(tmp_path / "nowhere")) == [
        None,
        None,
    ]


def test_the_safetensors_library_reads_our_files(saved: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    path = saved / "step-00000002"
    told = read_manifest(path)
    with safetensors.safe_open(path / "rank-00000.safetensors", "pt") as file:
        assert sorted(file.keys()) == sorted(t.title for t in told.tensors)
        assert file.get_tensor("weight/head.norm.weight").dtype == WIDE
    assert (
        json.loads((path / "manifest.json").read_text())["body"]["updates"]
        == 2
    )


def test_a_rank_whose_part_is_past_the_end_holds_nothing_of_it(
    tmp_path: Path,
) -> None:
    """Nine rows over four ranks are 3, 3, 3 and 0; the start of every weight is drawn whole."""
    shape = replace(SHAPE, vocab=9, tied=False)
    trained(tmp_path / "cut", "tp4", steps=0, shape=shape)
    path = tmp_path / "cut" / "step-00000000"
    manifest = read_manifest(path)
    assert verify_checkpoint(path) == []
    model = build_model(shape)
    with TensorReader(path, manifest) as reader:
        weights = {
            t.name: reader.whole(t)
            for t in manifest.tensors
            if t.kind == "weight"
        }
    assert weights.keys() == model.weights.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, start(model, name, 0, torch.float64)), name
    (rows,) = (
        t for t in manifest.tensors if t.title == "weight/embed.tokens.weight"
    )
    assert sorted(part[0].box[0] for part in rows.parts()) == [
        (0, 3),
        (3, 6),
        (6, 9),
    ]
    resaved(tmp_path / "cut", "dp2 zero3", tmp_path / "again", shape=shape)
    assert hash_tensors(tmp_path / "again" / "step-00000000") == hash_tensors(
        path
    )


def test_a_part_of_rows_is_read_a_few_rows_at_a_time(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where tp cuts columns, a rank that keeps an eighth of a weight does not hold all of it."""
    path = saved / "step-00000002"
    monkeypatch.setattr(checkpoint_load, "BLOCK", 3 * SHAPE.hidden * 8)
    seen: list[int] = []

    class Counted(TensorReader):
        def _rows(
            self,
            tensor: StoredTensor,
            part: list[StoredShard],
            first: int,
            last: int,
        ) -> torch.Tensor:
            seen.append(last - first)
            return super()._rows(tensor, part, first, last)

    with Counted(path, read_manifest(path)) as reader:
        tensor = reader.tensors["weight", "layers.0.mlp.up.weight"]
        whole = reader.whole(tensor)
        seen.clear()
        part = reader.box(tensor, ((1, tensor.shape[0]), (2, 5)))
    assert torch.equal(part, whole[1:, 2:5])
    assert max(seen) <= 3
    assert sum(seen) == tensor.shape[0] - 1
