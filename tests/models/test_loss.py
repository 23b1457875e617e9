"""The loss that keeps no second matrix of logits, against torch's own."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.comm import World
from phalanx.comm.launch import launch
from phalanx.cost import Live
from phalanx.cost.pieces import piece_costs
from phalanx.cost.scales import Scales
from phalanx.layout import Layout, Shape
from phalanx.layout.rules import Cut
from phalanx.models import loss as chunked
from phalanx.models import token_loss
from phalanx.models.ends import Head
from phalanx.models.loss import EVERY_WORD, ChunkedLogits, Words, soft_cap
from phalanx.parallel import VocabularyCrossEntropy, build_model
from phalanx.parallel.tensor import words_of
from phalanx.planner.corrections import (
    LOGITS_CHUNK,
    LOSSES,
    PieceWork,
    Software,
    Tokens,
    makes_loss,
)
from phalanx.planner.profile import SoftwareProfile
from phalanx.program import PieceCost

WORDS = 37


def case(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = (
        torch.randn(3, 20, WORDS, generator=generator, dtype=torch.float64).to(
            dtype
        )
        * 4
    )
    targets = torch.randint(0, WORDS, (3, 20), generator=generator)
    targets[:, ::7] = -100
    return logits, targets


def by_torch(
    logits: Tensor, targets: Tensor, z: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The loss and the gradient of the logits, times 0.3."""
    x = logits.clone().requires_grad_()
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    loss = F.cross_entropy(
        wide.flatten(0, 1), targets.flatten(), reduction="sum"
    )
    loss = loss + z * wide.logsumexp(-1)[targets != -100].square().sum()
    loss.backward(torch.tensor(0.3, dtype=loss.dtype))
    assert x.grad is not None
    return loss.detach(), x.grad


def by_chunks(
    logits: Tensor, targets: Tensor, z: float = 0.0
) -> tuple[Tensor, Tensor]:
    x = logits.clone().requires_grad_()
    loss = token_loss(x * 1, targets, z=z)
    loss.backward(torch.tensor(0.3, dtype=loss.dtype))
    assert x.grad is not None
    return loss.detach(), x.grad


@pytest.mark.parametrize("rows", [1, 7, 60, 1000])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16]
)
@pytest.mark.parametrize("z", [0.0, 0.1])
def test_loss_and_gradient_are_those_of_torch(
    z: float, dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "NUMBERS", {"cpu": rows * WORDS})
    due, came = by_torch(*case(dtype), z), by_chunks(*case(dtype), z)
    assert came[0].dtype == due[0].dtype
    assert came[1].dtype == dtype
    bound = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3}[
        dtype
    ]
    torch.testing.assert_close(
        came[0], due[0], rtol=min(bound, 1e-6), atol=0.0
    )
    torch.testing.assert_close(came[1], due[1], rtol=bound, atol=bound / 10)


def test_a_batch_without_a_valid_target_has_no_loss_and_no_gradient() -> None:
    logits, targets = case(torch.float64)
    loss, gradient = by_chunks(logits, torch.full_like(targets, -100))
    assert loss == 0
    assert not gradient.any()


def cut(
    world: World, edges: tuple[int, ...], padded: int
) -> tuple[Tensor, Tensor]:
    """The loss and this rank's part of the gradient, its words at the edges and then padding."""
    logits, targets = case(torch.float64)
    start, stop = edges[world.rank], edges[world.rank + 1]
    mine = torch.full(
        (*logits.shape[:2], padded), float("nan"), dtype=logits.dtype
    )
    mine[..., : stop - start] = logits[..., start:stop]
    mine.requires_grad_()
    group = world.split("tp", [range(world.size)])
    words = words_of(Cut(start, stop, stop - start), group)
    loss = VocabularyCrossEntropy(words)(mine * 1, targets)
    loss.backward(torch.tensor(0.3, dtype=loss.dtype))
    assert mine.grad is not None
    assert not mine.grad[..., stop - start :].nan_to_num(0.0).any()
    return loss.detach(), mine.grad[..., : stop - start]


@pytest.mark.parametrize("edges", [(0, 19, 37), (0, 37, 37), (0, 5, 30, 37)])
def test_a_cut_vocabulary_has_the_same_loss_and_gradient(
    edges: tuple[int, ...],
) -> None:
    due = by_torch(*case(torch.float64))
    came = launch(cut, len(edges) - 1, edges, 40, backend="threads")
    for loss, _ in came:
        torch.testing.assert_close(loss, due[0], rtol=1e-14, atol=0.0)
    whole = torch.cat([gradient for _, gradient in came], -1)
    torch.testing.assert_close(whole, due[1], rtol=1e-13, atol=1e-15)


def test_float32_logits_are_never_there_as_a_whole() -> None:
    x = torch.randn(512, 8192, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 8192, (512,))
    with Live() as live:
        logits = x * 1
        before = live.now
        token_loss(logits, targets).backward()
    # The logits, a chunk or two in float32, and the gradient of x, which is the logits' own storage.
    assert live.most - before < 3 * 4 * chunked.NUMBERS["cpu"]


def test_a_second_backward_is_refused() -> None:
    logits, targets = case(torch.float64)
    x = logits.requires_grad_()
    loss = token_loss(x * 1, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def counted(device: str) -> tuple[int, float, float]:
    """The most bytes alive, bytes moved and kernels of a loss and its backward."""
    x = torch.randn(60, 50).to(device, torch.bfloat16).requires_grad_()
    targets = torch.zeros(60, dtype=torch.long, device=device)
    with Scales([], {}) as scales, scales.on("loss"):
        token_loss(x * 1, targets).backward()
    load = scales.load("loss")
    return scales.most, load.moved, load.launches


def test_on_meta_all_rows_cost_what_their_chunks_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One chunk there stands for all: as many bytes alive and moved, with a tenth of the operations."""
    monkeypatch.setattr(
        chunked, "NUMBERS", dict.fromkeys(("cpu", "meta"), 3 * 50)
    )
    most, moved, launches = counted("cpu")
    most_on_meta, moved_on_meta, launches_on_meta = counted("meta")
    assert most_on_meta == pytest.approx(most, rel=0.05)
    assert moved_on_meta == pytest.approx(moved, rel=0.01)
    assert launches_on_meta < launches / 5


def test_what_a_price_takes_as_our_loss_is_what_it_moves() -> None:
    """Of a logit in 16 bits: a float32 copy (6 bytes) and its softmax (8), forward and backward; then
    that times the token's share (8), and written over the logit (6)."""
    tokens, words = 4096, 4096
    x = torch.empty(
        tokens, words, dtype=torch.bfloat16, device="meta", requires_grad=True
    )
    targets = torch.empty(tokens, dtype=torch.long, device="meta")
    with Scales([], {}) as scales:
        with scales.on("logits"):
            logits = x * 1
        with scales.on("forward"):
            loss = token_loss(logits, targets)
        with scales.on("backward"):
            torch.autograd.grad(loss, logits)
    each = [
        scales.load(name).moved / logits.numel()
        for name in ("forward", "backward")
    ]
    assert each == pytest.approx([6 + 8, 6 + 8 + 8 + 6], rel=1e-2)
    assert each == pytest.approx(
        [LOSSES["over"].forward, LOSSES["over"].backward], rel=1e-2
    )


HIDDEN = 6


class ByChunks(NamedTuple):
    """The results of a loss of `ChunkedLogits`."""

    losses: Tensor
    into: Tensor  # the gradient of the hidden states
    weight: Tensor  # that of the weight
    most: float  # bytes


def head(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Hidden states (tokens, hidden) of the case's targets, and a weight."""
    tokens = case(dtype)[1].numel()
    both = drawn(tokens + WORDS, HIDDEN).to(dtype)
    return both[:tokens], both[tokens:]


def drawn(*shape: int) -> Tensor:
    """Random numbers, the same on every rank."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def of_head(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    shares: Tensor | None,
    *,
    words: Words = EVERY_WORD,
    cap: float = 0.0,
    z: float = 0.0,
) -> ByChunks:
    """The summed loss of a head, or with `shares` its tokens' losses, and the gradients."""
    x, weight = x.clone().requires_grad_(), nn.Parameter(weight.clone())
    summed = torch.zeros_like(weight.detach())

    def contribute(a: Tensor, b: Tensor, rows: slice = slice(None)) -> None:
        summed[rows].addmm_(a, b)

    logits = soft_cap(ChunkedLogits(x, weight, contribute), cap)
    with Live() as live:
        before = live.now
        if shares is None:
            losses = token_loss(logits, targets, words, z)
            losses.backward(torch.tensor(0.3, dtype=losses.dtype))
        else:
            losses = chunked.token_losses(logits, targets, words, z)
            losses.backward(shares)
    assert x.grad is not None
    return ByChunks(losses.detach(), x.grad, summed, live.most - before)


def of_plain_head(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    shares: Tensor | None,
    cap: float,
    z: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same by plain torch: losses, and the gradients of x and the weight."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    logits = x @ weight.mT
    if cap:
        logits = cap * torch.tanh(logits / cap)
    losses = F.cross_entropy(logits, targets, reduction="none")
    squares = logits.logsumexp(-1).square() * (targets != -100)
    losses = losses + z * squares
    if shares is None:
        losses = losses.sum()
        shares = torch.tensor(0.3, dtype=losses.dtype)
    losses.backward(shares)
    assert x.grad is not None
    assert weight.grad is not None
    return losses.detach(), x.grad, weight.grad


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("cap", [0.0, 1.5])
@pytest.mark.parametrize("z", [0.0, 0.1])
@pytest.mark.parametrize("tokens", [1, 7, 1000])
def test_a_head_without_logits_has_the_loss_and_gradients_of_torch(
    tokens: int,
    z: float,
    cap: float,
    each: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sum of the losses, and the loss of each token, whose gradients differ."""
    monkeypatch.setattr(chunked, "CHUNK", {"cpu": tokens * WORDS})
    monkeypatch.setattr(chunked, "NUMBERS", {"cpu": 3 * WORDS})
    x, weight = head(torch.float64)
    targets = case(torch.float64)[1].flatten()
    shares = drawn(len(targets)) if each else None
    due = of_plain_head(x, weight, targets, shares, cap, z)
    came = of_head(x, weight, targets, shares, cap=cap, z=z)
    for mine, theirs in zip(came[:3], due, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)


def cut_head(world: World, each: bool) -> ByChunks:
    """A head on one of the ranks that share its vocabulary, in chunks of five tokens."""
    x, weight = head(torch.float64)
    targets = case(torch.float64)[1].flatten()
    edges = (0, 19, WORDS)
    start, stop = edges[world.rank : world.rank + 2]
    padded = torch.full((20, HIDDEN), 7.0, dtype=x.dtype)
    padded[: stop - start] = weight[start:stop]
    group = world.split("tp", [range(world.size)])
    words = words_of(Cut(start, stop, stop - start), group)
    shares = drawn(len(targets)) if each else None
    came = of_head(x, padded, targets, shares, words=words, cap=1.5, z=0.1)
    assert not came.weight[stop - start :].any()
    return came._replace(weight=came.weight[: stop - start])


@pytest.mark.parametrize("each", [False, True])
def test_a_head_without_logits_may_have_a_cut_vocabulary(
    each: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "CHUNK", {"cpu": 5 * 20})
    x, weight = head(torch.float64)
    targets = case(torch.float64)[1].flatten()
    shares = drawn(len(targets)) if each else None
    losses, into, of_weight = of_plain_head(
        x, weight, targets, shares, cap=1.5, z=0.1
    )
    came = launch(cut_head, 2, each, backend="threads")
    for rank in came:
        torch.testing.assert_close(rank.losses, losses, rtol=1e-13, atol=0.0)
    # Every rank has a part of the gradient of x, by its own words.
    both = came[0].into + came[1].into
    torch.testing.assert_close(both, into, rtol=1e-12, atol=1e-13)
    whole = torch.cat([rank.weight for rank in came])
    torch.testing.assert_close(whole, of_weight, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("each", [False, True])
def test_a_head_without_logits_may_have_its_words_in_parts(
    each: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = 4
    x, weight = head(torch.float64)
    weight = weight[: WORDS // parts * parts]
    monkeypatch.setattr(chunked, "CHUNK", {"cpu": 5 * len(weight)})
    targets = case(torch.float64)[1].flatten()
    targets[targets >= len(weight)] = chunked.IGNORED
    shares = drawn(len(targets)) if each else None
    due = of_plain_head(x, weight, targets, shares, cap=1.5, z=0.1)
    words = Words(
        agree=lambda x, op: None,
        width=len(weight),
        parts=parts,
        all_parts=parts,
        add=lambda terms: torch.stack([*terms]).sum(0),
    )
    came = of_head(x, weight, targets, shares, words=words, cap=1.5, z=0.1)
    for mine, theirs in zip(came[:3], due, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("each", [False, True])
def test_a_head_holds_one_chunk_of_logits_at_most(
    each: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, tokens, hidden, count = 8192, 512, 4, 16
    monkeypatch.setattr(chunked, "CHUNK", {"cpu": count * words})
    monkeypatch.setattr(chunked, "NUMBERS", {"cpu": 2 * words})
    x = torch.randn(tokens, hidden)
    weight = torch.randn(words, hidden)
    targets = torch.randint(0, words, (tokens,))
    shares = torch.ones(tokens) if each else None
    most = of_head(x, weight, targets, shares).most
    # float32: a chunk and the tile of it; the whole logits would take 16 MB.
    assert 4 * count * words < most < 4 * (count + 8) * words


def test_a_loss_that_needs_no_gradient_has_its_value_at_once() -> None:
    x, weight = head(torch.float64)
    targets = case(torch.float64)[1].flatten()
    logits = ChunkedLogits(x, nn.Parameter(weight), None)
    loss = token_loss(logits, targets)
    due = F.cross_entropy(x @ weight.mT, targets, reduction="sum")
    torch.testing.assert_close(loss.detach(), due, rtol=1e-13, atol=0.0)


def test_a_price_takes_the_chunk_that_a_gpu_has() -> None:
    assert chunked.LARGE_CHUNK == LOGITS_CHUNK


@pytest.mark.parametrize("text", ["", "pp2 zb-h1:4", "tp2 seq pp2 zb-h1:4"])
def test_a_price_of_whole_logits_is_the_cost_of_a_head_that_has_them(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = replace(Shape.load("8b"), layers=2)
    layout, tokens = Layout.parse(f"{text} bf16"), 8192

    def cost() -> PieceCost:
        model = build_model(shape)
        return piece_costs(model, layout, 1, sequence=tokens)[-1]

    ours = cost()
    monkeypatch.setattr(Head, "by_chunks", "")
    due = cost()
    software = Software(SoftwareProfile(loss="over"), layout)
    of = Tokens(shape, float(tokens), layout)
    came = makes_loss(PieceWork(ours), software, of).cost
    assert due.kept - ours.kept > 1e9
    assert came.kept == pytest.approx(due.kept, rel=0.01)
    assert came.kept_after_i == pytest.approx(due.kept_after_i, rel=0.01)
    assert came.temporary == pytest.approx(due.temporary, rel=0.2)
    for mine, theirs in (
        (came.forward, due.forward),
        (came.input_gradient, due.input_gradient),
        (came.weight_gradient, due.weight_gradient),
        (came.recompute, due.recompute),
    ):
        assert mine.flops == theirs.flops
        assert mine.messages == theirs.messages
        assert mine.moved == pytest.approx(theirs.moved, rel=0.05)
