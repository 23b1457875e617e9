"""Generated tokens are those of transformers, and sampling follows its options."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from hub_models import FAMILIES, saved, theirs
from phalanx.cli import main
from phalanx.cli.chat import Conversation
from phalanx.generate import GenerateError, Generator, Sampling
from phalanx.layout import Shape
from phalanx.layout.run import Run, RunError
from phalanx.parallel import build_model
from phalanx.training import text
from phalanx.training.data.vocabulary import Bytes
from phalanx.training.text import continued, open_generator

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
GREEDY = Sampling(temperature=0)
Capture = pytest.CaptureFixture[str]


# Dynamic rope: its angles depend on the length of the whole sequence, which grows here.
@pytest.mark.parametrize(
    "name", [name for name in FAMILIES if name != "dynamic"]
)
def test_logits_of_one_token_at_a_time_are_those_of_transformers(
    name: str, tmp_path: Path
) -> None:
    model = theirs(name)
    generator = open_generator(f"hf:{saved(model, tmp_path / 'hub')}")
    vocabulary = generator.shape.vocab
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocabulary, (2, 14), generator=draw)
    with torch.no_grad():
        wanted = model(tokens).logits
    parts = [
        generator.logits(part)
        for part in torch.split(tokens, [5, *[1] * 9], 1)
    ]
    found = torch.cat(parts, 1)
    assert wanted.std() > 0.1
    if generator.shape.mixers:
        # Without a cache the logits are read as log-probabilities.
        wanted = wanted.log_softmax(-1)
    assert (found - wanted).abs().max() < 4e-6 * wanted.abs().max()


@pytest.mark.parametrize(
    "name",
    ["gpt2", "llama", "qwen3", "gemma2", "mixtral", "deepseek_v3", "gpt_oss"],
)
def test_greedy_tokens_are_those_of_transformers(
    name: str, tmp_path: Path
) -> None:
    if name not in FAMILIES:
        name = next(each for each in FAMILIES if each.startswith(name))
    model = theirs(name)
    generator = open_generator(f"hf:{saved(model, tmp_path / 'hub')}")
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    whole = model.generate(torch.tensor([PROMPT]), max_new_tokens=6, **options)
    wanted = whole[0, len(PROMPT) :].tolist()
    assert [
        token for (token,) in generator.generate(PROMPT, 6, GREEDY)
    ] == wanted


def probabilities(sampling: Sampling, *shares: float) -> list[float]:
    logits = torch.tensor([shares]).log()
    return sampling.kept(logits).softmax(-1)[0].tolist()


def test_top_k_and_top_p_keep_the_likeliest_tokens() -> None:
    shares = (0.15, 0.5, 0.05, 0.3)
    of_two = [0.0, 0.625, 0.0, 0.375]
    assert probabilities(Sampling(top_k=2), *shares) == pytest.approx(of_two)
    assert probabilities(Sampling(top_p=0.7), *shares) == pytest.approx(of_two)
    # 0.5 is reached by the first token alone, and a little more is not.
    assert probabilities(Sampling(top_p=0.5), *shares) == pytest.approx(
        [0, 1, 0, 0]
    )
    assert probabilities(Sampling(top_p=0.51), *shares) == pytest.approx(
        of_two
    )
    assert probabilities(Sampling(), *shares) == pytest.approx(shares)


def test_a_temperature_sharpens_and_zero_takes_the_likeliest() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]]).expand(4000, -1)
    cold = Sampling(temperature=0.5)
    drawn = torch.bincount(
        cold.choose(logits, cold.generator()), minlength=3
    ) / len(logits)
    wanted = (logits[0] / 0.5).softmax(-1)
    assert (drawn - wanted).abs().max() < 0.03
    assert Sampling(temperature=0).choose(
        logits, cold.generator()
    ).unique().tolist() == [1]


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}],
)
def test_terms_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(GenerateError, match=next(iter(wrong))):
        Sampling(**wrong)  # type: ignore[arg-type]


def test_rows_end_with_an_end_token_and_repeat_it(tmp_path: Path) -> None:
    generator = open_generator(
        f"hf:{saved(theirs('llama'), tmp_path / 'hub')}"
    )
    free = list(generator.generate(PROMPT, 12, Sampling(seed=3), rows=3))
    end = free[2][0]
    ended = list(
        generator.generate(PROMPT, 12, Sampling(seed=3), rows=3, ends={end})
    )
    for row in range(3):
        tokens = [step[row] for step in ended]
        if end in tokens:
            first = tokens.index(end)
            assert set(tokens[first:]) == {end}
            assert (
                tokens[: first + 1]
                == [step[row] for step in free][: first + 1]
            )
    assert [step[0] for step in ended].index(end) <= 2


def test_what_cannot_be_continued_is_refused_with_a_way_out(
    tmp_path: Path,
) -> None:
    generator = open_generator(f"hf:{saved(theirs('gpt2'), tmp_path / 'hub')}")
    longest = generator.longest
    assert longest is not None
    with pytest.raises(GenerateError, match=f"Write --tokens {longest - 8}"):
        next(generator.generate(PROMPT, longest))
    with pytest.raises(GenerateError, match="is empty"):
        next(generator.generate([], 1))
    with pytest.raises(GenerateError, match="--tokenizer"):
        next(generator.generate([generator.shape.vocab], 1))


class Scripted:
    """A generator that writes given bytes."""

    def __init__(self, text: bytes) -> None:
        self.text = text

    def generate(self, prompt, count, sampling, ends):  # type: ignore[no-untyped-def]
        return ([token] for token in self.text)


def test_a_character_of_several_tokens_comes_whole() -> None:
    text = "a→ü"
    script = Scripted(text.encode())
    pieces = list(continued(script, Bytes(), [0], 9, GREEDY))  # type: ignore[arg-type]
    assert "".join(pieces) == text
    assert pieces[:3] == ["a", "→", "ü"]


def test_a_run_in_several_parts_is_sampled_with_its_own_tokens(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = "model={layers=2,hidden=16,heads=2,ffn=32,vocab=256}"
    words = [
        "steps=2",
        "batch=4",
        "sequence=16",
        model,
        "validation.batches=0",
        f"out={tmp_path}",
    ]
    assert (
        main(["train", *words, "layout=dp2 tp2 zero3", "--backend", "threads"])
        == 0
    )
    capsys.readouterr()
    options = ["--tokens", "6", "--temperature", "0"]
    assert (
        main(["sample", str(tmp_path), "--prompt", "de", "--json", *options])
        == 0
    )
    figures = json.loads(capsys.readouterr().out)
    generator = open_generator(figures["source"])
    tokens = [token for (token,) in generator.generate(list(b"de"), 6, GREEDY)]
    assert figures["texts"] == [Bytes().decode(tokens)]
    assert main(["sample", str(tmp_path), "--prompt", "de", *options]) == 0
    assert capsys.readouterr().out.startswith("de")
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert main(["chat", str(tmp_path)]) == 2
    assert "phalanx sample" in capsys.readouterr().err


def test_a_model_without_tokens_is_refused() -> None:
    with pytest.raises(GenerateError, match="reads no tokens"):
        Generator.of(build_model(Shape.load("mlp")), {})


def sampled(out: Path) -> list[dict[str, object]]:
    lines = (out / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [record for record in records if record["event"] == "sample"]


@pytest.mark.parametrize("layout", ["", "dp2 tp2 zero3", "pp2 dp2 zero1"])
def test_a_run_writes_what_transformers_writes_with_its_weights(
    layout: str, tmp_path: Path, capsys: Capture
) -> None:
    model = "model={layers=2,hidden=16,heads=2,ffn=32,vocab=256}"
    sizes = ["steps=3", "batch=4", "sequence=16", "optimizer.lr=0.03"]
    texts = ["sample.every=2", "sample.prompt=de", "sample.tokens=5"]
    words = [
        model,
        *sizes,
        *texts,
        "sample.temperature=0",
        "validation.batches=0",
    ]
    out = tmp_path / "run"
    named = [f"out={out}", f"layout={layout}", "--backend", "threads"]
    assert main(["train", *words, *named]) == 0
    shown = capsys.readouterr().out
    found = sampled(out)
    assert [record["step"] for record in found] == [2, 3]
    assert (
        main(["checkpoint", "export", str(out), "--to", str(tmp_path / "hub")])
        == 0
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hub"
    )
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    prompt = torch.tensor([list(b"de")])
    tokens = theirs.generate(prompt, max_new_tokens=5, **options)[
        0, 2:
    ].tolist()
    assert found[-1]["text"] == Bytes().decode(tokens)
    assert (
        f"step 3  writes {json.dumps('de' + Bytes().decode(tokens))}"[:40]
        in shown
    )


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (
            [
                "model={layers=1,hidden=8,heads=1,ffn=8,vocab=256,positions='learned',sequence=16}"
            ],
            "sample.tokens = 40",
        ),
    ],
)
def test_texts_that_a_run_cannot_write_are_refused_before_it_starts(
    words: list[str], named: str
) -> None:
    with pytest.raises(RunError, match=named):
        Run.load("", ("sample.every=1", *words))


def test_a_run_on_tokens_of_an_unknown_tokenizer_is_refused(
    tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "tokens.bin").write_bytes(bytes(4000))
    model = "model={layers=1,hidden=16,heads=2,ffn=32,vocab=256}"
    words = [
        f"data={tmp_path}/tokens.bin",
        "batch=2",
        "sequence=16",
        "sample.every=1",
    ]
    named = [f"out={tmp_path}/run", "--backend", "threads"]
    assert main(["train", model, *words, *named]) == 2
    assert "sample.tokenizer = FOLDER" in capsys.readouterr().err


class _Interrupted:
    """A generator in whose answer the user presses Ctrl-C."""

    longest = None

    def generate(self, *args: object, **more: object) -> Iterator[list[int]]:
        yield [104]
        raise KeyboardInterrupt


class _Spoken:
    """A tokenizer of bytes that takes chats."""

    ends = frozenset[int]()

    def refuse_chats(self) -> None:
        pass

    def chat_prompt(self, messages: list[dict[str, str]]) -> list[int]:
        return [len(messages)]

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()


class _Counted(_Spoken):
    """One token for each letter of a conversation."""

    def chat_prompt(self, messages: list[dict[str, str]]) -> list[int]:
        return [0] * sum(len(message["content"]) for message in messages)


def test_a_conversation_longer_than_the_positions_forgets_its_oldest_messages(
    capsys: Capture,
) -> None:
    conversation = Conversation(_Counted(), 20, tokens=8)  # type: ignore[arg-type]
    conversation.add("system", "s")
    conversation.add("user", "aaaa")
    assert conversation.prompt() == ([0] * 5, 8)
    conversation.add("assistant", "bbbb")
    conversation.add("user", "ccc")
    assert conversation.prompt() == ([0] * 12, 8)
    conversation.add("assistant", "dd")
    conversation.add("user", "e")
    assert capsys.readouterr().err == ""
    # Fifteen tokens leave no place for eight: the first question is gone.
    assert conversation.prompt() == ([0] * 7, 8)
    assert [m["content"] for m in conversation.messages] == [
        "s", "ccc", "dd", "e",
    ]  # fmt: skip
    assert "20 positions" in capsys.readouterr().err
    # A long message has a shorter answer.
    conversation.add("assistant", "f")
    conversation.add("user", "g" * 16)
    assert conversation.prompt() == ([0] * 17, 3)
    assert [m["role"] for m in conversation.messages] == ["system", "user"]
    # Each answer has another seed.
    assert conversation.added == 8


class _Short:
    """A generator with few positions, which answers "h"."""

    longest = 20

    def generate(self, *args: object, **more: object) -> Iterator[list[int]]:
        yield [104]


@pytest.mark.parametrize("at_terminal", [True, False])
def test_a_message_longer_than_the_positions_is_refused_and_the_chat_goes_on(
    at_terminal: bool,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    messages = io.StringIO(f"{'a' * 30}\nbb\n")
    messages.isatty = lambda: at_terminal  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", messages)
    monkeypatch.setattr(text, "open_generator", lambda *_, **__: _Short())
    monkeypatch.setattr(text, "vocabulary_of", lambda *_: _Counted())
    folder = saved(theirs("llama"), tmp_path / "hub")
    assert main(["chat", f"hf:{folder}"]) == (0 if at_terminal else 2)
    shown = capsys.readouterr()
    assert "30 tokens, and the model has 20 positions" in shown.err
    assert shown.out == ("> > h\n> \n" if at_terminal else "")


@pytest.mark.parametrize("at_terminal", [True, False])
def test_an_interrupted_answer_ends_and_the_conversation_goes_on(
    at_terminal: bool,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a terminal the command ends, as others do."""
    messages = io.StringIO("one\ntwo\n")
    messages.isatty = lambda: at_terminal  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", messages)
    monkeypatch.setattr(
        text, "open_generator", lambda *_, **__: _Interrupted()
    )
    monkeypatch.setattr(text, "vocabulary_of", lambda *_: _Spoken())
    folder = saved(theirs("llama"), tmp_path / "hub")
    code = main(["chat", f"hf:{folder}"])
    shown = capsys.readouterr().out
    assert code == (0 if at_terminal else 130)
    assert shown == ("> h\n> h\n> \n" if at_terminal else "h")


def test_a_folder_of_hugging_face_is_named_with_its_prefix(
    tmp_path: Path, capsys: Capture
) -> None:
    folder = saved(theirs("llama"), tmp_path / "hub")
    assert main(["sample", str(folder)]) == 2
    assert f"Write hf:{folder}" in capsys.readouterr().err
