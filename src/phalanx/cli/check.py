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
  phalanx check --from pretrain.sh --cluster h100x64
"""

import argparse
from pathlib import Path
from typing import Any

from ..api.check import check as check_layout
from ..api.step import many
from ..layout import Layout, Shape
from ..layout.optimizers import OPTIMIZERS
from ..layout.trainer_table import trainers
from ..program import Program, check, faults
from .parser import Parser, whole
from .run_words import run_of_words
from .usage import UsageError, read, result

_WITH_FROM = ("trainer", "ranks", "microbatches")


def run(argv: list[str]) -> int:
    parser = Parser(__doc__)
    help = "a layout's text; a run file and key=value, as for train; or a program file"
    parser.add("what", nargs="*", metavar="LAYOUT", help=help)
    parser.add("--model")
    _from_flags(parser)
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
    if args.file is not None:
        return _trainers_file(args)
    if wrong := [
        name for name in _WITH_FROM if getattr(args, name) is not None
    ]:
        raise UsageError(f"--{wrong[0]} goes with --from.")
    if not args.what:
        raise UsageError(
            "name a layout, a run file, a program file, or --from FILE."
        )
    # Words of a layout without quotes are one text.
    text = " ".join(args.what)
    run_ = run_of_words(args.what, args.layout)
    if run_ is not None or args.model is not None:
        names = (
            "batch",
            "sequence",
            "device",
            "cluster",
            "optimizer",
            "clip",
            "sums",
        )
        terms: Any = {name: getattr(args, name) for name in names}
        checked = check_layout(run_ or text, args.model or "", **terms)
        good = checked.fits and checked.right
        return result(args, checked.figures, str(checked), good=good)
    if args.sums:
        raise UsageError(
            "the sums over ranks depend on the model: add --model."
        )
    if args.device or args.cluster:
        raise UsageError(
            "the memory that a layout needs depends on its model: add --model."
        )
    if text.endswith(".txt") or Path(text).is_file():
        return _file(text, args)
    # A word that is wrong is reported before the model that is missing.
    Layout.parse(text)
    raise UsageError(
        f"the layout {text!r} needs a model: add --model with one of {', '.join(Shape.names())}."
    )


def _from_flags(parser: Parser) -> None:
    parser.section("a file of another trainer")
    add = parser.add
    add(
        "--from",
        dest="file",
        metavar="FILE",
        help="Megatron-LM's script, torchtitan's TOML, DeepSpeed's JSON, accelerate's or NeMo's YAML",
    )
    names = ", ".join(trainers())
    help = f"trainer of the file: {names}; default: guessed from its keys"
    add("--trainer", choices=trainers(), metavar="NAME", help=help)
    add("--ranks", type=whole(), help="number of ranks, if not in the file")
    add("--microbatches", help="microbatches in a step, if not in the file")


def _trainers_file(args: argparse.Namespace) -> int:
    """Check a file of another trainer."""
    if args.what:
        raise UsageError(
            f"--from names what is checked; {args.what[0][:60]!r} is one too many."
        )
    beside = {
        "device": args.device,
        "optimizer": args.optimizer,
        "sums": args.sums,
    }
    beside["layout"] = args.layout
    # These follow from the file, or need a run.
    if wrong := [name for name, value in beside.items() if value]:
        raise UsageError(f"--{wrong[0]} does not go with --from.")
    # It needs numpy, which takes long to load.
    from ..api.trainers import check_file

    checked = check_file(
        args.file,
        args.model or "",
        trainer=args.trainer or "",
        cluster=args.cluster,
        ranks=args.ranks or 0,
        batch=args.batch,
        sequence=args.sequence,
        microbatches=args.microbatches or 0,
    )
    good = checked.fits and checked.right
    return result(args, checked.figures, str(checked), good=good)


def _file(path: str, args: argparse.Namespace) -> int:
    program = Program.parse(read(path, "program"), path)
    wrong = faults(program)
    held = list(check(program).held) if not wrong else None
    # Counts in flight are defined for sound programs only.
    text = "\n- ".join([f"{path} cannot run:", *wrong])
    if held is not None:
        text = (
            f"{path} is sound: {program.mesh.size} ranks, {program.pieces} pieces,"
            f" {many(program.microbatches, 'microbatch')}, at most {' '.join(f'{h:g}' for h in held)}"
            " in flight on its stages"
        )
    figures = {"sound": not wrong, "faults": list(wrong), "peak_held": held}
    return result(args, figures, text, good=not wrong)
