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
from phalanx.layout.adapters import adapts
from phalanx.layout.run import Run
from phalanx.parallel import build_model
from phalanx.parallel import start as drawn
from phalanx.training.data.batches import Batches
from phalanx.training.data.token_files import open_corpus
from phalanx.training.rank import batches_of
from sampled import one_in

BETA, RATE, STEPS = 0.3, 0.5, 3
Pair = dict[str, str]
COMPILED = pytest.param("dp2 tp2 compile", marks=pytest.mark.slow)
PLAIN = (
    "", "dp2 zero3", "dp2 zero1 accum:2", "tp2", "tp2 seq", "pp2 1f1b:2", "cp2", "cp2:ring",
    "dp2 cp2:ulysses zero2", "dp2 tp2 zero3", "pp2 tp2 zb-h1:3", "pp2 1f1b:3 recompute:all",
    "dp2x2 zero3",
)  # fmt: skip
LAYOUTS = (*one_in(2, PLAIN), COMPILED)


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
    prepare_start(folder)
    return folder


def prepare_start(folder: Path) -> None:
    """Write a model of Hugging Face for bytes, and pairs as its tokens."""
    saved(theirs("llama", vocab_size=256), folder / "hub")
    rows = folder / "pairs.jsonl"
    rows.write_text("\n".join(map(json.dumps, pairs())))
    words = ["--out", f"{folder}/tokens", "--held-out", "0"]
    assert main(["data", "prepare", str(rows), *words]) == 0


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


# ---- TRL's gradients, parameter by parameter

# Written by trl_numbers.py, with trl 1.16.0, peft 0.21.2, transformers 5.23.0 and torch 2.13.0.
# A line is the kind of run, a parameter's name, and each step's norm and projection; or the losses.
TRL = Path(__file__).with_name("trl_gradients.jsonl")
ADAPTERS = ("lora.r=4", "lora.alpha=8")


def norm_and_projection(gradient: Tensor) -> list[float]:
    """The gradient's norm, and its dot product with cos(0), cos(1), cos(2), ...

    The second changes with a sign and with the order of the elements.
    """
    flat = gradient.flatten().double()
    wave = torch.arange(len(flat), dtype=torch.float64).cos()
    return [float(flat.norm()), float(flat @ wave)]


def our_name(name: str) -> str:
    """Our name of a Llama's parameter, which transformers or peft has named."""
    if "lora_" in name:
        return adapter_name(name)
    for theirs_part, ours_part in (
        ("model.layers.", "layers."),
        ("model.embed_tokens.", "embed.tokens."),
        ("model.norm.", "head.norm."),
        ("input_layernorm.", "attn_norm."),
        ("post_attention_layernorm.", "mlp_norm."),
        ("self_attn.", "attn.w"),
        ("_proj.", "."),
    ):
        name = name.replace(theirs_part, ours_part)
    return name


def weights_at_start(start: Path) -> dict[str, Tensor]:
    """Weights that a run begins with, adapters included, by our names.

    Call it outside `widened`: in float64 the random numbers are others.
    """
    run = Run.load("", (f"model=hf:{start}/hub", *ADAPTERS))
    model = build_model(run.shape)
    adapters = filter(adapts, model.weights)
    weights = {name: drawn(model, name, run.seed) for name in adapters}
    for name, weight in theirs("llama", vocab_size=256).named_parameters():
        weights[our_name(name)] = weight.detach()
    return weights


def with_adapters(model: Any, at_start: dict[str, Tensor]) -> Any:
    """The model in peft, with the adapters of `weights_at_start`."""
    import peft

    letters = ["q", "k", "v", "o", "gate", "up", "down"]
    modules = [f"{x}_proj" for x in letters]
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=modules)
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if weight.requires_grad:
                weight.copy_(at_start[our_name(name)])
    return adapted


@pytest.mark.parametrize("layout", ["dp2 zero2", "tp2 seq", "pp2 1f1b:2"])
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_losses_and_each_parameters_gradients_are_those_of_trl(
    kind: str, layout: str, start: Path, tmp_path: Path
) -> None:
    """SGD's updates give the gradients: weights before minus after, over its rate."""
    rows = map(json.loads, TRL.read_text().splitlines())
    expected = {name: steps for of, name, steps in rows if of == kind}
    trl_losses = expected.pop("loss")
    adapters = ADAPTERS if kind == "lora" else ()
    kept = ["checkpoint.every=1", f"checkpoint.keep={STEPS}"]
    out = trained(start, tmp_path / "run", layout, *kept, *adapters)
    first = before = weights_at_start(start)
    for step in range(STEPS):
        folder = out / "checkpoints" / f"step-{step + 1:08d}"
        after = phalanx.load(folder)
        for name, sums in expected.items():
            ours = our_name(name)
            update = before[ours].double() - after[ours].double()
            found = norm_and_projection(update / RATE)
            norm, _ = sums[step]
            assert found == pytest.approx(
                sums[step], rel=0, abs=1e-9 * norm + 1e-14
            ), (name, step)
        before = dict(after)
    moved = {
        name
        for name, weight in before.items()
        if not torch.equal(weight.double(), first[name].double())
    }
    assert moved == {our_name(name) for name in expected}
    losses = [step["loss"] for step in steps_of(out)]
    assert losses == pytest.approx(trl_losses, rel=1e-9)


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
    alone = steps_of(trained(start, tmp_path / "one", "", *ADAPTERS))
    split = steps_of(trained(start, tmp_path / "many", layout, *ADAPTERS))
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
    steps = steps_of(trained(start, tmp_path / "run", layout, *ADAPTERS))
    narrow = theirs("llama", vocab_size=256)
    at_start = weights_at_start(start)
    with widened():
        model = with_adapters(in_float64(narrow), at_start)
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
