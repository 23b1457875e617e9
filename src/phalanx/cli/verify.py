"""`phalanx verify`: trains a few steps in each layout and on one process, and compares
loss, gradient norm, every gradient and every weight. Also compares initial weights,
outputs of pieces, the loss scale of float16 and the validation loss.

Exit code 0: every compared layout agrees with one process; 1: one does not; 2: wrong
usage, not enough memory, or nothing to compare. A `recompute:fit` that cannot be met is
not compared, but listed and counted separately.

  phalanx verify --layouts "dp2 tp2 zero3; tp4 seq"
  phalanx verify --model gpt --ranks 4 --cover 40
  phalanx verify --ranks 8 --part 1/4
  phalanx verify --lora 4 --ranks 4 --cover 40
  phalanx verify --dtype bfloat16 --dropout 0.1 --layouts "dp2 tp2 seq"
  phalanx verify --exact --layouts "dp2x2 zero3 accum:2; pp2 zb-v:4"
  phalanx verify run.toml
  phalanx verify model=8b weights=random layout="dp64 tp8 seq zero1 bf16" optimizer.name=muon

A run is compared with its own ranks and training loop, scaled down: a few narrow blocks
of every kind, and two ranks on each axis. Optimizer, gradient clipping, schedule,
precision, masks, packing, adapters and frozen pieces are those of the run. It is stopped
halfway and resumed in another layout, and its journal is compared too. The output lists
what was compared and what was not. `phalanx train run.toml verify=true` does the same
before the first step.

--exact compares bits, without any tolerance: loss, norm, every gradient and every weight
of layouts of `exact` (docs/exact.md), in float32 and in bfloat16 with float32 weights. It
names the first tensor, microbatch and operation that differ.

Ranks are threads that receive every result as late as possible, so a missing wait, a
buffer reused too early or a message sent without a copy causes an error. --backend
selects another transport, without these delays.

`make faults` in a clone seeds bugs into the code, and shows how `verify` reports each.
"""

import argparse
import os
import re
from dataclasses import replace
from pathlib import Path

from ..api.verify import (
    Maker,
    compared,
    compared_exactly,
    exact_to_verify,
    layouts_to_verify,
    model_to_verify,
    verdict_text,
    verify_run,
)
from ..drawing import WIDE
from ..layout import Shape
from ..layout.adapters import ADAPTERS
from ..layout.cases import AXES
from ..layout.choices import (
    BF16,
    COMPARED,
    DTYPES,
    FP32,
    FP64,
    THREADS,
)
from ..layout.families import code_of
from ..layout.optimizers import COMPARED_OPTIMIZERS
from .parser import POSITIVE, Parser, real, whole
from .run_words import load_run
from .usage import (
    UsageError,
    progress,
    refuse_irregular,
    result,
    try_file,
    try_folder,
    write,
)

STEPS = 10_000
MOST = (
    64  # maximum ranks for which all layouts are listed: some hundred thousand
)


def run(argv: list[str]) -> int:
    parser = _parser()
    args = parser.read(argv, intermixed=True)
    if args.words:
        return _run(args, parser)
    shape, make = _model(args)
    if args.exact:
        return _exact(args, shape, make, parser)
    return _layouts(args, shape, make)


def _model(args: argparse.Namespace) -> tuple[Shape, Maker | None]:
    """Return the shape to compare, and what makes the model if it is not built in."""
    if code_of(args.model)[0] and args.dropout:
        raise UsageError(
            "--dropout is for built-in models; set the rate in your own."
        )
    shape, make = model_to_verify(args.model)
    for row in ADAPTERS:
        rank = getattr(args, row.key)
        if rank and make is not None:
            raise UsageError(f"--{row.key} is for built-in models.")
        if rank:  # the log of verdicts has the shape's name
            name = f"{shape.name}-{row.key}{rank}"
            shape = replace(row.with_rank(shape, rank), name=name)
    return shape, make


def _layouts(
    args: argparse.Namespace, shape: Shape, make: Maker | None
) -> int:
    """Compare layouts with one process."""
    wanted = {
        name: getattr(args, name)
        for name in ("ranks", "axes", "cover", "dtype")
    }
    layouts = layouts_to_verify(args.layouts, shape, make, **wanted)
    # every n-th layout, so that each part gets its share of the large ones
    if args.part:
        layouts = layouts[args.part[0] - 1 :: args.part[1]]
    terms = "dtype memory backend steps seed packed dropout optimizer z_loss record"
    found = compared(
        shape,
        make,
        layouts,
        log=_log(args, shape),
        show=lambda verdict: progress(verdict_text(verdict)),
        **{name: getattr(args, name) for name in terms.split()},
    )
    if args.out:
        from .verify_page import verified_page, verified_svg

        title = f"{shape.name} against one process, in {args.dtype}"
        formats = {
            ".html": lambda v: verified_page(title, found.summary, v),
            ".svg": lambda v: verified_svg(title, v, WIDE),
        }
        write(args.out, formats, found.verdicts)
    result(args, found.figures, found.text)
    return 0 if found.passed else 1 if found.compared else 2


def _run(args: argparse.Namespace, parser: Parser) -> int:
    """Compare a run with one process."""
    of_layouts = [
        # Options that do not apply, if they were changed.
        name
        for name in _OF_LAYOUTS
        # Compared with defaults, because a parser always sets them.
        if getattr(args, name) != parser.get_default(name)
    ]
    if of_layouts:
        option = of_layouts[0].replace("_", "-")
        raise UsageError(
            f"--{option} is for layouts of a model; for a run, set it by key=value."
        )
    found = verify_run(
        load_run(args.words),
        show=lambda verdict: progress(verdict_text(verdict)),
    )
    result(args, found.figures, found.text)
    return 0 if found.passed else 1


def _exact(
    args: argparse.Namespace,
    shape: Shape,
    make: Maker | None,
    parser: Parser,
) -> int:
    """Compare the bits of layouts of `exact` with those of one process."""
    for name in ("axes", "z_loss", "memory", "part", "out", "log", "record"):
        if getattr(args, name) != parser.get_default(name):
            option = name.replace("_", "-")
            raise UsageError(f"--{option} does not go with --exact.")
    dtype = args.dtype
    asked = dtype != parser.get_default("dtype")
    precisions = (COMPARED[dtype],) if asked else (FP32, BF16)
    layouts = exact_to_verify(
        args.layouts, shape, make, ranks=args.ranks, cover=args.cover
    )
    terms = "backend steps seed packed dropout optimizer"
    found = compared_exactly(
        shape,
        make,
        layouts,
        precisions=precisions,
        show=lambda verdict: progress(verdict_text(verdict)),
        **{name: getattr(args, name) for name in terms.split()},
    )
    result(args, found.figures, found.summary)
    return 0 if found.passed else 1


def _parser() -> Parser:
    """Return the parser of the command's options."""
    parser = Parser(__doc__)
    add = parser.add
    help = "a run file and key=value, as for train: compare the run itself, scaled down"
    add("words", nargs="*", metavar="RUN", help=help)
    names_larger = "Name larger layouts with --layouts."
    rate = real(lambda x: 0 <= x < 1, "from 0 to below 1")
    add(
        "--model",
        default="gqa",
        metavar="SHAPE|FILE.py:Class",
        help="default: a small decoder; weights are random",
    )
    add(
        "--ranks",
        type=whole(1, MOST, names_larger),
        default=4,
        help="compare all layouts up to N ranks",
    )
    add(
        "--axes",
        type=_axes,
        default=" ".join(AXES),
        help="mesh axes of these layouts",
    )
    add(
        "--layouts",
        metavar="TEXT",
        help="compare these layouts instead, separated by ;",
    )
    add(
        "--cover",
        type=whole(),
        help="select at least N layouts that cover every pair of choices",
    )
    add(
        "--exact",
        action="store_true",
        help="compare bits, in layouts of `exact`",
    )
    add("--backend", default=THREADS)
    add("--steps", type=whole(1, STEPS), default=3, help="training steps")
    number = "dtype of all computation"
    add("--dtype", default=DTYPES[FP64].torch, choices=COMPARED, help=number)
    optimizer = "the optimizer; sgd has momentum, NAME:original has adjust_lr = original"
    add(
        "--optimizer",
        default="adamw",
        choices=COMPARED_OPTIMIZERS,
        help=optimizer,
    )
    positive = real(lambda z: 0 <= z <= 1, "from 0 to 1")
    add(
        "--z-loss",
        type=positive,
        default=0.0,
        metavar="Z",
        help="z-loss, added to each token's loss",
    )
    for row in ADAPTERS:
        only = f"train only {row.name} adapters of this rank"
        add(f"--{row.key}", type=whole(), default=0, metavar="R", help=only)
    add(
        "--dropout",
        type=rate,
        default=0.0,
        metavar="RATE",
        help="dropout rate, for built-in models",
    )
    add(
        "--packed",
        action="store_true",
        help="pack several documents into a sequence",
    )
    add("--seed", help="seed of weights and batches")
    add(
        "--memory",
        type=POSITIVE,
        metavar="GIB",
        help="memory to use; default: all that is free",
    )
    add(
        "--part",
        type=_part,
        metavar="I/N",
        help="only this part of the list, such as 1/4",
    )
    parser.add_output(
        "--out",
        ".html",
        ".svg",
        help="write a page of the combinations that were compared",
    )
    add(
        "--log",
        metavar="FILE",
        help="append results as JSON lines; layouts already in it are skipped",
    )
    parser.add_output(
        "--record",
        type=Path,
        help="save the last step of the last layout, for `phalanx draw run`",
    )
    return parser


_OF_LAYOUTS = (
    "exact",
    "model", "ranks", "axes", "layouts", "cover", "backend", "steps", "dtype", "optimizer", "z_loss",
    *(row.key for row in ADAPTERS), "dropout", "packed", "seed", "memory", "part", "out", "log", "record",
)  # fmt: skip


def _axes(text: str) -> str:
    wrong = [axis for axis in text.split() if axis not in AXES]
    if wrong or not text.split():
        shown = repr(wrong[0][:60]) if wrong else "nothing"
        raise UsageError(f"names {shown}; choose from {' '.join(AXES)}.")
    return text


def _part(text: str) -> tuple[int, int]:
    match = re.fullmatch("([0-9]{1,6})/([0-9]{1,6})", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"is {text[:60]}; write 1/4, 2/4, 3/4 or 4/4.")
    return int(match[1]), int(match[2])


def _log(args: argparse.Namespace, shape: Shape) -> Path | None:
    """Return the file of verdicts, after creating its folder. It is read before it is
    written, so it cannot be a pipe."""
    if not args.log and not args.part:
        return None
    # "1of4": each part of a list has a log of its own.
    part = "{}of{}".format(*args.part or (1, 1))
    default = (
        f"{shape.name}-{args.ranks}-{args.dtype}-{args.backend}-{part}.jsonl"
    )
    log = Path(args.log) if args.log else Path("runs", "verify", default)
    try_folder(str(log.parent), "--log")
    log.parent.mkdir(parents=True, exist_ok=True)
    # A log that exists is read first, and then appended to.
    if os.path.lexists(log):
        refuse_irregular(log, "Name another file.", "--log: ")
        try_file(str(log), "--log")
    return log
