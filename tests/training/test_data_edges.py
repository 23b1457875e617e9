"""The last value that is allowed and the first that is not, where tokens become batches."""

from __future__ import annotations

import importlib
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_data_digests import prepared
from test_data_files import megatron
from test_data_order import corpus_of

from phalanx.training.data.batches import Batches
from phalanx.training.data.prepare import prepare
from phalanx.training.data.token_files import (
    DataError,
    Stream,
    held_out,
    open_corpus,
    verify_prepared,
)
from phalanx.training.data.vocabulary import Bytes, open_vocabulary


def test_a_token_as_large_as_the_vocabulary_or_below_0_is_refused(
    tmp_path: Path,
) -> None:
    corpora = corpus_of([11])  # of the tokens 0 to 10
    Batches(corpora, 11, 1, vocab=11).batch(0)
    with pytest.raises(
        DataError, match=r"holds the token 10; the vocabulary is 0 to 9"
    ):
        Batches(corpora, 11, 1, vocab=10).batch(0)
    megatron(tmp_path / "m", [[3, -1, 4], [5, 6]])
    corpus = open_corpus(tmp_path / "m.bin", share=0.0)
    with pytest.raises(
        DataError, match=r"holds the token -1; the vocabulary is 0 to 9"
    ):
        Batches((corpus,), 8, 1, vocab=10).batch(0)


def test_a_vocabulary_of_one_more_than_the_model_s_is_refused() -> None:
    corpora = (replace(corpus_of([9])[0], vocab=100),)
    Batches(corpora, 3, 1, vocab=100)
    with pytest.raises(
        DataError, match="a vocabulary of 100, but the model's is 99"
    ):
        Batches(corpora, 3, 1, vocab=99)


def test_bits_per_byte_are_those_of_the_held_out_parts() -> None:
    one, other = corpus_of([9], [4])[0], corpus_of([100], [12])[0]
    corpora = (
        replace(one, bytes_per_token=2.0),
        replace(other, bytes_per_token=6.0),
    )
    # 4 tokens of 2 bytes and 12 of 6: 80 bytes for 16 tokens.
    bits = Batches(corpora, 2, 1).bits_per_byte(math.log(2))
    assert bits == pytest.approx(16 / 80)
    assert (
        Batches((replace(one, bytes_per_token=None),), 2, 1).bits_per_byte(1.0)
        is None
    )


def test_the_bytes_of_a_token_are_those_of_the_held_out_part(
    tmp_path: Path,
) -> None:
    folder = prepared(tmp_path / "here" / "a")
    index = json.loads((folder / "index.json").read_text())
    index["splits"]["validation"]["text_bytes"] = (
        3 * index["splits"]["validation"]["tokens"]
    )
    (folder / "index.json").write_text(json.dumps(index))
    assert open_corpus(folder).bytes_per_token == 3.0


@pytest.mark.parametrize("answer", range(12))
def test_a_long_chat_is_kept_if_a_target_within_the_sequence_is_an_answer(
    answer: int,
) -> None:
    """Of a document of 12 tokens in sequences of 6, tokens 1 to 6 are targets."""
    plain = corpus_of([12, 4])[0]
    answers = np.zeros(16, np.uint8)
    answers[[answer, 14]] = 1
    train = Stream(plain.train.tokens, plain.train.starts, None, answers)
    for packing in ("bfd", "none"):
        batches = Batches(
            (replace(plain, train=train),), 6, 1, packing=packing
        )
        batch = [batches.batch(n)["targets"] for n in range(batches.sequences)]
        targets = sorted(
            int(x) for row in batch for x in row.flatten() if x >= 0
        )
        kept = 1 <= answer <= 6
        assert targets == ([answer, 14] if kept else [14])
        (notice,) = batches.notices
        assert f"{int(kept)} of 2 documents are longer" in notice
        assert ("1 more have no answer" in notice) != kept


def test_rows_keep_their_numbers_where_some_before_them_are_empty(
    tmp_path: Path,
) -> None:
    """The number is part of the name by which a document is held out."""
    pyarrow, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
    texts = [
        None if n % 3 == 1 else "" if n % 7 == 2 else f"row {n}"
        for n in range(60)
    ]
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    prepare(tmp_path / "a.parquet", tmp_path / "out", Bytes(), share=0.3)
    there = [n for n, text in enumerate(texts) if text]
    held = held_out([f"a.parquet:{n}" for n in there], 0.3)
    expected = [texts[n] for n, out in zip(there, held, strict=True) if out]
    stream = open_corpus(tmp_path / "out").validation
    edges = zip(stream.starts, stream.starts[1:], strict=False)
    assert [
        bytes(stream.read(a, b).tolist()).decode() for a, b in edges
    ] == expected


def test_files_are_read_by_name_folder_by_folder_and_hidden_ones_are_not(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "texts"
    for name, size in (
        ("a/z.txt", 3),
        ("a-b.txt", 1),
        ("b/a/x.txt", 2),
        ("c.txt", 0),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name} " * (size + 1))
    (folder / ".hidden.txt").write_text("hidden")
    (folder / ".git").mkdir()
    (folder / ".git" / "x.txt").write_text("hidden")
    prepare(folder, tmp_path / "out", Bytes(), share=0.0)
    stream = open_corpus(tmp_path / "out").train
    edges = zip(stream.starts, stream.starts[1:], strict=False)
    texts = [bytes(stream.read(a, b).tolist()).decode() for a, b in edges]
    assert [text.split()[0] for text in texts] == [
        "a/z.txt",
        "a-b.txt",
        "b/a/x.txt",
        "c.txt",
    ]


@pytest.mark.parametrize("end", ["\n", ""])
def test_a_line_is_named_by_its_number_however_far_it_is_in_the_file(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.training.data.sources.BLOCK", 64)
    rows = [json.dumps({"text": f"row {n}"}) for n in range(1, 40)]
    for number in (3, 20, 39):
        rows[number - 1] = "{"
    (tmp_path / "a.jsonl").write_text("\n".join(rows) + end)
    prepare(tmp_path / "a.jsonl", tmp_path / "out", Bytes(), share=0.0)
    named = (tmp_path / "out" / "skipped.txt").read_text().splitlines()
    assert [line.partition(": ")[0] for line in named] == [
        f"{tmp_path}/a.jsonl, line {number}" for number in (3, 20, 39)
    ]


def test_an_element_of_a_list_without_end_is_named_and_not_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = importlib.import_module("phalanx.training.data.sources")
    monkeypatch.setattr(sources, "BLOCK", 16)
    monkeypatch.setattr(sources, "LINE", 64)
    endless = f'[{{"text": "short"}}, {{"text": "{"x" * 999}'
    (tmp_path / "a.json").write_text(endless)
    prepare(tmp_path / "a.json", tmp_path / "out", Bytes(), share=0.0)
    (named,) = (tmp_path / "out" / "skipped.txt").read_text().splitlines()
    assert named.startswith(
        f"{tmp_path}/a.json, element 1: has no end within 64 characters"
    )


def test_offsets_of_documents_that_are_cut_under_a_run_are_named(
    tmp_path: Path,
) -> None:
    folder = prepared(tmp_path / "here" / "a")
    stream = open_corpus(folder).train
    stream.read_documents(0, 5)
    os.truncate(folder / "train.documents", 8)
    with pytest.raises(
        DataError, match=r"train\.documents: has 8 bytes, and had"
    ):
        stream.read_documents(0, 5)


def test_every_file_of_a_prepared_folder_is_verified(tmp_path: Path) -> None:
    folder = prepared(tmp_path / "here" / "a", answers=True)
    roles = {role for role, _ in open_corpus(folder).files}
    wrong = {
        each.partition(": its checksum")[0] for each in verify_prepared(folder)
    }
    assert wrong == {
        str(folder / role) for role in roles if role.endswith(".answers")
    }
    for role in roles:
        whole = (folder / role).read_bytes()
        (folder / role).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        try:
            assert any(role in each for each in verify_prepared(folder)), role
        finally:
            (folder / role).write_bytes(whole)


# ---- tokenizers


def _words(folder: Path, last: int = 6) -> Any:
    """A tokenizer of four words, the last of this id, and two that were added."""
    tokenizers = pytest.importorskip("tokenizers")
    folder.mkdir()
    model = tokenizers.models.WordLevel(
        {"a": 0, "b": 1, "c": last, "?": 2}, unk_token="?"
    )
    words = tokenizers.Tokenizer(model)
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(["<end>", "<turn>"])
    return words


# without a gap the added ones have the highest ids
@pytest.mark.parametrize("last", [3, 6])
def test_the_vocabulary_reaches_to_the_highest_id_also_of_added_tokens(
    last: int, tmp_path: Path
) -> None:
    words = _words(tmp_path / "words", last)
    words.save(str(tmp_path / "words" / "tokenizer.json"))
    highest = max(words.get_vocab(with_added_tokens=True).values())
    assert highest == max(last, 5)
    vocabulary = open_vocabulary(
        tmp_path / "words" / "tokenizer.json", "<turn>"
    )
    assert vocabulary.size == highest + 1
    assert vocabulary.end == words.token_to_id("<turn>")


def test_padding_and_truncation_of_a_tokenizer_do_not_change_documents(
    tmp_path: Path,
) -> None:
    words = _words(tmp_path / "words")
    words.enable_padding(length=9, pad_id=2)
    words.enable_truncation(2)
    words.save(str(tmp_path / "words" / "tokenizer.json"))
    made = open_vocabulary(tmp_path / "words" / "tokenizer.json").encode(
        b"a b ca b c a", np.array([5, 7])
    )
    assert made.tokens.tolist() == [0, 1, 6, 0, 1, 6, 0]
    assert made.lengths.tolist() == [3, 4]


@pytest.mark.parametrize("end, expected", [(1, 1), ([6, 0, 1], 6)])
def test_the_first_of_a_model_s_ends_closes_a_document(
    end: object, expected: int, tmp_path: Path
) -> None:
    """The others end a turn of a chat."""
    folder = tmp_path / "words"
    _words(folder).save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": end}))
    made = open_vocabulary(folder).encode(b"a", np.array([1]))
    assert made.tokens.tolist() == [0, expected]
