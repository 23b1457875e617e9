"""A long step is proved by a few of its microbatches: the verdict is that of the whole program."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from program_worlds import step

from phalanx.program import Op, Program, Sizes, check, faults
from phalanx.program.graph import graph
from phalanx.program.passes import messages
from phalanx.program.schedules import weave
from phalanx.program.shorten import shortened

PROVED_SHORT = (
    "dp2 accum:30", "dp2 pp2 zero1 1f1b:30", "pp3 1f1b:40", "dp2 pp4 zero1 1f1b:40 recompute:all",
    "pp2 1f1b:40 recompute:selective", "pp3 1f1b:40 offload:activations", "pp2 interleaved2:40",
    "pp4 interleaved2:96", "pp2 zb-v:40", "pp3 dualpipe-v:50", "pp2 zb-h1:40",
    "pp4 zb-h1:40", "pp4 zb-h2:60",
)  # fmt: skip
OTHERS = (
    "pp4 gpipe:40", "dp2 zero3 accum:30", "dp2 pp2 zero2 1f1b:30",
    "dp2 pp2 zero3 1f1b:30", "pp3 interleaved2:41",
)  # fmt: skip


def _whole(monkeypatch: pytest.MonkeyPatch, of: Any, *args: Any) -> Any:
    """The same of the program in its full length."""
    with monkeypatch.context() as patch:
        patch.setitem(
            faults.__wrapped__.__globals__, "shortened", lambda program: None
        )
        return of(*args)


def _proves(program: Program) -> bool:
    short = shortened(program)
    return bool(
        short
        and not faults(short.program)
        and short.proves(graph(short.program))
    )


@pytest.mark.parametrize("text", PROVED_SHORT + OTHERS)
@pytest.mark.parametrize("agree", [False, True])
def test_the_proof_of_a_long_step_is_that_of_the_whole_program(
    text: str, agree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = step(text, 12, agree=agree)
    assert _proves(program) == (text in PROVED_SHORT)
    thirds = tuple(1 + piece / 3 for piece in range(12))
    sizes = Sizes(
        kept=thirds,
        input=thirds,
        temporary=thirds,
        gradient=thirds,
        edge=thirds,
    )
    ours, whole = (
        check(program, sizes),
        _whole(monkeypatch, check, program, sizes),
    )
    assert ours.held == whole.held
    assert ours.counts == whole.counts
    assert ours.bytes
    assert whole.bytes
    for a, b in zip(ours.bytes, whole.bytes, strict=True):
        assert (a.total, a.kinds, a.then) == (
            pytest.approx(b.total), pytest.approx(b.kinds), pytest.approx(b.then),
        )  # fmt: skip


def _spoilt(row: tuple[Op, ...]) -> Iterator[tuple[Op, ...]]:
    """The row with one thing wrong, or merely other, at each of its places."""
    for i, op in enumerate(row):
        yield row[:i] + row[i + 1 :]
        yield (*row[:i], op, *row[i:])
        yield (*row[:i], op._replace(index=op.index + 1), *row[i + 1 :])
        yield (*row[:i], *row[i + 1 : i + 2], op, *row[i + 2 :])
        yield (*row[:i], *row[i + 1 : i + 7], op, *row[i + 7 :])


@pytest.mark.parametrize("text", ["pp2 1f1b:18", "dp2 zero1 accum:16"])
def test_whatever_is_wrong_anywhere_in_a_long_step_is_found(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = step(text, 4)
    assert _proves(program)
    for number, row in enumerate(program.rows):
        for other in _spoilt(row):
            rows = [
                other if n == number else same
                for n, same in enumerate(program.rows)
            ]
            spoilt = program.with_rows(rows)
            assert faults(spoilt) == _whole(monkeypatch, faults, spoilt)


def test_a_steady_state_that_waits_for_itself_is_a_deadlock_however_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Each rank does some forwards ahead of its backwards: too few on one, and the others wait for ever.
    count, verdicts = 30, set()
    for warmups in itertools.product(range(5), repeat=3):
        rows = [
            weave(
                [Op("F", r, m) for m in range(count)],
                [Op("B", r, m) for m in range(count)],
                w,
            )
            for r, w in enumerate(warmups)
        ]
        program = messages(Program.pipeline(rows))
        found = faults(program)
        assert found == _whole(monkeypatch, faults, program), warmups
        verdicts.add((not found, _proves(program)))
        # A forward passes all stages before its backward begins.
        assert bool(found) == any(
            a < b for a, b in itertools.pairwise(warmups)
        )
    assert verdicts >= {(True, True), (False, False)}
    assert (False, True) not in verdicts


def test_the_operation_of_a_peak_is_named_as_the_program_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = step("pp2 1f1b:40", 4)
    # The last backward alone holds more than the steady state: its gradients are whole only then.
    sizes = Sizes(
        kept=(0.0,) * 4,
        input=(0.0,) * 4,
        gradient_shard=(9.0,) * 4,
        gradient=(1.0,) * 4,
    )
    peaks, whole = (
        check(program, sizes).bytes,
        _whole(monkeypatch, check, program, sizes).bytes,
    )
    assert peaks
    assert whole
    assert [p.at for p in peaks] == [p.at for p in whole]
