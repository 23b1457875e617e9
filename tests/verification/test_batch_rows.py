"""Batches are compared with the documents that they were cut from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.layout import Layout
from phalanx.layout.run import Run
from phalanx.training.data.batches import Batches, Permutation, Sequences
from phalanx.training.data.token_files import Stream
from phalanx.training.rank import batches_of
from phalanx.verification import run_trial
from phalanx.verification.batch_rows import batch_faults
from seeded.fault import swapped

STEPS = 5
LENGTHS = [0.2, 0.5, 1.3, 0.1, 0.8, 2.0]  # of documents, in sequences


def faults(
    out: Path,
    *words: str,
    chats: bool = False,
    documents: Sequence[float] = LENGTHS * 4,
) -> list[str]:
    words = "model=tiny", "steps=100", "batch=4", "layout=dp2", *words
    run = Run.parse("", "run", words)
    lengths = [*documents], chats
    with swapped(
        import_module("phalanx.verification.run_data"),
        "_lengths",
        lambda *_: lengths,
    ):
        trial = run_trial.run_trial(
            run, run.shape, Layout.parse("dp2"), str(out)
        )
    batches = batches_of(trial.run, trial.run.shape)
    found = batch_faults(
        out / "documents", batches, STEPS, chats=batches.chats
    )
    return [*found]


@pytest.mark.parametrize("chats", [False, True])
@pytest.mark.parametrize("masks", ["true", "false"])
@pytest.mark.parametrize("packing", ["", "wrapped", "bfd", "none"])
def test_batches_of_every_kind_are_explained_by_their_documents(
    packing: str, masks: str, chats: bool, tmp_path: Path
) -> None:
    words = [f"document_masks={masks}"]
    words += [f"packing={packing}"] * bool(packing)
    assert faults(tmp_path, *words, chats=chats) == []


@pytest.mark.parametrize("packing", ["bfd", "none"])
@pytest.mark.parametrize(
    "seed", [1, 2]
)  # of equal documents, if not told apart
def test_documents_of_two_tokens_are_told_apart(
    seed: int, packing: str, tmp_path: Path
) -> None:
    words = "document_masks=false", f"packing={packing}", f"seed={seed}"
    short = [0.02] * 40
    assert faults(tmp_path, *words, documents=short) == []


def _filled(
    change: Callable[[dict[str, Any]], None],
) -> Callable[..., None]:
    """Batches' own rows, changed."""
    right = Batches._fill

    def fill(self: Batches, cut: Any, number: int, row: Any) -> None:
        right(self, cut, number, row)
        change(row)

    return fill


def positions_run_on(row: dict[str, Any]) -> None:
    row["positions"][:] = np.arange(len(row["positions"]))


def positions_are_those_of_the_start(row: dict[str, Any]) -> None:
    row["positions"][:] = 0


def targets_are_one_late(row: dict[str, Any]) -> None:
    row["targets"][:-1] = row["targets"][1:].copy()


def a_target_is_missing(row: dict[str, Any]) -> None:
    row["targets"][np.flatnonzero(row["targets"] >= 0)[0]] = -100


def documents_are_one(row: dict[str, Any]) -> None:
    row["documents"][row["documents"] >= 0] = 0


def padding_is_a_token(row: dict[str, Any]) -> None:
    row["tokens"][row["documents"] < 0] = 7


def documents_are_beyond_the_last(row: dict[str, Any]) -> None:
    row["documents"][row["documents"] >= 0] += 1000


def documents_are_negative(row: dict[str, Any]) -> None:
    row["documents"][row["documents"] >= 0] -= 1000


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (positions_run_on, "in its positions and must have 0"),
        (positions_are_those_of_the_start, "in its positions and must have 1"),
        (targets_are_one_late, "in its targets"),
        (a_target_is_missing, "has -100 in its targets"),
        (documents_are_one, ""),
        (documents_are_beyond_the_last, "token 0 of a row has document 10"),
        (documents_are_negative, "token 0 of a row has document -"),
        (padding_is_a_token, "padding has 7 in its tokens"),
    ],
)
def test_a_wrong_row_is_named(
    change: Callable[[dict[str, Any]], None], named: str, tmp_path: Path
) -> None:
    with swapped(Batches, "_fill", _filled(change)):
        (first, *_) = faults(tmp_path, "packing=bfd")
    assert first.startswith("a batch of the train part: ")
    assert named in first


def test_a_target_across_two_documents_is_named(tmp_path: Path) -> None:
    right = Stream.read_documents

    def read_documents(self: Stream, start: int, stop: int) -> Any:
        documents = right(self, start, stop)
        return np.full_like(documents, documents[0])

    with swapped(Stream, "read_documents", read_documents):
        assert faults(tmp_path, "packing=wrapped")


def test_a_target_that_is_a_question_of_a_chat_is_named(
    tmp_path: Path,
) -> None:
    def every_token(self: Stream, start: int, stop: int) -> Any:
        return np.ones(stop - start, bool)

    with swapped(Stream, "read_answers", every_token):
        (first, *_) = faults(tmp_path, chats=True)
    assert "in its targets and must have -100" in first


def test_a_sequence_that_an_epoch_shows_twice_is_named(tmp_path: Path) -> None:
    with swapped(Permutation, "__getitem__", lambda self, index: index // 2):
        (first, *_) = faults(tmp_path)
    assert (
        "an epoch of the train part shows token 0 of document 0 twice" in first
    )


def test_held_out_text_that_is_left_out_is_named(tmp_path: Path) -> None:
    right = Sequences.runs

    def runs(self: Sequences, number: int) -> Iterator[tuple[int, int]]:
        # Without the last document of a row.
        yield from [*right(self, number)][:-1]

    with swapped(Sequences, "runs", runs):
        found = faults(tmp_path, "packing=bfd")
    assert any("of the validation part leaves out" in each for each in found)
