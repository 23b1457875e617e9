"""The measured step of a run, from its timeline.json, and its prediction. No code in
the folder is run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ..drawing import Slice, recorded_picture, shards_svg
from ..drawing.picture import every_rank
from ..drawing.shards import RANKS
from ..layout import Layout, Shape
from ..layout.codec import decode
from ..layout.files import read_text
from ..layout.journal import read_journal
from ..layout.optimizers import USUAL_OPTIMIZER, OptimizerChoice
from ..planner.device import MachineFileError
from ..planner.hardware import Hardware
from ..planner.profile import SoftwareProfile
from ..planner.step import CostFunction, Pricer, Request
from ..program import Recorded, Sizes
from .compared import Compared, compare
from .happened import happened, with_shown_ranks
from .page import Extras, ReportError, Section, number, stretches

if TYPE_CHECKING:
    from ..parallel import Model

ROWS = 64  # maximum rows of a program whose memory is shown
TIMELINE = 1 << 26  # maximum bytes of a measured step
_SHOWS = "phalanx train writes it after the first steps of a run."


@dataclass(frozen=True)
class Step:
    """The measured step in a run's folder, and the model that was trained."""

    number: int
    layout: Layout
    shape: Shape
    own: str  # FILE.py:Class of a user's own model
    sequence: int
    device: (
        str  # as recorded by the run: "CPU", a GPU's name, or "" if missing
    )
    recorded: Recorded
    # median of the run's steps in this layout, without the first line
    usual: float | None
    memory: float = 0.0  # bytes that a rank may use; 0 if not recorded


def read_step(folder: Path) -> Step:
    """Read the step in a run's timeline.json. No code in the folder is run."""
    recorded, text, at = read_recorded(folder)
    layout = Layout.parse(text)
    start, steps = _stretch(folder, text, at)
    where, versions = folder / "metrics.jsonl", start.get("versions")
    if not isinstance(start.get("sequence", 0), int):
        raise ReportError(f"{where}: its start has no sequence. {_SHOWS}")
    # The model's own sizes, checked as a file of somebody else.
    shape = decode(Shape, start["model"], f"{where}, model", MachineFileError)
    return Step(
        at,
        layout,
        shape,
        own=str(start.get("own", "")),
        sequence=int(start.get("sequence", shape.sequence)),
        device=str(versions.get("device", ""))
        if isinstance(versions, dict)
        else "",
        recorded=recorded,
        # the first line covers the warm-up
        usual=median(steps[1:]) if len(steps) > 1 else None,
        memory=_finite(number(start, "device_memory")),
    )


def _finite(value: float) -> float:
    """The value, or 0 if a record lacks it."""
    return value if value > 0 and math.isfinite(value) else 0.0


def predicted(
    step: Step,
    hardware: Hardware,
    profile: SoftwareProfile,
    piece_costs: CostFunction,
) -> Compared:
    """Compare a run's step with a plan: the same operations, simulated as `plan
    --explain` does."""
    layout, shape = step.layout, step.shape
    request = Request(
        shape, hardware, profile, piece_costs, step.sequence, shape.batch, layout.precision,
        model=step.own,
    )  # fmt: skip
    pricer = Pricer(request)
    costs, timeline = pricer.costs(layout), step.recorded.timeline
    return Compared(
        layout=str(layout) or "one rank",
        hardware=hardware.name,
        profile=profile.name,
        step=step.number,
        rows=compare(timeline, costs.pieces),
        predicted=pricer.choose(layout).step,
        measured=timeline.makespan,
        costs=costs,
        usual=step.usual,
        # On a GPU spans end at the launch, not at the end.
        launched=not hardware.cores,
    )


def read_recorded(folder: Path) -> tuple[Recorded, str, int]:
    """Return the measured step with its program, the text of its layout, and its
    number."""
    file = folder / "timeline.json"
    if not file.exists():
        raise ReportError(
            f"cannot read {file}: No such file or directory. {_SHOWS}"
        )
    text = read_text(file, "timeline", ReportError, TIMELINE)
    try:
        recorded, header = Recorded.parse(text), json.loads(text)
    except ValueError as error:
        raise ReportError(f"{file} cannot be read: {error}") from None
    layout, step = header.get("layout"), header.get("step")
    if not isinstance(layout, str) or not isinstance(step, int):
        raise ReportError(
            f"{file} cannot be read: its layout or step is missing."
        )
    if not recorded.timeline.makespan:
        raise ReportError(
            f"{file} contains no operation that took time. {_SHOWS}"
        )
    return recorded, layout, step


def _stretch(
    folder: Path, layout: str, before: int
) -> tuple[Mapping[str, Any], list[float]]:
    """Return the last start of a run that can contain this step, and the seconds of its
    step lines."""
    # The last start in this layout before the step.
    for start, steps in reversed(
        stretches(read_journal(folder / "metrics.jsonl"))
    ):
        fits = start.get("layout") == layout and isinstance(
            start.get("model"), dict
        )
        if fits and number(start, "step") < before:
            return start, [
                x for x in (number(step, "seconds") for step in steps) if x > 0
            ]
    raise ReportError(
        f"{folder}: metrics.jsonl has no start as {layout or 'one rank'} before step"
        f" {before}, which timeline.json shows. Name the folder of one run."
    )


def step_extras(
    folder: Path,
    compared: Compared | None,
    make: Callable[[], Model] | None,
    optimizer: OptimizerChoice = USUAL_OPTIMIZER,
) -> Extras:
    """Return the picture of a run's measured step, and the shards that each rank holds.

    The step is shown over its prediction if `compared` is given. `make` builds a user's own
    model, which runs its code; `optimizer` is the run's.
    """
    try:
        recorded, _, number = read_recorded(folder)
    except ReportError as error:
        missing = not (folder / "timeline.json").exists()
        return Extras(no_step="" if missing else str(error), compared=compared)
    sizes: Sizes | None = None
    slices: tuple[Slice, ...] = ()
    try:
        step = read_step(folder)
    except ValueError:  # without a model there is nothing to size
        step = None
    # Code of the user is run only if `make` was given.
    if step and (make or not step.own) and _known(step):
        # torch, which takes a second to load, is only loaded if there is a model
        from ..parallel.model import build_model
        from .sizes import shards_of, sizes_of_run

        make, program = (
            make or partial(build_model, step.shape),
            recorded.program,
        )
        # CPU kernels keep other tensors than those of a GPU.
        target = "cpu" if step.device == "CPU" else "cuda"
        sizes = sizes_of_run(
            make, step.layout, program, step.sequence, target, optimizer
        )
        slices = shards_of(make, step.layout, program, RANKS)
    costs, title = (
        compared.costs if compared else None,
        f"step {number}, predicted and measured",
    )
    picture = recorded_picture(recorded, sizes, costs, title)
    picture = with_shown_ranks(picture, recorded.program)
    if sizes:
        held = "Memory is computed from the program and its pieces, at the times of each step."
        picture = replace(picture, notes=(*picture.notes, held))
    picture = replace(picture, limit=step.memory if step else 0.0)
    device = step.device if step else ""
    launched = device not in ("", "CPU")
    told = happened(
        recorded, picture, number, launched=launched, planned=bool(compared)
    )
    shards = Section("Shards", name="shards", draw=partial(shards_svg, slices))
    return Extras(
        picture,
        compared=compared,
        happened=tuple(told),
        every=(
            every_rank(recorded, costs)
            if recorded.program.mesh.size <= RANKS
            else None
        ),
        sections=(shards,) if slices else (),
    )


def _known(step: Step) -> bool:
    """True if the program can belong to this model: a foreign folder may contain any
    sizes."""
    program = step.recorded.program
    # One to three program pieces for each piece of the model.
    pieces = step.shape.pieces <= program.pieces <= 3 * step.shape.pieces
    return (
        pieces
        and len(program.rows) <= ROWS
        and program.mesh.size == step.layout.ranks
    )
