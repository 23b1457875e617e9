"""Documents as a stream of tokens, one part to train on and one held out.

Where the tokens come from is in `form.py` (our own files), `foreign.py` (other projects' files) and
`library.py` (the built-in text); how sequences are cut from a stream is in `batches.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

__all__ = ["Corpus", "DataError", "Stream", "held_out", "map_file", "parts"]

HELD_OUT = 0.05
Tokens = NDArray[np.generic]


class DataError(ValueError):
    """Data that cannot be used, or not so: the file, what is wrong with it, the way out."""


@dataclass(frozen=True, eq=False)
class Stream:
    """Documents one after another. Document d is `starts[d]` to `starts[d + 1]` of the stream.

    `tokens` may hold other documents too; then `places[d]` says where document d begins in it.
    """

    tokens: Tokens
    starts: NDArray[np.int64]
    places: NDArray[np.int64] | None = None

    @property
    def size(self) -> int:
        refuse_cut(self.starts)
        return int(self.starts[-1])

    def read(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """These tokens, and the number of each one's document."""
        refuse_cut(self.tokens)
        refuse_cut(self.starts)
        first, last = np.searchsorted(self.starts, (start, stop - 1), "right") - 1
        edges = np.clip(self.starts[first : last + 2], start, stop)
        documents = np.repeat(np.arange(first, last + 1), np.diff(edges))
        if self.places is None:
            return self.tokens[start:stop].astype(np.int64), documents
        shift = self.places[first : last + 1] - self.starts[first : last + 1]
        runs = zip(shift, edges, edges[1:], strict=False)
        found = [self.tokens[by + a : by + b].astype(np.int64) for by, a, b in runs if a < b]
        return np.concatenate(found), documents


@dataclass(frozen=True, eq=False)
class Corpus:
    """What there is to learn from. `vocab` is 0 where the files do not tell it.

    `fingerprint` differs for different tokens: a run that goes on with others is told so.
    `bytes_per_token` is of the held-out part: it turns a loss per token into bits per byte.
    """

    name: str
    train: Stream
    validation: Stream
    vocab: int
    fingerprint: str
    bytes_per_token: float | None = None


def map_file(
    file: BinaryIO, path: Path, dtype: np.dtype[Any], count: int, offset: int = 0
) -> NDArray[Any]:
    """So many numbers of an open file, from a byte on, mapped and not read; its size is known to do."""
    found: np.memmap[Any, Any] = np.memmap(file, dtype, "r", offset, (count,))
    found.filename = str(path)  # numpy knows it for a path only
    return found


def refuse_cut(mapped: NDArray[Any]) -> None:
    """Refuse a mapped file that was cut since: reading what is gone would kill the process (SIGBUS)."""
    mapping: Any = getattr(mapped, "_mmap", None)
    if not isinstance(mapped, np.memmap) or mapping is None:
        return
    wanted, size = mapped.offset + mapped.nbytes, mapping.size()
    if size < wanted:
        raise DataError(
            f"{mapped.filename}: has {size:,} bytes, and had {wanted:,} when it was opened: it was cut"
            " while in use. Make it whole again, and the same command goes on."
        )


def held_out(name: str, share: float = HELD_OUT) -> bool:
    """Whether the document of that name is held out: the same answer wherever it lies."""
    number = int.from_bytes(hashlib.sha256(name.encode("utf-8", "replace")).digest()[:8], "big")
    return number < share * 2**64


def parts(
    tokens: Tokens, ends: NDArray[np.int64], names: Sequence[str], share: float
) -> tuple[Stream, Stream]:
    """The two parts of documents that lie mixed in one array. `ends` has a 0 before it all."""
    chosen = np.fromiter((held_out(name, share) for name in names), bool, len(names))
    lengths = np.diff(ends)
    streams = []
    for mask in (~chosen, chosen):
        starts = np.concatenate(([0], np.cumsum(lengths[mask]))).astype(np.int64)
        streams.append(Stream(tokens, starts, ends[:-1][mask]))
    return streams[0], streams[1]
