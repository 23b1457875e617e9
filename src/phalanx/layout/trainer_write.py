"""Writes a job of ours as another trainer's file, and names what it cannot express.

The file is read back, and any difference that is not named yet is named then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .layout import Layout
from .shape import Shape
from .trainer_facts import Job, choices_of, quantities, shipped, unlike
from .trainer_read import Given, Reading, read_options, same
from .trainer_table import WAYS, Options, Trainer
from .trainer_text import text_of

# Groups of a model's choices, which trainers without model sizes do not have.
_MODEL = (
    "norm",
    "rope",
    "mlp",
    "output",
    "bias",
    "qk_norm",
    "latent",
    "grouped",
)
# Groups that no trainer's options have, so files of those with model sizes lack them.
_BEYOND = ("mixers", "output_gate")
# Choices that need no option in a trainer that has none for the group.
_PLAIN = {"compile": "no compile", "recompute": "none", "seq": "no seq"}


@dataclass(frozen=True)
class Written:
    """A trainer's file, with sentences about its limits.

    `unsaid` tell what of the job it cannot express, `near` what it expresses
    differently, and `elsewhere` what the training script determines.
    """

    trainer: Trainer
    job: Job
    options: Options
    unsaid: tuple[str, ...]
    near: tuple[str, ...]
    elsewhere: tuple[str, ...]

    @property
    def text(self) -> str:
        return text_of(self.options, self.trainer.format, self.trainer.launch)

    @property
    def whole(self) -> bool:
        """True if the file expresses the whole layout."""
        return not self.unsaid

    @property
    def sentences(self) -> tuple[str, ...]:
        return (*self.unsaid, *self.near, *self.elsewhere)


def written(job: Job, trainer: Trainer) -> Written:
    """The file of a trainer for a job."""
    writer = _FileWriter(job, trainer)
    writer.write()
    # What the file cannot say is given beside it, so that the rest is
    # compared.
    model = None if trainer.sized else job.shape
    given = Given(ranks=job.layout.ranks, model=model)
    back = read_options(writer.options, trainer, given)
    if not writer.unsaid:
        writer.unsaid += _differences(job, back)
    writer.elsewhere += _unnamed_sizes(job, back)
    return Written(
        trainer,
        job,
        writer.options,
        tuple(writer.unsaid),
        tuple(writer.near),
        tuple(writer.elsewhere),
    )


def can_say(
    layout: Layout, shape: Shape, trainer: Trainer, batch: int
) -> bool:
    """True if a trainer has options for the whole layout."""
    job = Job(layout, shape, batch, shape.sequence)
    writer = _FileWriter(job, trainer)
    writer.write()
    if writer.unsaid:
        return False
    back = read_options(
        writer.options, trainer, Given(layout.ranks, model=shape)
    )
    # Without building sentences: one difference is enough.
    return not any(True for _ in _differences(job, back))


def _differences(job: Job, back: Reading) -> Iterator[str]:
    """Sentences about differences in a file that was read back."""
    trainer = back.trainer
    yield from (
        f"{trainer.title} refuses this: {fault}" for fault in back.faults
    )
    ours, theirs = job.layout, back.job.layout
    # The script chooses accumulation, so the file cannot differ in it.
    if "accumulation" in trainer.elsewhere:
        theirs = replace(theirs, microbatches=ours.microbatches)
    if ours != theirs:
        yield f"Read back, the file is {str(theirs) or 'one rank'}, not {ours}."


def _unnamed_sizes(job: Job, back: Reading) -> Iterator[str]:
    """A sentence about sizes that the file leaves to the training script."""
    ours, theirs = job.shape, back.job.shape
    if not back.trainer.sized or ours is None or theirs is None:
        return
    if other := unlike(ours, theirs):
        names = ", ".join(other)
        yield f"The file has no options of ours for these keys of the model: {names}."


class _FileWriter:
    """Writes one file."""

    def __init__(self, job: Job, trainer: Trainer) -> None:
        self.job, self.trainer = job, trainer
        self.options: dict[str, Any] = {}
        self.unsaid: list[str] = []
        self.near: list[str] = []
        self.elsewhere: list[str] = []

    def write(self) -> None:
        values = quantities(self.job)
        # A split without an option cannot be expressed at all.
        for name in WAYS:
            if values.get(name, 1) > 1 and not self._names(name):
                reason = self.trainer.refusal(name, "")
                self.unsaid.append(f"{name}{values[name]}: {reason}.")
        self._replicas(values)
        self._quantities(values)
        if self.trainer.models:
            self._named_model()
        elif not self.trainer.sized:
            self.elsewhere.append("The model is named in the training script.")
        for group, words in choices_of(self.job).items():
            for word in words:
                if group != "schedule" or self._names("pp"):
                    self._choice(group, word)

    def _names(self, way: str) -> bool:
        # A trainer may have options for the two ways of cp only.
        also = {"cp": ("ring", "ulysses")}.get(way, ())
        return any(name in self.trainer.written for name in (way, *also))

    def _replicas(self, values: Mapping[str, Any]) -> None:
        """Refuse replicas of shards if no option divides data parallelism in two."""
        zero = self.job.layout.zero
        named = {"dp_replicate", "replicas"} & self.trainer.written.keys()
        # A size of shards divides data parallelism in two, in ZeRO-3 only.
        by_size = zero == 3 and "shard_size" in self.trainer.written
        if "replicas" in values and not named and not by_size:
            size = (
                f"dp{values['dp_replicate']}x{values['shard_size']} zero{zero}"
            )
            self.unsaid.append(
                f"{size}: {self.trainer.title} has no option for replicas of shards"
                f"{' but with zero3' if 'shard_size' in self.trainer.written else ''}."
            )

    def _quantities(self, values: Mapping[str, Any]) -> None:
        layout = self.job.layout
        # Data parallelism is mixed with other splits, or with replicas.
        mixed = layout.ranks > layout.data or "replicas" in values
        plain = self.trainer.parts_if_mixed and not mixed
        for name, key in self.trainer.written.items():
            value = values.get(name)
            # No value, or an option for context parallelism that means another
            # way.
            if value is None or (name == "cp" and not self._names("cp")):
                continue
            # Two chunks are this trainer's default.
            if name == "layers_of_chunk" and layout.chunks == 2:
                continue
            if name == "data" and layout.cp == 1:
                continue  # DeepSpeed asks for it beside sequence parallelism only
            if name == "chunks" and "stage_layout" in values:
                continue  # the stages are counted there
            if name in ("dp_replicate", "dp_shard") and plain:
                continue
            # What the trainer does without an option needs none.
            default = self.trainer.defaults.get(key)
            if name in WAYS and value == 1:
                continue
            if default is None or not same(default, value):
                self.options[key] = value
        # All microbatches of these trainers have as many sequences.
        if self.job.batch % (layout.data * layout.microbatches):
            self.unsaid.append(
                f"A batch of {self.job.batch:,} is no multiple of {layout.data} ranks x"
                f" {layout.microbatches} microbatches, which {self.trainer.title} asks for."
            )
        for name, place in self.trainer.elsewhere.items():
            if value := values.get(name):
                self.elsewhere.append(place.format(f"{value:,}"))

    def _named_model(self) -> None:
        shape = self.job.shape
        for theirs, ours in self.trainer.models.items():
            # A name stands for a model only if all sizes agree.
            if shape is not None and not unlike(shape, shipped(ours)):
                name, _, flavor = theirs.partition(" ")
                self.options |= {"model.name": name, "model.flavor": flavor}
                return
        self.elsewhere.append(
            f"{self.trainer.title} has no name for a model of these sizes: set model.name"
            " and model.flavor to one of yours."
        )

    def _choice(self, group: str, word: str) -> None:
        known = self.trainer.words.get(group)
        # Nothing to say: the choice is what a trainer without the option does.
        if known is None and (group in _MODEL or _PLAIN.get(group) == word):
            return
        if group in (*_MODEL, *_BEYOND) and not self.trainer.sized:
            return
        rows = (known or {}).get(word)
        shown = (
            word
            if ":" in word or group in ("zero", "seq", "precision")
            else ""
        )
        shown = shown or (
            f"{group}:{word}" if group not in ("schedule", "compile") else word
        )
        if rows is None:
            self.unsaid.append(
                f"{shown}: {self.trainer.refusal(group, word)}."
            )
            return
        # The first way to say it that contradicts no option already written.
        row = next((row for row in rows if not self._clashes(row)), None)
        if row is None:
            key = self._clashes(rows[0])
            self.unsaid.append(
                f"{shown}: it needs another value of {key} than {self.options[key]!r}."
            )
            return
        self.options |= {k: v for k, v in row.items() if k not in self.options}
        if near := self.trainer.near.get(f"{group}:{word}"):
            self.near.append(f"{shown}: {near}.")

    def _clashes(self, row: Options) -> str:
        """An option that a choice needs with another value; "" if none."""
        for key, value in row.items():
            if key in self.options and not same(self.options[key], value):
                return key
        return ""
