"""DPO in every layout: losses and weights are those of the formula in plain torch, over transformers' model,
and of TRL."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import phalanx
from hub_models import adapter_name, in_float64, saved, theirs, widened
from phalanx.cli import main
from phalanx.layout.run import Run
from phalanx.parallel import build_model
from phalanx.parallel import start as drawn
from phalanx.parallel.model import is_lora
from phalanx.train.data.batches import Batches
from phalanx.train.data.token_files import open_corpus
from phalanx.train.rank import batches_of

BETA, RATE, STEPS = 0.3, 0.5, 3
Pair = dict[str, str]
COMPILED = pytest.param("dp2 tp2 compile", marks=pytest.mark.slow)
LAYOUTS = (
    "", "dp2 zero3", "dp2 zero1 accum:2", "tp2", "tp2 seq", "pp2 1f1b:2", "cp2", "cp2:ring",
    "dp2 cp2:ulysses zero2", "dp2 tp2 zero3", "pp2 tp2 zb-h1:3", "pp2 1f1b:3 recompute:all",
    "dp2x2 zero3", COMPILED,
)  # fmt: skip


def pairs() -> list[Pair]:
    return [
        {
            "prompt": f"{n}+{n * n % 7}=",
            "chosen": str(n + n * n % 7) + "." * (1 + n % 3),
            "rejected": str(3 * n) + "!" * (n % 4 + 1),
        }
        for n in range(30)
    ]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of Hugging Face for bytes, and pairs as its tokens."""
    folder = tmp_path_factory.mktemp("dpo")
    saved(theirs("llama", vocab_size=256), folder / "hub")
    rows = folder / "pairs.jsonl"
    rows.write_text("\n".join(map(json.dumps, pairs())))
    words = ["--out", f"{folder}/tokens", "--held-out", "0"]
    assert main(["data", "prepare", str(rows), *words]) == 0
    return folder


def trained(start: Path, out: Path, layout: str, *more: str) -> Path:
    sizes = [
        "batch=6",
        "sequence=24",
        f"steps={STEPS}",
        "validation.batches=0",
    ]
    rule = ["optimizer.name=sgd", f"optimizer.lr={RATE}", "optimizer.clip=0"]
    rule += ["optimizer.weight_decay=0", "optimizer.schedule=constant"]
    loss = ["loss=dpo", f"dpo.beta={BETA}"]
    named = [f"model=hf:{start}/hub", f"data={start}/tokens", f"out={out}"]
    words = [
        *sizes,
        *rule,
        *loss,
        *named,
        f"layout={layout}",
        "precision=fp64",
    ]
    assert main(["train", *words, "--backend", "threads", *more]) == 0
    return out


def steps_of(out: Path) -> list[dict[str, Any]]:
    lines = (out / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [record for record in records if record["event"] == "step"]


# ---- the formula, in plain torch


def answer_log_probability(model: Any, prompt: str, answer: str) -> Tensor:
    tokens = torch.tensor([list((prompt + answer).encode())])
    chances = model(tokens[:, :-1]).logits[0].log_softmax(-1)
    of_tokens = chances.gather(-1, tokens[0, 1:, None])[:, 0]
    return of_tokens[len(prompt.encode()) - 1 :].sum()


def margin(model: Any, pair: Pair) -> Tensor:
    chosen = answer_log_probability(model, pair["prompt"], pair["chosen"])
    return chosen - answer_log_probability(
        model, pair["prompt"], pair["rejected"]
    )


def taken(start: Path) -> Iterator[list[Pair]]:
    """The pairs of each step, by the numbers that a run's batches give them."""
    words = ("batch=6", "sequence=24", "loss=dpo", f"data={start}/tokens")
    run = Run.load("", (f"model=hf:{start}/hub", *words))
    batches = batches_of(run, run.shape)
    for step in range(STEPS):
        numbers = batches.batch(step)["pair"].sum(1) - 1
        yield [pairs()[int(number)] for number in numbers]


def trained_by_formula(
    start: Path, model: Any
) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of the formula and SGD."""
    with torch.no_grad():
        reference = {str(pair): float(margin(model, pair)) for pair in pairs()}
    losses, norms = [], []
    weights = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.SGD(weights, RATE)
    for batch in taken(start):
        optimizer.zero_grad()
        gains = [margin(model, pair) - reference[str(pair)] for pair in batch]
        loss = -F.logsigmoid(BETA * torch.stack(gains)).mean()
        loss.backward()
        gradients = [x.grad.flatten() for x in weights]
        norms.append(float(torch.cat(gradients).norm()))
        losses.append(float(loss.detach()))
        optimizer.step()
    return losses, norms


@pytest.fixture(scope="module")
def plain(start: Path) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, gradient norms and the last weights of the formula and SGD."""
    narrow = theirs("llama", vocab_size=256)
    with widened():
        model = in_float64(narrow)
        losses, norms = trained_by_formula(start, model)
    return losses, norms, model.state_dict()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_has_the_losses_and_the_weights_of_the_formula(
    layout: str, start: Path, plain: Any, tmp_path: Path
) -> None:
    losses, norms, weights = plain
    out = trained(start, tmp_path / "run", layout)
    steps = steps_of(out)
    assert [step["loss"] for step in steps] == pytest.approx(losses, rel=1e-9)
    assert [step["norm"] for step in steps] == pytest.approx(norms, rel=1e-9)
    assert losses[0] != losses[-1]
    found = phalanx.load(out)
    for ours, name in (
        ("layers.1.attn.wq.weight", "model.layers.1.self_attn.q_proj.weight"),
        ("layers.0.mlp.down.weight", "model.layers.0.mlp.down_proj.weight"),
        ("head.norm.weight", "model.norm.weight"),
        ("embed.tokens.weight", "model.embed_tokens.weight"),
    ):
        assert torch.allclose(
            found[ours].double(), weights[name], rtol=0, atol=1e-9
        )


# tests/train/trl_numbers.py, with trl 1.16.0 and transformers 5.23.0; TRL takes the loss in float32.
TRL_LOSSES = (0.6931471824645996, 0.5208919048309326, 0.003859942778944969)
TRL_NORMS = (7.379085516529327, 5.427136772178893, 0.021280863538592282)


def test_losses_and_gradients_are_those_of_trl(
    start: Path, tmp_path: Path
) -> None:
    steps = steps_of(trained(start, tmp_path / "run", "dp2 tp2 zero2"))
    assert [step["loss"] for step in steps] == pytest.approx(
        TRL_LOSSES, rel=1e-6
    )
    assert [step["norm"] for step in steps] == pytest.approx(
        TRL_NORMS, rel=1e-6
    )


def test_the_metrics_say_how_many_pairs_gained_and_by_how_much(
    start: Path, plain: Any, tmp_path: Path
) -> None:
    alone = steps_of(trained(start, tmp_path / "one", ""))
    first, second, third = alone
    assert first["margin"] == first["accuracy"] == 0
    assert 0 < second["accuracy"] <= third["accuracy"] == 1
    split = steps_of(trained(start, tmp_path / "many", "cp2 tp2"))
    for one, other in zip(alone, split, strict=True):
        assert other["accuracy"] == one["accuracy"]
        assert other["margin"] == pytest.approx(one["margin"], rel=1e-9)


@pytest.mark.parametrize(
    "layout", ["dp2 zero3", "tp2 seq", "cp2", "pp2 1f1b:2"]
)
def test_adapters_have_the_losses_of_one_process_in_every_layout(
    layout: str, start: Path, tmp_path: Path
) -> None:
    adapters = ["lora.r=4", "lora.alpha=8"]
    alone = steps_of(trained(start, tmp_path / "one", "", *adapters))
    split = steps_of(trained(start, tmp_path / "many", layout, *adapters))
    assert alone[0]["loss"] == pytest.approx(0.6931471805599453, rel=1e-12)
    assert alone[2]["loss"] < alone[1]["loss"] < alone[0]["loss"]
    for one, other in zip(alone, split, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-9)
        assert other["norm"] == pytest.approx(one["norm"], rel=1e-9)


@pytest.mark.parametrize("layout", ["", "dp2 tp2 zero2"])
def test_adapters_are_trained_as_peft_and_the_formula_train_them(
    layout: str, start: Path, tmp_path: Path
) -> None:
    """peft's model, with the adapters that the run starts with."""
    import peft

    adapters = ["lora.r=4", "lora.alpha=8"]
    steps = steps_of(trained(start, tmp_path / "run", layout, *adapters))
    run = Run.load("", (f"model=hf:{start}/hub", *adapters))
    ours = build_model(run.shape)
    projections = ["q", "k", "v", "o", "gate", "up", "down"]
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=[f"{x}_proj" for x in projections]
    )
    adapters_at_start = {
        name: drawn(ours, name, run.seed)
        for name in ours.weights
        if is_lora(name)
    }
    narrow = theirs("llama", vocab_size=256)
    with widened():
        wide = in_float64(narrow)
        model = peft.get_peft_model(wide, config)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.requires_grad:
                    weight.copy_(adapters_at_start[adapter_name(name)])
        losses, norms = trained_by_formula(start, model)
    assert [step["loss"] for step in steps] == pytest.approx(losses, rel=1e-9)
    assert [step["norm"] for step in steps] == pytest.approx(norms, rel=1e-9)
    assert losses[2] < losses[0]


def test_a_run_continues_with_the_reference_of_its_first_start(
    start: Path, plain: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = trained(start, tmp_path / "run", "dp2 zero3", "steps=2")
    trained(start, out, "tp2")
    assert [step["loss"] for step in steps_of(out)] == pytest.approx(
        plain[0], rel=1e-9
    )
    (out / "reference.safetensors").unlink()
    with pytest.raises(AssertionError):
        trained(start, out, "tp2", "steps=4")
    assert "lacks the reference model's margins" in capsys.readouterr().err


def prepared(rows: list[Any], folder: Path, *words: str) -> tuple[int, Path]:
    folder.mkdir()
    source, out = folder / "rows.jsonl", folder / "tokens"
    source.write_text("\n".join(map(json.dumps, rows)))
    return main(
        ["data", "prepare", str(source), "--out", str(out), *words]
    ), out


def test_pairs_and_other_losses_are_refused_together(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = "model={layers=1,hidden=16,heads=2,ffn=32,vocab=256}"
    words = [
        tiny,
        "steps=1",
        "batch=2",
        "sequence=24",
        "layout=",
        f"out={tmp_path}/a",
    ]
    assert main(["train", *words, f"data={start}/tokens"]) == 2
    assert "Write loss = 'dpo'" in capsys.readouterr().err
    assert main(["train", *words, "loss=dpo"]) == 2
    assert "needs rows with chosen and rejected" in capsys.readouterr().err
    assert (
        main(["train", *words, "loss=dpo", "z_loss=0.1", "verify=true"]) == 2
    )
    assert "run has 2 mistakes" in capsys.readouterr().err
    packed = [f"data={start}/tokens", "loss=dpo", "packing=bfd"]
    assert main(["train", *words, *packed]) == 2
    assert "each is a row of its own" in capsys.readouterr().err


def test_pairs_that_are_no_pairs_are_left_out_and_long_ones_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"prompt": "a", "chosen": "bb", "rejected": "c"},
        {"prompt": "a", "chosen": "b", "rejected": ""},
        {"prompt": "a", "chosen": "b", "rejected": 3},
        {"prompt": "a", "chosen": "b" * 40, "rejected": "c"},
    ]
    code, out = prepared(rows, tmp_path / "made", "--held-out", "0")
    assert code == 0
    said = capsys.readouterr()
    assert "in 4 documents" in said.out
    assert (
        "line 3: its prompt, chosen and rejected are not all text" in said.err
    )
    batches = Batches((open_corpus(out),), 16, 1)
    assert batches.pair_rows == (1, 0)
    (notice,) = batches.notices
    assert "1 of 2 pairs are longer than sequence = 16" in notice
    batch = batches.batch(0)
    assert bytes(batch["tokens"][0, :5].tolist()) == b"abbac"
    assert batch["signs"][0, :6].tolist() == [1, 1, 1, -1, -1, 0]
    assert batch["targets"][0, :5].tolist() == [98, 98, -100, 99, -100]


# ---- epochs, frozen parameters, and nothing held out

TINY = "model={layers=1,hidden=16,heads=2,ffn=32,vocab=256}"


def test_epochs_are_as_many_steps_as_their_rows_take(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = [
        TINY,
        "batch=4",
        "sequence=24",
        f"data={start}/tokens",
        "loss=dpo",
    ]
    named = [f"out={tmp_path}/run", "layout=dp2", "--backend", "threads"]
    assert main(["train", *sizes, "epochs=1.5", *named]) == 0
    # 30 pairs one and a half times, four in a step
    assert [step["step"] for step in steps_of(tmp_path / "run")] == list(
        range(1, 13)
    )
    said = capsys.readouterr()
    assert "epochs = 1.5: 12 steps" in said.out + said.err
    assert "none of 60 documents" in said.out
    late = ["optimizer.warmup_steps=13", "epochs=1.5", f"out={tmp_path}/other"]
    assert main(["train", *sizes, *late, "layout="]) == 2
    assert "longer than steps = 12" in capsys.readouterr().err


def test_of_adapters_it_is_said_how_many_parameters_are_trained(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(start, tmp_path / "run", "", "lora.r=2", "lora.targets=['q_proj']")
    # two blocks, 32 features in and 4 heads of 16 out: 2 x 2 x (32 + 64)
    assert "28,704 parameters, 384 (1.34%) trained" in capsys.readouterr().out
