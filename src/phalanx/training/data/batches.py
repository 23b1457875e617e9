"""Batches as a pure function of the step, cut from one or several corpora.

A sequence is `sequence` neighbouring tokens of the stream (the last one is padded), or
whole documents packed together, or one document and padding. Each epoch computes a new
permutation of a corpus's sequences, and the number of sequences already taken decides
which corpus is next. A run therefore resumes from one integer, and every layout sees
the same tokens.

The permutation is computed element by element, so that nothing is stored. A Feistel
network permutes the numbers of 2k bits; a result outside 0..size-1 is sent through
again until it is inside (cycle walking: Black and Rogaway 2002), at most four rounds on
average.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .digests import fingerprint
from .token_files import Corpus, DataError, Stream, describe

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100  # ignore_index of torch's cross entropy
PADDING = -1  # document number of padding
ROUNDS = 8
_WORD = (1 << 64) - 1

Batch = dict[str, "Tensor"]


@dataclass(frozen=True)
class Batches:
    """Batches of `size` sequences from one or several corpora.

    `vocab`, if given, is the model's vocabulary: a token beyond it is an error here
    instead of in a kernel.

    Each of several corpora gets its weight's share of any range of sequences, as
    closely as whole numbers allow, and starts over when it is exhausted. Without
    weights all corpora are exhausted together. `packing` is "wrapped" (sequences are
    cut at any token), "bfd" (whole documents, best fit decreasing), "none" (one
    document each), or "": bfd for chats, otherwise wrapped.

    `masks` keeps documents apart: no attention across their boundaries (`documents`),
    positions restart in each, and the first token of a document is not a target.
    Without it, text runs on across documents. `origin` offsets the count of sequences:
    see `resumed`.
    """

    corpora: tuple[Corpus, ...]
    sequence: int
    size: int  # sequences of a step, on all ranks together
    seed: int = 0
    masks: bool = True
    vocab: int = 0
    packing: str = ""
    origin: int = 0
    noisy: bool = False  # for a model with dropout
    # Of pairs: the reference model's margin of each, those that are trained on first.
    margins: NDArray[np.float64] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.sequence < 1 or self.size < 1:
            raise DataError(
                f"sequence={self.sequence}, size={self.size}: both must be at least 1."
            )
        self._refuse_mixed_pairs()
        for cut in self._train:
            corpus = cut.corpus
            if corpus.train.size < 2:
                raise DataError(
                    f"{corpus.name}: {corpus.train.size} tokens to train on; 2 are needed."
                )
            if not cut.count:
                raise DataError(
                    f"{corpus.name}: no document has a token to train on within {self.sequence}"
                    " tokens. Write a longer sequence."
                )
            if self.vocab and corpus.vocab > self.vocab:
                raise DataError(
                    f"{corpus.name} has a vocabulary of {corpus.vocab}, but the model's is"
                    f" {self.vocab}. Enlarge the model's, or prepare the data with its tokenizer."
                )

    def _refuse_mixed_pairs(self) -> None:
        if not self.pairs:
            return
        if len(self.corpora) > 1:
            raise DataError(
                f"{self.name}: pairs of answers come from one source. Put them into one file or folder."
            )
        if not self.masks or self.packing not in ("", "none"):
            raise DataError(
                f"{self.name} holds pairs of answers: each is a row of its own, whose two documents are kept"
                " apart. Leave packing and document_masks out."
            )

    @property
    def pairs(self) -> bool:
        """True if each row is a pair of answers, one of which is preferred."""
        return any(corpus.pairs for corpus in self.corpora)

    @property
    def name(self) -> str:
        """The names of the corpora, with weights if there are several."""
        if len(self.corpora) == 1:
            return self.corpora[0].name
        pairs = zip(self.corpora, self._weights, strict=True)
        return ", ".join(f"{corpus.name}:{weight}" for corpus, weight in pairs)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the tokens and the shares of the corpora. Reads the files."""
        return fingerprint(describe(self.corpora))

    @property
    def mark(self) -> str:
        """The fingerprint in checkpoints of earlier versions, which covers file sizes
        and beginnings."""
        if len(self.corpora) == 1:
            return self.corpora[0].mark
        marks = [f"{corpus.mark}:{corpus.weight}" for corpus in self.corpora]
        return hashlib.sha256(" ".join(marks).encode()).hexdigest()

    @property
    def chats(self) -> bool:
        """True if some of the documents are chats, of which answers are trained on."""
        return any(corpus.train.answers is not None for corpus in self.corpora)

    @cached_property
    def _train(self) -> tuple[Sequences, ...]:
        return tuple(
            _cut(c, c.train, self.sequence, self.packing) for c in self.corpora
        )

    @cached_property
    def _validation(self) -> tuple[Sequences, ...]:
        return tuple(
            _cut(c, c.validation, self.sequence, self.packing)
            for c in self.corpora
        )

    @cached_property
    def _weights(self) -> tuple[int, ...]:
        return tuple(cut.corpus.weight or cut.count for cut in self._train)

    @property
    def sequences(self) -> int:
        """The number of sequences in all corpora; an epoch over a single corpus shows
        each once."""
        return sum(cut.count for cut in self._train)

    @property
    def notices(self) -> list[str]:
        """Documents that are cut or left out of training, one sentence for each
        corpus."""
        return [
            f"{cut.corpus.name}: {cut.notice}"
            for cut in self._train
            if cut.notice
        ]

    def cursor(self, step: int) -> int:
        """Return the number of sequences taken before this step."""
        return self.origin + step * self.size

    def resumed(self, step: int, cursor: int) -> Batches:
        """Return batches that continue at `step` after `cursor` sequences, even with
        other sizes."""
        return replace(self, origin=cursor - step * self.size)

    def batch(self, step: int, rows: slice | None = None) -> Batch:
        """Return the step's batch, or some rows of it. Only these rows are read."""
        first = self.cursor(step)
        taken = []
        for row in range(*(rows or slice(None)).indices(self.size)):
            which, index = shared_out(first + row, self._weights)
            cut = self._train[which]
            # Each time all of a corpus was taken, the next epoch permutes it
            # anew.
            epoch, index = divmod(index, cut.count)
            taken.append(
                (cut, Permutation(cut.count, self.seed, epoch)[index])
            )
        batch = self._stacked(taken)
        if self.noisy:
            batch["noise"] = self._noise(step, rows or slice(None))
        return batch

    def _noise(self, step: int, rows: slice) -> Tensor:
        """Return the noise of each token, from its place in the step's whole batch."""
        import torch

        from ...models import token_noise

        every = torch.arange(self.size * self.sequence)
        tokens = every.view(self.size, self.sequence)[rows]
        return token_noise(self.seed, step, tokens)

    # ---- pairs of answers

    @property
    def pair_rows(self) -> tuple[int, int]:
        """Number of rows with pairs, for training and held out."""
        (train,), (held,) = self._train, self._validation
        return train.count, held.count

    def pair_batch(self, first: int, rows: slice) -> Batch:
        """Return rows of a batch of pairs in file order, padded at the end.

        The batch begins at pair `first`, counted from 0 across both parts.
        """
        (train,), (held,) = self._train, self._validation
        # Numbers of pairs run over both parts: training first, then held out.
        counted = [(train, n) for n in range(train.count)]
        counted += [(held, n) for n in range(held.count)]
        numbers = range(*rows.indices(self.size))
        taken = (counted[first + n : first + n + 1] for n in numbers)
        # A row beyond the last pair is padding.
        return self._stacked([one[0] if one else None for one in taken])

    def _pair_entries(
        self,
        taken: Sequence[tuple[Sequences, int] | None],
        documents: NDArray[Any],
    ) -> dict[str, NDArray[Any]]:
        """Return the signs of documents, the pair numbers, and the reference model's
        margins."""
        # Documents 2n are chosen answers, 2n + 1 the rejected ones; padding
        # counts 0.
        signs = np.where(documents % 2 == 0, 1, -1)
        signs = np.where(documents == PADDING, 0, signs).astype(np.int64)
        pair = np.zeros(documents.shape, np.int64)
        reference = np.zeros(documents.shape, np.float64)
        for row, place in enumerate(taken):
            if place is None:
                continue
            cut, index = place
            # Held-out pairs are numbered after those that are trained on.
            before = 0 if cut is self._train[0] else self._train[0].count
            # 0 stands for rows without a pair.
            pair[row, 0] = before + index + 1
            if self.margins is not None:
                reference[row, 0] = self.margins[before + index]
        return {"signs": signs, "pair": pair, "reference": reference}

    @property
    def validations(self) -> int:
        """The number of batches that cover the held-out parts."""
        return -(-sum(cut.count for cut in self._validation) // self.size)

    def validation(self, index: int, rows: slice | None = None) -> Batch:
        """Return batch `index` of the held-out parts, in order; the last one is padded.

        Several corpora are mixed evenly.
        """
        if not 0 <= index < self.validations:
            raise DataError(
                f"{self.name}: there is no validation batch {index} of {self.validations};"
                " a corpus of few documents may have none held out."
            )
        counts = tuple(cut.count for cut in self._validation)
        taken: list[tuple[Sequences, int] | None] = []
        for row in range(*(rows or slice(None)).indices(self.size)):
            # Rows beyond the last sequence of the held-out parts are padding.
            number = index * self.size + row
            which, own = (
                shared_out(number, counts) if number < sum(counts) else (0, -1)
            )
            taken.append((self._validation[which], own) if own >= 0 else None)
        return self._stacked(taken)

    def bits_per_byte(self, loss: float) -> float | None:
        """Convert a loss in nats per token to bits per byte, or return None if the
        bytes are unknown."""
        if self.pairs:  # whose loss is of no token
            return None
        held = [
            (c.validation.size, c.bytes_per_token)
            for c in self.corpora
            if c.validation.size
        ]
        # NaN if one corpus does not know its bytes: the comparison below is
        # then false.
        size = sum(tokens * (known or math.nan) for tokens, known in held)
        return (
            # Nats to bits, and tokens to bytes by the mean bytes of a token.
            loss / math.log(2) / (size / sum(n for n, _ in held))
            if size > 0
            else None
        )

    def _stacked(self, taken: Sequence[tuple[Sequences, int] | None]) -> Batch:
        import torch  # a corpus is opened and shown without it

        shape = (len(taken), self.sequence)  # of each array: (sequences, time)
        arrays = {
            "tokens": np.zeros(shape, np.int64),
            "targets": np.full(shape, IGNORED, np.int64),
            "positions": np.zeros(shape, np.int64),
        }
        # Reading them takes time, so only where they are used.
        if self.masks or self.pairs:
            arrays["documents"] = np.full(shape, PADDING, np.int64)
        # `zeros` and `full` above are the padding: a row is filled as far as
        # it has tokens.
        for row, place in enumerate(taken):
            if place is not None:
                self._fill(
                    *place, {name: x[row] for name, x in arrays.items()}
                )
        if self.pairs:
            arrays |= self._pair_entries(taken, arrays["documents"])
        if not self.masks:
            arrays.pop("documents", None)
        return {name: torch.from_numpy(x) for name, x in arrays.items()}

    def _fill(
        self, cut: Sequences, number: int, row: dict[str, NDArray[np.int64]]
    ) -> None:
        at = 0
        # `at` counts the tokens of the row so far; a run goes on behind them.
        for start, end in cut.runs(number):
            # includes the token after the last one, as its target, if the document has
            # one
            stop = min(start + self.sequence - at + 1, end)
            if stop - start < 2:
                continue
            tokens = cut.stream.read(start, stop)
            # A wrong token would otherwise fail in a kernel, far from its
            # file.
            least, most = int(tokens.min()), int(tokens.max())
            limit = self.vocab or cut.corpus.vocab or 1 << 31
            if least < 0 or most >= limit:
                raise DataError(
                    f"{cut.corpus.name} holds the token {least if least < 0 else most}; the"
                    f" vocabulary is 0 to {limit - 1}."
                )
            held = min(self.sequence - at, len(tokens))
            # The target of a token is the next one; of chats, answers alone
            # are targets.
            follows = tokens[1:]
            if cut.stream.answers is not None:
                answers = cut.stream.read_answers(start, stop)
                follows = np.where(answers[1:], follows, IGNORED)
            time = np.arange(at, at + held)
            if "documents" in row:
                documents = cut.stream.read_documents(start, stop)
                row["documents"][at : at + held] = documents[:held]
            if self.masks:
                # A document's last token must not predict the next document's
                # first.
                same = documents[1:] == documents[:-1]
                follows = np.where(same, follows, IGNORED)
                begins = np.concatenate(([True], ~same[: held - 1]))
                # Positions count from the latest beginning of a document.
                latest = np.maximum.accumulate(np.where(begins, time, 0))
                time = time - latest
            row["tokens"][at : at + held] = tokens[:held]
            row["targets"][at : at + len(follows)] = follows
            row["positions"][at : at + held] = time
            at += held


# ---- sequences of a stream


@dataclass(frozen=True, eq=False)
class Sequences:
    """A stream divided into `count` sequences.

    If `chosen` is given, sequence n consists of its documents `edges[n]` to `edges[n +
    1]`; otherwise the stream is cut every `sequence` tokens.
    """

    corpus: Corpus
    stream: Stream
    sequence: int
    count: int
    chosen: NDArray[np.int64] | None = None
    edges: NDArray[np.int64] | None = None
    notice: str = ""

    def runs(self, number: int) -> Iterator[tuple[int, int]]:
        """Yield the start of each run of tokens in a sequence, and the largest possible
        end."""
        if self.chosen is None or self.edges is None:
            yield number * self.sequence, self.stream.size
            return
        starts = self.stream.starts
        for document in self.chosen[
            self.edges[number] : self.edges[number + 1]
        ]:
            yield int(starts[document]), int(starts[document + 1])


@lru_cache(maxsize=64)  # a resumed run makes its batches anew
def _cut(
    corpus: Corpus, stream: Stream, sequence: int, packing: str
) -> Sequences:
    if corpus.pairs:
        return _cut_pairs(corpus, stream, sequence)
    packing = packing or ("wrapped" if stream.answers is None else "bfd")
    if packing == "wrapped":
        # The last token of a stream has no target, so no sequence begins with it.
        count = -(-max(1, stream.size - 1) // sequence) if stream.size else 0
        return Sequences(corpus, stream, sequence, count)
    # Tokens of each document.
    lengths = np.diff(stream.starts)
    kept = lengths > 1  # a single token predicts nothing
    # A chat longer than the sequence is kept only if an answer remains in what
    # is kept.
    longer = np.flatnonzero(lengths > sequence)
    for document in longer if stream.answers is not None else ():
        start = int(stream.starts[document])
        # the targets of the first `sequence` tokens are the tokens after them
        stop = min(start + sequence + 1, int(stream.starts[document + 1]))
        kept[document] = stream.read_answers(start + 1, stop).any()
    documents = np.flatnonzero(kept)
    notice = ""
    if len(longer):
        lost = len(longer) - int(kept[longer].sum())
        notice = f"{len(longer) - lost:,} of {len(lengths):,} documents are longer than sequence ="
        notice += f" {sequence:,} and are cut there"
        notice += (
            f"; {lost:,} more have no answer before that and are left out"
            if lost
            else ""
        )
    if packing == "none":
        rows = [[n] for n in range(len(documents))]
    else:
        rows = best_fit(
            np.minimum(lengths[documents], sequence).tolist(), sequence
        )
    # Row n has the documents from `edges[n]` to `edges[n + 1]` of `order`.
    edges = np.cumsum([0, *map(len, rows)])
    order = np.fromiter(
        (n for row in rows for n in row), np.int64, len(documents)
    )
    return Sequences(
        corpus, stream, sequence, len(rows), documents[order], edges, notice
    )


def _cut_pairs(corpus: Corpus, stream: Stream, sequence: int) -> Sequences:
    """Put one pair of documents into each sequence.

    Longer pairs are skipped, because truncation would change an answer.
    """
    lengths = np.diff(stream.starts)
    # Document 2n is the chosen answer, 2n + 1 the rejected one, each with the
    # prompt.
    both = lengths[::2] + lengths[1::2]  # (pairs,)
    kept = np.flatnonzero(both <= sequence)
    documents = np.stack((2 * kept, 2 * kept + 1), 1).reshape(-1)
    edges = 2 * np.arange(len(kept) + 1)
    notice, lost = "", len(both) - len(kept)
    if lost:
        notice = f"{lost:,} of {len(both):,} pairs are longer than sequence = {sequence:,} and are left out"
    return Sequences(
        corpus, stream, sequence, len(kept), documents, edges, notice
    )


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Pack lengths into rows of `room` and return the indices in each row.

    Best fit decreasing: longest first, each into the fullest row that still has room.
    """
    rows: list[list[int]] = []
    # left[space]: rows with that much space; `bits` has a bit set for each non-empty
    # list, so that the smallest sufficient space is found in one operation.
    left: list[list[int]] = [[] for _ in range(room + 1)]
    bits = 0
    for number in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        length = lengths[number]
        # The lowest set bit from `length` on is the smallest sufficient space.
        fitting = bits >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            row = left[space].pop()
            # That was the last row with this space.
            if not left[space]:
                bits ^= 1 << space
            rows[row].append(number)
        else:
            space, row = room, len(rows)
            rows.append([number])
        if space > length:
            left[space - length].append(row)
            bits |= 1 << (space - length)
    return rows


# ---- the order of sequences


def shared_out(number: int, weights: tuple[int, ...]) -> tuple[int, int]:
    """Return the corpus of sequence `number`, and the sequence's index in that corpus.

    The j-th sequence of a corpus is due at time (2j + 1) / (2 weight). Merging all
    corpora by time gives each nearly its weight's share of any range of sequences.
    """
    if len(weights) == 1:
        return 0, number
    total = sum(weights)
    # Times are compared as integers: (2j + 1) * unit / weight.
    unit = math.lcm(*(w for w in weights if w))
    # In closed form up to just before `number`, then by merging a few more.
    begin = max(0, number - len(weights))
    # The number of each corpus's sequences before time `begin`; at most `number` in
    # total.
    taken = [(2 * begin * w + total) // (2 * total) for w in weights]
    missing = number - sum(taken)
    while True:
        # A corpus of weight 0 is never due.
        times = [
            (2 * j + 1) * (unit // w) if w else math.inf
            for j, w in zip(taken, weights, strict=True)
        ]
        which = times.index(min(times))
        if not missing:
            return which, taken[which]
        taken[which] += 1
        missing -= 1


@dataclass(frozen=True)
class Permutation:
    """A permutation of 0 to size - 1, determined by seed and epoch."""

    size: int
    seed: int
    epoch: int

    def __getitem__(self, index: int) -> int:
        assert 0 <= index < self.size
        # Half of an even number of bits that holds the largest index: a
        # Feistel network has two halves.
        half = max(1, ((self.size - 1).bit_length() + 1) // 2)
        mask = (1 << half) - 1
        while True:
            # Cycle walking: out of range, the result is permuted again.
            left, right = index >> half, index & mask
            for key in _keys(self.seed, self.epoch):
                left, right = right, left ^ (_mixed(right ^ key) & mask)
            index = left << half | right
            if index < self.size:
                return index


@lru_cache(maxsize=64)
def _keys(seed: int, epoch: int) -> tuple[int, ...]:
    # One digest has the keys of all rounds: 8 x 64 bits.
    digest = hashlib.sha512(f"order:{seed}:{epoch}".encode()).digest()
    return struct.unpack(f">{ROUNDS}Q", digest)


def _mixed(x: int) -> int:
    """SplitMix64's finalizer (Steele, Lea and Flood 2014): every bit depends on every bit."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _WORD
    return x ^ x >> 31
