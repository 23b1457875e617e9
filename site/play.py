"""Requests of the playground page: a layout, a model and a device in, pictures and
numbers out.

It runs in the page's worker, in a browser, on the unchanged package, which does all
drawing and planning.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

from formula import NoFormula, costs_from

from phalanx.api.step import step_of
from phalanx.cost import step_flops
from phalanx.drawing import Html, Picture, paragraphs, table, timeline
from phalanx.drawing.page import frame
from phalanx.layout import (
    Layout,
    LayoutError,
    Shape,
    legal,
    nearest,
    staged_pieces,
)
from phalanx.layout.choices import BF16
from phalanx.layout.families import shape_of
from phalanx.layout.numbers import bytes_text, count_text, seconds_text
from phalanx.planner.device import devices
from phalanx.planner.hardware import hardware_of
from phalanx.planner.interval import interval
from phalanx.planner.link import cluster, clusters
from phalanx.planner.local import profile_for
from phalanx.planner.step import Choice, Pricer, Request
from phalanx.program import Program, build, faults, simulate
from phalanx_lab import exercises

_MOST = 20_000  # most operations of a step that is drawn
# candidate layouts tried, and shown, to find some that fit
_TRIED, _SHOWN, _MESHES = 80, 3, 6


@dataclass(frozen=True)
class Asked:
    """Contents of the page's fields."""

    layout: str
    model: str  # a shape's name, or the text of a config.json
    device: str = "h100"
    batch: int = 0
    sequence: int = 0
    operations: str = ""  # the text of a program edited by hand


class Playground:
    """State of the page's worker: the costs, and the unfinished search of the last
    answer."""

    def __init__(self, costs: str) -> None:
        self.costs: Mapping[str, Any] = json.loads(Path(costs).read_text())
        self.rest: Iterator[dict[str, str]] = iter(())

    def choices(self) -> str:
        """Return the entries of the page's lists."""
        machines = [name for name, each in clusters().items() if not each.size]
        tasks = [
            {
                "name": each.name,
                "task": each.task,
                "start": each.start,
                "chapter": each.chapter,
            }
            for each in exercises.exercises().values()
        ]
        return json.dumps(
            {
                "shapes": Shape.names(),
                "devices": [*machines, *devices()],
                "exercises": tasks,
            }
        )

    def answer(self, text: str) -> str:
        """Answer a JSON request with JSON: either `error`, or everything that is
        shown."""
        self.rest = iter(())
        asked = json.loads(text)
        try:
            shown = (
                _checked(**asked)
                if "exercise" in asked
                else self._answer(Asked(**asked))
            )
        except ValueError as error:  # of a layout, shape, device or program
            shown = {"error": str(error)}
        return json.dumps(shown)

    def more(self) -> str:
        """Return the next later result, the verdict of `check` or a layout that fits;
        "" at the end."""
        return (
            json.dumps(found)
            if (found := next(self.rest, None)) is not None
            else ""
        )

    def _answer(self, asked: Asked) -> dict[str, Any]:
        layout, shape = _layout(asked.layout), _shape(asked)
        if broken := legal(layout, shape):
            near = [str(x) for x in nearest(layout, shape)]
            return {"error": "\n".join(map(str, broken)), "nearest": near}
        program = _program(asked, layout, shape)
        if sum(map(len, program.rows)) > _MOST:
            raise ValueError(
                f"More than {_MOST:,} operations are not drawn: use fewer microbatches."
            )
        found: dict[str, Any] = {
            "layout": str(layout),
            "operations": str(program),
        }
        if asked.operations:
            if wrong := faults(program):
                return found | {"verdict": "\n".join(wrong)}
            found["verdict"] = ""
        request = _request(shape, asked.device, layout.ranks, self.costs)
        pricer = Pricer(request)
        try:
            costs, choice = pricer.costs(layout), pricer.choose(layout)
        except NoFormula as error:
            self.rest = iter([{"verdict": "\n".join(faults(program))}])
            return found | _unpriced(layout, shape, program, error)
        title, notes = f"{layout} on {shape.name}", _notes(layout)
        drawn = simulate(program, costs, pricer.priced(layout).sizes)
        self.rest = _later(request, pricer, choice, program)
        return found | {
            "page": _page(Picture(title, drawn, clock=" s", notes=notes)),
            "summary": _summary(request, choice),
            "memory": _memory(choice.memory, request.hardware.memory),
            "step": _step(request, choice),
        }


def _checked(*, exercise: str, answer: str) -> dict[str, Any]:
    """The verdict on an answer to the exercise of this name."""
    verdict = exercises.exercise(exercise).check(answer)
    page = _page(verdict.picture) if verdict.picture else ""
    return {"right": verdict.right, "words": verdict.words, "page": page}


def _page(picture: Picture) -> str:
    return frame(picture.title, timeline(picture), narrow=False)


def _unpriced(
    layout: Layout, shape: Shape, program: Program, why: NoFormula
) -> dict[str, str]:
    """Draw a step like `phalanx draw` without a cluster, in units of a mean stage's
    forward."""
    picture = replace(step_of(layout, shape, {}), program=program).picture()
    words = [
        f"{shape.name}: {count_text(shape.total)} parameters. {why}",
        "So times are not seconds here: one is the forward of a mean stage. What is held is counted"
        " in pieces and units, not bytes.",
    ]
    picture = replace(picture, notes=(*picture.notes, *_notes(layout)))
    return {
        "page": _page(picture),
        "summary": paragraphs(words),
        "memory": "",
        "step": "",
    }


def _shape(asked: Asked) -> Shape:
    if asked.model.lstrip().startswith("{"):
        try:
            config = json.loads(asked.model)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"config.json: line {error.lineno} is no JSON: {error.msg}"
            ) from None
        shape = shape_of(config, "config.json")
    else:
        shape = Shape.load(asked.model.strip())
    if asked.sequence and shape.positions != "learned":
        shape = replace(shape, sequence=asked.sequence)
    return replace(shape, batch=asked.batch) if asked.batch else shape


def _layout(text: str) -> Layout:
    layout = Layout.parse(text)
    return (
        layout
        if "precision" in Layout.written(text)
        else replace(layout, precision=BF16)
    )


def _request(
    shape: Shape, device: str, ranks: int, costs: Mapping[str, Any]
) -> Request:
    hardware = hardware_of(cluster(f"{device}x{ranks}"))
    return Request(
        shape, hardware, profile_for(hardware, None, BF16), partial(costs_from, costs),
        shape.sequence, shape.batch,
    )  # fmt: skip


def _program(asked: Asked, layout: Layout, shape: Shape) -> Program:
    if asked.operations:
        return Program.parse(asked.operations, "the operations")
    return build(layout, staged_pieces(layout, shape))


def _notes(layout: Layout) -> tuple[str, ...]:
    if layout.ranks == layout.pp:
        return ()
    each = layout.ranks // layout.pp
    return (
        f"A row stands for {each} ranks, which do the same with other data or other parts.",
    )


def _memory(kinds: Mapping[str, float], room: float) -> Html:
    rows = [
        (kind, bytes_text(held), f"{100 * held / room:.1f} %")
        for kind, held in kinds.items()
        if held
    ]
    return table(("the fullest rank", "bytes", "of the device"), rows)


def _summary(request: Request, choice: Choice) -> Html:
    shape, room = request.shape, request.room
    fits = "fits" if choice.bytes <= room else "does not fit"
    return paragraphs(
        [
            f"{shape.name}: {count_text(shape.total)} parameters, {shape.batch:,} sequences of"
            f" {shape.sequence:,} tokens a step, on {request.hardware.name}.",
            f"The fullest rank holds {bytes_text(choice.bytes)}, and {fits} in {bytes_text(room)}"
            f" ({request.limit:.0%} of a device).",
        ]
    )


def _step(request: Request, choice: Choice) -> Html:
    flops = step_flops(request.shape, request.batch, request.sequence)
    ranks, step = request.hardware.ranks, choice.step
    peak = request.hardware.peak.get(request.precision, 0.0) * ranks
    mfu = f", MFU {flops.model / peak / step:.1%}" if peak else ""
    expected = interval(
        choice.case, request.hardware, request.profile, choice.parts
    )
    low, high = map(seconds_text, expected.around(step))
    words = (
        f"A step takes {seconds_text(step)}, expected range {low} to {high}:"
        f" {request.tokens / step / ranks:,.0f} tokens a second and device{mfu}."
    )
    rows = [
        (part, seconds_text(time), f"{100 * time / step:.1f} %")
        for part, time in choice.parts.items()
    ]
    return Html(
        paragraphs([words]) + table(("part of the step", "time", ""), rows)
    )


def _later(
    request: Request, pricer: Pricer, choice: Choice, program: Program
) -> Iterator[dict[str, str]]:
    yield {"verdict": "\n".join(faults(program))}
    if choice.bytes <= request.room:
        return
    found = 0
    for candidate in islice(_changed(choice.layout, request.shape), _TRIED):
        try:
            fits = pricer.choose(candidate, request.room).bytes <= request.room
        except (LayoutError, NoFormula):
            fits = False
        found += fits
        yield {"fits": str(candidate)} if fits else {}
        if found == _SHOWN:
            return
    if not found:
        yield {"fits": ""}


def _changed(x: Layout, shape: Shape) -> Iterator[Layout]:
    """Yield variants with more recomputation, smaller microbatches and more sharding;
    then on other meshes."""
    seen, modes = {x}, ["none", "selective", "all"]
    modes = (
        modes[modes.index(x.recompute) :]
        if x.recompute in modes
        else [x.recompute]
    )
    for base in (x, *nearest(x, shape, most=_MESHES)):
        counts = [base.microbatches * 2**k for k in range(5)]
        zeros = (
            [z for z in (0, 1, 3) if z >= base.zero]
            if base.dp > 1
            else [base.zero]
        )
        changes = sorted(
            product(range(len(modes)), range(len(counts)), range(len(zeros))),
            key=sum,
        )
        for mode, count, zero in changes:
            try:
                made = replace(
                    base,
                    zero=zeros[zero],
                    recompute=modes[mode],
                    microbatches=counts[count],
                )
            except LayoutError:
                continue
            if made not in seen and not legal(made, shape):
                seen.add(made)
                yield made
