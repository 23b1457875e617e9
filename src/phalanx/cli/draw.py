"""`phalanx draw`: a schedule, a layout or a program file, simulated and shown."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from ..draw import Picture, chrome, page, svg, text
from ..layout import Layout, LayoutError
from ..layout.source import names_source
from ..program import SCHEDULES, Sizes, Timeline, check, repeat, simulate
from . import draw_mesh, draw_recompute, draw_run
from .outputs import try_file
from .step import Step, of_file, of_layout, of_schedule
from .usage import Parser, UsageError, print_json, say, screen, write

__all__ = ["run"]

_EPILOG = """\
WHAT is one of
  a schedule       {schedules},
                   or your own as file.py:function
  a layout         "dp2 pp2 zero3 1f1b:4", with --model
  program FILE     a program saved with --out step.txt, perhaps edited
  run FILE         a step that was carried out, over its prediction: phalanx draw run --help
  mesh LAYOUT      who sits where: phalanx draw mesh --help
  recompute        what recomputation costs and saves: phalanx draw recompute --help

Costs are per stage: a stage of several chunks or layers spends them over all of these. B left out
costs what I and W cost together, R left out what F does; any other kind left out costs nothing.

  phalanx draw interleaved --stages 4 --microbatches 8 --chunks 2
  phalanx draw accum --layers 4 --zero 3 --microbatches 1 --costs F=4,B=8,G=4,S=4,U=2
  phalanx draw searched --costs F=1,I=1,W=1,send=0.1 --memory-limit 4 --out best.svg
"""


def run(argv: list[str]) -> int:
    """Draw what the words name."""
    if argv[:1] == ["mesh"]:
        return draw_mesh.run(argv[1:])
    if argv[:1] == ["recompute"]:
        return draw_recompute.run(argv[1:])
    if argv[:1] == ["run"]:
        return draw_run.run(argv[1:])
    args = _parser().read(argv)
    try_file(args.out, formats=(*_FORMATS, ".txt"))
    screen(args.width)
    step = _step(args)
    picture = _picture(step, args)
    if args.out:
        _write(step, picture, args.out)
    if args.json:
        print_json(_figures(step, picture, args.repeat))
    elif args.out:
        say("\n".join((picture.title, *picture.summary, *picture.notes, f"wrote {args.out}")))
    else:
        width, colour = screen(args.width)
        say(text(picture, width=width, colour=colour), end="", colour=colour)
    return 0


def _parser() -> Parser:
    epilog = _EPILOG.format(schedules=" ".join(_names()))
    parser = Parser("phalanx draw", "Simulate a training step and show it.", epilog)
    parser.add_argument("what", nargs="+", metavar="WHAT", help="what to draw; see below")
    add = parser.add_argument_group("a schedule by itself").add_argument
    add("--stages", type=int, metavar="P", help="pipeline stages (default 4)")
    add("--microbatches", type=int, metavar="M", help="microbatches of a step (default 8)")
    add("--chunks", type=int, metavar="V", help="chunks of the model on each stage")
    add("--layers", type=int, metavar="N", help="pieces, spread evenly (default: one per chunk)")
    add("--zero", type=int, choices=range(4), help="shard over two copies (default 0: nothing)")
    add("--gather", choices=("step", "micro"), help="fetch weights once a step, or for each use")
    add("--reduce", choices=("step", "micro"), help="sum gradients once, or per microbatch")
    add("--prefetch", type=int, metavar="N", help="fetch weights N units ahead (default 1)")
    add("--recompute", metavar="MODE", help="none, all, every=C, sqrt or fit")
    add = parser.add_argument_group("a layout").add_argument
    add("--model", metavar="SHAPE", help="a shape's name, or a .toml file")
    add("--batch", type=int, metavar="N", help="sequences of a step (default: the shape's)")
    add("--seq", type=int, metavar="N", help="tokens of a sequence (default: the shape's)")
    add = parser.add_argument_group("all of them").add_argument
    add("--costs", metavar="K=T,...", help="as F=1,B=2 or F=1,I=1,W=1,send=0.1; also R G S T U ...")
    add(
        "--memory-limit",
        type=float,
        metavar="N",
        help="searched: microbatches a stage may hold; recompute fit: pieces",
    )
    add("--clip", action="store_true", help="clip gradients: all agree before any update")
    add("--repeat", type=int, default=1, metavar="N", help="N steps, one after the other")
    add("--width", type=int, metavar="N", help="columns of the text (default: the terminal's)")
    add(
        "--out",
        metavar="FILE",
        help=".svg, .html, .json (a trace for Perfetto), .txt (the program)",
    )
    add("--json", action="store_true", help="figures, program and timeline as JSON")
    return parser


def _names() -> list[str]:
    return [*SCHEDULES, "searched"]


def _step(args: argparse.Namespace) -> Step:
    if args.repeat < 1:
        raise UsageError(f"--repeat is {args.repeat}; draw 1 step or more.")
    if args.what[0] == "program":
        if len(args.what) != 2:
            raise UsageError(
                "`phalanx draw program` takes one file: phalanx draw program step.txt."
            )
        return of_file(args.what[1], args)
    name = " ".join(args.what)
    if args.model:
        return of_layout(name, args)
    if name not in _names() and _is_layout(name):
        raise UsageError(f"the layout {name!r} needs a model: add --model 124m, or another shape.")
    return of_schedule(name, args)


def _is_layout(text: str) -> bool:
    """Whether a text that is no schedule's name reads as a layout."""
    try:
        return not names_source(Layout.parse(text).schedule)
    except LayoutError:
        return " " in text


def _picture(step: Step, args: argparse.Namespace) -> Picture:
    proof = check(step.program)
    # A page and a trace show memory over time; counted in pieces, as nobody has costed them here.
    counted = args.out and args.out.endswith((".html", ".json"))
    sizes = Sizes.counts(step.program.pieces) if counted else None
    timeline = simulate(repeat(step.program, args.repeat), step.costs, sizes)
    title = step.title + (f", {args.repeat} steps" if args.repeat > 1 else "")
    notes = (*step.notes, *_barrier(step, timeline, args.repeat))
    return Picture(title, timeline, held=proof.held, notes=notes, unit="pieces and units")


def _barrier(step: Step, timeline: Timeline, steps: int) -> tuple[str, ...]:
    """What the agreement of clipping costs over several steps, found by leaving it out."""
    if step.free is None or steps == 1:
        return ()
    free = simulate(repeat(step.free, steps), step.costs).makespan
    if free >= timeline.makespan - 1e-9:
        return ()
    return (
        "clipping is a barrier: no stage updates before all have agreed on the norm, so the next step"
        f" cannot begin in this one's idle time. Without it the {steps} steps take {free:.4g}, not"
        f" {timeline.makespan:.4g}: the barrier takes the gain away.",
    )


_FORMATS: dict[str, Callable[[Picture], str]] = {".svg": svg, ".html": page, ".json": chrome}


def _write(step: Step, picture: Picture, path: str) -> None:
    formats = {**_FORMATS, ".txt": lambda _: str(step.program)}
    write(path, formats, picture)


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
