"""Records of a run's steps in the form of `phalanx audit`, so that two layouts of a run compare.

The recorder stands around the operation that updates a piece, and only for the steps
that it records: weights and gradients are sketched before the first update of a step
and each update, and weights again after the step. A sketch adds up over shards, so
nothing is gathered. All ranks write files of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from torch_audit import records
from torch_audit.batches import batch_of
from torch_audit.records import ClipRecord, ParameterRecord, StepRecord
from torch_audit.shards import Place, flat_place, whole_place

from ..comm import Work
from ..parallel import Unit
from ..parallel.batch import VALID
from ..parallel.data import Entry
from ..program import Op, ops
from ..version import VERSION
from .rank import Rank
from .skipped_steps import overflowed
from .step import CompletedStep

FOLDER = "audit"  # in `out`


def folder_of(out: Path, start: int) -> Path:
    """The folder for the records of a start at this step."""
    return out / FOLDER / f"from-{start:08}"


class AuditRecords:
    """Records `train.audit` steps of each start on this rank.

    Steps that the loss scale has skipped are left out, and do not count.
    """

    def __init__(self, rank: Rank, start: int) -> None:
        self.rank = rank
        self.executor = rank.part.trainer
        self.until = start + rank.run.train.audit
        self.folder = folder_of(Path(rank.run.out), start)
        # Files of an earlier start at this step, which may have had other ranks.
        if rank.world.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            for old in self.folder.glob(f"*{records.SUFFIX}"):
                old.unlink()
        rank.part.everyone.barrier()
        self.parts = list(_parts(rank))
        self.sketches: dict[str, dict[int, Tensor]] = {}
        self.loss_scale = 1.0  # gradients of this step carry it
        self.plain = self.executor.handlers[ops.UPDATE]
        self.executor.handlers[ops.UPDATE] = self._update

    def after_step(self, step: CompletedStep) -> None:
        if step.done > self.until:
            return
        if overflowed(self.rank, step):
            # Only the loss scale was too large. Records keep the numbers of their
            # steps, so they compare where both layouts skip the same ones.
            self.sketches = {}
            self.until += 1
            return
        self.sketches[records.UPDATED] = self._weights()
        self._record(step).write(self.folder)
        self.sketches = {}
        if step.done == self.until:
            self.executor.handlers[ops.UPDATE] = self.plain

    def _update(self, op: Op) -> Work | None:
        # Before the first update of a step, as some move weights of other ranks.
        if not self.sketches:
            self.sketches[records.WEIGHT] = self._weights()
        self.loss_scale = self.executor._loss_scale
        rows = self.sketches.setdefault(records.GRADIENT, {})
        for index, part in enumerate(self.parts):
            if part.unit.piece == op.piece:
                (gradient,) = part.unit.gradients([part.run])
                rows[index] = part.place.sketch(gradient)
        return self.plain(op)

    def _weights(self) -> dict[int, Tensor]:
        return {
            index: part.place.sketch(part.unit.home[part.run])
            for index, part in enumerate(self.parts)
        }

    def _record(self, step: CompletedStep) -> StepRecord:
        rank = self.rank
        record = StepRecord(
            rank=rank.world.rank, step=step.done - 1, world=rank.world.size
        )
        made = self._made()
        for part in self.parts:
            update = self.executor.updates[part.unit.number]
            rate = update.rate_of(part.entry.weight, step.lr, made)
            record.parameters.append(part.record(rate))
        record.losses = [step.result.total]
        record.meshes = {
            axis.name: axis.size for axis in rank.part.layout.mesh.axes
        }
        record.autocast = _name(rank.precision.compute)
        record.versions = {"phalanx": VERSION, "torch": torch.__version__}
        for microbatch in self.executor.batches:
            batch = batch_of((), _named(microbatch))
            if batch is not None:
                record.batches.append(batch.record)
        self._add_gradients(record, step)
        for kind in (records.WEIGHT, records.UPDATED):
            record.sketches[kind] = _listed(self.sketches.get(kind, {}))
        return record

    def _made(self) -> float:
        """The steps that the optimizer has made. A rank without state of its own counts none."""
        updates = self.executor.updates.values()
        own = max(
            (x for update in updates for x in update.steps_made), default=0
        )
        everyone = self.rank.part.everyone
        most = torch.tensor([own], dtype=torch.float64, device=everyone.device)
        everyone.all_reduce(most, "max")
        return most.item()

    def _add_gradients(self, record: StepRecord, step: CompletedStep) -> None:
        """Adds gradients without the loss scale, and those that the clip has scaled."""
        own = _listed(self.sketches.get(records.GRADIENT, {}))
        scale = 1.0 / self.loss_scale
        gradients = {i: _scaled(numbers, scale) for i, numbers in own.items()}
        record.sketches[records.GRADIENT] = gradients
        norm, clip = step.result.norm, self.executor.clip
        agreed = self.executor.scale
        if norm is None or not clip or agreed is None:
            return
        # Weights with a rate of their own are in no norm.
        counted = [
            index
            for index, part in enumerate(self.parts)
            if not part.entry.weight.rate
        ]
        record.clips = [ClipRecord(counted, clip, 2.0, norm)]
        # The kernels scale gradients by this number as they read them.
        factor = float(agreed.factor)
        record.sketches[records.CLIPPED] = {
            index: _scaled(own[index], factor)
            for index in counted
            if index in own
        }


class _Part:
    """The part of a weight in this rank's shard of a unit, and its place in the whole weight."""

    def __init__(self, unit: Unit, entry: Entry) -> None:
        self.unit, self.entry = unit, entry
        size = entry.stop - entry.start
        self.run = slice(entry.offset, entry.offset + size)
        weight = entry.weight
        indices = [torch.arange(cut.start, cut.stop) for cut in weight.cuts]
        self.place: Place = flat_place(
            weight.shape,
            tuple(indices),
            weight.local,
            entry.start,
            entry.stop,
        )

    def record(self, rate: float) -> ParameterRecord:
        weight, place = self.entry.weight, self.place
        return ParameterRecord(
            names=[weight.name],
            shape=list(weight.shape),
            count=place.count,
            cover=place.cover,
            whole=whole_place(weight.shape).cover,
            place=place.text(),
            dtype=_name(self.unit.home.dtype),
            stepped=True,
            rate=rate,
        )


def _parts(rank: Rank) -> Iterator[_Part]:
    for unit in rank.part.local.units.values():
        for entry in unit.entries():
            yield _Part(unit, entry)


def _named(microbatch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A microbatch under the names that samples are found by."""
    tokens = microbatch.get("tokens")
    if tokens is None:
        return dict(microbatch)
    named = {"input_ids": tokens}
    for ours, theirs in (
        ("positions", "position_ids"),
        ("targets", "labels"),
        (VALID, "attention_mask"),
    ):
        if ours in microbatch:
            named[theirs] = microbatch[ours]
    return named


def _listed(rows: Mapping[int, Tensor]) -> dict[int, list[float]]:
    return {index: numbers.tolist() for index, numbers in rows.items()}


def _scaled(numbers: list[float], factor: float) -> list[float]:
    """A sum of squares and a sketch, of a tensor times a factor."""
    return [numbers[0] * factor**2, *(factor * x for x in numbers[1:])]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
