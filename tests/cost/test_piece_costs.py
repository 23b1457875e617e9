"""PieceCost pieces against closed forms, against real runs on the CPU, and against themselves."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from phalanx.comm import AloneWorld
from phalanx.cost import forward_flops, piece_costs, sizes_of
from phalanx.cost.scales import Scales
from phalanx.layout import (
    Layout,
    LayoutError,
    Shape,
    piece_layout,
    plain_pieces,
)
from phalanx.layout.cases import SHAPES
from phalanx.parallel import Precision, build_model, load_model
from phalanx.parallel.local import build_local
from phalanx.parallel.pool import storage_of
from phalanx.program import Load, PieceCost, StepOptions, at_rows, build
from phalanx.training.program import program_of

TINY = Shape.load("tiny")
GPT = Shape(
    "gpt", layers=2, hidden=64, heads=4, ffn=256, vocab=80, sequence=32,
    norm="layer", positions="learned", gated=False,
)  # fmt: skip
STRANGER = (
    str(Path(__file__).parents[2] / "examples" / "stranger.py") + ":Stranger"
)


def costed(
    shape: Shape, text: str, rows: int = 1, **more: Any
) -> tuple[PieceCost, ...]:
    return piece_costs(build_model(shape), Layout.parse(text), rows, **more)


def products(load: Load) -> float:
    return sum(p.flops for p in load.products)


def full(load: Load) -> float:
    return sum(a.full for a in load.attention)


def messages(load: Load) -> Counter[tuple[str, str, float]]:
    return Counter((m.axis, m.op, m.bytes) for m in load.messages)


@pytest.mark.parametrize(
    "shape", [TINY, GPT, Shape.load("8b")], ids=lambda s: s.name
)
@pytest.mark.parametrize("text", ["", "zb-h1:1", "recompute:selective bf16"])
def test_flops_are_those_of_the_closed_form_and_backward_has_twice_as_many(
    shape: Shape, text: str
) -> None:
    shape = replace(shape, layers=2)
    rows, found = 3, costed(shape, text, 3, sequence=32)
    ops = forward_flops(shape, rows, 32)
    for number, piece in enumerate(found):
        mine = [op for op in ops if op.piece == number]
        forward = sum(op.full for op in mine if not op.attends)
        attention = sum(op.full for op in mine if op.attends)
        # The head makes its logits in the backward, by chunks.
        late = forward if number == len(found) - 1 else 0
        assert products(piece.forward) == forward - late
        assert products(piece.backward) == 2 * forward + late
        assert full(piece.forward) == attention
        assert full(piece.backward) == 2.5 * attention
        if "zb" in text:
            assert products(piece.weight_gradient) == forward - late
            assert not piece.weight_gradient.attention
    total = sum(products(p.forward + p.backward) for p in found)
    multiplied = (
        shape.total
        - shape.rows[0].numel
        - shape.hidden
        * ((2 if shape.norm == "layer" else 1) * (2 * shape.layers + 1))
    )
    assert total == 6 * multiplied * rows * 32  # 6ND


@pytest.mark.parametrize(
    "cut, parts", [("cp4", 4), ("cp4:ulysses", 4), ("cp4:2x2 tp2 seq", 8)]
)
def test_context_and_tensor_parallel_share_the_work_evenly(
    cut: str, parts: int
) -> None:
    whole, part = (
        costed(TINY, "", sequence=64)[1],
        costed(TINY, cut, sequence=64)[1],
    )
    assert products(part.forward) * parts == products(whole.forward)
    # A diagonal counts as half a square, so that blocks add up to the half square of the whole.
    assert sum(a.flops for a in part.forward.attention) * parts == sum(
        a.flops for a in whole.forward.attention
    )


def test_a_ring_of_four_meets_every_block_with_its_own_queries_and_keys() -> (
    None
):
    core = costed(TINY, "cp4", sequence=64)[1].forward.attention
    assert [(a.queries, a.keys, a.causal) for a in core] == [(16, 16, 1)] + [
        (16, 8, 0)
    ] * 3
    found = messages(costed(TINY, "cp4", sequence=64)[1].forward)
    block = 2 * 16 * TINY.kv_heads * TINY.head_dim * 4
    assert found == {("cp.ring", "send", block): 3}


def test_a_block_of_tensor_parallel_sends_what_megatron_says() -> None:
    """Shoeybi et al. 2019: two all-reduces of b s h forward, two backward; Korthikanti et al. 2022:
    with sequence parallel as many gathers and scatters."""
    size = 3.0 * 32 * GPT.hidden * 2
    plain = costed(GPT, "tp2 bf16", 3)[1]
    for load in (plain.forward, plain.backward, plain.recompute):
        assert messages(load) == {("tp", "all_reduce", size): 2}
    seq = costed(GPT, "tp2 seq bf16", 3)[1]
    for load in (seq.forward, seq.backward):
        both = {
            ("tp", "all_gather", size): 2,
            ("tp", "reduce_scatter", size): 2,
        }
        assert messages(load) == both
    # A rank keeps its part of what a product takes, and gathers it again.
    selective = costed(GPT, "tp2 seq recompute:selective bf16", 3)[1]
    assert messages(selective.recompute) == {("tp", "all_gather", size): 2}


def test_selective_recomputation_repeats_no_product_and_no_sum() -> None:
    selective, plain = (
        costed(TINY, f"tp2 {x} bf16") for x in ("recompute:selective", "")
    )
    block = selective[1]
    assert not block.recompute.products
    assert not block.recompute.attention
    assert not block.recompute.messages
    assert 0 < block.recompute.moved < block.forward.moved
    assert block.input < block.selected < block.kept == plain[1].kept
    assert block.backward == plain[1].backward
    assert messages(block.forward) == messages(plain[1].forward) != {}
    for end in (0, -1):  # the ends of a model are not recomputed selectively
        assert selective[end] == plain[end]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_kept_bytes_are_korthikantis_without_dropout_and_without_scores(
    tp: int,
) -> None:
    """Korthikanti et al. 2022, table 2, a GPT block in half precision: s b h (34 + 5 a s / h).

    Of the 34 two are masks of dropout, which we have not, and the scores stay in the kernel, which
    keeps a float32 for each query and head. Their norms keep no statistics; ours two float32 a row
    and norm. With tp: 10 + 24 / t, of which the masks are 2. With seq they say 34 / t, as they
    gather the inputs of the two column regions again in backward; we keep these, 2 + 2, whole.
    """
    s, b, h, a = 32, 3, GPT.hidden, GPT.heads
    statistics, sums = 2 * 2 * 4 * s * b, 4 * a * s * b
    plain = costed(GPT, f"tp{tp} bf16", b)[1]
    assert plain.kept == s * b * h * (8 + 24 / tp) + statistics + sums / tp
    if tp > 1:
        seq = costed(GPT, f"tp{tp} seq bf16", b)[1]
        assert (
            seq.kept == s * b * h * (4 + 28 / tp) + statistics / tp + sums / tp
        )
        assert seq.input == seq.edge == plain.edge / tp == s * b * h * 2 / tp


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_states_are_zeros_bytes(zero: int) -> None:
    """Rajbhandari et al. 2020: 16 bytes a weight in mixed precision, cut stage by stage. Our gradients
    are summed in float32, which makes them 18."""
    n = 4
    layout = Layout.parse(f"dp{n} zero{zero} bf16")
    shape = replace(TINY, batch=8)
    model = build_model(shape)
    program = program_of(model, layout)
    ids = torch.empty(8, shape.sequence, dtype=torch.long, device="meta")
    batch = dict.fromkeys(("tokens", "targets", "positions"), ids)
    precision = Precision(torch.bfloat16, torch.float32, torch.float32)
    sizes = sizes_of(
        lambda: build_model(shape), layout, program, batch, precision
    )
    cut = 1 if zero == 0 else n
    whole = shape.total  # every unit of this shape divides by n
    assert sum(sizes.optimizer) == 8 * whole / cut
    assert sum(sizes.home) == 4 * whole / cut + (2 * whole if zero < 3 else 0)
    assert sum(sizes.gathered) == (2 * whole if zero == 3 else 0)
    assert sum(sizes.gradient) == 4 * whole
    assert sum(sizes.gradient_shard) == (4 * whole / n if zero else 0)


@pytest.mark.parametrize("shape", [TINY, GPT], ids=lambda s: s.name)
@pytest.mark.parametrize("text", ["", "zb-h1:1"])
def test_kept_bytes_are_those_that_the_cpus_kernels_save(
    shape: Shape, text: str
) -> None:
    layout = Layout.parse(text)
    model = build_model(shape)
    world = AloneWorld()
    try:
        program = build(
            piece_layout(layout),
            plain_pieces((range(shape.pieces),)),
            StepOptions(agree=False),
        )
        held = build_local(world, layout, model, program)
        saved: dict[int, int] = {}
        weights = {
            storage_of(p)
            for u in held.units.values()
            for p in u.parameters.values()
        }

        def note(x: Tensor) -> Tensor:
            if storage_of(x) not in weights:
                saved[storage_of(x)] = x.untyped_storage().nbytes()
            return x

        x = torch.randn(2, 32, shape.hidden)
        place = torch.arange(32).expand(2, -1).contiguous()
        keep = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: keep.append(x) or note(x), lambda x: x
        ):
            batch = held.complete({"positions": place})
            held.pieces[1].forward(0, {"x": x}, batch, keep=True)
        small = {storage_of(each) for each in batch.values()}
        real = sum(size for key, size in saved.items() if key not in small)
    finally:
        world.clear()
    assert costed(shape, text, 2, sequence=32, target="cpu")[1].kept == real


CUTS = (
    "", "bf16", "tp2", "tp2 seq bf16", "cp2", "cp4:2x2 tp2 seq bf16", "zb-h1:1 tp2 bf16",
    "recompute:selective tp2 seq cp2 bf16",
)  # fmt: skip


@pytest.mark.parametrize(
    "shape", [TINY, GPT, Shape.load("mlp")], ids=lambda s: s.name
)
@pytest.mark.parametrize("text", CUTS)
def test_one_row_and_two_tell_any_number(shape: Shape, text: str) -> None:
    if shape.kind == "mlp" and ("seq" in text or "cp" in text):
        return
    one, two, three, seven = (
        costed(shape, text, rows) for rows in (1, 2, 3, 7)
    )
    for a, b, c, d in zip(one, two, three, seven, strict=True):
        line = at_rows(a, b)
        for rows, real in ((3, c), (7, d)):
            for field in fields(real):
                if field.name != "temporary":
                    assert getattr(line(rows), field.name) == getattr(
                        real, field.name
                    ), field.name
        # The peak is the highest of several lines.
        assert (
            line(3).temporary
            <= c.temporary
            <= b.temporary + (d.temporary - b.temporary) / 5
        )


def test_pieces_that_are_alike_are_weighed_once_and_others_are_not() -> None:
    model = build_model(replace(TINY, layers=4))
    found = piece_costs(model, Layout(), 1)
    assert len(found) == 6
    assert len(set(map(id, found))) == 3
    # The model has stayed as it was.
    again = piece_costs(model, Layout.parse("tp2"), 1)
    assert again[1].weights < found[1].weights
    model.pieces[2][1].attn.rope = None
    assert len(set(map(id, piece_costs(model, Layout(), 1)))) == 4


def test_the_parts_of_blocks_with_experts_have_costs_of_their_own() -> None:
    """The embedding, a dense block, two blocks of three parts each, and the head."""
    shape = replace(SHAPES["experts"], layers=3, dense_layers=1)
    whole = costed(shape, "")
    apart = costed(shape, "ep2")
    assert len(whole) == 5
    assert len(apart) == 1 + 1 + 2 * 3 + 1
    first, second = apart[2:5], apart[5:8]
    assert [*map(id, first)] == [*map(id, second)]
    # Only the middle part has experts' weights: five of the nine on the first rank.
    assert shape.experts == 9
    experts = whole[2].routed * 5 / 9
    assert [part.routed for part in first] == [0, experts, 0]
    assert products(apart[-1].forward) == products(whole[-1].forward)


def test_a_user_s_own_model_is_weighed() -> None:
    model = load_model(STRANGER)
    whole, half = (
        piece_costs(model, Layout.parse(text), 2) for text in ("", "tp2")
    )
    assert len(whole) == len(model.pieces)
    assert len(set(map(id, whole))) == 3
    for a, b in zip(whole, half, strict=True):
        # 53 words, padded
        assert b.forward.flops == pytest.approx(a.forward.flops / 2, rel=0.02)
    block = half[1]
    # Two row regions: attention's and the MLP's, side by side.
    assert messages(block.forward) == {
        ("tp", "all_reduce", 2.0 * 12 * 32 * 4): 2
    }
    assert (
        block.weights
        == sum(p.numel() for p in model.pieces[1][1].parameters()) / 2 + 2 * 32
    )


class _NothingReal(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_iter(out):
            if isinstance(x, Tensor) and not x.is_meta:
                assert x.untyped_storage().nbytes() <= 4096, func
        return out


@pytest.mark.parametrize(
    "text", ["tp8 seq bf16", "cp16 tp8 bf16 recompute:selective"]
)
def test_weighing_the_405b_makes_no_memory(text: str) -> None:
    model = build_model(replace(Shape.load("405b"), layers=1))
    with _NothingReal():
        found = piece_costs(model, Layout.parse(text), 4, sequence=131072)
    assert found[1].kept > 1e9


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(LayoutError, match="Targets are cuda, cpu"):
        costed(TINY, "", target="tpu")
    model = build_model(TINY)
    with pytest.raises(LayoutError, match="shape=Shape"):
        piece_costs(replace(model, shape=None), Layout(), 1)


@pytest.mark.parametrize(
    "compiled, tensors, kernels", [(False, 5, 5), (True, 3, 4)]
)
def test_a_compiled_chain_reads_what_it_did_not_make_and_writes_what_is_asked_for(
    compiled: bool, tensors: int, kernels: int
) -> None:
    x, weight = (
        torch.empty(8, 16, device="meta"),
        torch.empty(16, 16, device="meta"),
    )
    scales = Scales([], {}, compiled=compiled)
    with scales, scales.on("forward"):
        gate, up = x @ weight, x @ weight
        # By itself: one read and one written, then two and one. Together: two read, one written.
        y = torch.nn.functional.silu(gate) * up
        y @ weight
    load = scales.load("forward")
    assert load.moved == tensors * x.numel() * x.element_size()
    assert load.launches == kernels
    assert len(load.products) == 3


def test_compiling_changes_what_is_moved_and_started_and_nothing_else() -> (
    None
):
    for eager, compiled in zip(
        costed(TINY, "bf16"), costed(TINY, "bf16 compile"), strict=True
    ):
        loads = [
            (getattr(eager, n), getattr(compiled, n))
            for n in ("forward", "input_gradient")
        ]
        for plain, fused in loads:
            assert replace(plain, moved=0, launches=0) == replace(
                fused, moved=0, launches=0
            )
        assert eager.kept == compiled.kept
    block, fused = (
        costed(TINY, "bf16")[1].forward,
        costed(TINY, "bf16 compile")[1].forward,
    )
    assert fused.moved < block.moved
    assert fused.launches < block.launches


def test_a_compiled_selective_backward_holds_what_is_computed_again() -> None:
    eager, compiled = (
        costed(TINY, f"recompute:selective{c}")[1] for c in ("", " compile")
    )
    assert compiled.kept == eager.selected
    assert compiled.selected == 0
    assert products(compiled.input_gradient) == products(
        eager.recompute + eager.input_gradient
    )
