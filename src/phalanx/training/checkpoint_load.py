"""Resuming: choosing a checkpoint, comparing its model with the run's, and loading it
into this layout.

No weight is changed before every rank has found the files intact and the model to be
the run's. `checkpoint_format.py` defines the files.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ..comm import Group
from ..comm.agree import broadcast_text
from ..layout import Layout, LayoutError, Shape
from ..layout.adapters import ADAPTERS, adapts
from ..layout.families import code_of
from ..layout.optimizer_row import OptimizerRow
from ..layout.optimizers import OPTIMIZERS
from ..layout.run import Run
from ..layout.source import arguments_text, split_name
from ..parallel import Entry, Model
from ..parallel.local import LocalModel
from . import checkpoint_format as stored
from .agreement import flat, modules_of
from .checkpoint import (
    RanksFailed,
    Updates,
    box_of,
    kept_of,
    optimizer_name,
    steps,
    together,
    why,
)
from .checkpoint_format import (
    DTYPES,
    WEIGHT,
    Box,
    CheckpointError,
    Manifest,
    StoredTensor,
    read_into,
)
from .checkpoint_memory import MemoryCheckpoints
from .checkpoint_remote import Remote, fetch_newer
from .data.batches import Batches
from .data.digests import SourceRecord, differences, records_of
from .data.token_files import DataError
from .folder import Folder
from .own_optimizer import OwnUpdate

# bytes read at once where a rank keeps a part of each row
BLOCK = 16 << 20
_OPTIMIZERS = {row.stored: row for row in OPTIMIZERS.values()}


@dataclass(frozen=True)
class Loaded:
    """The position at which a run continues, the damaged checkpoints that were skipped,
    and notices about the model (`ModelIdentity.notices`)."""

    progress: stored.Progress
    path: Path
    damaged: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()


def load(
    folder: Path,
    local: LocalModel,
    updates: Updates,
    *,
    identity: ModelIdentity | None = None,
    optimizer: str = "",
    adopt: bool = False,
    remote: Remote | None = None,
    memory: MemoryCheckpoints | None = None,
) -> Loaded | None:
    """Resume from the newest intact checkpoint of a run; return None if there is none.

    A newer checkpoint in the folder `remote` is downloaded first. Neither is read if
    `memory` has one at least as new.

    Collective. Nothing changes before all ranks have found the files intact and the
    model equal to `identity`. With `adopt` it is enough that the tensors fit. State of
    another optimizer than `optimizer`, the run's name for it, is refused.
    """
    group, found, damaged = local.groups.everyone, None, list[str]()
    # Memory is faster, but only if it is at least as new as the newest on the
    # disk.
    if memory is not None:
        there = steps(folder)[:1] if group.rank == 0 else []
        least = broadcast_text(
            group, str(stored.step_of(there[0].name) if there else 0)
        )
        found = memory.find(int(least))
    if found is None:
        found, damaged = choose(folder, group, remote)
    if found is None:
        return None
    path, manifest = found
    if identity is not None and not adopt:
        refuse_other(path, manifest, identity)
    if optimizer:
        refuse_optimizer(path, manifest, optimizer)

    # Nothing is changed before the tensors fit on all ranks.
    problem = f"{path} cannot be loaded. "
    # Collective: one rank's error is raised by all.
    together(group, lambda: _check(manifest, local, updates), problem)
    together(
        group,
        lambda: _fill(TensorReader(path, manifest), local, updates),
        problem,
    )
    # What is computed with follows from the loaded weights.
    _refresh(local)
    notices = [] if identity is None else identity.notices(manifest)
    if identity is not None and adopt:
        notices += [
            f"adopted: {each}" for each in identity.differences(manifest)
        ]
    return Loaded(manifest, path, tuple(damaged), tuple(notices))


def begin(
    source: Callable[[], TensorReader], local: LocalModel, updates: Updates
) -> None:
    """Fill this rank's weights from elsewhere before the first step. Collective.

    The source holds no adapters: they keep their initial values.
    """

    def fill() -> None:
        reader = source()
        # Adapters are not in the source, so they may be missing.
        _check(reader.manifest, local, updates, drawn=adapts)
        _fill(reader, local, updates)

    # The weights were drawn just before, and other ranks may still read this rank's part
    # of them in their gathers.
    local.groups.everyone.barrier()
    together(local.groups.everyone, fill, "the weights cannot be read. ")
    _refresh(local)


def _refresh(local: LocalModel) -> None:
    for unit in local.every_unit:
        unit.bring_up()


# ---- choosing a checkpoint


Found = tuple[Path, Manifest]


def choose(
    folder: Path, group: Group, remote: Remote | None = None
) -> tuple[Found | None, list[str]]:
    """Return the newest intact checkpoint of a folder, and the problems of newer ones.

    Newer checkpoints in the folder `remote` are downloaded first. Returns None if there
    are no checkpoints at all. Raises if there are some but none is intact: starting
    over silently would lose the run.
    """
    # `known` are steps that were tried: a damaged download is not tried again.
    known, failed = set[int](), list[str]()
    # Each turn looks at the disk again, with what was downloaded meanwhile.
    while True:
        found, damaged = _newest_sound(folder, group)
        if remote:
            at = found[1].step if found else -1
            fetched, error = fetch_newer(remote, folder, at, known, group)
            failed += [error] if error else []
            if fetched:
                continue
        if found is None and (damaged or failed):
            what = "is sound" if damaged else "could be fetched"
            first = f"{folder}: no checkpoint {what}."
            raise CheckpointError("\n  ".join((first, *damaged, *failed)))
        return found, damaged + failed


def _newest_sound(
    folder: Path, group: Group
) -> tuple[Found | None, list[str]]:
    """Return the newest undamaged checkpoint, the same on every rank.

    All bytes are read, a share by each rank.
    """
    names = [path.name for path in steps(folder)] if group.rank == 0 else []
    damaged = list[str]()
    # Rank 0 lists the folder: on a shared file system others may see it later.
    for name in json.loads(broadcast_text(group, json.dumps(names))):
        try:
            return (folder / name, _sound(folder / name, group)), damaged
        except RanksFailed as failed:
            # "rank 3: the reason" -> the reason, which several ranks may give.
            wrong = sorted({each.partition(": ")[2] for each in failed.errors})
            damaged.append(f"{name} is damaged: " + "; ".join(wrong))
    return None, damaged


def _sound(path: Path, group: Group) -> Manifest:
    """Return the manifest of a checkpoint; raise if any rank finds a fault in its
    files."""
    read = together(
        group, lambda: stored.manifest_text(path) if group.rank == 0 else ""
    )
    # One manifest for all ranks, even if the file is replaced meanwhile.
    text = broadcast_text(group, read)

    def examined() -> Manifest:
        manifest = Manifest.parse(text, path)
        # Each rank reads a share of the files.
        if wrong := stored.faults(path, manifest, group.rank, group.size):
            raise CheckpointError("; ".join(wrong))
        return manifest

    return together(group, examined)


def newest(folder: Path) -> tuple[Path, Manifest] | None:
    """Return the newest checkpoint whose manifest can be read.

    Its files are not examined: `choose` decides on all ranks where a run resumes.
    """
    for path in steps(folder):
        try:
            return path, stored.read_manifest(path)
        except (CheckpointError, OSError):
            continue  # damaged, or deleted by a running run; `choose` reports it
    return None


# ---- comparing the model

LINES = (
    5  # weights listed in an error; every weight of another model may differ
)


@dataclass(frozen=True)
class ModelIdentity:
    """Identity of a checkpoint's model. Taken before the model is sharded.

    Some sizes change what a model computes without changing any weight's shape (heads,
    rope, eps), so the shape is compared key by key. `own` is FILE.py:Class of a user's
    model, or "". Its file and the user's modules that it imports are hashed: changed
    code causes a notice, and only a different structure is refused.
    """

    shape: Shape
    weights: Mapping[str, tuple[int, ...]]
    # the manifest's record of the model beside its shape, as decoded from JSON
    record: Mapping[str, Any]

    @classmethod
    def of(cls, model: Model, shape: Shape, own: str = "") -> ModelIdentity:
        record = {
            "pieces": [name for name, _ in model.pieces],
            "tied": [list(pair) for pair in model.tied],
            "counts": dict(model.counts),
            "own": own,
            "source": hashlib.sha256(
                Path(code_of(own)[0]).read_bytes()
            ).hexdigest()
            if own
            else "",
            "modules": modules_of(own) if own else {},
        }
        weights = {
            name: tuple(weight.shape) for name, weight in model.weights.items()
        }
        return cls(shape, weights, record)

    def differences(self, manifest: Manifest) -> list[str]:
        """List the differences between a checkpoint's model and this one: keys with
        both values, then weights.

        A manifest without a shape or a record is compared by its weights alone.
        """
        # Sizes first: they explain most differences of weights.
        if manifest.shape and (
            wrong := differing_sizes(manifest.shape, self.shape)
        ):
            return wrong
        wrong = _differing(
            _record(manifest), self.record, ("pieces", "tied", "counts")
        )
        wrong = wrong or weight_differences(manifest, self.weights) + [
            f"has a weight {each.name[:80]!r}, which the model lacks"
            for each in manifest.tensors
            if each.kind == WEIGHT and each.name not in self.weights
        ]
        # At most `LINES`, because every weight of another model may differ.
        more = f"and {len(wrong) - LINES} more weights"
        return wrong if len(wrong) <= LINES else [*wrong[:LINES], more]

    def notices(self, manifest: Manifest) -> list[str]:
        """List reasons to doubt that the checkpoint's model is this one, though nothing
        proves a difference."""
        there, here = _record(manifest), self.record
        was, source = own_model(manifest), str(there.get("source", ""))
        if manifest.shape is None:
            return [
                "the checkpoint does not record the model's shape: only weights were compared"
            ]
        # The same code under another path or name of a file is the same model.
        same = (
            source == here["source"]
            and split_name(was)[1] == split_name(here["own"])[1]
        )
        if there and was != here["own"] and not (was and source and same):
            first, second = (
                repr(n[:200]) if n else "the built-in one"
                for n in (here["own"], was)
            )
            return [
                f"the model is {first}, the checkpoint is of {second}: names and sizes are equal, but the"
                " code differs"
            ]
        changed = []
        made = [arguments_text(own) or "nothing" for own in (here["own"], was)]
        if was and made[0] != made[1]:
            changed.append((f"what {split_name(was)[1]} is made with", *made))
        # The code of the class itself, then the modules that it imports.
        if was and source and source != here["source"]:
            both = (f"sha256 {each[:16]}" for each in (here["source"], source))
            changed.append((code_of(was)[0], *both))
        modules = there.get("modules") if was else None
        if isinstance(modules, dict):
            for name in sorted({*modules, *here["modules"]}):
                new, old = (
                    str(each.get(name, "none"))
                    for each in (here["modules"], modules)
                )
                if new != old:
                    changed.append(
                        (f"the module {name} of {code_of(was)[0]}", new, old)
                    )
        # A few lines suffice to see that something has changed.
        more = [f"and {len(changed) - LINES} more modules have changed"]
        return [
            f"{what[:200]} has changed since the checkpoint was made ({new[:30]}, was {old[:30]}):"
            " names and sizes are equal; check that it still computes the same"
            for what, new, old in changed[:LINES]
        ] + (more if len(changed) > LINES else [])


def refuse_other(
    path: Path, manifest: Manifest, identity: ModelIdentity
) -> None:
    """Refuse a checkpoint of another model. All ranks decide alike, since all have the
    manifest."""
    if wrong := identity.differences(manifest):
        way_out = "Leave `model` out, and the run takes the checkpoint's"
        if own := identity.record["own"]:
            way_out = f"Undo the change to {own}"
        lines = "\n- ".join(wrong)
        raise CheckpointError(
            f"{path} belongs to a different model than the run's.\n- {lines}\n{way_out}; or write another"
            " `out` to start over, or --adopt to continue with other sizes and these weights."
        )


def refuse_optimizer(path: Path, manifest: Manifest, name: str) -> None:
    """Refuse a checkpoint with the state of another optimizer than the run's
    `optimizer.name`."""
    was = manifest.optimizer.lower()
    if _kinds(manifest) and was != name:
        raise CheckpointError(
            f"{path} holds the state of optimizer.name = {was!r}, but the run has {name!r}. Write"
            f" optimizer.name = {was!r}, or another `out` to start over."
        )


def data_notices(
    progress: stored.Progress,
    path: Path,
    data: Sequence[SourceRecord],
    batches: Batches,
) -> list[str]:
    """List differences between the run's data and the data that a checkpoint was
    trained on.

    `data` are the records of the run.
    """
    if not progress.data:  # an imported model was not trained on any
        return []
    # Recorded with its content, or in an earlier version as a mark alone.
    table = progress.config.get("data")
    if table is None:
        return _earlier_notices(progress, path, batches)
    try:
        if not isinstance(table, dict):
            raise DataError("its record is not a table")
        wrong = differences(
            records_of(table, f"{path}: body: config: data", DataError), data
        )
    except (DataError, OSError) as error:
        return [
            f"the data cannot be compared with what {path} was trained on: {why(error)}"
        ]
    if not wrong:
        return []
    more = [f"and {len(wrong) - LINES} more"] if len(wrong) > LINES else []
    lines = "; ".join([*wrong[:LINES], *more])
    return [
        f"the data is not what {path} was trained on: {lines}. The run continues after"
        f" {progress.cursor:,} sequences of it; if you did not intend that, stop it and restore the data"
    ]


def _earlier_notices(
    progress: stored.Progress, path: Path, batches: Batches
) -> list[str]:
    """Return the notices for a checkpoint of an earlier version, which recorded only
    sizes and beginnings."""
    if progress.data != batches.mark:
        return [
            f"the data is not what {path} was trained on: its beginning or size differs"
        ]
    if any(corpus.files for corpus in batches.corpora):
        return [
            f"{path} was made by an earlier version, which recorded the beginning and the size of its"
            " data: these are unchanged. The next checkpoint records the whole content"
        ]
    return []


# Every key or table of a run, by the effect of a changed value when the run resumes. A
# test walks all keys, so that a new one has to be added to one of these three.
REFUSED = {
    "model": "the model's identity, unless --adopt is given",
    "freeze": "of the model's sizes",
    **{row.key: "of the model's sizes" for row in ADAPTERS},
    "seed": "all random numbers follow from it",
}
TOLD = (
    "precision", "document_masks", "packing", "batch", "microbatch", "sequence", "epochs", "steps", "z_loss",
    "optimizer", "validation.batches", "loss", "dpo", "dropout",
)  # fmt: skip
UNTOLD = {
    "weights": "only where a run begins: later weights are the checkpoint's",
    "layout": "any layout gives the same numbers; its precision and matmul are told",
    "data": "compared by content: see data_notices",
    "out": "where the run lies",
    "machine": "for estimates",
    "memory": "what recompute:fit recomputes changes no number",
    "verify": "what is compared before the ranks start",
    "verify_own": "what is compared before the ranks start",
    "checkpoint": "when and where to save",
    "train": "restarts, checkpoints in memory and fallback layouts",
    "network": "how hosts reach each other",
    "metrics": "what is logged",
    "validation.every": "when to validate",
    "sample": "what the model writes beside its loss",
    "profile": "what is traced",
    "prepare": "the tokens that it makes are compared by content",
    "hang": "when a run is ended",
}


def changed_settings(
    manifest: stored.Progress, run: Run, layout: Layout, shape: Shape
) -> list[str]:
    """List settings that affect training or validation and differ from the
    checkpoint's, with both values.

    For optional keys the effective values are compared.
    """
    was = manifest.config.get("run")
    old = dict(flat(was if isinstance(was, dict) else {}))
    # Through JSON, as the checkpoint's values went.
    new = dict(flat(json.loads(json.dumps(asdict(run)))))
    keys = [key for key in new if key in TOLD or key.partition(".")[0] in TOLD]
    # Values in use, in place of those that were left out.
    if manifest.shape is not None:
        old["batch"] = manifest.shape.batch
        old["sequence"] = old.get("sequence") or manifest.shape.sequence
    new |= {"batch": shape.batch, "sequence": run.tokens(shape)}
    # Compared as the layout's, where a run may set it as well.
    old.pop("precision", None)
    with suppress(LayoutError):  # a layout of another version
        old |= _arithmetic(Layout.parse(manifest.layout))
    new |= _arithmetic(layout)
    return _differing(old, new, [*keys, "matmul"])


def _arithmetic(layout: Layout) -> dict[str, str]:
    return {
        "precision": layout.precision,
        "matmul": layout.matmul or "in the precision",
    }


def weight_differences(
    manifest: Manifest, weights: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """List weights that a checkpoint lacks or has in another shape."""
    there = {
        each.name: each.shape
        for each in manifest.tensors
        if each.kind == WEIGHT
    }
    return [
        f"{name} is {list(there[name])}, but {list(shape)} in the model"
        if name in there
        else f"has no weight {name}"
        for name, shape in weights.items()
        if there.get(name) != shape
    ]


def differing_sizes(there: Shape, here: Shape) -> list[str]:
    """List the keys in which a checkpoint's shape and the run's differ, with both
    values."""
    # These may change from start to start.
    free = {"name", "source", "batch", "dropout"}
    # Sequences may be of any length if positions are not learned.
    if "learned" not in (there.positions, here.positions):
        free.add("sequence")  # only learned positions are weights
    old, new = asdict(there), asdict(here)
    return _differing(old, new, [key for key in old if key not in free])


def _differing(
    there: Mapping[str, Any], here: Mapping[str, Any], keys: Iterable[str]
) -> list[str]:
    return [
        f"{key}: {_short(there[key])} in the checkpoint, {_short(here[key])} in the run"
        for key in keys
        if key in there and there[key] != here[key]
    ]


def table_of(shape: Shape) -> dict[str, Any]:
    """Convert a shape to a run file's `model` table, without default values."""
    plain = {
        f.name: f.default for f in fields(shape) if f.default is not MISSING
    }
    sizes = asdict(shape)
    return {
        key: n
        for key, n in sizes.items()
        if key not in plain or plain[key] != n
    }


def own_model(manifest: Manifest) -> str:
    """FILE.py:Class if a checkpoint holds a user's model, or ""."""
    return str(_record(manifest).get("own", ""))[:1000]


def _record(manifest: Manifest) -> Mapping[str, Any]:
    record = manifest.config.get("model")
    return record if isinstance(record, dict) else {}


def _short(value: object) -> str:
    text = str(value) or "''"
    return text if len(text) <= 80 else text[:77] + "..."


# ---- loading the tensors into this layout


def _check(
    manifest: Manifest,
    local: LocalModel,
    updates: Updates,
    drawn: Callable[[str], bool] = lambda name: False,
) -> None:
    """Refuse tensors that do not fit this rank's model and optimizer. Weights that are
    `drawn` may be missing."""
    own = {
        w.name: tuple(w.shape) for unit in local.every_unit for w in unit.order
    }
    wrong = weight_differences(
        manifest, {n: shape for n, shape in own.items() if not drawn(n)}
    )
    if kinds := _kinds(manifest):
        name, optimizer = manifest.optimizer, optimizer_name(updates)
        traits = _traits(manifest, updates)
        known = traits.every_moment if traits else ()
        if not {*kinds} <= {*known}:
            wrong.append(
                f"stores {', '.join(kinds)} as the state of {name or 'nothing'}"
            )
        # A count of updates or its absence must suit the optimizer.
        counts = traits is None or traits.counts
        if name in _OPTIMIZERS and counts != (manifest.updates is not None):
            wrong.append(f"has {manifest.updates} updates by {name}")
        if optimizer and name != optimizer:
            wrong.append(
                f"stores the state of {name}, but the run's optimizer is {optimizer}"
            )
        # Shapes of the stored state, by kind and weight.
        shapes = {
            (each.kind, each.name): each.shape for each in manifest.tensors
        }
        weights = [
            weight for unit in local.units.values() for weight in unit.order
        ]
        # State of every kind for every weight that the optimizer keeps it for.
        for kind in known:
            kept = [
                w.name
                for w in weights
                if traits and kind in traits.kept(matrix=bool(w.matrices))
            ]
            lost = [
                weight
                for weight in kept
                if shapes.get((kind, weight)) != own[weight]
            ]
            wrong += [
                # One weight of each kind is enough to say.
                f"{kind} of {each} is missing or of another shape"
                for each in lost[:1]
            ]
        owned = (
            (kind, each, shape)
            for update in updates.values()
            for each, kinds_of in update.owned_shapes.items()
            for kind, shape in kinds_of.items()
        )
        if traits and traits.owned:
            lost_owned = [
                f"{kind} of {each} is missing or of another shape"
                for kind, each, shape in owned
                if shapes.get((kind, each)) != shape
            ]
            wrong += lost_owned[:1]
    if wrong:
        raise CheckpointError("; ".join(wrong))


def _traits(manifest: Manifest, updates: Updates) -> OptimizerRow | None:
    """Return the row of the optimizer whose state a checkpoint holds; None if it is
    unknown.

    A torch optimizer of the user's creates its state in its first step, so its row
    is what the checkpoint holds.
    """
    if any(isinstance(update, OwnUpdate) for update in updates.values()):
        name = manifest.optimizer
        row = _OPTIMIZERS.get(name)
        # torch's SGD counts no updates, whoever creates it.
        counts = row is None or row.counts
        kinds = tuple(_kinds(manifest))
        return OptimizerRow(name, name, kinds, counts=counts)
    return _OPTIMIZERS.get(manifest.optimizer)


def _kinds(manifest: Manifest) -> list[str]:
    """List the kinds of optimizer state in the checkpoint."""
    return sorted({each.kind for each in manifest.tensors} - {WEIGHT})


# Optimizer state first, empty, then filled with the weights entry by entry.
def _fill(reader: TensorReader, local: LocalModel, updates: Updates) -> None:
    """Load this rank's weights and optimizer state from a checkpoint."""
    kinds, count = _kinds(reader.manifest), reader.manifest.updates
    traits = _traits(reader.manifest, updates)
    for update in updates.values() if kinds and traits else ():
        for number, (_, view) in enumerate(update.every_run):
            kept = (
                # Runs of whole matrices follow the elementwise ones in
                # `every_run`.
                traits.kept(matrix=number >= len(update.runs))
                if traits
                else ()
            )
            if not kept:
                continue
            state = {kind: torch.zeros_like(view) for kind in kept}
            if count is not None:
                # Fused optimizers keep the step count on the parameters' device, in
                # float32.
                state["step"] = torch.tensor(
                    count, dtype=torch.float32, device=view.device
                )
            update.restore(view, state)
    with reader:
        if traits and traits.owned:
            _fill_owned(reader, updates)
        for unit in local.every_unit:
            for entry in unit.entries():
                # A weight that is drawn has no stored values, and keeps its
                # initial ones.
                if (WEIGHT, entry.weight.name) in reader.tensors:
                    # Weights and state have the same place, so one entry reads
                    # both.
                    for kind, own in kept_of(unit, entry, updates):
                        own.copy_(reader.numbers(kind, entry))


def _fill_owned(reader: TensorReader, updates: Updates) -> None:
    """Load what this rank alone keeps of the matrices that it owns."""
    count = reader.manifest.updates
    for update in updates.values():
        for name, kinds in update.owned_shapes.items():
            device = update.unit.home.device
            state = {
                kind: reader.whole(reader.tensors[kind, name]).to(device)
                for kind in kinds
            }
            state["step"] = torch.tensor(count or 0, dtype=torch.float32)
            update.owned[name] = state


class TensorReader(ExitStack):
    """Reads the tensors of a verified checkpoint, box by box."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        super().__init__()
        self.folder, self.manifest = Folder(path, CheckpointError), manifest
        self.tensors = {
            (each.kind, each.name): each for each in manifest.tensors
        }
        self.files: dict[int, BinaryIO] = {}

    def whole(self, tensor: StoredTensor) -> Tensor:
        return self.box(tensor, tensor.whole)

    def numbers(self, kind: str, entry: Entry) -> Tensor:
        """Return an entry's elements, flat. Whole rows of its shard are read; padding
        is zero."""
        tensor, local = (
            self.tensors[kind, entry.weight.name],
            entry.weight.local,
        )
        if not (box := box_of(entry)):
            return self.whole(tensor).view(-1)
        # Elements of a row of this rank's part.
        row = math.prod(local[1:])
        # The rows that contain the entry's elements.
        first, last = entry.start // row, -(-entry.stop // row)
        start, stop = box[0]
        # Padding at the end of the part has no rows in the tensor.
        rows = (min(start + first, stop), min(start + last, stop))
        part = self.box(tensor, (rows, *box[1:]))
        # Elements of padding are 0, as they were when they were written.
        if part.shape != (last - first, *local[1:]):
            padded = part.new_zeros(last - first, *local[1:])
            padded[tuple(slice(0, n) for n in part.shape)] = part
            part = padded
        return part.view(-1)[
            entry.start - first * row : entry.stop - first * row
        ]

    def box(self, tensor: StoredTensor, box: Box) -> Tensor:
        """Return a box of a tensor, in the stored dtype, on the host."""
        out = torch.empty([b - a for a, b in box], dtype=DTYPES[tensor.dtype])
        for part in tensor.parts():
            # The part's box in the tensor; `box` is the one that is wanted.
            outer = part[0].box
            if not box:  # a scalar
                return self._rows(tensor, part, 0, 1).view(())
            pairs = zip(outer, box, strict=True)
            # Their intersection, in coordinates of the tensor.
            common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in pairs)
            if any(a >= b for a, b in common):
                continue
            # The intersection inside the part, and inside the result.
            (rows, *inside), (to, *at) = (
                _slices(common, outer),
                _slices(common, box),
            )
            # Whole rows of the part are wanted: no columns to leave out.
            whole = common[1:] == outer[1:]
            # The box lies within this part: no copy.
            if common == box and whole:
                return self._rows(
                    tensor, part, rows.start, rows.stop
                ).contiguous()
            # Read partial rows in blocks, so that a rank needs little more memory than
            # it keeps.
            count, row = (
                rows.stop - rows.start,
                out.element_size() * math.prod(part[0].local[1:]),
            )
            # As many rows as fit into a block; whole rows are read at once.
            many = count if whole else max(1, BLOCK // row)
            for first in range(0, count, many):
                last = min(first + many, count)
                cut = self._rows(
                    tensor, part, rows.start + first, rows.start + last
                )
                out[to.start + first : to.start + last, *at] = cut[:, *inside]
        return out

    def _rows(
        self,
        tensor: StoredTensor,
        part: list[stored.StoredShard],
        first: int,
        last: int,
    ) -> Tensor:
        """Read rows of one part from all shards that overlap them."""
        dims = part[0].local[1:]
        row = math.prod(dims)
        start, stop = first * row, last * row
        flat = torch.empty(stop - start, dtype=DTYPES[tensor.dtype])
        for shard in part:
            # The elements that this shard and the rows have in common.
            a, b = max(start, shard.start), min(stop, shard.stop)
            if a < b:
                offset = shard.offset + (a - shard.start) * flat.element_size()
                read_into(
                    self._file(shard.file), offset, flat[a - start : b - start]
                )
        return flat.view(last - first, *dims)

    def _file(self, number: int) -> BinaryIO:
        if number not in self.files:
            opened = self.folder.open(self.manifest.files[number].name)
            self.files[number] = self.enter_context(opened)
        return self.files[number]


def _slices(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return the slices of a box within an enclosing one."""
    return tuple(
        slice(a - o, b - o) for (a, b), (o, _) in zip(box, outer, strict=True)
    )
