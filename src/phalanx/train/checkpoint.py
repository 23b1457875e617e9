"""Saving a run and going on with it, in any layout.

A save is a folder `step-00000100` that appears whole or not at all: every rank writes its own file
into a hidden folder, all say yes, the first writes the manifest and renames. Whatever goes wrong on
one rank, all ranks hear of it and decide alike. The format is in docs/checkpoints.md.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ..comm import Group
from ..parallel.local import Holding
from .checkpoint_agree import agree, hear, tell
from .checkpoint_file import CheckpointError, File, chunk_sums, write_file
from .checkpoint_holding import Snapshot, Updates, fill, manifest_of, misfits, show
from .checkpoint_manifest import MANIFEST, Manifest, Progress
from .checkpoint_model import Identity
from .checkpoint_read import (
    Reader,
    faults,
    manifest_text,
    name_of,
    parse_manifest,
    read_manifest,
)
from .data.folder import Folder, sync_folder, write_text

__all__ = ["Loaded", "Saved", "Saver", "choose", "load", "newest", "refuse_other", "save", "steps"]

_STEP = re.compile(r"step-(\d{8,18})")
# Hidden names of what is not a checkpoint: begun, or on its way out.
SAVING, REMOVED = ".saving-", ".removed-"
ASIDE = "set-aside-"


@dataclass(frozen=True)
class Saved:
    """What became of a save; `error` tells why it is not there, and then what was before still is.

    `notice`, on rank 0: the save is there and sound, and something beside it went wrong.
    """

    step: int
    path: Path
    error: str = ""
    notice: str = ""


@dataclass(frozen=True)
class Loaded:
    """Where a run goes on, what was passed over as damaged on the way there, and what a person should
    know of the model (see `checkpoint_model.py`)."""

    progress: Progress
    path: Path
    damaged: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()


def steps(folder: Path) -> list[Path]:
    """The checkpoints of a run, the newest first; whether they are sound is not asked."""
    if not folder.is_dir():
        return []
    found = [p for p in folder.iterdir() if _STEP.fullmatch(p.name) and p.is_dir()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")), reverse=True)


def save(
    folder: Path, progress: Progress, holding: Holding, updates: Updates, *, keep: int = 2
) -> Path:
    """Save now; every rank calls it. The folder that it made, or an error on every rank."""
    (saved,) = Saver(folder, holding, updates, keep=keep).save(progress)
    return saved.path


class Saver:
    """Saves a run's checkpoints; every rank has one and calls it alike.

    Asynchronous: `save` only copies the numbers to the host, a thread writes them, and `poll`, once a
    step, asks all ranks whether all are done; the first step at which they are makes it a checkpoint.
    Each call gives the saves that were decided by it. A save that fails raises on every rank when
    `on_failure` is "stop", else it is told in `Saved.error`. `keep` checkpoints stay, and no old one
    goes before the new one is there and has been read back.
    """

    def __init__(
        self,
        folder: Path,
        holding: Holding,
        updates: Updates,
        *,
        keep: int = 2,
        asynchronous: bool = False,
        on_failure: Literal["stop", "go on"] = "stop",
    ) -> None:
        if keep < 1:
            raise CheckpointError(f"keep={keep}: at least 1 checkpoint stays.")
        self.folder, self.holding, self.updates = folder, holding, updates
        self.keep, self.asynchronous, self.on_failure = keep, asynchronous, on_failure
        self.wire: Group = holding.wires.everyone
        self.room: dict[str, Tensor] = {}  # host memory, used again by every save
        self.pending: _Pending | None = None

    def save(self, progress: Progress) -> tuple[Saved, ...]:
        """Begin a save, after the one before is decided; without a thread also end it."""
        before = self.finish()
        beside = self.folder / f"{SAVING}{progress.step:08}"
        error = _prepared(beside) if self.wire.rank == 0 else ""
        if complaints := agree(self.wire, error):
            return (*before, self._verdict(progress.step, "; ".join(complaints)))
        snapshot = Snapshot.take(self.holding, self.updates, self.room)
        path = beside / f"rank-{self.wire.rank:05}.safetensors"
        self.pending = _Pending(progress, snapshot, path, beside=self.asynchronous)
        return before if self.asynchronous else (*before, *self.finish())

    def poll(self) -> tuple[Saved, ...]:
        """Decide a save that every rank has written; nothing when there is none."""
        if self.pending is None:
            return ()
        waiting = torch.tensor([int(not self.pending.done())], device=self.wire.device)
        self.wire.all_reduce(waiting)
        return () if int(waiting) else self.finish()

    def finish(self) -> tuple[Saved, ...]:
        """Wait for a save that is under way, and decide it."""
        if self.pending is None:
            return ()
        pending, self.pending = self.pending, None
        pending.wait()
        step, beside = pending.progress.step, pending.path.parent
        complaints, notice = agree(self.wire, pending.error), ""
        if not complaints:
            reports = hear(self.wire, pending.snapshot.report(pending.file))
            error = ""
            if self.wire.rank == 0:
                error, notice = commit(self.folder, beside, pending.progress, reports, self.keep)
            complaints = agree(self.wire, error)
        if complaints and self.wire.rank == 0:
            shutil.rmtree(beside, ignore_errors=True)
        return (self._verdict(step, "; ".join(complaints), notice),)

    def _verdict(self, step: int, error: str, notice: str = "") -> Saved:
        path = self.folder / name_of(step)
        if error and self.on_failure == "stop":
            raise CheckpointError(f"{path} could not be saved, what was before stays. {error}")
        return Saved(step, path, error, notice)


class _Pending:
    """One rank's file on its way to the disk, in this thread or in one of its own."""

    def __init__(self, progress: Progress, snapshot: Snapshot, path: Path, *, beside: bool) -> None:
        self.progress, self.snapshot, self.path = progress, snapshot, path
        self.file: File | None = None
        self.error = ""
        self.thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        if beside:
            self.thread.start()
        else:
            self.thread.run()

    def done(self) -> bool:
        return not self.thread.is_alive()

    def wait(self) -> None:
        if self.thread.ident is not None:
            self.thread.join()

    def _write(self) -> None:
        # Whatever happens here is told to all ranks: one that raised alone would hang the others.
        if not self.snapshot.tensors:
            return
        try:
            file = write_file(self.path, self.snapshot.tensors)
            with Folder(self.path.parent, CheckpointError).open(self.path.name) as again:
                if tuple(chunk_sums(again)) != file.chunks:
                    raise CheckpointError(f"{self.path}: read back, it is not what was written.")
            self.file = file
        except Exception as error:
            self.error = _said(error)


def _said(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'the disk'}: {error.strerror}"
    return str(error) or type(error).__name__


def _prepared(beside: Path) -> str:
    """Make the hidden folder of a save, and remove what saves that were killed have left."""
    try:
        beside.parent.mkdir(parents=True, exist_ok=True)
        for left in beside.parent.iterdir():
            if left.name.startswith((SAVING, REMOVED)):
                # What cannot be removed is not in the way, unless it has the name of this save.
                with suppress(OSError):
                    shutil.rmtree(left)
        beside.mkdir()
    except OSError as error:
        return _said(error)
    return ""


def commit(
    folder: Path, beside: Path, progress: Progress, reports: list[str], keep: int
) -> tuple[str, str]:
    """Make what all ranks have written a checkpoint, then let old ones go. Why it is none, and what
    went wrong after it had become one: then it is there, and so is what was before."""
    path = folder / name_of(progress.step)
    replaced = path.with_name(f"{REMOVED}{path.name}")
    try:
        text = str(manifest_of(progress, reports))
        Manifest.parse(text, str(beside / MANIFEST))  # what cannot be read is not written
        write_text(beside / MANIFEST, text)
        if path.exists():
            path.rename(replaced)
        beside.rename(path)
    except (OSError, ValueError) as error:
        with suppress(OSError):
            if replaced.exists() and not path.exists():
                replaced.rename(path)
        return _said(error), ""
    finishing: dict[str, Callable[[], None]] = {
        "its folder could not be brought to the disk": lambda: sync_folder(folder),
        "what it replaces could not be removed": lambda: _rmtree(replaced),
        "old checkpoints could not be removed": lambda: _prune(folder, path, keep),
    }
    wrong = []
    for what, finish in finishing.items():
        try:
            finish()
        except OSError as error:
            wrong.append(f"{what}: {_said(error)}")
    return "", "; ".join(wrong)


def _rmtree(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


def _prune(folder: Path, newest: Path, keep: int) -> None:
    """Let old ones go. Later steps than the one just made are of a course that was left, by damage
    or by choice: they are set aside, or the next start would go back to them."""
    there = steps(folder)
    place = there.index(newest)
    for later in there[:place]:
        aside = later.with_name(f"{ASIDE}{later.name}")
        shutil.rmtree(aside, ignore_errors=True)
        later.rename(aside)
    for old in there[place + keep :]:
        _remove(old)


def _remove(path: Path) -> None:
    """Renamed first: one that is half removed must not look like a checkpoint."""
    away = path.with_name(f"{REMOVED}{path.name}")
    path.rename(away)
    shutil.rmtree(away)


# ---- going on


def choose(folder: Path, wire: Group) -> tuple[Path | None, Manifest | None, tuple[str, ...]]:
    """The newest sound checkpoint, the same on every rank, and what is wrong with newer ones.

    All bytes are read, each rank's share by it. None when there is no checkpoint at all; when there
    are and none is sound, that is an error: to begin anew without a word would lose the run.
    """
    names = [path.name for path in steps(folder)] if wire.rank == 0 else []
    damaged: list[str] = []
    for name in json.loads(tell(wire, json.dumps(names))):
        manifest, wrong = _examined(folder / name, wire)
        if manifest is not None:
            return folder / name, manifest, tuple(damaged)
        damaged.append(f"{name} is damaged: " + "; ".join(wrong))
    if damaged:
        raise CheckpointError(f"{folder}: no checkpoint is sound.\n  " + "\n  ".join(damaged))
    return None, None, ()


def _examined(path: Path, wire: Group) -> tuple[Manifest | None, list[str]]:
    """The manifest when all ranks find everything right; what they complain of when not."""
    text, complaint = "", ""
    if wire.rank == 0:
        try:
            text = manifest_text(path)
        except (CheckpointError, OSError) as error:
            complaint = _said(error)
    if wrong := agree(wire, complaint):
        return None, wrong
    manifest = None
    try:
        manifest = parse_manifest(tell(wire, text), path)
        complaint = "; ".join(faults(path, manifest, wire.rank, wire.size))
    except (CheckpointError, OSError) as error:
        complaint = _said(error)
    wrong = agree(wire, complaint)
    return (None, sorted({each.partition(": ")[2] for each in wrong})) if wrong else (manifest, [])


def newest(folder: Path) -> tuple[Path, Manifest] | None:
    """The newest checkpoint whose manifest can be read. Its files are not looked at: what a run goes
    on from is chosen by `choose`, on all ranks."""
    for path in steps(folder):
        try:
            return path, read_manifest(path)
        except (CheckpointError, OSError):
            continue  # damaged, or removed by a run that goes on; `choose` tells
    return None


def load(
    folder: Path,
    holding: Holding,
    updates: Updates,
    *,
    path: Path | None = None,
    identity: Identity | None = None,
) -> Loaded | None:
    """Go on from the newest sound checkpoint of a run, or from the one at `path`, in this layout.

    Every rank calls it. Nothing is touched before all ranks have found the files sound and the
    model to be that of `identity`, or at least the tensors to be those of the model. None when there
    is no checkpoint.
    """
    wire, damaged = holding.wires.everyone, tuple[str, ...]()
    if path is None:
        path, manifest, damaged = choose(folder, wire)
    else:
        manifest, wrong = _examined(path, wire)
        if manifest is None:
            raise CheckpointError(f"{path} is damaged: " + "; ".join(wrong))
    if path is None or manifest is None:
        return None
    if identity is not None:
        refuse_other(path, manifest, identity)
    _all_right(wire, path, "; ".join(misfits(manifest, holding, updates)))
    complaint = ""
    try:
        with Reader(path, manifest) as reader:
            fill(reader, holding, updates)
    except (CheckpointError, OSError) as error:
        complaint = _said(error)
    _all_right(wire, path, complaint)
    show(holding)
    notices = () if identity is None else tuple(identity.notices(manifest))
    return Loaded(manifest.progress, path, damaged, notices)


def refuse_other(path: Path, manifest: Manifest, identity: Identity) -> None:
    """Refuse a checkpoint of another model; every rank decides the same from the manifest."""
    if wrong := identity.differences(manifest):
        way_out = (
            f"Undo the change of {identity.own}" if identity.own
            else "Leave `model` out, and the run takes the checkpoint's"
        )  # fmt: skip
        raise CheckpointError(
            f"{path} is of another model than the run's.\n- " + "\n- ".join(wrong)
            + f"\n{way_out}; or write another `out` to begin anew."
        )  # fmt: skip


def _all_right(wire: Group, path: Path, complaint: str) -> None:
    if wrong := agree(wire, complaint):
        raise CheckpointError(f"{path} cannot be loaded. " + "; ".join(wrong))
