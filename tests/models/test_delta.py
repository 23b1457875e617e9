"""Gated delta rule layers against the recurrence of the paper, one token after another."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from phalanx.layout.cases import SHAPES
from phalanx.models import delta
from phalanx.models.delta import (
    DeltaCore,
    chunk_terms,
    short_convolution,
    unit_length,
)
from phalanx.parallel.model import decoder_of

B, T, GROUPS, HEADS, KEY, VALUE = 2, 23, 2, 4, 5, 6
# Documents of one token, of several, and one that covers whole chunks.
DOCUMENTS = torch.tensor(
    [[0] * 5 + [1] + [2] * 12 + [3] * 5, [7] * 21 + [8, 7]]
)


def inputs(seed: int = 0) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(seed)
    of = {"generator": draw, "dtype": torch.float64}
    q = torch.randn(B, T, GROUPS, KEY, **of)  # type: ignore[arg-type]
    k = torch.randn(B, T, GROUPS, KEY, **of)  # type: ignore[arg-type]
    v = torch.randn(B, T, HEADS, VALUE, **of)  # type: ignore[arg-type]
    log_decay = -torch.rand(B, T, HEADS, **of)  # type: ignore[arg-type]
    strength = torch.rand(B, T, HEADS, **of)  # type: ignore[arg-type]
    return q, k, v, log_decay, strength


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    strength: Tensor,
    documents: Tensor | None = None,
) -> Tensor:
    """S = a (I - b k k') S + b k v' and S' q, with whole matrices."""
    each = HEADS // GROUPS
    q = unit_length(q).repeat_interleave(each, 2) * KEY**-0.5
    k = unit_length(k).repeat_interleave(each, 2)
    rows = []
    for row in range(B):
        heads = []
        for head in range(HEADS):
            state = torch.zeros(KEY, VALUE, dtype=torch.float64)
            outputs = []
            for t in range(T):
                ids = None if documents is None else documents[row]
                if ids is not None and t and ids[t] != ids[t - 1]:
                    state = torch.zeros_like(state)
                key = k[row, t, head]
                a = log_decay[row, t, head].exp()
                b = strength[row, t, head]
                identity = torch.eye(KEY, dtype=torch.float64)
                state = a * (identity - b * torch.outer(key, key)) @ state
                state = state + b * torch.outer(key, v[row, t, head])
                outputs.append(state.T @ q[row, t, head])
            heads.append(torch.stack(outputs))
        rows.append(torch.stack(heads, 1))
    return torch.stack(rows)


def with_before(documents: Tensor, before: int) -> Tensor:
    """The documents of all tokens and of the tokens before a sequence."""
    core = DeltaCore(KEY, VALUE, 4)
    return core.held_ids(delta.numbered(documents), T, before)


def in_chunks(
    given: tuple[Tensor, ...], chunk: int, ids: Tensor | None
) -> Tensor:
    terms = chunk_terms(*given, ids, chunk)  # type: ignore[arg-type]
    y = terms.outputs(torch.zeros_like(terms.adds[:, :, :, 0]))
    return y.flatten(3, 4).flatten(1, 2)[:, :, :T].transpose(1, 2)


@pytest.mark.parametrize("chunk", [1, 4, 7, 64])
@pytest.mark.parametrize("packed", [False, True])
def test_outputs_and_gradients_in_chunks_are_those_of_the_recurrence(
    chunk: int, packed: bool
) -> None:
    documents = DOCUMENTS if packed else None
    ids = None if documents is None else with_before(documents, 1)
    given = tuple(x.requires_grad_() for x in inputs())
    weight = torch.randn(
        B, T, HEADS, VALUE, generator=torch.Generator().manual_seed(1)
    )
    results = []
    for y in (
        in_chunks(given, chunk, ids),
        recurrence(*given, documents),  # type: ignore[arg-type]
    ):
        gradients = torch.autograd.grad((y * weight).sum(), given)
        results.append((y, *gradients))
    for found, wanted in zip(*results, strict=True):
        assert (found - wanted).abs().max() < 1e-12 * wanted.abs().max()


def test_keys_that_are_all_equal_do_not_lose_digits() -> None:
    q, k, v, log_decay, strength = inputs()
    k = k[:, :1].expand_as(k)
    given = q, k, v, log_decay * 0, strength * 0 + 1
    narrow = tuple(x.float() for x in given)
    found = in_chunks(narrow, 64, None)
    assert (found - recurrence(*given)).abs().max() < 1e-5


def test_the_convolution_is_torchs_and_ends_at_documents() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1, T, 6, generator=draw, dtype=torch.float64)
    taps = torch.randn(6, 4, generator=draw, dtype=torch.float64)
    padded = torch.nn.functional.pad(x, (0, 0, 3, 0))

    def theirs(part: Tensor) -> Tensor:
        length = part.shape[1]
        y = torch.nn.functional.conv1d(
            part.mT, taps.unsqueeze(1), padding=3, groups=6
        )
        return y.mT[:, :length]

    whole = short_convolution(padded, taps, None)
    torch.testing.assert_close(whole, theirs(x), rtol=1e-13, atol=1e-13)
    ids = with_before(DOCUMENTS[:1], 3)
    found = short_convolution(padded, taps, ids)
    lengths = torch.unique_consecutive(DOCUMENTS[0], return_counts=True)[1]
    apart = [theirs(each) for each in x.split(lengths.tolist(), 1)]
    wanted = torch.cat(apart, 1)
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)


def test_a_document_in_a_packed_row_is_the_same_alone() -> None:
    shape = replace(SHAPES["delta"], layers=3, experts=0, shared_experts=0,
                    shared_gate=False, dense_layers=0)  # fmt: skip
    torch.manual_seed(0)
    model = decoder_of(shape).double()
    tokens = torch.randint(0, shape.vocab, (1, T))
    documents = DOCUMENTS[:1]
    bounds = [0, 5, 6, 18, T]
    positions = torch.cat([
        torch.arange(b - a) for a, b in itertools.pairwise(bounds)
    ]).unsqueeze(0)  # fmt: skip
    packed = model(tokens, tokens, documents=documents, positions=positions)
    alone = [
        model(tokens[:, a:b], tokens[:, a:b])
        for a, b in itertools.pairwise(bounds)
    ]
    assert packed.item() == pytest.approx(
        sum(x.item() for x in alone), rel=1e-13
    )


def test_a_core_without_documents_continues_its_state() -> None:
    """The state at the end of a first half is the one at the start of the second."""
    given = inputs()
    halves = [
        tuple(x[:, at] for x in given) for at in (slice(0, 12), slice(12, T))
    ]
    first, second = (chunk_terms(*half, None, 4) for half in halves)  # type: ignore[arg-type]
    moves, adds = first.total()
    states = first.states(torch.zeros_like(adds))
    last = (
        first.moves[:, :, :, -1] @ states[:, :, :, -1]
        + first.adds[:, :, :, -1]
    )
    torch.testing.assert_close(adds, last, rtol=1e-12, atol=1e-12)
    y = second.outputs(adds).flatten(3, 4).flatten(1, 2)[:, :, : T - 12]
    wanted = recurrence(*given)[:, 12:]
    torch.testing.assert_close(
        y.transpose(1, 2), wanted, rtol=1e-12, atol=1e-12
    )
    assert moves.shape == (B, GROUPS, HEADS // GROUPS, KEY, KEY)
    assert DeltaCore(KEY, VALUE, 4).runs == 1
