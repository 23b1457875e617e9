"""Explains why other kinds of layout lost: illegal, too large, or slower."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..layout import Layout, LayoutError, legal, stage_pieces
from ..layout.numbers import bytes_text
from .case import ranks_of
from .space import divisors
from .step import MEMORY

if TYPE_CHECKING:
    from .search import Screened

_PARTS = {
    "compute": "computing", "tensor": "messages inside blocks", "data": "gathering and summing",
    "pipe": "sends between stages", "bubble": "the bubble", "update": "the update",
}  # fmt: skip
_MISSES, _EMPTIER = 4, 0.8
_LONG = (
    20_000  # operations; a larger program is not simulated, its bound suffices
)
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Refusal:
    """A family without any of the best layouts; `kind` is illegal, memory or slower."""

    family: str
    kind: str
    reason: str
    layout: str = ""  # the family's best, or an example
    times: float = 0.0  # step time relative to the best


def refusals(
    screened: Screened, best: Sequence[int], room: float, budget: int
) -> tuple[Refusal, ...]:
    """A refusal for every family without a layout in `best`, and for what no layout here may be.

    `best` begins with the fastest layout, which the others are compared with. At most `budget`
    operations are simulated to measure how much families lost by.
    """
    fits = screened.bytes <= room
    # the simulated step of each candidate, or its lower bound
    least = screened.step.copy()
    for i, choice in screened.choices.items():
        fits[i] &= choice.bytes <= room
        if choice.parts:
            least[i] = choice.step
    found = []
    known = screened.known()

    def lowest(some: NDArray[np.intp]) -> int:
        """The candidate with the lowest step, with bounds refreshed by all costs known."""
        i = int(some[np.argmin(least[some])])
        # Refreshed bounds only rise, so the lowest one may change: look again.
        while screened.refresh(i):
            np.maximum(least, screened.step, out=least)
            i = int(some[np.argmin(least[some])])
        return i

    # Families with candidates, none of which is among the best.
    lost = [
        f
        for f in _families(screened)
        if f[1].any() and not any(f[1][i] for i in best)
    ]
    for family, mask in lost:
        # The families share the budget of operations evenly.
        limit = screened.spent + budget // len(lost)
        able = np.flatnonzero(mask & fits) if best else np.empty(0, int)
        for _ in range(_MISSES):
            # Prefer candidates with known costs: the bounds of others are loose.
            some = able[known[able]] if known[able].any() else able
            i = lowest(some) if len(some) else -1
            if i < 0 or i in screened.choices or screened.spent >= limit:
                break
            if screened.operations(i) > _LONG:
                break
            if parts := screened.simulate(i).parts:
                least[i] = sum(parts.values())
                break
            # Too large after all: go on with candidates whose bound of memory
            # is much smaller.
            fits[i] = False
            able = able[screened.bytes[able] <= _EMPTIER * screened.bytes[i]]
        if not len(able):  # unless the candidate with the least memory fits
            rows = np.flatnonzero(mask)
            i = int(rows[np.argmin(screened.bytes[rows])])
            if best and screened.simulate(i).parts:
                least[i], able = (
                    screened.choices[i].step,
                    np.flatnonzero(mask & fits),
                )
        # Everything else in the family is at least as slow as its lowest
        # bound.
        if len(able):
            nearest = float(least[lowest(np.flatnonzero(mask & fits))])
            found.append(_slower(family, screened, i, nearest, best[0]))
        else:
            found.append(_large(family, screened, i, room))
    return (*found, *_illegal(screened))


# A mask has one entry for each candidate, in the order of the screened arrays.
def _families(screened: Screened) -> Iterator[tuple[str, Mask]]:
    """The name of each family, with a mask of the candidates in it."""
    options = screened.space.options
    columns: dict[str, list[NDArray[np.generic]]] = defaultdict(list)
    for x in options:
        zeros = [z.stage for z in x.zeros]
        # The last number is the axis of a grid's array that the choice varies
        # along.
        sharded = [z.stage > 0 and z.shards < x.grid.dp for z in x.zeros]
        for name, values, axis in (
            *(
                (name, [getattr(x.grid, name)], 0)
                for name in ("tp", "cp", "pp", "ulysses", "ep")
            ),
            ("zero", zeros, 0),
            ("hsdp", sharded, 0),
            ("schedule", [p.schedule for p in x.pipelines], 2),
            ("overlap", [p.overlap for p in x.pipelines], 2),
            ("matmul", [i.matmul for i in x.inners], 3),
            ("recompute", [i.recompute for i in x.inners], 3),
            ("experts", [bool(i.experts) for i in x.inners], 3),
        ):
            # Broadcast each choice over the other three axes, then flatten as
            # bounds are.
            shape = [len(values) if n == axis else 1 for n in range(4)]
            column = np.broadcast_to(np.array(values).reshape(shape), x.sizes)
            columns[name].append(column.ravel())
    c = {name: np.concatenate(parts) for name, parts in columns.items()}
    alone = (c["tp"] == 1) & (c["cp"] == 1) & (c["pp"] == 1) & (c["ep"] == 1)
    yield "data parallel alone", alone & (c["zero"] == 0)
    for stage in (1, 2, 3):
        yield f"ZeRO-{stage} alone", alone & (c["zero"] == stage)
    for stage in range(4):
        yield f"zero{stage}", c["zero"] == stage
    yield "HSDP", c["hsdp"] > 0
    for name in ("tp", "pp", "cp", "ep"):
        for each in np.unique(c[name]):
            yield (
                f"{name}{each}" if each > 1 else f"without {name}",
                c[name] == each,
            )
    yield "Ulysses", c["ulysses"] > 1
    for mode in screened.space.recomputes:
        yield f"recompute:{mode}", c["recompute"] == mode
    if c["overlap"].any():
        yield "overlap", c["overlap"]
    if c["experts"].any():
        yield "experts:tp", c["experts"]
    if matmul := screened.space.request.matmul:
        yield f"without {matmul}", c["matmul"] == ""
        yield matmul, c["matmul"] == matmul
    for name in dict.fromkeys(
        p.schedule for x in options for p in x.pipelines if x.grid.pp > 1
    ):
        yield name, c["schedule"] == name


def _slower(
    family: str, screened: Screened, i: int, least: float, winner: int
) -> Refusal:
    """A slower family: by how much, one of its layouts, and what costs it most.

    Its best is as slow as the given lower bound, or slightly faster.
    """
    best = screened.choices[winner]
    simulated = screened.choices.get(i)
    parts = simulated.parts if simulated else _least(screened, i)
    sure = simulated is not None and bool(parts) and simulated.step <= least
    by = least / best.step
    slower = (
        f"{by:.2f} times the time"
        if by >= 2
        else f"{100 * (by - 1):.1f} % slower"
    )
    # 0.05 % is within rounding of the printed times.
    slower = "as fast" if by < 1.0005 else slower
    reason = f"{'its best is' if sure else 'at least'} {slower}"
    # The part that grew most names the cause.
    more = {name: took - best.parts[name] for name, took in parts.items()} or {
        "": 0.0
    }
    part = max(more, key=more.__getitem__)
    if more[part] > 0:
        reason += f": {1e3 * more[part]:,.0f} ms more for {_PARTS[part]}"
    return Refusal(family, "slower", reason, str(screened.layout(i)), by)


def _least(screened: Screened, i: int) -> dict[str, float]:
    """A lower bound of the parts of a candidate's step, by its busiest rank.

    The rest of the bound counts as bubble.
    """
    layout, shape = screened.layout(i), screened.space.request.shape
    each = []  # of every piece of the program, at one microbatch
    for piece in screened.pricer.priced(layout).pieces:
        t = piece.times
        times = [t.forward, t.input_gradient, t.weight_gradient]
        # Embedding and head are never recomputed.
        times += [t.recompute] * (
            layout.recompute != "none"
            and 0 < piece.row.piece < shape.pieces - 1
        )
        each.append(
            (sum(x.total for x in times), sum(x.messages for x in times))
        )
    stages = stage_pieces(layout, shape)
    ranks = [
        [each[piece] for stage in held for piece in stages[stage]]
        for held in ranks_of(len(stages), layout.pp, layout.schedule)
    ]
    # The rank with the most work: the step cannot be shorter.
    most = max(ranks, key=lambda taken: sum(total for total, _ in taken))
    total, messages = (
        layout.microbatches * sum(each) for each in zip(*most, strict=True)
    )
    rest = float(screened.step[i]) - total
    return {"compute": total - messages, "tensor": messages, "bubble": rest}


def _large(family: str, screened: Screened, i: int, room: float) -> Refusal:
    least = float(screened.bytes[i])
    reason = f"needs {bytes_text(least)} or more of {bytes_text(room)}"
    memory = screened.simulate(i).memory
    if sum(memory.values()) > room:
        kinds = sorted(MEMORY, key=lambda kind: -memory[kind])[:3]
        parts = ", ".join(
            f"{kind} {bytes_text(memory[kind])}" for kind in kinds
        )
        reason = f"needs {bytes_text(sum(memory.values()))} of {bytes_text(room)}: {parts}"
    return Refusal(family, "memory", reason, str(screened.layout(i)))


def _illegal(screened: Screened) -> Iterator[Refusal]:
    """Divisors of the ranks that the model or the batch does not allow."""
    request, near = screened.space.request, screened.space.near
    ranks = request.hardware.ranks
    for name, rules in _RULES.items():
        seen = set()
        for each in divisors(ranks)[1:]:
            # Larger sizes than this one are refused for the same reason: stop.
            if name == "tp" and each > near:
                why = f"not tried: every block's messages would leave the {near} devices that the"
                yield Refusal(
                    f"tp{each} or more", "pruned", f"{why} fastest links join"
                )
                break
            # The other ranks are data-parallel, as the simplest layout with
            # this size.
            rest = (
                f"dp{ranks // each}" if name != "dp" and each < ranks else ""
            )
            try:
                layout = Layout.parse(f"{rest} {name}{each}")
            except LayoutError:
                continue
            broken = legal(
                layout,
                request.shape,
                batch=max(request.batch, 1),
                sequence=request.sequence,
            )
            own = [r for r in broken if r.rule in rules and r.rule not in seen]
            if own:
                # Each rule is reported once, with the smallest size that
                # breaks it.
                seen.add(own[0].rule)
                yield Refusal(
                    f"{name}{each}", "illegal", str(own[0].what), str(layout)
                )


# The rules that an axis can break.
_RULES = {
    "dp": ("batch",),
    "tp": ("heads", "kv", "ffn", "width"),
    "pp": ("stages",),
}
