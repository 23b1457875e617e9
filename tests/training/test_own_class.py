"""`phalanx train model=FILE.py:Class` of a module that nobody described equals its plain PyTorch script."""

from __future__ import annotations

from pathlib import Path

import plain_gpt
import pytest
import torch
from loop_worlds import records, trained
from torch import nn

import phalanx
from phalanx.cli.main import main
from phalanx.cost import cached_costs
from phalanx.layout import Layout, LayoutError, Run
from phalanx.parallel import load_model
from phalanx.training.checkpoint_load import ModelIdentity
from phalanx.training.program import shape_of
from phalanx.training.rank import batches_of

FILE = str(Path(plain_gpt.__file__))
PLAIN = f"{FILE}:Plain"
TERMS = (
    "optimizer.name=sgd",
    "optimizer.lr=0.5",
    "optimizer.schedule=constant",
    "optimizer.weight_decay=0",
    "optimizer.clip=0",
    "validation.batches=0",
    "batch=6",
    "steps=3",
    "seed=5",
)


def run_of(out: Path, *more: str, model: str = PLAIN) -> Run:
    return Run.parse(
        "", "own", (f"model={model}", f"out={out}", *TERMS, *more)
    )


def by_hand(run: Run) -> list[float]:
    """The script that its author would write, on the same batches."""
    torch.manual_seed(run.seed)
    model = plain_gpt.Plain(plain_gpt.PlainConfig(n_layer=3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batches, seen = batches_of(run, shape_of(run)), []
    for step in range(run.steps):
        batch = batches.batch(step)
        _, loss = model(batch["tokens"], batch["targets"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(float(loss.detach()))
    return seen


@pytest.mark.parametrize(
    "layout", ["", "dp2 zero3", "pp2 1f1b:2", "dp2 pp2 zb-h1:3"]
)
def test_a_class_without_a_description_is_trained_as_its_plain_script(
    layout: str, tmp_path: Path
) -> None:
    """Its own constructor draws the weights, and its own loss is the loss."""
    run = run_of(tmp_path / "run", "model.n_layer=3")
    trained(run, f"{layout} fp64")
    logged = [each["loss"] for each in records(tmp_path / "run", "step")]
    assert logged == pytest.approx(by_hand(run), rel=1e-9)


def test_a_class_as_it_is_goes_on_in_another_layout(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    trained(run_of(whole), "fp64")
    trained(run_of(parts, "steps=2"), "dp2 zero3 fp64")
    trained(run_of(parts), "pp2 1f1b:2 fp64")
    first, second = (
        [x["loss"] for x in records(p, "step")] for p in (whole, parts)
    )
    assert second == pytest.approx(first, rel=1e-9)


def test_verify_compares_layouts_with_the_class_s_own_forward(
    capsys: pytest.CaptureFixture[str],
) -> None:
    layouts = (
        "dp2 zero3; pp2 zb-h1:3; accum:2 recompute:all offload:activations"
    )
    assert (
        main(
            ["verify", "--model", f"{PLAIN}(n_layer=3)", "--layouts", layouts]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert (
        "3 of 3 layouts of plain agree with Plain.forward on one process"
        in out
    )
    assert "number of parameters" not in out


def test_a_residual_around_the_blocks_is_no_piece_and_is_refused() -> None:
    with pytest.raises(
        LayoutError, match=r"has a different output in Around\.forward"
    ):
        phalanx.verify(f"{FILE}:Around(width=12)", "dp2")


@pytest.mark.parametrize("packed", [False, True])
def test_in_bf16_its_own_loss_is_computed_in_float32(packed: bool) -> None:
    found = phalanx.verify(PLAIN, "dp2 zero3", dtype="bfloat16", packed=packed)
    assert found.passed, found


def test_check_and_a_run_in_small_take_it(tmp_path: Path) -> None:
    model = f"{PLAIN}(n_layer=3, vocab_size=64)"
    checked = phalanx.check("dp2 pp2 zero1 1f1b:4", model, device="h100")
    assert checked.shape.layers == 3
    assert checked.shape.vocab == 64
    assert checked.shape.sequence == 24
    run = run_of(tmp_path / "run", "layout=dp2 zero1", "model.n_embd=8")
    from phalanx.api.verify import verify_run

    assert verify_run(run, on_cpu=True).passed


def test_plan_costs_a_class_by_what_it_is_made_with(tmp_path: Path) -> None:
    layout = Layout.parse("dp2")
    small, large = (
        cached_costs(f"{PLAIN}(n_embd={width})", [layout], place=tmp_path)
        for width in (16, 32)
    )
    weights = [
        next(iter(each.values())).rows[1].numel for each in (small, large)
    ]
    block = [12 * width * width + 13 * width for width in (16, 32)]
    assert weights == block


def test_a_class_that_returns_logits_has_their_cross_entropy(
    tmp_path: Path,
) -> None:
    run = run_of(
        tmp_path / "run", "sequence=8", model=f"{FILE}:Words(width=12)"
    )
    trained(run, "dp2 fp64")
    torch.manual_seed(run.seed)
    model = plain_gpt.Words(12).double()
    batch = batches_of(run, shape_of(run)).batch(0)
    logits = model(batch["tokens"]).flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, batch["targets"].flatten())
    first = records(tmp_path / "run", "step")[0]["loss"]
    assert first == pytest.approx(float(loss.detach()), rel=1e-10)


# ---- what cannot be resolved


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            "Plain(n_layers=3)",
            "PlainConfig has no argument n_layers.*'n_layer'",
        ),
        ("Words", "Words needs width, which nothing names"),
        (
            "Words(width=8, depth=3)",
            "Words has no argument depth. It takes width",
        ),
        ("Plain(n_layer=1)", "no list of blocks"),
        ("Plain(n_head=3)", "plain_gpt.py:[0-9]+: y.view"),
        ("Plain(f(2))", "arguments that cannot be read"),
        ("Plain(n_layer=__import__('os'))", "arguments that cannot be read"),
        ("Pixels", "returns a Tensor, neither a loss nor logits"),
        ("Attention(n_embd=12)", "cannot be cut into pieces"),
    ],
)
def test_what_cannot_be_resolved_is_named(model: str, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        load_model(f"{FILE}:{model}")


@pytest.mark.parametrize("layout", ["tp2", "cp2", "tp2 seq"])
def test_what_needs_cut_matrices_is_refused(layout: str) -> None:
    with pytest.raises(
        LayoutError, match="nothing says how this module is cut"
    ):
        phalanx.verify(PLAIN, layout)


def test_a_table_of_arguments_and_the_words_of_a_call_are_one_model(
    tmp_path: Path,
) -> None:
    text = f'[model]\nclass = "{PLAIN}"\nn_layer = 3\nbias = false\n'
    assert Run.parse(text).own == f"{PLAIN}(n_layer=3, bias=False)"
    words = (f"model={PLAIN}", "model.n_layer=3", "model.bias=false")
    assert Run.parse("", overrides=words).own == Run.parse(text).own
    assert Run.parse(str(Run.parse(text))).own == Run.parse(text).own


def test_a_checkpoint_says_that_a_class_was_made_with_other_arguments(
    tmp_path: Path,
) -> None:
    trained(run_of(tmp_path / "run", "model.n_head=4", "steps=1"), "")
    run = run_of(tmp_path / "run", "model.n_head=8")
    identity = ModelIdentity.of(load_model(run.own), shape_of(run), run.own)
    from phalanx.training.checkpoint_load import newest

    saved = newest(run.checkpoints)
    assert saved is not None
    (notice,) = identity.notices(saved[1])
    assert "what Plain is made with has changed" in notice
    assert "n_head=8" in notice
    assert "n_head=4" in notice
