"""What starts a run over NCCL, without a GPU: the choice of devices and backends on fake machines,
and the groups of every layout over gloo by the code that makes them over NCCL.

Every run over NCCL without a pipeline died at its start, ranks chose backends each for itself, and
two ranks on one GPU computed on the CPU without a word."""

import os
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from as_nccl import nccl_worlds, use_every_group

from phalanx.comm import AloneWorld, CommMisuse, World, choose, join, pool
from phalanx.comm.devices import Devices
from phalanx.comm.join import meet, offer
from phalanx.comm.launch import used_gpus
from phalanx.comm.pool import SHARE_GPUS
from phalanx.comm.process import FLOW_BLOCKS, ProcessWorld, apart
from phalanx.layout import Layout
from phalanx.layout.choices import traits
from phalanx.layout.device_environment import SETTINGS, set_up
from phalanx.layout.environment import Rendezvous
from phalanx.parallel import build_model, open_groups
from phalanx.training.program import program_of
from phalanx.verification import SHAPES, covering, every_layout, verify

pytestmark = pytest.mark.long_file


class Machine(Devices):
    """A process that sees these GPUs."""

    unused = ""

    def __init__(self, *gpus: str, nccl: bool = True) -> None:
        self._gpus, self._nccl = gpus, nccl

    @property
    def gpus(self) -> int:
        return len(self._gpus)

    def identity(self, index: int) -> str:
        return self._gpus[index]

    def has(self, backend: str) -> bool:
        return backend == "gloo" or self._nccl


def test_what_is_set_in_the_environment_is_left_and_the_rest_is_set() -> None:
    own = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "backend:native",
    }
    environment = dict(own)
    set_up(environment)
    assert environment == own | {
        "TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
    }  # fmt: skip


class Late(Machine):
    """A machine that records what the environment holds when it is first asked for its GPUs."""

    def __init__(self, environment):
        super().__init__("a")
        self.environment, self.seen = environment, None

    @property
    def gpus(self):
        self.seen = self.seen or dict(self.environment)
        return 0


def test_the_environment_is_set_before_the_driver_starts(monkeypatch):
    """To count GPUs starts the driver, which reads the variables once."""
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    machine = Late(os.environ)
    assert join(environment={}, devices=machine).size == 1
    assert machine.seen is not None
    assert {name: machine.seen.get(name) for name in SETTINGS} == SETTINGS


def test_the_command_sets_the_environment_before_torch_is_imported():
    code = (
        "import os, sys; from phalanx.cli.main import main; assert 'torch' not in sys.modules;"
        " main(['--version']); print(os.environ['CUDA_DEVICE_MAX_CONNECTIONS'], 'torch' in sys.modules)"
    )
    environment = {k: v for k, v in os.environ.items() if k not in SETTINGS}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "32 False"


class FakeOptions:
    def __init__(self, is_high_priority_stream=False):
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(max_ctas=0)


def test_communicators_have_high_priority_and_flows_few_blocks(monkeypatch):
    nccl = SimpleNamespace(Options=FakeOptions)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    asked = []
    monkeypatch.setattr(
        dist, "split_group", lambda **terms: asked.append(terms["pg_options"])
    )
    world = Counting(2)
    world._timeout = timedelta(seconds=1)
    for blocks in (0, FLOW_BLOCKS):
        ProcessWorld._split_communicator(world, "name", [(0, 1)], [], blocks)
    assert all(options.is_high_priority_stream for options in asked)
    # torch compares it with its argument of the same name, and warns.
    assert {options._timeout for options in asked} == {world._timeout}
    assert [options.config.max_ctas for options in asked] == [0, FLOW_BLOCKS]


def test_parts_of_one_gpu_are_different_devices(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1f,MIG-2c")
    assert [Devices().identity(index) for index in (0, 1)] == [
        "MIG-1f",
        "MIG-2c",
    ]


def test_an_accelerator_that_is_not_used_is_named(capsys):
    machine = Machine()
    machine.unused = "xpu"
    join(environment={}, devices=machine)
    assert (
        "'xpu'; phalanx computes on NVIDIA and AMD GPUs only"
        in capsys.readouterr().err
    )
    machine.unused = ""
    join(environment={}, devices=machine)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "machine, ranks, backend, kind, gpus",
    [
        (Machine(), 1, "auto", "alone", 0),
        (Machine(), 4, "auto", "shm", 0),
        (Machine(), 4, "threads", "threads", 0),
        (Machine("a"), 1, "auto", "alone", 1),
        (Machine("a", "b"), 2, "auto", "nccl", 2),
        (Machine("a", "b"), 2, "gloo", "gloo", 0),
        (Machine("a", "b"), 2, "shm", "shm", 0),
        # Fewer GPUs than ranks: they share them. It was the CPU, while a plan counted on the GPU.
        (Machine("a"), 2, "auto", "threads", 1),
        (Machine("a", "b"), 3, "auto", "threads", 2),
        (Machine("a", "b", nccl=False), 2, "auto", "threads", 2),
    ],
)
def test_local_ranks_compute_on_gpus_where_there_are_any(
    machine, ranks, backend, kind, gpus
):
    assert choose(backend, ranks, machine) == kind
    assert used_gpus(kind, ranks, machine) == gpus


def test_nccl_for_more_ranks_than_gpus_is_refused():
    with pytest.raises(
        CommMisuse,
        match="2 ranks need 2 GPUs, and this machine has 1; use backend gloo",
    ):
        choose("nccl", 2, Machine("a"))


def test_ranks_over_nccl_share_a_gpu_where_the_environment_says_so(
    monkeypatch,
):
    """So that one GPU shows what ranks call of NCCL, which refuses two ranks of one host on it."""
    monkeypatch.setenv(SHARE_GPUS, "1")
    assert choose("nccl", 4, Machine("a")) == "nccl"
    with pytest.raises(CommMisuse, match="this machine has 0"):
        choose("nccl", 4, Machine())
    hosts = [
        pool._as_if_on_a_host_of_its_own(rank)["NCCL_HOSTID"]
        for rank in range(4)
    ]
    assert len(set(hosts)) == 4


def met(machines, groups=None, stores=None):
    """What each rank of a launcher settles with the others: a backend, or an error's text."""
    size = len(machines)
    stores = stores or [dist.HashStore()] * size
    ends = [None] * size

    def rank_thread(rank):
        at = Rendezvous(rank, size, rank, "", 1, served=True)
        try:
            offered = offer(
                at, groups[rank] if groups else "auto", machines[rank]
            )
            ends[rank] = meet(stores[rank], at, offered, timeout=20.0)
        except CommMisuse as error:
            ends[rank] = str(error)

    threads = [
        threading.Thread(target=rank_thread, args=(r,), daemon=True)
        for r in range(size)
    ]
    for thread in reversed(threads):  # rank 0 comes last
        thread.start()
    for thread in threads:
        thread.join(30.0)
    return ends


HOST = Machine("a", "b")


@pytest.mark.parametrize(
    "machines, backend",
    [
        ([Machine()] * 3, "gloo"),
        ([HOST, HOST], "nccl"),
        # Slurm's --gpus-per-task=1: each rank sees one, its own, as number 0.
        ([Machine("a"), Machine("b"), Machine("c")], "nccl"),
    ],
)
def test_all_ranks_of_a_launcher_take_one_backend(machines, backend):
    assert met(machines) == [backend] * len(machines)


@pytest.mark.parametrize(
    "machines, said",
    [
        ([HOST, HOST, HOST], "rank 2 has no GPU"),
        ([Machine("a"), Machine("a")], "ranks 0 and 1 have the same GPU"),
        ([Machine("a"), Machine()], "rank 1 has no GPU"),
        ([HOST, Machine("a", "b", nccl=False)], "rank 1 has no NCCL"),
    ],
)
def test_a_backend_that_not_all_ranks_can_use_is_refused_by_all_of_them(
    machines, said
):
    ends = met(machines)
    assert len(set(ends)) == 1
    assert said in ends[0]
    assert "use backend gloo" in ends[0]


def test_ranks_that_were_given_other_backends_all_refuse():
    ends = met([HOST, HOST], ["nccl", "gloo"])
    assert len(set(ends)) == 1
    assert "backend: rank 1 has gloo, rank 0 has nccl" in ends[0]
    assert met([HOST, HOST], ["gloo", "gloo"]) == ["gloo", "gloo"]


class CountedStore:
    """A store of one rank that counts the keys that it touches."""

    def __init__(self, store):
        self.store, self.calls = store, 0

    def __getattr__(self, name):
        # The same keys again while rank 0 waits.
        if name not in (
            "get",
            "check",
        ):
            self.calls += 1
        return getattr(self.store, name)


@pytest.mark.parametrize("ranks", [2, 64])
def test_joining_takes_as_many_calls_of_the_store_at_any_number_of_ranks(
    ranks,
):
    stores = [CountedStore(store) for store in [dist.HashStore()] * ranks]
    assert met([Machine()] * ranks, stores=stores) == ["gloo"] * ranks
    assert max(store.calls for store in stores) <= 4


def test_a_flow_from_a_rank_to_itself_is_refused():
    with pytest.raises(
        CommMisuse, match=r"flows of split 'pp' are \[\(0, 0\)\]"
    ):
        AloneWorld().split("pp", [[0]], [(0, 0)])


def layouts_of(ranks):
    """The covering subset for so many ranks, without those whose groups are the same as another's."""
    every = every_layout(SHAPES["gpt"], ranks)
    kinds = {}
    for x in covering(tuple(x for x in every if x.ranks == ranks), 1):
        # Which stages a rank has, and so the flows: of schedules no more matters.
        stages = x.chunks, traits(x.schedule).v_shape
        kinds.setdefault((x.mesh, x.shard_axes, stages), x)
    return list(kinds.values())


SLOW = pytest.mark.slow


# 5 stands for 7: the mesh of a prime number of ranks has one axis.
@pytest.mark.parametrize(
    "ranks", [4, 5, *(pytest.param(each, marks=SLOW) for each in (6, 7, 8))]
)
def test_nccl_groups_and_flows_of_every_layout_open_and_carry(ranks):
    layouts = layouts_of(ranks)
    assert any(x.pp > 1 for x in layouts) or ranks > 4
    with nccl_worlds(ranks) as run:
        counts = run(use_every_group, [str(x) for x in layouts])
    assert len(counts) == ranks
    assert all(min(mine) >= 1 for mine in counts)


class Counting(ProcessWorld):
    """One rank of many that are not there; how often it splits the default group's communicator."""

    def __init__(self, size):
        World.__init__(self, 0, size, torch.device("cpu"))
        self.native, self.split_ranks = True, []

    def _connect(self, line, source, target):
        pass

    def _connect_all(self, group):
        pass

    def _split_communicator(self, name, groups, made, blocks):
        members = [rank for group in groups for rank in group]
        assert len(set(members)) == len(members), name
        self.split_ranks.append(groups)


@pytest.mark.parametrize(
    "text, least",
    [
        ("dp8", 1),
        ("dp2 pp2 tp2", 3),
        ("dp4x2 pp2 tp4", 3),
        ("dp16 pp8 tp8 1f1b:16", 3),
    ],
)
def test_groups_take_as_many_splits_of_the_communicator_at_any_number_of_ranks(
    text, least
):
    # A `new_group` for each group and flow was 20, 45, 313 and 4,801 of them.
    layout = Layout.parse(text)
    shape = replace(SHAPES["gpt"], layers=8, heads=8, kv_heads=8)
    model = build_model(shape)
    world = Counting(layout.ranks)
    open_groups(world, layout, model, program_of(model, layout))
    assert least <= len(world.split_ranks) <= (1 if text == "dp8" else 20)
    pairs = {pair for groups in world.split_ranks for pair in groups}
    stages = layout.mesh.groups(["pp"])[0]
    assert all(pair in pairs for pair in pairwise(stages))


@pytest.mark.parametrize("stages", [2, 3, 4, 7])
def test_flows_of_a_pipeline_take_two_splits_in_each_direction(stages):
    there = [(i, i + 1) for i in range(stages - 1)]
    both = there + [(j, i) for i, j in there]
    batches = apart(both)
    assert sorted(flow for batch in batches for flow in batch) == sorted(both)
    assert len(batches) <= 4
    for batch in batches:
        ends = [rank for flow in batch for rank in flow]
        assert len(set(ends)) == len(ends)


STEPS = """dp2; tp2; cp2; cp2:ulysses; pp2; dp2x2 zero3; dp2 tp2 seq zero1; cp2 tp2; dp2 pp2 zb-v:3;
    pp2 tp2 interleaved2:4; pp4 1f1b:3; cp4; cp3; cp4:2x2 zero3; cp2 pp2 zb-v:4"""
EXPERT_STEPS = (
    "ep2; ep2 pp2 overlap dualpipe-v:4; ep2 tp2 seq experts:tp; ep2 cp2"
)


def agree(shape, layouts):
    verdicts = list(verify(SHAPES[shape], layouts, worlds=nccl_worlds))
    assert len(verdicts) == len(layouts)
    assert [v for v in verdicts if not v.passed] == []


def test_steps_by_the_code_for_nccl_agree_with_one_process():
    """Also under NCCL's rule that a first call waits for its peers, which hung every ring."""
    agree("gpt", Layout.parse_many(" ".join(STEPS.split())))


def test_steps_with_experts_by_the_code_for_nccl_agree_with_one_process():
    agree("experts", Layout.parse_many(EXPERT_STEPS))


@SLOW
@pytest.mark.parametrize("shape", ["gpt", "experts"])
def test_every_covered_layout_passes_under_the_rule_of_first_calls(shape):
    agree(shape, covering(every_layout(SHAPES[shape], 4), 1))


def crossed_first_sends(world):
    """Both ranks send first, each along its own flow, as in a ring."""
    group = world.split("ring", [(0, 1)], [(0, 1), (1, 0)])
    other = 1 - group.rank
    x = torch.full((1,), float(group.rank))
    group.send(torch.full((1,), float(group.rank)), other)
    group.receive(x, other)
    return x.item()


def test_ranks_of_a_ring_may_all_send_first():
    with nccl_worlds(2) as run:
        assert run(crossed_first_sends) == [1.0, 0.0]


def closed_and_counted(world):
    """How many groups torch still knows after groups with idle ranks were opened and closed."""
    world.split("pp", [(0, 1, 2)], [(0, 1), (1, 2)])
    world.clear()
    return len(dist.distributed_c10d._world.pg_names)


def test_closing_a_group_leaves_as_many_groups_of_torch_on_every_rank():
    # torch names a new group by their number: where it differs, members disagree on the name.
    with nccl_worlds(3) as run:
        assert len(set(run(closed_and_counted))) == 1
