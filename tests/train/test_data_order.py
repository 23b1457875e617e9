"""The order of sequences and the batches cut by it, against lists written out."""

from __future__ import annotations

import hashlib
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from loop_worlds import small, trained

from phalanx.parallel import share
from phalanx.train import read_manifest
from phalanx.train.data import Batches, Corpus, DataError, Permutation, Stream, open_library


def corpus_of(lengths: list[int], held: list[int] | None = None) -> Corpus:
    """Token n of the stream is n; documents have these lengths."""

    def stream(of: list[int]) -> Stream:
        starts = np.concatenate(([0], np.cumsum(of))).astype(np.int64)
        return Stream(np.arange(starts[-1], dtype=np.uint32), starts)

    return Corpus("made", stream(lengths), stream(held or []), 0, "", 2.0)


@pytest.mark.parametrize("sizes", [range(1, 130), [1000, 4095, 4096, 4097, 20011]])
def test_the_order_of_an_epoch_is_a_permutation_of_any_size(sizes: list[int]) -> None:
    for size in sizes:
        order = Permutation(size, 7, 3)
        assert sorted(order[n] for n in range(size)) == list(range(size)), size


def test_every_epoch_and_seed_has_an_order_of_its_own_and_always_the_same() -> None:
    orders = {
        (seed, epoch): tuple(Permutation(200, seed, epoch)[n] for n in range(200))
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(set(orders.values())) == 16
    assert orders[1, 2] == tuple(Permutation(200, 1, 2)[n] for n in range(200))


def test_neighbours_do_not_stay_together_and_every_place_is_about_as_likely() -> None:
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
def test_an_epoch_shows_every_sequence_once_for_any_number_of_ranks(batch: int, ranks: int) -> None:
    batches = Batches(corpus_of([100, 53]), 8, batch, masks=False)
    assert batches.sequences == 19
    seen = []
    for step in range(19):  # as many epochs as the batch has sequences
        whole = batches.batch(step)["tokens"]
        own = [batches.batch(step, share(batch, ranks, rank))["tokens"] for rank in range(ranks)]
        assert torch.equal(torch.cat(own), whole)
        seen += whole[:, 0].tolist()
    for epoch in range(batch):
        assert sorted(seen[19 * epoch : 19 * epoch + 19]) == [8 * n for n in range(19)]


def test_a_run_goes_on_behind_what_was_taken_in_another_batch_size() -> None:
    one = Batches(corpus_of([400]), 4, 6, seed=3)
    other = Batches(corpus_of([400]), 4, 10, seed=3).resumed(5, one.cursor(5))
    assert other.cursor(5) == 30
    stream = torch.cat([one.batch(step)["tokens"] for step in range(5, 10)])
    assert torch.equal(torch.cat([other.batch(step)["tokens"] for step in (5, 6, 7)]), stream)


def order_by_hand(size: int, seed: int, epoch: int) -> list[int]:
    """The order of an epoch, written a second time: eight Feistel rounds over an even number of
    bits with SplitMix64's finalizer, keys from SHA-512, numbers that are too large sent on."""
    bits = max(1, math.ceil(math.log2(size) / 2)) if size > 1 else 1
    digest = hashlib.sha512(f"order:{seed}:{epoch}".encode()).hexdigest()
    keys = [int(digest[n : n + 16], 16) for n in range(0, 128, 16)]

    def mixed(x: int) -> int:
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
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


@pytest.mark.parametrize("tokens, batch", [(77, 3), (77, 19), (150, 7), (13, 5), (6, 4)])
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
    other = Batches(corpus_of([100]), 4, after, seed=3, masks=False).resumed(at, taken)
    steps = range(at, at + 5)
    assert [other.cursor(step) for step in steps] == [taken + n * after for n in range(5)]
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

    def recorded(self: Batches, stream: Stream, numbers: list[int]) -> dict[str, torch.Tensor]:
        if stream is self.corpus.train:
            seen.extend(numbers)
        return stacked(self, stream, numbers)

    monkeypatch.setattr(Batches, "_stacked", recorded)
    out = tmp_path / "run"
    trained(small(out, "steps=3", "batch=6", "seed=2"), "")
    trained(small(out, "steps=5", "batch=4", "seed=2"), "")
    trained(small(out, "steps=6", "batch=7", "seed=2"), "")
    total = Batches(open_library(), 18, 1).sequences
    assert seen == order_by_hand(total, 2, 0)[: 18 + 8 + 7]
    progress = read_manifest(out / "checkpoints" / "step-00000006").progress
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
                assert (token, targets[place], positions[place]) == (0, -100, 0)
                continue
            assert documents[place] == document[token]
            last = token + 1 == edges[document[token] + 1]
            assert targets[place] == (-100 if last else token + 1)
            assert positions[place] == token - max(first, edges[document[token]])
            seen.add(token)
    assert seen == set(range(20))


def test_without_masks_text_flows_on() -> None:
    batch = Batches(corpus_of([3, 4, 6]), 4, 3, masks=False).batch(0)
    assert "documents" not in batch
    assert sorted(batch["targets"].flatten().tolist()) == list(range(1, 13))
    assert batch["positions"].tolist() == [[0, 1, 2, 3]] * 3


def test_the_held_out_part_is_read_whole_in_one_order() -> None:
    batches = Batches(corpus_of([40], [5, 9]), 4, 3, masks=False)
    assert batches.validations == 2
    found = [batches.validation(n) for n in range(2)]
    targets = torch.cat([b["targets"].flatten() for b in found])
    assert targets[targets >= 0].tolist() == list(range(1, 14))
    assert found[1]["documents" if "documents" in found[1] else "targets"].shape == (3, 4)
    assert torch.equal(batches.validation(1, slice(1, 3))["tokens"], found[1]["tokens"][1:])
    with pytest.raises(DataError, match="no validation batch 2 of 2"):
        batches.validation(2)


def test_bits_per_byte_do_not_depend_on_the_tokenizer() -> None:
    assert Batches(corpus_of([9]), 2, 1).bits_per_byte(2 * np.log(2)) == pytest.approx(1.0)


def test_the_library_is_there_and_a_part_of_it_is_held_out() -> None:
    library = open_library()
    total = library.train.size + library.validation.size
    assert total > 1_000_000
    assert 0.01 < library.validation.size / total < 0.12
    batch = Batches(library, 64, 4, vocab=256).batch(5)
    text = bytes(batch["tokens"][0].tolist()) + bytes([max(0, int(batch["targets"][0, -1]))])
    assert text[:-1] in bytes(library.train.tokens)


def test_tokens_that_the_model_does_not_know_are_refused() -> None:
    with pytest.raises(DataError, match=r"holds the token \d+; the vocabulary is 0 to 9"):
        list(map(Batches(corpus_of([40]), 4, 2, vocab=10).batch, range(9)))
    with pytest.raises(DataError, match="a vocabulary of 256, the model knows 100"):
        Batches(open_library(), 4, 2, vocab=100)
    with pytest.raises(DataError, match="sequence=0"):
        Batches(corpus_of([40]), 0, 2)
