"""Attention over several ranks against attention on one, in float64."""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from phalanx.comm import World
from phalanx.comm.launch import launch, workers
from phalanx.comm.tally import TallyWorld
from phalanx.layout import Layout, LayoutError, Shape
from phalanx.layout.cases import SHAPES
from phalanx.models import Core, kernels
from phalanx.models.delta import DeltaCore
from phalanx.parallel import Model, build_model, context
from phalanx.parallel.batch import held_times, microbatches
from phalanx.parallel.context import (
    RingCore,
    UlyssesCore,
    install_context,
    needed,
)
from phalanx.parallel.delta import SpreadDeltaCore
from phalanx.parallel.fitness import misfits
from rounding import assert_rounded_once

SIZE = 6
GRIDS = tuple(itertools.product((1, 2, 3, 4, 8), (1, 2, 4)))
SMALL = ((2, 1), (3, 1), (4, 1), (1, 2), (1, 4), (2, 2))


def _layout(ring: int, ulysses: int) -> Layout:
    return Layout.parse(
        f"cp{ring * ulysses}:{ring}x{ulysses}" if ring * ulysses > 1 else ""
    )


def _batch(
    length: int,
    heads: int = 4,
    kv: int = 2,
    *,
    documents: bool = False,
    rows: int = 2,
) -> dict[str, Tensor]:
    """q, k, v and the result's gradient as if they stood in a batch, so that they are cut as tokens."""
    generator = torch.Generator().manual_seed(length)

    def random(*shape: int) -> Tensor:
        return torch.randn(
            rows, length, *shape, dtype=torch.float64, generator=generator
        )

    batch = {
        "tokens": torch.arange(rows * length).view(rows, length),
        "q": random(heads, SIZE),
        "k": random(kv, SIZE),
        "v": random(kv, SIZE),
        "gradient": random(heads, SIZE),
    }
    if documents:
        starts = torch.rand(rows, length, generator=generator) < 0.2
        batch["documents"] = starts.cumsum(1)
    return batch


def _core(
    world: World, ring: int, ulysses: int, inner: nn.Module | None = None
) -> nn.Module:
    """A place's core, as `install_context` puts it into a model."""
    mesh = _layout(ring, ulysses).mesh
    ring_group = world.split(
        "ring", mesh.groups(["cp.ring"]), context.around(mesh.of("cp.ring"))
    )
    ulysses_group = world.split("ulysses", mesh.groups(["cp.ulysses"]))
    core = RingCore(ring_group) if ring > 1 else inner or Core()
    return UlyssesCore(core, ulysses_group) if ulysses > 1 else core


def _attend(core: nn.Module, part: dict[str, Tensor]) -> dict[str, Tensor]:
    """The result and all gradients."""
    qkv = [part[name].clone().requires_grad_() for name in "qkv"]
    y = core(*qkv, None, part.get("documents"))
    y.backward(part["gradient"])
    return {
        "y": y.detach(),
        **{n: x.grad for n, x in zip("qkv", qkv, strict=True)},
    }


def _on_a_place(
    world: World, ring: int, ulysses: int, batches: list[dict[str, Tensor]]
):
    """What one place computes of each batch."""
    core, seen = _core(world, ring, ulysses), []
    for batch in batches:
        (part,) = microbatches(batch, _layout(ring, ulysses), 0, world.rank)
        part = {name: x.to(world.device) for name, x in part.items()}
        seen.append({name: x.cpu() for name, x in _attend(core, part).items()})
    world.clear()
    return seen


def _joined(
    seen: list[dict[str, Tensor]], ring: int, ulysses: int, length: int
):
    """Whole tensors from what all places hold, without the padding."""
    padded = seen[0]["y"].shape[1] * len(seen)
    whole = {
        n: x.new_full((len(x), padded, *x.shape[2:]), math.nan)
        for n, x in seen[0].items()
    }
    for cp, part in enumerate(seen):
        for name, x in part.items():
            whole[name][:, held_times(padded, ring, ulysses, cp)] = x
    return {name: x[:, :length] for name, x in whole.items()}


def _error(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative error of the result and the gradients."""
    errors = [
        (got[n] - x).abs().max() / x.abs().max() for n, x in expected.items()
    ]
    return float(torch.stack(errors).max())


def _worst(
    run, ring: int, ulysses: int, batches: list[dict[str, Tensor]]
) -> float:
    seen = run(_on_a_place, ring, ulysses, batches)
    errors = []
    for i, batch in enumerate(batches):
        got = _joined(
            [place[i] for place in seen],
            ring,
            ulysses,
            batch["tokens"].shape[1],
        )
        errors.append(_error(got, _attend(Core(), batch)))
    # NaN, where something is missing, stays.
    return float(torch.tensor(errors).max())


def _threads(ranks: int):
    return lambda fn, *args: launch(
        fn, ranks, *args, backend="threads", timeout=20.0
    )


CASES = [
    _batch(length, heads, kv, documents=documents)
    for length in (37, 64)
    for heads, kv in ((4, 4), (4, 2), (4, 1), (12, 3))
    for documents in (False, True)
]


@pytest.mark.parametrize("ring,ulysses", GRIDS)
def test_attention_over_any_ring_and_ulysses_equals_attention(ring, ulysses):
    # Many threads take turns on few cores; what a place does depends on the ring and the heads alone.
    cases = CASES if ring * ulysses <= 8 else CASES[2:4]
    assert _worst(_threads(ring * ulysses), ring, ulysses, cases) < 1e-12


@pytest.mark.parametrize("ring,ulysses", SMALL)
def test_strips_of_queries_and_plain_kernels_equal_attention(
    ring, ulysses, monkeypatch
):
    for strip, plain in itertools.product((1, 5, 512), (False, True)):
        monkeypatch.setattr(kernels, "STRIP", strip)
        if plain:
            monkeypatch.setattr(
                kernels, "_kernels", lambda q, mask=None: kernels.PLAIN
            )
        assert (
            _worst(_threads(ring * ulysses), ring, ulysses, CASES[2:4]) < 1e-12
        )
        monkeypatch.undo()


def test_ulysses_is_attention_bit_for_bit():
    batch = _batch(64)
    seen = _threads(4)(_on_a_place, 1, 4, [batch])
    got = _joined([place[0] for place in seen], 1, 4, batch["tokens"].shape[1])
    assert torch.equal(got["y"], _attend(Core(), batch)["y"])


def test_processes_over_gloo_compute_what_threads_do():
    with workers(4, backend="gloo", timeout=30.0) as run:
        for ring, ulysses in ((4, 1), (1, 4), (2, 2)):
            assert _worst(run, ring, ulysses, CASES[2:6]) < 1e-12


def test_a_ring_in_bfloat16_is_as_near_to_the_truth_as_attention():
    exact = _batch(96, documents=True)
    short = {
        n: x.bfloat16() if x.is_floating_point() else x
        for n, x in exact.items()
    }
    truth = _attend(
        Core(),
        {n: x.double() if n != "documents" else x for n, x in short.items()},
    )
    alone = _error(_attend(Core(), short), truth)
    seen = _threads(4)(_on_a_place, 4, 1, [short])
    ring = _error(_joined([place[0] for place in seen], 4, 1, 96), truth)
    assert 0 < ring < 1.5 * alone


def _narrow(**tensors: Tensor) -> dict[str, Tensor]:
    """A batch of one sequence in bfloat16: q, k, v and the gradient of the result."""
    length = tensors["q"].shape[1]
    narrow = {name: x.bfloat16() for name, x in tensors.items()}
    return {"tokens": torch.arange(length).view(1, length), **narrow}


def _over_a_ring(ring: int, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    seen = _threads(ring)(_on_a_place, ring, 1, [batch])
    return _joined(
        [place[0] for place in seen], ring, 1, batch["tokens"].shape[1]
    )


@pytest.mark.parametrize("ring", (2, 3, 4))
def test_partial_results_of_a_ring_are_merged_in_float32_and_rounded_once(
    ring,
):
    """With values of one on the keys of one rank and zero elsewhere, every partial result is exact in
    bfloat16, and the merged result is the share of the softmax on those keys."""
    length, generator = 48, torch.Generator().manual_seed(ring)
    q, k = (
        2 * torch.randn(1, length, 2, SIZE, generator=generator).bfloat16()
        for _ in "qk"
    )
    scores = torch.einsum(
        "bthd,bshd->bhts", q.double(), k.double()
    ) / math.sqrt(SIZE)
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    shares = scores.masked_fill(later, -math.inf).softmax(-1)
    for rank in range(ring):
        v = torch.zeros(1, length, 2, SIZE)
        v[:, held_times(length, ring, 1, rank)] = 1.0
        exact = torch.einsum("bhts,bshd->bthd", shares, v.double())
        result = _over_a_ring(ring, _narrow(q=q, k=k, v=v, gradient=v))["y"]
        # Scores and merges in float32 are some 1e-6 off, half a unit of bfloat16 is 4e-3.
        assert_rounded_once(result, exact, slack=1e-5 * exact)


@pytest.mark.parametrize("ring", (4, 8))
def test_gradients_of_visiting_blocks_are_added_in_float32_and_rounded_once(
    ring,
):
    """Rank 0 gives 256 to a gradient and every other rank 0.75, which bfloat16 would add to 256 without
    effect. All factors are exact in bfloat16, so the sum is known."""
    length = (
        64  # a power of two: so is each share of the last query's attention
    )
    total = torch.tensor(256 + 0.75 * (ring - 1)).bfloat16()
    assert total > 256

    def zeros() -> Tensor:
        return torch.zeros(1, length, 1, 8)

    # Every query attends to key 0 alone, whose value's gradient is the sum over all queries.
    q, k, gradient = zeros(), zeros(), zeros()
    q[..., 0], k[:, 0, :, 0] = 64.0, 8.0
    for rank in range(ring):
        gradient[:, held_times(length, ring, 1, rank)[-1]] = (
            0.75 if rank else 256.0
        )
    got = _over_a_ring(
        ring, _narrow(q=q, k=k, v=zeros() + 1, gradient=gradient)
    )
    assert (got["v"][0, 0] == total).all()
    assert not got["v"][0, 1:].any()

    # The last query attends to all keys alike; values of 1 and -1 by turns have a mean of zero. Then its
    # gradient is the sum of key times value, divided by the length and the root of the size.
    k, v, gradient = zeros(), zeros() + 1, zeros()
    v[:, ::2] = -1.0
    gradient[0, -1, 0, 0] = 1.0
    for rank in range(ring):
        time = held_times(length, ring, 1, rank)[0]
        k[0, time, 0, 0] = (
            v[0, time, 0, 0]
            * length
            * math.sqrt(8)
            * (0.75 if rank else 256.0)
        )
    got = _over_a_ring(ring, _narrow(q=zeros(), k=k, v=v, gradient=gradient))
    assert got["q"][0, -1, 0, 0] == total


def _compiled(world: World, batch: dict[str, Tensor]):
    (part,) = microbatches(batch, _layout(2, 1), 0, world.rank)
    core = _core(world, 2, 1)
    plain = _attend(core, part)
    whole = torch.compile(core, fullgraph=True, backend="aot_eager")
    return plain, _attend(whole, part)


def test_a_ring_compiles_whole_and_computes_the_same_bits():
    for plain, compiled in launch(
        _compiled, 2, CASES[3], backend="threads", timeout=60.0
    ):
        assert all(torch.equal(compiled[name], x) for name, x in plain.items())


# ---- who needs what


@pytest.mark.parametrize("places", (1, 2, 3, 4, 5, 8))
def test_a_place_computes_the_pairs_that_are_needed_and_no_others(places):
    length, chunk = 2 * places * 3, 3
    for place in range(places):
        mine = held_times(length, places, 1, place)
        for step in range(places):
            theirs = held_times(length, places, 1, (place - step) % places)
            visible = needed(step, place, places, 2 * chunk)
            computed = torch.zeros(2 * chunk, 2 * chunk, dtype=torch.bool)
            box = computed[visible.rows, visible.keys]
            box |= (
                torch.ones_like(box).tril()
                if visible.causal
                else torch.ones_like(box)
            )
            assert torch.equal(computed, mine[:, None] >= theirs[None, :])
            assert box.numel() == (2 if step else 4) * chunk**2


def test_a_ring_sends_each_block_around_once_and_its_gradient_home():
    rows, length, heads, kv, ring = 2, 10, 4, 2, 3
    world = TallyWorld(0, ring)
    core = _core(world, ring, 1)
    q, k, v = (
        torch.empty(rows, length, n, SIZE, device="meta", requires_grad=True)
        for n in (heads, kv, kv)
    )
    y = core(q, k, v, None, None)
    block = 2 * rows * length * kv * SIZE * 4
    sent = [m.bytes for m in world.ledger if m.collective == "send"]
    assert sent == [block] * (ring - 1)
    world.ledger.clear()
    y.sum().backward()
    sent = [m.bytes for m in world.ledger if m.collective == "send"]
    assert sent == [block] * (2 * ring - 1)
    assert q.grad.shape == q.shape
    assert v.grad.shape == v.shape


def _kept_bytes(
    world: World, ring: int, ulysses: int, batch: dict[str, Tensor]
) -> int:
    """The bytes that autograd keeps on this place between forward and backward."""
    (part,) = microbatches(batch, _layout(ring, ulysses), 0, world.rank)
    qkv = [part[name].requires_grad_() for name in "qkv"]
    core, storages = _core(world, ring, ulysses), {}

    def pack(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = core(*qkv, None, part.get("documents"))
    y.backward(part["gradient"])
    world.clear()
    return sum(storages.values())


@pytest.mark.parametrize("documents", (False, True))
def test_what_is_kept_for_backward_falls_as_one_over_the_ranks(documents):
    batch = _batch(64, 4, 2, documents=documents)
    # Q and out, k and v, lse.
    per_token = 8 * (2 * 4 * SIZE + 2 * 2 * SIZE + 4)
    for ring, ulysses in ((2, 1), (4, 1), (8, 1), (2, 2), (4, 2)):
        ranks = ring * ulysses
        # The documents of the batch are on every place, for all blocks of a model together.
        own = 2 * 64 // ranks * per_token + 2 * 64 * 8 * documents
        assert (
            _threads(ranks)(_kept_bytes, ring, ulysses, batch) == [own] * ranks
        )


# ---- leaks


def _whole(ring: int, ulysses: int, documents: Tensor | None):
    """Attention of tokens with themselves over a world of places, as one function."""

    def attend(x: Tensor) -> Tensor:
        batch = {"tokens": x[..., 0, 0], "q": x, "k": x, "v": x, "gradient": x}
        if documents is not None:
            batch["documents"] = documents
        seen = _threads(ring * ulysses)(_on_a_place, ring, ulysses, [batch])
        return _joined(
            [place[0] for place in seen], ring, ulysses, x.shape[1]
        )["y"]

    return attend


def leaks(
    attend, tokens: Tensor, documents: Tensor | None, row: int, time: int
):
    """What changing one token moves: how many positions, how many of them must not move, as they are no
    later ones of its document, and how many of those stay."""
    changed = tokens.clone()
    changed[row, time] += 1
    moved = (attend(changed) != attend(tokens)).flatten(2).any(-1)
    may = torch.zeros_like(moved)
    may[row, time:] = (
        True
        if documents is None
        else documents[row, time:] == documents[row, time]
    )
    return (
        int(moved.sum()),
        int((moved & ~may).sum()),
        int((may & ~moved).sum()),
    )


DOCUMENTS = torch.tensor([[0] * 7 + [1] * 8 + [2] * 9, [5] * 24])


@pytest.mark.parametrize("ring,ulysses", ((1, 1), *SMALL))
def test_a_token_moves_its_own_documents_later_tokens_and_nothing_else(
    ring, ulysses
):
    x = _batch(24, 4)["q"]
    for row, time in ((0, 0), (0, 6), (0, 9), (0, 23), (1, 11)):
        last = int((DOCUMENTS[row] == DOCUMENTS[row, time]).nonzero().max())
        seen = leaks(_whole(ring, ulysses, DOCUMENTS), x, DOCUMENTS, row, time)
        assert seen == (last - time + 1, 0, 0)
        seen = leaks(_whole(ring, ulysses, None), x, None, row, time)
        assert seen == (24 - time, 0, 0)


def test_the_leak_test_sees_a_block_without_its_diagonal(monkeypatch):
    monkeypatch.setattr(
        context, "needed", lambda *args: needed(*args)._replace(causal=False)
    )
    assert leaks(_whole(4, 1, None), _batch(24, 4)["q"], None, 0, 11)[1] > 0
    assert _worst(_threads(2), 2, 1, CASES[:1]) > 1e-3


def test_the_leak_test_sees_a_skipped_step_of_the_ring(monkeypatch):
    right = context.visiting_blocks
    monkeypatch.setattr(
        context,
        "visiting_blocks",
        lambda s, *a: [] if s == 1 else right(s, *a),
    )
    _, leaked, blind = leaks(
        _whole(4, 1, None), _batch(24, 4)["q"], None, 0, 0
    )
    assert blind > 0
    assert leaked == 0
    assert _worst(_threads(2), 2, 1, CASES[:1]) > 1e-3


def test_the_leak_test_sees_documents_that_are_ignored():
    x = _batch(24, 4)["q"]
    assert leaks(_whole(2, 2, None), x, DOCUMENTS, 0, 3)[1] == 24 - 7


# ---- into a model


SHAPE = Shape(
    "t",
    layers=2,
    hidden=16,
    heads=4,
    kv_heads=2,
    ffn=24,
    vocab=37,
    sequence=12,
)


def _cores(text: str) -> list[nn.Module]:
    layout, model = Layout.parse(text), build_model(SHAPE)
    world = TallyWorld(0, layout.ranks)
    ring = world.split("ring", layout.mesh.groups(["cp.ring"]))
    ulysses = world.split("ulysses", layout.mesh.groups(["cp.ulysses"]))
    install_context(model, layout, ring, ulysses)
    return [piece.attn.core for _, piece in model.pieces[1:-1]]


def test_every_core_of_a_model_is_replaced_and_without_cp_none():
    assert {type(core) for core in _cores("tp2")} == {Core}
    assert {type(core) for core in _cores("cp2")} == {RingCore}
    both = _cores("cp4:2x2")
    assert {(type(core), type(core.inner)) for core in both} == {
        (UlyssesCore, RingCore)
    }
    alone = _cores("cp2:ulysses")
    assert {(type(core), type(core.inner)) for core in alone} == {
        (UlyssesCore, Core)
    }


class OwnDelta(DeltaCore):
    pass


class OwnStates(DeltaCore):
    def states_before(self, terms):
        return super().states_before(terms)


def _with_delta(kind: type[DeltaCore]) -> Model:
    model = build_model(SHAPES["delta"])
    for _, piece in model.pieces:
        for module in piece.modules():
            core = getattr(module, "core", None)
            if type(core) is DeltaCore:
                core.__class__ = kind
    return model


@pytest.mark.parametrize("text", ["cp2", "cp2:ulysses"])
def test_a_subclass_of_a_core_of_the_table_keeps_its_tokens(text):
    layout, model = Layout.parse(text), _with_delta(OwnDelta)
    assert not misfits(model, layout)
    world = TallyWorld(0, layout.ranks)
    ring = world.split("ring", layout.mesh.groups(["cp.ring"]))
    ulysses = world.split("ulysses", layout.mesh.groups(["cp.ulysses"]))
    install_context(model, layout, ring, ulysses)
    modules = [m for _, piece in model.pieces for m in piece.modules()]
    kinds = [type(m) for m in modules if isinstance(m, DeltaCore)]
    assert set(kinds) == {SpreadDeltaCore}


@pytest.mark.parametrize("text", ["cp2", "cp2:ulysses"])
def test_a_subclass_whose_methods_cp_would_replace_is_refused(text):
    wrong = misfits(_with_delta(OwnStates), Layout.parse(text))
    assert any("methods of its own (states_before)" in why for why in wrong)


def test_a_model_without_a_core_is_refused():
    model, layout = build_model(SHAPE), Layout.parse("cp2")
    for _, piece in model.pieces[1:-1]:
        piece.attn.heart = piece.attn.core
        del piece.attn.core
    group = TallyWorld(0, 2).split("ring", [(0, 1)])
    with pytest.raises(LayoutError, match="no piece has a child named 'core'"):
        install_context(model, layout, group, group)


def test_heads_that_ulysses_does_not_divide_are_refused():
    core = UlyssesCore(Core(), TallyWorld(0, 3).split("ulysses", [(0, 1, 2)]))
    x = torch.empty(1, 6, 4, SIZE, device="meta")
    with pytest.raises(
        LayoutError, match="ulysses=3 does not divide the 4 heads"
    ):
        core(x, x, x, None, None)


class Strange(nn.Module):
    """Attention without softmax that falls off with distance: a core which reads its positions."""

    def forward(self, q, k, v, positions, documents):
        time = positions.to(q.dtype)
        fall = torch.exp(
            -(time.unsqueeze(-1) - time.unsqueeze(-2)).abs()
        ).tril()
        fall = fall * (documents.unsqueeze(-1) == documents.unsqueeze(-2))
        return torch.einsum("bthd,bshd,bts,bshe->bthe", q, k, fall, v)


def _strange(world: World, batch: dict[str, Tensor]) -> Tensor:
    (part,) = microbatches(batch, _layout(1, 2), 0, world.rank)
    core = _core(world, 1, 2, Strange())
    return core(*(part[n] for n in ("q", "k", "v", "positions", "documents")))


def test_a_strangers_core_runs_under_ulysses_on_all_tokens():
    batch = _batch(24, 4, 4, documents=True)
    batch["positions"] = torch.arange(24).repeat(2, 1)
    got = torch.cat(launch(_strange, 2, batch, backend="threads"), 1)
    expected = Strange()(
        *(batch[n] for n in ("q", "k", "v", "positions", "documents"))
    )
    assert torch.allclose(got, expected, rtol=1e-13, atol=0)
