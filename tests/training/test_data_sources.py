"""Every kind of file gives the same documents; what cannot be read is named with its place, and nothing
else is lost."""

from __future__ import annotations

import gzip
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from phalanx.training.data.prepare import Prepared, prepare
from phalanx.training.data.token_files import (
    Corpus,
    DataError,
    Stream,
    open_corpus,
)
from phalanx.training.data.vocabulary import Bytes, open_vocabulary

TEXTS = [
    f"Document {n}: " + 'ünï😀 "quoted"\t\\ \n' * (n % 5) + "end"
    for n in range(70)
]
LINES = "".join(
    json.dumps({"text": text, "n": 1}) + "\n" for text in TEXTS
).encode()


def texts(stream: Stream) -> list[str]:
    edges = zip(stream.starts, stream.starts[1:], strict=False)
    return [
        bytes(stream.read(int(a), int(b)).tolist()).decode() for a, b in edges
    ]


def both(corpus: Corpus) -> list[str]:
    return sorted(texts(corpus.train) + texts(corpus.validation))


def made(source: Path, **how: Any) -> tuple[Corpus, Prepared]:
    out = source.parent / f"{source.name}.tokens"
    done = prepare(source, out, Bytes(), share=0.2, **how)
    return open_corpus(out), done


def _parquet(path: Path, **columns: Any) -> None:
    parquet.write_table(pyarrow.table(columns), path, row_group_size=9)


def dataset(**columns: Any) -> Any:
    import datasets  # half a second, which only a process that runs these tests takes

    return datasets.Dataset.from_dict(columns)


WRITERS: dict[str, Callable[[Path], object]] = {
    "a.jsonl": lambda path: path.write_bytes(LINES),
    "a.jsonl.gz": lambda path: path.write_bytes(
        gzip.compress(LINES[:900]) + gzip.compress(LINES[900:])
    ),
    "a.jsonl.zst": lambda path: path.write_bytes(
        zstandard.compress(LINES[:900]) + zstandard.compress(LINES[900:])
    ),
    "a.json": lambda path: path.write_text(
        json.dumps([{"text": t} for t in TEXTS], indent=2)
    ),
    "a.json.gz": lambda path: path.write_bytes(
        gzip.compress(json.dumps([{"text": t} for t in TEXTS]).encode())
    ),
    "lines.json": lambda path: path.write_bytes(LINES),
    "a.parquet": lambda path: _parquet(path, n=[1] * 70, text=TEXTS),
    "large.parquet": lambda path: _parquet(
        path, text=pyarrow.array(TEXTS, "large_string")
    ),
    "words.parquet": lambda path: _parquet(
        path, text=pyarrow.array(TEXTS).dictionary_encode()
    ),
    "saved": lambda path: dataset(n=[1] * 70, text=TEXTS).save_to_disk(
        path, num_shards=3
    ),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_its_documents(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        importlib.import_module("phalanx.training.data.sources"), "BLOCK", 700
    )
    WRITERS[name](tmp_path / name)
    corpus, done = made(tmp_path / name)
    assert both(corpus) == sorted(TEXTS)
    assert corpus.validation.size > 0
    assert (done.skipped, done.empty, done.form) == (0, 0, "text (text)")
    assert done.block > 2


def test_lines_are_read_alike_with_pyarrow_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = importlib.import_module("phalanx.training.data.rows")
    (tmp_path / "a.jsonl").write_bytes(LINES)
    made(tmp_path / "a.jsonl")
    monkeypatch.setattr(rows, "_lines_as_table", lambda block, form: None)
    (tmp_path / "a.jsonl").rename(tmp_path / "other.jsonl")
    prepare(tmp_path / "other.jsonl", tmp_path / "out", Bytes(), share=0.0)
    assert both(open_corpus(tmp_path / "out")) == sorted(TEXTS)
    assert both(open_corpus(tmp_path / "a.jsonl.tokens")) == sorted(TEXTS)


def test_datasets_with_splits_train_on_train_hold_out_validation_and_leave_test_alone(
    tmp_path: Path,
) -> None:
    import datasets

    parts = {
        name: [f"{name} {n}" for n in range(9)]
        for name in ("train", "validation", "test")
    }
    split = {name: dataset(text=x) for name, x in parts.items()}
    datasets.DatasetDict(split).save_to_disk(tmp_path / "dict")
    corpus, _ = made(tmp_path / "dict")
    assert texts(corpus.train) == parts["train"]
    assert texts(corpus.validation) == parts["validation"]


def test_rows_with_nothing_in_them_are_counted_and_not_read(
    tmp_path: Path,
) -> None:
    _parquet(tmp_path / "a.parquet", text=["a", None, "b", "", None])
    (tmp_path / "b.jsonl").write_text(
        '{"text": null}\n{"text": "a"}\n\n{"text": ""}\n'
    )
    for name, left, empty in (
        ("a.parquet", ["a", "b"], 3),
        ("b.jsonl", ["a"], 2),
    ):
        source = tmp_path / name
        done = prepare(source, tmp_path / f"{name}.out", Bytes(), share=0.0)
        assert both(open_corpus(tmp_path / f"{name}.out")) == left
        assert (done.empty, done.skipped) == (empty, 0)


def _cut_parquet(path: Path) -> None:
    _parquet(path, text=TEXTS)
    path.write_bytes(path.read_bytes()[:-9])


def _not_utf8(path: Path) -> None:
    offsets = pyarrow.py_buffer(np.array([0, 1, 2, 3], "<i4").tobytes())
    values = pyarrow.py_buffer(b"a\xffb")
    column = pyarrow.Array.from_buffers(
        pyarrow.string(), 3, [None, offsets, values]
    )
    batch = pyarrow.record_batch([column], ["text"])
    with (
        pyarrow.OSFile(str(path), "wb") as sink,
        pyarrow.ipc.new_stream(sink, batch.schema) as to,
    ):
        to.write_batch(batch)


# A file, what comes of it all the same, and how its fault is named.
BAD: dict[str, tuple[bytes | Callable[[Path], object], list[str], str]] = {
    "b.jsonl": (b'{"text": "1"}\n{"text": \n{"text": "3"}\n', ["1", "3"], ", line 2: is not JSON"),
    "c.jsonl": (b'{"text": "1"}\n{"txt": "2"}\n', ["1"], ", line 2: has no 'text'; it has 'txt'"),
    "d.jsonl": (b'{"text": "1"}\n{"text": 2}\n', ["1"], ", line 2: 'text' is not text"),
    "e.jsonl": (b'{"text": "1"}\n[2]\n', ["1"], ", line 2: is not an object"),
    "f.jsonl": (b'{"text": "a\\ud800"}\n{"text": "2"}\n', ["2"], ", line 1: character 1 is half"),
    "g.jsonl": (b'{"text": "1"}\n{"text": "a\xff"}\n', ["1"], ", line 2: is not JSON: byte 11"),
    "h.jsonl": (b'{"text": "1", "n": "\xff"}\n{"text": "2"}\n', ["2"], ", line 1: is not JSON: byte"),
    "i.jsonl": (b'{"text": "1"} {"text": "2"}\n{"text": "3"}\n', ["3"], ", line 1: is not JSON"),
    "j.jsonl": (b"[" * 100_000 + b'\n{"text": "2"}\n', ["2"], ", line 1: is not JSON"),
    "k.jsonl.gz": (gzip.compress(LINES)[:-30], [], ": is truncated: its compressed content has no end"),
    "l.jsonl.zst": (zstandard.compress(LINES)[:-9], [], ": is truncated"),
    "m.jsonl.gz": (b"not gzip at all", [], ": is damaged"),
    "n.json": (b'[{"text": "1"}, {"text": "2"}, {"te', ["1", "2"], ", element 2: is not JSON"),
    "o.json": (b'{\n"text": "1"\n}', [], ": is one object of JSON over many lines"),
    "p.json": (b"5", [], ": is not a JSON array"),
    "q.json": (b'[{"text": "1"}, 7]', ["1"], ", element 1: is not an object"),
    "r.csv": (b"text\nhello\n", [], ": is a table that is not read"),
    "s.txt": ("söme".encode("latin-1"), [], ": byte 1 of document 0 (0xf6) is not UTF-8"),
    "t.png": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", [], ": is not text: it has bytes of zero"),
    "u.parquet": (_cut_parquet, [], ", row 0: cannot be read"),
    "v.parquet": (lambda path: _parquet(path, body=["1"]), [], ": has no column 'text'; it has body"),
    "w.parquet": (lambda path: _parquet(path, text=[1, 2]), [], ", row 0: 'text' is not text"),
    "x.arrow": (_not_utf8, ["a", "b"], ", row 1: byte 0 of a text is not UTF-8"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad") / "sources"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(LINES)
    for name, (content, _, _) in BAD.items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            content(folder / name)
    (folder / "z.txt").write_text("the last one")
    return folder


def test_bad_files_and_rows_are_left_out_and_named_and_nothing_else_is(
    folder: Path,
) -> None:
    corpus, done = made(folder)
    good = [text for _, rows, _ in BAD.values() for text in rows]
    # What a cut file still has before its end is good.
    left = [text for text in both(corpus) if text not in TEXTS]
    assert left == sorted([*good, "the last one"])
    assert set(TEXTS) <= set(both(corpus))
    named = (
        (folder.parent / "sources.tokens" / "skipped.txt")
        .read_text()
        .splitlines()
    )
    assert len(named) == done.skipped == len(BAD) + 1  # both rows of w.parquet
    for name, (_, _, words) in BAD.items():
        assert any(
            line.startswith(f"{folder / name}{words}") for line in named
        ), (
            name,
            named,
        )


@pytest.mark.parametrize("name", BAD)
def test_a_run_that_refuses_stops_at_the_first_bad_place(
    name: str, folder: Path
) -> None:
    lone = folder.parent / f"only {name}"
    lone.mkdir()
    (lone / name).write_bytes((folder / name).read_bytes())
    (lone / "z.jsonl").write_bytes(LINES)
    with pytest.raises(DataError) as caught:
        made(lone, skip=False)
    assert str(caught.value).startswith(f"{lone / name}{BAD[name][2]}")
    assert "--on-bad skip" in str(caught.value)


def test_what_cannot_be_read_at_all_is_refused_with_its_first_place(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(
        DataError, match=r"nothing to train on: 1 places.*a.txt: byte 0"
    ):
        made(tmp_path / "a.txt")
    (tmp_path / "b.jsonl").write_text('{"text": "a", "messages": [1]}')
    with pytest.raises(
        DataError, match=r"has text and messages\. Choose one with --field"
    ):
        made(tmp_path / "b.jsonl")


def test_long_lines_are_cut_and_never_within_a_character(
    tmp_path: Path,
) -> None:
    text = "aé😀" * 3000
    (tmp_path / "a.txt").write_text(text)
    corpus, done = made(tmp_path / "a.txt")
    assert done.skipped == 0
    assert sum(done.documents) > 10
    assert "".join(both(corpus)).count("😀") == 3000
    assert corpus.train.size + corpus.validation.size == len(text.encode())


def test_a_byte_order_mark_is_no_character_of_the_text(tmp_path: Path) -> None:
    for name, content in (
        ("a.txt", b"hello"),
        ("a.jsonl", b'{"text": "hello"}'),
    ):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content)
        prepare(tmp_path / name, tmp_path / f"{name}.out", Bytes(), share=0.0)
        assert both(open_corpus(tmp_path / f"{name}.out")) == ["hello"]


def test_several_processes_write_the_same_files(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        importlib.import_module("phalanx.training.data.prepare"), "WORTH", 1
    )
    for workers in (1, 2):
        prepare(
            folder,
            tmp_path / str(workers),
            Bytes(),
            share=0.2,
            workers=workers,
        )
    for path in (tmp_path / "1").iterdir():
        assert (
            path.read_bytes() == (tmp_path / "2" / path.name).read_bytes()
        ), path.name


@pytest.mark.parametrize(
    "name, package",
    [
        ("a.parquet", "pyarrow"),
        ("a.jsonl.zst", "zstandard"),
        ("tokenizer.json", "tokenizers"),
    ],
)
def test_a_package_that_is_missing_is_named_with_what_installs_it(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_bytes(LINES)
    plain = importlib.import_module

    def without(module: str, *more: Any) -> Any:
        if module.partition(".")[0] == package:
            raise ImportError(module)
        return plain(module, *more)

    monkeypatch.setattr(importlib, "import_module", without)
    read = open_vocabulary if package == "tokenizers" else made
    with pytest.raises(DataError, match=f"pip install {package}"):
        read(tmp_path / name)


def test_a_saved_folder_may_not_name_files_elsewhere(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    dataset(text=TEXTS).save_to_disk(saved)
    state = json.loads((saved / "state.json").read_text())
    for name in ("../secret.arrow", "/etc/passwd", 7):
        state["_data_files"] = [{"filename": name}]
        (saved / "state.json").write_text(json.dumps(state))
        with pytest.raises(DataError, match=r"not plain|cannot be opened"):
            made(saved)


def test_raw_tokens_of_32_bits_are_read_as_such_and_never_as_16(
    tmp_path: Path,
) -> None:
    tokens = np.random.default_rng(0).integers(0, 120_000, 5000)
    tokens.astype("<u4").tofile(tmp_path / "a.uint32")
    stream = open_corpus(tmp_path / "a.uint32", share=0.0).train
    assert stream.read(0, 5000).tolist() == list(tokens)
    (tmp_path / "a.uint32").rename(tmp_path / "a.bin")
    with pytest.raises(
        DataError, match=r"every second number is below 8.*Name it \.uint32"
    ):
        open_corpus(tmp_path / "a.bin")
    (tmp_path / "odd.uint32").write_bytes(b"123456")
    with pytest.raises(DataError, match="a multiple of 4"):
        open_corpus(tmp_path / "odd.uint32")
