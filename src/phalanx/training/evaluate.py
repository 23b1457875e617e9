"""Loss of a trained model on text, on one process.

It processes the text window by window. Memory is that of the weights and one batch of
windows, regardless of the text's length.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..generate import Evaluator, GenerateError
from ..layout.choices import PYTHON
from ..layout.run import Run
from ..parallel.batch import count_valid
from .data.batches import Batches
from .data.prepare import prepare
from .data.token_files import (
    Corpus,
    DataError,
    has_tokens,
    open_corpus,
    open_prepared,
)
from .data.vocabulary import Vocabulary

LOGITS = 1 << 26  # logits of a batch: 256 MiB in float32
TRAIN, VALIDATION = "train", "validation"


@dataclass(frozen=True)
class TextLoss:
    """Loss of a model on a text.

    `tokens` counts the predicted tokens. `bits_per_byte` is None if the text's size in
    bytes is unknown.
    """

    tokens: int
    loss: float
    bits_per_byte: float | None

    @property
    def perplexity(self) -> float:
        """Exponential of the loss; infinite if a float cannot represent it."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


@contextmanager
def text_corpus(
    data: str, vocabulary: Vocabulary | None, split: str, **how: Any
) -> Iterator[Corpus]:
    """Yield the corpus of a text, as its validation part.

    For token files, `split` selects the part. Text and chats are used whole, and
    tokenized into a temporary folder.
    """
    if data == PYTHON or has_tokens(Path(data)):
        corpus = open_corpus(data)
        yield corpus if split == VALIDATION else _of_training(corpus)
        return
    if not Path(data).exists():
        raise DataError(
            f"{data} does not exist. Name text, chats or token files."
        )
    if vocabulary is None:
        raise GenerateError(
            f"{data} is text, but the model's tokenizer is unknown. Name it: --tokenizer FOLDER."
        )
    with tempfile.TemporaryDirectory(prefix="phalanx-eval-") as folder:
        out = Path(folder)
        # Nothing is held out: all of the text is evaluated.
        done = prepare(
            Path(data), out, vocabulary, share=0.0, workers=0, **how
        )
        corpus = _of_training(open_prepared(out))
        # The training part has all of the text, so its bytes are known.
        text, tokens = done.text[0], done.tokens[0]
        known = text / tokens if text and tokens else None
        yield replace(corpus, name=data, bytes_per_token=known)


def _of_training(corpus: Corpus) -> Corpus:
    """Return a corpus with its training part as validation part; the part's size in
    bytes is unknown."""
    return replace(corpus, validation=corpus.train, bytes_per_token=None)


def evaluation_batches(
    run: Run, corpora: tuple[Corpus, ...], vocab: int, sequence: int
) -> Batches:
    """Return the windows of the corpora's validation parts, divided as in the run's own
    validation."""
    # Rows for which the logits fit, from 1 to 8.
    rows = max(1, min(8, LOGITS // (sequence * vocab)))
    batches = Batches(
        corpora,
        sequence,
        rows,
        masks=run.document_masks,
        vocab=vocab,
        packing=run.packing,
    )
    if not batches.validations:
        raise DataError(
            f"{batches.name} has no held-out part. Write --split {TRAIN} for the training part."
        )
    return batches


@torch.no_grad()
def text_loss(
    reader: Evaluator, batches: Batches, progress: Callable[[int, int], None]
) -> TextLoss:
    """Return the loss over all windows. `progress` is called with the numbers of done
    batches and of all."""
    nats, tokens, count = 0.0, 0, batches.validations
    for number in range(count):
        batch = batches.validation(number)
        # A sum of nats over the batch's targets, not their mean.
        nats += float(reader.loss(batch))
        tokens += int(count_valid(batch))
        progress(number + 1, count)
    if not tokens:
        raise DataError(
            f"{batches.name} has no token with a predecessor, so there is nothing to predict."
        )
    loss = nats / tokens
    return TextLoss(tokens, loss, batches.bits_per_byte(loss))
