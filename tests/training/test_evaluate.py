"""The loss on a text is that of transformers, and lm-eval gets the log-probabilities that it computes."""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from hub_models import saved, theirs
from phalanx.cli import main
from phalanx.cli.eval_tasks import model_class
from phalanx.generate.filled import fill
from phalanx.generate.recomputed import RecomputedReader
from phalanx.layout import Shape
from phalanx.parallel import build_model
from phalanx.training.checkpoint_format import read_manifest
from phalanx.training.checkpoint_load import TensorReader
from phalanx.training.data.vocabulary import Bytes
from phalanx.training.text import open_generator

Capture = pytest.CaptureFixture[str]
MODEL = "model={layers=2,hidden=16,heads=2,ffn=32,vocab=256}"
TEXT = "def main():\n    return 1\n" * 8


# Modules that predict later tokens, behind a delta layer and attention.
AHEAD = (
    "model={layers=2,hidden=16,heads=2,ffn=32,vocab=256,mtp=2,"
    "mixers=['delta','attention'],delta_heads=2}"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_run(tmp_path_factory.mktemp("trained"), MODEL)


@pytest.fixture(scope="module")
def predicting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_run(tmp_path_factory.mktemp("predicting"), AHEAD)


def trained_run(folder: Path, model: str) -> Path:
    """A short run on a text of which a part is held out."""
    source = folder / "lines.jsonl"
    rows = [
        json.dumps({"text": f"line {n} of {n * n}\n" * 4}) for n in range(60)
    ]
    source.write_text("\n".join(rows))
    tokens = f"{folder}/tokens"
    assert main(["data", "prepare", str(source), "--out", tokens]) == 0
    sizes = [model, "steps=3", "batch=8", "sequence=32", "optimizer.lr=0.03"]
    words = [
        *sizes,
        f"data={tokens}",
        "validation.batches=99",
        f"out={folder}/run",
    ]
    assert (
        main(["train", *words, "layout=dp2 zero2", "--backend", "threads"])
        == 0
    )
    return folder / "run"


def evaluated(capsys: Capture, *words: object) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["eval", *map(str, words), "--json"]) == 0
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    return figures


def exported(run: Path, folder: Path) -> Any:
    assert main(["checkpoint", "export", str(run), "--to", str(folder)]) == 0
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def log_probabilities(model: Any, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
    return logits.double().log_softmax(-1)


def test_the_loss_on_a_text_is_that_of_transformers(
    trained: Path, tmp_path: Path, capsys: Capture
) -> None:
    rows = [TEXT, "import os\n"]
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(json.dumps({"text": row}) for row in rows))
    found = evaluated(capsys, trained, "--data", source, "--sequence", 4096)
    model = exported(trained, tmp_path / "hub")
    nats, count = 0.0, 0
    for row in rows:
        tokens = list(row.encode())
        chances = log_probabilities(model, tokens)
        nats -= sum(
            float(chances[n - 1, tokens[n]]) for n in range(1, len(tokens))
        )
        count += len(tokens) - 1
    assert found["tokens"] == count
    assert found["loss"] == pytest.approx(nats / count, rel=1e-6)
    assert found["perplexity"] == pytest.approx(
        math.exp(nats / count), rel=1e-5
    )
    bits = nats / count / math.log(2)  # a token is a byte
    assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-6)


@pytest.mark.parametrize("run", ["trained", "predicting"])
def test_without_data_it_is_the_loss_that_the_run_has_validated(
    run: str, request: pytest.FixtureRequest, capsys: Capture
) -> None:
    trained: Path = request.getfixturevalue(run)
    lines = (trained / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    (last,) = [r for r in records if r["event"] == "validation"]
    found = evaluated(capsys, trained)
    assert found["loss"] == pytest.approx(last["loss"], rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(
        last["bits_per_byte"], rel=1e-6
    )
    trained_on = evaluated(capsys, trained, "--split", "train")
    assert trained_on["tokens"] > 5 * found["tokens"]


def test_modules_of_later_tokens_do_not_change_what_is_read(
    predicting: Path,
) -> None:
    """The whole sequence again for each token, as delta layers have no cache."""
    (path,) = (predicting / "checkpoints").glob("step-*")
    with TensorReader(path, read_manifest(path)) as reader:
        weights = {
            name: reader.whole(each)
            for (kind, name), each in reader.tensors.items()
            if kind == "weight"
        }
    shape = Shape.of(tomllib.loads(AHEAD)["model"])
    whole, bare = build_model(shape), build_model(replace(shape, mtp=0))
    fill(bare, {name: weights[name] for name in bare.weights}, torch.float32)
    fill(whole, weights, torch.float32)
    readers = [RecomputedReader(each, torch.float32) for each in (whole, bare)]
    tokens = torch.tensor([list(b"line 7 of")])
    with torch.no_grad():
        found, wanted = (reader.logits(tokens, 3) for reader in readers)
    assert found.equal(wanted)
    assert main(["sample", str(predicting), "--prompt", "li"]) == 0


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--data", "nowhere.txt"], "nowhere.txt does not exist"),
        (["--limit", "3"], "need --tasks"),
        (["--tasks", "a", "--data", "b"], "--tasks has its own text"),
        (["--split", "test"], "--split"),
    ],
)
def test_wrong_words_are_refused(
    trained: Path, words: list[str], named: str, capsys: Capture
) -> None:
    assert main(["eval", str(trained), *words]) == 2
    assert named in capsys.readouterr().err


def test_a_folder_of_a_model_has_no_data_of_its_own(
    tmp_path: Path, capsys: Capture
) -> None:
    folder = saved(theirs("llama"), tmp_path / "hub")
    assert main(["eval", f"hf:{folder}"]) == 2
    assert "--data PATH" in capsys.readouterr().err


# ---- lm-eval


class FakeTemplate:
    """The part of lm_eval.api.model.TemplateLM that a model of ours uses."""

    @property
    def prefix_token_id(self) -> int:
        token: int = self.eot_token_id  # type: ignore[attr-defined]
        return token


WANTED = {"_loglikelihood_tokens", "eot_token_id", "generate_until"} | {
    "loglikelihood_rolling",
    "tok_encode",
}


def harness_model(run: Path, base: Any = FakeTemplate) -> Any:
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    return model_class(base)(open_generator(checkpoint), Bytes())


def request(*arguments: object) -> SimpleNamespace:
    return SimpleNamespace(args=arguments)


def test_a_continuation_has_the_log_probability_of_transformers(
    trained: Path, tmp_path: Path
) -> None:
    model = exported(trained, tmp_path / "hub")
    prompt, rest = list(b"line "), list(b"12")
    chances = log_probabilities(model, prompt + rest)
    wanted = float(chances[4, rest[0]] + chances[5, rest[1]])
    likeliest = int(chances[4].argmax())
    one = (("line ", "12"), prompt, rest)
    other = (("line ", "?"), prompt, [likeliest])
    found = harness_model(trained)._loglikelihood_tokens([one, other])
    assert found[0][0] == pytest.approx(wanted, rel=1e-5)
    assert not found[0][1]
    assert found[1][1]
    assert found[1][0] == pytest.approx(float(chances[4].max()), rel=1e-5)


def test_a_prompt_is_continued_up_to_the_end_that_a_task_names(
    trained: Path,
) -> None:
    model = harness_model(trained)
    (whole,) = model.generate_until([request("line 3", {"max_gen_toks": 6})])
    assert len(whole) == 6
    end = whole[3]
    terms = {"max_gen_toks": 6, "until": [end]}
    (cut,) = model.generate_until([request("line 3", terms)])
    assert cut == whole[: whole.index(end)]


def test_the_harness_asks_for_no_more_than_the_model_has(
    trained: Path,
) -> None:
    lm_eval = pytest.importorskip("lm_eval.api.model")
    template = lm_eval.TemplateLM
    assert set(template.__abstractmethods__) == WANTED
    model = harness_model(trained, template)
    rolled = model.loglikelihood_rolling([request("line 3")])
    tokens = list(b"line 3")
    pairs = [(("", ""), [0], tokens)]
    assert rolled == [model._loglikelihood_tokens(pairs)[0][0]]


def test_without_the_harness_tasks_are_refused_by_its_name(
    trained: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    assert main(["eval", str(trained), "--tasks", "arc_easy"]) == 2
    assert "pip install lm_eval" in capsys.readouterr().err
