"""Whole runs: the same in every layout, bit for bit after a stop, and safe when numbers go wrong."""

from __future__ import annotations

import importlib.machinery
import json
import math
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_worlds import losses, records, small, trained, weights
from torch import Tensor

from phalanx.comm import RankFailed
from phalanx.layout import Layout, plain_pieces
from phalanx.layout.journal import read_journal
from phalanx.layout.optimizers import OptimizerChoice
from phalanx.parallel import local
from phalanx.program import Sizes, StepOptions, Timeline, build
from phalanx.program.build import forward_only
from phalanx.program.memory import peaks
from phalanx.training import loop, peak, stop
from phalanx.training.checkpoint_format import CheckpointError
from phalanx.training.log import Journal
from phalanx.training.optimizer import learning_rate
from phalanx.training.rank import Rank

LAYOUTS = [
    "dp3",
    "dp2 zero3 accum:2",
    "tp2 seq",
    "pp2 1f1b:3 zero1",
    "cp2",
    "pp3 zb-h1:3",
    "dp2 cp2 zero2",
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    trained(small(out, "validation.every=2"), "fp64")
    return out


def test_a_run_that_goes_on_draws_no_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 70B weights that takes minutes."""
    out, drawn = tmp_path / "run", []
    right = local.start
    monkeypatch.setattr(
        local, "start", lambda *args: drawn.append(args[1]) or right(*args)
    )
    trained(small(out), "fp64")
    assert drawn
    drawn.clear()
    trained(small(out, "steps=7"), "fp64")
    assert not drawn


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_sees_the_same_losses_and_validates_alike(
    layout: str, alone: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    outcomes = trained(small(out, "validation.every=2"), f"{layout} fp64")
    assert len(set(outcomes)) == 1  # every rank knows the same
    for event, count in (("step", 5), ("validation", 3)):
        found, truth = records(out, event), records(alone, event)
        assert len(found) == len(truth) == count
        for one, other in zip(found, truth, strict=True):
            assert one["step"] == other["step"]
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-12)
    assert records(out, "step")[0]["norm"] == pytest.approx(
        records(alone, "step")[0]["norm"]
    )


def test_the_parts_of_goodput_are_the_time_that_passed(alone: Path) -> None:
    (end,) = records(alone, "end")
    assert sum(end["parts"].values()) == pytest.approx(
        end["clock"] - end["began"], abs=0.05
    )
    for part in ("steps", "starting", "saving", "validating"):
        assert end["parts"][part] > 0
    assert end["parts"]["lost steps"] == end["parts"]["down"] == 0
    assert end["goodput"] == end["parts"]["steps"] / sum(end["parts"].values())


def test_bits_per_byte_are_the_validation_loss_in_bits(alone: Path) -> None:
    # A token of the built-in data is a byte.
    for one in records(alone, "validation"):
        assert one["bits_per_byte"] == pytest.approx(one["loss"] / math.log(2))


def test_a_validation_of_dropped_weights_holds_no_more_of_them_at_once_than_a_step() -> (
    None
):
    layout = Layout.parse("dp2 zero3 accum:2")
    program = build(layout, plain_pieces([range(5)]), StepOptions(agree=False))
    bare = forward_only(program, layout)
    assert {op.kind for row in bare.rows for op in row} == set("NFGD")
    (most,), (held,) = (peaks(p, Sizes.counts(5)) for p in (program, bare))
    assert held.kinds["gathered"] == most.kinds["gathered"] == 2


# ---- going on


class _Crash(Exception):
    pass


def _crashing_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def rate(choice: OptimizerChoice, at: int, steps: int) -> float:
        if at == step:
            raise _Crash
        return learning_rate(choice, at, steps)

    monkeypatch.setattr("phalanx.training.step.learning_rate", rate)


@pytest.mark.parametrize(
    "layout, crash, asynchronous",
    [
        ("", 3, False), ("dp2", 4, True), ("dp2 zero3", 3, False), ("tp2", 3, True),
        ("pp2 1f1b:2", 4, False), ("cp2", 3, False), ("dp2 zero1", 4, True),
    ],
)  # fmt: skip
def test_a_run_that_was_interrupted_ends_bit_for_bit_as_one_that_was_not(
    layout: str,
    crash: int,
    asynchronous: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    more = (
        f"checkpoint.async={str(asynchronous).lower()}",
        "checkpoint.every=1",
    )
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    trained(small(whole, *more), layout)
    with monkeypatch.context() as patched:
        _crashing_at(crash, patched)
        with pytest.raises((RankFailed, _Crash)):
            trained(small(broken, *more), layout)
    trained(small(broken, *more), layout)
    starts = [r["step"] for r in records(broken, "start")]
    # Lost work is at most one interval, two when saving goes on beside the training.
    assert starts[0] == 0
    assert crash - (2 if asynchronous else 1) <= starts[1] <= crash
    assert losses(broken) == losses(whole)
    assert weights(broken, 5) == weights(whole, 5)


def test_a_run_goes_on_in_another_layout(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    run = small(out, "validation.every=2", "checkpoint.every=1")

    def rate(choice: OptimizerChoice, at: int, steps: int) -> float:
        # Somebody asks to stop within each start's first step.
        (out / "STOP").touch()
        return learning_rate(choice, at, steps)

    with monkeypatch.context() as patched:
        patched.setattr("phalanx.training.step.learning_rate", rate)
        for layout in ("dp2 zero3 fp64", "pp3 1f1b:3 fp64", "tp2 fp64"):
            outcomes = trained(run, layout)
            assert all(o.stopped for o in outcomes)
            assert not (out / "STOP").exists()
    trained(run, "cp2 fp64")
    assert [r["step"] for r in records(out, "start")] == [0, 1, 2, 3]
    for one, other in zip(
        records(out, "step"), records(alone, "step"), strict=True
    ):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-12)


def test_a_run_goes_on_behind_what_it_has_seen_with_another_batch(
    tmp_path: Path,
) -> None:
    out = tmp_path / "run"
    trained(small(out, "steps=2"), "")
    trained(small(out, "steps=3", "batch=3"), "")
    manifest = json.loads(
        (out / "checkpoints/step-00000003/manifest.json").read_text()
    )
    assert manifest["body"]["cursor"] == 2 * 6 + 3


def test_another_seed_is_refused_as_the_data_would_be_others(
    tmp_path: Path,
) -> None:
    out = tmp_path / "run"
    trained(small(out, "steps=1"), "")
    with pytest.raises(
        CheckpointError, match="was begun with seed = 0, but the run has 7"
    ):
        trained(small(out, "seed=7"), "")


# ---- numbers that are not finite


class _Spoiled(Rank):
    """Puts NaN into what one rank's piece makes at some steps: its output, or its gradient."""

    steps: tuple[int, ...] = ()
    piece, rank, backward = 2, 1, False

    def batch(self, step: int) -> list[dict[str, torch.Tensor]]:
        self.now = step
        return super().batch(step)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.spoiled: set[int] = set()
        piece = self.part.local.pieces.get(self.piece)
        if piece is None or self.world.rank != self.rank:
            return
        name = "backward" if self.backward else "forward"
        plain = getattr(piece, name)

        def spoiled(*given: Any, **named: Any) -> Any:
            y = plain(*given, **named)
            # Once: computing the step again would not show it.
            if self.now in self.steps and self.now not in self.spoiled:
                self.spoiled.add(self.now)
                if self.backward:
                    unit = self.part.local.units[self.piece]
                    assert unit.full is not None
                    unit.full[0] = math.nan
                else:
                    y = {name: x * math.nan for name, x in y.items()}
            return y

        setattr(piece, name, spoiled)


@pytest.mark.parametrize(
    "layout, piece", [("dp2", 2), ("dp2 zero3", 1), ("pp2 1f1b:2", 3)]
)
def test_a_step_that_is_not_finite_is_skipped_everywhere_and_its_place_named(
    layout: str, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Spoiled, "piece", piece)
    monkeypatch.setattr(loop, "Rank", _Spoiled)
    monkeypatch.setattr(_Spoiled, "steps", (2,))
    out = tmp_path / "run"
    outcomes = trained(
        small(out, "checkpoint.every=1", "checkpoint.keep=9"), layout
    )
    assert {o.step for o in outcomes} == {5}
    (skip,) = records(out, "skip")
    assert skip["step"] == 3
    assert skip["why"].endswith(
        f"first in the output of piece layers.{piece - 1} on rank 1"
    )
    # Untouched, the optimizer's averages too.
    assert weights(out, 2) == weights(out, 3)
    assert weights(out, 3) != weights(out, 4)
    assert records(out, "step")[2]["loss"] == "nan"
    assert math.isfinite(records(out, "step")[4]["loss"])


def test_a_loss_that_is_not_finite_spoils_the_step_though_every_gradient_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "Rank", _Spoiled)
    monkeypatch.setattr(_Spoiled, "steps", (2,))
    monkeypatch.setattr(_Spoiled, "piece", 4)
    out = tmp_path / "run"
    trained(small(out, "checkpoint.every=1", "checkpoint.keep=9"), "dp2")
    (skip,) = records(out, "skip")
    assert skip["why"].endswith("first in the output of piece head on rank 1")
    assert weights(out, 2) == weights(out, 3)


def test_a_gradient_that_is_not_finite_is_named_by_the_piece_where_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "Rank", _Spoiled)
    monkeypatch.setattr(_Spoiled, "steps", (1,))
    monkeypatch.setattr(_Spoiled, "backward", True)
    monkeypatch.setattr(_Spoiled, "rank", 0)
    out = tmp_path / "run"
    trained(
        small(out, "checkpoint.every=1", "checkpoint.keep=9"), "pp2 1f1b:2"
    )
    (skip,) = records(out, "skip")
    assert skip["why"].endswith(
        "first in the gradient of piece layers.1 on rank 0"
    )
    assert weights(out, 1) == weights(out, 2)


def test_a_bad_gradient_that_ranks_have_summed_is_blamed_on_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "Rank", _Spoiled)
    monkeypatch.setattr(_Spoiled, "steps", (1,))
    monkeypatch.setattr(_Spoiled, "backward", True)
    out = tmp_path / "run"
    trained(small(out), "dp2")
    (skip,) = records(out, "skip")
    place = "the gradient of piece layers.1, a sum over 2 ranks of which any may have made it,"
    assert f"first in {place} on rank" in skip["why"]


def test_a_bad_result_that_ranks_of_tp_share_names_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "Rank", _Spoiled)
    monkeypatch.setattr(_Spoiled, "steps", (1,))
    monkeypatch.setattr(_Spoiled, "piece", 1)
    out = tmp_path / "run"
    trained(small(out), "tp2")
    (skip,) = records(out, "skip")
    # Spoiled on rank 1 after the sum over tp: rank 0 meets it in the next piece.
    assert skip["why"].endswith(
        "first in the output of piece layers.0 on rank 1"
    )


def test_three_in_a_row_end_the_run_and_two_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "Rank", _Spoiled)
    monkeypatch.setattr(_Spoiled, "steps", (0, 1, 3, 4))
    out = tmp_path / "two"
    assert trained(small(out), "dp2")[0].step == 5
    monkeypatch.setattr(_Spoiled, "steps", (1, 2, 3))
    out = tmp_path / "three"
    with pytest.raises(RankFailed) as error:
        trained(small(out, "checkpoint.every=1"), "dp2")
    assert all(
        "TrainError: steps 2 to 4:" in r.error for r in error.value.reports
    )
    assert len(records(out, "skip")) == 3


# ---- what is told


def test_a_step_is_recorded_with_its_timeline_and_memory(
    tmp_path: Path,
) -> None:
    out = tmp_path / "run"
    trained(small(out), "dp2 pp2 zero3 1f1b:2 fp64")
    timeline = Timeline.from_json((out / "timeline.json").read_text())
    assert timeline.ranks == (0, 1, 2, 3)
    assert {s.op.kind for s in timeline.spans} >= set("FBGDSUAN")
    (held,) = records(out, "memory")
    # Every number is on one rank, with 8 bytes of its own and 16 of AdamW's; shards are padded a little.
    numbers = small(out).shape.total
    for kind, bytes_ in (("weights", 8), ("optimizer", 16)):
        for how in ("promised", "measured"):
            ranks = [rank[how][kind] for rank in held["ranks"]]
            assert sum(ranks) == pytest.approx(bytes_ * numbers, rel=0.02)
            assert min(ranks) > 0


def test_weights_in_the_compute_dtype_are_promised_beside_the_masters(
    tmp_path: Path,
) -> None:
    """On an H100 a bf16 run held 2 bytes a weight more than it had promised."""
    out = tmp_path / "run"
    trained(small(out), "bf16")
    (held,) = records(out, "memory")
    (rank,) = held["ranks"]
    assert rank["measured"] == rank["promised"]
    # 4 bytes of the gradient and 2 of the weight in bfloat16.
    count = small(out).shape.total
    assert rank["promised"]["gathered and gradients"] == 6 * count


@pytest.mark.parametrize("zero", ["zero1", "zero2", "zero3"])
def test_gathered_weights_and_gradients_are_as_many_bytes_as_promised(
    tmp_path: Path, zero: str
) -> None:
    """The home of a shard inside of the whole weights was measured twice."""
    out = tmp_path / "run"
    trained(small(out), f"dp2 {zero} accum:2")
    (held,) = records(out, "memory")
    for rank in held["ranks"]:
        assert rank["measured"] == rank["promised"]
    # Gathered weights of the embedding wait while those of blocks are in use.
    idle = [rank["idle"]["buffers"] for rank in held["ranks"]]
    assert zero != "zero3" or min(idle) > 0


def test_mfu_is_what_the_model_needs_over_time_and_peak(
    tmp_path: Path,
) -> None:
    out = tmp_path / "run"
    trained(small(out), "dp2 recompute:all")
    (start,) = records(out, "start")
    assert start["peak_flops"] == 2 * 1e11
    assert start["peak_from"].endswith("machine.toml for each rank")
    for step in records(out, "step"):
        needed = step["mfu"] * step["seconds"] * start["peak_flops"]
        assert needed == pytest.approx(start["flops"]["model"])
        assert step["mfu"] < step["hfu"]
        assert step["tokens_per_second"] * step["seconds"] == pytest.approx(
            6 * 18
        )


def test_a_peak_that_no_file_tells_is_measured_and_that_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock of each rank, on which a product of two squares of 512 takes a millisecond."""
    run, clock, multiply = tmp_path / "run", threading.local(), torch.mm

    def mm(*given: Tensor, **named: Tensor) -> Tensor:
        clock.now = getattr(clock, "now", 0.0) + 1e-3
        return multiply(*given, **named)

    clocks = types.SimpleNamespace(
        perf_counter=lambda: getattr(clock, "now", 0.0)
    )
    monkeypatch.setattr(peak, "time", clocks)
    monkeypatch.setattr(torch, "mm", mm)
    trained(small(run, "machine=", "steps=1"), "dp2")
    (start,) = records(run, "start")
    assert start["peak_from"] == "measured"
    assert start["peak_flops"] == pytest.approx(2 * 2 * 512**3 / 1e-3)


class _Tool(types.ModuleType):
    """Speaks as wandb and trackio do, and remembers."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.heard: list[tuple[str, Any]] = []

    def init(self, **said: Any) -> None:
        self.heard.append(("init", said["config"]["steps"]))

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.heard.append(("log", (step, "loss" in numbers)))

    def finish(self) -> None:
        self.heard.append(("finish", None))


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_another_tool_hears_every_line_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = _Tool(name)
    monkeypatch.setitem(sys.modules, name, tool)
    run = small(
        tmp_path / "run", f"metrics.{name}=true", "metrics.every=2", "steps=4"
    )
    trained(run, "dp2")
    assert tool.heard == [
        ("init", 4), ("log", (2, True)), ("log", (4, True)), ("log", (4, False)), ("finish", None)
    ]  # fmt: skip


def test_a_trace_names_the_operations_of_the_steps_it_was_asked_for(
    tmp_path: Path,
) -> None:
    out = tmp_path / "run"
    trained(small(out, "profile.steps=1", "profile.start=1"), "")
    said = json.loads((out / "profile" / "rank-0.json").read_text())[
        "traceEvents"
    ]
    names = [
        event["name"]
        for event in said
        if event.get("cat") == "user_annotation"
    ]
    # one step of five
    assert names.count("1F0") == names.count("3B0") == names.count("A") == 1


def test_float16_finds_its_scale_without_ending_the_run(
    tmp_path: Path,
) -> None:
    out = tmp_path / "run"
    trained(small(out, "machine="), "fp16")
    manifest = json.loads(
        (out / "checkpoints/step-00000005/manifest.json").read_text()
    )
    skipped = records(out, "skip")
    assert manifest["body"]["state"]["loss_scale"] == [
        2.0**16 / 2 ** len(skipped),
        5 - len(skipped),
    ]
    assert all(
        skip["why"] == "a float16 gradient overflowed" for skip in skipped
    )


def test_a_journal_that_was_cut_is_read_and_gone_on_with(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "start", "time": 1, "step": 0}\n{"event": "st')
    journal = Journal(path)
    journal.write(event="end", loss=math.inf)
    journal.close()
    assert [r["event"] for r in read_journal(path)] == ["start", "end"]
    assert read_journal(path)[1]["loss"] == "inf"


def test_the_layouts_of_this_file_are_of_all_axes() -> None:
    used = {
        axis.name for text in LAYOUTS for axis in Layout.parse(text).mesh.axes
    }
    assert used == {"dp", "tp", "pp", "cp"}


def test_a_run_that_shall_not_save_at_its_end_saves_nothing(
    tmp_path: Path,
) -> None:
    out = tmp_path / "run"
    (outcome,) = trained(small(out, "checkpoint.at_end=false"), "fp64")
    assert (outcome.step, outcome.unsaved) == (5, "")
    assert not list(out.glob("checkpoints/step-*"))
    assert [r["event"] for r in records(out, "end")] == ["end"]


def test_a_run_that_shall_not_save_at_its_end_still_saves_when_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    monkeypatch.setattr(stop.StopRequests, "__call__", lambda self: True)
    monkeypatch.setattr(stop.StopRequests, "by", "SIGTERM")
    (outcome,) = trained(small(out, "checkpoint.at_end=false"), "fp64")
    assert (outcome.step, outcome.stopped) == (1, True)
    assert [path.name for path in out.glob("checkpoints/step-*")] == [
        "step-00000001"
    ]
