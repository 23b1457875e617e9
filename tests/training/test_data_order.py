"""The order of sequences and the batches cut by it, against lists written out."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from loop_worlds import losses, small, trained, weights
from numpy.typing import NDArray

from phalanx.parallel import share
from phalanx.training.checkpoint_format import read_manifest
from phalanx.training.data.batches import (
    Batches,
    Permutation,
    Sequences,
    best_fit,
    shared_out,
)
from phalanx.training.data.token_files import (
    Corpus,
    DataError,
    Stream,
    open_library,
)


def corpus_of(
    lengths: list[int], held: list[int] | None = None
) -> tuple[Corpus]:
    """Token n of the stream is n; documents have these lengths."""

    def stream(of: list[int]) -> Stream:
        starts = np.concatenate(([0], np.cumsum(of))).astype(np.int64)
        return Stream(np.arange(starts[-1], dtype=np.uint32), starts)

    return (Corpus("made", stream(lengths), stream(held or []), 0, "", 2.0),)


@pytest.mark.parametrize(
    "sizes", [range(1, 130), [1000, 4095, 4096, 4097, 20011]]
)
def test_the_order_of_an_epoch_is_a_permutation_of_any_size(
    sizes: list[int],
) -> None:
    for size in sizes:
        order = Permutation(size, 7, 3)
        assert sorted(order[n] for n in range(size)) == list(range(size)), size


def test_every_epoch_and_seed_has_an_order_of_its_own_and_always_the_same() -> (
    None
):
    orders = {
        (seed, epoch): tuple(
            Permutation(200, seed, epoch)[n] for n in range(200)
        )
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(set(orders.values())) == 16
    assert orders[1, 2] == tuple(Permutation(200, 1, 2)[n] for n in range(200))


def test_neighbours_do_not_stay_together_and_every_place_is_about_as_likely() -> (
    None
):
    size, epochs = 12, 3000
    counts = np.zeros((size, size))
    close = 0
    for epoch in range(epochs):
        order = [Permutation(size, 0, epoch)[n] for n in range(size)]
        counts[range(size), order] += 1
        close += sum(b - a == 1 for a, b in pairwise(order))
    # Chi-square with 121 degrees of freedom exceeds 200 less than once in 100,000 orders.
    expected = epochs / size
    assert ((counts - expected) ** 2 / expected).sum() < 200
    assert close / epochs == pytest.approx((size - 1) / size, abs=0.1)


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_an_epoch_shows_every_sequence_once_for_any_number_of_ranks(
    batch: int, ranks: int
) -> None:
    batches = Batches(corpus_of([100, 53]), 8, batch, masks=False)
    assert batches.sequences == 19
    seen = []
    for step in range(19):  # as many epochs as the batch has sequences
        whole = batches.batch(step)["tokens"]
        own = [
            batches.batch(step, share(batch, ranks, rank))["tokens"]
            for rank in range(ranks)
        ]
        assert torch.equal(torch.cat(own), whole)
        seen += whole[:, 0].tolist()
    for epoch in range(batch):
        assert sorted(seen[19 * epoch : 19 * epoch + 19]) == [
            8 * n for n in range(19)
        ]


def test_a_run_goes_on_behind_what_was_taken_in_another_batch_size() -> None:
    one = Batches(corpus_of([400]), 4, 6, seed=3)
    other = Batches(corpus_of([400]), 4, 10, seed=3).resumed(5, one.cursor(5))
    assert other.cursor(5) == 30
    stream = torch.cat([one.batch(step)["tokens"] for step in range(5, 10)])
    assert torch.equal(
        torch.cat([other.batch(step)["tokens"] for step in (5, 6, 7)]), stream
    )


def order_by_hand(size: int, seed: int, epoch: int) -> list[int]:
    """The order of an epoch, written a second time: eight Feistel rounds over an even number of
    bits with SplitMix64's finalizer, keys from SHA-512, numbers that are too large sent on."""
    bits = max(1, math.ceil(math.log2(size) / 2)) if size > 1 else 1
    digest = hashlib.sha512(f"order:{seed}:{epoch}".encode()).hexdigest()
    keys = [int(digest[n : n + 16], 16) for n in range(0, 128, 16)]

    def mixed(x: int) -> int:
        for shift, factor in (
            (30, 0xBF58476D1CE4E5B9),
            (27, 0x94D049BB133111EB),
        ):
            x = (x ^ (x >> shift)) * factor % 2**64
        return x ^ (x >> 31)

    def sent(number: int) -> int:
        high, low = divmod(number, 2**bits)
        for key in keys:
            high, low = low, high ^ (mixed(low ^ key) % 2**bits)
        number = high * 2**bits + low
        return number if number < size else sent(number)

    return [sent(number) for number in range(size)]


def firsts(batches: Batches, steps: range) -> list[int]:
    """Which sequences these steps show, in their order: token n of the stream is n."""
    tokens = torch.cat([batches.batch(step)["tokens"][:, 0] for step in steps])
    return [int(token) // batches.sequence for token in tokens]


@pytest.mark.parametrize(
    "tokens, batch", [(77, 3), (77, 19), (150, 7), (13, 5), (6, 4)]
)
@pytest.mark.parametrize("seed", [0, 9])
def test_each_epoch_shows_its_sequences_in_its_own_order(
    tokens: int, batch: int, seed: int
) -> None:
    batches = Batches(corpus_of([tokens]), 4, batch, seed=seed, masks=False)
    total = math.ceil((tokens - 1) / 4)
    assert batches.sequences == total
    epochs = [order_by_hand(total, seed, epoch) for epoch in range(6)]
    assert total < 5 or len(set(map(tuple, epochs))) == 6
    wanted = [number for epoch in epochs for number in epoch]
    steps = range(len(wanted) // batch)
    assert firsts(batches, steps) == wanted[: len(steps) * batch]


@pytest.mark.parametrize("before", range(1, 8))
@pytest.mark.parametrize("after", range(1, 8))
@pytest.mark.parametrize("at", [1, 2, 3, 5, 11])
def test_a_run_in_another_batch_size_shows_exactly_what_would_have_come_next(
    before: int, after: int, at: int
) -> None:
    """Also where the new size does not divide what was taken, and past the end of an epoch."""
    one = Batches(corpus_of([100]), 4, before, seed=3, masks=False)
    taken = one.cursor(at)
    assert taken == at * before
    wanted = [n for epoch in range(8) for n in order_by_hand(25, 3, epoch)]
    other = Batches(corpus_of([100]), 4, after, seed=3, masks=False).resumed(
        at, taken
    )
    steps = range(at, at + 5)
    assert [other.cursor(step) for step in steps] == [
        taken + n * after for n in range(5)
    ]
    assert firsts(other, steps) == wanted[taken : taken + 5 * after]
    # A part of the rows is the same part.
    some = other.batch(at + 1, slice(after // 2, after))["tokens"]
    assert torch.equal(some, other.batch(at + 1)["tokens"][after // 2 :])
    # And once more, from where that one got to.
    third = Batches(corpus_of([100]), 4, 5, seed=3, masks=False).resumed(
        at + 5, other.cursor(at + 5)
    )
    first = taken + 5 * after
    assert firsts(third, range(at + 5, at + 7)) == wanted[first : first + 10]


def test_a_run_that_goes_on_with_another_batch_size_takes_the_sequences_that_come_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []  # the number of every sequence that was trained on
    stacked = Batches._stacked

    def recorded(
        self: Batches, taken: Sequence[tuple[Sequences, int] | None]
    ) -> dict[str, torch.Tensor]:
        train = self.corpora[0].train
        seen.extend(
            place[1] for place in taken if place and place[0].stream is train
        )
        return stacked(self, taken)

    monkeypatch.setattr(Batches, "_stacked", recorded)
    out = tmp_path / "run"
    trained(small(out, "steps=3", "batch=6", "seed=2"), "")
    trained(small(out, "steps=5", "batch=4", "seed=2"), "")
    trained(small(out, "steps=6", "batch=7", "seed=2"), "")
    total = Batches((open_library(),), 18, 1).sequences
    assert seen == order_by_hand(total, 2, 0)[: 18 + 8 + 7]
    progress = read_manifest(out / "checkpoints" / "step-00000006")
    assert (progress.step, progress.cursor) == (6, 33)


def test_no_document_is_learned_across_its_end() -> None:
    """Tokens, targets, positions and documents of every sequence, against the stream in words."""
    lengths = [3, 1, 0, 9, 5, 2, 1]
    edges = np.concatenate(([0], np.cumsum(lengths)))
    document = np.repeat(np.arange(len(lengths)), lengths)
    batches = Batches(corpus_of(lengths), 4, 6)
    batch = batches.batch(0)
    assert batches.sequences == 5
    seen = set()
    for tokens, targets, positions, documents in zip(
        *(batch[k].tolist() for k in batch), strict=True
    ):
        first = tokens[0]
        for place, token in enumerate(tokens):
            if documents[place] == -1:
                assert (token, targets[place], positions[place]) == (
                    0,
                    -100,
                    0,
                )
                continue
            assert documents[place] == document[token]
            last = token + 1 == edges[document[token] + 1]
            assert targets[place] == (-100 if last else token + 1)
            assert positions[place] == token - max(
                first, edges[document[token]]
            )
            seen.add(token)
    assert seen == set(range(20))


def test_without_masks_text_flows_on() -> None:
    batch = Batches(corpus_of([3, 4, 6]), 4, 3, masks=False).batch(0)
    assert "documents" not in batch
    assert sorted(batch["targets"].flatten().tolist()) == list(range(1, 13))
    assert batch["positions"].tolist() == [[0, 1, 2, 3]] * 3


def test_documents_are_looked_up_only_where_a_batch_has_them() -> None:
    class Counting(Stream):
        lookups = 0

        def read_documents(self, start: int, stop: int) -> NDArray[np.int64]:
            Counting.lookups += 1
            return super().read_documents(start, stop)

    (corpus,) = corpus_of([5, 9, 30])
    counting = Counting(corpus.train.tokens, corpus.train.starts)
    corpora = (replace(corpus, train=counting),)
    found = Batches(corpora, 8, 3, masks=False).batch(0)
    assert "documents" not in found
    assert Counting.lookups == 0
    masked = Batches(corpora, 8, 3, masks=True).batch(0)
    assert Counting.lookups == 3  # one for each row
    assert found["tokens"].equal(masked["tokens"])


def test_the_held_out_part_is_read_whole_in_one_order() -> None:
    batches = Batches(corpus_of([40], [5, 9]), 4, 3, masks=False)
    assert batches.validations == 2
    found = [batches.validation(n) for n in range(2)]
    targets = torch.cat([b["targets"].flatten() for b in found])
    assert targets[targets >= 0].tolist() == list(range(1, 14))
    assert found[1][
        "documents" if "documents" in found[1] else "targets"
    ].shape == (
        3,
        4,
    )
    assert torch.equal(
        batches.validation(1, slice(1, 3))["tokens"], found[1]["tokens"][1:]
    )
    with pytest.raises(DataError, match="no validation batch 2 of 2"):
        batches.validation(2)


def test_bits_per_byte_do_not_depend_on_the_tokenizer() -> None:
    assert Batches(corpus_of([9], [4]), 2, 1).bits_per_byte(
        2 * np.log(2)
    ) == pytest.approx(1.0)


def test_the_library_is_there_and_a_part_of_it_is_held_out() -> None:
    library = open_library()
    total = library.train.size + library.validation.size
    assert total > 1_000_000
    assert 0.01 < library.validation.size / total < 0.12
    batch = Batches((library,), 64, 4, vocab=256).batch(5)
    text = bytes(batch["tokens"][0].tolist()) + bytes(
        [max(0, int(batch["targets"][0, -1]))]
    )
    assert text[:-1] in bytes(library.train.tokens)


def test_tokens_that_the_model_does_not_know_are_refused() -> None:
    with pytest.raises(
        DataError, match=r"holds the token \d+; the vocabulary is 0 to 9"
    ):
        list(map(Batches(corpus_of([40]), 4, 2, vocab=10).batch, range(9)))
    with pytest.raises(
        DataError, match="a vocabulary of 256, but the model's is 100"
    ):
        Batches((open_library(),), 4, 2, vocab=100)
    with pytest.raises(DataError, match="sequence=0"):
        Batches(corpus_of([40]), 0, 2)


# ---- several corpora


@pytest.mark.parametrize(
    "weights", [(7, 3), (1, 1), (5, 0, 2), (1, 10, 100, 1000), (3,), (2, 2, 2)]
)
def test_sequences_of_several_corpora_are_merged_by_their_times(
    weights: tuple[int, ...],
) -> None:
    """Number j of a corpus stands at (2j + 1) / 2 of its weight: all of them, sorted."""
    times = sorted(
        (Fraction(2 * j + 1, 2 * weight), which, j)
        for which, weight in enumerate(weights)
        if weight
        for j in range(weight * 3)
    )
    wanted = [(which, j) for _, which, j in times]
    assert [shared_out(n, weights) for n in range(len(wanted))] == wanted
    # Each whole period has each corpus as often as its weight says.
    period = [which for which, _ in wanted[: sum(weights)]]
    assert [period.count(which) for which in range(len(weights))] == list(
        weights
    )


def corpora_of(*sizes: int, weights: tuple[int, ...]) -> tuple[Corpus, ...]:
    """Of corpus c token n is 1000 c + n, and as many more are held out."""
    made = []
    for which, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        first = Stream(
            np.arange(1000 * which, 1000 * which + size), np.array([0, size])
        )
        second = Stream(
            np.arange(1000 * which, 1000 * which + size // 2),
            np.array([0, size // 2]),
        )
        made.append(
            Corpus(f"c{which}", first, second, 0, str(which), 1.0, weight)
        )
    return tuple(made)


@pytest.mark.parametrize("weights", [(7, 3, 2), (0, 0, 0)])
def test_a_mixed_run_shows_each_corpus_in_its_own_order_and_share(
    weights: tuple[int, ...],
) -> None:
    # 10, 20 and 40 sequences.
    corpora = corpora_of(41, 81, 161, weights=weights)
    batches = Batches(corpora, 4, 6, seed=5)
    tokens = torch.cat(
        [batches.batch(step)["tokens"][:, 0] for step in range(35)]
    ).tolist()
    shares = weights if sum(weights) else (10, 20, 40)
    for which, (total, weight) in enumerate(
        zip((10, 20, 40), shares, strict=True)
    ):
        seen = [
            (token % 1000) // 4 for token in tokens if token // 1000 == which
        ]
        assert abs(len(seen) - 210 * weight / sum(shares)) <= 1.5
        orders = [
            n for epoch in range(20) for n in order_by_hand(total, 5, epoch)
        ]
        assert seen == orders[: len(seen)]
    # A rank's rows, and a run that goes on in another batch size, are the same sequences.
    rows = [batches.batch(9, share(6, 4, rank))["tokens"] for rank in range(4)]
    assert torch.equal(torch.cat(rows), batches.batch(9)["tokens"])
    other = replace(batches, size=5).resumed(3, batches.cursor(3))
    again = torch.cat(
        [other.batch(step)["tokens"][:, 0] for step in range(3, 9)]
    )
    assert again.tolist() == tokens[18:48]


def test_held_out_parts_of_several_corpora_are_read_whole_and_mixed() -> None:
    batches = Batches(corpora_of(41, 81, 161, weights=(1, 1, 1)), 4, 6)
    found = [batches.validation(n) for n in range(batches.validations)]
    targets = torch.cat([batch["targets"].flatten() for batch in found])
    wanted = [
        1000 * c + n
        for c, size in enumerate((20, 40, 80))
        for n in range(1, size)
    ]
    assert sorted(targets[targets >= 0].tolist()) == wanted
    assert {int(token) // 1000 for token in found[0]["tokens"][:, 0]} == {
        0,
        1,
        2,
    }
    assert batches.bits_per_byte(math.log(2)) == pytest.approx(1.0)


def test_a_mixed_run_goes_on_to_the_bit_and_is_alike_in_every_layout(
    tmp_path: Path,
) -> None:
    """Four steps at once, and two and two in another layout."""
    paths = []
    for name in ("a", "b"):
        path = tmp_path / f"{name}.bin"
        np.random.default_rng(ord(name)).integers(0, 200, 4000).astype(
            "<u2"
        ).tofile(path)
        paths.append(str(path))
    data = f"data={paths[0]}:0.7, {paths[1]}:0.3"
    more = (data, "checkpoint.every=1", "precision=fp64")
    trained(small(tmp_path / "whole", "steps=4", *more), "dp2 fp64")
    trained(
        small(
            tmp_path / "parts", "steps=2", *more, "optimizer.schedule=constant"
        ),
        "dp2 fp64",
    )
    trained(
        small(
            tmp_path / "again", "steps=4", *more, "optimizer.schedule=constant"
        ),
        "dp2 fp64",
    )
    trained(
        small(
            tmp_path / "parts", "steps=4", *more, "optimizer.schedule=constant"
        ),
        "dp2 fp64",
    )
    assert weights(tmp_path / "parts", 4) == weights(tmp_path / "again", 4)
    seen = losses(tmp_path / "whole")
    trained(small(tmp_path / "other", "steps=4", *more), "pp2 cp2 fp64")
    for step, loss in losses(tmp_path / "other").items():
        assert float.fromhex(loss) == pytest.approx(
            float.fromhex(seen[step]), rel=1e-11
        )


# ---- packing


def test_best_fit_puts_the_longest_first_into_the_fullest_row_with_room() -> (
    None
):
    # Johnson 1974: sorted 7 6 5 3 2 2 1 in rows of 8; 1 fits beside 7 exactly, 2 beside 6.
    assert best_fit([2, 7, 5, 1, 6, 2, 3], 8) == [[1, 3], [4, 0], [2, 6], [5]]


@pytest.mark.parametrize("room", [5, 8, 13])
def test_best_fit_needs_as_many_rows_as_a_search_through_all_of_them(
    room: int,
) -> None:
    lengths = np.random.default_rng(room).integers(1, room + 1, 300).tolist()
    # in each row; rows with as much left are as good as each other
    left: list[int] = []
    for length in sorted(lengths, reverse=True):
        space = min((x for x in left if x >= length), default=room)
        if space in left and space >= length:
            left.remove(space)
        left.append(space - length)
    rows = best_fit(lengths, room)
    assert sorted(
        room - sum(lengths[n] for n in row) for row in rows
    ) == sorted(left)
    assert sorted(n for row in rows for n in row) == list(range(300))


@pytest.mark.parametrize("packing", ["bfd", "none"])
def test_whole_documents_stand_in_sequences_and_long_ones_are_cut(
    packing: str,
) -> None:
    lengths = [3, 1, 9, 5, 2, 0, 4, 6]
    starts = np.concatenate(([0], np.cumsum(lengths)))
    batches = Batches(corpus_of(lengths), 6, 1, packing=packing)
    assert batches.notices == [
        "made: 1 of 8 documents are longer than sequence = 6 and are cut there"
    ]
    seen = []
    for step in range(batches.sequences):
        batch = {
            name: x[0].tolist() for name, x in batches.batch(step).items()
        }
        places = [n for n in range(6) if batch["documents"][n] != -1]
        documents = sorted({batch["documents"][n] for n in places})
        assert len(documents) == 1 or packing == "bfd"
        for document in documents:
            own = [n for n in places if batch["documents"][n] == document]
            kept = min(6, lengths[document])
            tokens = list(range(starts[document], starts[document] + kept))
            assert [batch["tokens"][n] for n in own] == tokens
            assert [batch["positions"][n] for n in own] == list(range(kept))
            follows = [
                t + 1 if t + 1 < starts[document + 1] else -100 for t in tokens
            ]
            assert [batch["targets"][n] for n in own] == follows
            seen.append(document)
    assert sorted(seen) == [0, 2, 3, 4, 6, 7]
    assert batches.sequences == {"none": 6, "bfd": 5}[packing]
