"""The loss of a trained model on text, on one process: its windows one after another.

Memory is that of the weights and of one batch of windows, whatever the length of the text.
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
from .data.token_files import Corpus, DataError, has_tokens, open_corpus, open_prepared
from .data.vocabulary import Vocabulary

LOGITS = 1 << 26  # values of a batch's logits: 256 MiB in float32
TRAIN, VALIDATION = "train", "validation"


@dataclass(frozen=True)
class TextLoss:
    """The loss of a model on a text. `tokens` are those that were predicted; `bits_per_byte` is None
    where the text's bytes are not known."""

    tokens: int
    loss: float
    bits_per_byte: float | None

    @property
    def perplexity(self) -> float:
        """The exponential of the loss; infinite where a float cannot hold it."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


@contextmanager
def text_corpus(
    data: str, vocabulary: Vocabulary | None, split: str, **how: Any
) -> Iterator[Corpus]:
    """The corpus of a text to be evaluated, as its validation part. Files of tokens have two parts, of
    which `split` chooses one; text and chats are taken whole, and become tokens in a folder that is
    removed."""
    if data == PYTHON or has_tokens(Path(data)):
        corpus = open_corpus(data)
        yield corpus if split == VALIDATION else _of_training(corpus)
        return
    if not Path(data).exists():
        raise DataError(f"{data} is not there. Name text, chats or token files.")
    if vocabulary is None:
        raise GenerateError(
            f"{data} is text, and the tokenizer of the model is not known. Name it: --tokenizer FOLDER."
        )
    with tempfile.TemporaryDirectory(prefix="phalanx-eval-") as folder:
        out = Path(folder)
        done = prepare(Path(data), out, vocabulary, share=0.0, workers=0, **how)
        corpus = _of_training(open_prepared(out))
        text, tokens = done.text[0], done.tokens[0]
        known = text / tokens if text and tokens else None
        yield replace(corpus, name=data, bytes_per_token=known)


def _of_training(corpus: Corpus) -> Corpus:
    """The training part of a corpus in place of what is held out; its bytes are not recorded."""
    return replace(corpus, validation=corpus.train, bytes_per_token=None)


def evaluation_batches(
    run: Run, corpora: tuple[Corpus, ...], vocab: int, sequence: int
) -> Batches:
    """The windows of what corpora hold out, cut as the run's own validation cuts them."""
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
            f"{batches.name} holds nothing out. Write --split {TRAIN} for the part that is trained on."
        )
    return batches


@torch.no_grad()
def text_loss(
    reader: Evaluator, batches: Batches, progress: Callable[[int, int], None]
) -> TextLoss:
    """The loss over all windows; `progress` is called with how many batches are done, and with all."""
    nats, tokens, count = 0.0, 0, batches.validations
    for number in range(count):
        batch = batches.validation(number)
        nats += float(reader.loss(batch))
        tokens += int(count_valid(batch))
        progress(number + 1, count)
    if not tokens:
        raise DataError(f"{batches.name} has no token that another one precedes.")
    loss = nats / tokens
    return TextLoss(tokens, loss, batches.bits_per_byte(loss))
