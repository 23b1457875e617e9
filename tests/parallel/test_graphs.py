"""Pieces whose forward and backward are graphs do what one process does, in fixed memory."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from phalanx.comm import World
from phalanx.comm.launch import launch
from phalanx.cost.sizes import sizes_of
from phalanx.layout import Layout, LayoutError, legal
from phalanx.layout.run import Run
from phalanx.layout.run_checks import mistakes_of
from phalanx.parallel import Precision, build_model, graphs
from phalanx.parallel.compile import BACKEND
from phalanx.parallel.local import LocalModel, build_local
from phalanx.parallel.pool import storage_of
from phalanx.program.memory import peaks
from phalanx.training.executor import Executor
from phalanx.training.optimizer import AdamW
from phalanx.training.program import program_of
from phalanx.verification import SHAPES, batch_of, verify
from recorded_graphs import Recorder

WIDE = Precision(torch.float64, torch.float64, torch.float64)
BLOCKS = SHAPES["gqa"].layers


@pytest.fixture(autouse=True)
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    """Ranks that record graphs on the CPU, each with a recorder of its own."""
    made: list[Recorder] = []

    def recorder(device: torch.device) -> Recorder:
        made.append(Recorder(device))
        return made[-1]

    assert graphs.capture_of(torch.device("cpu")) is None
    monkeypatch.setenv(BACKEND, "aot_eager")
    monkeypatch.setattr(graphs, "capture_of", recorder)
    return made


@pytest.mark.parametrize(
    "text",
    [
        "accum:2",
        "dp2",
        "dp2 zero1 accum:2",
        "pp2 1f1b:4",
        pytest.param("dp2 zero2 reduce:step", marks=pytest.mark.slow),
        pytest.param(
            "pp2 gpipe:3 recompute:selective", marks=pytest.mark.slow
        ),
        pytest.param("dp2 pp2 zero1 interleaved2:4", marks=pytest.mark.slow),
        pytest.param(
            "dp2 accum:3 recompute:selective", marks=pytest.mark.slow
        ),
    ],
)
def test_layouts_with_graphs_give_what_one_process_gives(
    text: str, recorders: list[Recorder]
) -> None:
    layout = Layout.parse(f"{text} compile:graphs fp64")
    (verdict,) = verify(SHAPES["gqa"], [layout], steps=4, dropout=0.2)
    assert verdict.passed, verdict
    assert len(recorders) == layout.ranks
    for recorder in recorders:
        # Forwards and backwards, and most of them more than once.
        replays = [each.replays for each in recorder.recordings]
        assert replays
        assert max(replays) > 1


def test_a_stage_has_as_many_slots_as_microbatches_in_flight(
    recorders: list[Recorder],
) -> None:
    launch(steps, 2, "pp2 1f1b:4", [2] * 4, backend="threads")
    counts = sorted(len(each.recordings) for each in recorders)
    # Each stage has half of the blocks. The first has two microbatches in flight.
    assert counts == [2 * BLOCKS // 2, 2 * 2 * BLOCKS // 2]


def test_only_two_shapes_of_microbatches_have_graphs(
    recorders: list[Recorder],
) -> None:
    launch(steps, 1, "accum:3", [1, 2, 3], backend="threads")
    (recorder,) = recorders
    assert len(recorder.recordings) == 2 * 2 * BLOCKS


def steps(world: World, text: str, rows: list[int]) -> LocalModel:
    """A rank's model after five steps on microbatches of these sizes."""
    layout = Layout.parse(f"{text} compile:graphs fp64")
    shape = SHAPES["gqa"]
    model = build_model(shape)
    program = program_of(model, layout)
    local = build_local(world, layout, model, program, precision=WIDE)
    executor = Executor(local, program, world.rank, AdamW())
    whole = batch_of(shape, 0)
    own = [{n: x[:count] for n, x in whole.items()} for count in rows]
    for _ in range(5):
        executor.step(own, 1e-3)
    return local


def test_what_a_piece_returned_outlives_the_next_use_of_its_slot() -> None:
    """A message may still be under way then."""
    (local,) = launch(steps, 1, "", [2], backend="threads")
    width = SHAPES["gqa"].hidden
    inputs = [torch.randn(2, 8, width, dtype=torch.float64) for _ in range(2)]
    # The first backwards of a shape run without graphs.
    for _ in range(graphs.WARM_UP):
        piece_on(local, inputs[0])
    first = piece_on(local, inputs[0])
    kept = [x.clone() for x in first]
    second = piece_on(local, inputs[1])
    # One slot of the steps before, and one of these shapes.
    assert [len(each) for each in slots_of(local.pieces[1].graphs)] == [1, 1]
    for x, before, other in zip(first, kept, second, strict=True):
        assert torch.equal(x, before)
        assert not torch.equal(x, other)


def piece_on(local: LocalModel, x: Tensor) -> list[Tensor]:
    """The output of the first block on x, and the gradient of x for ones behind it."""
    positions = torch.arange(x.shape[1]).expand(2, -1)
    batch = local.complete({"positions": positions})
    piece = local.pieces[1]
    out = piece.forward(0, {"x": x}, batch, keep=True)
    into = piece.backward(0, {"x": torch.ones_like(x)})
    return [out["x"], into["x"]]


def test_check_counts_what_the_slots_of_a_step_hold(
    recorders: list[Recorder],
) -> None:
    text, rows = "accum:2", [2, 2]
    (local,) = launch(steps, 1, text, rows, backend="threads")
    held = 0
    for piece in local.pieces.values():
        for slot in (s for each in slots_of(piece.graphs) for s in each):
            copies = [slot.mine, slot.named, slot.gradients]
            inputs = {
                storage_of(x): x.untyped_storage().nbytes()
                for some in copies
                for x in some.values()
            }
            held += sum(inputs.values())
    (recorder,) = recorders
    for each in recorder.recordings:
        spare = {storage_of(x) for x in each.spare}
        held += sum(
            x.untyped_storage().nbytes()
            for key, x in each.own.items()
            if key not in spare
        )
    layout = Layout.parse(f"{text} compile:graphs fp64")
    make = partial(build_model, SHAPES["gqa"])
    program = program_of(make(), layout)
    batch = {n: x[:4] for n, x in batch_of(SHAPES["gqa"], 0).items()}
    sizes = sizes_of(make, layout, program, batch, WIDE)
    assert not any(sizes.kept[1:-1])
    # torch's compiler may keep less than the modules, which are what is counted.
    counted = sum(sizes.slot)
    assert 0.6 * counted < held <= counted
    (peak,) = peaks(program, sizes)
    assert peak.kinds["activations"] >= counted
    gradients = sum(unit.bytes.gradient_home for unit in local.units.values())
    assert peak.kinds["gradients"] == gradients > 0


def slots_of(found: graphs.PieceGraphs | None) -> list[list[graphs.Slot]]:
    return [] if found is None else [*found.free.values()]


REFUSED = {
    "tp2": "tp2: a graph holds computation alone",
    "cp2": "cp2: a graph holds computation alone",
    "dp2 zero3": "zero3: weights are gathered into buffers",
    "dp2 zero2 accum:2": "reduce:micro: a gradient is still being summed",
    "offload:activations": "offload:activations: a graph's tensors stay",
    "recompute:all": "recompute:all: a graph holds its activations",
    "pp2 zb-h1:2": "with a backward in two parts",
    "fp8": "fp8: its padded copies",
}


def test_layouts_whose_graphs_would_be_wrong_are_refused_with_the_reason() -> (
    None
):
    for text, why in REFUSED.items():
        with pytest.raises(LayoutError) as refused:
            Layout.parse(f"{text} compile:graphs")
        assert why in str(refused.value)
        assert "se " in str(refused.value)  # use another, or leave it out


def test_the_word_prints_and_parses_back() -> None:
    text = "dp2 zero1 accum:2 compile:graphs"
    assert str(Layout.parse(text)) == text


def test_models_and_batches_with_shapes_that_vary_are_refused() -> None:
    layout = Layout.parse("compile:graphs")
    (broken,) = legal(layout, SHAPES["experts"])
    assert "the number of tokens of each depends" in broken.what
    run = Run(model="tiny", layout="compile:graphs")
    (mistake,) = [m for m in mistakes_of(run) if m.place == "layout"]
    assert "document_masks = false" in mistake.way_out
    masks = Run(model="tiny", layout="compile:graphs", document_masks=False)
    assert not [m for m in mistakes_of(masks) if m.place == "layout"]
    verdicts = verify(SHAPES["gqa"], [layout], steps=1, packed=True)
    assert "keeps documents apart" in next(verdicts).first_difference


def test_a_schedule_of_ones_own_that_splits_the_backward_is_refused(
    tmp_path: Path,
) -> None:
    path = tmp_path / "mine.py"
    lines = (
        "from phalanx.program import Op",
        "def split(ranks, microbatches, chunks=1):",
        "    rows = range(ranks)",
        "    return [[Op(kind, row, 0) for kind in 'FIW'] for row in rows]",
    )
    path.write_text("\n".join(lines), encoding="utf-8")
    layout = Layout.parse(f"pp2 {path}:split:1 compile:graphs fp64")
    verdict = next(verify(SHAPES["gqa"], [layout], steps=1))
    assert "with a backward in two parts" in verdict.first_difference
