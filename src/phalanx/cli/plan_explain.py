"""One layout of a plan by itself: parts of its step, memory of its fullest rank, and the
timeline that is predicted for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from ..draw import Picture, text, text_table
from ..layout import Layout
from ..plan.estimate import KINDS
from ..plan.refused import size
from ..plan.search import Choice, judge, timeline
from .before import refuse_illegal
from .plan_figures import Asked, of_choice
from .plan_tell import one
from .usage import UsageError, print_json, say, screen

__all__ = ["explain", "named"]

_SHORT = {"activations": "kept"}
_ROUNDS = 2  # of a pipeline's stages, in microbatches: then the picture repeats itself


def named(words: str, asked: Asked, flag: str) -> Choice:
    """A layout that somebody typed, in the precision that was asked for unless it names its own."""
    layout = Layout.parse(words)
    if layout.precision not in words.split():
        layout = replace(layout, precision=asked.precision)
    if layout.ranks != asked.hardware.ranks:
        raise UsageError(
            f"{flag}: {layout} is for {layout.ranks:,} ranks, {asked.hardware.name} has"
            f" {asked.hardware.ranks:,}."
        )
    refuse_illegal(layout, asked.shape, batch=asked.batch, sequence=asked.sequence)
    (choice,) = judge(
        [layout],
        asked.shape,
        asked.hardware,
        asked.piece_costs,
        profile=asked.profile,
        sequence=asked.sequence,
        batch=asked.batch,
        model=asked.own,
    )
    return choice


def explain(words: str, asked: Asked, *, as_json: bool) -> int:
    """Print what a layout would take."""
    choice = named(words, asked, "--explain")
    room = asked.limit * asked.hardware.memory
    if as_json:
        print_json(of_choice(asked, choice) | {"fits": choice.bytes <= room})
        return 0
    say(f"{choice.layout} on {asked.hardware.name}\n")
    say("\n".join([*one(asked, choice), "", *_memory(choice, room), "", *_timeline(asked, choice)]))
    return 0


def _memory(choice: Choice, room: float) -> Iterator[str]:
    """By kind, of the fullest rank; and of each stage of a pipeline."""
    fits = "fits" if choice.bytes <= room else "does not fit"
    yield f"the fullest rank holds {size(choice.bytes)}, and {fits} in {size(room)}:"
    rows = [
        (kind, size(held), f"{100 * held / choice.bytes:.1f} %")
        for kind in KINDS
        if (held := choice.memory[kind])
    ]
    yield from text_table((), rows, indent=2).splitlines()
    if choice.stages:
        yield ""
        yield from text_table(*_stages(choice.stages), left="r").splitlines()


def _stages(stages: Sequence[Mapping[str, float]]) -> tuple[list[str], list[list[str]]]:
    """A row for every rank of a pipeline, neighbours that are alike in one, in GB."""
    used = [kind for kind in KINDS if any(held[kind] for held in stages)]
    head = ["GB  stage", *(_SHORT.get(kind, kind) for kind in used), "all"]
    numbers = [
        [f"{held / 1e9:.1f}" for held in (*(each[k] for k in used), sum(each.values()))]
        for each in stages
    ]
    rows = []
    begin = 0
    for row, alike in groupby(numbers):
        last = begin + len(list(alike)) - 1
        rows.append([f"{begin}" if last == begin else f"{begin}-{last}", *row])
        begin = last + 1
    return head, rows


def _timeline(asked: Asked, choice: Choice) -> Iterator[str]:
    layout = choice.layout
    most = max(_ROUNDS * layout.pp, 4)
    drawn = timeline(
        choice, asked.hardware, asked.piece_costs, profile=asked.profile, model=asked.own, most=most
    )
    shown = min(layout.microbatches, most)
    title = f"computing: {shown} of {layout.microbatches} microbatches"
    notes = ("a piece is a whole stage; its recomputation and the messages in it are in its time",)
    labels = {rank: f"stage {rank}" for rank in drawn.ranks}
    width, colour = screen(None)
    picture = Picture(title, drawn, labels=labels, notes=notes, clock="s")
    yield from text(picture, width=width, colour=colour).splitlines()
