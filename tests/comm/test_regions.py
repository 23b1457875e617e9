"""Regions are conjugate: over any group, values and gradients are those of one process."""

import pytest
import torch
from rank_threads import threads_of

from phalanx.comm import CommMisuse, Message, TallyWorld, regions

F64 = torch.float64


def whole(*shape, seed=0):
    return torch.randn(
        shape, dtype=F64, generator=torch.Generator().manual_seed(seed)
    )


def columns_and_rows(world, compiled):
    """A two-layer block cut over its hidden dim, with and without the sequence cut."""
    n, me = world.size, world.rank
    group = world.split("tp", [range(n)])

    def block(x, a, b):
        return regions.reduce(
            torch.tanh(regions.copy(x, group) @ a) @ b, group
        )

    def sequence_block(x, a, b):
        mine = regions.take(x, group, 0)
        y = torch.tanh(regions.gather_sum(mine.sin(), group, 0) @ a) @ b
        return regions.gather(regions.scatter_sum(y, group, 0).cos(), group, 0)

    results = []
    for fn in (block, sequence_block):
        fn = (
            torch.compile(fn, fullgraph=True, backend=compiled)
            if compiled
            else fn
        )
        x = whole(8, 5).requires_grad_()
        a = whole(5, 8, seed=1).chunk(n, 1)[me].clone().requires_grad_()
        b = whole(8, 3, seed=2).chunk(n, 0)[me].clone().requires_grad_()
        y = fn(x, a, b)
        (y * whole(8, 3, seed=3)).sum().backward()
        results.append((y.detach(), x.grad, a.grad, b.grad))
    world.clear()
    return results


def one_process():
    results = []
    for sequence in (False, True):
        x, a, b = (
            whole(*shape, seed=seed).requires_grad_()
            for seed, shape in enumerate([(8, 5), (5, 8), (8, 3)])
        )
        y = torch.tanh((x.sin() if sequence else x) @ a) @ b
        y = y.cos() if sequence else y
        (y * whole(8, 3, seed=3)).sum().backward()
        results.append((y.detach(), x.grad, a.grad, b.grad))
    return results


def assert_like_one_process(results):
    n = len(results)
    for me, got in enumerate(results):
        for (y, dx, da, db), (wy, wdx, wda, wdb) in zip(
            got, one_process(), strict=True
        ):
            wanted = (wy, wdx, wda.chunk(n, 1)[me], wdb.chunk(n, 0)[me])
            for value, want in zip((y, dx, da, db), wanted, strict=True):
                torch.testing.assert_close(value, want, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    "name",
    [
        "alone-1",
        "threads-1",
        "threads-2",
        "threads-4",
        "threads-8",
        "shm-2",
        "shm-4",
        "gloo-2",
        "gloo-4",
    ],
)
def test_a_block_cut_by_regions_has_the_values_and_gradients_of_one_process(
    name, kept
):
    run, _ = kept(name)
    assert_like_one_process(run(columns_and_rows, None))


def test_regions_compile_without_a_graph_break_and_change_nothing():
    assert_like_one_process(
        threads_of(2, timeout=300.0)(columns_and_rows, "aot_eager")
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["threads-4", "shm-2", "gloo-2"])
def test_regions_compile_with_inductor(name, kept):
    run, _ = kept(name)
    assert_like_one_process(run(columns_and_rows, "inductor"))


DIMS = [(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1), (-1, 0), (0, -1)]


def exchanges(world):
    """Every pair of dims: the values, and the gradient of a weighted sum. In memory the last dim of
    what is exchanged comes first."""
    group = world.split("cp", [range(world.size)])
    results = []
    for split, join in DIMS:
        mine = whole(4, 8, 4).chunk(world.size, join)[world.rank]
        x = mine.mT.contiguous().mT.requires_grad_()
        y = regions.exchange(x, group, split, join)
        (
            y * whole(4, 8, 4, seed=1).chunk(world.size, split)[world.rank]
        ).sum().backward()
        results.append((y.detach(), x.grad))
    world.clear()
    return results


@pytest.mark.parametrize(
    "name", ["alone-1", "threads-2", "threads-4", "shm-4", "gloo-2", "gloo-4"]
)
def test_exchange_moves_the_cut_from_one_dim_to_another_and_its_gradient_back(
    name, kept
):
    run, n = kept(name)
    for me, pairs in enumerate(run(exchanges)):
        for (split, join), (y, dx) in zip(DIMS, pairs, strict=True):
            assert torch.equal(y, whole(4, 8, 4).chunk(n, split)[me])
            assert torch.equal(dx, whole(4, 8, 4, seed=1).chunk(n, join)[me])


def inner_products(world):
    """<region(x), y> and <x, conjugate(y)>, summed over the ranks, for each linear pair."""
    n, me = world.size, world.rank
    group = world.split("tp", [range(n)])
    results = []
    for dim in (0, 1, -1):
        for region in (regions.gather_sum, regions.scatter_sum):
            x = whole(4, 8, seed=10 + me).requires_grad_()
            out = region(x, group, dim)
            y = whole(*out.shape, seed=20 + me)
            out.backward(y)
            results.append(
                (
                    (out.detach() * y).sum().item(),
                    (x.detach() * x.grad).sum().item(),
                )
            )
    world.clear()
    return results


def test_backward_of_a_sum_region_is_its_adjoint_over_all_ranks():
    for pairs in zip(*threads_of(4)(inner_products), strict=True):
        forward, backward = (sum(side) for side in zip(*pairs, strict=True))
        assert forward == pytest.approx(backward, rel=1e-12)


def test_on_a_group_of_one_every_region_returns_its_very_input():
    group = TallyWorld(0, 1).split("tp", [[0]])
    x = torch.zeros(3, 5)
    for name in ("copy", "reduce"):
        assert getattr(regions, name)(x, group) is x
    for name in ("gather", "take", "gather_sum", "scatter_sum"):
        assert getattr(regions, name)(x, group, 1) is x
    assert regions.exchange(x, group, 0, 1) is x


def test_a_dim_that_does_not_divide_is_refused_with_the_size_to_pad_to():
    group = TallyWorld(1, 4).split("tp", [range(4)])
    with pytest.raises(
        CommMisuse,
        match="dim 1 of size 6 does not divide by 4 ranks; pad it to 8",
    ):
        regions.scatter_sum(torch.zeros(2, 6, device="meta"), group, -1)


def test_a_tally_weighs_forward_and_backward_on_meta_tensors():
    world = TallyWorld(1, 8)
    group = world.split("tp", [range(4), range(4, 8)])
    assert (group.rank, group.size) == (1, 4)
    x = torch.zeros(8, 6, device="meta", requires_grad=True)
    y = regions.reduce(regions.copy(x, group), group)
    y = regions.gather_sum(regions.scatter_sum(y, group, 0), group, 0)
    y = regions.gather(regions.take(y, group, 0), group, 0)
    assert y.shape == (8, 6)
    y.sum().backward()
    full = 8 * 6 * 4
    # Forward.
    kinds = [
        "all_reduce",
        "reduce_scatter",
        "all_gather",
        "all_gather",
    ]
    # Backward.
    kinds += [
        "all_gather",
        "reduce_scatter",
        "all_gather",
        "all_reduce",
    ]
    assert world.ledger == [Message("tp", kind, full, 4) for kind in kinds]


def test_a_tally_writes_down_every_kind_with_the_bytes_of_its_whole_buffer():
    world = TallyWorld(0, 2)
    group = world.split("dp", [[0, 1]])
    x, out = torch.zeros(6, device="meta"), torch.zeros(12, device="meta")
    group.all_gather(out, x).wait()
    group.reduce_scatter(x, out)
    group.all_reduce(x.bfloat16(), "max")
    group.reduce(x, 1)
    group.broadcast(x, 1)
    group.all_to_all(x.clone(), x)
    group.gather([x, x.clone()], x, 0)
    group.scatter(x, None, 1)
    group.send(x, 1)
    group.receive(x, 1)
    group.barrier()
    assert [(each.collective, each.bytes) for each in world.ledger] == [
        ("all_gather", 48),
        ("reduce_scatter", 48),
        ("all_reduce", 12),
        ("reduce", 24),
        ("broadcast", 24),
        ("all_to_all", 24),
        ("gather", 48),
        ("scatter", 48),
        ("send", 24),
        ("receive", 24),
    ]
