"""The numbers of one rank, on their way into a checkpoint and out of one.

A number has one writer: where copies of it are, the first holder. Every rank reads what it holds,
by the names of weights and boxes of them, from whatever layout wrote.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..parallel import Entry
from ..parallel.local import Holding
from .checkpoint_file import DTYPES, NAMES, CheckpointError, File, header_of
from .checkpoint_manifest import WEIGHT, Logical, Manifest, Piece, Progress
from .checkpoint_read import Reader
from .data.folder import Fields, parse_json
from .optimizer import Update

__all__ = ["Snapshot", "Updates", "fill", "manifest_of", "misfits", "show"]

# What torch's optimizers keep for every number.
KEPT = {"AdamW": ["exp_avg", "exp_avg_sq"], "SGD": ["momentum_buffer"]}

Updates = Mapping[int, Update]


class Part(NamedTuple):
    """Numbers of a weight, or of what the optimizer keeps for them."""

    kind: str
    entry: Entry
    numbers: Tensor

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.entry.weight.name}"


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


def owned(holding: Holding, updates: Updates) -> Iterator[Part]:
    """The numbers that this rank is the first holder of."""
    for number, unit in holding.units.items():
        # A tied weight lies on several stages; the one that runs its unit's own piece writes it.
        if number not in holding.pieces or holding.wires.replica.rank:
            continue
        for entry in unit.entries():
            padding = any(a == b for a, b in _box(entry))
            if entry.weight.counted and not padding:
                run = slice(entry.offset, entry.offset + entry.stop - entry.start)
                yield Part(WEIGHT, entry, unit.home[run])
                for kind, kept in _state(updates[number], entry):
                    yield Part(kind, entry, kept)


def _steps(updates: Updates) -> set[float]:
    return {
        float(state["step"])
        for update in updates.values()
        if update.torch is not None
        for state in update.torch.state.values()
        if "step" in state
    }


def _optimizer(updates: Updates) -> str:
    return next((type(u.torch).__name__ for u in updates.values() if u.torch is not None), "")


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A rank's own numbers on the host, no more changed by training, and what it tells of them."""

    tensors: dict[str, Tensor]
    parts: tuple[dict[str, object], ...]
    optimizer: str
    steps: tuple[float, ...]

    @classmethod
    def take(cls, holding: Holding, updates: Updates, room: dict[str, Tensor]) -> Snapshot:
        """Copy into `room`, host memory that is kept from one snapshot to the next."""
        tensors: dict[str, Tensor] = {}
        said: list[dict[str, object]] = []
        for part in owned(holding, updates):
            entry, key = part.entry, part.key
            if key not in room or room[key].shape != part.numbers.shape:
                room[key] = torch.empty_like(
                    part.numbers, device="cpu", pin_memory=part.numbers.is_cuda
                )
            tensors[key] = room[key].copy_(part.numbers, non_blocking=True)
            said.append({
                "kind": part.kind, "name": entry.weight.name, "key": key,
                "dtype": NAMES[part.numbers.dtype], "shape": list(entry.weight.shape),
                "box": [list(span) for span in _box(entry)], "local": list(entry.weight.local),
                "start": entry.start, "stop": entry.stop,
            })  # fmt: skip
        if holding.pool.device.type == "cuda":
            torch.cuda.current_stream(holding.pool.device).synchronize()
        return cls(tensors, tuple(said), _optimizer(updates), tuple(sorted(_steps(updates))))

    def report(self, file: File | None) -> str:
        """What this rank tells the one who writes the manifest; no file when it owns nothing."""
        told = None if file is None else asdict(file)
        said = {
            "file": told, "parts": self.parts, "optimizer": self.optimizer,
            "steps": self.steps, "begin": len(header_of(self.tensors)),
        }  # fmt: skip
        return json.dumps(said)


def manifest_of(progress: Progress, reports: list[str]) -> Manifest:
    """One manifest from what all ranks told."""
    files, found = list[File](), dict[str, Logical]()
    updates, names = set[float](), set[str]()
    for rank, text in enumerate(reports):
        said = parse_json(text, f"rank {rank}", CheckpointError)
        parts = said.objects("parts")
        names |= {said.text("optimizer")} - {""}
        updates |= {float(str(n)) for n in said.list("steps")}
        if not parts:
            continue
        at = said.whole("begin")
        for part in parts:
            at = _add(found, part, len(files), at)
        files.append(File.parse(said.object("file")))
    if len(updates) > 1 or len(names) > 1:
        raise CheckpointError(
            f"the ranks have made {sorted(updates)} updates with {sorted(names)}; one number and one"
            " optimizer belong into a checkpoint."
        )
    return Manifest(
        progress, tuple(found.values()), tuple(files), next(iter(names), ""),
        next(iter(updates), None),
    )  # fmt: skip


def _add(found: dict[str, Logical], said: Fields, file: int, offset: int) -> int:
    """Add a part to its tensor; where the next one begins in the file."""
    spans = [(a, b) for a, b in said.said["box"]]  # type: ignore[attr-defined]  # by a rank of ours
    start, stop, dtype = said.whole("start"), said.whole("stop"), said.text("dtype")
    piece = Piece(file, said.text("key"), offset, tuple(spans), said.wholes("local"), start, stop)
    known = found.get(said.text("key"))
    before = known.pieces if known else ()
    found[said.text("key")] = Logical(
        said.text("kind"), said.text("name"), dtype, said.wholes("shape"), (*before, piece)
    )
    return offset + (stop - start) * DTYPES[dtype].itemsize


# ---- out of a checkpoint


def misfits(manifest: Manifest, holding: Holding, updates: Updates) -> list[str]:
    """Why the checkpoint's tensors are not those of this model and optimizer."""
    told = {each.name: each for each in manifest.tensors if each.kind == WEIGHT}
    wrong = []
    for unit in holding.units.values():
        for weight in unit.order:
            found = told.get(weight.name)
            if found is None:
                wrong.append(f"has no weight {weight.name}")
            elif found.shape != weight.shape:
                wrong.append(
                    f"{weight.name} is {list(found.shape)}, the model's is {list(weight.shape)}"
                )
    kinds = _kinds(manifest)
    optimizer = _optimizer(updates)
    if kinds and kinds != KEPT.get(manifest.optimizer):
        wrong.append(f"keeps {', '.join(kinds)} as the state of {manifest.optimizer or 'nothing'}")
    if kinds and (manifest.optimizer == "AdamW") != (manifest.updates is not None):
        wrong.append(f"tells of {manifest.updates} updates by {manifest.optimizer}")
    if kinds and optimizer and manifest.optimizer != optimizer:
        wrong.append(f"keeps the state of {manifest.optimizer}, the run's optimizer is {optimizer}")
    shapes = {name: each.shape for name, each in told.items()}
    kept = {(each.kind, each.name): each.shape for each in manifest.tensors}
    for kind in kinds:
        lost = [name for name in told if kept.get((kind, name)) != shapes[name]]
        wrong += [f"{kind} of {lost[0]} is missing or of another shape"] if lost else []
    return wrong


def _kinds(manifest: Manifest) -> list[str]:
    return sorted({each.kind for each in manifest.tensors} - {WEIGHT})


def fill(reader: Reader, holding: Holding, updates: Updates) -> None:
    """This rank's homes and optimizer state become those of the checkpoint; see `show`."""
    kinds = _kinds(reader.manifest)
    for number, unit in holding.units.items():
        fresh = _fresh(updates[number], kinds, reader.manifest.updates)
        for entry in unit.entries():
            run = slice(entry.offset, entry.offset + entry.stop - entry.start)
            unit.home[run] = _numbers(reader, WEIGHT, entry).to(unit.home)
            for kind in kinds:
                held, kept = next(f for f in fresh if f[0].start <= entry.offset < f[0].stop)
                at = slice(run.start - held.start, run.stop - held.start)
                kept[kind][at] = _numbers(reader, kind, entry).to(kept[kind])


def _fresh(
    update: Update, kinds: list[str], steps: float | None
) -> list[tuple[slice, dict[str, Tensor]]]:
    """Empty state for each run of a unit, as torch's optimizers would make it."""
    found = []
    for run, view in update.runs:
        assert update.torch is not None
        kept = {kind: torch.zeros_like(view) for kind in kinds}
        # A fused optimizer keeps its count where the numbers are, in float32.
        count = (
            {}
            if steps is None
            else {"step": torch.tensor(steps, dtype=torch.float32, device=view.device)}
        )
        update.torch.state.pop(view, None)
        if kinds:
            update.torch.state[view] = {**count, **kept}
        found.append((run, kept))
    return found


def _numbers(reader: Reader, kind: str, entry: Entry) -> Tensor:
    """An entry's numbers, flat: whole rows of its part are read, padding is zero."""
    weight = entry.weight
    row = math.prod(weight.local[1:])
    first, last = entry.start // row, -(-entry.stop // row)
    box = list(_box(entry))
    if not box:
        return reader.whole(reader.tensors[kind, weight.name]).view(-1)
    start, stop = box[0]
    box[0] = (min(start + first, stop), min(start + last, stop))
    part = reader.box(reader.tensors[kind, weight.name], tuple(box))
    if list(part.shape) != [last - first, *weight.local[1:]]:
        padded = part.new_zeros(last - first, *weight.local[1:])
        padded[tuple(slice(0, n) for n in part.shape)] = part
        part = padded
    return part.reshape(-1)[entry.start - first * row : entry.stop - first * row]


def show(holding: Holding) -> None:
    """The weights that are there become those of the homes. Ranks gather here, so all must come."""
    for unit in holding.units.values():
        unit.refresh()
        if unit.resident and unit.wires.gather.size > 1:
            unit.gather().wait()
