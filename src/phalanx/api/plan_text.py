"""Renders a plan as a table of at most 80 columns and as JSON: rates, MFU and HFU
beside the times, the choices of simple rules, and why other layouts lost."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

from ..cost import forward_flops, step_flops
from ..drawing import text_table
from ..drawing.words import wrapped
from ..layout import Layout
from ..layout.numbers import bytes_text, count_text, seconds_text
from ..planner.interval import StepRange, interval
from ..planner.plausible import peak_of
from ..planner.refused import Refusal
from ..planner.search import Baseline, Plan
from ..planner.step import MEMORY, PARTS, Choice, Request
from .check import spans
from .request import range_text, verdict
from .sharding import sharding_text

_NAMES = {
    "compute": "computing",
    "tensor": "messages in blocks",
    "data": "gathers and sums",
    "pipe": "between stages",
    "bubble": "bubble",
    "update": "update",
}


@dataclass(frozen=True)
class Utilization:
    """Device utilization of a layout, relative to the peak of its fastest compute
    format.

    Attention is counted as causal. `mfu_full` counts all pairs, and is None if that
    would exceed the peak.
    """

    tokens: float  # per second and device
    mfu: float
    hfu: float
    mfu_full: float | None
    flops: float  # of the model, per second and device
    flops_full: float
    note: str = ""  # why a figure is missing or capped


def utilization(request: Request, choice: Choice) -> Utilization:
    """Compute utilization from the FLOPs of a step and the peak of the devices."""
    # FLOPs of a step of the whole batch, forward and backward.
    flops = step_flops(request.shape, request.batch, request.sequence)
    hardware = request.hardware
    # FLOPs that all devices could do in the predicted time.
    peak = peak_of(choice.case, hardware) * hardware.ranks * choice.step
    mfu, hfu, full = (
        part / peak if peak else 0.0
        for part in (
            flops.model,
            # Recomputation is work of the hardware, but not of the model.
            flops.hardware + _again(request, choice.layout),
            flops.full,
        )
    )
    notes = []
    if hardware.measured and max(mfu, hfu) > 1:
        # The peak in a machine file is the best of a few matmuls, and others may be
        # faster.
        mfu, hfu = min(mfu, 1.0), min(hfu, 1.0)
        notes += ["MFU is capped at 100 % of the peak in the machine file."]
    if full > 1:
        notes += [
            "MFU with full attention is omitted: it counts pairs of tokens that causal attention and"
            " attention windows never compute, and would exceed the peak."
        ]
    return Utilization(
        tokens=request.tokens / choice.step / hardware.ranks,
        mfu=mfu,
        hfu=hfu,
        mfu_full=full if full <= 1 else None,
        flops=flops.model / choice.step / hardware.ranks,
        flops_full=flops.full / choice.step / hardware.ranks,
        note=" ".join(notes),
    )


def _full(found: Utilization, words: str) -> str:
    """Format the MFU with full attention; "" if it is omitted."""
    return (
        ""
        if found.mfu_full is None
        else words.format(f"{100 * found.mfu_full:.1f}")
    )


def _again(request: Request, layout: Layout) -> float:
    """Return the FLOPs that recomputation adds: a forward of every block, if whole
    blocks are recomputed.

    Selective recomputation repeats no matmuls and counts nothing.
    """
    if layout.recompute in ("none", "selective"):
        return 0.0
    ops = forward_flops(request.shape, request.batch, request.sequence)
    # The embedding and the head are not recomputed.
    last = request.shape.pieces - 1
    return sum(op.causal for op in ops if 0 < op.piece < last)


# ---- as JSON


def range_of(request: Request, choice: Choice) -> StepRange:
    """Return the expected range of a layout's step, as factors of its prediction."""
    return interval(
        choice.case, request.hardware, request.profile, choice.parts
    )


def uncertainty_text(found: StepRange, step: float) -> str:
    """Describe the range of a step, the share of runs within such a range, and its
    largest cause."""
    low, high = map(seconds_text, found.around(step))
    # Runs of your own on this machine come before the published ones that set
    # the general range.
    if found.own_runs:
        whose = f"{found.level:.0%} by the errors of your own {found.own_runs} runs"
    else:
        whose = f"{found.level:.0%} of unseen published runs fell in theirs"
    return f"Expected range {low} to {high} ({whose}). Largest uncertainty: {found.cause}."


def choice_figures(request: Request, choice: Choice) -> dict[str, object]:
    found, spread = utilization(request, choice), range_of(request, choice)
    return {
        "layout": str(choice.layout),
        "step_time_s": choice.step,
        "tokens_per_s_per_device": found.tokens,
        "mfu": found.mfu,
        "hfu": found.hfu,
        "mfu_attention_in_full": found.mfu_full,
        "mfu_note": found.note,
        "model_flops_per_s_per_device": found.flops,
        "model_flops_per_s_per_device_attention_in_full": found.flops_full,
        "memory_gb": choice.bytes / 1e9,
        "memory_range_gb": [
            held / 1e9 for held in choice.range(request.profile)
        ],
        "memory_by_kind_gb": {
            kind: held / 1e9 for kind, held in choice.memory.items()
        },
        "memory_by_stage_gb": [
            sum(held.values()) / 1e9 for held in choice.stages
        ],
        "breakdown": dict(choice.parts),
        "error_range": list(spread.around(choice.step)),
        "error_level": spread.level,
        "error_causes": [
            {
                "cause": x.name,
                "text": x.text,
                "below": x.below,
                "above": x.above,
            }
            for x in spread.causes
        ],
    }


def plan_figures(
    request: Request, plan: Plan, beside: Sequence[Baseline]
) -> dict[str, object]:
    best = plan.layouts[0]
    fastest = plan.fastest or best
    return {
        "model": request.name,
        "cluster": request.hardware.name,
        "devices": request.hardware.ranks,
        "profile": request.profile.name,
        "sequence": request.sequence,
        "batch": request.batch,
        "batch_tokens": request.tokens,
        "precision": request.precision,
        "parameters": request.shape.total,
        "active_parameters": request.shape.active,
        "routing": request.routing.text,
        "limit_gb": plan.room / 1e9,
        "considered": plan.considered,
        "fitting": plan.fitting,
        "simulated": plan.simulated,
        "sharding": sharding_text(request, best.layout),
        "layouts": [
            choice_figures(request, choice) for choice in plan.layouts
        ],
        "fastest": {
            "layout": str(fastest.layout),
            "step_time_s": fastest.step,
        },
        "rules": [
            {
                "rule": baseline.rule,
                "fits": baseline.fits,
                "slower": baseline.choice.step / fastest.step
                if baseline.choice
                else None,
                **(
                    choice_figures(request, baseline.choice)
                    if baseline.choice
                    else {}
                ),
            }
            for baseline in beside
        ],
        "refused": [
            {name: x for name, x in asdict(refusal).items() if name != "times"}
            for refusal in plan.refused
        ],
    }


# ---- as text


def plan_text(request: Request, plan: Plan, beside: Sequence[Baseline]) -> str:
    lines = [
        *_head(request, plan),
        "",
        *_table(request, plan),
        "",
        *_rules(plan, beside),
        "",
    ]
    return "\n".join([*lines, *_reasons(plan.refused)])


def _head(request: Request, plan: Plan) -> Iterator[str]:
    r, routed = request, ""
    precision = " and ".join(filter(None, (r.precision, r.matmul)))
    # A model with routed MLPs computes with the active parameters and stores all.
    if r.shape.routed.count:  # MFU counts the parameters that a token uses
        active, total = map(count_text, (r.shape.active, r.shape.total))
        routed = f" {active} of {total} parameters active, tokens over experts {r.routing.text},"
    yield from wrapped(
        f"{r.name} on {r.hardware.ranks:,} devices of {r.hardware.name}: {r.batch:,} sequences of"
        f" {r.sequence:,} tokens a step ({r.tokens / 1e6:.3g}M), {precision},{routed}"
        f" software profile {r.profile.name!r}"
    )
    yield from wrapped(
        f"{plan.considered:,} layouts; up to {plan.fitting:,} fit in {bytes_text(plan.room)} a device"
        f" ({r.limit:.0%} of it); {plan.simulated:,} simulated."
    )
    first = plan.layouts[0]
    yield from wrapped(_advice(plan))
    uncertainty = uncertainty_text(range_of(r, first), first.step)
    yield from wrapped(
        f"Layout 1 takes {seconds_text(first.step)}. {uncertainty}"
    )
    if sharding := sharding_text(r, first.layout):
        yield from wrapped(f"Its ZeRO stage is {sharding}.")


def _advice(plan: Plan) -> str:
    """Explain why the first layout is first."""
    first, fastest = plan.layouts[0], plan.fastest
    if fastest is None or first is fastest:
        return "Layout 1 is the fastest."
    faster = 100 * (1 - fastest.step / first.step)
    name = str(fastest.layout)
    if fastest in plan.layouts:
        name = f"layout {plan.layouts.index(fastest) + 1}"
    return f"Layout 1 is the simplest within 2 % of the fastest: {name} is {faster:.1f} % faster."


def _table(request: Request, plan: Plan) -> Iterator[str]:
    """Yield a table with numbers first, as layouts have any length; parts of the step
    in percent."""
    # All parts but the update, for which 80 columns have no room.
    shown = PARTS[:-1]
    rows = []
    used = [utilization(request, choice) for choice in plan.layouts]
    for number, (choice, found) in enumerate(
        zip(plan.layouts, used, strict=True), 1
    ):
        parts = [
            f"{100 * choice.parts[name] / choice.step:.1f}" for name in shown
        ]
        rates = [
            f"{100 * found.mfu:.1f}",
            f"{100 * found.hfu:.1f}",
            f"{choice.bytes / 1e9:.1f}",
        ]
        step = seconds_text(choice.step)
        rows.append((number, step, f"{found.tokens:,.0f}", *rates, *parts))
    head = ("#", "step", "tok/s/dev", "MFU", "HFU", "GB", *shown)
    first, *lines = text_table(head, rows, left="r").splitlines()
    yield first
    # A layout's text has no fixed width, so it stands on a line of its own
    # below its numbers.
    for line, choice in zip(lines, plan.layouts, strict=True):
        yield line
        yield from _indented(str(choice.layout), 3)
    best = used[0]
    yield from wrapped(
        "Columns from MFU on are in percent, except GB. MFU counts causal attention"
        f"{_full(best, '; with full attention layout 1 has {} %')}. HFU adds recomputation. Layout 1"
        f" reaches {_rates(request, best)}."
        f"{_also(each.note for each in used)}"
    )


def _also(notes: Iterable[str]) -> str:
    """Join the non-empty notes, each once, as sentences to append."""
    return "".join(f" {note}" for note in dict.fromkeys(notes) if note)


def _rates(request: Request, found: Utilization) -> str:
    """Format rates as papers do, with causal attention and with all pairs."""
    # PFLOP/s of all devices: causal pairs, and all pairs.
    whole = [
        x * request.hardware.ranks / 1e15
        for x in (found.flops, found.flops_full)
    ]
    return (
        f"{found.flops / 1e12:.3g} TFLOP/s a device ({found.flops_full / 1e12:.3g} with full attention),"
        f" {whole[0]:.3g} PFLOP/s in total ({whole[1]:.3g})"
    )


def _indented(text: str, by: int) -> list[str]:
    return [" " * by + line for line in wrapped(text, 80 - by)]


def _rules(plan: Plan, beside: Sequence[Baseline]) -> Iterator[str]:
    yield "Choices of simple rules:"
    best = (plan.fastest or plan.layouts[0]).step
    for baseline in beside:
        choice, picked = baseline.choice, baseline.why
        # Relative to the fastest, not the first, so that a rule may not appear
        # to win by 2 %.
        if choice and baseline.fits:
            slower = 100 * (choice.step / best - 1)
            picked = f"{seconds_text(choice.step)}, {slower:.1f} % slower"
        elif choice:
            picked = f"runs out of memory, needs {bytes_text(choice.bytes)}"
        yield from _indented(f"{baseline.rule}: {picked}", 2)
        if choice:
            yield from _indented(str(choice.layout), 4)


def _reasons(refused: Sequence[Refusal]) -> Iterator[str]:
    yield "Why the others lost:"
    for refusal in refused:
        # 24 columns: two of indent, a family's name in 21, a space.
        lines = wrapped(refusal.reason, 80 - 24)
        yield f"  {refusal.family:21} {lines[0]}"
        yield from (" " * 24 + line for line in lines[1:])


def choice_text(request: Request, choice: Choice) -> Iterator[str]:
    """Describe one layout: its rates and the parts of its step."""
    found, spread = utilization(request, choice), range_of(request, choice)
    yield from wrapped(
        f"step {seconds_text(choice.step)},"
        f" {found.tokens:,.0f} tokens per second and device, MFU {found.mfu:.1%}"
        f"{_full(found, ' ({}% with full attention)')}, HFU {found.hfu:.1%}; {_rates(request, found)}"
        f"{'.' if found.note else ''}{_also([found.note])}"
    )
    yield from wrapped(uncertainty_text(spread, choice.step))
    yield ""
    rows = [
        (_NAMES[name], seconds_text(time), f"{100 * time / choice.step:.1f} %")
        for name, time in choice.parts.items()
    ]
    yield text_table((), rows, indent=2).rstrip("\n")


def memory_text(choice: Choice, request: Request) -> Iterator[str]:
    """Yield the memory of the fullest rank by kind, and that of each pipeline stage."""
    least, most = choice.range(request.profile)
    memory, room = request.hardware.memory, request.room
    if math.isinf(memory):  # no device was named
        yield from wrapped(
            f"the fullest rank holds {bytes_text(choice.bytes)} ({range_text(least, most)} with"
            " allocator fragmentation):"
        )
        yield from _kinds(choice)
        return
    beyond = (
        f"; a search takes {bytes_text(room)} at most"
        if choice.bytes > room
        else ""
    )
    yield from wrapped(
        f"the fullest rank holds {bytes_text(choice.bytes)} ({range_text(least, most)} with"
        f" allocator fragmentation), and {verdict(least, most, memory)} in {bytes_text(memory)}{beyond}:"
    )
    yield from _kinds(choice)


def _kinds(choice: Choice) -> Iterator[str]:
    """Bytes by kind, of the fullest rank; and of each stage of a pipeline."""
    rows = [
        (kind, bytes_text(held), f"{100 * held / choice.bytes:.1f} %")
        for kind in MEMORY
        if (held := choice.memory[kind])
    ]
    yield text_table((), rows, indent=2).rstrip("\n")
    if choice.stages:
        yield "\n" + text_table(*_stages(choice.stages), left="r").rstrip("\n")


def _stages(
    stages: Sequence[Mapping[str, float]],
) -> tuple[list[str], list[list[str]]]:
    """Return a table of each stage's memory in GB; equal neighbouring stages share a
    row."""
    used = [kind for kind in MEMORY if any(held[kind] for held in stages)]
    head = [
        "GB  stage",
        *("kept" if kind == "activations" else kind for kind in used),
        "all",
    ]
    numbers = [
        [
            f"{held / 1e9:.1f}"
            for held in (*(each[k] for k in used), sum(each.values()))
        ]
        for each in stages
    ]
    alike = [
        list(group)
        # Neighbouring stages with equal figures: "1-6" for the middle of a
        # pipeline.
        for _, group in groupby(range(len(stages)), numbers.__getitem__)
    ]
    return head, [[spans(group), *numbers[group[0]]] for group in alike]
