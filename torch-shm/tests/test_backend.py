"""torch's own parallel code runs over shared memory unchanged."""

import copy
import json
import os
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import apart, init, over_shm
from torch import nn

import torch_shm  # noqa: F401 - it registers the backend

F64 = torch.float64


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 10, dtype=F64),
        nn.Tanh(),
        nn.Linear(10, 6, dtype=F64),
        nn.Tanh(),
    )


def batch(rank):
    return torch.randn(
        4, 6, dtype=F64, generator=torch.Generator().manual_seed(rank)
    )


def train(net, x, steps=3):
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()


def one_process(size):
    net = model()
    train(net, torch.cat([batch(rank) for rank in range(size)]))
    return [p.detach() for p in net.parameters()]


def as_ddp(rank, size):
    net = model()
    train(nn.parallel.DistributedDataParallel(net), batch(rank))
    return [p.detach() for p in net.parameters()]


def as_fsdp2(rank, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (size,))
    net = model()
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh)
    train(net, batch(rank))
    return [p.full_tensor().detach() for p in net.parameters()]


def as_dtensors(rank, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    net = copy.deepcopy(model())
    mesh = init_device_mesh("cpu", (size,))
    parallelize_module(
        net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    train(net, torch.cat([batch(i) for i in range(size)]))
    return [p.full_tensor().detach() for p in net.parameters()]


@pytest.mark.parametrize("fn", [as_ddp, as_fsdp2, as_dtensors])
def test_torch_s_own_parallel_training_gives_the_weights_of_one_process(fn):
    # First, so that the ranks inherit what optimizers import.
    wanted = one_process(2)
    for weights in over_shm(fn):
        for got, want in zip(weights, wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def every_call(rank, size):
    """Each function of torch.distributed, on a group of all and on a group of two."""
    pair = dist.new_group([0, 2])
    mine = torch.full((4,), float(rank + 1))
    got = {}
    total = mine.clone()
    dist.all_reduce(total)
    got["all_reduce"] = total
    strided = torch.stack([mine, -mine], 1)[:, 0]
    dist.all_reduce(strided, dist.ReduceOp.MAX)
    got["strided"] = strided.clone()
    got["broadcast"] = mine.clone()
    dist.broadcast(got["broadcast"], 2)
    got["reduce"] = mine.clone()
    dist.reduce(got["reduce"], 1)
    parts = [torch.zeros(4) for _ in range(size)]
    dist.all_gather(parts, mine)
    got["all_gather"] = torch.stack(parts)
    got["scattered"] = torch.zeros(4)
    dist.reduce_scatter(
        got["scattered"], [mine * (i + 1) for i in range(size)]
    )
    outs = [torch.zeros(4) for _ in range(size)]
    dist.all_to_all(outs, [mine * 10 + i for i in range(size)])
    got["all_to_all"] = torch.stack(outs)
    dist.gather(mine, parts if rank == 0 else None, 0)
    got["gather"] = torch.stack(parts)
    got["scatter"] = torch.zeros(4)
    dist.scatter(
        got["scatter"],
        [mine * i for i in range(size)] if rank == 1 else None,
        1,
    )
    if rank != 1:
        got["pair"] = mine.clone()
        dist.all_reduce(got["pair"], group=pair)
    letter = torch.zeros(4)
    # Receives first: neither is in the other's way.
    asked = [
        dist.P2POp(dist.irecv, letter, (rank - 1) % size),
        dist.P2POp(dist.isend, mine, (rank + 1) % size),
    ]
    for work in dist.batch_isend_irecv(asked):
        work.wait()
    got["letter"] = letter
    said = [None] * size
    dist.all_gather_object(said, f"rank {rank}")
    dist.barrier()
    return {key: x[..., 0].tolist() for key, x in got.items()} | {
        "objects": said
    }


def test_the_functions_of_torch_distributed_do_what_they_say():
    for rank, got in enumerate(over_shm(every_call, 3)):
        wanted = {
            "all_reduce": 6.0,
            "strided": 3.0,
            "broadcast": 3.0,
            "reduce": 6.0 if rank == 1 else rank + 1.0,
            "all_gather": [1.0, 2.0, 3.0],
            "scattered": 6.0 * (rank + 1),
            "all_to_all": [10.0 * (i + 1) + rank for i in range(3)],
            "gather": [1.0, 2.0, 3.0],
            "scatter": 2.0 * rank,
            "pair": 4.0,
            "letter": (rank - 1) % 3 + 1.0,
            "objects": ["rank 0", "rank 1", "rank 2"],
        }
        assert got == {
            key: value
            for key, value in wanted.items()
            if key != "pair" or rank != 1
        }


def two_go_on(rank, size, path):
    """Rank 2 makes its last call and exits; the others go on, and one waits for it in the end."""
    init("shm", path, rank, size)
    pair = dist.new_group([0, 1])
    x = torch.ones(4)
    dist.all_reduce(x)
    if rank == 2:
        os._exit(0)
    time.sleep(0.3)  # it has gone
    for _ in range(3):
        dist.all_reduce(x, group=pair)
        dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
    with pytest.raises(
        RuntimeError, match=r"rank 2 is lost, its process \d+ has ended"
    ):
        dist.all_reduce(torch.ones(2)) if rank == 0 else dist.recv(x, 2)
    # That ended rank 0's collectives of the group, and nothing else.
    dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
    return x[0].item()


def test_a_rank_that_exits_fails_the_calls_of_those_who_wait_for_it_and_no_others():
    assert apart(two_go_on, 3) == {0: 24.0, 1: 24.0}


def last_words(rank, size, path):
    """Rank 1 sends and exits at once: what it has sent is there."""
    init("shm", path, rank, size)
    x = torch.full((5,), 3.0)
    if rank == 1:
        dist.send(x, 0)
        dist.send(2 * x, 0)
        os._exit(0)
    time.sleep(0.3)
    y = torch.zeros(5)
    dist.recv(y, 1)
    dist.recv(x, 1)
    return (x + y)[0].item()


def test_what_a_rank_sent_before_it_exited_arrives():
    assert apart(last_words, 2) == {0: 9.0}


def one_in_another_container(rank, size, path, what):
    from torch_shm import backend as shared

    if rank == 1:
        host = shared._host() | {what: "elsewhere"}
        shared._host = lambda: host
    try:
        init("shm", path, rank, size)
    except ValueError as error:
        return str(error)
    return "joined"


@pytest.mark.parametrize("what", ["machine", "pid namespace", "container"])
def test_a_rank_that_cannot_share_memory_is_refused_by_name_on_all_ranks(what):
    got = apart(one_in_another_container, 3, what)
    assert len(got) == 3
    for sentence in got.values():
        assert f"rank 1 is in a different {what} than rank 0" in sentence
        assert "or use gloo" in sentence


def one_waits_elsewhere(rank, size):
    """Rank 0 starts a long call of one group and waits in another, where rank 1 comes after it."""
    a, b = dist.new_group(list(range(size))), dist.new_group(list(range(size)))
    x, y = torch.full((3_000_000,), 1.0), torch.ones(3)
    if rank == 0:
        from torch_shm import backend as shared

        # Nothing but the wait in group b moves the call of group a.
        shared._background._thread = "none is started"
        work = dist.all_reduce(x, group=a, async_op=True)
        dist.all_reduce(y, group=b)
        work.wait()
    else:
        dist.all_reduce(x, group=a)
        dist.all_reduce(y, group=b)
    return x[0].item(), x[-1].item(), y[0].item()


def test_calls_of_one_group_go_on_while_another_group_is_waited_for():
    assert over_shm(one_waits_elsewhere) == [(2.0, 2.0, 2.0)] * 2


def nobody_waits(rank, size):
    """Rank 0 starts a long call and computes; rank 1 needs no more of it than that."""
    x = torch.full((3_000_000,), 1.0)
    if rank:
        dist.all_reduce(x)
        return x[-1].item()
    work = dist.all_reduce(x, async_op=True)
    twice = work.get_future().then(lambda future: future.value()[0] * 2)
    while not twice.done():
        time.sleep(0.01)
    return twice.value()[-1].item(), work.is_completed(), work.is_success()


def test_a_call_that_nobody_waits_for_ends_and_so_does_its_future():
    assert over_shm(nobody_waits) == [(4.0, True, True), 2.0]


def waits_for_a_while(rank, size):
    x = torch.zeros(2)
    if rank:
        dist.barrier()
        dist.send(torch.full((2,), 5.0), 0)
        return None
    work = dist.irecv(x, 1)
    with pytest.raises(
        RuntimeError, match=r"rank 1 has not arrived in 0\.2 s"
    ) as caught:
        work.wait(timedelta(seconds=0.2))
    done = work.is_completed()
    dist.barrier()
    work.wait(timedelta(seconds=30.0))
    return "receive on" in str(caught.value), done, x[0].item()


def test_a_wait_with_a_timeout_gives_up_and_the_call_goes_on():
    assert over_shm(waits_for_a_while)[0] == (True, False, 5.0)


def from_anyone(rank, size):
    """Rank 0 receives from whoever sends, and by tag in the opposite order of sending."""
    if rank:
        for tag in (1, 2, 3):
            dist.send(torch.tensor([10.0 * rank + tag]), 0, tag=tag)
        dist.send(torch.tensor([float(rank)]), 0)
        return None
    got, x = {}, torch.zeros(1)
    for tag in (3, 2, 1):
        for _ in range(size - 1):
            source = dist.recv(x, tag=tag)
            got[source, tag] = x.item()
    for _ in range(size - 1):
        work = dist.irecv(x)
        work.wait()
        got[work.source_rank(), 0] = x.item()
    return got


def test_receives_from_any_source_and_by_tag_say_who_sent():
    wanted = {
        (rank, tag): (10.0 if tag else 1.0) * rank + tag
        for rank in (1, 2)
        for tag in range(4)
    }
    assert over_shm(from_anyone, 3)[0] == wanted


def coalesced(rank, size):
    """Gathers and scatters of several tensors, and into tensors that are given."""
    group = dist.group.WORLD
    xs = [torch.full((2,), float(rank)), torch.full((3,), 10.0 + rank)]
    lists = [[torch.zeros(2), torch.zeros(3)] for _ in range(size)]
    group.allgather_coalesced(lists, xs).wait()
    flat = [torch.zeros(2 * size), torch.zeros(3 * size)]
    group.allgather_into_tensor_coalesced(flat, xs).wait()
    summed = [torch.zeros(2), torch.zeros(3)]
    opts = dist.ReduceScatterOptions()
    group.reduce_scatter_tensor_coalesced(summed, flat, opts).wait()
    base = torch.zeros(2 * size)
    group._allgather_base(base, xs[0]).wait()
    both = [torch.ones(2), torch.ones(3, dtype=torch.float64)]
    group.allreduce_coalesced(both).wait()
    sparse = torch.sparse_coo_tensor([[rank, 2]], [1.0, 1.0], (4,))
    dist.all_reduce(sparse)
    return [
        [part.tolist() for parts in lists for part in parts],
        [x.tolist() for x in (*flat, *summed, base, *both, sparse.to_dense())],
    ]


def test_coalesced_calls_and_those_into_given_tensors_are_those_of_gloo():
    assert over_shm(coalesced) == [
        [
            [[0.0] * 2, [10.0] * 3, [1.0] * 2, [11.0] * 3],
            [
                [0.0, 0.0, 1.0, 1.0],
                [10.0] * 3 + [11.0] * 3,
                [2.0 * rank] * 2,
                [20.0 + 2 * rank] * 3,
                [0.0, 0.0, 1.0, 1.0],
                [2.0] * 2,
                [2.0] * 3,
                [1.0, 1.0, 2.0, 0.0],
            ],
        ]
        for rank in range(2)
    ]


def below_autograd(rank, size):
    """How often each call has counted up the version of what it wrote, on shm and on gloo."""
    gloo = dist.new_group(list(range(size)), backend="gloo")
    counts = []
    for group in (None, gloo):
        x, leaf = torch.ones(4), torch.ones(4, requires_grad=True)
        out, parts = (
            torch.zeros(4 * size),
            [torch.zeros(4) for _ in range(size)],
        )
        strided = torch.ones(4, 2)[:, 0]
        dist.all_reduce(x, group=group)
        dist.all_reduce(leaf, group=group)
        dist.broadcast(x, 0, group=group)
        dist.all_to_all_single(out, out.clone(), group=group)
        dist.scatter(x, parts if rank == 0 else None, 0, group=group)
        dist.send(x, 0, group=group) if rank else dist.recv(x, 1, group=group)
        counts.append([x._version, leaf._version, out._version])
        if group is None:
            dist.all_reduce(strided)
            dist.all_gather(parts, x)
            dist.reduce_scatter(x, parts)
            counts.append([strided._version, parts[0]._version, x._version])
    # What was saved for backward may be communicated after, as with torch's own backends.
    y = (leaf * leaf).sum()
    dist.all_reduce(leaf)
    y.backward()
    return counts


def test_results_are_written_below_autograd_as_gloo_writes_them():
    assert over_shm(below_autograd) == [[[0, 0, 0]] * 3] * 2


def beside_gloo(rank, size):
    """Calls of a gloo group in a process that has groups of shm too."""
    gloo = dist.new_group(
        list(range(size)), backend="gloo", timeout=timedelta(seconds=30)
    )
    dist.all_reduce(torch.ones(4))
    for _ in range(1000):
        x = torch.ones(4)
        dist.all_reduce(x, group=gloo)
        dist.broadcast(x, 0, group=gloo)
    return x.tolist()


def test_calls_of_other_groups_release_the_interpreters_lock():
    # With the lock held a call waits for a thread of gloo that waits for the lock.
    assert over_shm(beside_gloo) == [[2.0] * 4] * 2


def watched(rank, size):
    """What the profiler and CommDebugMode see, by names of torch."""
    from torch.distributed.tensor.debug import CommDebugMode

    x, out = torch.ones(4), torch.zeros(4 * size)
    with torch.profiler.profile() as profile:
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        dist.barrier()
    with CommDebugMode() as mode:
        dist.all_reduce(x)
        dist.all_gather(list(out.view(size, 4)), x)
    names = {event.name for event in profile.events()}
    seen = {
        "c10d::allreduce_",
        "shm:allreduce",
        "c10d::broadcast_",
        "c10d::barrier",
    } <= names
    return seen, {
        str(op): count for op, count in mode.get_comm_counts().items()
    }


def test_the_profiler_and_dispatch_modes_see_the_calls_under_torch_s_names():
    assert (
        over_shm(watched)
        == [(True, {"c10d.allreduce_": 1, "c10d.allgather_": 1})] * 2
    )


def on_two_devices(rank, size, path):
    """A backend for each device. Where there is no GPU the other one can be made and not used."""
    init("cpu:shm,cuda:gloo", path, rank, size)
    other = dist.new_group([0, 1], backend="gloo")
    x, y = torch.full((3,), rank + 1.0), torch.full((3,), rank + 1.0)
    dist.all_reduce(x)
    dist.all_reduce(y, group=other)
    names = [
        group._get_backend(torch.device(device)).name()
        for group, device in ((dist.group.WORLD, "cuda"), (other, "cpu"))
    ]
    config = dist.get_backend_config()
    dist.destroy_process_group()
    # The names of groups are used again; these are not shm's any more.
    init("gloo", path + "2", rank, size)
    dist.all_reduce(x)
    dist.destroy_process_group()
    return x[0].item(), y[0].item(), names, config


def test_each_device_has_its_own_backend_and_other_groups_are_left_alone():
    wanted = (6.0, 3.0, ["gloo", "gloo"], "cpu:shm,cuda:gloo")
    assert apart(on_two_devices, 2) == {0: wanted, 1: wanted}


def refused(rank, size):
    """What the refused calls say."""
    group, x, texts = dist.group.WORLD, torch.ones(2), {}
    calls = {
        "band": lambda: dist.all_reduce(
            torch.ones(2, dtype=torch.int64), dist.ReduceOp.BAND
        ),
        "sparse": lambda: dist.all_reduce(x.to_sparse(), dist.ReduceOp.MAX),
        "monitored": lambda: group.monitored_barrier(),
        "sizes": lambda: dist.all_gather_into_tensor(torch.ones(3), x),
    }
    for name, call in calls.items():
        try:
            call()
        except RuntimeError as error:
            texts[name] = str(error)
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        dist.new_group(list(range(size)))
    except ValueError as error:
        texts["detail"] = str(error)
    dist.set_debug_level(dist.DebugLevel.OFF)
    dist.all_reduce(x)  # nothing was sent, so all goes on
    return texts, x[0].item()


def test_what_it_cannot_do_is_refused_with_the_call_s_name_and_a_way_out():
    for texts, x in over_shm(refused):
        assert (
            "no reduction BAND; there are sum, average, product, min, max"
            in texts["band"]
        )
        assert "sparse tensors can only be summed" in texts["sparse"]
        assert "no monitored_barrier; use barrier" in texts["monitored"]
        assert (
            "all_gather on group 0: out has 3 elements, 4 are needed"
            in texts["sizes"]
        )
        assert "TORCH_DISTRIBUTED_DEBUG=DETAIL" in texts["detail"]
        assert x == 2.0


# What of DistributedTest does not pass: the reason, which README.md gives in words.
REFUSED = {
    "test_all_gather_object_subgroup": "TORCH_DISTRIBUTED_DEBUG=DETAIL",
    "test_gather_object_subgroup": "TORCH_DISTRIBUTED_DEBUG=DETAIL",
    "test_monitored_barrier_gloo": "monitored_barrier",
    "test_monitored_barrier_gloo_subgroup": "monitored_barrier",
    "test_monitored_barrier_gloo_rank_0_timeout": "monitored_barrier",
    "test_monitored_barrier_failure_order": "monitored_barrier",
    "test_monitored_barrier_wait_all_ranks": "monitored_barrier",
    "test_get_backend": "it asks for the name gloo",
    "test_ddp_logging_data_cpu": "torch calls every backend that is not its own 'custom'",
}


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_torch_s_own_tests_of_a_backend_pass_as_they_do_on_gloo(
    size, tmp_path
):
    results = {}
    for backend in ("gloo", "shm"):
        out = tmp_path / f"{backend}.json"
        script = os.path.join(os.path.dirname(__file__), "torch_suite.py")
        subprocess.run(
            [sys.executable, script, backend, str(size), str(out)], check=True
        )
        results[backend] = json.loads(out.read_text())
    passed = {
        name for name, result in results["gloo"].items() if result == "ok"
    }
    assert len(passed) > 80
    failed = {
        name: results["shm"][name]
        for name in passed
        if results["shm"][name] != "ok"
    }
    assert {
        name: text for name, text in failed.items() if name not in REFUSED
    } == {}
