"""A run in small agrees with one process, by the ranks and steps that train it; mistakes are named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib import import_module as module
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx import comm
from phalanx.cli import main, train_verify
from phalanx.cost import StepFlops, step_flops
from phalanx.layout import Layout, Shape, legal
from phalanx.layout.proportions import (
    STEPS,
    small_layout,
    small_run,
    small_shape,
)
from phalanx.layout.run import Run
from phalanx.parallel import local
from phalanx.training import loop, rank, step
from phalanx.training.log import RunLog
from phalanx.training.program import maker_of, shape_of
from phalanx.training.rank import batches_of
from phalanx.training.resume import RunState
from phalanx.verification import SHAPES, Verdict
from phalanx.verification.journal import counted_flops
from phalanx.verification.reference import reference
from phalanx.verification.run_trial import (
    _setting,
    plain_rate,
    resumed_layout,
    run_trial,
    small_own,
    verify_run,
)
from phalanx.verification.verify import truth_of, with_overflow
from sampled import one_in
from seeded import FAULTS, swapped

MODEL = "model={layers=4,hidden=64,heads=4,kv_heads=2,ffn=96,vocab=256,sequence=64,windows=[16,0]}"
WORDS = (
    MODEL,
    "batch=16",
    "steps=100",
    "optimizer.warmup_steps=20",
    "optimizer.betas=[0.7,0.8]",
)


def verdicts(out: Path, *words: str) -> Iterator[Verdict]:
    run = Run.parse("", "run", (*WORDS, *words))
    layout = run.layout_of(run.shape)
    assert layout is not None
    return verify_run(run_trial(run, run.shape, layout, str(out)))


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            ("layout=dp2 tp2 seq zero1 accum:2", "optimizer.schedule=wsd", "packing=bfd"),
            marks=pytest.mark.slow,
        ),
        ("layout=pp2 1f1b:4 bf16", "optimizer.name=muon", "packing=none", "optimizer.schedule=linear"),
        pytest.param(
            ("layout=dp2 zero3", "optimizer.name=sgd", "optimizer.momentum=0.9", "freeze=embed layers.0"),
            marks=pytest.mark.slow,
        ),
        ("layout=dp2 pp2 1f1b:4 fp16", "optimizer.name=muon", "packing=bfd"),
        ("layout=cp2", "lora.r=8", "document_masks=false", "z_loss=1e-3", "dropout=0.2"),
    ],
    ids=["wsd and packed", "muon in bf16", "sgd and frozen", "overflows", "adapters and dropout"],
)  # fmt: skip
def test_a_run_agrees_in_float64_and_in_its_own_precision(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    found = [*verdicts(tmp_path, *words)]
    assert [v.passed for v in found] == [True, True], found
    assert found[0].max_rel_error < 1e-11


def without_warmup() -> AbstractContextManager[None]:
    return swapped(
        step, "learning_rate", lambda choice, number, steps: choice.lr
    )


def with_default_betas() -> AbstractContextManager[None]:
    plain: Callable[[Run], Any] = rank.optimizer_of
    return swapped(
        rank,
        "optimizer_of",
        lambda run: replace(plain(run), beta1=0.9, beta2=0.95),
    )


def without_clip() -> AbstractContextManager[None]:
    plain = rank.parallelize

    def parallelize(*args: Any, **more: Any) -> Any:
        return plain(*args, **{**more, "clip": 0.0})

    return swapped(rank, "parallelize", parallelize)


def with_another_seed() -> AbstractContextManager[None]:
    plain = local._draw

    def draw(model: Any, units: Any, seed: int, *more: Any) -> None:
        plain(model, units, 1, *more)

    return swapped(local, "_draw", draw)


def with_the_data_from_the_beginning() -> AbstractContextManager[None]:
    """A resume that reads again what has been read."""
    plain = RunState.restore

    def restore(self: RunState, loaded: Any) -> None:
        plain(self, loaded)
        self.rank.batches = self.rank.batches.resumed(loaded.progress.step, 0)

    return swapped(RunState, "restore", restore)


def after_loading(
    change: Callable[[Any], None],
) -> AbstractContextManager[None]:
    """A change of what a checkpoint has brought to a rank."""
    plain = loop.load_or_draw

    def load(state: Any, *more: Any) -> int:
        start = plain(state, *more)
        if start:
            change(state.rank.part)
        return start

    return swapped(loop, "load_or_draw", load)


def without_moments() -> AbstractContextManager[None]:
    def forget(part: Any) -> None:
        for update in part.updates.values():
            for kept in update.state.values():
                for tensor in kept.values():
                    tensor.zero_()

    return after_loading(forget)


def with_a_weight_that_is_off_by_a_bit() -> AbstractContextManager[None]:
    def move(part: Any) -> None:
        part.local.every_unit[0].home[0] *= 1 + 1e-15

    return after_loading(move)


def of_the_journal(name: str, change: float) -> AbstractContextManager[None]:
    """A number of the journal that is off by a factor."""
    plain = RunLog.step

    def write(self: RunLog, step: int, seconds: Any, numbers: Any) -> None:
        plain(self, step, seconds, {**numbers, name: numbers[name] * change})

    return swapped(RunLog, "step", write)


def with_a_loss_beside_it() -> AbstractContextManager[None]:
    return of_the_journal("loss", 1 + 1e-12)


def with_an_end_that_is_no_stop() -> AbstractContextManager[None]:
    loop = module("phalanx.training.loop")
    right = loop._from_start_to_end

    def to_end(*args: Any, **terms: Any) -> Any:
        return replace(right(*args, **terms), stopped=False)

    return swapped(loop, "_from_start_to_end", to_end)


def with_the_rate_of_another_step() -> AbstractContextManager[None]:
    return of_the_journal("lr", 1.001)


def with_attention_counted_in_full() -> AbstractContextManager[None]:
    def flops(*sizes: Any) -> StepFlops:
        counted = step_flops(*sizes)
        return counted._replace(model=counted.full)

    return swapped(rank, "step_flops", flops)


def with_a_row_less() -> AbstractContextManager[None]:
    plain = RunLog.start

    def start(self: RunLog, *more: Any, tokens: int, **values: Any) -> None:
        plain(self, *more, tokens=tokens - 24, **values)

    return swapped(RunLog, "start", start)


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        (without_warmup, "step 0: the weight of"),
        (with_default_betas, "the weight of"),
        (without_clip, "the weight of"),
        (with_another_seed, "step 0: the start of"),
        (with_the_data_from_the_beginning, "step 3: the output of embed"),
        (without_moments, "step 3: the weight of"),
        (with_a_weight_that_is_off_by_a_bit, "is not the one that was saved"),
        (with_a_loss_beside_it, "step 0: the journal's loss"),
        (with_the_rate_of_another_step, "step 0: the journal's lr"),
        (with_attention_counted_in_full, "step 0: the journal's FLOPs of mfu"),
        (with_a_row_less, "step 0: the journal's tokens"),
        (
            with_an_end_that_is_no_stop,
            "rank 0 ends after 3 steps and reports stopped = False; expected True",
        ),
    ],
)
def test_a_mistake_in_what_trains_the_run_is_named(
    broken: Callable[[], AbstractContextManager[None]],
    named: str,
    tmp_path: Path,
) -> None:
    with broken():
        first = next(verdicts(tmp_path, "layout=dp2 zero1"))
    assert not first.passed
    assert named in first.first_difference


SKIPPED_STEPS = [
    ("Adam counts a skipped step", "adamw", "the update of"),
    ("muon: weights decay in a skipped step", "muon", "step 1: the update of"),
    pytest.param(
        "the loss scale is not halved",
        "adamw",
        "step 2: the loss scale",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("fault", "optimizer", "named"), SKIPPED_STEPS)
def test_a_mistake_in_a_step_that_overflows_is_named(
    fault: str, optimizer: str, named: str, tmp_path: Path
) -> None:
    seeded = next(each for each in FAULTS if each.name == fault)
    with seeded.patch():
        words = "layout=dp2 zero1 fp16", f"optimizer.name={optimizer}"
        whole, half = verdicts(tmp_path, *words)
    assert whole.passed
    assert not half.passed
    assert named in half.first_difference


def test_a_run_in_float16_has_steps_that_overflow_and_one_after_them(
    tmp_path: Path,
) -> None:
    run = Run.parse("", "run", (*WORDS, "layout=dp2 zero1 fp16"))
    layout = Layout.parse("dp2 zero1 fp16")
    trial = run_trial(run, run.shape, layout, str(tmp_path))
    setting = _setting(trial.run, "fp16")
    make = maker_of(trial.run)
    setting = with_overflow(make, setting)
    norms = [step.norm for step in truth_of(make, setting).trace.steps]
    skipped = [not isfinite(norm) for norm in norms]
    assert skipped.index(True) < STEPS - 1
    assert skipped.count(False) >= 2


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_the_same_step_overflows_however_a_batch_is_cut(
    parts: int, tmp_path: Path
) -> None:
    """Each microbatch's weight gradients are rounded to float16 before their sum."""
    words = *WORDS, "layout=tp2 fp16", "packing=bfd", "batch=4"
    run = Run.parse("", "run", words)
    layout = Layout.parse("tp2 fp16")
    trial = run_trial(run, run.shape, layout, str(tmp_path))
    make = maker_of(trial.run)
    setting = with_overflow(make, _setting(trial.run, "fp16"))
    first, patience = setting.scaling
    trace = reference(
        make(),
        setting.batches,
        steps=STEPS,
        optimizer=setting.optimizer,
        rate=setting.rate,
        clip=setting.clip,
        precision=setting.precision,
        seed=setting.seed,
        scaler=torch.amp.GradScaler("cpu", first, growth_interval=patience),
        raised=setting.raised,
        cut=lambda rows: torch.arange(rows).chunk(parts),
    )
    norms = [step.norm for step in trace.steps]
    assert [isfinite(norm) for norm in norms] == [
        True,
        False,
        True,
        True,
        True,
    ]


def test_a_run_in_float16_without_a_safe_loss_scale_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is never claimed that a step has overflowed."""
    words = "verify", MODEL, "batch=16", "layout=dp2 fp16"
    assert main([*words]) == 0
    found = capsys.readouterr().out
    assert "; a step of float16 that overflows and is skipped." in found
    assert "Not covered" not in found
    # nothing raises the scale
    with swapped(module("phalanx.verification.verify"), "_RAISED", {}):
        assert main([*words]) == 0
    found = capsys.readouterr().out
    assert "Not covered: a step of float16 that overflows" in found
    assert "; a step of float16 that overflows and is skipped." not in found


def test_clipping_is_at_work_in_some_steps_and_an_epoch_ends_within_them(
    tmp_path: Path,
) -> None:
    run = Run.parse("", "run", (*WORDS, "layout=dp2 zero1"))
    trial = run_trial(run, run.shape, Layout.parse("dp2 zero1"), str(tmp_path))
    for packing in ("", "bfd", "none"):
        batches = batches_of(
            replace(trial.run, packing=packing), trial.run.shape
        )
        assert 0 < batches.sequences < STEPS * batches.size


@pytest.mark.parametrize(
    ("layout", "other"),
    [
        ("tp2 seq bf16", "dp2 zero1 bf16"),
        ("dp2 zero3", ""),
        ("dp2 tp2 seq fp8", "tp2 seq fp8"),
        ("pp2 cp2 fp8", "dp2 cp2 zero1 fp8"),
    ],
)
def test_a_run_goes_on_in_another_layout(layout: str, other: str) -> None:
    """Of products in 8 bits one that cuts the same sums."""
    assert resumed_layout(Layout.parse(layout)) == Layout.parse(other)


def test_flops_by_hand() -> None:
    """One block of width 16: two heads of 8, an MLP of 24 with a gate, 10 words; two sequences of 6."""
    sizes = {"layers": 1, "hidden": 16, "heads": 2, "ffn": 24, "vocab": 10}
    found = counted_flops(Shape.of(sizes | {"sequence": 6}), 2, 6)
    weights = 4 * 16 * 16 + 3 * 16 * 24 + 16 * 10
    assert found is not None
    products = 3 * 2 * 12 * weights
    # a score and a value for each pair of tokens, of 16 features
    of_pairs = 3 * 2 * 2 * 2 * 16
    assert found.full == products + of_pairs * 36
    assert found.causal == products + of_pairs * 21


@pytest.mark.parametrize(
    "name", [n for n, s in SHAPES.items() if s.kind != "mlp"]
)
@pytest.mark.parametrize(
    "change",
    [{}, {"lora_r": 3}, {"freeze": ("layers.0",)}],
    ids=["", "lora", "frozen"],
)
def test_flops_of_a_journal_are_those_that_torch_counts(
    name: str, change: dict[str, Any]
) -> None:
    shape = replace(SHAPES[name], **change)
    counted = counted_flops(shape, 3, shape.sequence)
    if shape.delta_heads:  # the plain form computes token by token
        assert counted is None
        return
    if counted is None:
        assert shape.tied
        assert shape.lora_r
        return
    said = step_flops(shape, 3, shape.sequence)
    assert counted.full == pytest.approx(said.full, rel=1e-12)
    assert counted.causal == pytest.approx(said.model, rel=1e-12)


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
        (
            ("schedule=wsd", "decay_steps=2", "min_lr=0.0"),
            [1.0, 1.0, 0.5, 0.0],
        ),
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
    assert small.heads // small.kv_heads == min(
        4, shape.heads // shape.kv_heads
    )
    assert (small.experts > 0) == (shape.experts > 0)
    assert (small.kv_latent > 0) == (shape.kv_latent > 0)
    whole = {
        (shape.window(n) > 0, shape.routes(n))
        for n in range(1, shape.layers + 1)
    }
    few = {
        (small.window(n) > 0, small.routes(n))
        for n in range(1, small.layers + 1)
    }
    assert few == whole


@pytest.mark.parametrize(
    ("large", "small"),
    [
        (
            "dp64 pp8 tp8 seq zero1 1f1b:8 bf16",
            "dp2 pp2 tp2 seq zero1 1f1b:4 bf16",
        ),
        ("dp8x4 zero3", "dp2x2 zero3"),
        ("cp8:4x2 zero2 accum:8", "cp4:2x2 zero2 accum:2"),
        (
            "pp4 ep8 dp8 zb-h1:16 recompute:all",
            "pp2 ep2 dp2 zb-h1:4 recompute:all",
        ),
    ],
)
def test_a_small_layout_keeps_each_axis_and_choice(
    large: str, small: str
) -> None:
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
    assert (
        small.optimizer.warmup_steps,
        small.optimizer.decay_steps,
        small.steps,
    ) == (
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
    ):
        assert main(words) == 2
        assert said in capsys.readouterr().err


def test_a_run_that_agrees_is_trained_after_the_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(train_verify, "progress", lines.append)
    out = tmp_path / "run"
    words = [
        MODEL,
        "batch=4",
        "steps=1",
        "layout=dp2",
        "verify=true",
        f"out={out}",
    ]
    assert main(["train", *words]) == 0
    said = "\n".join(lines)
    assert "2 of 2 trials of the run agree with one process." in said
    assert "a stop after step 3 and a resume as one rank" in said
    assert [path.name for path in (out / "checkpoints").glob("step-*")] == [
        "step-00000001"
    ]


def test_a_run_that_differs_is_refused_before_its_first_step(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The comparison is made in this process, so that the fault is there too."""
    out = tmp_path / "run"

    def here(fn: Callable[..., Any], ranks: int, run: Any, **how: Any) -> Any:
        return [fn(None, run)]

    monkeypatch.setattr(comm, "launch", here)
    words = [MODEL, "batch=4", "layout=dp2 zero1", "verify=true", f"out={out}"]
    with without_clip():
        assert main(["train", *words]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert "verify = true: dp2 zero1 fp64 differs from one process" in last
    assert "the weight of" in last
    assert last.endswith("Nothing was trained.")
    assert not (out / "metrics.jsonl").exists()


@pytest.mark.parametrize("precision", one_in(2, ["fp16", "bf16"]))
def test_a_class_of_ones_own_is_stopped_and_resumed_too(
    precision: str, tmp_path: Path
) -> None:
    """Its loss has 16 bits too, so each microbatch's is rounded, and may not be scaled as it is."""
    stranger = Path(__file__).parents[2] / "examples" / "stranger.py"
    layout = f"layout=tp2 seq {precision}"
    words = (f"model={stranger}:Stranger", "batch=8", layout, "steps=9")
    run = Run.parse("", "run", words)
    shape = shape_of(run)
    chosen = run.layout_of(shape)
    assert chosen is not None
    trial = run_trial(run, shape, chosen, str(tmp_path / "right"))
    assert "in its own sizes" in " ".join(trial.covered)
    found = [*verify_run(trial)]
    assert [verdict.passed for verdict in found] == [True, True], found
    trial = run_trial(run, shape, chosen, str(tmp_path / "wrong"))
    with without_moments():
        (wrong,) = islice(verify_run(trial), 1)
    assert "step 3: the weight of" in wrong.first_difference


LARGE = {
    "model_type": "granite", "hidden_size": 4096, "intermediate_size": 12800,
    "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 49159, "max_position_embeddings": 131072, "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22, "attention_multiplier": 0.0078125, "logits_scaling": 16.0,
    "tie_word_embeddings": True, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def test_a_model_in_transformers_code_is_compared_in_a_small_form(
    tmp_path: Path,
) -> None:
    """Eight billion weights, of which only the configuration is there."""
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    words = (f"model=hf:{tmp_path}", "batch=8", "steps=9")
    run = Run.parse("", "run", (*words, "layout=tp2 seq zero1 bf16"))
    shape = shape_of(run)
    chosen = run.layout_of(shape)
    assert chosen is not None
    trial = run_trial(run, shape, chosen, str(tmp_path / "out"))
    few = shape_of(trial.run)
    assert (few.layers, few.hidden, few.vocab) == (3, 128, 257)
    assert "3 of 40 blocks, every kind of them" in trial.covered
    found = [*verify_run(trial)]
    assert [verdict.passed for verdict in found] == [True, True], found


def test_a_small_form_that_transformers_refuses_is_not_used(
    tmp_path: Path,
) -> None:
    """An activation that transformers does not have."""
    table = LARGE | {"hidden_act": "square root"}
    (tmp_path / "config.json").write_text(json.dumps(table))
    run = Run.parse("", "run", (f"model=hf:{tmp_path}",))
    assert small_own(run, str(tmp_path)) == ""
