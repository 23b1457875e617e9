"""What there is to learn from: text to token files, token files to the batches of steps."""

from .batches import Batches
from .corpus import HELD_OUT, Corpus, DataError, Stream
from .form import open_form, verify_form
from .library import open_library
from .open import open_corpus
from .order import Permutation
from .prepare import prepare
from .vocabulary import Bytes, Tokenizer, Vocabulary, open_vocabulary

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
    "open_corpus",
    "open_form",
    "open_library",
    "open_vocabulary",
    "prepare",
    "verify_form",
]
