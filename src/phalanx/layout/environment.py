"""Which rank this process is, and of how many: what launchers leave in the environment.

torchrun, Ray Train and Accelerate set RANK and its companions, Slurm's srun SLURM_PROCID. A container of a
Kubeflow TrainJob has PET_NNODES and a SkyPilot task SKYPILOT_NUM_NODES: these start one process on
each node, and torchrun there starts the ranks (`node_command`). How ranks then meet is in `comm/join.py`.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

PORT = 29500  # torch's own choice, where a launcher names none


class EnvironmentMistake(ValueError):
    """What a launcher has left in the environment cannot be right: which variable, and its value."""


@dataclass(frozen=True)
class Rendezvous:
    """Which rank this process is, of how many, and where all of them meet."""

    rank: int
    size: int
    local: int  # the number of this rank on its host
    host: str
    port: int
    served: bool = False  # the launcher runs the store already
    attempt: int = 0  # how often the launcher has started the ranks again
    one_host: bool = False  # known to be all on this host
    source: str = ""  # the launcher and its variables
    agent: bool = False  # the parent of this process is torchrun's agent

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}, from {self.source}"


def rendezvous(environment: Mapping[str, str]) -> Rendezvous | None:
    """The rank that the environment gives this process, None if it gives none."""
    if any(name in environment for name in ("RANK", "WORLD_SIZE")):
        at = _torchrun(environment)
    elif "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment:
        # A batch script itself has no SLURM_STEP_ID of a number; only srun's tasks are ranks.
        at = _slurm(environment)
    else:
        return None
    if not 0 <= at.rank < at.size or not 0 <= at.local <= at.rank:
        raise EnvironmentMistake(
            f"the environment says rank {at.rank}, local rank {at.local}, of {at.size} ranks: "
            "a rank lies below the number of ranks, and a local rank is at most the rank."
        )
    if not 0 < at.port < 65536:
        raise EnvironmentMistake(f"MASTER_PORT is {at.port}; a port lies between 1 and 65535.")
    return at


def _torchrun(environment: Mapping[str, str]) -> Rendezvous:
    agent = "TORCHELASTIC_RUN_ID" in environment
    environment = {"LOCAL_RANK": "0", **environment}  # a pod of Kubernetes with one rank has none
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    rank, size, local, port = (_whole(environment, name, "torchrun") for name in names)
    return Rendezvous(
        rank,
        size,
        local,
        _text(environment, "MASTER_ADDR", "torchrun"),
        port,
        served=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=int(environment.get("TORCHELASTIC_RESTART_COUNT", 0)),
        one_host=environment.get("LOCAL_WORLD_SIZE") == str(size),
        source=f"RANK and WORLD_SIZE of {'torchrun' if agent else 'a launcher'}",
        agent=agent,
    )


def _slurm(environment: Mapping[str, str]) -> Rendezvous:
    names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID")
    rank, size, local, job = (_whole(environment, name, "srun") for name in names)
    one = (environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES")) == "1"
    host = environment.get("MASTER_ADDR")
    if not host:  # gpu[003-007,9],io1 begins with gpu003
        nodes = _text(environment, "SLURM_JOB_NODELIST", "srun")
        first = re.match(r"([^\[,]+)(?:\[(\w+))?", nodes)
        if first is None:
            raise EnvironmentMistake(f"SLURM_JOB_NODELIST is {nodes!r}, which names no node.")
        host = first[1] + (first[2] or "")
    # All tasks of a job must guess the same port; two jobs on a node seldom share it.
    port = int(environment.get("MASTER_PORT", 20000 + job % 20000))
    source = "SLURM_PROCID and SLURM_NTASKS of Slurm"
    return Rendezvous(rank, size, local, host, port, one_host=one, source=source)


def node_command(environment: Mapping[str, str], ranks: int | None) -> list[str] | None:
    """What starts this node's ranks where a launcher has started one process for each node, without the
    words of the command itself; None elsewhere. `ranks` is how many the layout needs, if it says."""
    if "RANK" in environment or "SLURM_PROCID" in environment:
        return None
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    if "PET_NNODES" in environment:
        return torchrun  # which reads PET_* itself
    nodes = int(environment.get("SKYPILOT_NUM_NODES", 1))
    if nodes == 1:
        return None
    gpus = _whole(environment, "SKYPILOT_NUM_GPUS_PER_NODE", "sky launch")
    addresses = _text(environment, "SKYPILOT_NODE_IPS", "sky launch").split()
    return [
        *torchrun,
        f"--nnodes={nodes}",
        f"--nproc-per-node={gpus or max(1, (ranks or nodes) // nodes)}",
        f"--node-rank={_whole(environment, 'SKYPILOT_NODE_RANK', 'sky launch')}",
        f"--master-addr={addresses[0]}",
        f"--master-port={PORT}",
    ]


def launched(environment: Mapping[str, str]) -> bool:
    """Whether a launcher has started this process, as a rank or as a node."""
    return rendezvous(environment) is not None or node_command(environment, None) is not None


def _text(environment: Mapping[str, str], name: str, launcher: str) -> str:
    if not (text := environment.get(name, "")):
        what = f"{name} is not set; start every rank with {launcher}, which sets it."
        raise EnvironmentMistake(what)
    return text


def _whole(environment: Mapping[str, str], name: str, launcher: str) -> int:
    text = _text(environment, name, launcher)
    if not re.fullmatch(r"-?\d+", text):
        raise EnvironmentMistake(f"{name} is {text!r}; it must be a whole number.")
    return int(text)
