"""A layout as a file of another trainer: the file goes to standard output, omissions to standard
error."""

from __future__ import annotations

import argparse

from ..api.plan import Planned
from ..api.request import in_precision, refuse_illegal
from ..api.trainers import file_figures, trainer_file
from ..layout import Layout
from ..layout.numbers import seconds_text
from ..planner.search import search
from ..planner.step import Request
from .usage import UsageError, complain, print_json, say


def write_for(args: argparse.Namespace, request: Request) -> int:
    """Print the trainer's file for the named layout, or for the fastest that it can run.

    The exit code is 1 if the file cannot express the whole layout, or if nothing fits.
    """
    expected = ""
    if args.layout is not None:
        layout = _named(args.layout, request)
    else:
        # The request knows the trainer, so only layouts that it can say are
        # searched.
        planned = Planned(request, search(request, top=1))
        if planned.best is None:
            complain("\n".join(planned.reasons))
            return 1
        layout = planned.best
        step = seconds_text(planned.layouts[0].step)
        expected = f"{step} a step, with software as {request.profile.name!r}"
    file = trainer_file(request, layout)
    if args.json:
        print_json(file_figures(file))
        return 0 if file.whole else 1
    # Only the file on standard output, so that it can be redirected.
    say(file.text, end="")
    complain(
        f"{file.trainer.title} {file.trainer.versions}: {layout}. {expected}".strip()
    )
    if file.unsaid:
        complain(f"{file.trainer.title} cannot say:")
    for sentence in file.unsaid:
        complain(f"- {sentence}")
    for sentence in (*file.near, *file.elsewhere):
        complain(sentence)
    return 0 if file.whole else 1


def _named(words: str, request: Request) -> Layout:
    layout = in_precision(words, request.precision)
    if layout.ranks != request.hardware.ranks:
        raise UsageError(
            f"--layout: {layout} is for {layout.ranks:,} ranks, {request.hardware.name} has"
            f" {request.hardware.ranks:,}."
        )
    refuse_illegal(
        layout, request.shape, batch=request.batch, sequence=request.sequence
    )
    return layout
