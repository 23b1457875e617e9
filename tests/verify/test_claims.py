"""`verify` tries the claims of a program that training does not show: its text, its counts, its proof."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module

import pytest

from phalanx.layout import Layout
from phalanx.parallel import build_model
from phalanx.program import Program, program
from phalanx.program.state import WHOLE, Change, State
from phalanx.train.program import program_of
from phalanx.verify import SHAPES, claims
from phalanx.verify.claims import LONG, false_claim
from verify.covered import covered

LAYOUT = Layout.parse("dp2 pp2 zero2 1f1b:3 fp64")


def _program(layout: Layout, name: str = "gqa") -> Program:
    return program_of(build_model(SHAPES[name]), layout)


def _said(layout: Layout = LAYOUT) -> str:
    long = _program(replace(layout, microbatches=LONG))
    return false_claim(layout, _program(layout), long)


def test_the_claims_of_every_covered_layout_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(claims, "DAMAGES", 40)
    narrow = Layout.parse("dp2 zero3 fp8:tile fp64")
    for layout in (*covered("gqa", 4)[::8], narrow):
        assert false_claim(layout, _program(layout), None) == "", str(layout)
    assert _said() == ""


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
    def nothing(program: Program) -> Iterator[str]:
        return iter(())

    monkeypatch.setattr(
        import_module("phalanx.program.check"), "_names", nothing
    )
    monkeypatch.setattr(claims, "DAMAGES", 1000)
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
