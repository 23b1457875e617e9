"""Text to token files, restartably: what is done is written down, and a second start goes on there.

Every few MiB the outputs are brought to the disk and `progress.json` says how long they are; a start
that finds it cuts the outputs to that length and continues with the next document.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ...layout.files import write_text
from ..folder import Fields, Folder
from .corpus import DataError, held_out
from .form import DTYPES, INDEX, SPLITS, dtype_for, write_index
from .sources import Document, Source, documents, find_sources
from .vocabulary import Vocabulary

__all__ = ["Progress", "prepare"]

PROGRESS = "progress.json"
LIMIT = 1 << 20
AT_ONCE = 1 << 20  # bytes of text that are made tokens together
BETWEEN = 16 << 20  # bytes of text between two marks of progress


@dataclass(frozen=True)
class Progress:
    """How far a preparation has come. `key` is of the sources and settings it was begun with."""

    key: str
    source: int = 0  # files that are done
    document: int = 0  # documents of the next one that are done
    read: int = 0  # bytes of text, over all
    tokens: tuple[int, int] = (0, 0)  # by split
    documents: tuple[int, int] = (0, 0)
    text: tuple[int, int] = (0, 0)  # bytes


def prepare(
    source: Path,
    out: Path,
    vocabulary: Vocabulary,
    *,
    share: float,
    field: str = "text",
    told: Callable[[int, int], None] = lambda done, total: None,
) -> Progress:
    """Write the token files of a text file or folder; `told` hears of bytes done, of how many.

    A folder that this has begun with the same sources is gone on with; a finished one stays.
    """
    sources = find_sources(source)
    key = _key(sources, vocabulary, share, field)
    done = _begun(out, key)
    if (out / INDEX).exists():
        return done
    total = sum(each.size for each in sources)
    with _Writer(out, done, vocabulary, share) as writer:
        for number in range(done.source, len(sources)):
            skip = writer.done.document
            found = documents(sources[number], field=field, alone=len(sources) == 1)
            before = sum(each.size for each in sources[:number])
            for batch in _batches(islice(found, skip, None)):
                writer.add(batch)
                told(min(before + writer.of_source, before + sources[number].size), total)
            writer.next_source()
        writer.mark()
        told(total, total)
        done = writer.done
    if not done.tokens[0]:
        raise DataError(f"{source} has no text to train on once {share:.0%} of it is held out.")
    text = dict(zip(SPLITS, done.text, strict=True))
    write_index(
        out, vocab=vocabulary.size, tokenizer=vocabulary.name, end=vocabulary.end, text_bytes=text
    )
    return done


def _batches(found: Iterator[Document]) -> Iterator[list[Document]]:
    batch, size = list[Document](), 0
    for document in found:
        batch.append(document)
        size += len(document.text)
        if size >= AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _key(sources: list[Source], vocabulary: Vocabulary, share: float, field: str) -> str:
    said = [[s.name, s.size, s.changed] for s in sources]
    settings = [said, vocabulary.name, vocabulary.end, share, field]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()


def _begun(out: Path, key: str) -> Progress:
    """What was begun here; a fresh start where nothing was."""
    out.mkdir(parents=True, exist_ok=True)
    if not (out / PROGRESS).exists():
        if any(not each.name.startswith(".") for each in out.iterdir()):
            raise DataError(f"{out} holds something else; choose an empty or new folder.")
        # At once, so that a start that is stopped before its first mark can be gone on with.
        write_text(out / PROGRESS, json.dumps(asdict(Progress(key))) + "\n", durable=True)
    done = _parse(Folder(out, DataError).json(PROGRESS, LIMIT))
    if done.key != key:
        raise DataError(
            f"{out} was begun from other sources or with other settings;"
            " choose another folder, or remove this one."
        )
    return done


def _parse(said: Fields) -> Progress:
    def pair(key: str) -> tuple[int, int]:
        first, second = said.wholes(key, 2)
        return first, second

    return Progress(
        said.text("key"), said.whole("source"), said.whole("document"), said.whole("read"),
        pair("tokens"), pair("documents"), pair("text"),
    )  # fmt: skip


class _Writer:
    """The four output files, as far as progress tells, and from there on."""

    def __init__(self, out: Path, done: Progress, vocabulary: Vocabulary, share: float) -> None:
        self.out, self.done, self.vocabulary, self.share = out, done, vocabulary, share
        self.dtype = DTYPES[dtype_for(vocabulary.size)]
        self.of_source = 0
        self.marked = done.read
        self.files: list[tuple[BinaryIO, BinaryIO]] = []

    def __enter__(self) -> _Writer:
        for split, name in enumerate(SPLITS):
            tokens = self._cut(f"{name}.tokens", self.done.tokens[split] * self.dtype.itemsize)
            count = self.done.documents[split]
            ends = self._cut(f"{name}.documents", 8 * (count + 1) if count else 0)
            if not count:
                ends.write(np.zeros(1, "<i8").tobytes())
            self.files.append((tokens, ends))
        return self

    def _cut(self, name: str, size: int) -> BinaryIO:
        path = self.out / name
        file = path.open("r+b" if path.exists() else "w+b")
        if path.stat().st_size < size:
            raise DataError(
                f"{path} is shorter than {PROGRESS} says; remove {self.out} and begin anew."
            )
        file.truncate(size)
        file.seek(size)
        return file

    def __exit__(self, *_: object) -> None:
        for pair in self.files:
            for file in pair:
                file.close()

    def add(self, batch: list[Document]) -> None:
        """Append documents, each to its part; now and then mark the progress."""
        counts = [list(each) for each in (self.done.tokens, self.done.documents, self.done.text)]
        encoded = self.vocabulary.encode([document.text for document in batch])
        for document, found in zip(batch, encoded, strict=True):
            split = int(held_out(document.name, self.share))
            tokens, ends = self.files[split]
            tokens.write(found.astype(self.dtype).tobytes())
            for count, more in zip(counts, (len(found), 1, len(document.text)), strict=True):
                count[split] += more
            ends.write(np.array([counts[0][split]], "<i8").tobytes())
        size = sum(len(document.text) for document in batch)
        self.of_source += size
        self.done = replace(
            self.done,
            document=self.done.document + len(batch),
            read=self.done.read + size,
            tokens=(counts[0][0], counts[0][1]),
            documents=(counts[1][0], counts[1][1]),
            text=(counts[2][0], counts[2][1]),
        )
        if self.done.read - self.marked >= BETWEEN:
            self.mark()

    def next_source(self) -> None:
        self.of_source = 0
        self.done = replace(self.done, source=self.done.source + 1, document=0)

    def mark(self) -> None:
        """Bring all to the disk, then say so: never the other way round."""
        for pair in self.files:
            for file in pair:
                file.flush()
                os.fsync(file.fileno())
        self.marked = self.done.read
        write_text(self.out / PROGRESS, json.dumps(asdict(self.done)) + "\n", durable=True)
