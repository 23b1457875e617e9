"""Ranks that share a model over tp and pp write what transformers writes on one process."""

from __future__ import annotations

import json
import os
import signal
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from hub_models import saved, theirs
from phalanx.cli import main
from phalanx.comm import RankFailed, World, launch
from phalanx.generate import Generator, Sampling, remote
from phalanx.generate.remote import open_over_ranks
from phalanx.layout import Layout, Shape
from phalanx.training.text import open_generator, open_shared_generator

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
GREEDY = Sampling(temperature=0)
Capture = pytest.CaptureFixture[str]


def written(world: World, source: str, layout: Layout) -> list[list[int]]:
    """The greedy tokens of two prompts, one after the other."""
    generator = open_shared_generator(world, source, layout)
    prompts = PROMPT, PROMPT[:3]
    return [
        [token for (token,) in generator.generate(prompt, 8, GREEDY)]
        for prompt in prompts
    ]


def by_transformers(model: Any, prompt: list[int]) -> list[int]:
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    whole = model.generate(torch.tensor([prompt]), max_new_tokens=8, **options)
    tokens: list[int] = whole[0, len(prompt) :].tolist()
    return tokens


# A tied embedding with learned positions; shared keys; windows and softcaps; experts;
# latents; sinks. The vocabulary of 61 words does not divide.
@pytest.mark.parametrize(
    "name", ["gpt2", "llama", "gemma2", "mixtral", "deepseek_v3", "gpt_oss"]
)
def test_ranks_write_what_transformers_writes(
    name: str, tmp_path: Path
) -> None:
    model = theirs(name)
    source = f"hf:{saved(model, tmp_path / 'hub')}"
    wanted = [by_transformers(model, p) for p in (PROMPT, PROMPT[:3])]
    for text in ("tp2", "pp2", "tp4", "tp2 pp2"):
        layout = Layout.parse(text)
        found = launch(
            written, layout.ranks, source, layout, backend="threads"
        )
        assert found == [wanted] * layout.ranks, text


def test_the_command_starts_the_ranks_and_prints_one_text(
    tmp_path: Path, capsys: Capture
) -> None:
    model = "model={layers=2,hidden=16,heads=2,ffn=32,vocab=256}"
    sizes = ["steps=2", "batch=4", "sequence=16", "validation.batches=0"]
    out, layout = f"out={tmp_path}/run", "layout=dp2 pp2 zero1"
    terms = [model, *sizes, out, layout, "--backend", "threads"]
    assert main(["train", *terms]) == 0
    capsys.readouterr()
    words = ["sample", f"{tmp_path}/run", "--prompt", "de", "--tokens", "6"]
    words += ["--temperature", "0", "--samples", "2", "--json"]
    assert main(words) == 0
    alone = json.loads(capsys.readouterr().out)
    assert main([*words, "--layout", "run"]) == 0
    assert json.loads(capsys.readouterr().out) == alone
    assert main(words[:-1]) == 0
    shown = capsys.readouterr().out
    assert main([*words[:-1], "--layout", "tp2"]) == 0
    assert capsys.readouterr().out == shown


def test_a_request_is_carried_out_although_its_answer_is_not_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after Ctrl-C: the next answer is not that of the last request."""
    source = f"hf:{saved(theirs('llama'), tmp_path / 'hub')}"
    alone = open_generator(source)
    with open_over_ranks(
        open_shared_generator, 2, source, Layout.parse("pp2")
    ) as generator:
        taken = generator.generate(PROMPT, 8, GREEDY)
        next(taken)
        with monkeypatch.context() as patch:
            patch.setattr(Future, "result", interrupt)
            with pytest.raises(KeyboardInterrupt):
                next(taken)
        wanted = list(alone.generate(PROMPT[:3], 8, GREEDY))
        assert list(generator.generate(PROMPT[:3], 8, GREEDY)) == wanted
        tokens = [*PROMPT, *PROMPT]
        torch.testing.assert_close(
            generator.log_probabilities(tokens, 5),
            alone.log_probabilities(tokens, 5),
        )


def interrupt(_: Future[Any]) -> None:
    raise KeyboardInterrupt


def test_a_rank_that_cannot_open_the_model_says_why(tmp_path: Path) -> None:
    missing = f"hf:{tmp_path}/missing"
    layout = Layout.parse("tp2")
    with (
        pytest.raises(RankFailed) as raised,
        open_over_ranks(open_shared_generator, 2, missing, layout),
    ):
        pass
    assert "missing" in raised.value.refusal


def test_ranks_do_not_share_a_model_with_delta_layers(tmp_path: Path) -> None:
    source = f"hf:{saved(theirs('qwen3_next'), tmp_path / 'hub')}"
    layout = Layout.parse("tp2")
    with (
        pytest.raises(RankFailed) as raised,
        open_over_ranks(open_shared_generator, 2, source, layout),
    ):
        pass
    assert "delta layers have no cache" in raised.value.refusal


def test_an_interruption_while_the_ranks_read_their_weights_ends_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "RemoteReader", interrupt)
    with (
        pytest.raises(KeyboardInterrupt),
        open_over_ranks(open_small, 2),
    ):
        pass
    assert not [
        thread for thread in threading.enumerate() if "start" in thread.name
    ]


def open_small(world: World) -> Generator:
    model = Shape.load("mlp")
    return Generator(None, model)  # type: ignore[arg-type]


def test_a_long_name_of_the_temporary_folder_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with open_over_ranks(open_small, 2) as generator:
        assert generator.shape == Shape.load("mlp")


def test_a_killed_rank_ends_the_answer(tmp_path: Path) -> None:
    source = f"hf:{saved(theirs('llama'), tmp_path / 'hub')}"
    with (
        pytest.raises(RankFailed, match="rank 1"),
        open_over_ranks(
            open_and_die, 2, source, Layout.parse("tp2")
        ) as generator,
    ):
        list(generator.generate(PROMPT, 8, GREEDY))


def open_and_die(world: World, source: str, layout: Layout) -> Generator:
    """Open the model, of which rank 1 is killed at its second pass."""
    generator = open_shared_generator(world, source, layout)
    reads = generator.reader.logits

    def logits(tokens: torch.Tensor, last: int) -> torch.Tensor:
        if world.rank == 1 and tokens.shape[1] == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return reads(tokens, last)

    generator.reader.logits = logits  # type: ignore[method-assign]
    return generator


@pytest.mark.parametrize(
    ("layout", "named"), [("dp2 tp2", "Write tp2"), ("tp2 x", "'x'")]
)
def test_layouts_that_do_not_share_a_model_are_refused(
    layout: str, named: str, tmp_path: Path, capsys: Capture
) -> None:
    folder = saved(theirs("llama"), tmp_path / "hub")
    assert main(["sample", f"hf:{folder}", "--layout", layout]) == 2
    assert named in capsys.readouterr().err
