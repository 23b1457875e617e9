"""Text to tokens: bytes as they are, or by a Hugging Face `tokenizer.json`."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..folder import Folder
from .corpus import DataError

__all__ = ["Bytes", "Tokenizer", "Vocabulary", "open_vocabulary"]

LIMIT = 256 << 20  # bytes of a tokenizer.json


class Vocabulary(Protocol):
    """Says a text's tokens. `name` and `size` go into the index; `end` closes each document."""

    name: str
    size: int
    end: int | None

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.int64]]: ...


class Bytes:
    """Every byte is a token, and nothing closes a document: masks keep them apart."""

    name: str = "bytes"
    size: int = 256
    end: int | None = None

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.int64]]:
        return [np.frombuffer(text, np.uint8).astype(np.int64) for text in texts]


class Tokenizer:
    """A `tokenizer.json`; the file is data and runs nothing."""

    def __init__(self, path: Path, end: str | None) -> None:
        try:
            tokenizers = importlib.import_module("tokenizers")
        except ImportError:
            raise DataError(
                f"{path}: to read a tokenizer.json install tokenizers: pip install tokenizers."
            ) from None
        text = Folder(path.parent, DataError).text(path.name, LIMIT)
        try:
            self._made: Any = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # tokenizers raises plain Exception
            raise DataError(f"{path}: is no tokenizer.json: {error}.") from None
        self._made.no_padding()
        self._made.no_truncation()
        self.name = f"tokenizer.json sha256:{hashlib.sha256(text.encode()).hexdigest()}"
        # Ids may have gaps, so the highest one counts and not how many there are.
        self.size = max(self._made.get_vocab(with_added_tokens=True).values(), default=0) + 1
        self.end = None if end is None else self._made.token_to_id(end)
        if end is not None and self.end is None:
            raise DataError(f"{path}: knows no token {end!r} to close a document with.")

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.int64]]:
        said = [text.decode("utf-8", "replace") for text in texts]
        found = self._made.encode_batch(said, add_special_tokens=False)
        closing = [] if self.end is None else [self.end]
        return [np.array(each.ids + closing, np.int64) for each in found]


def open_vocabulary(path: Path | None, end: str | None = None) -> Vocabulary:
    """The tokenizer of a file; bytes without one."""
    if path is not None:
        return Tokenizer(path, end)
    if end is not None:
        raise DataError("bytes have no token to close a document with; give a tokenizer or no end.")
    return Bytes()
