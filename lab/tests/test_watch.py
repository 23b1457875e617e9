"""What is written down of a rank is true: bytes over groups, bytes held, values, and the reference."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections import Counter

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from phalanx.comm import World, launch
from phalanx.models import DeepMlp
from phalanx_lab.catalogue import Size
from phalanx_lab.lab import Lab, LiveOverTime
from phalanx_lab.mlp import (
    backward,
    batch,
    draw,
    forward,
    gradients_of,
    one_process,
    start,
)
from phalanx_lab.record import compared, value_of
from phalanx_lab.trial import backend_for

SMALL = Size(batch=8, width=16, layers=3, steps=2)


def test_one_process_is_the_model_of_the_house_trained_by_autograd() -> None:
    model = DeepMlp(width=SMALL.width, layers=SMALL.layers).double()
    for layer, weight in zip(model.layers, start(SMALL), strict=True):
        layer.weight.data.copy_(weight)
    loss = model(batch(SMALL, 0)) / SMALL.batch
    loss.backward()
    alone = one_process(SMALL)
    assert loss.item() == pytest.approx(alone.losses[0], rel=1e-14)
    for layer, gradient in zip(model.layers, alone.gradients, strict=True):
        torch.testing.assert_close(
            layer.weight.grad, gradient, rtol=1e-12, atol=1e-18
        )


def test_a_layers_backward_by_hand_is_autograds() -> None:
    x, w, g = (
        draw(1, 5, 4).requires_grad_(),
        draw(2, 4, 4).requires_grad_(),
        draw(3, 5, 4),
    )
    want = torch.autograd.grad(F.gelu(x @ w), (x, w), g)
    _, kept = forward(x.detach(), w.detach())
    for got, wanted in zip(backward(g, kept, w.detach()), want, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-14, atol=1e-15)


def test_training_brings_the_loss_down_so_that_equal_weights_mean_something() -> (
    None
):
    losses = one_process(Size(8, 16, 4, 5)).losses
    assert losses[-1] < 0.5 * losses[0]
    assert (
        gradients_of(start(SMALL), batch(SMALL, 0))[0]
        != gradients_of(start(SMALL), batch(SMALL, 1))[0]
    )


def every_collective(
    world: World,
) -> tuple[Counter[str], Counter[str], float, float]:
    lab = Lab(world, SMALL)
    group = lab.group
    n, rank = world.size, world.rank
    x, big = (
        torch.zeros(8, dtype=torch.float64),
        torch.zeros(8 * n, dtype=torch.float64),
    )
    group.all_reduce(x)
    group.reduce(x, root=1)
    group.broadcast(x, root=1)
    group.all_gather(big, x)
    group.reduce_scatter(x, big)
    group.all_to_all(torch.zeros_like(big), big)
    group.gather(
        [torch.zeros_like(x) for _ in range(n)] if rank == 2 else None,
        x,
        root=2,
    )
    group.scatter(
        x,
        [torch.zeros_like(x) for _ in range(n)] if rank == 2 else None,
        root=2,
    )
    group.barrier()
    group.send(x, to=(rank + 1) % n)
    work = group.receive(x, source=(rank - 1) % n, wait=False)
    work.wait()
    work.wait()  # told once
    kinds: Counter[str] = Counter()
    (step,) = lab.close().steps
    for call, to in step.sent.items():
        assert rank not in to
        kinds[call.split()[0]] += int(sum(to.values()))
    spans = Counter(span.name.split()[0] for span in step.spans)
    return kinds, spans, lab.sent(), lab.received


def test_bytes_are_those_of_sending_straight_to_whom_it_concerns() -> None:
    n, one = 4, 64
    results = launch(every_collective, n, backend="threads")
    for rank, (kinds, spans, sent, _) in enumerate(results):
        want = {
            "all_reduce": 2 * one * (n - 1) // n,
            "reduce": one if rank != 1 else 0,
            "broadcast": one * (n - 1) if rank == 1 else 0,
            "all_gather": one * (n - 1),
            "reduce_scatter": one * (n - 1),
            "all_to_all": one * (n - 1),
            "gather": one if rank != 2 else 0,
            "scatter": one * (n - 1) if rank == 2 else 0,
            "send": one,
        }
        assert kinds == {kind: size for kind, size in want.items() if size}
        assert sent == sum(want.values())
        assert set(spans.values()) == {1}
        assert set(spans) == {*want, "barrier", "receive"}
    assert sum(sent for _, _, sent, _ in results) == sum(
        came for *_, came in results
    )


def test_bytes_held_are_those_of_living_tensors() -> None:
    with LiveOverTime() as live:
        x = torch.zeros(100, dtype=torch.float64)
        assert live.now == 800
        y = x.view(10, 10).T  # the same storage
        z = x + 1
        assert live.now == 1600
        del x
        assert live.now == 1600
        del y, z
        assert live.now == 0
        assert live.most == 1600
        with _disable_current_modes():
            kept = torch.zeros(100)
        assert live.now == 0
        assert kept.sum() == 0
    assert [size for _, size in live.samples][:4] == [800, 1600, 800, 0]


def test_a_value_shows_its_shape_first_numbers_and_the_hash_of_all_bytes() -> (
    None
):
    x = torch.arange(20, dtype=torch.float32).view(4, 5)
    digest = hashlib.blake2b(x.numpy().tobytes(), digest_size=4).hexdigest()
    value = value_of("x", x)
    assert (value.shape, value.first) == ("[4, 5] float32", "0 1 2 3 ...")
    assert (value.hash, value.bytes) == (digest, 80)
    assert value_of("x", x.T).hash != digest
    assert value_of("xs", [x, x]).shape == "2 x [4, 5] float32"
    assert value_of("loss", 0.1234567).first == "0.123457"
    assert value_of("none", []).shape == "nothing"
    assert value_of("one", x[:, 2][1:2]).first == "7"


def test_numbers_far_apart_are_not_equal_and_a_nan_is_never() -> None:
    x = torch.ones(3)
    assert compared("", x, [1, 1, 1]).holds
    assert not compared("", x, [1, 1, 1 + 1e-6]).holds
    assert not compared("", x, [1, 1]).holds
    assert not compared(
        "", torch.tensor([1.0, float("nan")]), torch.ones(2)
    ).holds
    assert not compared("", [1.0], [float("nan")]).holds
    assert not compared("", [1e-300], [0.0]).holds
    assert compared("", [], []).holds
    assert not compared("", "a", "b").holds


def test_under_a_tracer_ranks_become_threads() -> None:
    found: list[str] = []

    def look() -> None:
        sys.settrace(lambda *_: None)
        found.append(backend_for("gloo"))
        sys.settrace(None)
        found.append(backend_for("gloo"))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found[0] == "threads"
    if (
        sys.gettrace() is None
    ):  # a debugger of this test's own traces every thread
        assert found[1] == "gloo"
