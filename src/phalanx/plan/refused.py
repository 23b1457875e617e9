"""Why each kind of other layout lost: illegal, too large, or slower and by which part of the step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..layout import Layout, LayoutError, legal
from .candidates import Candidates, Space
from .columns import SCHEDULES
from .estimate import KINDS, Estimates

__all__ = ["Refusal", "refusals", "size"]

_PARTS = {
    "compute": "computing", "tensor": "messages inside blocks", "data": "gathering and summing",
    "pipe": "sends between stages", "bubble": "the bubble", "update": "the update",
}  # fmt: skip
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Refusal:
    """A family of layouts that holds none of the best: `kind` is illegal, memory or slower."""

    family: str
    kind: str
    reason: str
    layout: str = ""  # the best of the family, or an example
    times: float = 0.0  # how much slower


def size(count: float) -> str:
    """Bytes for people, in units of 10^9 as memory is sold."""
    return f"{count / 1e9:.3g} GB" if count < 999.5e9 else f"{count / 1e12:.3g} TB"


def refusals(
    found: Candidates, times: Estimates, fits: Mask, own: Mask, room: float
) -> tuple[Refusal, ...]:
    """Every family but those of the winner, and what no layout here may be."""
    steps, held = times.step, times.bytes
    winner = int(np.argmin(np.where(fits, steps, np.inf))) if fits.any() else -1
    said = []
    for family, mask in _families(found):
        if not mask.any() or (winner >= 0 and mask[winner]):
            continue
        able = np.flatnonzero(mask & fits)
        if len(able):
            i = int(able[np.argmin(steps[able])])
            said.append(_slower(family, found, times, i, winner, exact=bool(own[i])))
        else:
            rows = np.flatnonzero(mask)
            said.append(_large(family, found, times, int(rows[np.argmin(held[rows])]), room))
    return (*said, *_illegal(found.space))


def _families(found: Candidates) -> Iterator[tuple[str, Mask]]:
    """Names, and which candidates belong to each."""
    c = found.columns
    grid = [x.grid for x in found.options]
    tp, cp, pp, ulysses = (
        np.array([getattr(g, name) for g in grid])[found.at[:, 0]]
        for name in ("tp", "cp", "pp", "ulysses")
    )
    alone = (tp == 1) & (cp == 1) & (pp == 1)
    yield "data parallel alone", alone & (c.zero == 0)
    for stage in (1, 2, 3):
        yield f"ZeRO-{stage} alone", alone & (c.zero == stage)
    for stage in range(4):
        yield f"zero{stage}", c.zero == stage
    yield "HSDP", (c.zero > 0) & (c.replicas > 1)
    for name, sizes in (("tp", tp), ("pp", pp), ("cp", cp)):
        for each in np.unique(sizes):
            yield f"{name}{each}" if each > 1 else f"without {name}", sizes == each
    yield "Ulysses", ulysses > 1
    yield from _inner_families(found)


def _inner_families(found: Candidates) -> Iterator[tuple[str, Mask]]:
    c = found.columns
    modes = found.space.recomputes
    mode_of = found.at[:, 4] % len(modes)  # `candidates` crosses seq with these, seq first
    for number, mode in enumerate(modes):
        yield f"recompute:{mode}", mode_of == number
    for code in np.unique(c.schedule):
        name = SCHEDULES[int(code)]
        if name != "accum":
            yield name, c.schedule == code


def _slower(
    family: str, found: Candidates, times: Estimates, i: int, winner: int, *, exact: bool
) -> Refusal:
    """The best of a family beside the best of all, both as they were screened. One that was not
    costed is slower by at least so much."""
    ours, theirs = times.breakdown(winner), times.breakdown(i)
    part = max(ours, key=lambda name: theirs[name] - ours[name])
    more = theirs[part] - ours[part]
    by = sum(theirs.values()) / sum(ours.values())
    slower = (
        "as fast"
        if by < 1.0005
        else f"{by:.2f} times the time"
        if by >= 2
        else (f"{100 * (by - 1):.1f} % slower")
    )
    reason = f"{'at best' if exact else 'at least'} {slower}"
    if by >= 1.0005 and more > 0:
        reason += f": {_PARTS[part]} takes {1e3 * more:,.0f} ms more"
    return Refusal(family, "slower", reason, str(found.layout(i)), by)


def _large(family: str, found: Candidates, times: Estimates, i: int, room: float) -> Refusal:
    held = times.held(i)
    kinds = sorted(KINDS, key=lambda kind: -held[kind])[:3]
    parts = ", ".join(f"{kind} {size(held[kind])}" for kind in kinds)
    reason = f"needs {size(sum(held.values()))} or more of {size(room)}: {parts}"
    return Refusal(family, "memory", reason, str(found.layout(i)))


def _illegal(space: Space) -> Iterator[Refusal]:
    """Sizes that divide the ranks, and that the model or the batch does not allow."""
    s, ranks = space.shape, space.hardware.ranks
    fast = max(space.hardware.node, 8)
    for name in ("dp", "tp", "pp"):
        seen = set()
        for each in (d for d in range(2, ranks + 1) if ranks % d == 0):
            if name == "tp" and each > fast:
                yield Refusal(
                    f"tp{each} or more", "pruned",
                    f"not tried: every block's messages would leave the {fast} devices that the"
                    " fastest links join", "",
                )  # fmt: skip
                break
            rest = f"dp{ranks // each}" if name != "dp" and each < ranks else ""
            try:
                layout = Layout.parse(f"{rest} {name}{each}")
            except LayoutError:
                continue
            rules = legal(layout, s, batch=max(space.batch, 1), sequence=space.sequence)
            own = [r for r in rules if r.rule in _RULES[name] and r.rule not in seen]
            if own:
                seen.add(own[0].rule)
                yield Refusal(f"{name}{each}", "illegal", str(own[0].what), str(layout))


# Which broken rules are the fault of an axis.
_RULES = {
    "dp": ("batch",),
    "tp": ("heads", "kv", "ffn", "width"),
    "pp": ("stages",),
}
