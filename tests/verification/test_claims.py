"""`verify` tries the claims of a program that training does not show: its text, its counts, its proof."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module

import pytest

from phalanx.layout import Layout, Shape, StagedPieces, staged_pieces
from phalanx.parallel import build_model
from phalanx.program import Op, Program, ops, program, schedules, state
from phalanx.program.state import WHOLE, Change, State
from phalanx.training.program import program_of
from phalanx.verification import SHAPES, claims, rows, verify
from phalanx.verification.claims import LONG, false_claim
from phalanx.verification.rows import rows_differ
from phalanx.verification.step_order import order_faults
from verification.covered import covered

LAYOUT = Layout.parse("dp2 pp2 zero2 1f1b:3 fp64")


def _program(layout: Layout, name: str = "gqa") -> Program:
    return program_of(build_model(SHAPES[name]), layout)


def _said(layout: Layout = LAYOUT) -> str:
    long = _program(replace(layout, microbatches=LONG))
    return false_claim(layout, _program(layout), long)


def test_the_claims_of_every_covered_layout_hold() -> None:
    narrow = Layout.parse("dp2 zero3 fp8:tile fp64")
    for layout in (*covered("gqa", 4)[::8], narrow):
        assert false_claim(layout, _program(layout), None) == "", str(layout)
    assert _said() == ""


def test_a_single_sum_of_exact_parts_is_no_false_claim() -> None:
    """Of a model with one block and adapters, only the block's unit has gradients."""
    shape = replace(SHAPES["gqa"], layers=1, lora_r=4)
    layout = Layout.parse("dp2 exact")
    program = program_of(build_model(shape), layout)
    assert [op.kind for op in program.rows[0]].count(ops.SHARE_SUMS) == 1
    assert false_claim(layout, program, None) == ""


def test_a_text_that_says_something_else_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = program.Op.__str__

    def unnumbered(op: program.Op) -> str:
        return plain(op).partition("#")[0]

    monkeypatch.setattr(program.Op, "__str__", unnumbered)
    assert "read back as another program" in _said()


def test_a_buffer_that_is_not_given_back_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = State._arrive

    def keeps(state: State, op: program.Op) -> Iterator[Change]:
        changes = [*plain(state, op)]
        return (change for change in changes if change.what != WHOLE)

    monkeypatch.setattr(State, "_arrive", keeps)
    assert f"buffers '{WHOLE}'" in _said()


def test_a_proof_that_accepts_a_damaged_program_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nothing(program: Program, number: int, now: State) -> Iterator[str]:
        now.follow()
        return iter(())

    monkeypatch.setattr(
        import_module("phalanx.program.check"), "_weights", nothing
    )
    assert "the proof accepts the program though" in _said()


def test_a_proof_by_a_few_microbatches_that_counts_less_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = claims.check

    def lower(program: Program):  # type: ignore[no-untyped-def]
        proof = plain(program)
        return replace(proof, counts=proof.counts[:-1])

    monkeypatch.setattr(claims, "check", lower)
    assert "counts other peaks" in _said()


# ---- the order of a step


def in_order(text: str) -> list[str]:
    layout = Layout.parse(text)
    return [*order_faults(layout, _program(layout))]


_split, _weave = schedules.split, schedules.weave


def deeper(forwards: list[Op], backwards: list[Op], warmup: int) -> list[Op]:
    """A warm-up with one more forward where that is possible."""
    return _weave(forwards, backwards, min(warmup + 1, len(forwards)))


def later(row: list[Op], lag: int) -> list[Op]:
    return _split(row, lag + 1)


ORDERS = [
    ("pp4 1f1b:6 fp64", schedules, "weave", deeper, "forwards before its"),
    ("pp2 interleaved2:4 fp64", schedules, "weave", deeper, "forwards before its"),
    ("pp2 zb-h1:4 fp64", schedules, "split", later, "defers 2 weight gradients"),
    ("pp2 zb-h2:4 fp64", schedules, "split", later, "weight gradients"),
    ("dp2 zero2 fp64", state, "IN_FLIGHT", 3, "should wait for 1"),
    ("dp2 zero2 fp64", state, "IN_FLIGHT", 1, "should wait for 0"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "module", "name", "wrong", "said"), ORDERS)
def test_an_order_that_is_not_the_papers_is_named(
    layout: str,
    module: object,
    name: str,
    wrong: object,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert in_order(layout) == []
    monkeypatch.setattr(module, name, wrong)
    schedules._named.cache_clear()
    try:
        assert said in in_order(layout)[0]
    finally:
        schedules._named.cache_clear()


def test_receives_gathers_and_trips_to_the_host_are_named_by_their_place() -> (
    None
):
    """Each operation of these kinds, moved by one computation."""
    texts = {
        ops.RECEIVE: "pp2 1f1b:4 fp64",
        ops.GATHER: "dp2 zero3 accum:3 fp64",
        ops.RELOAD: "accum:3 offload:activations fp64",
    }
    for kind, text in texts.items():
        layout = Layout.parse(text)
        plain = _program(layout)
        row = [*plain.rows[0]]
        place = max(n for n, op in enumerate(row) if op.kind == kind)
        op = row.pop(place)
        before = (n for n in range(place) if row[n].kind in ops.COMPUTES)
        row.insert([*before][-1], op)
        moved = plain.with_rows([row, *plain.rows[1:]])
        assert [*order_faults(layout, moved)], text
        assert [*order_faults(layout, plain)] == []


# ---- the rows that plans read


def _wrong(layout: Layout, shape: Shape, **changes: object) -> StagedPieces:
    """The pieces of a shape with a wrong last row."""
    right = staged_pieces(layout, shape)
    head = replace(right.rows[-1], **changes)  # type: ignore[arg-type]
    return replace(right, rows=(*right.rows[:-1], head))


def test_rows_of_a_shape_that_are_not_its_models_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The head reads the embedding's weight, and its norm is summed over tp."""
    shape, layout = SHAPES["gpt"], Layout.parse("tp2 seq fp64")
    model = build_model(shape)
    assert rows_differ(layout, shape, model) == ""
    for changes in ({"uses": (), "tied": ()}, {"partial": False}):

        def planned(
            layout: Layout, shape: Shape, changes: dict[str, object] = changes
        ) -> StagedPieces:
            return _wrong(layout, shape, **changes)

        monkeypatch.setattr(rows, "staged_pieces", planned)
        said = rows_differ(layout, shape, model)
        field = next(iter({*changes} & {"tied", "partial"}))
        assert f"'{field}'" in said
        [verdict] = verify(shape, [layout], steps=1)
        assert verdict.first_difference == said
    # Fewer stages than the layout has.
    whole = staged_pieces(Layout(), shape)
    monkeypatch.setattr(rows, "staged_pieces", lambda *_: whole)
    in_stages = Layout.parse("pp2 1f1b:3 fp64")
    assert "stages" in rows_differ(in_stages, shape, model)
