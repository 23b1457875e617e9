"""What there is to learn from: text to token files, token files to the batches of steps."""

from .batches import Batches, Permutation
from .prepare import Bytes, Tokenizer, Vocabulary, hub_vocabulary, open_vocabulary, prepare
from .token_files import (
    HELD_OUT,
    Corpus,
    DataError,
    Stream,
    open_corpus,
    open_library,
    open_prepared,
    verify_prepared,
)

__all__ = [
    "HELD_OUT",
    "Batches",
    "Bytes",
    "Corpus",
    "DataError",
    "Permutation",
    "Stream",
    "Tokenizer",
    "Vocabulary",
    "hub_vocabulary",
    "open_corpus",
    "open_library",
    "open_prepared",
    "open_vocabulary",
    "prepare",
    "verify_prepared",
]
