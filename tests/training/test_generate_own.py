"""Models that are not the built-in decoder write what their own code writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plain_gpt
import pytest
import torch
from loop_worlds import records
from test_own_class import PLAIN
from torch import Tensor
from torch.nn import functional as F

from hub_models import CODE, MORE_CODE, TIME, VOCAB, saved, theirs
from phalanx.cli import main
from phalanx.generate import Sampling
from phalanx.layout.source import load_module
from phalanx.parallel import load_model
from phalanx.training.data.vocabulary import Bytes
from phalanx.training.text import model_of, open_generator

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
GREEDY = Sampling(temperature=0)
STRANGER = "examples/stranger.py:Stranger"
Capture = pytest.CaptureFixture[str]


FAST = (*CODE, "starcoder2", "olmo3")  # both with windows
REST = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in MORE_CODE
    if name not in FAST
]


@pytest.mark.parametrize("name", [*FAST, *REST])
def test_transformers_code_writes_what_its_generate_writes(
    name: str, tmp_path: Path
) -> None:
    model = theirs(name)
    generator = open_generator(f"hf:{saved(model, tmp_path / 'hub')}")
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    whole = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=12, **options
    )
    wanted = whole[0, len(PROMPT) :].tolist()
    found = [token for (token,) in generator.generate(PROMPT, 12, GREEDY)]
    assert found == wanted
    tokens = torch.randint(VOCAB, (2, TIME))
    with torch.no_grad():
        logits = model(tokens).logits
    generator.reset()
    parts = [generator.logits(x) for x in torch.split(tokens, [9, 1, 14], 1)]
    apart = (torch.cat(parts, 1) - logits).abs().max()
    assert apart < 4e-6 * logits.abs().max()


def trained(out: Path, model: str, *more: str) -> dict[str, Tensor]:
    """Train a model of a file for some steps; return its weights."""
    sizes = ["steps=2", "batch=4", "sequence=12", "validation.batches=0"]
    terms = [f"model={model}", *sizes, f"out={out}", *more]
    assert main(["train", *terms, "--backend", "threads"]) == 0
    _, weights = model_of(next((out / "checkpoints").glob("step-*")), model)
    return weights


def greedy(
    module: Callable[[Tensor], Any], prompt: list[int], count: int
) -> list[int]:
    """The loop that the author of a model would write."""
    tokens = torch.tensor([prompt])
    for _ in range(count):
        with torch.no_grad():
            logits = module(tokens)
        logits = logits[0] if isinstance(logits, tuple) else logits
        tokens = torch.cat((tokens, logits[:, -1:].argmax(-1)), 1)
    return tokens[0, len(prompt) :].tolist()


def test_a_class_as_it_is_writes_what_its_own_loop_writes(
    tmp_path: Path, capsys: Capture
) -> None:
    """It has learned 24 positions, and returns the last logits alone without targets."""
    out = tmp_path / "run"
    texts = ["sample.every=2", "sample.prompt=de", "sample.tokens=9"]
    terms = [*texts, "sample.temperature=0", "layout=dp2 zero3"]
    weights = trained(out, PLAIN, *terms)
    own = plain_gpt.Plain(plain_gpt.PlainConfig())
    model = load_model(PLAIN)
    assert model.own_start is not None
    names = model.own_start.names
    own.load_state_dict(
        {theirs: weights[n] for n, theirs in names.items()}, strict=False
    )
    wanted = Bytes().decode(greedy(own, list(b"de"), 9))
    assert [each["text"] for each in records(out, "sample")] == [wanted]
    capsys.readouterr()
    words = ["--prompt", "de", "--tokens", "9", "--temperature", "0", "--json"]
    assert main(["sample", str(out), "--model", PLAIN, *words]) == 0
    assert json.loads(capsys.readouterr().out)["texts"] == [wanted]
    too_long = ["--prompt", "de", "--tokens", "23"]
    assert main(["sample", str(out), "--model", PLAIN, *too_long]) == 2
    assert "--tokens 22" in capsys.readouterr().err


def test_a_described_class_writes_and_is_evaluated_by_its_own_pieces(
    tmp_path: Path, capsys: Capture
) -> None:
    """It returns a loss alone: the logits are what that is computed from."""
    out = tmp_path / "run"
    weights = trained(out, STRANGER, "layout=dp2 tp2")
    stranger = load_module("examples/stranger.py", ("Stranger",), ValueError)
    described = stranger.describe(stranger.Stranger())
    with torch.no_grad():
        for name, weight in described.weights.items():
            weight.copy_(weights[name])
    *front, (_, head) = described.pieces

    def logits(tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1]).expand_as(tokens)
        x = front[0][1](tokens, places)
        for _, block in front[1:]:
            x = block(x, positions=places)
        return head.output(head.norm(x))

    generator = open_generator(
        next((out / "checkpoints").glob("step-*")), own=STRANGER
    )
    found = [x for (x,) in generator.generate(list(b"def"), 8, GREEDY)]
    assert found == greedy(logits, list(b"def"), 8)
    text = tmp_path / "text.txt"
    text.write_text("def main():")
    capsys.readouterr()
    named = ["--data", str(text), "--model", STRANGER, "--json"]
    assert main(["eval", str(out), *named]) == 0
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    tokens = torch.tensor([list(b"def main():")])
    with torch.no_grad():
        wanted = F.cross_entropy(logits(tokens[:, :-1])[0], tokens[0, 1:])
    assert figures["loss"] == pytest.approx(float(wanted), rel=1e-5)


def test_a_checkpoint_does_not_choose_which_code_is_run(
    tmp_path: Path, capsys: Capture
) -> None:
    trained(tmp_path / "run", PLAIN)
    capsys.readouterr()
    for command in ("sample", "eval", "chat"):
        extra = ["--tokenizer", "x"] if command == "chat" else []
        assert main([command, str(tmp_path / "run"), *extra]) == 2
    err = capsys.readouterr().err
    assert err.count("--model") >= 2
    assert "plain_gpt.py:Plain" in err
