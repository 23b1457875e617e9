"""Finds the best layouts of a model on a cluster, and explains why others lost."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypedDict, Unpack

from ..layout import Layout, Shape
from ..layout.numbers import NumberError, bytes_text, parse_count, parse_length
from ..layout.optimizers import ADAMW
from ..layout.run import run_file
from ..layout.trainer_table import trainer_named
from ..layout.trainer_write import Written
from ..planner import MachineError
from ..planner.routing import BALANCED, Routing
from ..planner.search import Baseline, Plan, baselines, could_fit, search
from ..planner.step import Choice, Request
from . import UsageError
from .plan_text import plan_figures, plan_text
from .request import model_of, named_model, request_for, ways_refused, where
from .signature import with_keywords
from .trainers import trainer_file

SEQUENCES = 1 << 24  # per step, as in a run file
# Factors on the least memory needed.
_MORE_ROOM = (
    1.0,
    1.1,
    1.25,
    1.5,
    2.0,
    3.0,
)
_MORE_DEVICES = (2, 4, 8, 16)
# Only the memory of these is bounded.
_FAR_MORE_DEVICES = (32, 64, 128, 256)


class PlanTerms(TypedDict, total=False):
    """The keywords of `plan`; each may be omitted or None."""

    machine: str | None
    ranks: int | None
    sequence: str | int | None
    batch_tokens: str | int | None
    precision: str | None
    limit: float
    profile: str | None
    routing: str | None
    trainer: str | None


@dataclass(frozen=True)
class Planned:
    """A planning request and its result. Prints like `phalanx plan`; `figures` are
    those of `--json`."""

    request: Request
    plan: Plan

    @property
    def layouts(self) -> tuple[Choice, ...]:
        """Layouts that fit, each with its step in seconds and its bytes. The first is the simplest
        within 2 % of the fastest; the others follow by their time."""
        return self.plan.layouts

    @property
    def best(self) -> Layout | None:
        return self.layouts[0].layout if self.layouts else None

    @cached_property
    def baselines(self) -> Sequence[Baseline]:
        """Layouts that simple rules would choose."""
        return baselines(self.request)

    @cached_property
    def reasons(self) -> tuple[str, ...]:
        """Explanations why no layout fits and what would make one fit; empty if one
        does."""
        return () if self.layouts else tuple(_nothing(self.request, self.plan))

    @cached_property
    def file(self) -> Written:
        """The best layout, as a file of the named trainer."""
        if self.best is None:
            raise UsageError("\n".join(self.reasons))
        return trainer_file(self.request, self.best)

    @cached_property
    def figures(self) -> dict[str, Any]:
        if self.layouts:
            return plan_figures(self.request, self.plan, self.baselines)
        refused = [
            {"family": r.family, "reason": r.reason} for r in self.plan.refused
        ]
        return {"layouts": [], "why": list(self.reasons), "refused": refused}

    def __str__(self) -> str:
        if self.layouts:
            return plan_text(self.request, self.plan, self.baselines)
        return "\n  ".join(self.reasons)

    __repr__ = __str__  # shown by notebooks


@with_keywords(PlanTerms)
def plan(
    model: str | Shape | type = "8b",
    cluster: str = "h100x64",
    *,
    top: int = 10,
    **terms: Unpack[PlanTerms],
) -> Planned:
    """Return the `top` best layouts of a model on a cluster.

        plan("8b", "h100x64", sequence=8192, batch_tokens="4Mi").best

    model: a shape by name, a Shape, a .toml file, hf:FOLDER or FILE.py:Class
    cluster: a device and a count, such as "h100x64"; "this" is the measured machine.toml
    top: number of layouts to return
    machine: a machine file, written by `phalanx doctor --out`, instead of a cluster
    ranks: number of ranks to use of `machine`
    sequence: tokens in a sequence, such as 4096 or "4Ki"; by default the model's
    batch_tokens: tokens in a step, such as 4194304 or "4Mi"; by default the model's batch
    precision: number format, such as "fp32" or "fp8"; by default bf16, on a CPU fp32
    limit: usable share of a device's memory, by default 0.85
    profile: the software whose speed is assumed; by default phalanx
    routing: distribution of tokens over experts: "balanced", "zipf:S" or FILE.json
    trainer: plan what this trainer can run, and write its file: megatron, torchtitan, deepspeed,
        accelerate or nemo; `.file.text` is the file
    """
    asked = request(model, cluster, **terms)
    return Planned(asked, search(asked, top=top))


# Why nothing fits, in the order of a reader's questions: how far off it is,
# what was tried, what would help.
def _nothing(request: Request, plan: Plan) -> Iterator[str]:
    # Bytes of the smallest of all points, by a bound that is cheap to compute
    # for each.
    least = float(plan.points[1].min())
    needs = f"needs {bytes_text(least)} or more of"
    # Its bound would fit, its program needs more.
    if least <= plan.room:
        needs = "needs, by its program, more than"
        if plan.smallest:
            held = bytes_text(plan.smallest.bytes)
            needs = f"needs, by its program, {held}, more than"
    yield (
        f"No layout of {request.shape.name} fits on {request.hardware.name}: the smallest of"
        f" {plan.considered:,} {needs} the {bytes_text(plan.room)} that"
        f" --limit {request.limit:g} leaves of a device."
    )
    yield "This includes layouts with recomputation and with the optimizer on the host."
    # The program that needs the least memory, or its bound if none was built.
    most = max(least, plan.room)
    yield from _larger_share(
        request, plan.smallest.bytes if plan.smallest else most
    )
    yield from _more_devices(request)


def _larger_share(request: Request, least: float) -> Iterator[str]:
    """Yield the least share of a device's memory that suffices, if one does."""
    # The factors look for the least that a whole program fits in.
    needed = least / request.hardware.memory
    for part in sorted(
        {math.ceil(100 * factor * needed) for factor in _MORE_ROOM}
    ):
        # In percent: no limit above the whole device can be set.
        if part > 100:
            return
        more = replace(request, limit=part / 100)
        found = search(more, top=1, explained=False).layouts
        if found:
            held = bytes_text(found[0].bytes)
            yield f"It fits with --limit {part / 100:g}: {found[0].layout}, {held}."
            return


def _more_devices(request: Request) -> Iterator[str]:
    """Yield the smallest cluster that suffices, up to 16 times the devices.

    Without one, it is the smallest beyond these that could by its memory. Clusters
    that cannot are not searched.
    """
    first = ""
    for factor in (*_MORE_DEVICES, *_FAR_MORE_DEVICES):
        larger = _with_devices(request, request.hardware.ranks * factor)
        if larger is None or not could_fit(larger):
            continue
        if factor not in _MORE_DEVICES:
            first = larger.cluster
            break
        found = search(larger, top=1, explained=False).layouts
        if found:
            best = found[0]
            held = bytes_text(best.bytes)
            yield f"It fits on {larger.cluster}: {best.layout} needs {held}."
            return
    if first and _MORE_DEVICES:
        yield (
            f"No layout fits on up to {_MORE_DEVICES[-1]} times the devices. By lower bounds of"
            f" memory, {first} could hold one."
        )


def _with_devices(request: Request, ranks: int) -> Request | None:
    """The request with another number of devices; None if there is no such cluster."""
    # Only a cluster by name has larger siblings; a measured machine is what it is.
    if not request.cluster:
        return None
    # "h100x64" -> "h100x128", "h100x256", ...
    name = f"{request.cluster.rpartition('x')[0]}x{ranks}"
    try:
        hardware = where(name, None).hardware
    # Not every device is offered in this number, such as a pod that must be filled.
    except MachineError:
        return None
    # The same batch, so that the answers differ in devices alone.
    batch = max(request.batch, 1)
    return replace(request, hardware=hardware, batch=batch, cluster=name)


def request(
    model: str | Shape | type, cluster: str, **terms: Unpack[PlanTerms]
) -> Request:
    """Build the planner's request from these arguments; raise if they are invalid."""
    model = named_model(model)
    shape, make = (
        (model, None) if isinstance(model, Shape) else model_of(model)
    )
    machine, tokens = terms.get("machine"), terms.get("batch_tokens")
    # `machine` wins over the default cluster.
    hardware = where(
        None if machine else cluster,
        machine,
        terms.get("ranks") or 0,
    ).hardware
    sequence = (
        _number("sequence", parse_length, terms.get("sequence"))
        or shape.sequence
    )
    # There is no embedding for a position beyond the learned ones.
    if shape.positions == "learned" and sequence > shape.sequence:
        raise UsageError(
            f"--seq {sequence}: {shape.name} has learned {shape.sequence} positions."
            f" Write --seq {shape.sequence} or less."
        )
    run = run_file(model) if isinstance(model, str) else None
    trainer = (
        trainer_named(str(terms["trainer"])) if terms.get("trainer") else None
    )
    asked = request_for(
        # 0 stands for the shape's batch.
        shape,
        hardware,
        batch=_sequences(str(tokens), sequence) if tokens is not None else 0,
        sequence=sequence,
        precision=terms.get("precision"),
        model=str(model) if make else "",
        profile=terms.get("profile") or (trainer.profile if trainer else None),
        optimizer=run.optimizer.name if run else ADAMW,
    )
    # The name is kept to suggest larger clusters, which the measured machine
    # does not have.
    cluster = "" if cluster == "this" else cluster
    routing = Routing.parse(terms.get("routing") or BALANCED, asked.shape)
    # Ways in which no layout may cut: those that a user's model or the trainer
    # cannot take.
    without = ways_refused(make) if make else frozenset()
    without |= trainer.without if trainer else frozenset()
    limit = terms.get("limit", 0.85)
    return replace(
        asked,
        limit=limit,
        cluster=cluster,
        routing=routing,
        without=without,
        trainer=trainer.name if trainer else "",
    )


def _number(
    name: str, parse: Callable[[str], int], value: str | int | None
) -> int:
    """Parse a count given as text or number; 0 if none is given."""
    if value is None or value == 0:
        return 0
    try:
        return parse(str(value))
    except NumberError as error:
        raise UsageError(f"{name} {error}") from None


def _sequences(text: str, sequence: int) -> int:
    """Return the sequences in a step, from a number of tokens.

    4M is 4,000,000 tokens and 4Mi is 2^22, independent of the sequence length.
    """
    tokens = _number("--batch-tokens", parse_count, text)
    # The limit of a run file, so that what is planned can also be trained.
    if tokens > sequence * SEQUENCES:
        raise UsageError(
            f"--batch-tokens {text[:60]} is more than {SEQUENCES:,} sequences of {sequence:,}"
            " tokens. Write less."
        )
    if tokens < sequence:
        raise UsageError(
            f"--batch-tokens {text} is less than one sequence of {sequence:,} tokens."
            f" Write --batch-tokens {sequence} or more, or a shorter --seq."
        )
    # Tokens must make whole sequences; near counts that do are named.
    count, rest = divmod(tokens, sequence)
    if rest:
        near = [
            f"{n * sequence} ({n:,} sequences)" for n in (count, count + 1)
        ]
        # 4M and 4Mi are often confused: if the binary count fits, it is
        # suggested first.
        binary = f"{text.upper()}i"
        if (
            text[:-1].isdigit()
            and text[-1] in "kKMGT"
            and not parse_count(binary) % sequence
        ):
            near = [
                f"{binary} ({parse_count(binary) // sequence:,} sequences)",
                *near,
            ]
        raise UsageError(
            f"--batch-tokens {text} is {tokens:,} tokens, {tokens / sequence:.2f} sequences of"
            f" {sequence:,}. Write {', '.join(near[:-1])} or {near[-1]}."
        )
    return count
