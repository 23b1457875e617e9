"""One layout of a plan by itself: parts of its step, memory of its fullest rank, and the
timeline that is predicted for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..draw import Picture, text
from ..layout import Layout
from ..plan.estimate import KINDS
from ..plan.refused import size
from ..plan.search import Choice, judge, timeline
from .plan_figures import Asked, of_choice
from .plan_tell import one
from .step import refuse_illegal
from .usage import UsageError, print_json, screen

__all__ = ["explain"]

_ROUNDS = 2  # of a pipeline's stages, in microbatches: then the picture repeats itself


def explain(words: str, asked: Asked, *, as_json: bool) -> int:
    """Print what a layout would take."""
    layout = Layout.parse(words)
    if layout.precision != asked.precision and not any(
        w == layout.precision for w in words.split()
    ):
        layout = replace(layout, precision=asked.precision)
    if layout.ranks != asked.site.ranks:
        raise UsageError(
            f"--explain: {layout} is for {layout.ranks:,} ranks, {asked.site.name} has"
            f" {asked.site.ranks:,}."
        )
    refuse_illegal(layout, asked.shape, batch=asked.batch, sequence=asked.sequence)
    (choice,) = judge(
        [layout], asked.shape, asked.site, asked.weigh, stack=asked.stack,
        sequence=asked.sequence, batch=asked.batch, model=asked.own,
    )  # fmt: skip
    room = asked.limit * asked.site.memory
    if as_json:
        print_json(of_choice(asked, choice) | {"fits": choice.bytes <= room})
        return 0
    print(f"{layout} on {asked.site.name}\n")
    print(
        "\n".join([*one(asked, choice), "", *_memory(choice, room), "", *_timeline(asked, choice)])
    )
    return 0


def _memory(choice: Choice, room: float) -> Iterator[str]:
    """By kind, of the fuller of the first and the last stage."""
    fits = "fits" if choice.bytes <= room else "does not fit"
    yield f"the fullest rank holds {size(choice.bytes)}, and {fits} in {size(room)}:"
    for kind in KINDS:
        if choice.memory[kind]:
            part = 100 * choice.memory[kind] / choice.bytes
            yield f"  {kind:20}{size(choice.memory[kind]):>10} {part:6.1f} %"


def _timeline(asked: Asked, choice: Choice) -> Iterator[str]:
    layout = choice.layout
    most = max(_ROUNDS * layout.pp, 4)
    drawn = timeline(choice, asked.site, asked.weigh, stack=asked.stack, model=asked.own, most=most)
    shown = min(layout.microbatches, most)
    title = f"computing: {shown} of {layout.microbatches} microbatches"
    notes = ("a piece is a whole stage; its recomputation and the messages in it are in its time",)
    labels = {rank: f"stage {rank}" for rank in drawn.ranks}
    width, colour = screen(None)
    picture = Picture(title, drawn, labels=labels, notes=notes, clock="s")
    yield from text(picture, width=width, colour=colour).splitlines()
