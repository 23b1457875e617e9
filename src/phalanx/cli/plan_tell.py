"""A plan as a table of at most eighty columns, what plain rules would pick, and why others lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..draw import text_table
from ..draw.words import wrapped
from ..plan.baselines import Baseline
from ..plan.refused import Refusal, size
from ..plan.search import Choice, Plan
from .plan_figures import Asked, rates

__all__ = ["PARTS", "seconds", "told"]

PARTS = {
    "compute": "computing",
    "tensor": "messages in blocks",
    "data": "gathers and sums",
    "pipe": "between stages",
    "bubble": "bubble",
    "update": "update",
}
_WIDTH = 80


def seconds(time: float) -> str:
    """8.83 s, 412 ms: three digits."""
    if time >= 1:
        return f"{time:.3g} s" if time < 1000 else f"{time:,.0f} s"
    return f"{1e3 * time:.3g} ms" if time >= 1e-3 else f"{1e6 * time:.3g} us"


def told(asked: Asked, plan: Plan, beside: Sequence[Baseline]) -> str:
    """The whole page of text."""
    lines = [*_head(asked, plan), "", *_table(asked, plan), "", *_rules(asked, plan, beside), ""]
    lines += _why(plan.refused)
    return "\n".join(lines)


def _head(asked: Asked, plan: Plan) -> Iterator[str]:
    name = asked.own or asked.shape.name
    yield from wrapped(
        f"{name} on {asked.hardware.ranks:,} devices of {asked.hardware.name}: {asked.batch:,} sequences of"
        f" {asked.sequence:,} tokens a step ({asked.tokens / 1e6:.3g}M), {asked.precision},"
        f" software as {asked.profile.name!r}",
        _WIDTH,
    )
    yield from wrapped(
        f"{plan.considered:,} layouts, {plan.fitting:,} in {size(plan.room)} a device"
        f" ({asked.limit:.0%} of it). Times are right to about {asked.error:.0%}.",
        _WIDTH,
    )


def _table(asked: Asked, plan: Plan) -> Iterator[str]:
    """Numbers first, as layouts have any length; the parts of the step as percentages."""
    rows = []
    for number, choice in enumerate(plan.layouts, 1):
        found, step = rates(asked, choice), choice.step
        parts = [
            f"{100 * choice.parts[name] / step:.1f}"
            for name in ("compute", "tensor", "data", "pipe", "bubble")
        ]
        rows.append(
            (
                number,
                seconds(step),
                f"{found.tokens:,.0f}",
                f"{100 * found.mfu:.1f}",
                f"{100 * found.hfu:.1f}",
                f"{choice.bytes / 1e9:.1f}",
                *parts,
            )
        )
    head = (
        "#",
        "step",
        "tok/s/dev",
        "MFU",
        "HFU",
        "GB",
        "compute",
        "tensor",
        "data",
        "pipe",
        "bubble",
    )
    first, *lines = text_table(head, rows, left="r").splitlines()
    yield first
    for line, choice in zip(lines, plan.layouts, strict=True):
        yield line
        yield from _indented(str(choice.layout), 3)
    best = rates(asked, plan.layouts[0])
    yield from wrapped(
        "Everything from MFU on is in percent, except GB. MFU counts causal attention; with full"
        f" attention the first has {100 * best.mfu_full:.1f} %. HFU adds recomputation.",
        _WIDTH,
    )


def _indented(text: str, by: int) -> list[str]:
    return [" " * by + line for line in wrapped(text, _WIDTH - by)]


def _rules(asked: Asked, plan: Plan, beside: Sequence[Baseline]) -> Iterator[str]:
    yield "What plain rules would pick:"
    best = plan.layouts[0].step
    for baseline in beside:
        yield from _indented(f"{baseline.rule}: {_picked(baseline, best)}", 2)
        if baseline.choice:
            yield from _indented(str(baseline.choice.layout), 4)


def _picked(baseline: Baseline, best: float) -> str:
    if baseline.choice is None:
        return "no legal layout"
    if not baseline.fits:
        return f"runs out of memory, needs {size(baseline.choice.bytes)}"
    return (
        f"{seconds(baseline.choice.step)}, {100 * (baseline.choice.step / best - 1):.1f} % slower"
    )


def _why(refused: Sequence[Refusal]) -> Iterator[str]:
    yield "Why the others lost:"
    for each in refused:
        lines = wrapped(each.reason, _WIDTH - 24)
        yield f"  {each.family:21} {lines[0]}"
        yield from (" " * 24 + line for line in lines[1:])


def one(asked: Asked, choice: Choice) -> Iterator[str]:
    """A layout by itself: its rates and the parts of its step."""
    found = rates(asked, choice)
    low, high = choice.step * (1 - asked.error), choice.step * (1 + asked.error)
    yield from wrapped(
        f"step {seconds(choice.step)} ({seconds(low)} to {seconds(high)}), {found.tokens:,.0f}"
        f" tokens a second and device, MFU {found.mfu:.1%} ({found.mfu_full:.1%} with all pairs of"
        f" attention), HFU {found.hfu:.1%}",
        _WIDTH,
    )
    yield ""
    rows = [
        (PARTS[name], seconds(time), f"{100 * time / choice.step:.1f} %")
        for name, time in choice.parts.items()
    ]
    yield from text_table((), rows, indent=2).splitlines()
