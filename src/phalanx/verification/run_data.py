"""Random documents in the format of a run's data, with the same lengths relative to a
sequence."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..layout.proportions import STEPS, TOKENS
from ..layout.run import Run
from ..training.data.token_files import (
    ANSWERS,
    FORMAT,
    INDEX,
    SPLITS,
    VERSION,
    DataError,
    Index,
    Split,
    Splits,
    open_corpus,
)
from ..training.folder import Folder

_DOCUMENTS = 40
# lengths in sequences, for data whose documents are unknown
_LENGTHS = (0.2, 0.5, 1.3, 0.1, 0.8)
_WORDS = 250  # below the vocabulary of any model


def write_documents(
    path: Path, run: Run, sequence: int, *, batch: int, words: int
) -> None:
    """Write a prepared folder for batches of `batch` sequences and a vocabulary of
    `words`.

    An epoch ends within a trial's steps; the held-out part fills one batch and part of
    the next.
    """
    path.mkdir(parents=True)
    # Seeded: the same run gives the same documents.
    draw = np.random.default_rng(run.seed)
    lengths, answers = _lengths(run, sequence)
    # At least two tokens: one has no target.
    sizes = [max(2, round(length * TOKENS)) for length in lengths]
    words = min(words, _WORDS)
    splits = []
    # Tokens of the training part, for an epoch that ends within the trial, and
    # of the held-out part.
    wanted = (batch * STEPS * TOKENS * 3 // 5, batch * TOKENS * 3 // 2)
    for name, most in zip(SPLITS, wanted, strict=True):
        starts = _starts(sizes, max(2 * TOKENS, most))
        count = int(starts[-1])
        tokens = _tokens(draw, starts, words)
        tokens.astype("<u2").tofile(path / f"{name}.tokens")
        starts.astype("<i8").tofile(path / f"{name}.documents")
        if answers:
            # Every five tokens end with three that are trained on.
            mask = np.arange(count) % 5 > 1
            mask.astype("u1").tofile(path / f"{name}.{ANSWERS}")
        splits.append(_split(path, name, starts, answers=answers))
    index = Index(
        FORMAT, VERSION, "random", Splits(*splits), "u2", words, None
    )
    (path / INDEX).write_text(json.dumps(asdict(index)))


def _tokens(
    draw: np.random.Generator, starts: NDArray[np.int64], words: int
) -> NDArray[np.int64]:
    """Return random tokens of documents. The first two tell a document from the others,
    unless there are more documents than pairs of words."""
    tokens = draw.integers(0, words, int(starts[-1]))
    first = starts[:-1]
    pairs = np.resize(draw.permutation(words * words), len(first))
    tokens[first], tokens[first + 1] = np.divmod(pairs, words)
    return tokens


def _starts(sizes: list[int], most: int) -> NDArray[np.int64]:
    """Return the first tokens of documents, as many as fit into `most` tokens."""
    ends = np.cumsum(sizes * (1 + most // sum(sizes)))
    # Whole documents only; one that is longer than all is cut.
    kept = ends[ends <= most]
    kept = kept if len(kept) else np.array([most])
    return np.concatenate(([0], kept)).astype(np.int64)


def _split(
    path: Path, name: str, starts: NDArray[np.int64], *, answers: bool
) -> Split:
    sha256 = Folder(path, DataError).sha256
    count = int(starts[-1])
    return Split(
        sha256(f"{name}.tokens"),
        sha256(f"{name}.documents"),
        count,
        len(starts) - 1,
        count,
        sha256(f"{name}.{ANSWERS}") if answers else "",
    )


def _lengths(run: Run, sequence: int) -> tuple[list[float], bool]:
    """Return lengths of documents in sequences, and True if only answers are trained
    on."""
    for path, _ in run.sources:
        try:
            stream = open_corpus(path).train
        except DataError:  # text that is not tokenized yet
            continue
        # Longer ones are cut to two sequences.
        ends = np.minimum(
            np.diff(stream.starts[: _DOCUMENTS + 1]), 2 * sequence
        )
        return [
            float(n) / sequence for n in ends if n > 1
        ], stream.answers is not None
    return [*_LENGTHS] * (_DOCUMENTS // len(_LENGTHS)), False
