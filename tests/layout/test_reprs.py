"""What a notebook shows of a value is short, and makes the value again where it can."""

from __future__ import annotations

import pytest

import phalanx
from phalanx.layout import Layout, Run, Shape


@pytest.mark.parametrize(
    "value",
    [
        Layout.parse("dp2 pp2 tp2 seq zero1 1f1b:8 bf16"),
        Layout(),
        Shape("own", layers=2, hidden=16, heads=2, vocab=7),
        Run.parse("", "run", ("model=124m", "optimizer.lr=0.1", "steps=5")),
    ],
)
def test_a_repr_makes_the_value_again(value: object) -> None:
    names = vars(phalanx.layout) | vars(phalanx.layout.run)
    assert eval(repr(value), names) == value
    assert len(repr(value)) < 300


def test_a_repr_shows_only_what_was_changed_and_no_password() -> None:
    remote = "checkpoint.remote=memory://key:secret@host/bucket"
    shown = repr(Run.parse("", "run", ("steps=5", remote)))
    assert "steps=5" in shown
    assert "batch" not in shown
    assert "secret" not in shown


def test_pictures_and_timelines_are_named_in_a_line() -> None:
    picture = phalanx.draw("pp2 1f1b:2", "124m")
    timeline = phalanx.simulate("pp2 1f1b:2", "124m")
    for value in (picture, timeline):
        assert "2 ranks" in repr(value)
        assert len(repr(value)) < 120
