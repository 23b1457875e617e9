"""Token files: text in, the same text out; other projects' files; what a stopped start leaves; files
that lie."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from phalanx.cli.data import run
from phalanx.cli.usage import UsageError
from phalanx.training.data.prepare import prepare
from phalanx.training.data.token_files import (
    Corpus,
    DataError,
    Stream,
    open_corpus,
    verify_prepared,
)
from phalanx.training.data.vocabulary import Bytes, open_vocabulary

TEXTS = {
    f"{n:02}.txt": f"This is document {n}. " * (n + 1) + "ünïcode\n"
    for n in range(60)
}


@pytest.fixture
def books(tmp_path: Path) -> Path:
    folder = tmp_path / "books"
    (folder / "below").mkdir(parents=True)
    for n, (name, text) in enumerate(TEXTS.items()):
        (folder / ("below" if n % 3 == 0 else ".") / name).write_text(text)
    return folder


def texts(stream: Stream) -> list[bytes]:
    return [
        bytes(stream.read(int(a), int(b)).tolist())
        for a, b in zip(stream.starts, stream.starts[1:], strict=False)
        if a < b
    ]


def both(corpus: Corpus) -> list[bytes]:
    return sorted(texts(corpus.train) + texts(corpus.validation))


def made(source: Path, out: Path, share: float = 0.2) -> Corpus:
    prepare(source, out, Bytes(), share=share)
    assert verify_prepared(out) == []
    return open_corpus(out)


def test_a_folder_of_texts_comes_back_document_by_document(
    books: Path, tmp_path: Path
) -> None:
    corpus = made(books, tmp_path / "out")
    assert both(corpus) == sorted(text.encode() for text in TEXTS.values())
    assert 3 <= len(corpus.validation.starts) - 1 <= 25
    assert corpus.bytes_per_token == 1.0


def test_what_is_held_out_is_decided_by_the_name_and_not_by_the_place(
    books: Path, tmp_path: Path
) -> None:
    one = made(books, tmp_path / "one")
    books.rename(tmp_path / "moved")
    other = made(tmp_path / "moved", tmp_path / "other")
    assert texts(one.validation) == texts(other.validation)
    assert one.fingerprint == other.fingerprint


def test_json_lines_and_parquet_hold_a_document_each_line_and_row(
    tmp_path: Path,
) -> None:
    said = list(TEXTS.values())
    lines = tmp_path / "a.jsonl"
    lines.write_text(
        "".join(json.dumps({"body": text}) + "\n\n" for text in said)
    )
    prepare(lines, tmp_path / "lines", Bytes(), share=0.2, field="body")
    assert both(open_corpus(tmp_path / "lines")) == sorted(
        t.encode() for t in said
    )
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(
        pyarrow.table({"body": [*said, None]}), tmp_path / "a.parquet"
    )
    prepare(
        tmp_path / "a.parquet",
        tmp_path / "rows",
        Bytes(),
        share=0.2,
        field="body",
    )
    assert both(open_corpus(tmp_path / "rows")) == sorted(
        t.encode() for t in said
    )


def test_one_long_text_is_cut_at_line_ends_so_that_some_is_held_out(
    tmp_path: Path,
) -> None:
    text = "".join(f"line {n} of a long text\n" for n in range(20_000))
    (tmp_path / "long.txt").write_text(text)
    corpus = made(tmp_path / "long.txt", tmp_path / "out", 0.05)
    assert corpus.validation.size > 1000
    assert all(part.endswith(b"\n") for part in both(corpus))
    assert corpus.train.size + corpus.validation.size == len(text)


class Power(RuntimeError):
    """It went off."""


@pytest.mark.parametrize("after", [1, 2, 3, 9])
def test_a_preparation_goes_on_where_it_was_stopped(
    books: Path, tmp_path: Path, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("phalanx.training.data.prepare")
    monkeypatch.setattr(module, "BETWEEN", 1500)
    monkeypatch.setattr(
        importlib.import_module("phalanx.training.data.sources"), "BLOCK", 400
    )
    big = books / "many.jsonl"
    big.write_text(
        "".join(json.dumps({"text": t}) + "\n" for t in TEXTS.values())
    )
    undisturbed = made(books, tmp_path / "whole")
    out = tmp_path / "out"
    marks = 0
    plain = module.write_text

    def off(path: Path, text: str, **options: bool) -> None:
        nonlocal marks
        marks += 1
        if marks == after:
            raise Power
        plain(path, text, **options)

    monkeypatch.setattr(module, "write_text", off)
    with pytest.raises(Power):
        prepare(books, out, Bytes(), share=0.2)
    assert not (out / "index.json").exists()
    monkeypatch.setattr(module, "write_text", plain)
    encoded: list[int] = []

    class Counting(Bytes):
        def encode(self, raw, lengths):  # type: ignore[no-untyped-def]
            encoded.append(len(lengths))
            return super().encode(raw, lengths)

    prepare(books, out, Counting(), share=0.2)
    assert (out / "index.json").read_text() == (
        tmp_path / "whole" / "index.json"
    ).read_text()
    assert both(open_corpus(out)) == both(undisturbed)
    assert (sum(encoded) < 120) == (after > 2), "what was done is done again"
    again = len(encoded)
    prepare(books, out, Counting(), share=0.2)
    assert len(encoded) == again, "a finished preparation does nothing"
    with pytest.raises(
        DataError, match="other sources or with other settings"
    ):
        prepare(books, out, Bytes(), share=0.3)


def test_a_tokenizer_json_gives_its_tokens_and_closes_documents(
    books: Path, tmp_path: Path
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.BPE())
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False
    )
    words.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<end>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    words.train_from_iterator(TEXTS.values(), trainer)
    words.save(str(tmp_path / "tokenizer.json"))
    vocabulary = open_vocabulary(tmp_path / "tokenizer.json", "<end>")
    prepare(books, tmp_path / "out", vocabulary, share=0.2)
    corpus = open_corpus(tmp_path / "out")
    assert corpus.vocab == words.get_vocab_size()
    assert corpus.train.tokens.dtype == np.uint16
    ends = corpus.train.starts.tolist()
    for start, stop in itertools.pairwise(ends):
        tokens = corpus.train.read(start, stop).tolist()
        assert tokens[-1] == words.token_to_id("<end>")
        assert words.decode(tokens[:-1]) in TEXTS.values()
    assert corpus.bytes_per_token is not None
    assert 1.5 < corpus.bytes_per_token < 30
    with pytest.raises(DataError, match="has no token 'none'"):
        open_vocabulary(tmp_path / "tokenizer.json", "none")


# ---- other projects' files


def test_nanogpt_and_llm_c_files_are_read_as_they_are(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 50_000, 300_000)
    tokens.astype("<u2").tofile(tmp_path / "train.bin")
    tokens[:999].astype("<u2").tofile(tmp_path / "val.bin")
    pair = open_corpus(tmp_path)
    assert pair.train.read(0, 300_000).tolist() == tokens.tolist()
    assert pair.validation.size == 999
    single = open_corpus(tmp_path / "train.bin", share=0.5)
    assert single.train.size + single.validation.size == 300_000
    assert single.validation.size > 0
    for magic, version, dtype in ((20240520, 1, "<u2"), (20240801, 7, "<u4")):
        head = np.zeros(256, "<i4")
        head[:3] = magic, version, 300_000
        (tmp_path / "c.bin").write_bytes(
            head.tobytes() + tokens.astype(dtype).tobytes()
        )
        found = open_corpus(tmp_path / "c.bin", share=0.0)
        assert found.train.read(0, 300_000).tolist() == tokens.tolist()


def megatron(
    path: Path, documents: list[list[int]], code: int = 4, dtype: str = "<i4"
) -> None:
    """As Megatron-LM's IndexedDatasetBuilder writes: a sequence is a document."""
    np.concatenate([np.array(d, dtype) for d in documents]).tofile(
        path.with_suffix(".bin")
    )
    lengths = np.array([len(d) for d in documents], "<i4")
    pointers = (np.cumsum(lengths) - lengths).astype("<i8") * np.dtype(
        dtype
    ).itemsize
    path.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(documents), len(documents) + 1)
        + lengths.tobytes() + pointers.tobytes() + np.arange(len(documents) + 1).astype("<i8").tobytes()
    )  # fmt: skip


def test_megatron_files_are_read_document_by_document(tmp_path: Path) -> None:
    documents = [[n] * (n % 7 + 1) for n in range(200)]
    for code, dtype in ((4, "<i4"), (8, "<u2"), (5, "<i8"), (1, "u1")):
        megatron(tmp_path / "m", documents, code, dtype)
        for name in ("m.bin", "m.idx"):
            corpus = open_corpus(tmp_path / name, share=0.2)
            assert both(corpus) == sorted(bytes(d) for d in documents)
            assert len(corpus.validation.starts) > 10


# ---- files that lie


def _index(out: Path, **changed: object) -> None:
    said = json.loads((out / "index.json").read_text())
    (out / "index.json").write_text(json.dumps(said | changed))


def _splits(out: Path, **changed: object) -> None:
    said = json.loads((out / "index.json").read_text())["splits"]
    said["train"] |= changed
    _index(out, splits=said)


def _linked(out: Path) -> None:
    (out.parent / "secret").write_bytes((out / "train.tokens").read_bytes())
    (out / "train.tokens").unlink()
    (out / "train.tokens").symlink_to(out.parent / "secret")


def _piped(out: Path) -> None:
    (out / "train.tokens").unlink()
    os.mkfifo(out / "train.tokens")


def _offsets(out: Path) -> None:
    offsets = np.fromfile(out / "train.documents", "<i8")
    offsets[1] = 1 << 60
    offsets.tofile(out / "train.documents")


LIES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no JSON": (
        lambda out: (out / "index.json").write_text("{"),
        "is not JSON",
    ),
    "a list": (
        lambda out: (out / "index.json").write_text("[]"),
        "is not a JSON object",
    ),
    "deep": (
        lambda out: (out / "index.json").write_text("[" * 200_000),
        "more than 32 deep",
    ),
    "huge index": (
        lambda out: (out / "index.json").write_text(" " * (2 << 20)),
        "at most",
    ),
    "no text": (
        lambda out: (out / "index.json").write_bytes(b"\x80\x04."),
        "not text",
    ),
    "other format": (lambda out: _index(out, format="pickle"), "this reads"),
    "newer": (lambda out: _index(out, version=2), "of version 1"),
    "dtype": (lambda out: _index(out, dtype="O"), 'dtype = "O" is unknown'),
    "vocabulary": (lambda out: _index(out, vocab=70_000), "cannot name 70000"),
    "true": (lambda out: _index(out, vocab=True), "Write a whole number"),
    "no splits": (
        lambda out: _index(out, splits=None),
        "splits = null is nothing",
    ),
    "count": (
        lambda out: _splits(out, tokens=1 << 61),
        "numbers of uint8 are",
    ),
    "negative": (lambda out: _splits(out, tokens=-1), "out of bounds"),
    "truncated": (
        lambda out: os.truncate(out / "train.tokens", 10),
        "has 10 bytes",
    ),
    "gone": (lambda out: (out / "train.documents").unlink(), "No such file"),
    "link": (_linked, "link out of its folder"),
    "pipe": (_piped, "not a regular file"),
    "offsets": (_offsets, "offsets must rise"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_prepared_folder_that_lies_is_refused(
    books: Path, tmp_path: Path, lie: str
) -> None:
    out = tmp_path / "out"
    made(books, out)
    change, words = LIES[lie]
    change(out)
    with pytest.raises(DataError, match=words):
        open_corpus(out)


def test_a_flipped_bit_is_found_by_verify(
    books: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    made(books, out)
    with (out / "train.tokens").open("r+b") as file:
        file.seek(100)
        file.write(b"\xff")
    assert run(["verify", str(out)]) == 1
    assert "train.tokens: its checksum" in capsys.readouterr().out


def test_other_projects_files_that_lie_are_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"abc")
    with pytest.raises(DataError, match="are a multiple of 2"):
        open_corpus(tmp_path / "odd.bin")
    head = np.zeros(256, "<i4")
    head[:3] = 20240520, 1, 1 << 30
    (tmp_path / "c.bin").write_bytes(head.tobytes() + b"1234")
    with pytest.raises(DataError, match="numbers of uint16 are"):
        open_corpus(tmp_path / "c.bin")
    documents = [[1, 2], [3]]
    megatron(tmp_path / "m", documents)
    good = (tmp_path / "m.idx").read_bytes()
    for at, new, words in (
        (0, b"pickle", "no Megatron index"),
        (9, b"\x07", "has version 7"),
        (17, b"\x06", "dtype 6"),
        (18, b"\xff" * 7, "would be right"),
        (34, b"\x09", "numbers of int32 are"),
        (42, b"\x04", "do not follow"),
        (58, b"\x01", "must rise"),
    ):
        (tmp_path / "m.idx").write_bytes(
            good[:at] + new + good[at + len(new) :]
        )
        with pytest.raises(DataError, match=words):
            open_corpus(tmp_path / "m.bin")


def test_a_source_that_is_a_link_out_of_its_folder_is_refused(
    tmp_path: Path,
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.txt").symlink_to("/etc/hostname")
    with pytest.raises(DataError, match="link out of its folder"):
        prepare(source, tmp_path / "out", Bytes(), share=0.1)


def test_the_command_prepares_and_shows(
    books: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert (
        run(
            [
                "prepare",
                str(books),
                "--out",
                out,
                "--held-out",
                "0.2",
                "--json",
            ]
        )
        == 0
    )
    said = json.loads(capsys.readouterr().out)
    assert said["train"]["documents"] + said["validation"]["documents"] == 60
    assert run(["show", "python"]) == 0
    assert "vocabulary of 256" in capsys.readouterr().out
    with pytest.raises(UsageError, match="required: --out"):
        run(["prepare", str(books)])
    with pytest.raises(DataError, match="is not there"):
        run(["show", str(tmp_path / "nothing")])
