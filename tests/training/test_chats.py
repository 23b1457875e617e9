"""Chats: what the template writes, which tokens are answers, and the loss on these alone, beside
transformers on one example at a time."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import tokenizers
import torch
import transformers
from loop_worlds import records, small, trained
from pyarrow import parquet
from torch.nn import functional as F

from phalanx.cli.data import run as data_verb
from phalanx.training.data.batches import Batches
from phalanx.training.data.prepare import Prepared, prepare
from phalanx.training.data.token_files import DataError, Stream, open_corpus
from phalanx.training.data.vocabulary import Bytes, open_vocabulary

Chat = list[dict[str, Any]]

PLAIN = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] =="
    " 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}"
    "{{ m['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
)
# As Qwen3's: what a turn thinks is left out when another follows.
CHANGING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if loop.last and m['role'] =="
    " 'assistant' %}<think></think>{% endif %}{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def turns(*texts: str) -> Chat:
    """A user and an assistant in turn."""
    return [
        {"role": ("user", "assistant")[n % 2], "content": text}
        for n, text in enumerate(texts)
    ]


CHATS: list[Chat] = [
    turns("What is the capital of France?", "Paris."),
    turns(
        "Say it in 日本語 😀", "はい😀!", "once more, and longer please", "no"
    ),
    [
        {"role": "system", "content": "be brief"},
        *turns("hello", "hello user, what is it?"),
    ],
    turns("Tell me nothing of it, " * 3, "ok"),
    turns("a", "the answer is " + "very " * 9 + "long"),
    turns("x", "y", "z", "w", "and?", "what is your name"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer's folder with a chat template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    words = tokenizers.Tokenizer(tokenizers.models.BPE())
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False
    )
    words.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    words.train_from_iterator(
        [m["content"] for chat in CHATS for m in chat], trainer
    )
    words.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    config |= {"model_max_length": 10**30}  # as many have it
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(PLAIN)
    return folder


def copied(folder: Path, to: Path, template: str) -> Path:
    """The tokenizer's folder with another chat template."""
    shutil.copytree(folder, to)
    (to / "chat_template.jinja").write_text(template)
    return to


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def made(
    source: Path, folder: Path, share: float = 0.0, **how: Any
) -> tuple[list[tuple[list[int], list[int]]], Prepared]:
    """The tokens and marks of every chat."""
    out = source.parent / f"{source.name}.tokens"
    done = prepare(source, out, open_vocabulary(folder), share=share, **how)
    return examples(open_corpus(out).train), done


def examples(stream: Stream) -> list[tuple[list[int], list[int]]]:
    edges = [
        (int(a), int(b))
        for a, b in zip(stream.starts, stream.starts[1:], strict=False)
    ]
    return [
        (
            stream.read(a, b).tolist(),
            stream.read_answers(a, b).astype(int).tolist(),
        )
        for a, b in edges
    ]


def by_hand(folder: Path, chat: Chat) -> tuple[list[int], list[int]]:
    """Each turn's tokens by themselves: the tokens that turns are set apart by never merge."""
    words = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids, marks = [words.token_to_id("<s>")], [0]
    for message in chat:
        head = words.encode(f"<|im_start|>{message['role']}\n").ids
        body = words.encode(f"{message['content']}<|im_end|>\n").ids
        ids += head + body
        marks += [0] * len(head) + [int(message["role"] == "assistant")] * len(
            body
        )
    return ids, marks


def test_answers_are_the_tokens_that_come_behind_each_prompt(
    folder: Path, tmp_path: Path
) -> None:
    found, done = made(
        lines(tmp_path / "a.jsonl", [{"messages": c} for c in CHATS]), folder
    )
    assert found == [by_hand(folder, chat) for chat in CHATS]
    assert done.answers == sum(sum(marks) for _, marks in found)
    assert done.form == "chats (messages), of which answers are trained on"


def test_a_template_that_marks_answers_is_taken_at_its_word(
    folder: Path, tmp_path: Path
) -> None:
    """transformers' own mask of the same template."""
    marked = tmp_path / "marked"
    marked.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (marked / name).write_bytes((folder / name).read_bytes())
    (marked / "chat_template.jinja").write_text(MARKED)
    found, _ = made(
        lines(tmp_path / "a.jsonl", [{"messages": c} for c in CHATS]), marked
    )
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(marked)
    for chat, (ids, marks) in zip(CHATS, found, strict=True):
        made_there = theirs.apply_chat_template(
            chat,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        assert (ids, marks) == (
            made_there["input_ids"],
            made_there["assistant_masks"],
        )
    # Behind an answer stands a newline, which this template does not mark.
    assert sum(sum(m) for _, m in found) < sum(
        sum(by_hand(folder, c)[1]) for c in CHATS
    )


# As many templates for tools write them: an answer may only reason, or only call tools.
TOOLS = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['reasoning_content'] %}<think>{{ m['reasoning_content'] }}</think>{% endif %}"
    "{% for call in m['tool_calls'] or [] %}<call>{{ call['function']['name'] }}</call>{% endfor %}"
    "{{ m['content'] or '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL: dict[str, Any] = {
    "tool_calls": [{"type": "function", "function": {"name": "weather"}}]
}
WRITTEN = "<call>weather</call>"


@pytest.mark.parametrize(
    "content", [{}, {"content": None}, {"content": ""}], ids=repr
)
def test_an_answer_that_only_calls_tools_or_only_reasons_is_an_answer(
    content: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    other = copied(folder, tmp_path / "other", TOOLS)
    asks, tool = (
        {"role": "user", "content": "is it wet?"},
        {"role": "tool", "content": "rain"},
    )
    silent = {"role": "assistant", **content}
    thinks = {"reasoning_content": "it may rain"}
    chats = [
        [asks, silent | CALL],
        [asks, silent | thinks],
        [
            asks,
            silent | CALL | thinks,
            tool,
            {"role": "assistant", "content": "yes"},
        ],
        # says nothing at all
        [asks, silent | {"tool_calls": [], "reasoning_content": ""}],
        [silent | CALL, asks],  # answers nothing
    ]
    found, done = made(
        lines(tmp_path / "a.jsonl", [{"messages": c} for c in chats]), other
    )
    # Each turn with its text written by hand.
    said = "<think>it may rain</think>"
    texts = [
        turns("is it wet?", WRITTEN),
        turns("is it wet?", said),
        [
            *turns("is it wet?", said + WRITTEN),
            tool,
            {"role": "assistant", "content": "yes"},
        ],
    ]
    assert found == [by_hand(folder, chat) for chat in texts]
    assert (done.unanswered, done.skipped, done.empty) == (2, 0, 0)


def test_a_token_that_holds_a_character_of_an_answer_counts(
    folder: Path, tmp_path: Path
) -> None:
    """A word is a token here, and the template writes the answer in the middle of one."""
    template = (
        "{% for m in messages %} {{ m['role'] }}:{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %} assistant:{% endif %}"
    )
    other = copied(folder, tmp_path / "other", template)
    known = {
        word: n
        for n, word in enumerate(
            ("?", "</s>", "user:a", "assistant:b", "c", "<s>")
        )
    }
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(known, unk_token="?")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.save(str(other / "tokenizer.json"))
    found, _ = made(
        lines(tmp_path / "a.jsonl", [{"messages": turns("a", "b c")}]), other
    )
    assert found == [([2, 3, 4], [0, 1, 1])]


def test_an_answer_of_nothing_but_a_document_s_first_token_is_none(
    folder: Path, tmp_path: Path
) -> None:
    """No token is before it that could predict it."""
    only = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
        "{% endgeneration %}{% endif %}{% endfor %}"
    )
    other = copied(folder, tmp_path / "other", only)
    rows = [
        {"messages": turns("not written", answer)} for answer in ("a", "ab ab")
    ]
    found, done = made(lines(tmp_path / "a.jsonl", rows), other)
    assert done.unanswered == 1
    assert len(found) == 1
    assert len(found[0][0]) > 1


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
def test_a_tokenizer_that_begins_texts_with_a_token_adds_none_to_documents_or_chats(
    template: str, folder: Path, tmp_path: Path
) -> None:
    """As Llama's: its post-processor puts BOS before what it encodes. A template writes its own."""
    plain, other = (
        copied(folder, tmp_path / name, template)
        for name in ("plain", "other")
    )
    words = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    without = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    words.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    assert words.encode("a").ids == [0, *without.encode("a").ids, 1]
    words.save(str(other / "tokenizer.json"))
    rows = [{"messages": chat} for chat in CHATS]
    found, _ = made(lines(tmp_path / "a.jsonl", rows), other)
    assert found == made(lines(tmp_path / "b.jsonl", rows), plain)[0]
    assert [ids.count(0) for ids, _ in found] == [1] * len(CHATS)
    texts = [f"document {n} of text" for n in range(9)]
    found, _ = made(
        lines(tmp_path / "c.jsonl", [{"text": text} for text in texts]), other
    )
    assert [ids for ids, _ in found] == [
        [*without.encode(text).ids, 1] for text in texts
    ]


def test_every_form_of_chat_is_the_same_chat(
    folder: Path, tmp_path: Path
) -> None:
    pairs = [
        chat
        for chat in CHATS
        if [m["role"] for m in chat] == ["user", "assistant"]
    ]
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    rows: dict[str, list[Any]] = {
        "messages": [{"messages": chat, "tools": None} for chat in pairs],
        "sharegpt": [
            {
                "conversations": [
                    {"from": names[m["role"]], "value": m["content"]}
                    for m in chat
                ]
            }
            for chat in pairs
        ],
        "texts": [
            {"prompt": chat[0]["content"], "completion": chat[1]["content"]}
            for chat in pairs
        ],
        "lists": [
            {"prompt": chat[:1], "completion": chat[1:]} for chat in pairs
        ],
        "alpaca": [
            {
                "instruction": chat[0]["content"],
                "input": "",
                "output": chat[1]["content"],
            }
            for chat in pairs
        ],
    }
    wanted = [by_hand(folder, chat) for chat in pairs]
    for name, each in rows.items():
        assert (
            made(lines(tmp_path / f"{name}.jsonl", each), folder)[0] == wanted
        ), name
        parquet.write_table(
            pyarrow.Table.from_pylist(each), tmp_path / f"{name}.parquet"
        )
        assert made(tmp_path / f"{name}.parquet", folder)[0] == wanted, name
    said = [{"said": chat} for chat in pairs]
    assert (
        made(lines(tmp_path / "said.jsonl", said), folder, field="said")[0]
        == wanted
    )


def test_what_an_instruction_is_about_stands_behind_it(
    folder: Path, tmp_path: Path
) -> None:
    row = {"instruction": "add", "input": "1 2", "output": "3"}
    chat = turns("add\n\n1 2", "3")
    found = made(lines(tmp_path / "alpaca.jsonl", [row]), folder)[0]
    assert found == [by_hand(folder, chat)]
    wrong = [row, row | {"output": 3}]
    _, done = made(lines(tmp_path / "wrong.jsonl", wrong), folder)
    assert done.skipped == 1


def test_two_answers_to_one_prompt_are_two_chats_that_follow_each_other(
    folder: Path, tmp_path: Path
) -> None:
    chat = CHATS[5]
    other = [*chat[:-1], chat[-1] | {"content": "something else"}]
    ids, marks = by_hand(folder, chat)
    more, _ = by_hand(folder, other)
    asked = len(by_hand(folder, chat[:-1])[0])
    # Answers of the assistant within the prompt are not trained on.
    wanted = [(ids, [0] * asked + marks[asked:]), (more, [0] * asked)]
    apart = {"prompt": chat[:-1], "chosen": chat[-1:], "rejected": other[-1:]}
    whole = {"chosen": chat, "rejected": other}
    for name, row in {"apart": apart, "whole": whole}.items():
        found = made(lines(tmp_path / f"{name}.jsonl", [row]), folder)[0]
        assert found[0] == wanted[0], name
        assert found[1][0] == more, name
        assert found[1][1][:asked] == wanted[1][1], name


def test_of_a_prompt_with_turns_the_completion_alone_is_trained_on(
    folder: Path, tmp_path: Path
) -> None:
    chat = CHATS[5]
    rows = [
        {"prompt": chat[:5], "completion": chat[5:]},
        {
            "messages": [
                chat[0],
                chat[1] | {"weight": 0},
                chat[2],
                chat[3] | {"weight": 0},
                *chat[4:],
            ]
        },
    ]
    ids, marks = by_hand(folder, chat)
    last = len(ids) - len(by_hand(folder, chat[:5])[0])
    wanted = (ids, [0] * (len(ids) - last) + marks[-last:])
    assert made(lines(tmp_path / "a.jsonl", rows[:1]), folder)[0] == [wanted]
    assert made(lines(tmp_path / "b.jsonl", rows[1:]), folder)[0] == [wanted]


def test_what_is_no_example_is_counted_and_what_is_no_chat_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"messages": CHATS[0]}
    rows = [
        good,
        {"messages": []},
        {"messages": None},
        {"messages": turns("nobody answers")},
        {"messages": turns("it is empty", "")},
        {"messages": turns("a", "b")[1:]},  # an answer to nothing
        {"messages": "text"},
        {"messages": [{"role": "user"}, "text"]},
        {"messages": [{"content": "a"}]},
        {"messages": [{"from": "stranger", "value": "a"}]},
        {"messages": turns("a\ud800", "b")},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        good,
    ]
    source = lines(tmp_path / "a.jsonl", rows)
    out = str(tmp_path / "out")
    said = [
        "prepare",
        str(source),
        "--out",
        out,
        "--tokenizer",
        str(folder),
        "--held-out",
        "0",
    ]
    assert data_verb([*said, "--json"]) == 0
    captured = capsys.readouterr()
    counts = json.loads(captured.out)
    assert (counts["skipped"], counts["empty"], counts["unanswered"]) == (
        6,
        2,
        3,
    )
    assert counts["train"]["documents"] == 2
    named = Path(out, "skipped.txt").read_text().splitlines()
    for line, number, words in zip(
        named,
        range(7, 13),
        (
            "its messages are no list",
            "message 1 is not an object",
            "message 0 has no role; it has 'content'",
            "message 0 is from 'stranger', which is an unknown role",
            "message 0: character 1 is half of a surrogate pair",
            "the content of message 0 is not text",
        ),
        strict=True,
    ):
        assert line == f"{source}, line {number}: {words}"
        assert line in captured.err


class Power(RuntimeError):
    """It went off."""


def test_a_preparation_of_chats_that_was_stopped_ends_with_the_same_files(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what was left out before the stop, and behind it."""
    module = importlib.import_module("phalanx.training.data.prepare")
    monkeypatch.setattr(module, "BETWEEN", 1)
    monkeypatch.setattr(
        importlib.import_module("phalanx.training.data.sources"), "BLOCK", 64
    )
    rows = [{"messages": chat} for chat in CHATS]
    rows[1:1] = rows[4:4] = [{"messages": "no chat"}]  # type: ignore[dict-item]
    source = lines(tmp_path / "a.jsonl", rows)
    whole, out = tmp_path / "whole", tmp_path / "out"
    prepare(source, whole, open_vocabulary(folder), share=0.3)
    plain, marks = module.write_text, [0]

    def off(path: Path, text: str, **options: bool) -> None:
        marks[0] += 1
        if marks[0] == 5:
            raise Power
        plain(path, text, **options)

    monkeypatch.setattr(module, "write_text", off)
    with pytest.raises(Power):
        prepare(source, out, open_vocabulary(folder), share=0.3)
    monkeypatch.setattr(module, "write_text", plain)
    done = prepare(source, out, open_vocabulary(folder), share=0.3)
    assert done.skipped == 2
    for path in whole.iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name
    assert len((out / "skipped.txt").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
)
def test_tokens_of_another_tokenizer_are_not_gone_on_with(
    name: str, folder: Path, tmp_path: Path
) -> None:
    source = lines(
        tmp_path / "a.jsonl", [{"messages": chat} for chat in CHATS]
    )
    prepare(source, tmp_path / "out", open_vocabulary(folder), share=0.0)
    other = copied(folder, tmp_path / "other", PLAIN)
    # As it was.
    prepare(source, tmp_path / "out", open_vocabulary(other), share=0.0)
    (other / name).write_text((other / name).read_text() + " ")
    with pytest.raises(
        DataError, match="begun from other sources or with other settings"
    ):
        prepare(source, tmp_path / "out", open_vocabulary(other), share=0.0)


def test_the_tools_of_a_row_are_written_by_the_template(
    folder: Path, tmp_path: Path
) -> None:
    other = copied(
        folder,
        tmp_path / "other",
        "{{ tools[0].name if tools else 'none' }}" + PLAIN,
    )
    chat = turns("a", "b")
    rows = [
        {"messages": chat, "tools": tools}
        for tools in ([{"name": "weather"}], [], None)
    ]
    found, _ = made(
        lines(tmp_path / "a.jsonl", [*rows, {"messages": chat}]), other
    )
    words = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids, marks = by_hand(folder, chat)
    heads = [
        words.encode(text).ids for text in ("weather", "none", "none", "none")
    ]
    assert found == [
        ([*head, *ids], [*(0 for _ in head), *marks]) for head in heads
    ]


def test_a_completion_of_somebody_else_s_messages_is_named(
    folder: Path, tmp_path: Path
) -> None:
    chat = turns("a", "b", "c", "d")
    rows = [
        {"prompt": chat[:1], "completion": chat[1:]},
        {"prompt": "a", "completion": "b"},
    ]
    found, done = made(lines(tmp_path / "a.jsonl", rows), folder)
    assert (len(found), done.skipped) == (1, 1)
    named = (tmp_path / "a.jsonl.tokens" / "skipped.txt").read_text()
    assert (
        "line 1: 'completion' has messages that are not the assistant's"
        in named
    )


def test_templates_that_cannot_be_used_say_why(
    folder: Path, tmp_path: Path
) -> None:
    source = lines(
        tmp_path / "a.jsonl", [{"messages": CHATS[0]}, {"messages": CHATS[1]}]
    )
    other = tmp_path / "other"
    other.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(DataError, match="has no chat template"):
        made(source, other)
    for vocabulary in (open_vocabulary(folder / "tokenizer.json"), Bytes()):
        with pytest.raises(DataError, match="chats need"):
            prepare(source, tmp_path / "none", vocabulary, share=0.0)
    assert not (tmp_path / "none").exists()
    (other / "chat_template.jinja").write_text(CHANGING)
    _, done = made(source, other)
    assert done.skipped == 1
    named = (tmp_path / "a.jsonl.tokens" / "skipped.txt").read_text()
    assert (
        "line 2: the chat template renders message 1 differently when it is the last"
        in named
    )
    # The template's own words, and code that the sandbox does not run.
    for words, why in (
        ("{{ raise_exception('no systems here') }}", "no systems here"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
    ):
        (other / "chat_template.jinja").write_text(words)
        with pytest.raises(
            DataError, match=f"its chat template refuses it: .*{why}"
        ):
            prepare(
                source,
                tmp_path / words[4:9],
                open_vocabulary(other),
                share=0.0,
            )


def test_prompts_longer_than_the_sequence_are_left_out_and_counted(
    folder: Path, tmp_path: Path
) -> None:
    found, _ = made(
        lines(tmp_path / "a.jsonl", [{"messages": c} for c in CHATS]), folder
    )
    corpus = open_corpus(tmp_path / "a.jsonl.tokens")
    sequence = 20
    longer = [marks for ids, marks in found if len(ids) > sequence]
    lost = [marks for marks in longer if not any(marks[1 : sequence + 1])]
    assert lost
    assert len(longer) > len(lost)
    for packing in ("bfd", "none", ""):
        batches = Batches((corpus,), sequence, 1, packing=packing)
        (notice,) = batches.notices
        assert (
            f"{len(longer) - len(lost)} of 6 documents are longer than sequence = 20"
            in notice
        )
        assert (
            f"{len(lost)} more have no answer before that and are left out"
            in notice
        )
        targets = torch.cat(
            [batches.batch(n)["targets"] for n in range(batches.sequences)]
        )
        kept = sum(sum(marks[1 : sequence + 1]) for _, marks in found)
        assert int((targets != -100).sum()) == kept
    with pytest.raises(
        DataError, match="no document has a token to train on within 3 tokens"
    ):
        Batches((corpus,), 3, 1)


# ---- the loss


@pytest.fixture(scope="module")
def model(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama of transformers, with the tokenizer beside it."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=330, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=128, eos_token_id=1,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    for file in folder.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


def reference(model: Path, *, padded: bool) -> tuple[float, float]:
    """The mean loss over all answer tokens of all examples, and the length of its gradient, by
    transformers in float64: example by example, or in one batch with padding."""
    theirs = transformers.LlamaForCausalLM.from_pretrained(model).double()
    rows = [by_hand(model, chat) for chat in CHATS]
    longest = max(len(ids) for ids, _ in rows)
    if padded:
        ids = torch.tensor(
            [ids + [0] * (longest - len(ids)) for ids, _ in rows]
        )
        there = torch.tensor(
            [[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in rows]
        )
        marks = torch.tensor(
            [marks + [0] * (longest - len(marks)) for _, marks in rows]
        )
        logits = theirs(input_ids=ids, attention_mask=there).logits[:, :-1]
        pairs = [
            (logits[n], ids[n, 1:], marks[n, 1:]) for n in range(len(rows))
        ]
    else:
        pairs = [
            (theirs(input_ids=torch.tensor([ids])).logits[0, :-1], torch.tensor(ids[1:]),
             torch.tensor(marks[1:]))
            for ids, marks in rows
        ]  # fmt: skip
    losses = [
        F.cross_entropy(x, y, reduction="none")[keep.bool()]
        for x, y, keep in pairs
    ]
    loss = torch.cat(losses).sum() / sum(int(keep.sum()) for *_, keep in pairs)
    loss.backward()
    squares = [weight.grad.square().sum() for weight in theirs.parameters()]
    return float(loss.detach()), float(torch.stack(squares).sum().sqrt())


@pytest.mark.parametrize("packing", ["bfd", "none"])
def test_the_loss_on_answers_is_that_of_transformers_in_every_layout(
    packing: str, model: Path, tmp_path: Path
) -> None:
    """One step over all examples. Answers are spread unevenly: ranks, microbatches and halves of a
    sequence hold from none to many of the tokens that count."""
    source = lines(
        tmp_path / "a.jsonl", [{"messages": chat} for chat in CHATS]
    )
    found, _ = made(source, model)
    corpus = open_corpus(tmp_path / "a.jsonl.tokens")
    sequence = 2 * max(len(ids) for ids, _ in found) - 1
    rows = Batches((corpus,), sequence, 1, packing=packing).sequences
    assert rows == {"none": 6, "bfd": 3}[packing]
    wanted = reference(model, padded=False)
    assert wanted == pytest.approx(reference(model, padded=True), rel=1e-11)
    first: tuple[float, float] | None = None
    for layout in (
        "",
        "dp2",
        "dp3 zero3",
        "cp2",
        "pp2 1f1b:3",
        "dp2 cp2 zero2",
        "tp2 seq accum:2",
    ):
        out = tmp_path / f"{layout} {packing}"
        config = small(
            out, f"data={corpus.name}", f"model=hf:{model}", f"packing={packing}",
            f"sequence={sequence}", f"batch={rows}", "steps=1", "precision=fp64",
        )  # fmt: skip
        trained(config, f"{layout} fp64")
        (step,) = records(out, "step")
        # transformers takes some roots in float32, in which no layout differs from another.
        assert (step["loss"], step["norm"]) == pytest.approx(
            wanted, rel=1e-7
        ), layout
        first = first or (step["loss"], step["norm"])
        assert (step["loss"], step["norm"]) == pytest.approx(
            first, rel=1e-12
        ), layout
