"""What is held, against an oracle that asks for each moment what is alive at it."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from program_worlds import step

from phalanx.program import (
    Costs,
    Op,
    Program,
    Sizes,
    check,
    schedule,
    simulate,
)
from phalanx.program.memory import peaks
from phalanx.program.passes import expand, messages, recompute

PIECES = 6
SIZES = Sizes(
    kept=(101.0, 67.0, 83.0, 97.0, 71.0, 59.0),
    input=(11.0, 7.0, 13.0, 5.0, 3.0, 2.0),
    kept_after_i=(50.0, 40.0, 30.0, 60.0, 20.0, 10.0),
    temporary=(1.5, 2.5, 9.5, 4.5, 5.5, 6.5),
    home=(17.0,) * 6,
    gathered=(200.0, 310.0, 420.0, 130.0, 240.0, 150.0),
    gradient=(19.0, 23.0, 29.0, 31.0, 37.0, 41.0),
    gradient_shard=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0),
    optimizer=(43.0,) * 6,
    selected=(0.0, 31.0, 37.0, 29.0, 33.0, 0.0),
)
IN_PLACE = Sizes(
    SIZES.kept, SIZES.input, gradient=SIZES.gradient, selected=SIZES.selected
)
DERIVED = replace(SIZES, derived=(0.0, 230.0, 230.0, 230.0, 230.0, 0.0))
TEXTS = (
    "accum:2", "pp2 1f1b:3", "pp2 zb-h2:4", "pp3 zb-v:3", "dp2 zero1 accum:2", "dp2 pp2 1f1b:3 zero2",
    "dp2 pp2 1f1b:3 zero3 gather:micro prefetch:2", "dp2 pp2 zb-h1:3 zero3", "offload:activations",
    "dp2x2 zero2", "dp2x2 zero2 accum:3 reduce:micro", "dp2x2 pp2 1f1b:3 zero3",
)  # fmt: skip
AGAIN = ("none", "all", "every=2", "sqrt", "selective")

# first and last position at which so many bytes are alive
Alive = tuple[int, int, float]


def _activations(row: tuple[Op, ...], s: Sizes) -> Iterator[Alive]:
    at = {op: i for i, op in enumerate(row)}
    for op, start in at.items():
        if op.kind != "F":
            continue
        p, m = op.piece, op.index
        again, inner = at.get(Op("R", p, m)), at.get(Op("R", p - 1, m))
        part = at.get(Op("P", p, m))
        first = at.get(Op("I", p, m))
        end = at[Op("W", p, m)] if first is not None else at[Op("B", p, m)]
        size = s.kept[p]
        if again is not None:
            size = 0 if inner is not None and inner < again else s.input[p]
        if part is not None:
            size, again = s.selected[p], part
        out, back = at.get(Op("O", p, m)), at.get(Op("Z", p, m))
        if out is not None and back is not None:
            yield start, out, size
            start = back
        last = end
        if again is not None:
            yield start, again - 1, size
            start = again
        if first is not None and s.kept_after_i:
            yield first + 1, last, s.kept_after_i[p]
            last = first
        yield start, last, s.kept[p]


def _weights(
    program: Program, row: tuple[Op, ...], s: Sizes
) -> Iterator[Alive]:
    end = len(row)
    for unit in range(program.pieces):
        gathers = [
            i
            for i, op in enumerate(row)
            if op.kind == "G" and op.piece == unit
        ]
        drops = [
            i
            for i, op in enumerate(row)
            if op.kind == "D" and op.piece == unit
        ]
        for k, start in enumerate(gathers):
            yield (
                start,
                drops[k] if drops else end,
                s.gathered[unit] if s.gathered else 0,
            )
        # A norm's gradient comes with the input's; the first piece has no input.
        adds = [
            i
            for i, op in enumerate(row)
            if op.kind in ("BIW" if op.piece else "BW")
            and unit in program.units(op.piece)
        ]
        sums = [
            i
            for i, op in enumerate(row)
            if op.kind == "S" and op.piece == unit
        ]
        if not adds:
            continue
        comes = [_arrival(row, i) for i in sums]
        # Of replicas of shards the second sum works on the part alone: the whole gradient goes before it.
        halves = [
            i
            for i, op in enumerate(row)
            if op.kind == "H" and op.piece == unit
        ]
        complete = [_arrival(row, i) for i in halves] or comes
        (update,) = [i for i, op in enumerate(row) if op == Op("U", unit)] or [
            end
        ]
        left = s.gradient_shard[unit] if s.gradient_shard else s.gradient[unit]
        earlier = -1
        for n, (total, arrives, done) in enumerate(
            zip(sums, comes, complete, strict=True)
        ):
            start = min(i for i in adds if i > earlier)
            # the later ones are added to the first
            last = update if n == 0 else done - 1
            if s.gradient_shard:
                yield start, arrives - 1, s.gradient[unit]
                yield total, last, left
            else:
                yield start, last, left
            earlier = total


@cache
def _arrival(row: tuple[Op, ...], i: int) -> int:
    """Before which position a sum is waited for: a later sum that finds it and another under way,
    the next one of its unit, that over its replicas, the agreement, its unit's T or update, or the end."""
    kind = row[i].kind
    for j in range(i + 1, len(row)):
        own = row[j].piece == row[i].piece
        if row[j].kind == "A" or (
            own and row[j].kind in ("STUH" if kind == "S" else "HTU")
        ):
            return j
        between = [k for k in range(i + 1, j) if row[k].kind == kind]
        if row[j].kind == kind and any(_arrival(row, k) >= j for k in between):
            return j
    return len(row)


def _derived(
    program: Program, row: tuple[Op, ...], s: Sizes
) -> Iterator[Alive]:
    """What follows from a microbatch is there from its first forward to the last backward. Where
    activations leave, all microbatches' are counted from beginning to end."""
    uses = [op for op in row if op.kind in "FBIRP"]
    amount = max(
        (s.derived[op.piece] for op in uses if s.derived), default=0.0
    )
    for m in range(program.microbatches):
        at = [row.index(op) for op in uses if op.index == m]
        yield (0, len(row), amount) if any(op.kind == "O" for op in row) else (
            at[0], at[-1], amount
        )  # fmt: skip


def _oracle(program: Program, number: int, s: Sizes) -> float:
    row = program.rows[number]
    alive = [
        *_activations(row, s),
        *_weights(program, row, s),
        *_derived(program, row, s),
    ]
    if s.temporary:
        alive += [
            (i, i, s.temporary[op.piece])
            for i, op in enumerate(row)
            if op.kind in "FBIWRP"
        ]
    units = {
        u for op in row if op.kind == "F" for u in program.units(op.piece)
    }
    base = sum(sum(x[u] for u in units) for x in (s.home, s.optimizer) if x)
    return base + max(
        sum(b for a, z, b in alive if a <= i <= z) for i in range(len(row))
    )


@pytest.mark.parametrize("text", TEXTS)
def test_peaks_are_those_of_all_that_is_alive_at_each_moment(
    text: str,
) -> None:
    for again, tied, agree, sizes in product(
        AGAIN, (False, True), (False, True), (SIZES, IN_PLACE, DERIVED)
    ):
        program = step(
            f"{text} recompute:{again}", PIECES, tied=tied, agree=agree
        )
        for number, peak in enumerate(check(program, sizes).bytes or ()):
            assert peak.total == pytest.approx(
                _oracle(program, number, sizes)
            ), (
                again,
                tied,
            )
            assert sum(peak.then.values()) == pytest.approx(peak.total)
            assert peak.total <= sum(peak.kinds.values()) + 1e-9


@pytest.mark.parametrize("text", TEXTS)
def test_the_simulated_memory_ends_with_what_it_began_with(text: str) -> None:
    for again in AGAIN:
        program = step(f"{text} recompute:{again}", PIECES)
        timeline = simulate(
            program,
            Costs({"F": 1, "B": 2, "G": 0.5, "S": 0.5, "U": 0.25}),
            SIZES,
        )
        assert timeline.memory is not None
        for number, peak in enumerate(peaks(program, SIZES)):
            points = timeline.memory[program.owner.index(number)]
            times = [time for time, _ in points]
            assert times == sorted(times)
            last = points[-1][1]
            for kind in ("activations", "inputs", "temporary", "gradients"):
                assert last.get(kind, 0) == pytest.approx(0), kind
            # Beside the compute lane copies and sums end later than they are listed, gathers later too.
            highest = max(sum(kinds.values()) for _, kinds in points)
            assert highest <= sum(peak.kinds.values()) + sum(
                SIZES.gathered
            ) + sum(SIZES.gradient)
            assert highest >= max(
                peak.kinds["activations"], peak.kinds["weights"]
            )


def test_on_the_compute_lane_alone_simulated_and_proved_memory_are_one() -> (
    None
):
    sizes = Sizes(
        SIZES.kept, SIZES.input, SIZES.kept_after_i, selected=SIZES.selected
    )
    for name, again in product(("gpipe", "1f1b", "zb-h1", "zb-h2"), AGAIN):
        stages = [range(3), range(3, 6)]
        base = recompute(expand(schedule(name, 2, 4), stages), stages, again)
        program = messages(base)
        memory = (
            simulate(program, Costs({"F": 1, "I": 1, "W": 1}), sizes).memory
            or {}
        )
        for row, peak in enumerate(peaks(program, sizes)):
            assert max(
                sum(kinds.values()) for _, kinds in memory[row]
            ) == pytest.approx(peak.total)


def test_memory_is_taken_when_an_operation_starts_and_given_back_when_it_ends() -> (
    None
):
    memory = (
        simulate(
            _alone(), Costs({"F": 1, "B": 2}), Sizes((5.0, 7.0), (1.0, 1.0))
        ).memory
        or {}
    )
    points = [(time, kinds.get("activations", 0)) for time, kinds in memory[0]]
    assert points == [(0, 5), (1, 12), (2, 12), (4, 5), (6, 0)]


def _alone() -> Program:
    return expand(schedule("accum", 1, 1), [range(2)])


def test_operations_without_a_piece_hold_nothing() -> None:
    """N and A carry no piece; a size must not be looked up for them."""
    program = step("dp2", 3, agree=True)
    assert (
        peaks(program, Sizes(kept=(1.0,) * 3, input=(1.0,) * 3))[0].total == 3
    )


# A stage of N equal pieces, one forward and one backward: (extra forwards, most held pieces).
def _cost_of(mode: str, n: int) -> tuple[float, float]:
    program = recompute(
        expand(schedule("accum", 1, 1), [range(n)]), [range(n)], mode
    )
    check(program)
    work = simulate(program, Costs({"F": 1, "B": 2})).makespan
    return work - 3 * n, peaks(program, Sizes((1.0,) * n, (1.0,) * n))[0].total


def test_recomputation_costs_at_most_one_forward_and_holds_inputs_and_one_segment() -> (
    None
):
    """Chen et al. 2016, section 4: N/C inputs and C pieces, least at the square root of N."""
    for n in (4, 9, 12, 16, 25, 36):
        assert _cost_of("none", n) == (0, n)
        held = {}
        for c in range(1, n + 1):
            extra, held[c] = _cost_of(f"every={c}", n)
            # All but the last segment, which is fresh.
            assert extra == (n - 1) // c * c
            assert extra <= n
            assert held[c] <= -(-n // c) + c
        assert _cost_of("all", n) == _cost_of("every=1", n)
        root = round(n**0.5)
        assert _cost_of("sqrt", n) == _cost_of(f"every={root}", n)
        assert held[root] == min(held.values())


def test_in_a_pipeline_each_held_microbatch_keeps_its_segments_inputs() -> (
    None
):
    stages = [range(16), range(16, 32)]
    for mode, segments, length in (
        ("all", 16, 1),
        ("every=2", 8, 2),
        ("sqrt", 4, 4),
    ):
        program = recompute(
            expand(schedule("gpipe", 2, 5), stages), stages, mode
        )
        kinds = peaks(program, Sizes((1.0,) * 32, (1.0,) * 32))[0].kinds
        assert kinds["inputs"] == 5 * segments
        assert kinds["activations"] == length
        extra = sum(op.kind == "R" for op in program.rows[0])
        assert extra == 5 * 16  # one forward more, for every microbatch
