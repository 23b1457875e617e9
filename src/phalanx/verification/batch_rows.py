"""Rows of a trial's batches, compared with the documents that they were cut from.

Ranks and the one process read the same batches, so a mistake in a batch shows in
neither. Here each row is matched with documents: the source of its tokens, the next token
and the position of each. The files are read by numpy alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from ..training.data.batches import Batch, Batches
from ..training.data.token_files import ANSWERS, SPLITS

NO_TARGET = -100  # torch's ignore_index
NO_DOCUMENT = -1

# One row of a batch: for each name, a number per token.
Row = dict[str, list[int]]


@dataclass(frozen=True)
class Text:
    """Tokens that a row may run through: a document, or all of them where rows run on
    from one document into the next. `trained` marks tokens that may be targets."""

    tokens: list[int]
    trained: list[bool]


@dataclass(frozen=True)
class TextSpan:
    """Neighbouring tokens of a text in a row: `length` of them, the first at `start` of
    the text and at `place` of the row."""

    text: int
    start: int
    place: int
    length: int


class WrongRow(Exception):
    """Raised for a row that no documents explain; the message says where."""


def batch_faults(
    folder: Path, batches: Batches, steps: int, *, chats: bool
) -> Iterator[str]:
    """Describe mistakes in the batches of `steps` steps and in the held-out ones.

    `folder` holds the documents. Chats are packed as whole documents by default, and
    other text runs on.
    """
    wrapped = (batches.packing or ("bfd" if chats else "wrapped")) == "wrapped"
    trained = [
        row for step in range(steps) for row in rows_of(batches.batch(step))
    ]
    held = [
        row
        for index in range(batches.validations)
        for row in rows_of(batches.validation(index))
    ]
    for split, rows in zip(SPLITS, (trained, held), strict=True):
        texts = texts_of(folder, split, whole=wrapped and not batches.masks)
        reader = RowReader(texts, batches.masks, wrapped, batches.sequence)
        try:
            read = [reader.spans(row) for row in rows]
        except WrongRow as wrong:
            yield f"a batch of the {split} part: {wrong}"
            continue
        # An epoch shows each sequence once; the held-out part is one epoch.
        epoch = batches.sequences if split == SPLITS[0] else len(read)
        if len(read) >= epoch:
            yield from reader.epoch_faults(read[:epoch], split)


def rows_of(batch: Batch) -> list[Row]:
    """Return the rows of a batch as lists of numbers."""
    lists = {name: x.tolist() for name, x in batch.items()}
    return [
        {name: rows[n] for name, rows in lists.items()}
        for n in range(len(lists["tokens"]))
    ]


def texts_of(folder: Path, split: str, *, whole: bool) -> list[Text]:
    """Return the documents of a part, or all of them as a single text if `whole`."""
    tokens = np.fromfile(folder / f"{split}.tokens", "<u2").tolist()
    starts = np.fromfile(folder / f"{split}.documents", "<i8").tolist()
    answers = folder / f"{split}.{ANSWERS}"
    trained = (
        np.fromfile(answers, "u1").astype(bool).tolist()
        if answers.exists()
        else [True] * len(tokens)
    )
    if whole:
        starts = [0, len(tokens)]
    return [
        Text(tokens[start:end], trained[start:end])
        for start, end in pairwise(starts)
    ]


class RowReader:
    """Explains the rows of one part. `wrapped` rows may begin within a text, others
    hold whole documents or their first `sequence` tokens."""

    def __init__(
        self,
        texts: Sequence[Text],
        masks: bool,
        wrapped: bool,
        sequence: int,
    ) -> None:
        self.texts, self.masks = texts, masks
        self.wrapped, self.sequence = wrapped, sequence

    def spans(self, row: Row) -> list[TextSpan]:
        """Return the spans that explain a row; raise `WrongRow` if a number differs."""
        found: list[TextSpan] = []
        place = 0
        while place < self.sequence and self._holds_text(row, place):
            span = self._span(row, place)
            self._compare(row, span)
            found.append(span)
            place += span.length
        padding = {
            "tokens": 0,
            "targets": NO_TARGET,
            "positions": 0,
            "documents": NO_DOCUMENT,
        }
        for name, value in padding.items():
            for other in row.get(name, ())[place:]:
                if other != value:
                    raise WrongRow(f"padding has {other} in its {name}")
        return found

    def _holds_text(self, row: Row, place: int) -> bool:
        """True if a token is no padding."""
        if self.masks:
            return row["documents"][place] != NO_DOCUMENT
        # Without numbers of documents, padding is what nothing follows.
        later = row["targets"][place:], row["positions"][place:]
        return any(x != NO_TARGET for x in later[0]) or any(later[1])

    def _span(self, row: Row, place: int) -> TextSpan:
        """Return the text whose tokens begin at this place of the row."""
        numbers: Sequence[int] = range(len(self.texts))
        if self.masks:
            own = row["documents"][place]
            if not 0 <= own < len(self.texts):
                raise WrongRow(
                    f"token {place} of a row has document {own}, and there are {len(self.texts)}"
                )
            numbers = [own]
        tokens = row["tokens"][place:]
        for number in numbers:
            text = self.texts[number].tokens
            # Only the first span of a row begins within its text.
            cut = self.wrapped and place == 0
            for start in range(len(text) if cut else 1):
                part = text[start : start + len(tokens)]
                if tokens[: len(part)] == part:
                    return TextSpan(number, start, place, len(part))
        raise WrongRow(f"no document has the tokens {tokens[:4]}...")

    def _compare(self, row: Row, span: TextSpan) -> None:
        text = self.texts[span.text]
        for n in range(span.length):
            place, after = span.place + n, span.start + n + 1
            ends = after == len(text.tokens)
            target = (
                NO_TARGET
                if ends or not text.trained[after]
                else text.tokens[after]
            )
            wanted = {
                "targets": target,
                # Positions restart with each document if attention does.
                "positions": n if self.masks else place,
            }
            if self.masks:
                wanted["documents"] = span.text
            for name, value in wanted.items():
                if row[name][place] != value:
                    raise WrongRow(
                        f"token {place} of a row, number {span.start + n} of document {span.text},"
                        f" has {row[name][place]} in its {name} and must have {value}"
                    )

    def epoch_faults(
        self, rows: Sequence[Sequence[TextSpan]], split: str
    ) -> Iterator[str]:
        """Describe tokens that an epoch shows twice or not at all."""
        seen = Counter(
            (span.text, span.start + n)
            for spans in rows
            for span in spans
            for n in range(span.length)
        )
        wanted = {*self._epoch()}
        if self.wrapped:
            # The last token of all predicts nothing, so no row begins with it.
            last = len(self.texts) - 1
            wanted.discard((last, len(self.texts[last].tokens) - 1))
        twice = [place for place, count in seen.items() if count > 1]
        missing = sorted(wanted - seen.keys())
        if twice:
            yield f"an epoch of the {split} part shows token {twice[0][1]} of document {twice[0][0]} twice"
        elif missing:
            text, n = missing[0]
            yield f"an epoch of the {split} part leaves out token {n} of document {text}"

    def _epoch(self) -> Iterator[tuple[int, int]]:
        """Yield the text and the number of each token that an epoch shows."""
        for number, text in enumerate(self.texts):
            most = len(text.tokens)
            if not self.wrapped:
                most = min(most, self.sequence)
                # A document is left out if nothing in it can be a target.
                if not any(text.trained[1 : most + 1]):
                    continue
            yield from ((number, n) for n in range(most))
