"""Checkpoints as whole tensors by name, whatever layout wrote them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..layout.files import open_regular, reason
from ..layout.run import CHECKPOINTS
from ..layout.shape import HUB
from . import UsageError

if TYPE_CHECKING:
    from torch import Tensor


_NAME = "Name a run's `out`, or one checkpoint in it."


def checkpoints_in(source: str | Path) -> list[Path]:
    """Return the checkpoints in a folder, newest first. It may be a run's, its
    checkpoints', or one checkpoint."""
    path = Path(source)
    if not path.is_dir():
        raise UsageError(
            f"{path} holds no checkpoint: the folder does not exist. {_NAME}"
        )
    if (path / "config.json").is_file():
        raise UsageError(
            f"{path} is a folder in Hugging Face's format. Write {HUB}{path}."
        )
    why = f"neither manifest.json nor step-... nor {CHECKPOINTS}/step-..."
    none = f"{path} holds no checkpoint: there is {why}. {_NAME}"
    # `lexists`: a dangling link is reported as unreadable rather than
    # overlooked.
    if os.path.lexists(path / "manifest.json"):
        try:
            open_regular(path / "manifest.json").close()
        except OSError as error:
            what = f"cannot read {path / 'manifest.json'}: {reason(error)}. {_NAME}"
            raise UsageError(what) from None
        return [path]
    # Looked for before torch is loaded, so that a wrong path is refused at
    # once.
    if not any(
        next(folder.glob("step-*"), None)
        for folder in (path, path / CHECKPOINTS)
    ):
        raise UsageError(none)
    from ..training.checkpoint import steps

    # A folder of checkpoints has precedence over a run's folder with
    # checkpoints in it.
    saved = steps(path) or steps(path / CHECKPOINTS)
    if not saved:
        raise UsageError(none)
    return saved


class SavedTensors(Mapping[str, "Tensor"]):
    """Whole tensors by name. Each is read from its files when it is accessed, and not
    cached.

    `kind` is weight, or a kind of optimizer state: exp_avg, exp_avg_sq.
    """

    def __init__(self, path: Path, kind: str = "weight") -> None:
        from ..training.checkpoint_format import read_manifest

        self.path, self.manifest = path, read_manifest(path)
        # Only the manifest is read here; a checkpoint may be larger than the
        # memory.
        self._tensors = {
            each.name: each
            for each in self.manifest.tensors
            if each.kind == kind
        }
        if not self._tensors:
            kinds = ", ".join(
                sorted({each.kind for each in self.manifest.tensors})
            )
            raise UsageError(
                f"{path} has no tensors of the kind {kind!r}. It has {kinds}."
            )

    def __getitem__(self, name: str) -> Tensor:
        from ..training.checkpoint_load import TensorReader

        # Opened for each access: no file stays open as long as this object
        # lives.
        with TensorReader(self.path, self.manifest) as reader:
            return reader.whole(self._tensors[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"{len(self)} tensors of {self.path}"


def load(folder: str | Path, kind: str = "weight") -> SavedTensors:
    """Return the tensors of a checkpoint, or of the newest one of a run.

    Checksums are not verified; `phalanx checkpoint verify` does that.

    load("runs/first")["embed.weight"]
    """
    return SavedTensors(checkpoints_in(folder)[0], kind)
