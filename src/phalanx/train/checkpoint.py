"""Saving a run and going on with it, in any layout.

A save is a folder `step-00000100` that appears whole or not at all: every rank writes its own file
into a hidden folder, all agree that it is there, rank 0 writes the manifest and renames. Whatever goes
wrong on one rank, all ranks learn of it and decide alike. Nearby: `checkpoint_file.py` (one file),
`checkpoint_manifest.py` (what is in which file), `folder.py` (files that are not trusted).
"""

from __future__ import annotations

import json
import math
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..comm import Group
from ..comm.agree import broadcast_text, errors_of, exchange
from ..layout.files import sync_folder, write_text
from ..parallel import Entry
from ..parallel.local import LocalModel
from .checkpoint_file import NAMES, CheckpointError, File, chunk_sums, read_header, write_file
from .checkpoint_manifest import (
    MANIFEST,
    WEIGHT,
    Logical,
    Manifest,
    Piece,
    Progress,
    Reader,
    faults,
    manifest_text,
    name_of,
    parse_manifest,
    read_manifest,
    report,
)
from .checkpoint_model import Identity, weight_differences
from .folder import Folder
from .optimizer import Update

_STEP = re.compile(r"step-(\d{8,18})")
# Hidden names of what is not a checkpoint: begun, or about to be removed.
SAVING, REMOVED = ".saving-", ".removed-"
ASIDE = "set-aside-"
# What torch's optimizers keep for every number.
KEPT = {"AdamW": ["exp_avg", "exp_avg_sq"], "SGD": ["momentum_buffer"]}

Updates = Mapping[int, Update]


def steps(folder: Path) -> list[Path]:
    """The checkpoints of a run, the newest first; whether they are sound is not checked."""
    if not folder.is_dir():
        return []
    paths = [p for p in folder.iterdir() if _STEP.fullmatch(p.name) and p.is_dir()]
    return sorted(paths, key=lambda p: int(p.name.removeprefix("step-")), reverse=True)


# ---- saving


@dataclass(frozen=True)
class Saved:
    """What became of a save; `error` says why it is not there, and then what was before still is.

    `notice`, on rank 0: the save is there and sound, and something beside it went wrong.
    """

    step: int
    path: Path
    error: str = ""
    notice: str = ""


def save(
    folder: Path, progress: Progress, local: LocalModel, updates: Updates, *, keep: int = 2
) -> Path:
    """Save now; every rank calls it. The folder that it made, or an error on every rank."""
    (saved,) = Saver(folder, local, updates, keep=keep).save(progress)
    return saved.path


class Saver:
    """Saves a run's checkpoints; every rank has one and calls it alike.

    Asynchronous: `save` only copies the numbers to the host, a thread writes them, and `poll`, once a
    step, asks all ranks whether all are done; the first step at which they are makes it a checkpoint.
    Each call gives the saves that were decided by it. A save that fails raises on every rank when
    `on_failure` is "stop", else its `Saved.error` says why. `keep` checkpoints stay, and no old one
    goes before the new one is there and has been read back.
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
    ) -> None:
        if keep < 1:
            raise CheckpointError(f"keep={keep}: at least 1 checkpoint stays.")
        self.folder, self.local, self.updates = folder, local, updates
        self.keep, self.asynchronous, self.on_failure = keep, asynchronous, on_failure
        self.group: Group = local.groups.everyone
        self.buffers: dict[str, Tensor] = {}  # host memory, used again by every save
        self.pending: _Pending | None = None

    def save(self, progress: Progress) -> tuple[Saved, ...]:
        """Begin a save, after the one before is decided; without a thread also end it."""
        before = self.finish()
        hidden = self.folder / f"{SAVING}{progress.step:08}"
        error = _make_hidden(hidden) if self.group.rank == 0 else ""
        if errors := errors_of(self.group, error):
            return (*before, self._decide(progress.step, errors))
        snapshot = Snapshot.take(self.local, self.updates, self.buffers)
        path = hidden / f"rank-{self.group.rank:05}.safetensors"
        self.pending = _Pending(progress, snapshot, path)
        if self.asynchronous:
            self.pending.thread.start()
            return before
        self.pending.write()
        return (*before, *self.finish())

    def poll(self) -> tuple[Saved, ...]:
        """Decide a save that every rank has written; nothing when there is none."""
        if self.pending is None:
            return ()
        waiting = torch.tensor([int(self.pending.thread.is_alive())], device=self.group.device)
        self.group.all_reduce(waiting)
        return () if int(waiting) else self.finish()

    def finish(self) -> tuple[Saved, ...]:
        """Wait for a save that is under way, and decide it."""
        if self.pending is None:
            return ()
        pending, self.pending = self.pending, None
        if self.asynchronous:
            pending.thread.join()
        hidden, notice = pending.path.parent, ""
        errors = errors_of(self.group, pending.error)
        if not errors:
            reports, error = exchange(self.group, pending.report, 0), ""
            if self.group.rank == 0:
                error, notice = commit(self.folder, hidden, pending.progress, reports, self.keep)
            errors = errors_of(self.group, error)
        if errors and self.group.rank == 0:
            shutil.rmtree(hidden, ignore_errors=True)
        return (self._decide(pending.progress.step, errors, notice),)

    def _decide(self, step: int, errors: list[str], notice: str = "") -> Saved:
        path, error = self.folder / name_of(step), "; ".join(errors)
        if error and self.on_failure == "stop":
            raise CheckpointError(f"{path} could not be saved, what was before stays. {error}")
        return Saved(step, path, error, notice)


class _Pending:
    """One rank's file while it is written, in this thread or in one of its own."""

    def __init__(self, progress: Progress, snapshot: Snapshot, path: Path) -> None:
        self.progress, self.snapshot, self.path = progress, snapshot, path
        self.report = self.error = ""
        self.thread = threading.Thread(target=self.write, name="checkpoint", daemon=True)

    def write(self) -> None:
        # All ranks learn of an error in `finish`: one that raised alone would hang the others.
        try:
            self.report = self.snapshot.write(self.path)
        except Exception as error:
            self.error = _why(error)


class Part(NamedTuple):
    """Numbers of a weight, or of what the optimizer keeps for them."""

    kind: str
    entry: Entry
    numbers: Tensor  # flat: numbers entry.start to entry.stop of this rank's shard

    def described(self, offset: int = 0) -> Logical:
        """The whole tensor, with these numbers as its only piece."""
        entry, weight = self.entry, self.entry.weight
        key = f"{self.kind}/{weight.name}"
        piece = Piece(0, key, offset, _box(entry), weight.local, entry.start, entry.stop)
        return Logical(self.kind, weight.name, NAMES[self.numbers.dtype], weight.shape, (piece,))


def owned(local: LocalModel, updates: Updates) -> Iterator[Part]:
    """The numbers that this rank writes: those that no rank before it has."""
    for number, unit in local.units.items():
        # A tied weight lies on several stages; the one that runs its unit's own piece writes it.
        if number not in local.pieces or unit.groups.replica.rank:
            continue
        for entry in unit.entries():
            padding = any(a == b for a, b in _box(entry))
            if entry.weight.counted and not padding:
                run = slice(entry.offset, entry.offset + entry.stop - entry.start)
                yield Part(WEIGHT, entry, unit.home[run])
                for kind, kept in _state(updates[number], entry):
                    yield Part(kind, entry, kept)


def _box(entry: Entry) -> tuple[tuple[int, int], ...]:
    return tuple((cut.start, cut.stop) for cut in entry.weight.cuts)


def _state(update: Update, entry: Entry) -> Iterator[tuple[str, Tensor]]:
    """What the optimizer keeps for an entry: one number for each of its numbers."""
    for run, view in update.runs:
        if update.torch is not None and run.start <= entry.offset < run.stop:
            at = entry.offset - run.start
            for kind, kept in update.torch.state.get(view, {}).items():
                if isinstance(kept, Tensor) and kept.shape == view.shape and kind != "step":
                    yield kind, kept[at : at + entry.stop - entry.start]


def _optimizer(updates: Updates) -> str:
    return next((type(u.torch).__name__ for u in updates.values() if u.torch is not None), "")


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A rank's own numbers on the host, which training does not change any more."""

    tensors: dict[str, Tensor]
    described: tuple[Logical, ...]
    optimizer: str = ""
    updates: tuple[float, ...] = ()

    @classmethod
    def take(cls, local: LocalModel, updates: Updates, buffers: dict[str, Tensor]) -> Snapshot:
        """Copy into `buffers`, host memory that is kept from one snapshot to the next."""
        tensors: dict[str, Tensor] = {}
        described = []
        for part in owned(local, updates):
            logical, numbers = part.described(), part.numbers
            key = logical.title
            if key not in buffers or buffers[key].shape != numbers.shape:
                buffers[key] = torch.empty_like(numbers, device="cpu", pin_memory=numbers.is_cuda)
            tensors[key] = buffers[key].copy_(numbers, non_blocking=True)
            described.append(logical)
        if local.pool.device.type == "cuda":
            torch.cuda.current_stream(local.pool.device).synchronize()
        counts = {
            float(state["step"])
            for update in updates.values()
            if update.torch is not None
            for state in update.torch.state.values()
            if "step" in state
        }
        return cls(tensors, tuple(described), _optimizer(updates), tuple(sorted(counts)))

    def write(self, path: Path) -> str:
        """Write the file and read it back; the report for the manifest."""
        file: File | None = None
        described = []
        if self.tensors:
            file = write_file(path, self.tensors)
            folder = Folder(path.parent, CheckpointError)
            with folder.open(path.name) as again:
                if tuple(chunk_sums(again)) != file.chunks:
                    raise CheckpointError(f"{path}: read back, it is not what was written.")
            header = read_header(folder, path.name)
            for each in self.described:
                piece = replace(each.pieces[0], offset=header[each.title].offset)
                described.append(replace(each, pieces=(piece,)))
        return report(file, described, self.optimizer, self.updates)


def _why(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'the disk'}: {error.strerror}"
    return str(error) or type(error).__name__


def _make_hidden(hidden: Path) -> str:
    """Make the hidden folder of a save, and remove what saves that were killed have left."""
    try:
        hidden.parent.mkdir(parents=True, exist_ok=True)
        for left in hidden.parent.iterdir():
            if left.name.startswith((SAVING, REMOVED)):
                # What cannot be removed is not in the way, unless it has the name of this save.
                with suppress(OSError):
                    shutil.rmtree(left)
        hidden.mkdir()
    except OSError as error:
        return _why(error)
    return ""


def commit(
    folder: Path, hidden: Path, progress: Progress, reports: list[str], keep: int
) -> tuple[str, str]:
    """Make what all ranks have written a checkpoint, then remove old ones. Why it is none, and what
    went wrong after it had become one: then it is there, and so is what was before."""
    path = folder / name_of(progress.step)
    replaced = path.with_name(f"{REMOVED}{path.name}")
    try:
        text = str(Manifest.merged(progress, reports))
        Manifest.parse(text, str(hidden / MANIFEST))  # what cannot be read is not written
        write_text(hidden / MANIFEST, text, durable=True)
        if path.exists():
            path.rename(replaced)
        hidden.rename(path)
    except (OSError, ValueError) as error:
        with suppress(OSError):
            if replaced.exists() and not path.exists():
                replaced.rename(path)
        return _why(error), ""
    finishing: dict[str, Callable[[], None]] = {
        "its folder could not be brought to the disk": lambda: sync_folder(folder),
        "what it replaces could not be removed": lambda: _remove(replaced),
        "old checkpoints could not be removed": lambda: _prune(folder, path, keep),
    }
    wrong = []
    for what, finish in finishing.items():
        try:
            finish()
        except OSError as error:
            wrong.append(f"{what}: {_why(error)}")
    return "", "; ".join(wrong)


def _prune(folder: Path, newest: Path, keep: int) -> None:
    """Remove old ones. Later steps than the one just made are of a course that was left, by damage
    or by choice: they are set aside, or the next start would go back to them."""
    there = steps(folder)
    at = there.index(newest)
    for later in there[:at]:
        aside = later.with_name(f"{ASIDE}{later.name}")
        shutil.rmtree(aside, ignore_errors=True)
        later.rename(aside)
    for old in there[at + keep :]:
        # Renamed first: one that is half removed must not look like a checkpoint.
        _remove(old.rename(old.with_name(f"{REMOVED}{old.name}")))


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


# ---- going on


@dataclass(frozen=True)
class Loaded:
    """Where a run goes on, what was passed over as damaged on the way there, and what a person should
    know of the model (see `checkpoint_model.py`)."""

    progress: Progress
    path: Path
    damaged: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()


def load(
    folder: Path,
    local: LocalModel,
    updates: Updates,
    *,
    path: Path | None = None,
    identity: Identity | None = None,
) -> Loaded | None:
    """Go on from the newest sound checkpoint of a run, or from the one at `path`, in this layout.

    Every rank calls it. Nothing is changed before all ranks have found the files sound and the
    model to be that of `identity`, or at least the tensors to be those of the model. None when there
    is no checkpoint.
    """
    group, damaged = local.groups.everyone, tuple[str, ...]()
    if path is None:
        path, manifest, damaged = choose(folder, group)
    else:
        manifest, wrong = _examine(path, group)
        if manifest is None:
            raise CheckpointError(f"{path} is damaged: " + "; ".join(wrong))
    if path is None or manifest is None:
        return None
    if identity is not None:
        refuse_other(path, manifest, identity)
    _raise_on_all(group, path, "; ".join(misfits(manifest, local, updates)))
    error = ""
    try:
        with Reader(path, manifest) as reader:
            fill(reader, local, updates)
    except (CheckpointError, OSError) as wrong_file:
        error = _why(wrong_file)
    _raise_on_all(group, path, error)
    for unit in local.units.values():  # ranks gather here, so all must come
        unit.refresh()
        if unit.resident and unit.groups.gather.size > 1:
            unit.gather().wait()
    notices = () if identity is None else tuple(identity.notices(manifest))
    return Loaded(manifest.progress, path, damaged, notices)


def choose(folder: Path, group: Group) -> tuple[Path | None, Manifest | None, tuple[str, ...]]:
    """The newest sound checkpoint, the same on every rank, and what is wrong with newer ones.

    All bytes are read, a share by each rank. None when there is no checkpoint at all; when there
    are and none is sound, that is an error: to begin anew without a word would lose the run.
    """
    names = [path.name for path in steps(folder)] if group.rank == 0 else []
    damaged: list[str] = []
    for name in json.loads(broadcast_text(group, json.dumps(names))):
        manifest, wrong = _examine(folder / name, group)
        if manifest is not None:
            return folder / name, manifest, tuple(damaged)
        damaged.append(f"{name} is damaged: " + "; ".join(wrong))
    if damaged:
        raise CheckpointError(f"{folder}: no checkpoint is sound.\n  " + "\n  ".join(damaged))
    return None, None, ()


def _examine(path: Path, group: Group) -> tuple[Manifest | None, list[str]]:
    """The manifest when all ranks find everything right; what is wrong when not."""
    text = error = ""
    if group.rank == 0:
        try:
            text = manifest_text(path)
        except (CheckpointError, OSError) as wrong_file:
            error = _why(wrong_file)
    if errors := errors_of(group, error):
        return None, errors
    manifest = None
    try:
        manifest = parse_manifest(broadcast_text(group, text), path)
        error = "; ".join(faults(path, manifest, group.rank, group.size))
    except (CheckpointError, OSError) as wrong_file:
        error = _why(wrong_file)
    if errors := errors_of(group, error):
        return None, sorted({each.partition(": ")[2] for each in errors})
    return manifest, []


def newest(folder: Path) -> tuple[Path, Manifest] | None:
    """The newest checkpoint whose manifest can be read. Its files are not looked at: what a run goes
    on from is chosen by `choose`, on all ranks."""
    for path in steps(folder):
        try:
            return path, read_manifest(path)
        except (CheckpointError, OSError):
            continue  # damaged, or removed by a run that goes on; `choose` says which
    return None


def refuse_other(path: Path, manifest: Manifest, identity: Identity) -> None:
    """Refuse a checkpoint of another model; every rank decides the same from the manifest."""
    if wrong := identity.differences(manifest):
        way_out = "Leave `model` out, and the run takes the checkpoint's"
        if identity.own:
            way_out = f"Undo the change of {identity.own}"
        lines = "\n- ".join(wrong)
        raise CheckpointError(
            f"{path} is of another model than the run's.\n- {lines}\n{way_out}; or write another"
            " `out` to begin anew."
        )


def _raise_on_all(group: Group, path: Path, error: str) -> None:
    if errors := errors_of(group, error):
        raise CheckpointError(f"{path} cannot be loaded. " + "; ".join(errors))


def misfits(manifest: Manifest, local: LocalModel, updates: Updates) -> list[str]:
    """Why the checkpoint's tensors are not those of this rank's model and optimizer."""
    own = {w.name: tuple(w.shape) for unit in local.units.values() for w in unit.order}
    wrong = weight_differences(manifest, own)
    kinds, optimizer = _kinds(manifest), _optimizer(updates)
    if not kinds:
        return wrong
    if kinds != KEPT.get(manifest.optimizer):
        wrong.append(f"keeps {', '.join(kinds)} as the state of {manifest.optimizer or 'nothing'}")
    if (manifest.optimizer == "AdamW") != (manifest.updates is not None):
        wrong.append(f"has {manifest.updates} updates by {manifest.optimizer}")
    if optimizer and manifest.optimizer != optimizer:
        wrong.append(f"keeps the state of {manifest.optimizer}, the run's optimizer is {optimizer}")
    shapes = {(each.kind, each.name): each.shape for each in manifest.tensors}
    names = [name for kind, name in shapes if kind == WEIGHT]
    for kind in kinds:
        lost = [name for name in names if shapes.get((kind, name)) != shapes[WEIGHT, name]]
        wrong += [f"{kind} of {lost[0]} is missing or of another shape"] if lost else []
    return wrong


def _kinds(manifest: Manifest) -> list[str]:
    """What the optimizer keeps for each number, in this checkpoint."""
    return sorted({each.kind for each in manifest.tensors} - {WEIGHT})


def fill(reader: Reader, local: LocalModel, updates: Updates) -> None:
    """This rank's homes and optimizer state become those of the checkpoint."""
    kinds = _kinds(reader.manifest)
    for number, unit in local.units.items():
        fresh = _fresh_state(updates[number], kinds, reader.manifest.updates)
        for entry in unit.entries():
            run = slice(entry.offset, entry.offset + entry.stop - entry.start)
            unit.home[run] = _numbers(reader, WEIGHT, entry).to(unit.home)
            for kind in kinds:
                own, kept = next(f for f in fresh if f[0].start <= entry.offset < f[0].stop)
                at = slice(run.start - own.start, run.stop - own.start)
                kept[kind][at] = _numbers(reader, kind, entry).to(kept[kind])


def _fresh_state(
    update: Update, kinds: list[str], count: float | None
) -> list[tuple[slice, dict[str, Tensor]]]:
    """Empty state for each run of a unit, as torch's optimizers would make it."""
    fresh = []
    for run, view in update.runs:
        assert update.torch is not None
        kept = {kind: torch.zeros_like(view) for kind in kinds}
        update.torch.state.pop(view, None)
        if kinds:
            update.torch.state[view] = dict(kept)
            if count is not None:
                # A fused optimizer keeps its count where the numbers are, in float32.
                step = torch.tensor(count, dtype=torch.float32, device=view.device)
                update.torch.state[view]["step"] = step
        fresh.append((run, kept))
    return fresh


def _numbers(reader: Reader, kind: str, entry: Entry) -> Tensor:
    """An entry's numbers, flat: whole rows of its shard are read, padding is zero."""
    tensor, local, box = reader.tensors[kind, entry.weight.name], entry.weight.local, _box(entry)
    if not box:
        return reader.whole(tensor).view(-1)
    row = math.prod(local[1:])
    first, last = entry.start // row, -(-entry.stop // row)
    start, stop = box[0]
    rows = (min(start + first, stop), min(start + last, stop))
    part = reader.box(tensor, (rows, *box[1:]))
    padded = part.new_zeros(last - first, *local[1:])
    padded[tuple(slice(0, n) for n in part.shape)] = part
    return padded.view(-1)[entry.start - first * row : entry.stop - first * row]
