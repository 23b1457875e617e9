"""`phalanx verify`: layouts against one process, every gradient and every update."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..layout import Layout, LayoutError, Shape, legal, nearest
from ..layout.cases import AXES, SHAPES, covering, every_layout
from ..layout.choices import BACKENDS, COMPARED, OPTIMIZERS
from ..layout.files import open_regular, reason
from ..layout.source import names_source, refuse_broken
from .before import refuse_ranks
from .outputs import try_file, try_folder
from .usage import Parser, UsageError, print_json, say

if TYPE_CHECKING:
    from ..parallel import Model
    from ..verify import Verdict

__all__ = ["run"]

STEPS = 10_000
MOST = 64  # ranks of which all layouts are listed: there are some hundred thousand

_EPILOG = """\
Exit code 0: every layout that was compared agrees with one process; 1: one does not; 2: wrong usage,
not enough memory, or nothing that could be compared. A `recompute:fit` that cannot be met is not
compared: it is listed and counted apart.

  phalanx verify --layouts "dp2 tp2 zero3; tp4 seq"
  phalanx verify --model gpt --ranks 4 --cover 40
  phalanx verify --ranks 8 --part 1/4
  phalanx verify --dtype bfloat16 --optimizer sgd --dropout 0.1 --layouts "dp2 tp2 seq"

`make faults` in a clone puts mistakes into the code on purpose, and shows what `verify` says of each."""


def run(argv: list[str]) -> int:
    """Train a few steps in every layout and compare."""
    parser = Parser(
        "phalanx verify",
        "Trains a few steps in each layout and on one process, and compares loss, norm, every"
        " gradient and every weight; also how weights start, the outputs of pieces, the loss scale of"
        " float16 and the validation loss.",
        _EPILOG,
    )
    add = parser.add_argument
    add("--model", default="gqa", metavar="SHAPE|FILE.py:Class", help="default gqa, a small one")
    add("--ranks", type=int, default=4, metavar="N", help="all legal layouts up to N ranks")
    add("--axes", default="dp pp cp tp", help="the axes that --ranks enumerates")
    add("--layouts", metavar="TEXT", help="these layouts instead, separated by ;")
    add("--cover", type=int, metavar="N", help="a subset of N or more that covers all pairs")
    add(
        "--backend",
        default="threads",
        choices=BACKENDS,
        help="what carries messages; default threads",
    )
    add("--steps", type=int, default=3)
    add("--dtype", default="float64", choices=COMPARED, help="default float64")
    add("--optimizer", default="adamw", choices=OPTIMIZERS, help="sgd has momentum")
    add("--dropout", type=float, default=0.0, metavar="RATE", help="of the built-in models")
    add("--packed", action="store_true", help="sequences packed with documents")
    add("--seed", type=int, default=0)
    add("--memory", type=float, metavar="GIB", help="what may be used; default: what is available")
    add("--part", metavar="I/N", help="one part of a long enumeration; resumes where it stopped")
    add("--log", metavar="FILE", help="verdicts as JSON lines; those it holds are not run again")
    add("--record", metavar="FILE", help="the last layout's last step, for `phalanx draw run`")
    add("--json", action="store_true")
    args = parser.read(argv)
    _check(args)
    shape, make = _model(args.model)
    layouts, log = _part(_layouts(args, shape), args), _log(args, shape)
    if layouts:
        _enough(args, shape, make, layouts)
    from ..verify import verify

    verdicts = []
    for verdict in verify(
        shape, layouts,
        backend=args.backend, steps=args.steps, dtype=args.dtype, seed=args.seed,
        packed=args.packed, dropout=args.dropout, optimizer=args.optimizer,
        log=log, make=make,
        record=Path(args.record) if args.record else None,
    ):  # fmt: skip
        verdicts.append(verdict)
        if not args.json:
            _print(verdict)
    compared = [v for v in verdicts if not v.cannot_fit]
    failed = sum(not v.passed for v in compared)
    if args.json:
        print_json(
            {
                "layouts": [asdict(v) for v in verdicts],
                "passed": len(compared) - failed,
                "failed": failed,
                "cannot_fit": len(verdicts) - len(compared),
            }
        )
    else:
        worst = max((v.max_rel_error for v in compared), default=0.0)
        rest = len(verdicts) - len(compared)
        apart = f" {rest} cannot fit and were not compared." if rest else ""
        say(
            f"{len(compared) - failed} of {len(compared)} layouts of {shape.name} agree with one"
            f" process in {args.dtype}; largest relative error {worst:.1e}.{apart}"
        )
    if failed:
        return 1
    return 0 if compared else 2


def _print(verdict: Verdict) -> None:
    layout = verdict.layout or "one process"
    if verdict.cannot_fit:
        say(f"none cannot fit  {layout}\n     {verdict.first_difference}", flush=True)
        return
    mark = "ok  " if verdict.passed else "FAIL"
    say(f"{mark} {verdict.max_rel_error:8.1e}  {layout}", flush=True)
    if not verdict.passed:
        say(f"     {verdict.first_difference}", flush=True)


def _check(args: argparse.Namespace) -> None:
    """Refuse what has no meaning, before anything is loaded."""
    if not 1 <= args.steps <= STEPS or (args.cover is not None and args.cover < 1):
        raise UsageError(f"--steps is 1 to {STEPS:,}, --cover 1 or more.")
    if not 1 <= args.ranks <= MOST:
        raise UsageError(
            f"--ranks is {args.ranks:,}; all layouts of 1 to {MOST} ranks can be listed. Name larger"
            " ones with --layouts."
        )
    if not args.axes.split() or (wrong := [x for x in args.axes.split() if x not in AXES]):
        shown = repr(wrong[0][:60]) if args.axes.split() else "nothing"
        raise UsageError(f"--axes names {shown}; choose of {' '.join(AXES)}.")
    if args.part and not _parts(args.part):
        raise UsageError(f"--part {args.part[:60]}: write 1/4, 2/4, 3/4 or 4/4.")
    if not 0 <= args.dropout < 1:
        raise UsageError(f"--dropout is {args.dropout}; a rate is 0 or more and less than 1.")
    if args.memory is not None and not args.memory > 0:
        raise UsageError(f"--memory is {args.memory}; write how many GiB may be used.")
    if names_source(args.model):
        refuse_broken(args.model, LayoutError)
        if args.dropout:
            raise UsageError("--dropout is for the built-in models; write the rate into your own.")
    try_file(args.record, "--record")
    if args.log:
        try_folder(str(Path(args.log).parent), "--log")
        _refuse_irregular(Path(args.log))


def _refuse_irregular(log: Path) -> None:
    """A log is read before it is written: no pipe, no folder."""
    if not os.path.lexists(log):
        return
    try:
        open_regular(log).close()
    except OSError as error:
        raise UsageError(f"--log: cannot read {log}: {reason(error)}. Name another file.") from None
    try_file(str(log), "--log")


def _enough(
    args: argparse.Namespace,
    shape: Shape,
    make: Callable[[], Model] | None,
    layouts: list[Layout],
) -> None:
    """Refuse what would not fit into memory: the system would kill it half way."""
    from ..verify.memory import GIB, available, needed

    parameters = sum(weight.numel() for weight in make().weights.values()) if make else shape.total
    need = needed(
        shape, parameters, layouts,
        steps=args.steps, dtype=args.dtype, processes=args.backend != "threads",
    )  # fmt: skip
    limit = available() if args.memory is None else args.memory * GIB
    if need.total > limit:
        where = "are available" if args.memory is None else "may be used (--memory)"
        raise UsageError(
            f"verify --model {args.model} needs {need}, and {limit / GIB:,.1f} GiB {where}. Take a"
            " smaller shape with the same parts (gqa, gpt, qwen, or a TOML file of your own), fewer"
            " ranks or --steps, or --memory GIB if you know better."
        )


def _model(name: str) -> tuple[Shape, Callable[[], Model] | None]:
    if names_source(name):
        from ..parallel.model import load_model

        make = partial(load_model, name)
        shape = make().shape
        if shape is None:
            raise LayoutError(
                f"{name}: describe() gives no shape; add shape=Shape(...) to its Model."
            )
        return shape, make
    if name in SHAPES:
        return SHAPES[name], None
    if name not in Shape.names() and not name.endswith(".toml"):
        raise UsageError(
            f"there is no model {name!r}. Small ones with awkward traits are {', '.join(SHAPES)};"
            f" shapes are {', '.join(Shape.names())}; your own is FILE.py:Class."
        )
    return Shape.load(name), None


def _layouts(args: argparse.Namespace, shape: Shape) -> tuple[Layout, ...]:
    if args.layouts is None:
        every = every_layout(shape, args.ranks, axes=args.axes)
        return covering(every, args.cover) if args.cover else every
    named = Layout.parse_many(args.layouts)
    refuse_ranks(
        max((layout.ranks for layout in named), default=1),
        flag="--layouts: the most ranks of a layout",
    )
    wrong = []
    for layout in named:
        broken = legal(layout, shape)
        if broken:
            near = "; ".join(map(str, nearest(layout, shape)))
            wrong.append(f"{layout}: " + " ".join(map(str, broken)) + f" Nearest: {near}.")
    if wrong:
        raise LayoutError("\n".join(wrong))
    return tuple(replace(x, precision="fp64") if args.dtype == "float64" else x for x in named)


def _parts(text: str) -> tuple[int, int] | None:
    """The part and the number of parts that I/N says."""
    match = re.fullmatch("([0-9]{1,6})/([0-9]{1,6})", text)
    return (int(match[1]), int(match[2])) if match and 1 <= int(match[1]) <= int(match[2]) else None


def _part(layouts: Sequence[Layout], args: argparse.Namespace) -> list[Layout]:
    """Every n-th layout, so that each part has its share of the large ones."""
    part, parts = _parts(args.part or "") or (1, 1)
    return list(layouts[part - 1 :: parts])


def _log(args: argparse.Namespace, shape: Shape) -> Path | None:
    """The file of verdicts, in a folder that is made."""
    if not args.log and not args.part:
        return None
    part = str(args.part).replace("/", "of")
    default = f"{shape.name}-{args.ranks}-{args.dtype}-{args.backend}-{part}.jsonl"
    log = Path(args.log) if args.log else Path("runs", "verify", default)
    try_folder(str(log.parent), "--log")
    log.parent.mkdir(parents=True, exist_ok=True)
    return log
