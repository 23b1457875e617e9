"""Layouts and shapes know their hash, and a copy in another process finds its own."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest

from phalanx.layout import Layout, Shape

VALUES = [Layout.parse("dp2 tp2 zero1 bf16"), Shape.load("tiny")]


@pytest.mark.parametrize(
    "value", VALUES, ids=lambda value: type(value).__name__
)
def test_equal_values_have_equal_hashes_and_others_have_others(
    value: Layout | Shape,
) -> None:
    same = replace(value)
    other = (
        replace(value, zero=2)
        if isinstance(value, Layout)
        else replace(value, layers=3)
    )
    assert same == value
    assert hash(same) == hash(value) == hash(copy.copy(value))
    assert hash(other) != hash(value)
    assert {same: 1}[value] == 1
    assert "_hash" not in value.__getstate__()
    assert value.__reduce_ex__(2)[2] == value.__getstate__()


def test_a_hash_is_not_sent_to_a_process_in_which_text_has_another_hash() -> (
    None
):
    program = """
import pickle, sys
sent = {sent!r}
value = pickle.loads(sent)
from phalanx.layout import Layout
assert hash(value) == hash(Layout.parse("dp2 tp2 zero1 bf16"))
"""
    known = VALUES[0]
    hash(known)
    text = program.format(sent=pickle.dumps(known))
    seeds = ("1", "2")
    for seed in seeds:
        done = subprocess.run(
            [sys.executable, "-c", text],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
