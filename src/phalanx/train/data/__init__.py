"""What there is to learn from: text to token files, token files to the batches of steps."""

from .batches import Batches, Permutation
from .prepare import Prepared, prepare
from .token_files import (
    HELD_OUT,
    Corpus,
    DataError,
    Stream,
    has_tokens,
    open_corpus,
    open_library,
    open_prepared,
    verify_prepared,
)
from .vocabulary import Bytes, Tokenizer, Vocabulary, open_vocabulary

__all__ = [
    "HELD_OUT",
    "Batches",
    "Bytes",
    "Corpus",
    "DataError",
    "Permutation",
    "Prepared",
    "Stream",
    "Tokenizer",
    "Vocabulary",
    "has_tokens",
    "open_corpus",
    "open_library",
    "open_prepared",
    "open_vocabulary",
    "prepare",
    "verify_prepared",
]
