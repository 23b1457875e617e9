"""A user's own model, and recomputation to fit, by way of a run file: trained, saved, gone on with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from loop_worlds import losses, records, trained, weights

from phalanx.cli import checkpoint as checkpoint_verb
from phalanx.cli import train as train_verb
from phalanx.comm import AloneWorld
from phalanx.layout import Layout, LayoutError, Run, RunError
from phalanx.program import ProgramError, Timeline
from phalanx.training import rank
from phalanx.training.precision import precision_of
from phalanx.training.program import fitting_program, maker_of
from phalanx.training.rank import (
    GIB,
    Rank,
    batches_of,
    device_memory,
    memory_limit,
)

STRANGER = f"{Path(__file__).parents[2] / 'examples' / 'stranger.py'}:Stranger"
SMALL = (
    "batch=6",
    "steps=4",
    "optimizer.lr=1e-2",
    "checkpoint.every=2",
    "validation.batches=1",
)


def own(out: Path, *more: str, model: str = STRANGER) -> Run:
    return Run.parse(
        "", "own", (f"model={model}", f"out={out}", *SMALL, *more)
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    trained(own(out), "fp64")
    return out


@pytest.mark.parametrize(
    "layout", ["dp2 zero3", "tp2 seq", "pp2 1f1b:3", "cp2"]
)
def test_a_user_s_own_model_learns_alike_in_every_layout(
    layout: str, alone: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    trained(own(out), f"{layout} fp64")
    for event in ("step", "validation"):
        for one, truth in zip(
            records(out, event), records(alone, event), strict=True
        ):
            assert one["loss"] == pytest.approx(truth["loss"], rel=1e-11)


def test_a_user_s_own_model_goes_on_bit_for_bit_and_in_another_layout(
    alone: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    trained(
        own(out, "steps=2", "optimizer.schedule=constant"), "dp2 zero3 fp64"
    )
    trained(own(out, "optimizer.schedule=constant"), "dp2 zero3 fp64")
    whole = tmp_path / "whole"
    trained(own(whole, "optimizer.schedule=constant"), "dp2 zero3 fp64")
    assert losses(out) == losses(whole)
    assert weights(out, 4) == weights(whole, 4)
    other = tmp_path / "other"
    trained(
        own(other, "steps=2", "optimizer.schedule=constant"),
        "pp2 tp2 1f1b:2 fp64",
    )
    trained(own(other, "optimizer.schedule=constant"), "cp2 fp64")
    for one, truth in zip(
        records(other, "step"), records(whole, "step"), strict=True
    ):
        assert one["loss"] == pytest.approx(truth["loss"], rel=1e-11)


def test_its_checkpoint_is_shown_and_verified_and_no_file_is_run_for_it(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object) -> None:
        raise AssertionError(
            "a checkpoint named a file to run, and it was run"
        )

    monkeypatch.setattr("importlib.util.spec_from_file_location", refuse)
    assert checkpoint_verb.run(["show", str(alone)]) == 0
    assert checkpoint_verb.run(["verify", str(alone)]) == 0


def test_a_model_of_one_s_own_is_not_exported_under_names_of_others(
    tmp_path: Path, alone: Path
) -> None:
    with pytest.raises(ValueError, match="is none of llama"):
        checkpoint_verb.run(
            ["export", str(alone), "--to", str(tmp_path / "a")]
        )
    # Even when its sizes are those of a llama: what its weights are is in its own code.
    text = Path(STRANGER.rpartition(":")[0]).read_text()
    text = text.replace(
        'positions="learned", gated=False', 'positions="rope", gated=True'
    )
    file = tmp_path / "alike.py"
    file.write_text(text)
    out = tmp_path / "run"
    trained(
        own(
            out, "steps=1", "batch=2", "sequence=12", model=f"{file}:Stranger"
        ),
        "",
    )
    with pytest.raises(
        ValueError, match=r"embed.words.weight is not a weight of the built-in"
    ):
        checkpoint_verb.run(["export", str(out), "--to", str(tmp_path / "b")])


def test_the_command_trains_it_and_tells_how_many_parameters_it_has(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    argv = [f"model={STRANGER}", f"out={out}", *SMALL, "--backend", "threads"]
    assert train_verb.run([*argv, "--layout", "dp2 zero2"]) == 0
    said = capfd.readouterr().out
    count = next(r["parameters"] for r in records(out, "start"))
    assert f"dp2 zero2: 2 ranks, {count:,} parameters" in said


@pytest.mark.parametrize(
    "text, more, said",
    [
        ("", ("layout=tp3",), r"tp=3 does not divide heads=4.*Nearest"),
        ("", ("sequence=99",), r"stranger has learned 12 positions"),
        ("VOCAB, HIDDEN", (), "a vocabulary of 53, and bytes are 256"),
        ("shape=shape", (), "describe.. returns no shape"),
        ("class Stranger(", (), "has no function or class 'Stranger'"),
    ],
)
def test_what_does_not_fit_it_is_refused_before_any_rank_starts(
    text: str, more: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    file = tmp_path / "model.py"
    source = Path(STRANGER.rpartition(":")[0]).read_text()
    broken = {
        "VOCAB, HIDDEN": re.sub(r"= 25\d, 32", "= 53, 32", source),
        "shape=shape": source.replace("shape=shape,\n", ""),
        "class Stranger(": source.replace("Stranger(", "Strange(").replace(
            ": Stranger", ": Strange"
        ),
    }.get(text, source)
    assert (broken == source) == (not text)
    file.write_text(broken)
    argv = [
        f"model={file}:Stranger",
        f"out={tmp_path / 'run'}",
        *SMALL,
        *more,
        "--ranks",
        "3",
    ]
    with pytest.raises((LayoutError, RunError), match=f"(?s){said}"):
        train_verb.run(
            argv if more[:1] == ("layout=tp3",) else [*argv[:-1], "2"]
        )
    assert not (tmp_path / "run").exists()


# ---- recomputation to fit


SIZES = (
    "model={layers=4,hidden=16,heads=2,ffn=24,vocab=256}",
    "batch=8",
    "sequence=32",
)


def _whole(layout: str) -> float:
    """The GiB that the fullest rank would hold without recomputing anything."""
    run, found = Run.parse("", "fit", SIZES), list[float]()
    layout_ = Layout.parse(layout)
    batch = batches_of(run, run.shape).batch(0)
    fitting_program(
        maker_of(run), layout_, batch, precision_of(layout_.precision),
        lambda whole: found.append(whole) or whole,
    )  # fmt: skip
    return found[0] / GIB


def test_recomputation_to_fit_recomputes_no_more_than_memory_asks_for(
    tmp_path: Path,
) -> None:
    whole = _whole("recompute:fit")

    def of(part: float) -> int:
        run = Run.parse(
            "", "fit", (f"out={tmp_path}", *SIZES, f"memory={part * whole}")
        )
        program = Rank(
            AloneWorld("cpu"), run, Layout.parse("recompute:fit")
        ).part.program
        return sum(op.kind == "R" for row in program.rows for op in row)

    counts = [of(part) for part in (1.01, 0.9, 0.75, 0.65)]
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert len(set(counts)) > 2
    with pytest.raises(
        ProgramError, match=r"with everything recomputed .* the limit is"
    ):
        of(0.05)


@pytest.mark.parametrize("layout", ["dp2 zero3", "pp2 1f1b:2"])
def test_a_run_that_recomputes_to_fit_learns_as_one_that_does_not(
    layout: str, tmp_path: Path
) -> None:
    memory = 0.8 * _whole(f"{layout} recompute:fit fp64")
    ends = []
    for name, more in (("none", ""), ("fit", " recompute:fit")):
        out = tmp_path / name
        run = Run.parse(
            "", name, (f"out={out}", *SIZES, "steps=3", f"memory={memory}")
        )
        trained(run, f"{layout}{more} fp64")
        ends.append((losses(out), weights(out, 3)))
        spans = Timeline.from_json((out / "timeline.json").read_text()).spans
        assert any(span.op.kind == "R" for span in spans) == bool(more)
    assert ends[0] == ends[1]


def test_ranks_on_a_cpu_share_the_memory_of_their_control_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, whole, run = AloneWorld("cpu"), 8 * GIB, Run.parse("")
    monkeypatch.setattr(rank, "limited_memory", lambda: whole)
    assert device_memory(run, world, {}) == pytest.approx(whole)
    four = device_memory(run, world, {"LOCAL_WORLD_SIZE": "4"})
    assert four == pytest.approx(whole / 4)
    assert device_memory(Run.parse("memory = 2.5"), world, {}) == 2.5 * GIB


def test_without_a_gpu_the_memory_to_fit_must_be_said() -> None:
    world = AloneWorld("cpu")
    assert memory_limit(Run.parse("memory = 2.5"), world) == 2.5 * GIB
    with pytest.raises(LayoutError, match=r"Write memory = 2\.5"):
        memory_limit(Run.parse(""), world)
