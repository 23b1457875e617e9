"""Triton kernels of `fused.py`. Import this only where Triton is installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

triton: Any = import_module("triton")
tl: Any = import_module("triton.language")

# Elements per program: of a half in `rotate_kernel`, of a tensor in `gate_kernel`.
_PAIRS, _BLOCK = 1024, 1024
# Words that a program of `loss_kernel` reads at once.
_WORDS = 4096


@triton.jit  # type: ignore[untyped-decorator]
def rotate_kernel(  # type: ignore[no-untyped-def]
    x,
    y,
    cos,
    sin,
    time,
    heads,
    half,
    x_batch,
    x_time,
    x_head,
    y_batch,
    y_time,
    y_head,
    angle_batch,
    angle_time,
    forward: tl.constexpr,
    neighbours: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    # A program rotates some heads of one token.
    token = tl.program_id(0).to(tl.int64)
    batch, at = token // time, token % time
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, HALF)
    column = pair < half
    there = (head < heads)[:, None] & column[None, :]
    angle = batch * angle_batch + at * angle_time + pair
    cos_first = tl.load(cos + angle, mask=column, other=0.0)
    cos_second = tl.load(cos + angle + half, mask=column, other=0.0)
    sin_first = tl.load(sin + angle, mask=column, other=0.0)
    sin_second = tl.load(sin + angle + half, mask=column, other=0.0)
    read = x + batch * x_batch + at * x_time + head[:, None] * x_head
    write = y + batch * y_batch + at * y_time + head[:, None] * y_head
    # The model's own order of features is at the input, and at the output of a backward.
    own_step = 2 if neighbours else 1
    own_second = 1 if neighbours else half
    if forward:
        read_first = read + own_step * pair[None, :]
        read_second = read_first + own_second
        write_first = write + pair[None, :]
        write_second = write_first + half
    else:
        read_first = read + pair[None, :]
        read_second = read_first + half
        write_first = write + own_step * pair[None, :]
        write_second = write_first + own_second
    a = tl.load(read_first, mask=there, other=0.0).to(tl.float32)
    b = tl.load(read_second, mask=there, other=0.0).to(tl.float32)
    if forward:
        first = a * cos_first[None, :] + b * sin_first[None, :]
        second = b * cos_second[None, :] + a * sin_second[None, :]
    else:
        # the transposed rotation
        first = a * cos_first[None, :] + b * sin_second[None, :]
        second = b * cos_second[None, :] + a * sin_first[None, :]
    tl.store(write_first, first.to(y.dtype.element_ty), mask=there)
    tl.store(write_second, second.to(y.dtype.element_ty), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def gate_kernel(gate, up, y, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    g = tl.load(gate + at, mask=there, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=there, other=0.0).to(tl.float32)
    z = g * u / (1.0 + tl.exp(-g))
    tl.store(y + at, z.to(y.dtype.element_ty), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def gate_back_kernel(  # type: ignore[no-untyped-def]
    gate, up, gradient, into_gate, into_up, count, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    g = tl.load(gate + at, mask=there, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=there, other=0.0).to(tl.float32)
    d = tl.load(gradient + at, mask=there, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-g))
    to_gate = d * u * s * (1 + g * (1 - s))
    to_up = d * g * s
    tl.store(
        into_gate + at, to_gate.to(into_gate.dtype.element_ty), mask=there
    )
    tl.store(into_up + at, to_up.to(into_up.dtype.element_ty), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def loss_kernel(  # type: ignore[no-untyped-def]
    logits,
    targets,
    scale,
    losses,
    words,
    row_step,
    ignored,
    BLOCK: tl.constexpr,
):
    # A program reads the logits of one token, and then overwrites them.
    row = tl.program_id(0).to(tl.int64)
    own = logits + row * row_step
    target = tl.load(targets + row)
    most = float("-inf")
    total = 0.0
    chosen = 0.0
    for start in range(0, words, BLOCK):
        word = start + tl.arange(0, BLOCK)
        there = word < words
        x = tl.load(own + word, mask=there, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(most, tl.max(x, 0))
        terms = tl.exp(x - higher)
        total = total * tl.exp(most - higher) + tl.sum(terms, 0)
        most = higher
        # Not a load of its own: another warp may have overwritten the logit by then.
        chosen += tl.sum(tl.where(word == target, x, 0.0), 0)
    log_sum = most + tl.log(total)
    valid = target != ignored
    tl.store(losses + row, tl.where(valid, log_sum - chosen, 0.0))
    factor = tl.where(valid, tl.load(scale).to(tl.float32), 0.0)
    for start in range(0, words, BLOCK):
        word = start + tl.arange(0, BLOCK)
        there = word < words
        x = tl.load(own + word, mask=there, other=float("-inf")).to(tl.float32)
        share = tl.exp(x - log_sum)
        y = factor * (share - tl.where(word == target, 1.0, 0.0))
        tl.store(own + word, y.to(logits.dtype.element_ty), mask=there)


def rotated(
    x: Tensor, cos: Tensor, sin: Tensor, *, neighbours: bool, forward: bool
) -> Tensor:
    """Rotate x (B, T, heads, head_dim), or a gradient back; see `rope.rotate`."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, time, heads, width = x.shape
    half = width // 2
    # One set of angles may serve all sequences.
    angles = [each.expand(batch, time, 1, width) for each in (cos, sin)]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    columns = triton.next_power_of_2(half)
    rows = min(triton.next_power_of_2(heads), max(1, _PAIRS // columns))
    grid = (batch * time, triton.cdiv(heads, rows))
    rotate_kernel[grid](
        x,
        y,
        *angles,
        time,
        heads,
        half,
        *x.stride()[:3],
        *y.stride()[:3],
        *angles[0].stride()[:2],
        forward=forward,
        neighbours=neighbours,
        HEADS=rows,
        HALF=columns,
    )
    return y


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both contiguous."""
    y = torch.empty_like(gate)
    grid = (triton.cdiv(y.numel(), _BLOCK),)
    gate_kernel[grid](gate, up, y, y.numel(), BLOCK=_BLOCK)
    return y


def gate_gradients(
    gate: Tensor, up: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of `gate` and `up`; all are contiguous."""
    into_gate, into_up = torch.empty_like(gate), torch.empty_like(up)
    count = gate.numel()
    grid = (triton.cdiv(count, _BLOCK),)
    gate_back_kernel[grid](
        gate, up, gradient, into_gate, into_up, count, BLOCK=_BLOCK
    )
    return into_gate, into_up


def token_losses(
    logits: Tensor, targets: Tensor, gradient: Tensor, ignored: int
) -> Tensor:
    """The losses (tokens,) of logits (tokens, words), which become their gradients.

    `gradient` has one element, the gradient of every loss.
    """
    tokens, words = logits.shape
    losses = torch.empty(tokens, dtype=torch.float32, device=logits.device)
    grid = (tokens,)
    loss_kernel[grid](
        logits,
        targets,
        gradient,
        losses,
        words,
        logits.stride(0),
        ignored,
        BLOCK=_WORDS,
        num_warps=8,
    )
    return losses
