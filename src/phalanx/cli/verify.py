"""`phalanx verify`: layouts against one process, every gradient and every update."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..layout import Layout, LayoutError, Shape
from ..layout.cases import AXES, SHAPES, covering, every_layout
from ..layout.choices import COMPARED, DTYPES, FP64, LOCAL_RANKS, OPTIMIZERS, THREADS
from ..layout.families import code_of
from ..layout.shape import HUB
from ..layout.source import names_source
from .before import misfit, model_of
from .usage import (
    POSITIVE,
    Parser,
    UsageError,
    real,
    refuse_irregular,
    result,
    say,
    try_file,
    try_folder,
    whole,
)

if TYPE_CHECKING:
    from ..parallel import Model
    from ..verify import Verdict

STEPS = 10_000
MOST = 64  # ranks of which all layouts are listed: there are some hundred thousand

_EPILOG = """\
Exit code 0: every layout that was compared agrees with one process; 1: one does not; 2: wrong usage,
not enough memory, or nothing that could be compared. A `recompute:fit` that cannot be met is not
compared: it is listed and counted apart.

  phalanx verify --layouts "dp2 tp2 zero3; tp4 seq"
  phalanx verify --model gpt --ranks 4 --cover 40
  phalanx verify --ranks 8 --part 1/4
  phalanx verify --lora 4 --ranks 4 --cover 40
  phalanx verify --dtype bfloat16 --dropout 0.1 --layouts "dp2 tp2 seq"

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
    add = parser.add
    names_larger = "Name larger layouts with --layouts."
    rate = real(lambda x: 0 <= x < 1, "from 0 to below 1")
    add("--model", default="gqa", metavar="SHAPE|FILE.py:Class", help="by default a small one")
    add("--ranks", type=whole(1, MOST, names_larger), default=4, help="all legal layouts up to N")
    add("--axes", type=_axes, default=" ".join(AXES), help="the axes that --ranks enumerates")
    add("--layouts", metavar="TEXT", help="these layouts instead, separated by ;")
    add("--cover", type=whole(), metavar="N", help="a subset of N or more that covers all pairs")
    add("--backend", default=THREADS)
    add("--steps", type=whole(1, STEPS), default=3, metavar="N", help="of training")
    add(
        "--dtype",
        default=DTYPES[FP64].torch,
        choices=COMPARED,
        help="in which layouts are compared",
    )
    add("--optimizer", default="adamw", choices=OPTIMIZERS, help="sgd has momentum")
    add("--lora", type=whole(), default=0, metavar="R", help="train adapters of this rank alone")
    add("--dropout", type=rate, default=0.0, metavar="RATE", help="of the built-in models")
    add("--packed", action="store_true", help="sequences packed with documents")
    add("--seed", help="of weights and batches")
    add("--memory", type=POSITIVE, metavar="GIB", help="what may be used; default: what is free")
    add(
        "--part",
        type=_part,
        metavar="I/N",
        help="one part of a long list; resumes where it stopped",
    )
    add("--log", metavar="FILE", help="verdicts as JSON lines; those it holds are not run again")
    parser.add_output("--record", help="the last layout's last step, for `phalanx draw run`")
    add("--json")
    args = parser.read(argv)
    if code_of(args.model)[0] and args.dropout:
        raise UsageError("--dropout is for the built-in models; write the rate into your own.")
    _try_log(args.log)
    shape, make = _model(args.model)
    if args.lora and make is not None:
        raise UsageError("--lora is for the built-in models.")
    if args.lora:  # in the name, as a log of verdicts is named by it
        shape = replace(shape, lora_r=args.lora, name=f"{shape.name}-lora{args.lora}")
    layouts = list(_layouts(args, shape, make))
    if args.part:  # every n-th layout, so that each part has its share of the large ones
        layouts = layouts[args.part[0] - 1 :: args.part[1]]
    log = _log(args, shape)
    if layouts:
        _enough(args, shape, make, layouts)
    from ..verify import verify

    verdicts = []
    for verdict in verify(
        shape,
        layouts,
        backend=args.backend,
        steps=args.steps,
        dtype=args.dtype,
        seed=args.seed,
        packed=args.packed,
        dropout=args.dropout,
        optimizer=args.optimizer,
        log=log,
        make=make,
        record=Path(args.record) if args.record else None,
    ):
        verdicts.append(verdict)
        if not args.json:
            _print(verdict)
    compared = [v for v in verdicts if not v.cannot_fit]
    failed, apart = sum(not v.passed for v in compared), len(verdicts) - len(compared)
    figures = {
        "layouts": [asdict(v) for v in verdicts],
        "passed": len(compared) - failed,
        "failed": failed,
        "cannot_fit": apart,
    }
    worst = max((v.max_rel_error for v in compared), default=0.0)
    text = (
        f"{len(compared) - failed} of {len(compared)} layouts of {shape.name} agree with one"
        f" process in {args.dtype}; largest relative error {worst:.1e}."
    )
    result(args, figures, text + f" {apart} cannot fit and were not compared." * bool(apart))
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


def _axes(text: str) -> str:
    wrong = [axis for axis in text.split() if axis not in AXES]
    if wrong or not text.split():
        shown = repr(wrong[0][:60]) if wrong else "nothing"
        raise UsageError(f"names {shown}; choose of {' '.join(AXES)}.")
    return text


def _part(text: str) -> tuple[int, int]:
    """The part and the number of parts of I/N."""
    match = re.fullmatch("([0-9]{1,6})/([0-9]{1,6})", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"is {text[:60]}; write 1/4, 2/4, 3/4 or 4/4.")
    return int(match[1]), int(match[2])


def _try_log(file: str | None) -> None:
    """A log is read before it is written: no pipe, no folder."""
    if file:
        try_folder(str(Path(file).parent), "--log")
        if os.path.lexists(file):
            refuse_irregular(Path(file), "Name another file.", "--log: ")
            try_file(file, "--log")


def _enough(
    args: argparse.Namespace,
    shape: Shape,
    make: Callable[[], Model] | None,
    layouts: Sequence[Layout],
) -> None:
    """Refuse what would not fit into memory: the system would kill it half way."""
    from ..verify.memory import GIB, available, needed

    parameters = sum(weight.numel() for weight in make().weights.values()) if make else shape.total
    need = needed(
        shape,
        parameters,
        layouts,
        steps=args.steps,
        dtype=args.dtype,
        processes=args.backend != THREADS,
    )
    limit = available() if args.memory is None else args.memory * GIB
    if need.total > limit:
        where = "are available" if args.memory is None else "may be used (--memory)"
        raise UsageError(
            f"verify --model {args.model} needs {need}, and {limit / GIB:,.1f} GiB {where}. Take a"
            " smaller shape with the same parts (gqa, gpt, qwen, or a TOML file of your own), fewer"
            " ranks or --steps, or --memory GIB if you know better."
        )


def _model(name: str) -> tuple[Shape, Callable[[], Model] | None]:
    if name in SHAPES:
        return SHAPES[name], None
    file = name.endswith(".toml") or name.startswith(HUB) or names_source(name)
    if name not in Shape.names() and not file:
        raise UsageError(
            f"there is no model {name!r}. Small ones with awkward traits are {', '.join(SHAPES)};"
            f" shapes are {', '.join(Shape.names())}; your own is FILE.py:Class."
        )
    return model_of(name)


def _layouts(
    args: argparse.Namespace, shape: Shape, make: Callable[[], Model] | None
) -> tuple[Layout, ...]:
    if args.layouts is None:
        every = every_layout(shape, args.ranks, axes=args.axes)
        if make:
            from ..parallel import fitting

            every = fitting(make(), every)
        return covering(every, args.cover) if args.cover else every
    named = Layout.parse_many(args.layouts)
    most = max((layout.ranks for layout in named), default=1)
    if most > LOCAL_RANKS:
        raise UsageError(
            f"--layouts: one has {most:,} ranks; one machine starts 1 to {LOCAL_RANKS}."
        )
    if wrong := [text for layout in named if (text := misfit(layout, shape))]:
        raise LayoutError("\n".join(wrong))
    if COMPARED[args.dtype] != FP64:
        return tuple(named)
    return tuple(replace(layout, precision=FP64) for layout in named)


def _log(args: argparse.Namespace, shape: Shape) -> Path | None:
    """The file of verdicts, in a folder that is made."""
    if not args.log and not args.part:
        return None
    part = "{}of{}".format(*args.part or (1, 1))
    default = f"{shape.name}-{args.ranks}-{args.dtype}-{args.backend}-{part}.jsonl"
    log = Path(args.log) if args.log else Path("runs", "verify", default)
    try_folder(str(log.parent), "--log")
    log.parent.mkdir(parents=True, exist_ok=True)
    return log
