"""One door to data of every form, by what lies at a path."""

from __future__ import annotations

from pathlib import Path

from .corpus import HELD_OUT, Corpus, DataError
from .foreign import open_megatron, open_plain, open_plain_pair
from .form import INDEX, open_form
from .library import open_library

__all__ = ["open_corpus"]


def open_corpus(source: str | Path, *, share: float = HELD_OUT) -> Corpus:
    """The corpus at a path: `python` (the library's text), a prepared folder, a folder with
    nanoGPT's train.bin and val.bin, a `.bin`, or a `.bin` with its `.idx`.

    `share` is how much is held out where the files do not say.
    """
    if source == "python":
        return open_library(share)
    path = Path(source)
    if (path / INDEX).is_file():
        return open_form(path)
    if (path / "train.bin").is_file() and (path / "val.bin").is_file():
        return open_plain_pair(path, "train.bin", "val.bin")
    if path.suffix in (".bin", ".idx") and path.with_suffix(".idx").is_file():
        return open_megatron(path, share)
    if path.suffix == ".bin" and path.is_file():
        return open_plain(path, share)
    what = "is not there" if not path.exists() else "holds no tokens that are known"
    raise DataError(
        f"{path} {what}. Text becomes tokens by `phalanx data prepare {path} --out DIR`; read as"
        " they are: DIR, .bin with .idx, .bin, a folder with train.bin and val.bin, or 'python'."
    )
