"""`phalanx plan`: the fastest layouts of a model on a cluster, and why the others lost.

Exit code 0: a plan; 1: nothing fits, with the nearest that would; 2: wrong usage.

  phalanx plan --model 8b --cluster h100x64 --seq 8192 --batch-tokens 4Mi
  phalanx plan --model 8b --cluster h100x64 --explain "dp32 tp2 seq zero1 accum:16 bf16"
  phalanx plan --model 70b --cluster h100x256 --json --page plan.html --out run.toml --tokens 1T
  phalanx plan --model 8b --cluster h100x64 --for megatron > pretrain.sh
  phalanx plan cost --model 8b --cluster h100x64 --tokens 1T --price 2.5
"""

from __future__ import annotations

import argparse
import importlib
import math
from dataclasses import replace
from typing import Any

from ..api.plan import Planned, PlanTerms
from ..api.plan import request as plan_request
from ..layout import Run
from ..layout.choices import FP32, MATMUL_RATES, MATMUL_WORDS, PRECISIONS
from ..layout.numbers import parse_count
from ..layout.run import RANDOM, random_by_name, run_file
from ..layout.trainer_table import trainers
from ..planner.search import search
from ..planner.spend import MTBF_HOURS, interval, saving_seconds
from ..planner.step import Choice, Request
from .parser import Parser, real, whole
from .usage import UsageError, result, save

# Subcommands of `plan`, each in a file beside this one.
_SUBVERBS = {
    "calibrate": "plan_calibrate",
    "cost": "plan_cost",
    "score": "plan_score",
}
_FILL_IN = """\
# Left for you to fill in:
# - data: a placeholder. Name your tokens, as `phalanx data prepare` writes them.
"""
_STEPS = """\
# - steps: a placeholder, {steps} steps of {tokens:,} tokens. Or write epochs, or plan with --tokens.
# - checkpoint.every: saves only at the end.
"""
_RATE = "# - optimizer.lr: the default for every model.\n"
_WEIGHTS = """\
# - weights: random, as a name gives only sizes. To begin with published weights, write
#   model = "hf:FOLDER" and weights = "".
"""


def run(argv: list[str]) -> int:
    if argv and argv[0] in _SUBVERBS:
        module = importlib.import_module(f".{_SUBVERBS[argv[0]]}", __package__)
        code: int = module.run(argv[1:])
        return code
    parser = Parser(__doc__)
    parser.subverbs = _SUBVERBS
    request_flags(parser)
    parser.add("--top", type=whole(), default=10, help="rows of the table")
    parser.add(
        "--explain",
        metavar="LAYOUT",
        help="show one layout: its time, memory and timeline",
    )
    names = ", ".join(trainers())
    parser.add(
        "--for",
        dest="trainer",
        choices=trainers(),
        metavar="TRAINER",
        help=f"print the file of another trainer: {names}",
    )
    parser.add(
        "--layout", metavar="TEXT", empty=True, help="for --for: this layout"
    )
    parser.add_output(
        "--out",
        ".toml",
        help="write a run file with the best layout, for train",
    )
    parser.add(
        "--tokens",
        type=parse_count,
        help="tokens to train on, for the steps in --out, such as 1T",
    )
    parser.add_output(
        "--page",
        ".html",
        help="write a page of all candidates by memory and throughput",
    )
    args = parser.read(argv)
    # Only a run file has a number of steps.
    if args.tokens and not args.out:
        raise UsageError(
            "--tokens sets the number of steps in --out: add --out run.toml."
        )
    if args.layout is not None and not args.trainer:
        raise UsageError(
            "--layout goes with --for; to see one layout, use --explain."
        )
    beside = [
        x for x in ("explain", "out", "page") if getattr(args, x) is not None
    ]
    # --for prints one file and nothing else.
    if args.trainer and beside:
        raise UsageError(f"--{beside[0]} does not go with --for.")
    request = request_of(args)
    if args.trainer:
        from .plan_trainer import write_for

        return write_for(args, request)
    if args.explain is not None:
        from .plan_explain import explain

        return explain(args, request)
    planned = Planned(request, search(request, top=args.top))
    text = "" if args.json else str(planned)
    result(args, planned.figures, text)
    if planned.best is None:
        return 1
    if args.page:
        from .plan_page import page

        save(args.page, page(request, planned.plan, planned.baselines))
    if args.out:
        written = _run(request, planned.layouts[0], args)
        # A name of published weights stands for sizes here.
        if random_by_name(written):
            written = replace(written, weights=RANDOM)
        steps = _STEPS.format(steps=written.steps, tokens=request.tokens)
        left = [
            _FILL_IN,
            "" if args.tokens else steps,
            _RATE,
            _WEIGHTS if written.weights else "",
        ]
        save(args.out, f"{''.join(left)}{written}")
    return 0


def _run(request: Request, best: Choice, args: argparse.Namespace) -> Run:
    """Return a complete run with the best layout, its number of steps, and the optimal
    checkpoint interval."""
    ranks, words = request.hardware.ranks, []
    if args.tokens:
        steps = math.ceil(args.tokens / request.tokens)
        saving = saving_seconds(request.shape.total, ranks)
        # Daly's interval in steps.
        every = round(interval(saving, 3600 * MTBF_HOURS / ranks) / best.step)
        # At least every step, at most once.
        words = [
            f"steps={steps}",
            f"checkpoint.every={min(max(1, every), steps)}",
        ]
    words += [
        f'layout="{best.layout}"',
        f'precision="{best.layout.precision}"',
    ]
    words += [f"batch={request.batch}", f"sequence={request.sequence}"]
    # Only what was planned replaces keys of the file.
    if run_file(args.model):  # all other keys are those of the file
        return Run.load(args.model, tuple(words))
    return Run.parse(f'model = "{args.model}"\n', args.out, tuple(words))


# ---- the request


def request_flags(parser: Parser) -> None:
    """Add the options that define what is planned, for which cluster, and with what
    software."""
    add, part = parser.add, real(lambda x: 0 < x <= 1, "above 0 and up to 1")
    add(
        "--model",
        default="8b",
        metavar="SHAPE|FILE",
        help="a shape, a .toml file or a run file",
    )
    add(
        "--cluster",
        default="h100x64",
        metavar="NAME",
        help="such as h100x64, llama3, or this",
    )
    add(
        "--machine",
        metavar="FILE",
        help="for --cluster this: the file that doctor --out wrote",
    )
    add(
        "--ranks",
        type=whole(),
        help="for --cluster this: number of ranks; default: its devices",
    )
    add(
        "--seq",
        dest="sequence",
        help="tokens in a sequence, such as 4Ki; default the shape's",
    )
    add(
        "--batch-tokens",
        type=_count,
        help="tokens in a step, such as 4Mi (2^22) or 4M; default the shape's batch",
    )
    formats = (*PRECISIONS, *MATMUL_WORDS)
    what = f"number format, such as {FP32} or {MATMUL_RATES[0]}; default bf16, on a CPU fp32"
    add("--precision", choices=formats, metavar="NAME", help=what)
    add(
        "--limit",
        type=part,
        default=0.85,
        metavar="SHARE",
        help="share of a device's memory to use",
    )
    add(
        "--profile",
        metavar="NAME",
        help="software profile; default: phalanx itself",
    )
    add(
        "--routing",
        metavar="HOW",
        help="distribution of tokens over experts: zipf:1.0, or a FILE.json of counts",
    )


def _count(text: str) -> str:
    """Check a number of tokens and return it as written, since error messages repeat
    it."""
    parse_count(text)
    return text


def request_of(args: argparse.Namespace) -> Request:
    names = PlanTerms.__annotations__
    terms: Any = {name: getattr(args, name, None) for name in names}
    return plan_request(args.model, args.cluster, **terms)
