"""From the order of computing to the whole step: each pass puts one kind of operation in its place.

Every pass takes a Program and returns one; none knows of another. `build.py` says in which order
they are applied.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from .memory import Sizes, peaks
from .op import Op, Program, ProgramError

__all__ = [
    "expand",
    "finish",
    "gather",
    "messages",
    "offload_activations",
    "recompute",
    "recompute_to_fit",
    "reduce",
    "tie",
]

_COMPUTES = "FBIWR"
_USES_WEIGHTS = "FBIR"  # W multiplies its input by its output's gradient, and needs no weights


def _woven(
    row: Sequence[Op], before: Mapping[int, list[Op]], after: Mapping[int, list[Op]]
) -> list[Op]:
    """The row with operations put before and after those at the named positions."""
    out = list(before.get(-1, ()))
    for i, op in enumerate(row):
        out += [*before.get(i, ()), op, *after.get(i, ())]
    return out


def expand(
    program: Program, stages: Sequence[range], tied: tuple[tuple[int, int], ...] = ()
) -> Program:
    """Operations on virtual stages become operations on their pieces; backward goes down."""
    rows = []
    for row in program.rows:
        out: list[Op] = []
        for op in row:
            pieces: Iterable[int] = stages[op.piece]
            if op.kind in "BIW":
                pieces = reversed(stages[op.piece])
            out += [op._replace(piece=piece) for piece in pieces]
        rows.append(out)
    return Program(tuple(map(tuple, rows)), program.mesh, program.owner, tied)


def recompute(program: Program, stages: Sequence[range], mode: str) -> Program:
    """`none`, `all`, `every=C` or `sqrt`: pieces keep nothing but each segment's first input, and
    a segment is computed again, once, before its backward. `selective` works inside a piece."""
    if mode in ("none", "selective"):
        return program
    segments = [segment for stage in stages for segment in _segments(stage, mode)]
    return _with_segments(program, [segments] * len(program.rows))


def _segments(stage: range, mode: str) -> list[range]:
    if mode == "all":
        length = 1
    elif mode == "sqrt":
        length = max(1, round(math.sqrt(len(stage))))
    elif mode.startswith("every="):
        length = int(mode[6:])
    else:
        raise ProgramError(
            f"there is no recomputation {mode!r}: none, all, every=C, sqrt, selective, fit."
        )
    return [stage[i : i + length] for i in range(0, len(stage), length)]


def _with_segments(program: Program, segments: Sequence[Sequence[range]]) -> Program:
    """R before the backward of each segment; `segments[row]` are those that the row recomputes."""
    rows = []
    for row, chosen in zip(program.rows, segments, strict=True):
        top = {segment[-1]: segment for segment in chosen}
        before: dict[int, list[Op]] = {}
        last: Op | None = None
        for i, op in enumerate(row):
            # What was computed just now is still there: backward begins with it.
            fresh = last == Op("F", op.piece, op.index)
            if op.kind in "BI" and op.piece in top and not fresh:
                before[i] = [Op("R", piece, op.index) for piece in top[op.piece]]
            if op.kind in _COMPUTES:
                last = op
        rows.append(_woven(row, before, {}))
    return program.with_rows(rows)


def recompute_to_fit(program: Program, sizes: Sizes, limits: Sequence[float]) -> Program:
    """Recompute as few pieces on each row as its memory limit allows: those that free most first."""
    chosen: list[list[range]] = []
    for number, limit in enumerate(limits):
        gains = {
            p: sizes.kept[p] - sizes.input[p] for p, row in program.host.items() if row == number
        }
        order = sorted((p for p in gains if gains[p] > 0), key=lambda p: (-gains[p], p))
        for count in range(len(order) + 1):
            tried = [[range(p, p + 1) for p in sorted(order[:count])] if r == number else []
                     for r in range(len(program.rows))]  # fmt: skip
            peak = peaks(_with_segments(program, tried), sizes)[number]
            if peak.total <= limit:
                chosen.append(tried[number])
                break
        else:
            raise ProgramError(
                f"stage {number} holds {peak.total:.3g} bytes at {peak.at} with everything recomputed;"
                f" the limit is {limit:.3g}. Use more stages, more shards or smaller microbatches."
            )
    return _with_segments(program, chosen)


def offload_activations(program: Program) -> Program:
    """What a forward keeps goes to the host after it and comes back one computation before its use."""
    rows = []
    for row in program.rows:
        at = {op: i for i, op in enumerate(row)}
        before: dict[int, list[Op]] = defaultdict(list)
        after: dict[int, list[Op]] = {}
        computes = [i for i, op in enumerate(row) if op.kind in _COMPUTES]
        turn = {i: n for n, i in enumerate(computes)}
        for i, op in enumerate(row):
            if op.kind != "F":
                continue
            uses = [at[u] for k in "RBI" if (u := Op(k, op.piece, op.index)) in at]
            use = min(uses, default=-1)
            inside = Op("R", op.piece - 1, op.index) in at and Op("R", op.piece, op.index) in at
            if (
                use < 0
                or turn[use] - turn[i] < 3
                or (inside and at[Op("R", op.piece - 1, op.index)] < use)
            ):
                continue  # too near to be worth the way, or nothing is kept
            after[i] = [Op("O", op.piece, op.index)]
            before[computes[turn[use] - 1]].append(Op("Z", op.piece, op.index))
        rows.append(_woven(row, before, after))
    return program.with_rows(rows)


def messages(program: Program) -> Program:
    """A send right after what makes a value; its receive one computation ahead of the one that uses
    it, posted while the rank still works. Receives stand in the order of the sends."""
    after: list[dict[int, list[Op]]] = [{} for _ in program.rows]
    flows: dict[tuple[int, int, str], list[Op]] = defaultdict(list)
    for number, row in enumerate(program.rows):
        for i, op in enumerate(row):
            to = op.piece + (1 if op.kind == "F" else -1)
            target = program.host.get(to, number)
            if op.kind in "FBI" and target != number:
                after[number][i] = [Op(">", op.piece, op.index, op.kind, to)]
                flows[number, target, "F" if op.kind == "F" else "B"].append(op)
    before: list[dict[int, list[Op]]] = [defaultdict(list) for _ in program.rows]
    for (_, target, way), sent in flows.items():
        _receives(program.rows[target], way, sent, before[target])
    return program.with_rows(_woven(row, before[n], after[n]) for n, row in enumerate(program.rows))


def _receives(row: Sequence[Op], way: str, sent: Sequence[Op], before: dict[int, list[Op]]) -> None:
    at = {op: i for i, op in enumerate(row)}
    computes = [i for i, op in enumerate(row) if op.kind in _COMPUTES]
    turn = {i: n for n, i in enumerate(computes)}
    latest = len(row)
    for op in reversed(sent):
        to = op.piece + (1 if way == "F" else -1)
        use = next(
            (u for k in ("F" if way == "F" else "BI") if (u := Op(k, to, op.index)) in at), None
        )
        if use is None:
            continue  # `check` tells that what is sent is never used
        first = at[use]
        if Op("R", to, op.index) in at and way == "B":
            first = min(first, at[Op("R", to, op.index)])
        latest = min(latest, computes[max(0, turn[first] - 1)])
        before[latest].insert(0, Op("<", to, op.index, use.kind, op.piece))


def gather(program: Program, *, each_use: bool, drop: bool, prefetch: int = 1) -> Program:
    """Weights fetched before they are used: once a step or for each use, `prefetch` units ahead.

    Uses of a unit that follow each other directly are one use: the last block is not dropped
    between forward and backward, which begins with it.
    """
    rows = []
    for row in program.rows:
        uses = _uses(program, row, each_use)
        before: dict[int, list[Op]] = defaultdict(list)
        after: dict[int, list[Op]] = defaultdict(list)
        times: dict[int, int] = defaultdict(int)
        for n, (unit, first, last) in enumerate(uses):
            ahead = uses[n - prefetch][1] if n >= prefetch else -1
            before[min(ahead, first)].append(Op("G", unit, times[unit]))
            if drop:
                after[last].append(Op("D", unit, times[unit]))
            times[unit] += 1
        rows.append(_woven(row, before, after))
    return program.with_rows(rows)


def _uses(program: Program, row: Sequence[Op], each: bool) -> list[tuple[int, int, int]]:
    """(unit, first position, last position) of every stretch in which a unit's weights are used."""
    found: dict[tuple[int, int], list[int]] = {}
    stretch: dict[int, int] = defaultdict(int)
    last: tuple[int, ...] = ()
    for i, op in enumerate(row):
        if op.kind not in _USES_WEIGHTS:
            continue
        units = program.units(op.piece)
        for unit in units:
            if each and unit not in last:
                stretch[unit] += 1
            found.setdefault((unit, stretch[unit]), [i, i])[1] = i
        last = units
    return sorted(((unit, a, b) for (unit, _), (a, b) in found.items()), key=lambda use: use[1:])


def reduce(program: Program, *, each_microbatch: bool) -> Program:
    """Gradients summed over a unit's copies: after its last contribution of the step, or of each
    microbatch. A unit that two pieces of the rank use is summed after both."""
    rows = []
    for row in program.rows:
        last: dict[tuple[int, int], int] = {}
        for i, op in enumerate(row):
            if op.kind in "BW":
                for unit in program.units(op.piece):
                    last[unit, op.index if each_microbatch else 0] = i
        after: dict[int, list[Op]] = defaultdict(list)
        times: dict[int, int] = defaultdict(int)
        for (unit, _), i in sorted(last.items(), key=lambda item: item[1]):
            after[i].append(Op("S", unit, times[unit]))
            times[unit] += 1
        rows.append(_woven(row, {}, after))
    return program.with_rows(rows)


def tie(program: Program) -> Program:
    """Where two stages hold one weight, their summed gradients are added, after the last S of it."""
    rows = []
    for number, row in enumerate(program.rows):
        after: dict[int, list[Op]] = {}
        for piece, unit in program.tied:
            if program.host[piece] != program.host[unit] and number in (
                program.host[piece],
                program.host[unit],
            ):
                last = max(i for i, op in enumerate(row) if op.kind == "S" and op.piece == unit)
                after.setdefault(last, []).append(Op("T", unit))
        rows.append(_woven(row, {}, after))
    return program.with_rows(rows)


def finish(program: Program, *, agree: bool) -> Program:
    """The count of tokens first; each unit updated as soon as its gradient is summed, or, when
    clipping or scaling needs every gradient, all units after the agreement."""
    rows = []
    for row in program.rows:
        last = {op.piece: i for i, op in enumerate(row) if op.kind in "ST"}
        updates = sorted(last, key=lambda unit: last[unit])
        if agree:
            rows.append([Op("N"), *row, Op("A"), *(Op("U", unit) for unit in updates)])
        else:
            after: dict[int, list[Op]] = {last[unit]: [Op("U", unit)] for unit in updates}
            rows.append(_woven(row, {-1: [Op("N")]}, after))
    return program.with_rows(rows)
