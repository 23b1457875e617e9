"""A plan as a table of at most eighty columns and as JSON: rates, MFU and HFU beside the times, what
plain rules would pick, and why others lost."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from ..cost import forward_flops, step_flops
from ..draw import text_table
from ..draw.words import wrapped
from ..layout import Layout
from ..layout.numbers import bytes_text, count_text, seconds_text
from ..plan.refused import Refusal
from ..plan.search import Baseline, Plan
from ..plan.step import PARTS, Choice, Request

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
    """How well a layout uses its devices. Attention counts causal; `mfu_full` counts all pairs."""

    tokens: float  # a second and device
    mfu: float
    hfu: float
    mfu_full: float
    flops: float  # of the model, a second and device
    flops_full: float
    note: str = ""  # why an MFU is above 100 %


def utilization(request: Request, choice: Choice) -> Utilization:
    """From the FLOPs of a step and the peak of the devices."""
    flops = step_flops(request.shape, request.batch, request.sequence)
    ranks = request.hardware.ranks
    peak = request.hardware.peak.get(request.precision, 0.0) * ranks * choice.step
    found = Utilization(
        tokens=request.tokens / choice.step / ranks,
        mfu=flops.model / peak if peak else 0.0,
        hfu=(flops.hardware + _again(request, choice.layout)) / peak if peak else 0.0,
        mfu_full=flops.full / peak if peak else 0.0,
        flops=flops.model / choice.step / ranks,
        flops_full=flops.full / choice.step / ranks,
    )
    return replace(found, note=_note(request, found))


def _note(request: Request, found: Utilization) -> str:
    """Why an MFU is above 100 %. What no device can do is refused before (`plan/plausible.py`)."""
    if max(found.mfu, found.hfu) > 1:
        peak = f"the peak in {request.precision}"
        if request.hardware.measured:
            return f"MFU above 100 %: it counts against {peak} that the machine file has measured."
        return f"MFU above 100 %: it counts against {peak}, and fp8 matmuls are faster."
    if found.mfu_full > 1:
        return (
            "With full attention MFU is above 100 %, since that counts pairs of tokens which causal"
            " attention and attention windows never compute."
        )
    return ""


def _again(request: Request, layout: Layout) -> float:
    """FLOPs that recomputation adds: a forward of every block, when blocks are recomputed whole.
    Selective recomputation repeats what is no product and counts nothing."""
    if layout.recompute in ("none", "selective"):
        return 0.0
    ops = forward_flops(request.shape, request.batch, request.sequence)
    return sum(op.causal for op in ops if 0 < op.piece <= request.shape.layers)


# ---- as JSON


def choice_figures(request: Request, choice: Choice) -> dict[str, object]:
    found, error = utilization(request, choice), request.profile.error
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
        "memory_range_gb": [held / 1e9 for held in choice.range(request.profile)],
        "memory_by_kind_gb": {kind: held / 1e9 for kind, held in choice.memory.items()},
        "memory_by_stage_gb": [sum(held.values()) / 1e9 for held in choice.stages],
        "breakdown": dict(choice.parts),
        "error_range": [choice.step * (1 - error), choice.step * (1 + error)],
    }


def plan_figures(request: Request, plan: Plan, beside: Sequence[Baseline]) -> dict[str, object]:
    best = plan.layouts[0]
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
        "layouts": [choice_figures(request, choice) for choice in plan.layouts],
        "rules": [
            {
                "rule": baseline.rule,
                "fits": baseline.fits,
                "slower": baseline.choice.step / best.step if baseline.choice else None,
                **(choice_figures(request, baseline.choice) if baseline.choice else {}),
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
    lines = [*_head(request, plan), "", *_table(request, plan), "", *_rules(plan, beside), ""]
    return "\n".join([*lines, *_reasons(plan.refused)])


def _head(request: Request, plan: Plan) -> Iterator[str]:
    r, experts = request, ""
    precision = " and ".join(filter(None, (r.precision, r.matmul)))
    if r.shape.experts:  # MFU counts what a token meets of the model
        active, total = map(count_text, (r.shape.active, r.shape.total))
        experts = f" {active} of {total} parameters active, tokens over experts {r.routing.text},"
    yield from wrapped(
        f"{r.name} on {r.hardware.ranks:,} devices of {r.hardware.name}: {r.batch:,} sequences of"
        f" {r.sequence:,} tokens a step ({r.tokens / 1e6:.3g}M), {precision},{experts}"
        f" software as {r.profile.name!r}"
    )
    yield from wrapped(
        f"{plan.considered:,} layouts, at most {plan.fitting:,} in {bytes_text(plan.room)} a device"
        f" ({r.limit:.0%} of it); {plan.simulated:,} simulated. Times are right to about"
        f" {r.profile.error:.0%}."
    )


def _table(request: Request, plan: Plan) -> Iterator[str]:
    """Numbers first, as layouts have any length; the parts of the step as percentages."""
    shown = PARTS[:-1]
    rows = []
    used = [utilization(request, choice) for choice in plan.layouts]
    for number, (choice, found) in enumerate(zip(plan.layouts, used, strict=True), 1):
        parts = [f"{100 * choice.parts[name] / choice.step:.1f}" for name in shown]
        rates = [f"{100 * found.mfu:.1f}", f"{100 * found.hfu:.1f}", f"{choice.bytes / 1e9:.1f}"]
        step = seconds_text(choice.step)
        rows.append((number, step, f"{found.tokens:,.0f}", *rates, *parts))
    head = ("#", "step", "tok/s/dev", "MFU", "HFU", "GB", *shown)
    first, *lines = text_table(head, rows, left="r").splitlines()
    yield first
    for line, choice in zip(lines, plan.layouts, strict=True):
        yield line
        yield from _indented(str(choice.layout), 3)
    best = used[0]
    yield from wrapped(
        "Everything from MFU on is in percent, except GB. MFU counts causal attention; with full"
        f" attention the first has {100 * best.mfu_full:.1f} %. HFU adds recomputation. The first"
        f" makes {_rates(request, best)}."
        f"{_also(each.note for each in used)}"
    )


def _also(notes: Iterable[str]) -> str:
    """The notes that there are, each once, as sentences to append."""
    return "".join(f" {note}" for note in dict.fromkeys(notes) if note)


def _rates(request: Request, found: Utilization) -> str:
    """Those that papers print, as the MFU is counted and with all pairs of attention."""
    whole = [x * request.hardware.ranks / 1e15 for x in (found.flops, found.flops_full)]
    return (
        f"{found.flops / 1e12:.3g} TFLOP/s a device ({found.flops_full / 1e12:.3g} with full attention),"
        f" {whole[0]:.3g} PFLOP/s in all ({whole[1]:.3g})"
    )


def _indented(text: str, by: int) -> list[str]:
    return [" " * by + line for line in wrapped(text, 80 - by)]


def _rules(plan: Plan, beside: Sequence[Baseline]) -> Iterator[str]:
    yield "What plain rules would pick:"
    best = plan.layouts[0].step
    for baseline in beside:
        choice, picked = baseline.choice, baseline.why
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
        lines = wrapped(refusal.reason, 80 - 24)
        yield f"  {refusal.family:21} {lines[0]}"
        yield from (" " * 24 + line for line in lines[1:])


def choice_text(request: Request, choice: Choice) -> Iterator[str]:
    """A layout by itself: its rates and the parts of its step."""
    found, error = utilization(request, choice), request.profile.error
    low, high = choice.step * (1 - error), choice.step * (1 + error)
    yield from wrapped(
        f"step {seconds_text(choice.step)} ({seconds_text(low)} to {seconds_text(high)}),"
        f" {found.tokens:,.0f} tokens a second and device, MFU {found.mfu:.1%}"
        f" ({found.mfu_full:.1%} with full attention), HFU {found.hfu:.1%}; {_rates(request, found)}"
        f"{'.' if found.note else ''}{_also([found.note])}"
    )
    yield ""
    rows = [
        (_NAMES[name], seconds_text(time), f"{100 * time / choice.step:.1f} %")
        for name, time in choice.parts.items()
    ]
    yield text_table((), rows, indent=2).rstrip("\n")
