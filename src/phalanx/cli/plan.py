"""`phalanx plan`: the best layouts of a model on a cluster, and why the others lost."""

from __future__ import annotations

import argparse
import importlib
import math
import re
from dataclasses import replace
from functools import partial

from ..cost import cached_costs
from ..layout import Run
from ..layout.choices import BF16, FP32, PRECISIONS
from ..layout.numbers import bytes_text, parse_count
from ..layout.run import run_file
from ..plan import MachineError
from ..plan.local import profile_for
from ..plan.search import Plan, baselines, search
from ..plan.spend import MTBF_HOURS, interval, saving_seconds
from ..plan.step import Choice, Request
from .before import model_of, where
from .plan_text import plan_figures, plan_text
from .usage import Parser, UsageError, print_json, real, say, whole, write

# Words after `plan` that are verbs of their own, each in a file beside this one.
_SUBVERBS = {"calibrate": "plan_calibrate", "cost": "plan_cost", "score": "plan_score"}
_MORE_ROOM = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0)  # of what the least bound needs
_DATA = "# data is a placeholder: name your tokens there, as `phalanx data prepare` writes them.\n"
_MORE_DEVICES = (2, 4, 8, 16)
_EPILOG = """\
Exit code 0: a plan; 1: nothing fits, with the nearest that would; 2: wrong usage.

  phalanx plan --model 8b --cluster h100x64 --seq 8192 --batch-tokens 4M
  phalanx plan --model 8b --cluster h100x64 --explain "dp32 tp2 seq zero1 accum:16 bf16"
  phalanx plan --model 70b --cluster h100x256 --json --page plan.html --out run.toml --tokens 1T
  phalanx plan cost --model 8b --cluster h100x64 --tokens 1T --price 2.5"""


def run(argv: list[str]) -> int:
    """Plan, or what one of its own verbs does."""
    if argv and argv[0] in _SUBVERBS:
        module = importlib.import_module(f".{_SUBVERBS[argv[0]]}", __package__)
        code: int = module.run(argv[1:])
        return code
    parser = Parser("phalanx plan", "The best layouts, before anything is rented.", _EPILOG)
    request_flags(parser)
    parser.add("--top", type=whole(), default=10, metavar="N", help="layouts in the table")
    parser.add("--explain", metavar="LAYOUT", help="one layout: its time, memory and timeline")
    parser.add_output("--out", ".toml", help="a run file with the best layout, for train")
    parser.add("--tokens", type=parse_count, metavar="N", help="of the run in --out, as 1T")
    parser.add_output("--page", ".html", help="memory over throughput of all candidates")
    parser.add("--json")
    args = parser.read(argv)
    if args.tokens and not args.out:
        raise UsageError("--tokens says how many steps the run in --out has: add --out run.toml.")
    request = request_of(args)
    if args.explain is not None:
        from .plan_explain import explain

        return explain(args.explain, request, as_json=args.json)
    return _plan(request, args)


def _plan(request: Request, args: argparse.Namespace) -> int:
    plan = search(request, top=args.top)
    if not plan.layouts:
        return _nothing(request, plan, as_json=args.json)
    beside = baselines(request)
    if args.json:
        print_json(plan_figures(request, plan, beside))
    else:
        say(plan_text(request, plan, beside))
    if args.page:
        from .plan_page import page

        write(args.page, {".html": lambda p: page(request, p, beside)}, plan, "--page")
    if args.out:
        write(args.out, {".toml": _DATA.__add__}, str(_run(request, plan.layouts[0], args)))
    return 0


def _run(request: Request, best: Choice, args: argparse.Namespace) -> Run:
    """A whole run with the best layout: its steps, and checkpoints as often as loses least."""
    ranks, words = request.hardware.ranks, []
    if args.tokens:
        steps = math.ceil(args.tokens / request.tokens)
        saving = saving_seconds(request.shape.total, ranks)
        every = round(interval(saving, 3600 * MTBF_HOURS / ranks) / best.step)
        words = [f"steps={steps}", f"checkpoint.every={min(max(1, every), steps)}"]
    words += [f'layout="{best.layout}"', f'precision="{best.layout.precision}"']
    words += [f"batch={request.batch}", f"sequence={request.sequence}"]
    if run_file(args.model):  # all else is as it says
        return Run.load(args.model, tuple(words))
    return Run.parse(f'model = "{args.model}"\n', args.out, tuple(words))


def _nothing(request: Request, plan: Plan, *, as_json: bool) -> int:
    """No layout fits: what is missing, and what would change it."""
    least = float(plan.points[1].min())
    needs = f"needs {bytes_text(least)} or more of"
    if least <= plan.room:  # by its bound: its program holds more
        needs = "needs, by its program, more than"
    reasons = [
        f"No layout of {request.shape.name} fits on {request.hardware.name}: the smallest of"
        f" {plan.considered:,} {needs} the {bytes_text(plan.room)} that"
        f" --limit {request.limit:g} leaves of a device.",
        "Recomputation and the optimizer on the host are in that already.",
    ]
    reasons += _ways_out(request, least, plan.room)
    if as_json:
        refused = [{"family": r.family, "reason": r.reason} for r in plan.refused]
        print_json({"layouts": [], "why": reasons, "refused": refused})
    else:
        say("\n  ".join(reasons))
    return 1


def _ways_out(request: Request, least: float, room: float) -> list[str]:
    """The nearest that works: more of the memory, or more devices, as far as sixteen times."""
    memory, found = request.hardware.memory, []
    needed = max(least, room) / memory
    for part in sorted({math.ceil(100 * factor * needed) for factor in _MORE_ROOM}):
        if part > 100:
            break
        if (more := search(replace(request, limit=part / 100), top=1)).layouts:
            held = bytes_text(more.layouts[0].bytes)
            found.append(f"It fits with --limit {part / 100:g}: {more.layouts[0].layout}, {held}.")
            break
    for factor in _MORE_DEVICES if request.cluster else ():
        name = f"{request.cluster.rpartition('x')[0]}x{request.hardware.ranks * factor}"
        try:
            hardware = where(name, None).hardware
        except MachineError:
            continue
        batch = max(request.batch, 1)
        plan = search(replace(request, hardware=hardware, batch=batch, cluster=name), top=1)
        if plan.layouts:
            best = plan.layouts[0]
            return [*found, f"It fits on {name}: {best.layout} needs {bytes_text(best.bytes)}."]
    return found


# ---- the request


def request_flags(parser: Parser) -> None:
    """The flags that say what is planned, where, and with what software."""
    add, part = parser.add, real(lambda x: 0 < x <= 1, "above 0 and up to 1")
    add("--model", default="8b", metavar="SHAPE|FILE", help="what is trained; also of a run file")
    add("--cluster", default="h100x64", metavar="NAME", help="such as h100x64, llama3, or this")
    add("--machine", metavar="FILE", help="of --cluster this: what doctor --out wrote")
    add("--ranks", type=whole(), help="of --cluster this; default its devices")
    add("--seq", help="tokens of a sequence; default the shape's")
    add(
        "--batch-tokens",
        type=_count,
        metavar="N",
        help="of a step, as 4M; default the shape's batch",
    )
    add("--precision", choices=PRECISIONS, help="default bf16; fp32 on a CPU")
    add("--limit", type=part, default=0.85, metavar="PART", help="of a device's memory")
    add("--profile", metavar="NAME", help="whose software; default ours")


def request_of(args: argparse.Namespace) -> Request:
    """What the flags mean, or why they mean nothing."""
    shape, make = model_of(args.model)
    at = where(None if args.machine else args.cluster, args.machine, args.ranks or 0)
    hardware = at.hardware
    sequence = args.seq or shape.sequence
    if shape.positions == "learned" and sequence > shape.sequence:
        raise UsageError(
            f"--seq {sequence}: {shape.name} has learned {shape.sequence} positions."
            f" Write --seq {shape.sequence} or less."
        )
    shape = replace(shape, sequence=sequence) if shape.positions != "learned" else shape
    batch = _sequences(args.batch_tokens, sequence) if args.batch_tokens else shape.batch
    precision = args.precision or (FP32 if hardware.cores else BF16)
    return Request(
        shape=shape, hardware=hardware, sequence=sequence, batch=batch, precision=precision,
        profile=profile_for(hardware, args.profile, precision), limit=args.limit,
        piece_costs=partial(cached_costs, target=hardware.target), model=args.model if make else "",
        cluster="" if args.cluster == "this" else args.cluster,
    )  # fmt: skip


SEQUENCES = 1 << 24  # of a step, as in a run file


def _count(text: str) -> str:
    """A number of tokens as it was written: what 4M means depends on the sequence."""
    parse_count(text)
    return text


def _sequences(text: str, sequence: int) -> int:
    """Sequences of a step. 4M is what engineers call 2^22 when sequences are powers of two."""
    tokens = parse_count(text)
    if tokens > sequence * SEQUENCES:
        raise UsageError(
            f"--batch-tokens {text[:60]} is more than {SEQUENCES:,} sequences of {sequence:,}"
            " tokens. Write less."
        )
    binary = re.fullmatch(r"(\d+)([kKM])", text)
    if tokens % sequence and binary:
        tokens = int(binary[1]) * 2 ** (10 if binary[2] in "kK" else 20)
    if tokens < sequence:
        raise UsageError(
            f"--batch-tokens {text} is less than one sequence of {sequence:,} tokens."
            f" Write --batch-tokens {sequence} or more, or a shorter --seq."
        )
    if tokens % sequence:
        near = round(tokens / sequence) * sequence
        raise UsageError(
            f"--batch-tokens {text} is {tokens / sequence:.2f} sequences of {sequence:,} tokens."
            f" Nearest that is whole: --batch-tokens {near}."
        )
    return tokens // sequence
