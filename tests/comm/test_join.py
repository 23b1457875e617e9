"""Joining a launcher's world: what the environment says, and each way it can be wrong."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import phalanx
import torch_shm
from phalanx.comm import CommMisuse, join
from phalanx.layout.environment import (
    EnvironmentMistake,
    Rendezvous,
    node_command,
    rendezvous,
)

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_RUN_ID": "none",
    "LOCAL_WORLD_SIZE": "2",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "70001",
    "SLURM_JOB_NODELIST": "gpu[003-007,9],io1",
}


def test_a_process_that_nothing_started_is_alone():
    assert rendezvous({}) is None
    assert join(environment={}).size == 1


def test_a_tree_that_is_not_installed_joins_and_knows_its_version():
    """Its only way to phalanx is PYTHONPATH, as on a machine where nothing may be installed."""
    packages = (phalanx, torch_shm)
    source = os.pathsep.join(
        str(Path(package.__file__).parents[1]) for package in packages
    )
    code = (
        "import importlib.metadata as m\n"
        "def missing(name): raise m.PackageNotFoundError(name)\n"
        "m.version = m.distribution = missing\n"
        "from phalanx.comm.join import versions\n"
        "print(versions()['phalanx'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": source},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout.strip()) == (
        0,
        phalanx.__version__,
    ), done.stderr


def test_torchrun_and_slurm_say_the_same_in_their_own_words():
    torchrun = Rendezvous(
        3,
        4,
        1,
        "10.0.0.1",
        29500,
        True,
        2,
        False,
        "RANK and WORLD_SIZE of torchrun",
        True,
    )
    assert rendezvous(TORCHRUN) == torchrun
    port = 20000 + 70001 % 20000
    slurm = Rendezvous(
        3,
        4,
        1,
        "gpu003",
        port,
        source="SLURM_PROCID and SLURM_NTASKS of Slurm",
    )
    assert rendezvous(SLURM) == slurm
    assert (
        str(slurm)
        == "rank 3 of 4, from SLURM_PROCID and SLURM_NTASKS of Slurm"
    )
    assert rendezvous(SLURM | {"SLURM_JOB_NODELIST": "io1,io2"}).host == "io1"


def test_one_process_on_each_node_becomes_torchrun_there():
    sky = {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    }
    words = node_command(sky, None)[3:]
    assert words == [
        "--nnodes=2",
        "--nproc-per-node=8",
        "--node-rank=1",
        "--master-addr=10.0.0.1",
        "--master-port=29500",
    ]
    assert "--nproc-per-node=3" in node_command(
        sky | {"SKYPILOT_NUM_GPUS_PER_NODE": "0"}, 6
    )
    assert node_command({"PET_NNODES": "2"}, None)[1:] == [
        "-m",
        "torch.distributed.run",
    ]
    # Ranks that torchrun has started there have both.
    assert node_command(sky | TORCHRUN, None) is None
    assert node_command(sky | {"SKYPILOT_NUM_NODES": "1"}, None) is None


WRONG = [
    (
        {"MASTER_PORT": ""},
        "MASTER_PORT is not set; start every rank with torchrun",
    ),
    (
        {"WORLD_SIZE": "four"},
        "WORLD_SIZE is 'four'; it must be a whole number",
    ),
    ({"RANK": "4"}, "rank 4, local rank 1, of 4 ranks"),
    ({"MASTER_PORT": "70000"}, "MASTER_PORT is 70000; a port lies between"),
]


@pytest.mark.parametrize("change, said", WRONG)
def test_wrong_or_missing_variables_are_refused_in_a_sentence(change, said):
    with pytest.raises(EnvironmentMistake, match=said):
        join(environment=TORCHRUN | change)


def test_a_world_of_another_size_than_the_run_needs_is_refused():
    with pytest.raises(
        CommMisuse,
        match=r"needs 8 ranks, but the launcher has started 4 .*; start 8",
    ):
        join(8, environment=TORCHRUN)
    with pytest.raises(
        CommMisuse, match="needs 8 ranks, but nothing has started this process"
    ):
        join(8, environment={})


def test_a_port_in_use_is_refused_before_anybody_waits():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        environment = {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        with pytest.raises(
            CommMisuse, match=rf"127.0.0.1:{port} .*choose another MASTER_PORT"
        ):
            join(environment=environment)


JOINED = """
import torch
from phalanx.comm import join
world = join(2, backend="gloo", timeout=30.0)
x = torch.tensor([float(world.rank + 1)])
world.split("all", [range(2)]).all_reduce(x)
print(f"sum {x.item()}\\n", end="", flush=True)
world.close()
"""


@pytest.mark.slow
def test_two_processes_of_torchrun_join_one_world(tmp_path):
    script = tmp_path / "joined.py"
    script.write_text(JOINED)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
    ]
    done = subprocess.run(
        [*command, str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 3.0") == 2
