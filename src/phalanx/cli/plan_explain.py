"""One layout of a plan in detail: the parts of its step, the memory of its fullest
rank, and its predicted timeline."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from ..api.plan_text import choice_figures, choice_text, memory_text
from ..api.request import in_precision, refuse_illegal
from ..drawing import Picture, text
from ..layout import Layout, stage_pieces
from ..planner.search import judge
from ..planner.step import Choice, Pricer, Request
from ..program import Op, Span, Timeline, ops
from .usage import UsageError, print_json, say, screen

# Microbatches shown, as a multiple of the stages: afterwards the picture repeats
# itself.
_ROUNDS = 2


def named(words: str, request: Request, flag: str) -> Choice:
    """Return the choice for a layout given in words, in the requested precision unless
    it names its own."""
    # The requested fp8 format, unless the layout names one.
    layout = in_precision(words, request.precision)
    if "matmul" not in Layout.written(words):
        layout = replace(layout, matmul=request.matmul)
    if layout.ranks != request.hardware.ranks:
        raise UsageError(
            f"{flag}: {layout} is for {layout.ranks:,} ranks, {request.hardware.name} has"
            f" {request.hardware.ranks:,}."
        )
    refuse_illegal(
        layout, request.shape, batch=request.batch, sequence=request.sequence
    )
    # A user's own model may not support a way: its code tells why.
    if not request.takes(layout):
        from ..parallel import load_model, refuse_mixing, refuse_unfit

        own = load_model(request.model)
        refuse_unfit(own, layout)
        refuse_mixing(own, layout)
    (choice,) = judge(request, [layout])
    return choice


def explain(args: argparse.Namespace, request: Request) -> int:
    choice = named(args.explain, request, "--explain")
    if args.json:
        # With a perfect allocator: the least that it needs.
        least, _ = choice.range(request.profile)
        print_json(
            choice_figures(request, choice)
            | {"fits": least <= request.hardware.memory}
        )
        return 0
    say(f"{choice.layout} on {request.hardware.name}\n")
    say(
        "\n".join(
            (
                *choice_text(request, choice),
                "",
                *memory_text(choice, request),
                "",
            )
        )
    )
    say(_timeline(request, choice), end="", colour=True)
    return 0


def _timeline(request: Request, choice: Choice) -> str:
    layout = choice.layout
    most = max(_ROUNDS * layout.pp, 4)
    stages = stage_pieces(layout, request.shape)
    # Pieces of a stage become one operation, in which labels fit.
    drawn = _by_stage(Pricer(request).timeline(layout, most), stages)
    title = f"computing: {min(layout.microbatches, most)} of {layout.microbatches} microbatches"
    note = "an operation is a whole stage, including its messages and waits"
    labels = {rank: f"stage {rank}" for rank in drawn.ranks}
    width, colour = screen()
    picture = Picture(title, drawn, labels=labels, notes=(note,), clock="s")
    return text(picture, width=width, colour=colour)


def _by_stage(timeline: Timeline, stages: Sequence[range]) -> Timeline:
    """Return a timeline in which all pieces of a virtual stage are one operation."""
    stage_of = {
        piece: stage for stage, pieces in enumerate(stages) for piece in pieces
    }
    joined: dict[tuple[int, Op], Span] = {}
    kinds = {span.op.kind for span in timeline.spans}
    backward = next(kind for kind in ops.PROPAGATES if kind in kinds)
    for span in timeline.spans:
        if span.op.kind in ops.COMPUTES:
            # recomputing a stage is part of its backward
            kind = backward if span.op.kind in ops.RECOMPUTES else span.op.kind
            op = Op(kind, stage_of[span.op.piece], span.op.index)
            # The first span of an operation, stretched to the end of its last.
            first = joined.setdefault((span.rank, op), span._replace(op=op))
            joined[span.rank, op] = first._replace(end=span.end)
    return Timeline(
        tuple(
            sorted(joined.values(), key=lambda span: (span.rank, span.start))
        )
    )
