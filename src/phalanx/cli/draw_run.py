"""`phalanx draw run FILE`: the measured timeline of a real step over the predicted one."""

from __future__ import annotations

from collections.abc import Callable

from ..draw import Picture, chrome, page, svg, text
from ..program import Recorded, Timeline, check
from .outputs import try_file
from .usage import Parser, print_json, read, say, screen, write

__all__ = ["run"]

_EPILOG = """\
The file is what a performed step leaves: `phalanx verify --layouts "pp2 1f1b:4" --record step.json`
writes one. The prediction is simulated with that run's own median costs, so what differs between
the two is the waiting.

  phalanx draw run step.json
  phalanx draw run step.json --out step.html"""

_FORMATS: dict[str, Callable[[Picture], str]] = {".svg": svg, ".html": page, ".json": chrome}


def run(argv: list[str]) -> int:
    """Draw both timelines, and say how much of each is waiting."""
    parser = Parser("phalanx draw run", "A step that ran, over its prediction.", _EPILOG)
    parser.add_argument("file", metavar="FILE", help="the recorded step")
    parser.add_argument("--width", type=int, metavar="N", help="columns of the text")
    parser.add_argument("--out", metavar="FILE", help=".svg, .html or .json (a trace)")
    parser.add_argument("--json", action="store_true", help="figures and both timelines as JSON")
    args = parser.read(argv)
    try_file(args.out, formats=_FORMATS)
    recorded = Recorded.parse(read(args.file, "recorded step"))
    proof = check(recorded.program)
    predicted, measured = recorded.predicted(), recorded.measured()
    picture = Picture(
        f"a step on {recorded.program.mesh.size} ranks, predicted and measured",
        predicted,
        measured,
        held=proof.held,
        notes=(_bubbles(predicted, measured),),
        clock="s",
    )
    if args.out:
        write(args.out, _FORMATS, picture)
    if args.json:
        print_json(
            {
                "predicted": _figures(predicted),
                "measured": _figures(measured),
                "program": str(recorded.program),
            }
        )
    elif args.out:
        say("\n".join((picture.title, *picture.summary, *picture.notes, f"wrote {args.out}")))
    else:
        width, colour = screen(args.width)
        say(text(picture, width=width, colour=colour), end="", colour=colour)
    return 0


def _bubbles(predicted: Timeline, measured: Timeline) -> str:
    return (
        f"bubble: {predicted.bubble_fraction:.1%} predicted, {measured.bubble_fraction:.1%} measured;"
        f" step: {predicted.makespan:.4g} s predicted, {measured.makespan:.4g} s measured."
    )


def _figures(timeline: Timeline) -> dict[str, object]:
    return {
        "makespan": timeline.makespan,
        "bubble_fraction": timeline.bubble_fraction,
        "inner_idle": [timeline.inner_idle(rank) for rank in timeline.ranks],
        "exposed": [timeline.exposed(rank) for rank in timeline.ranks],
        "timeline": timeline.to_json(),
    }
