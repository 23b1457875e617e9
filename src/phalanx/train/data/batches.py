"""The batch of a step: a pure function of the step, cut from a corpus.

A sequence is `sequence` neighbouring tokens of the stream; the last one is padded. The order of
sequences is a permutation that each epoch computes anew, so that to go on after a stop is an
integer, and every layout sees the same tokens.

The permutation is computed, so that nothing is stored and any of its elements can be asked for. A
Feistel network permutes the numbers of 2k bits; one that leaves 0..size-1 is sent through again until
it is back (cycle walking: Black and Rogaway 2002), which takes four rounds on average at most.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .token_files import Corpus, DataError, Stream

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100  # a target that counts nothing, as in torch's cross entropy
PADDING = -1  # the document of what is not there
ROUNDS = 8
_WORD = (1 << 64) - 1

Batch = dict[str, "Tensor"]


@dataclass(frozen=True)
class Batches:
    """Batches of `size` sequences. `vocab`, if given, is what the model knows: a token beyond it
    is an error here and not in a kernel.

    With `masks` documents are kept apart: no attention across their ends (`documents`), positions
    begin anew in each, and the first token of one is not a target. Without, text just flows on.
    `origin` is where the count of sequences began: see `resumed`.
    """

    corpus: Corpus
    sequence: int
    size: int  # sequences of a step, over all ranks
    seed: int = 0
    masks: bool = True
    vocab: int = 0
    origin: int = 0

    def __post_init__(self) -> None:
        if self.sequence < 1 or self.size < 1:
            raise DataError(f"sequence={self.sequence}, size={self.size}: both are 1 or more.")
        if self.corpus.train.size < 2:
            raise DataError(
                f"{self.corpus.name}: {self.corpus.train.size} tokens to train on; 2 are needed."
            )
        if self.vocab and self.corpus.vocab > self.vocab:
            raise DataError(
                f"{self.corpus.name} has a vocabulary of {self.corpus.vocab}, the model knows"
                f" {self.vocab}; give the model as many, or prepare with its tokenizer."
            )

    @property
    def sequences(self) -> int:
        """How many there are: an epoch shows each once."""
        return _sequences(self.corpus.train, self.sequence)

    def cursor(self, step: int) -> int:
        """How many sequences the steps before this one have taken."""
        return self.origin + step * self.size

    def resumed(self, step: int, cursor: int) -> Batches:
        """These batches, going on at `step` behind what has been taken, even in other sizes."""
        return replace(self, origin=cursor - step * self.size)

    def batch(self, step: int, rows: slice | None = None) -> Batch:
        """The step's batch, or these rows of it: nothing else is read."""
        first, total = self.cursor(step), self.sequences
        if first < 0:
            raise DataError(f"step {step} is before the first sequence.")
        taken = []
        for row in range(*(rows or slice(None)).indices(self.size)):
            epoch, index = divmod(first + row, total)
            taken.append(_order(total, self.seed, epoch)[index])
        return self._stacked(self.corpus.train, taken)

    @property
    def validations(self) -> int:
        """How many batches hold the whole of the held-out part."""
        if not self.corpus.validation.size:
            return 0
        return -(-_sequences(self.corpus.validation, self.sequence) // self.size)

    def validation(self, index: int, rows: slice | None = None) -> Batch:
        """Batch `index` of the held-out part, in its order; the last is filled up with padding."""
        if not 0 <= index < self.validations:
            raise DataError(
                f"{self.corpus.name}: there is no validation batch {index} of {self.validations};"
                " a corpus of few documents may have none held out."
            )
        chosen = range(*(rows or slice(None)).indices(self.size))
        return self._stacked(self.corpus.validation, [index * self.size + row for row in chosen])

    def bits_per_byte(self, loss: float) -> float | None:
        """A loss in nats per token as bits per byte of text, where the bytes are known."""
        size = self.corpus.bytes_per_token
        return loss / math.log(2) / size if size else None

    def _stacked(self, stream: Stream, numbers: list[int]) -> Batch:
        import torch  # a corpus is opened and shown without it

        shape = (len(numbers), self.sequence)  # of each array: (sequences, time)
        arrays = {
            "tokens": np.zeros(shape, np.int64),
            "targets": np.full(shape, IGNORED, np.int64),
            "positions": np.zeros(shape, np.int64),
            "documents": np.full(shape, PADDING, np.int64),
        }
        for row, number in enumerate(numbers):
            self._fill(stream, number, {name: x[row] for name, x in arrays.items()})
        if not self.masks:
            del arrays["documents"]
        return {name: torch.from_numpy(x) for name, x in arrays.items()}

    def _fill(self, stream: Stream, number: int, row: dict[str, NDArray[np.int64]]) -> None:
        start = number * self.sequence
        stop = min(start + self.sequence + 1, stream.size)
        if stop - start < 2:
            return  # a row of padding
        tokens, documents = stream.read(start, stop)
        self._refuse_unknown(tokens)
        held = min(self.sequence, len(tokens))
        follows = tokens[1:]
        time = np.arange(held)
        if self.masks:
            same = documents[1:] == documents[:-1]
            follows = np.where(same, follows, IGNORED)
            begins = np.concatenate(([True], ~same[: held - 1]))
            time = time - np.maximum.accumulate(np.where(begins, time, 0))
        row["tokens"][:held] = tokens[:held]
        row["targets"][: len(follows)] = follows
        row["positions"][:held] = time
        row["documents"][:held] = documents[:held]

    def _refuse_unknown(self, tokens: NDArray[np.int64]) -> None:
        least, most = int(tokens.min()), int(tokens.max())
        limit = self.vocab or self.corpus.vocab or 1 << 31
        if least < 0 or most >= limit:
            wrong = least if least < 0 else most
            raise DataError(
                f"{self.corpus.name} holds the token {wrong}; the vocabulary is 0 to {limit - 1}."
            )


def _sequences(stream: Stream, sequence: int) -> int:
    # The last token of a stream has nothing after it, so it begins no sequence.
    return -(-max(1, stream.size - 1) // sequence)


@lru_cache(maxsize=4)
def _order(size: int, seed: int, epoch: int) -> Permutation:
    return Permutation(size, seed, epoch)


@dataclass(frozen=True)
class Permutation:
    """The numbers 0 to size - 1 in an order that (seed, epoch) decide."""

    size: int
    seed: int
    epoch: int

    @cached_property
    def _keys(self) -> tuple[int, ...]:
        digest = hashlib.sha512(f"order:{self.seed}:{self.epoch}".encode()).digest()
        return tuple(int.from_bytes(digest[8 * n : 8 * n + 8], "big") for n in range(ROUNDS))

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.size:
            raise IndexError(f"element {index} of a permutation of {self.size}")
        half = max(1, ((self.size - 1).bit_length() + 1) // 2)
        mask = (1 << half) - 1
        while True:
            left, right = index >> half, index & mask
            for key in self._keys:
                left, right = right, left ^ (_mixed(right ^ key) & mask)
            index = left << half | right
            if index < self.size:
                return index


def _mixed(x: int) -> int:
    """SplitMix64's finalizer (Steele, Lea and Flood 2014): every bit depends on every bit."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _WORD
    return x ^ x >> 31
