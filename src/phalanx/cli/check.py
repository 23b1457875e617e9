"""`phalanx check`: checks a layout against a model and shows the memory of its ranks,
or every reason why it cannot run. Also checks the step of a run file, or a program
file.

Exit code 0: the program is complete, cannot deadlock, and fits in the memory of
--device or --cluster; 1: it does not, with every reason; 2: wrong usage. Bytes are
those of `plan --explain`: in bf16, or fp32 on a CPU, unless the layout names a
precision. A model that has not been costed before loads torch.

  phalanx check "dp2 pp4 tp2 1f1b:8" --model 8b
  phalanx check "dp8 tp8 zero1 accum:8" --model 8b --batch 64 --cluster h100x64
  phalanx check "dp8 zero3 bf16" --model run.toml --device h100
  phalanx check "dp64 pp8 tp8 seq zero1 1f1b:8" --model 8b --sums
  phalanx check run.toml layout="dp2 tp2 seq zero1" optimizer.name=muon
  phalanx check step.txt
"""

import argparse
from pathlib import Path
from typing import Any

from ..api.check import check as check_layout
from ..api.step import many
from ..layout import Layout, Shape
from ..layout.choices import OPTIMIZERS
from ..program import Program, check, faults
from .parser import Parser
from .run_words import run_of_words
from .usage import UsageError, read, result


def run(argv: list[str]) -> int:
    parser = Parser(__doc__)
    help = "a layout's text; a run file and key=value, as for train; or a program file"
    parser.add("what", nargs="+", metavar="LAYOUT", help=help)
    parser.add("--model")
    add = parser.add
    add("--batch", default=0)
    add("--seq", dest="sequence", default=0)
    add(
        "--device",
        default="",
        choices=None,
        metavar="NAME",
        help="device whose memory it must fit, such as h100",
    )
    add(
        "--cluster",
        default="",
        metavar="NAME",
        help="cluster that it must fit, such as h100x64, or this",
    )
    help = "optimizer; default: that of the run file, else adamw"
    add("--optimizer", default="", choices=OPTIMIZERS, help=help)
    add(
        "--clip",
        action="store_true",
        help="no effect: every run computes the gradient norm",
    )
    add(
        "--sums",
        action="store_true",
        help="check that each sum over ranks is made exactly once",
    )
    add(
        "--layout",
        metavar="TEXT",
        help="the layout of a run file, the same as layout=TEXT",
    )
    args = parser.read(argv, intermixed=True)
    text = " ".join(args.what)
    run_ = run_of_words(args.what, args.layout)
    if run_ is not None or args.model is not None:
        names = ("batch", "sequence", "device", "cluster", "optimizer", "clip", "sums")
        terms: Any = {name: getattr(args, name) for name in names}
        checked = check_layout(run_ or text, args.model or "", **terms)
        good = checked.fits and checked.right
        return result(args, checked.figures, str(checked), good=good)
    if args.sums:
        raise UsageError("the sums over ranks depend on the model: add --model.")
    if args.device or args.cluster:
        raise UsageError(
            "the memory that a layout needs depends on its model: add --model."
        )
    if text.endswith(".txt") or Path(text).is_file():
        return _file(text, args)
    Layout.parse(text)
    raise UsageError(
        f"the layout {text!r} needs a model: add --model with one of {', '.join(Shape.names())}."
    )


def _file(path: str, args: argparse.Namespace) -> int:
    program = Program.parse(read(path, "program"), path)
    wrong = faults(program)
    held = list(check(program).held) if not wrong else None
    text = "\n- ".join([f"{path} cannot run:", *wrong])
    if held is not None:
        text = (
            f"{path} is sound: {program.mesh.size} ranks, {program.pieces} pieces,"
            f" {many(program.microbatches, 'microbatch')}, at most {' '.join(f'{h:g}' for h in held)}"
            " in flight on its stages"
        )
    figures = {"sound": not wrong, "faults": list(wrong), "peak_held": held}
    return result(args, figures, text, good=not wrong)
