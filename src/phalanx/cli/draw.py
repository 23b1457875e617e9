"""`phalanx draw`: a schedule, a layout or a program file, simulated and shown."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from ..draw import Picture, text
from ..program import SCHEDULES, Sizes, Timeline, check, repeat, simulate
from .step import Step, of_file, of_layout, of_schedule
from .usage import Parser, UsageError, print_json

__all__ = ["run"]

_EPILOG = """\
WHAT is one of
  a schedule       naive gpipe 1f1b interleaved zb-h1 zb-h2 zb-v searched accum, or file.py:function
  a layout         "dp2 pp2 zero3 1f1b:4", with --model
  program FILE     a program saved with --out FILE.txt, perhaps edited
  mesh LAYOUT      who sits where; see `phalanx draw mesh --help`
  recompute        what recomputation costs and saves; see `phalanx draw recompute --help`

Costs are per stage: a stage of V chunks or N layers spends them over all of these."""


def run(argv: list[str]) -> int:
    """Draw what the words name."""
    said = _parser().read(argv)
    if said.what == ["program"] or (said.what[0] == "program" and len(said.what) != 2):
        raise UsageError("`phalanx draw program` takes one file: phalanx draw program step.txt.")
    step = _step(said)
    picture = _picture(step, said)
    _put(step, picture, said)
    return 0


def _parser() -> Parser:
    parser = Parser("phalanx draw", "Simulate a training step and show it.", _EPILOG)
    add = parser.add_argument
    add("what", nargs="+", metavar="WHAT", help="a schedule, a layout, or 'program FILE'")
    step = parser.add_argument_group("a schedule by itself")
    step.add_argument("--stages", type=int, metavar="P", help="pipeline stages (default 4)")
    step.add_argument("--microbatches", type=int, metavar="M", help="in one step (default 8)")
    step.add_argument("--chunks", type=int, metavar="V", help="chunks of the model on each stage")
    step.add_argument(
        "--layers", type=int, metavar="N", help="pieces, spread over the stages evenly"
    )
    step.add_argument(
        "--zero", type=int, choices=range(4), help="what dp shards (default 0, nothing)"
    )
    step.add_argument("--gather", choices=("step", "micro"), help="weights once a step or per use")
    step.add_argument(
        "--reduce", choices=("step", "micro"), help="gradients once a step or each time"
    )
    step.add_argument("--prefetch", type=int, metavar="N", help="gather N units ahead (default 1)")
    step.add_argument("--recompute", metavar="MODE", help="none, all, every=C, sqrt or fit")
    model = parser.add_argument_group("a layout")
    model.add_argument("--model", metavar="SHAPE", help="a shape's name, or a .toml file")
    model.add_argument("--batch", type=int, metavar="N", help="sequences of a step")
    model.add_argument("--seq", type=int, metavar="N", help="tokens of a sequence")
    both = parser.add_argument_group("all of them")
    both.add_argument(
        "--costs", metavar="K=T,...", help="F=1,B=2 or F=1,I=1,W=1; also send, G, S, U ..."
    )
    both.add_argument("--memory-limit", type=float, metavar="N",
                      help="searched: microbatches a stage may hold; recompute fit: pieces")  # fmt: skip
    both.add_argument(
        "--clip", action="store_true", help="clip gradients: a barrier before the update"
    )
    both.add_argument(
        "--repeat", type=int, default=1, metavar="N", help="N steps, one after the other"
    )
    both.add_argument(
        "--width", type=int, metavar="N", help="columns of the text (default: the terminal's)"
    )
    both.add_argument(
        "--out", metavar="FILE", help=".svg .html, .json (a trace for Perfetto), .txt (the program)"
    )
    both.add_argument("--json", action="store_true", help="figures, program and timeline as JSON")
    return parser


def _step(said: argparse.Namespace) -> Step:
    if said.repeat < 1:
        raise UsageError(f"--repeat is {said.repeat}; draw 1 step or more.")
    if said.what[0] == "program":
        return of_file(said.what[1], said)
    name = " ".join(said.what)
    if said.model:
        return of_layout(name, said)
    if name not in (*SCHEDULES, "searched") and any(c.isdigit() or c.isspace() for c in name):
        if ".py:" not in name and (" " in name or name[:2] in ("dp", "pp", "tp", "cp")):
            raise UsageError(
                f"the layout {name!r} needs a model: add --model 124m, or another shape."
            )
    return of_schedule(name, said)


def _picture(step: Step, said: argparse.Namespace) -> Picture:
    timeline = simulate(repeat(step.program, said.repeat), step.costs)
    title = step.title + (f", {said.repeat} steps" if said.repeat > 1 else "")
    return Picture(title, timeline, held=check(step.program).held, notes=step.notes)


def _put(step: Step, picture: Picture, said: argparse.Namespace) -> None:
    if said.json:
        print_json(_figures(step, picture, said.repeat))
    else:
        terminal = sys.stdout.isatty()
        width = said.width or (shutil.get_terminal_size().columns if terminal else 80)
        print(text(picture, width=width, colour=terminal and "NO_COLOR" not in os.environ), end="")


def _figures(step: Step, picture: Picture, steps: int) -> dict[str, object]:
    t = picture.timeline
    return {
        "title": picture.title,
        "stages": step.stages,
        "microbatches": step.program.microbatches,
        "chunks": step.chunks,
        "steps": steps,
        "makespan": t.makespan,
        "ideal": t.ideal,
        "bubble_fraction": t.bubble_fraction,
        "inner_idle": [t.inner_idle(rank) for rank in t.ranks],
        "exposed": [t.exposed(rank) for rank in t.ranks],
        "peak_held": list(picture.held),
        "notes": list(picture.notes),
        "program": str(step.program),
        "timeline": t.to_json(),
    }
