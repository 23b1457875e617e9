"""The text that every machine has: the Python standard library, bytes as tokens."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from functools import lru_cache
from pathlib import Path

import numpy as np

from .corpus import HELD_OUT, Corpus, DataError, parts

__all__ = ["BYTES", "open_library"]

BYTES = 256
# What is installed beside the library differs from machine to machine; tests are mostly data.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


@lru_cache(maxsize=2)
def open_library(share: float = HELD_OUT) -> Corpus:
    """The library's modules, each a document: about 10 MB."""
    root = Path(sysconfig.get_path("stdlib"))
    names, texts = [], []
    for folder, below, files in os.walk(root):
        below[:] = sorted(set(below) - _LEFT_OUT)
        for file in sorted(files):
            path = Path(folder, file)
            if path.suffix == ".py" and path.is_file():
                names.append(path.relative_to(root).as_posix())
                texts.append(path.read_bytes())
    if not texts:
        raise DataError(f"no text of the Python library is in {root}; name a file or folder.")
    whole = b"".join(texts)
    ends = np.concatenate(([0], np.cumsum([len(text) for text in texts]))).astype(np.int64)
    train, validation = parts(np.frombuffer(whole, np.uint8), ends, names, share)
    mark = hashlib.sha256(whole).hexdigest()
    return Corpus("python", train, validation, BYTES, mark, bytes_per_token=1.0)
