"""A run in small agrees with one process, by the ranks and steps that train it; mistakes are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli import main
from phalanx.layout import Layout, Shape, legal
from phalanx.layout.proportions import STEPS, small_layout, small_run, small_shape
from phalanx.layout.run import Run
from phalanx.train import rank, step
from phalanx.verify import Verdict
from phalanx.verify.run_trial import _batches, plain_rate, run_trial, verify_run
from seeded import swapped

MODEL = "model={layers=4,hidden=64,heads=4,kv_heads=2,ffn=96,vocab=256,sequence=64,windows=[16,0]}"
WORDS = (
    MODEL,
    "batch=16",
    "steps=100",
    "optimizer.warmup_steps=20",
    "optimizer.betas=[0.7,0.8]",
)


def verdicts(out: Path, *words: str) -> list[Verdict]:
    run = Run.parse("", "run", (*WORDS, *words))
    layout = run.layout_of(run.shape)
    assert layout is not None
    return [*verify_run(run_trial(run, run.shape, layout, str(out)), (run, run.shape))]


@pytest.mark.parametrize(
    "words",
    [
        ("layout=dp2 tp2 seq zero1 accum:2", "optimizer.schedule=wsd", "packing=bfd"),
        ("layout=pp2 1f1b:4 bf16", "optimizer.name=muon", "packing=none"),
        ("layout=dp2 zero3", "optimizer.name=sgd", "optimizer.momentum=0.9", "freeze=embed layers.0"),
        ("layout=cp2", "lora.r=8", "document_masks=false", "optimizer.schedule=linear", "z_loss=1e-3"),
    ],
    ids=["wsd and packed", "muon in bf16", "sgd and frozen", "adapters"],
)  # fmt: skip
def test_a_run_agrees_in_float64_and_in_its_own_precision(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    found = verdicts(tmp_path, *words)
    assert [v.passed for v in found] == [True, True], found
    assert found[0].max_rel_error < 1e-11


def without_warmup() -> AbstractContextManager[None]:
    return swapped(step, "learning_rate", lambda choice, number, steps: choice.lr)


def with_default_betas() -> AbstractContextManager[None]:
    plain: Callable[[Run], Any] = rank.optimizer_of
    return swapped(
        rank, "optimizer_of", lambda run: replace(plain(run), beta1=0.9, beta2=0.95)
    )


def without_clip() -> AbstractContextManager[None]:
    plain = rank.parallelize

    def parallelize(*args: Any, **more: Any) -> Any:
        return plain(*args, **{**more, "clip": 0.0})

    return swapped(rank, "parallelize", parallelize)


def with_another_seed() -> AbstractContextManager[None]:
    plain = rank.parallelize

    def parallelize(*args: Any, **more: Any) -> Any:
        return plain(*args, **{**more, "seed": 1})

    return swapped(rank, "parallelize", parallelize)


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        (without_warmup, "step 0: the weight of"),
        (with_default_betas, "the weight of"),
        (without_clip, "the weight of"),
        (with_another_seed, "step 0: the start of"),
    ],
)
def test_a_mistake_in_what_trains_the_run_is_named(
    broken: Callable[[], AbstractContextManager[None]], named: str, tmp_path: Path
) -> None:
    with broken():
        first = verdicts(tmp_path, "layout=dp2 zero1")[0]
    assert not first.passed
    assert named in first.first_difference


def test_clipping_is_at_work_in_some_steps_and_an_epoch_ends_within_them(
    tmp_path: Path,
) -> None:
    run = Run.parse("", "run", (*WORDS, "layout=dp2 zero1"))
    trial = run_trial(run, run.shape, Layout.parse("dp2 zero1"), str(tmp_path))
    for packing in ("", "bfd", "none"):
        batches = _batches(replace(trial.run, packing=packing), (run, run.shape))
        assert 0 < batches.sequences < STEPS * batches.size


@pytest.mark.parametrize(
    ("words", "rates"),
    [
        (("schedule=constant",), [1.0, 1.0, 1.0, 1.0]),
        (("schedule=constant", "warmup_steps=2"), [0.5, 1.0, 1.0, 1.0]),
        (("schedule=linear", "min_lr=0.2"), [0.8, 0.6, 0.4, 0.2]),
        (("schedule=linear",), [0.775, 0.55, 0.325, 0.1]),
        (
            ("schedule=cosine", "min_lr=0.0"),
            [0.8535533905932737, 0.5, 0.14644660940672627, 0.0],
        ),
        (("schedule=wsd", "decay_steps=2", "min_lr=0.0"), [1.0, 1.0, 0.5, 0.0]),
    ],
)
def test_the_rate_of_the_one_process_is_the_one_by_hand(
    words: tuple[str, ...], rates: list[float]
) -> None:
    keys = (f"optimizer.{word}" for word in ("lr=1.0", *words))
    choice = Run.parse("", "run", ("steps=4", *keys)).optimizer
    assert [plain_rate(choice, 4, n) for n in range(4)] == pytest.approx(
        rates, abs=1e-15
    )


@pytest.mark.parametrize(
    "name", [n for n in Shape.names() if Shape.load(n).kind == "decoder"]
)
def test_a_small_shape_has_every_kind_of_block_and_the_ratios_of_heads(
    name: str,
) -> None:
    shape = Shape.load(name)
    small = small_shape(shape)
    assert small.total < 1e6
    assert small.vocab % 2 == 1
    assert small.heads // small.kv_heads == min(4, shape.heads // shape.kv_heads)
    assert (small.experts > 0) == (shape.experts > 0)
    assert (small.kv_latent > 0) == (shape.kv_latent > 0)
    whole = {(shape.window(n) > 0, shape.sparse(n)) for n in range(1, shape.layers + 1)}
    few = {(small.window(n) > 0, small.sparse(n)) for n in range(1, small.layers + 1)}
    assert few == whole


@pytest.mark.parametrize(
    ("large", "small"),
    [
        ("dp64 pp8 tp8 seq zero1 1f1b:8 bf16", "dp2 pp2 tp2 seq zero1 1f1b:4 bf16"),
        ("dp8x4 zero3", "dp2x2 zero3"),
        ("cp8:4x2 zero2 accum:8", "cp4:2x2 zero2 accum:2"),
        ("pp4 ep8 dp8 zb-h1:16 recompute:all", "pp2 ep2 dp2 zb-h1:4 recompute:all"),
    ],
)
def test_a_small_layout_keeps_each_axis_and_choice(large: str, small: str) -> None:
    assert small_layout(Layout.parse(large)) == Layout.parse(small)


def test_the_small_form_of_a_run_keeps_its_keys(tmp_path: Path) -> None:
    words = (
        "optimizer.eps=1e-6",
        "optimizer.schedule=wsd",
        "optimizer.decay_steps=30",
        "seed=7",
    )
    run = Run.parse("", "run", (*WORDS, "layout=dp4 tp2", *words))
    small = small_run(run, run.shape, Layout.parse("dp4 tp2"), str(tmp_path))
    assert (small.optimizer.eps, small.optimizer.betas, small.seed) == (
        1e-6,
        (0.7, 0.8),
        7,
    )
    assert (small.optimizer.warmup_steps, small.optimizer.decay_steps, small.steps) == (
        2,
        1,
        STEPS,
    )
    layout = small.layout_of(small.shape)
    assert layout is not None
    assert not legal(layout, small.shape)


def test_the_command_says_what_it_has_compared_and_what_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text('layout = "dp2 zero1"\nbatch = 16\n')
    assert main(["verify", str(file), MODEL, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["passed"], figures["failed"]) == (2, 0)
    assert any("adamw with every key" in text for text in figures["covered"])
    assert any("its own text" in text for text in figures["left_out"])
    for words, said in (
        (["verify", MODEL, "batch=16"], "layout of the run is auto"),
        (
            ["verify", MODEL, "layout=dp2", "--steps", "2"],
            "--steps is for layouts of a model",
        ),
        (
            ["verify", "model=examples/stranger.py:Stranger", "layout=dp2"],
            "has no smaller form",
        ),
    ):
        assert main(words) == 2
        assert said in capsys.readouterr().err
