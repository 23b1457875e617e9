"""What plain rules would pick, beside a plan: what a search is worth, and to what it is compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..layout import Layout, LayoutError, Shape, legal, recipe
from .hardware import Hardware
from .kinds import CostFunction
from .profile import Profile
from .search import Choice, judge

__all__ = ["Baseline", "baselines"]


@dataclass(frozen=True)
class Baseline:
    """A rule and its pick; none where no layout is legal by it. `fits`: its memory does."""

    rule: str
    choice: Choice | None
    fits: bool


def baselines(
    shape: Shape, hardware: Hardware, piece_costs: CostFunction, *, profile: Profile,
    sequence: int, batch: int,
    precision: str, room: float, model: str = "",
) -> tuple[Baseline, ...]:  # fmt: skip
    """Each rule's pick, estimated as the plan's own are."""

    def judged(layouts: list[Layout]) -> list[Choice]:
        able = [x for x in layouts if not legal(x, shape, batch=batch, sequence=sequence)]
        return list(judge(
            able, shape, hardware, piece_costs, profile=profile, sequence=sequence, batch=batch, model=model
        ))  # fmt: skip

    def pick(rule: str, choice: Choice | None) -> Baseline:
        return Baseline(rule, choice, choice is not None and choice.bytes <= room)

    plain = judged(_plain(hardware.ranks, batch, precision))
    try:
        own = judged([recipe(shape, hardware.ranks, batch=batch, sequence=sequence,
                             memory=hardware.memory, precision=precision)])  # fmt: skip
    except LayoutError:
        own = []
    return (
        pick("data parallel with recomputation", _largest(plain, room)),
        pick("smallest tp x pp that fits, biggest microbatch",
             _smallest(shape, hardware.ranks, hardware.node, batch, precision, judged, room)),
        pick("the recipe of `train --layout auto`", own[0] if own else None),
    )  # fmt: skip


def _plain(ranks: int, batch: int, precision: str) -> list[Layout]:
    return [
        Layout.parse(f"{_axes(dp=ranks)} accum:{count} recompute:all {precision}")
        for count in _counts(batch, ranks)
    ]


def _axes(**sizes: int) -> str:
    return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)


def _counts(batch: int, dp: int) -> list[int]:
    """Microbatches, the biggest microbatch first."""
    most = batch // dp
    return [n for n in range(1, most + 1) if most % n == 0]


def _largest(choices: list[Choice], room: float) -> Choice | None:
    """The first that fits, which has the biggest microbatch; else the one that needs least."""
    fitting = [choice for choice in choices if choice.bytes <= room]
    return fitting[0] if fitting else min(choices, key=lambda c: c.bytes, default=None)


def _smallest(
    shape: Shape, ranks: int, node: int, batch: int, precision: str,
    judged: Callable[[list[Layout]], list[Choice]], room: float,
) -> Choice | None:  # fmt: skip
    """The fewest ranks to a copy of the model, tensor parallel inside a server before pipelines."""
    least: Choice | None = None
    for model in (d for d in range(1, ranks + 1) if ranks % d == 0):
        if batch < ranks // model:
            continue
        for tp in (d for d in range(min(node, model), 0, -1) if model % d == 0):
            dp, pp = ranks // model, model // tp
            tail = f"{'seq' if tp > 1 else ''} {'zero1' if dp > 1 else ''} {precision}"
            kind = "1f1b" if pp > 1 else "accum"
            layouts = [
                Layout.parse(f"{_axes(dp=dp, pp=pp, tp=tp)} {tail} {kind}:{count}")
                for count in _counts(batch, dp)
            ]
            found = _largest(judged(layouts), room)
            if found and found.bytes <= room:
                return found
            if found and (least is None or found.bytes < least.bytes):
                least = found
    return least
