"""`phalanx plan cost`: estimates device hours and money for a number of tokens,
including failures and checkpoints.

A device fails once in {hours} hours unless --mtbf is given: the rate of 419 unexpected
interruptions in 54 days on 16,384 GPUs in Llama 3's report (section 3.3.4). A
checkpoint blocks training while each device writes its part of weights and moments, 12
bytes a parameter at 1 GB/s, unless --saving is given. The interval between checkpoints
is Young's and Daly's.

  phalanx plan cost --model 8b --cluster h100x64 --batch-tokens 4Mi --tokens 1T --price 2.5
"""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict

from ..api.plan_text import range_of, uncertainty_text, utilization
from ..drawing import text_table
from ..drawing.words import wrapped
from ..layout.numbers import bytes_text, count_text, parse_count, seconds_text
from ..planner.search import search
from ..planner.spend import (
    MTBF_HOURS,
    SAVED,
    Spending,
    saving_seconds,
    spending,
)
from ..planner.step import Choice, Request
from .parser import POSITIVE, Parser, real
from .plan import request_flags, request_of
from .plan_explain import named
from .usage import result, say


def run(argv: list[str]) -> int:
    parser = Parser(__doc__, hours=f"{MTBF_HOURS:,.0f}")
    request_flags(parser)
    add, least = parser.add, real(lambda x: x >= 0, "of 0 or more")
    add(
        "--tokens",
        type=parse_count,
        required=True,
        help="tokens of the whole run, such as 1T",
    )
    add(
        "--price",
        type=least,
        required=True,
        metavar="X",
        help="price of a device for an hour",
    )
    add(
        "--layout",
        metavar="TEXT",
        help="layout; default: the best of the plan",
    )
    add(
        "--mtbf",
        type=POSITIVE,
        default=MTBF_HOURS,
        metavar="HOURS",
        help="mean time until a device fails",
    )
    add(
        "--saving",
        type=least,
        metavar="SECONDS",
        help="time for which a save blocks training",
    )
    add(
        "--restart",
        type=least,
        default=600.0,
        metavar="SECONDS",
        help="time to restart after a failure",
    )
    args = parser.read(argv)
    request = request_of(args)
    if args.layout is None:
        layouts = search(request, top=1).layouts
    else:
        layouts = (named(args.layout, request, "--layout"),)
    if not layouts:
        name = request.hardware.name
        say(
            f"No layout of {request.shape.name} fits on {name}: see `phalanx plan`."
        )
        return 1
    choice = layouts[0]
    saving = args.saving or saving_seconds(
        request.shape.total, request.hardware.ranks
    )
    spent = spending(
        tokens=args.tokens,
        batch_tokens=request.tokens,
        step=choice.step,
        devices=request.hardware.ranks,
        price=args.price,
        mtbf_hours=args.mtbf,
        saving=saving,
        restart=args.restart,
    )
    if math.isinf(spent.hours):
        every = seconds_text(3600 * args.mtbf / request.hardware.ranks)
        say(
            f"{spent.devices:,} devices fail faster than they can restart: one fails every {every}."
        )
        return 1
    # The uncertainty of the step is that of the money.
    spread = range_of(request, choice)
    figures = asdict(spent) | {
        "hours": spent.hours,
        "device_hours": spent.device_hours,
        "money": spent.money,
        "goodput": spent.goodput,
        "layout": str(choice.layout),
        "step_time_s": choice.step,
        "error_range": [spread.low, spread.high],
        "error_cause": spread.cause,
    }
    return result(args, figures, _text(request, choice, spent, args, saving))


def _text(
    request: Request,
    choice: Choice,
    spent: Spending,
    args: argparse.Namespace,
    saving: float,
) -> str:
    spread = range_of(request, choice)
    low, high = spread.around(spent.money)
    step = f"of {request.tokens:,} tokens, {seconds_text(choice.step)} each"
    size = bytes_text(SAVED * request.shape.total)
    saved = f"one every {seconds_text(spent.interval)}, {seconds_text(saving)} each, {size}"
    failures = f"{spent.failures:,.1f} expected, one in {args.mtbf / spent.devices:,.3g} hours"
    days = f"{spent.hours / 24:,.1f} days, {spent.goodput:.1%} of it training"
    rows = [
        (
            "steps",
            f"{spent.steps:,}",
            f"{step} (MFU {utilization(request, choice).mfu:.1%})",
        ),
        ("computing", f"{spent.computing:,.1f}", "hours"),
        ("checkpoints", f"{spent.saving:,.1f}", f"hours: {saved}"),
        ("failures", f"{spent.lost:,.1f}", f"hours: {failures}"),
        ("total", f"{spent.hours:,.1f}", f"hours or {days}"),
        ("device hours", f"{spent.device_hours:,.0f}", ""),
        (
            "money",
            f"{spent.money:,.0f}",
            f"({low:,.0f} to {high:,.0f} for the range of step times)",
        ),
    ]
    uncertain = "\n".join(wrapped(uncertainty_text(spread, choice.step)))
    return (
        f"{request.shape.name}, {count_text(args.tokens)} tokens on {request.hardware.name}"
        f" at {args.price:g} an hour and device\n{choice.layout}\n\n"
        f"{text_table((), rows, left='lrl', indent=2)}\n{uncertain}"
    )
