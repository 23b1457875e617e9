"""One layout of a plan by itself: parts of its step, memory of its fullest rank, and the
timeline that is predicted for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from ..api.plan_text import choice_figures, choice_text
from ..api.request import in_precision, range_text, refuse_illegal, verdict
from ..draw import Picture, text, text_table
from ..draw.words import wrapped
from ..layout import stage_pieces
from ..layout.numbers import bytes_text
from ..plan.search import judge
from ..plan.step import MEMORY, Choice, Pricer, Request
from ..program import Op, Span, Timeline, ops
from .usage import UsageError, print_json, say, screen

_SHORT = {"activations": "kept"}
_WIDTH = 80
_ROUNDS = 2  # of a pipeline's stages, in microbatches: then the picture repeats itself


def named(words: str, request: Request, flag: str) -> Choice:
    """A layout that somebody typed, in the precision that was asked for unless it names its own."""
    layout = in_precision(words, request.precision)
    if layout.ranks != request.hardware.ranks:
        raise UsageError(
            f"{flag}: {layout} is for {layout.ranks:,} ranks, {request.hardware.name} has"
            f" {request.hardware.ranks:,}."
        )
    refuse_illegal(layout, request.shape, batch=request.batch, sequence=request.sequence)
    (choice,) = judge(request, [layout])
    return choice


def explain(words: str, request: Request, *, as_json: bool) -> int:
    """Print what a layout would take."""
    choice = named(words, request, "--explain")
    if as_json:
        least, _ = choice.range(request.profile)
        print_json(choice_figures(request, choice) | {"fits": least <= request.hardware.memory})
        return 0
    say(f"{choice.layout} on {request.hardware.name}\n")
    say(
        "\n".join(
            [
                *choice_text(request, choice),
                "",
                *_memory(choice, request),
                "",
                *_timeline(request, choice),
            ]
        )
    )
    return 0


def _memory(choice: Choice, request: Request) -> Iterator[str]:
    """By kind, of the fullest rank; and of each stage of a pipeline."""
    least, most = choice.range(request.profile)
    memory, room = request.hardware.memory, request.room
    beyond = f"; a search takes {bytes_text(room)} at most" if choice.bytes > room else ""
    yield from wrapped(
        f"the fullest rank holds {bytes_text(choice.bytes)} ({range_text(least, most)}, by how its"
        f" allocator fares), and {verdict(least, most, memory)} in {bytes_text(memory)}{beyond}:",
        _WIDTH,
    )
    rows = [
        (kind, bytes_text(held), f"{100 * held / choice.bytes:.1f} %")
        for kind in MEMORY
        if (held := choice.memory[kind])
    ]
    yield from text_table((), rows, indent=2).splitlines()
    if choice.stages:
        yield ""
        yield from text_table(*_stages(choice.stages), left="r").splitlines()


def _stages(stages: Sequence[Mapping[str, float]]) -> tuple[list[str], list[list[str]]]:
    """A row for every rank of a pipeline, neighbours that are alike in one, in GB."""
    used = [kind for kind in MEMORY if any(held[kind] for held in stages)]
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


def _timeline(request: Request, choice: Choice) -> Iterator[str]:
    layout = choice.layout
    most = max(_ROUNDS * layout.pp, 4)
    stages = stage_pieces(layout, request.shape)
    drawn = _by_stage(Pricer(request).timeline(layout, most), stages)
    shown = min(layout.microbatches, most)
    title = f"computing: {shown} of {layout.microbatches} microbatches"
    notes = (
        "a piece is a whole stage; what it waits for inside and the messages in it are its time",
    )
    labels = {rank: f"stage {rank}" for rank in drawn.ranks}
    width, colour = screen(None)
    picture = Picture(title, drawn, labels=labels, notes=notes, clock="s")
    yield from text(picture, width=width, colour=colour).splitlines()


def _by_stage(timeline: Timeline, stages: Sequence[range]) -> Timeline:
    """What is computed, with the pieces of a virtual stage as one operation."""
    stage_of = {piece: stage for stage, pieces in enumerate(stages) for piece in pieces}
    joined: dict[tuple[int, Op], Span] = {}
    kinds = {span.op.kind for span in timeline.spans}
    backward = next(kind for kind in ops.PROPAGATES if kind in kinds)
    for span in timeline.spans:
        if span.op.kind in ops.COMPUTES:
            # Recomputing a stage is part of its backward.
            kind = backward if span.op.kind in ops.RECOMPUTES else span.op.kind
            op = Op(kind, stage_of[span.op.piece], span.op.index)
            known = joined.get((span.rank, op))
            start = known.start if known else span.start
            joined[span.rank, op] = Span(span.rank, span.lane, op, start, span.end)
    return Timeline(tuple(sorted(joined.values(), key=lambda span: (span.rank, span.start))))
