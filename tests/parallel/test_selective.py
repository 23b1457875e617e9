"""Selective recomputation gives the gradients of none, and holds what somebody will ask for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from phalanx.comm import World
from phalanx.comm.launch import launch
from phalanx.cost.live import Live
from phalanx.cost.pieces import piece_costs
from phalanx.layout import Layout, LayoutError, Shape
from phalanx.parallel import Precision, build_model
from phalanx.parallel.local import build_local
from phalanx.parallel.recompute import Selected, giving, keeping
from phalanx.program import Op, Program, ops
from phalanx.training.program import program_of
from phalanx.verification import SHAPES, batch_of
from phalanx.verification.trial import Setting, join, program_in, train_layout
from sampled import one_in

GPT = Shape(
    "gpt", layers=1, hidden=64, heads=4, ffn=256, vocab=80, sequence=32,
    norm="layer", positions="learned", gated=False, bias="all",
)  # fmt: skip
LLAMA = Shape(
    "llama",
    layers=1,
    hidden=64,
    heads=4,
    kv_heads=2,
    ffn=192,
    vocab=80,
    sequence=32,
)
ROWS = 3


# ---- gradients


def gradients(
    layout: Layout,
    name: str,
    *,
    packed: bool,
    moved: Callable[[Program], Program] = lambda program: program,
) -> dict[str, Tensor]:
    """Of a step with dropout, in float64; `moved`: a pass over its program."""
    wide = Precision(torch.float64, torch.float64, torch.float64)
    batches = partial(batch_of, SHAPES[name], packed=packed, noisy=True)
    setting = Setting(batches, steps=1, precision=wide)
    make = partial(build_model, replace(SHAPES[name], dropout=0.2))
    program = moved(program_in(layout, make, setting))
    seen = launch(
        train_layout,
        layout.ranks,
        layout,
        program,
        make,
        setting,
        backend="threads",
    )
    (step,) = join(seen, 1).steps
    return step.gradients


WHERE = (
    "", "tp2", "tp2 seq", "tp4", "cp2 tp2 seq", "cp2:ulysses tp2", "dp2 tp2 zero3 accum:2",
    "pp2 tp2 seq zb-h1:3", "tp2 seq accum:2 offload:activations",
)  # fmt: skip


# 4 has no factor in common with 3 models and 9 layouts.
@pytest.mark.parametrize(
    "case", one_in(4, product(("gqa", "gpt", "qwen"), WHERE)), ids="-".join
)
def test_gradients_are_bit_for_bit_those_without_recomputation(
    case: tuple[str, str],
) -> None:
    name, text = case
    # learned positions begin again with documents, too
    packed = "cp2" in text and name != "gpt"
    plain = gradients(Layout.parse(f"{text} fp64"), name, packed=packed)
    selective = gradients(
        Layout.parse(f"{text} recompute:selective fp64"), name, packed=packed
    )
    assert plain.keys() == selective.keys()
    for weight, gradient in plain.items():
        assert torch.equal(selective[weight], gradient), weight


def _early(program: Program) -> Program:
    """Before the first backward of a microbatch all that is recomputed for it, the first piece first."""
    rows = []
    for row in program.rows:
        parts = sorted(op for op in row if op.kind == ops.RECOMPUTE_PART)
        assert parts
        out: list[Op] = []
        for op in row:
            if op.kind in ops.PROPAGATES:
                out += [part for part in parts if part.index == op.index]
                parts = [part for part in parts if part.index != op.index]
            out += [op] * (op.kind != ops.RECOMPUTE_PART)
        rows.append(out)
    return program.with_rows(rows)


@pytest.mark.parametrize(
    "text", ["dp2 tp2 seq accum:2", "pp2 zb-h1:3", "pp2 gpipe:3 zero1 dp2"]
)
def test_recomputation_that_a_pass_moves_is_done_where_it_stands(
    text: str,
) -> None:
    layout = Layout.parse(f"{text} recompute:selective fp64")
    before, after = (
        gradients(layout, "gqa", packed=False, moved=m)
        for m in (_early, lambda p: p)
    )
    assert before.keys() == after.keys()
    for weight, gradient in before.items():
        assert torch.equal(after[weight], gradient), weight


# ---- bytes


def held(world: World, text: str, shape: Shape, dropout: float = 0.0) -> int:
    """Bytes that a block's forward leaves, its input and what says where tokens stand too."""
    layout = Layout.parse(text)
    model = build_model(replace(shape, dropout=dropout))
    piece = build_local(
        world, layout, model, program_of(model, layout)
    ).pieces[1]
    places = layout.tp if layout.seq else 1
    with Live() as live:
        x = torch.randn(ROWS, shape.sequence // places, shape.hidden)
        batch = {"positions": torch.arange(shape.sequence).expand(ROWS, -1)}
        if dropout:
            batch["noise"] = batch["positions"]
        selected: Selected | None = (
            deque() if layout.recompute == "selective" else None
        )
        bundle = {"x": x}  # which the executor keeps
        y = piece.forward(
            0, bundle, batch, keep=selected is None, selected=selected
        )["x"]
        del x, y
        return int(live.now)


@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=lambda s: s.name)
@pytest.mark.parametrize("text", ["tp1", "tp2", "tp2 seq", "tp4 seq"])
def test_a_block_leaves_its_input_and_what_was_dear_and_will_be_asked_for(
    text: str, shape: Shape
) -> None:
    """In numbers of 4 bytes for each token, of h features, on t ranks: q, k, v and attention's output
    with a sum for each head; what goes into the second norm; what comes out of the wide products.
    With seq the stream is cut, and what was gathered for the column products is gathered again.
    Nothing of a part of a sum, and nothing of what the last product adds to the stream."""
    if text == "tp4 seq" and shape.kv_heads % 4:
        shape = replace(shape, kv_heads=4)
    layout = Layout.parse(text)
    t, h = layout.tp, shape.hidden
    kv = h * shape.kv_heads // shape.heads
    wide = (2 if shape.gated else 1) * shape.ffn
    stream = 2 * (h / t if layout.seq else h)
    numbers = stream + (2 * h + 2 * kv + shape.heads + wide) / t
    times = 8 * shape.sequence
    for dropout in (0.0, 0.1):
        text = f"{layout} recompute:selective"
        (found, *_) = launch(held, t, text, shape, dropout, backend="threads")
        assert found == 4 * ROWS * shape.sequence * numbers + times


@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=lambda s: s.name)
@pytest.mark.parametrize("text", ["tp1", "tp2", "tp2 seq"])
def test_selective_leaves_less_than_none(text: str, shape: Shape) -> None:
    (none, *_), (selective, *_) = (
        launch(
            held,
            Layout.parse(text).ranks,
            f"{text} {x}",
            shape,
            backend="threads",
        )
        for x in ("", "recompute:selective")
    )
    assert selective < 0.8 * none


LATENT = replace(
    LLAMA,
    name="latent",
    kv_heads=4,
    head_dim=48,
    q_latent=16,
    kv_latent=8,
    rope_dim=16,
    value_dim=32,
)


def test_up_projections_of_latents_are_computed_again() -> None:
    """In numbers of 4 bytes for each token: the stream twice, both latents with the keys'
    rotated part, attention's output (as wide as a query) with a sum for each head, and the
    wide products. Queries (4 heads of 48, 12 times the latent) and what holds keys and
    values (4 heads of 64, 32 times) would be 448 more."""
    streams = 2 * LATENT.hidden
    latents = LATENT.q_latent + LATENT.kv_latent + LATENT.rope_dim
    attention = LATENT.heads * (LATENT.head_dim + 1)
    numbers = streams + latents + attention + 2 * LATENT.ffn
    (found,) = launch(
        held, 1, "recompute:selective", LATENT, backend="threads"
    )
    assert found == (4 * numbers * ROWS + 8) * LATENT.sequence


@pytest.mark.parametrize("text", ["tp8", "tp8 seq"])
def test_no_product_is_computed_again_if_a_rank_s_part_alone_expands(
    text: str,
) -> None:
    """The rank's part of `wo` is 8 times as wide as its input, and `reduce` alone reads it."""
    shape = replace(LLAMA, hidden=64, heads=8, kv_heads=8, head_dim=8, ffn=128)
    layout = Layout.parse(f"{text} recompute:selective")
    _, block, *_ = piece_costs(build_model(shape), layout, 1)
    assert block.recompute.products == ()


@pytest.mark.parametrize("text", ["", "pp2 zb-h1:3"])
def test_gradients_of_latents_are_those_without_recomputation(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = replace(LATENT, layers=2)
    monkeypatch.setitem(SHAPES, "wide latents", shape)
    plain, selective = (
        gradients(
            Layout.parse(f"{text} {word} fp64"), "wide latents", packed=False
        )
        for word in ("", "recompute:selective")
    )
    for weight, gradient in plain.items():
        assert torch.equal(selective[weight], gradient), weight


# ---- what somebody may ask for


class _Saves(torch.autograd.Function):
    """Asks for a value of which no operation is seen to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.mul(gradient, x)


def _saved(x: Tensor) -> Tensor:
    y: Tensor = _Saves.apply(x)  # type: ignore[no-untyped-call]
    return y


def _gradient(call: Callable[..., Tensor], *, again: bool) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    x, w = (
        torch.randn(4, 4, dtype=torch.float64, generator=draw)
        for _ in range(2)
    )
    x.requires_grad_()
    if again:
        selected: Selected = deque()
        with keeping(selected):
            call(x, w)
        with giving(selected):
            y = call(x, w)
        assert not selected
    else:
        y = call(x, w)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert isinstance(gradient, Tensor)
    return gradient


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w: (x @ w).tanh() + x,
        lambda x, w: (x + x @ w).square(),
        lambda x, w: (x @ w) * (x @ w.T),
        lambda x, w: x + (x @ w) @ (x @ w.T),
        lambda x, w: torch.addmm(x, x @ w, w) * x,
        lambda x, w: F.layer_norm(x + 2.0 * (x @ w), (4,)) + x @ w,
        lambda x, w: torch.where(x > 0, x @ w, 0.0).exp(),
        lambda x, w: _saved((x @ w) * x),
        lambda x, w: F.scaled_dot_product_attention(
            *((x @ w)[None, None],) * 3
        )[0, 0],
    ],
)
def test_what_is_asked_for_after_a_product_is_what_the_product_gave(
    call: Callable[..., Tensor],
) -> None:
    assert torch.equal(
        _gradient(call, again=True), _gradient(call, again=False)
    )


def test_a_value_asked_for_unseen_is_not_a_number_instead_of_a_wrong_one() -> (
    None
):
    assert _gradient(lambda x, w: _saved(x + x @ w), again=True).isnan().all()


def test_a_model_that_writes_into_what_is_kept_is_refused() -> None:
    def call(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        return y.add_(1.0).tanh() * y.exp()

    with pytest.raises(LayoutError, match="writes into it"):
        _gradient(call, again=True)
