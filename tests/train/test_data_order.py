"""The order of sequences and the batches cut by it, against lists written out."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from phalanx.parallel import share
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
