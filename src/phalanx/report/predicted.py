"""What a plan counts for the operations of a run's step: the run's own layout, costed, priced and
simulated as `phalanx plan --explain` does it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ..layout import Layout, Shape
from ..layout.codec import decode
from ..layout.files import read_text
from ..layout.journal import read_journal
from ..plan.device import MachineFileError
from ..plan.hardware import Hardware
from ..plan.profile import SoftwareProfile
from ..plan.step import CostFunction, Pricer, Request
from ..program import Timeline
from .compared import Compared, compare
from .page import TIMELINE, ReportError

_SHOWS = "A run of phalanx train leaves it there, once its first steps are done."


@dataclass(frozen=True)
class Step:
    """The measured step of a run's folder, and what was trained in it."""

    number: int
    layout: Layout
    shape: Shape
    own: str  # FILE.py:Class, of somebody's own model
    sequence: int
    device: str  # what the run called it; "CPU", or "" where it did not say
    timeline: Timeline
    usual: float | None  # the median of the run's steps in this layout but the first line of them


def read_step(folder: Path) -> Step:
    """The step that a run's timeline.json tells. Nothing in the folder is run."""
    file = folder / "timeline.json"
    if not file.exists():
        raise ReportError(f"cannot read {file}: No such file or directory. {_SHOWS}")
    text = read_text(file, "timeline", ReportError, TIMELINE)
    try:
        timeline, header = Timeline.from_json(text), _header(text)
    except ValueError as error:
        raise ReportError(f"{file} cannot be read: {error}.") from None
    if not timeline.makespan:
        raise ReportError(f"{file} tells of no operation that took time. {_SHOWS}")
    layout, number = Layout.parse(header[0]), header[1]
    start, steps = _stretch(folder, header[0], number)
    where, model = folder / "metrics.jsonl", start.get("model")
    if not isinstance(model, dict) or not isinstance(start.get("sequence", 0), int):
        raise ReportError(f"{where}: its start has no model, or no sequence. {_SHOWS}")
    shape = decode(Shape, model, f"{where}, model", MachineFileError)
    return Step(
        number,
        layout,
        shape,
        own=str(start.get("own", "")),
        sequence=int(start.get("sequence", shape.sequence)),
        device=_device(start),
        timeline=timeline,
        # The first line is of steps in which the process warms up.
        usual=median(steps[1:]) if len(steps) > 1 else None,
    )


def _header(text: str) -> tuple[str, int]:
    record = json.loads(text)
    layout, step = record.get("layout"), record.get("step")
    if not isinstance(layout, str) or not isinstance(step, int):
        raise ValueError("it does not say its layout and its step")
    return layout, step


def _device(start: Mapping[str, Any]) -> str:
    versions = start.get("versions")
    return str(versions.get("device", "")) if isinstance(versions, dict) else ""


def _stretch(folder: Path, layout: str, number: int) -> tuple[Mapping[str, Any], list[float]]:
    """The last start of a run that may have done this step, and seconds of each line of its steps."""
    begun: Mapping[str, Any] | None = None
    seconds: list[float] = []
    inside = False
    for record in read_journal(folder / "metrics.jsonl"):
        if record["event"] == "start":
            inside = _may_have(record, layout, number)
            if inside:
                begun, seconds = record, []
        elif record["event"] == "step" and inside:
            took = record.get("seconds")
            seconds += [float(took)] if isinstance(took, int | float) and took > 0 else []
    if begun is None:
        raise ReportError(
            f"{folder}: metrics.jsonl tells of no start as {layout or 'one rank'} before step"
            f" {number}, which timeline.json shows. Name the folder of one run."
        )
    return begun, seconds


def _may_have(start: Mapping[str, Any], layout: str, number: int) -> bool:
    step = start.get("step")
    first = isinstance(step, int) and step < number
    return first and start.get("layout") == layout and isinstance(start.get("model"), dict)


def predicted(
    step: Step, hardware: Hardware, profile: SoftwareProfile, piece_costs: CostFunction
) -> Compared:
    """A run's step beside what a plan counts for it: the same operations, simulated."""
    layout, shape = step.layout, step.shape
    request = Request(
        shape, hardware, profile, piece_costs, step.sequence, shape.batch, layout.precision,
        model=step.own,
    )  # fmt: skip
    pricer = Pricer(request)
    return Compared(
        layout=str(layout) or "one rank",
        hardware=hardware.name,
        profile=profile.name,
        step=step.number,
        rows=compare(step.timeline, pricer.costs(layout).pieces),
        predicted=pricer.choose(layout).step,
        measured=step.timeline.makespan,
        usual=step.usual,
        launched=not hardware.cores,
    )
