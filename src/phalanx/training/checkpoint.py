"""Saving checkpoints. `checkpoint_load.py` resumes from them, `checkpoint_format.py`
defines the files.

A save is a folder `step-00000100` that appears whole or not at all: every rank writes
its own file into a hidden folder, all ranks agree that they have finished, then rank 0
writes the manifest and renames the folder. An error on one rank is reported to all
ranks, so that all take the same decision.
"""

import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from ..comm import Group
from ..comm.agree import errors_of, exchange
from ..layout.files import sync_folder, write_text
from ..parallel import Entry, Unit
from ..parallel.local import LocalModel
from . import checkpoint_format as stored
from .checkpoint_format import (
    MANIFEST,
    CheckpointError,
    Manifest,
    Progress,
    name_of,
    write_file,
)
from .optimizer import Update

# Prefixes of hidden folders: a save in progress, and a checkpoint about to be deleted.
SAVING, REMOVED = ".saving-", ".removed-"
ASIDE = "set-aside-"
# The error of a save whose folder was deleted by somebody else. The next save recreates
# it.
GONE = "its folder was deleted during the save"

Updates = Mapping[int, Update]
T = TypeVar("T")


def steps(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, newest first. Their integrity is not checked."""
    if not folder.is_dir():
        return []
    paths = [
        p
        for p in folder.iterdir()
        if stored.step_of(p.name) >= 0 and p.is_dir()
    ]
    return sorted(paths, key=lambda p: stored.step_of(p.name), reverse=True)


@dataclass(frozen=True)
class Saved:
    """The outcome of a save. `error` explains why the checkpoint is missing; the previous one is
    then intact.

    `notice`, on rank 0: the checkpoint is complete, and something beside it failed.
    """

    step: int
    path: Path
    error: str = ""
    notice: str = ""


class SaveError(CheckpointError):
    """Raised when a checkpoint could not be saved. Earlier checkpoints are intact."""

    exit_code = 1


class Saver:
    """Saves a run's checkpoints. Every rank has one, and its methods are collective.

    If `asynchronous`, `save` only copies the tensors to the host, and a thread writes
    them. `poll`, called once a step, checks whether all ranks have written; then a
    thread of rank 0 commits the checkpoint. Each call returns the saves that finished
    or failed during it.

    A failed save raises on every rank if `on_failure` is "stop"; otherwise
    `Saved.error` gives the reason. If the run's folder was deleted, it never raises.
    `keep` checkpoints are kept. Old ones are deleted only after the new one is on the
    disk and was read back, and never the one that `spare` names.
    """

    def __init__(
        self,
        folder: Path,
        local: LocalModel,
        updates: Updates,
        *,
        keep: int = 2,
        asynchronous: bool = False,
        on_failure: Literal["stop", "go on"] = "stop",
        spare: Callable[[], Path | None] = lambda: None,
    ) -> None:
        self.folder, self.local, self.updates = folder, local, updates
        self.keep, self.asynchronous, self.on_failure = (
            keep,
            asynchronous,
            on_failure,
        )
        self.spare = spare
        self.group: Group = local.groups.everyone
        self.buffers: dict[
            str, Tensor
        ] = {}  # host memory, reused by every save
        self.pending: _Pending | None = None

    def save(self, progress: Progress) -> tuple[Saved, ...]:
        """Start a save after finishing the previous one. Unless asynchronous, also
        finish it."""
        # One save at a time: the host's buffers and the hidden folder belong
        # to it.
        before = self.finish()
        hidden = self.folder / f"{SAVING}{progress.step:08}"
        try:
            together(
                self.group,
                lambda: hidden if self.group.rank else make_hidden(hidden),
            )
        except RanksFailed as failed:
            return (*before, self._decide(progress.step, failed.errors))
        file = hidden / stored.file_of(self.group.rank)
        self.pending = _Pending(progress.step, hidden, self.asynchronous)
        self.pending.begin(partial(write_own, file, *self.snapshot(progress)))
        return before if self.asynchronous else (*before, *self.finish())

    def poll(self) -> tuple[Saved, ...]:
        """Advance a save in progress once every rank has done its part."""
        if self.pending is None:
            return ()
        waiting = torch.tensor(
            # The sum over ranks is 0 when the threads of all of them have
            # ended.
            [int(self.pending.thread.is_alive())],
            device=self.group.device,
        )
        self.group.all_reduce(waiting)
        return () if int(waiting) else self._go_on(self.pending)

    def finish(self) -> tuple[Saved, ...]:
        """Wait for the save in progress and return its outcome."""
        decided: tuple[Saved, ...] = ()
        while self.pending is not None:
            # Otherwise `run` has done the work already.
            if self.asynchronous:
                self.pending.thread.join()
            decided = self._go_on(self.pending)
        return decided

    def _go_on(self, pending: "_Pending") -> tuple[Saved, ...]:
        """Advance a save whose current part has ended on all ranks: commit it on rank
        0, or report its outcome."""
        # Collective: every rank learns the errors of all and takes the same
        # branch.
        errors = errors_of(self.group, pending.error)
        if not errors and not pending.committing:
            # Rank 0 receives what each rank has written, and commits.
            reports = exchange(self.group, pending.result, 0)
            pending.committing, pending.result = True, ""
            if self.group.rank == 0:
                what = (
                    self.folder,
                    pending.hidden,
                    reports,
                    self.keep,
                    self.spare(),
                )
                pending.begin(partial(commit, *what))
            return ()
        self.pending = None
        if errors and self.group.rank == 0:
            shutil.rmtree(pending.hidden, ignore_errors=True)
        return (self._decide(pending.step, errors, pending.result),)

    def _decide(self, step: int, errors: list[str], notice: str = "") -> Saved:
        path, error = self.folder / name_of(step), "; ".join(errors)
        # A folder that somebody deleted is no failure of the disk: training
        # continues.
        removed = any(text.endswith(GONE) for text in errors)
        if error and self.on_failure == "stop" and not removed:
            raise SaveError(
                f"{path} could not be saved; the previous checkpoint is intact. {error}"
            )
        return Saved(step, path, error, "" if error else notice)

    def snapshot(
        self, progress: Progress
    ) -> tuple[Manifest, dict[str, Tensor]]:
        """Return this rank's part of the manifest and its tensors on the host, by
        title.

        The tensors are copied, unless training waits for the file.
        """
        numbers = {
            tensor.title: (tensor, own)
            for tensor, own in owned(self.local, self.updates)
        }
        device = self.local.pool.device
        tensors = {title: own for title, (_, own) in numbers.items()}
        # Training changes the tensors while a thread writes them, so they are
        # copied first.
        if self.asynchronous or device.type != "cpu":
            for title, own in tensors.items():
                if (
                    title not in self.buffers
                    or self.buffers[title].shape != own.shape
                ):
                    empty = torch.empty_like(
                        # Pinned host memory, which lets copies from a GPU run
                        # beside it.
                        own,
                        device="cpu",
                        pin_memory=own.is_cuda,
                    )
                    self.buffers[title] = empty
                tensors[title] = self.buffers[title].copy_(
                    own, non_blocking=True
                )
        # Copies are asynchronous on the stream: wait until the last one has
        # arrived.
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        # AdamW counts the steps of each weight; all must have the same count.
        counts = {
            x for update in self.updates.values() for x in update.steps_made
        }
        assert len(counts) <= 1, (
            f"weights of one rank have had {sorted(counts)} updates"
        )
        manifest = Manifest(
            **vars(progress),
            optimizer=optimizer_name(self.updates),
            updates=next(iter(counts), None),
            tensors=tuple(tensor for tensor, _ in numbers.values()),
        )
        return manifest, tensors


def write_own(
    path: Path, manifest: Manifest, tensors: Mapping[str, Tensor]
) -> str:
    """Write this rank's tensors to a file and return its part of the manifest as text,
    with their offsets.

    A rank that owns no tensors writes no file.
    """
    # All of this rank's elements are written by others: copies, or another
    # stage.
    if not tensors:
        return str(manifest)
    file, offsets = write_file(path, tensors)
    placed = tuple(
        replace(
            each, shards=(replace(each.shards[0], offset=offsets[each.title]),)
        )
        for each in manifest.tensors
    )
    return str(replace(manifest, files=(file,), tensors=placed))


class _Pending:
    """A save in progress: this rank's current part of it and the result.

    The part runs in a thread if the save is asynchronous.
    """

    def __init__(self, step: int, hidden: Path, asynchronous: bool) -> None:
        self.step, self.hidden, self.asynchronous = step, hidden, asynchronous
        self.committing = False
        self.result = self.error = ""

    def begin(self, work: Callable[[], str]) -> None:
        def caught() -> None:
            # An exception raised on one rank alone would hang the others; `_go_on`
            # shares the error.
            try:
                self.result = work()
            except Exception as error:
                gone = (
                    isinstance(error, FileNotFoundError)
                    and not self.hidden.exists()
                )
                self.error = GONE if gone else why(error)

        self.thread = threading.Thread(
            target=caught, name="checkpoint", daemon=True
        )
        (self.thread.start if self.asynchronous else self.thread.run)()


class RanksFailed(CheckpointError):
    """Errors of some ranks; all ranks raise it."""

    def __init__(self, what: str, errors: list[str]) -> None:
        super().__init__(what + "; ".join(errors))
        self.errors = errors


def together(group: Group, work: Callable[[], T], what: str = "") -> T:
    """Runs `work` on each rank and returns its result if all ranks succeed; otherwise all raise,
    and name the failures."""
    result: Any = None
    error = ""
    try:
        result = work()
    except (CheckpointError, OSError) as wrong:
        error = why(wrong)
    if errors := errors_of(group, error):
        raise RanksFailed(what, errors)
    return result  # type: ignore[no-any-return]


# ---- the tensors that a rank writes


def owned(
    local: LocalModel, updates: Updates
) -> Iterator[tuple[stored.StoredTensor, Tensor]]:
    """Yield the flat tensors that this rank writes: those that no rank before it holds.

    Each comes with its manifest entry: the whole tensor with one shard, at offset 0 of
    file 0.
    """
    for unit in local.every_unit:
        # A tied weight lives on several stages; the stage that runs the unit's own
        # piece writes it.
        if unit.piece not in local.pieces:
            continue
        if not unit.frozen:
            yield from _owned_state(updates[unit.number])
        # Replica 0 of each unit writes; the other replicas hold the same elements.
        if unit.groups.replica.rank:
            continue
        for entry in unit.entries():
            weight, box = entry.weight, box_of(entry)
            # Copies along tp are not counted, and padding has no elements.
            if not weight.counted or any(a == b for a, b in box):  # padding
                continue
            for kind, own in kept_of(unit, entry, updates):
                key = f"{kind}/{weight.name}"
                local_shape, numbers = (
                    tuple(weight.local),
                    (entry.start, entry.stop),
                )
                shard = stored.StoredShard(
                    key, box, local_shape, 0, 0, *numbers
                )
                dtype, shape = stored.NAMES[own.dtype], tuple(weight.shape)
                yield (
                    stored.StoredTensor(
                        kind, weight.name, dtype, shape, (shard,)
                    ),
                    own,
                )


def _owned_state(
    update: Update,
) -> Iterator[tuple[stored.StoredTensor, Tensor]]:
    """Yield what this rank alone keeps of the matrices that it owns, each tensor whole."""
    for name, state in update.owned.items():
        for kind in update.owned_shapes[name]:
            own = state[kind]
            shape = tuple(own.shape)
            box = tuple((0, length) for length in shape)
            shard = stored.StoredShard(
                f"{kind}/{name}", box, shape, 0, 0, 0, own.numel()
            )
            dtype = stored.NAMES[own.dtype]
            yield (
                stored.StoredTensor(kind, name, dtype, shape, (shard,)),
                own.flatten(),
            )


def box_of(entry: Entry) -> stored.Box:
    return tuple((cut.start, cut.stop) for cut in entry.weight.cuts)


def kept_of(
    unit: Unit, entry: Entry, updates: Updates
) -> Iterator[tuple[str, Tensor]]:
    """Tensors that this rank keeps of an entry: the weights and their optimizer state."""
    length = entry.stop - entry.start
    yield stored.WEIGHT, unit.home[entry.offset : entry.offset + length]
    if unit.frozen:
        return
    update = updates[unit.number]
    # The update's run that contains this entry.
    for run, view in update.every_run:
        if run.start <= entry.offset < run.stop:
            at = entry.offset - run.start
            for kind, kept in update.state.get(view, {}).items():
                # State of whole elements only: a step count is one number in
                # the manifest.
                if (
                    isinstance(kept, Tensor)
                    and kept.shape == view.shape
                    and kind != "step"
                ):
                    yield kind, kept[at : at + length]


def optimizer_name(updates: Updates) -> str:
    """The optimizer's name as torch spells it; "" on a rank that updates nothing."""
    return next((u.name for u in updates.values() if u.every_run), "")


# ---- rank 0's work on the folder


def why(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'the disk'}: {error.strerror}"
    return str(error) or type(error).__name__


def make_hidden(hidden: Path) -> Path:
    """Create the hidden folder of a save, and delete what killed saves left behind."""
    hidden.parent.mkdir(parents=True, exist_ok=True)
    for left in hidden.parent.iterdir():
        if left.name.startswith((SAVING, REMOVED)):
            # Leftovers that cannot be deleted do no harm, unless one has this save's
            # name.
            with suppress(OSError):
                shutil.rmtree(left)
    hidden.mkdir()
    return hidden


def commit(
    folder: Path,
    hidden: Path,
    reports: list[str],
    keep: int,
    spare: Path | None = None,
) -> str:
    """Publish a hidden folder, which all ranks have written, as a checkpoint; then
    delete old ones.

    Returns problems that occurred after it was published: the checkpoint is complete
    then, and the old ones are still there.
    """
    # Ranks report their part as a manifest, which is checked like any other.
    parts = [
        Manifest.decode(text, f"rank {rank}")
        for rank, text in enumerate(reports)
    ]
    text = str(Manifest.merged(parts))
    # parsed before it is written: an invalid manifest must not be published
    Manifest.parse(text, hidden)
    # The manifest last, and durably: a folder without it is no checkpoint.
    write_text(hidden / MANIFEST, text, durable=True)
    path = folder / name_of(parts[0].step)
    # A second save of a step takes the place of the first, which a rename
    # would not replace.
    replaced = path.with_name(f"{REMOVED}{path.name}")
    if path.exists():
        path.rename(replaced)
    # The rename publishes the checkpoint, whole.
    try:
        hidden.rename(path)
    # Bring the earlier one back: no moment without a checkpoint.
    except OSError:
        if replaced.exists():
            replaced.rename(path)
        raise
    problem = "its folder could not be synced to the disk"
    try:
        # The rename itself is on the disk only now, and only then may old ones
        # go.
        sync_folder(folder)
        problem = "old checkpoints could not be removed"
        if replaced.exists():
            shutil.rmtree(replaced)
        prune(folder, path, keep, spare)
    except OSError as error:
        return f"{problem}: {why(error)}"
    return ""


def prune(
    folder: Path, newest: Path, keep: int, spare: Path | None = None
) -> None:
    """Delete old checkpoints.

    Later steps than the new one belong to a course of training that was abandoned,
    after damage or by choice. They are set aside, or the next start would resume from
    them.
    """
    there = steps(folder)
    # Newest first: those before `at` are of later steps.
    at = there.index(newest)
    for later in there[:at]:
        aside = later.with_name(f"{ASIDE}{later.name}")
        shutil.rmtree(aside, ignore_errors=True)
        later.rename(aside)
    for old in (path for path in there[at + keep :] if path != spare):
        # Renamed first: a half-deleted folder must not look like a checkpoint.
        shutil.rmtree(old.rename(old.with_name(f"{REMOVED}{old.name}")))
