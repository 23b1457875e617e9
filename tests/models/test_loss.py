"""The loss that keeps no second matrix of logits, against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from phalanx.comm import World
from phalanx.comm.launch import launch
from phalanx.cost import Live
from phalanx.cost.scales import Scales
from phalanx.layout.rules import Cut
from phalanx.models import loss as chunked
from phalanx.models import token_loss
from phalanx.parallel import VocabularyCrossEntropy
from phalanx.plan.corrections import LOSSES

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
    loss = VocabularyCrossEntropy(Cut(start, stop, stop - start), group)(
        mine * 1, targets
    )
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
