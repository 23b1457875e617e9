"""Configuration files of other trainers: written for a layout, or read, checked and priced.

Reading a file yields a layout, a model and a batch. Memory and step time are planned with the
trainer's software profile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ..drawing.words import wrapped
from ..layout import Layout, Shape, legal
from ..layout.numbers import count_text, seconds_text
from ..layout.trainer_facts import Job
from ..layout.trainer_read import Fault, Given, Reading, read_trainer_file
from ..layout.trainer_table import Trainer, trainer_named
from ..layout.trainer_write import Written, written
from ..planner.hardware import Hardware, hardware_of
from ..planner.link import whole_servers
from ..planner.search import judge, search
from ..planner.step import Choice, Request
from . import UsageError
from .plan_text import choice_figures, choice_text, memory_text
from .request import held, model_of, request_for, where

_FASTER = 3  # layouts that are named as faster
_ALIKE = 0.98  # of a step: what is less than 2 % faster is not named


def trainer_file(request: Request, layout: Layout) -> Written:
    """Write a layout of a request as a file of the request's trainer."""
    if not request.trainer:
        raise UsageError(
            'Name whose file it is: plan(..., trainer="megatron").'
        )
    shape = request.shape
    node = request.hardware.node
    # Up to 72 devices of a node, as in an NVL72 rack; otherwise the usual 8.
    per_node = node if 1 < node <= 72 else 8
    job = Job(layout, shape, request.batch, request.sequence, per_node)
    return written(job, trainer_named(request.trainer))


def file_figures(file: Written) -> dict[str, Any]:
    """Return a written file and its notes, as printed by `phalanx plan --for X --json`."""
    return {
        "trainer": file.trainer.name,
        "versions": file.trainer.versions,
        "layout": str(file.job.layout),
        "file": file.text,
        "unsaid": list(file.unsaid),
        "near": list(file.near),
        "elsewhere": list(file.elsewhere),
    }


@dataclass(frozen=True)
class CheckedFile:
    """Result of checking a trainer's file: its layout, faults, memory and step time.

    Prints like `phalanx check --from`; `figures` are those of `--json`. `choice` is None if
    the model is unknown or the layout cannot run; its step is 0 without a cluster. `faster`
    lists layouts that the same trainer can run, best first.
    """

    path: str
    reading: Reading = field(repr=False)
    request: Request | None = field(default=None, repr=False)
    choice: Choice | None = field(default=None, repr=False)
    faster: Sequence[Choice] = field(default=(), repr=False)
    impossible: Sequence[Fault] = ()

    @property
    def trainer(self) -> Trainer:
        return self.reading.trainer

    @property
    def layout(self) -> Layout:
        return self.reading.job.layout

    @property
    def shape(self) -> Shape | None:
        return self.reading.job.shape

    @property
    def faults(self) -> tuple[Fault, ...]:
        """Contradictions in the file, and settings that no layout can meet."""
        return (*self.reading.faults, *self.impossible)

    @property
    def fits(self) -> bool:
        """True if the layout fits on a device of the cluster, or if there is no cluster."""
        if self.choice is None or self.request is None:
            return not self.impossible
        # As `phalanx check` judges: by the lower end of the range.
        return (
            self.choice.range(self.request.profile)[0]
            <= self.request.hardware.memory
        )

    @property
    def right(self) -> bool:
        return not self.faults

    @cached_property
    def figures(self) -> Mapping[str, Any]:
        found: dict[str, Any] = {
            "trainer": self.trainer.name,
            "layout": str(self.layout),
            "ranks": self.layout.ranks,
            "faults": [fault._asdict() for fault in self.faults],
            "notes": list(self.reading.notes),
        }
        if self.shape is not None:
            found |= {"model": self.shape.name, "parameters": self.shape.total}
        if self.choice is None or self.request is None:
            return found
        request, choice = self.request, self.choice
        found |= {"batch": request.batch, "sequence": request.sequence}
        found |= {"profile": request.profile.name, "fits": self.fits}
        # Without a cluster only the memory is known, and the step is 0.
        if not choice.step:
            held = {kind: size / 1e9 for kind, size in choice.memory.items()}
            least, most = choice.range(request.profile)
            return found | {
                "memory_gb": choice.bytes / 1e9,
                "memory_by_kind_gb": held,
                "memory_range_gb": [least / 1e9, most / 1e9],
            }
        found |= {
            "cluster": request.hardware.name,
            **choice_figures(request, choice),
        }
        found["faster"] = [
            {"layout": str(each.layout), "step_time_s": each.step}
            for each in self.faster
        ]
        return found

    def __str__(self) -> str:
        return "\n".join(self._lines())

    __repr__ = __str__  # what a notebook shows of it

    def _lines(self) -> Iterator[str]:
        yield from wrapped(self._summary())
        count = len(self.faults)
        noun = "inconsistency" if count == 1 else "inconsistencies"
        yield from _list(f"{count} {noun}:", map(str, self.faults))
        yield from _list("Assumed, or not the same here:", self.reading.notes)
        if self.choice is None or self.request is None:
            why = "the layout cannot run" if self.impossible else "add --model"
            yield from wrapped(f"No memory and no time are predicted: {why}.")
            return
        yield ""
        if self.choice.step:
            yield from choice_text(self.request, self.choice)
            yield ""
        yield from memory_text(self.choice, self.request)
        if self.choice.step:
            yield ""
            yield from self._advice()

    def _summary(self) -> str:
        job, trainer = self.reading.job, self.trainer
        text = (
            f"{self.path} is a file of {trainer.title} ({trainer.versions}):"
        )
        text += f" {str(job.layout) or 'one rank'}, {job.layout.ranks:,} ranks"
        if job.shape is not None:
            size = count_text(job.shape.total)
            text += f", {size} parameters ({job.shape.name})"
        if self.request is not None:
            request = self.request
            text += f", {request.batch:,} sequences of {request.sequence:,} tokens a step"
            text += f"; software as {request.profile.name!r}"
        return text + "."

    def _advice(self) -> Iterator[str]:
        """Describe faster layouts that the same trainer can run, and how to write one."""
        assert self.request is not None
        assert self.choice is not None
        if not self.faster:
            yield from wrapped(
                f"No layout that {self.trainer.title} can run is predicted to be"
                f" {1 - _ALIKE:.0%} faster on {self.request.hardware.name}."
            )
            return
        yield "Faster, and possible with the same trainer:"
        for each in self.faster:
            gain = 100 * (1 - each.step / self.choice.step)
            yield f"  {seconds_text(each.step)}, {gain:.1f} % less time: {each.layout}"
        yield from wrapped(
            f"`phalanx plan --for {self.trainer.name} --layout"
            f' "{self.faster[0].layout}" ...` writes the first.'
        )


def _list(title: str, lines: Iterator[str] | Sequence[str]) -> Iterator[str]:
    every = list(lines)
    if every:
        yield title
        for line in every:
            first, *rest = wrapped(line, 78)
            # Two characters are taken by "- ".
            yield f"- {first}"
            yield from (f"  {more}" for more in rest)


def check_file(
    path: str,
    model: str | Shape = "",
    *,
    trainer: str = "",
    cluster: str = "",
    ranks: int = 0,
    batch: int = 0,
    sequence: int = 0,
    microbatches: int = 0,
) -> CheckedFile:
    """Check another trainer's file: its layout, contradictions, memory and, with a cluster, its step.

    `path` is a shell script with Megatron-LM's arguments, torchtitan's TOML, DeepSpeed's JSON,
    accelerate's or NeMo's YAML. The trainer is guessed from the keys unless it is named. `model`,
    `ranks`, `batch`, `sequence` and `microbatches` supply what the file leaves open; a model
    replaces the sizes in the file.

        check_file("pretrain.sh", cluster="h100x64").faults
        check_file("ds_config.json", "8b", ranks=64).layout
    """
    shape = (
        model
        if isinstance(model, Shape)
        else model_of(model)[0]
        if model
        else None
    )
    # The cluster's size stands for what the file leaves to its launcher.
    if cluster and not ranks and cluster != "this":
        ranks = where(cluster, None).hardware.ranks
    given = Given(ranks, batch, sequence, microbatches, shape)
    reading = read_trainer_file(path, trainer, given)
    job = reading.job
    # Nothing can be checked against a model that the file does not define.
    if job.shape is None:
        return CheckedFile(path, reading)
    sizes = {"batch": job.batch or job.shape.batch}
    sizes |= {"sequence": job.sequence or job.shape.sequence}
    # Faults are named by the trainer's own options, which the user can change.
    impossible = tuple(
        Fault(
            reading.trainer.key(_quantity(each.rule)),
            each.what.rstrip("."),
            _plain(each.way_out),
        )
        for each in legal(job.layout, job.shape, **sizes)
    )
    if impossible:
        return CheckedFile(path, reading, impossible=impossible)
    request = _request(reading, cluster, **sizes)
    # Memory alone; a step needs a device's rates.
    if not cluster:
        return CheckedFile(path, reading, request, held(request, job.layout))
    (choice,) = judge(request, [job.layout])
    return CheckedFile(
        path, reading, request, choice, _faster(request, choice)
    )


def _plain(way_out: str) -> str:
    return way_out.rstrip(".")


def _quantity(rule: str) -> str:
    """Return the quantity whose option a rule about layouts refers to."""
    # Rules about numbers of heads or layers concern the size of an axis.
    known = {"ffn": "tp", "heads": "tp", "kv_heads": "tp", "stages": "pp"}
    return known.get(rule, rule)


def _request(
    reading: Reading, cluster: str, *, batch: int, sequence: int
) -> Request:
    layout, trainer = reading.job.layout, reading.trainer
    assert reading.job.shape is not None
    # A compiled run has another software profile, if one is known.
    compiled = trainer.compiled if layout.compile else ""
    request = request_for(
        reading.job.shape,
        _hardware(layout, cluster),
        batch=batch,
        sequence=sequence,
        precision=layout.matmul or layout.precision,
        profile=compiled or trainer.profile,
    )
    named = "" if cluster == "this" else cluster
    # Only layouts that this trainer can run count as faster ones.
    return replace(
        request, cluster=named, without=trainer.without, trainer=trainer.name
    )


def _hardware(layout: Layout, cluster: str) -> Hardware:
    """Return the cluster's devices or, without a cluster, devices with unlimited memory."""
    if cluster:
        return where(cluster, None, layout.ranks).hardware
    hardware = hardware_of(whole_servers("h100", layout.ranks), layout.ranks)
    return replace(hardware, name="", memory=math.inf)


def _faster(request: Request, choice: Choice) -> tuple[Choice, ...]:
    """Return layouts of the same trainer that are faster by more than the noise."""
    # The search returns the advised layouts, best first.
    found = search(request, top=_FASTER).layouts
    return tuple(each for each in found if each.step < _ALIKE * choice.step)
