"""Who holds which rows and which tokens of a batch."""

import itertools

import pytest
import torch

from phalanx.layout import Layout
from phalanx.parallel.batch import (
    count_valid,
    held_times,
    microbatches,
    share,
    time_multiple,
)

RINGS, ULYSSES = (1, 2, 3, 4, 8), (1, 2, 4)
LAYOUTS = (
    "", "cp2", "cp3", "cp4:ulysses", "cp4:2x2", "cp6:3x2", "cp8", "dp2 cp2 accum:2", "tp2 seq",
    "tp3 seq cp2", "tp2 seq cp4:2x2", "tp3 seq cp6:2x3", "dp3 cp2 tp2 seq accum:2",
)  # fmt: skip


def _batch(rows: int, length: int) -> dict[str, torch.Tensor]:
    """Each token is its own index in the batch, and every other tensor tells the same."""
    tokens = 1 + torch.arange(rows * length).view(rows, length)
    return {
        "tokens": tokens,
        "targets": tokens + 1000,
        "positions": torch.arange(length).repeat(rows, 1),
        "documents": tokens // 5,
        "noise": tokens * 7,
        "vectors": tokens.unsqueeze(-1) * torch.tensor([1.0, 2.0]),
        "weight": torch.arange(rows) + 0.5,  # of a row, not of a token
    }


def _places(layout: Layout):
    return itertools.product(range(layout.dp), range(layout.cp))


@pytest.mark.parametrize("ring,ulysses", [*itertools.product(RINGS, ULYSSES)])
def test_every_token_is_held_by_one_place_and_places_hold_as_many(
    ring, ulysses
):
    length = 3 * 2 * ring * ulysses
    held = [
        held_times(length, ring, ulysses, cp) for cp in range(ring * ulysses)
    ]
    assert {len(times) for times in held} == {length // (ring * ulysses)}
    assert torch.cat(held).sort().values.tolist() == list(range(length))


@pytest.mark.parametrize("ring", RINGS)
def test_causal_attention_costs_every_place_of_a_ring_the_same(ring):
    length = 2 * ring * 5
    pairs = {
        int((held_times(length, ring, 1, place) + 1).sum())
        for place in range(ring)
    }
    assert pairs == {length * (length + 1) // 2 // ring}


@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("length", (12, 13))
def test_the_shares_of_all_places_are_the_batch(text, length):
    layout, batch = Layout.parse(text), _batch(7, length)
    tokens = [
        part["tokens"].flatten()
        for dp, cp in _places(layout)
        for part in microbatches(batch, layout, dp, cp)
    ]
    real = torch.cat(tokens)
    assert (
        real[real > 0].sort().values.tolist()
        == batch["tokens"].flatten().tolist()
    )


@pytest.mark.parametrize("text", LAYOUTS)
def test_every_tensor_with_a_number_for_each_token_is_cut_alike_but_documents(
    text,
):
    layout, length = Layout.parse(text), 13
    for dp, cp in _places(layout):
        for part in microbatches(_batch(7, length), layout, dp, cp):
            tokens = part["tokens"]
            real = tokens > 0
            expected = {
                "targets": (tokens + 1000).where(real, torch.tensor(-100)),
                "positions": ((tokens - 1) % length).where(
                    real, torch.tensor(0)
                ),
                "noise": tokens * 7,
                "vectors": tokens.unsqueeze(-1) * torch.tensor([1.0, 2.0]),
            }
            for name, x in expected.items():
                assert torch.equal(part[name], x), name
            # Every rank has those of all tokens of its rows: attention asks whose keys it sees.
            first = 1 + (part["weight"] - 0.5).long().unsqueeze(1) * length
            documents = part["documents"]
            assert torch.equal(
                documents[:, :length], (first + torch.arange(length)) // 5
            )
            assert (documents[:, length:] == -1).all()
            assert part["weight"].shape == tokens.shape[:1]
            assert all(x.is_contiguous() for x in part.values())


@pytest.mark.parametrize("text", LAYOUTS)
def test_places_hold_as_many_tokens_which_tp_divides_under_seq(text):
    layout = Layout.parse(text)
    for length in range(8, 40):
        lengths = {
            part["tokens"].shape[1]
            for dp, cp in _places(layout)
            for part in microbatches(_batch(7, length), layout, dp, cp)
        }
        assert len(lengths) == 1
        (own,) = lengths
        assert own % (layout.tp if layout.seq else 1) == 0
        assert own * layout.cp - length in range(time_multiple(layout))


@pytest.mark.parametrize("text", LAYOUTS)
def test_padding_counts_no_target(text):
    layout, batch = Layout.parse(text), _batch(7, 13)
    batch["targets"][2, :5] = -100
    counted = sum(
        count_valid(part)
        for dp, cp in _places(layout)
        for part in microbatches(batch, layout, dp, cp)
    )
    assert counted == count_valid(batch) == 7 * 13 - 5


def test_a_batch_without_tokens_is_cut_in_rows_only():
    layout, batch = (
        Layout.parse("dp2"),
        {"inputs": torch.arange(15.0).view(5, 3)},
    )
    parts = [microbatches(batch, layout, dp)[0]["inputs"] for dp in range(2)]
    assert [len(part) for part in parts] == [3, 2]
    assert torch.equal(torch.cat(parts), batch["inputs"])


@pytest.mark.parametrize("text", LAYOUTS)
def test_rows_that_are_a_place_s_already_are_cut_as_if_they_came_with_the_others(
    text,
):
    layout, batch = Layout.parse(text), _batch(7, 12)
    for dp, cp in _places(layout):
        rows = share(7, layout.dp, dp)
        own = {name: x[rows] for name, x in batch.items()}
        found = microbatches(own, layout, None, cp)
        for one, other in zip(
            found, microbatches(batch, layout, dp, cp), strict=True
        ):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one)
