"""This process's rank and the number of ranks, from the environment that launchers set.

torchrun, Ray Train and Accelerate set RANK and its companions, Slurm's srun
SLURM_PROCID. A container of a Kubeflow TrainJob has PET_NNODES, and a SkyPilot task
SKYPILOT_NUM_NODES: these start one process on each node, and torchrun there starts the
ranks (`node_command`). `comm/join.py` then connects the ranks.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

PORT = 29500  # torch's default, if a launcher names none


class EnvironmentMistake(ValueError):
    """Raised for an impossible value from a launcher, with the variable and its value."""


@dataclass(frozen=True)
class Rendezvous:
    """This process's rank, the number of ranks, and the address where all of them meet."""

    rank: int
    size: int
    local: int  # this rank's number on its host
    host: str
    port: int
    served: bool = False  # the launcher runs the store already
    attempt: int = (
        0  # the number of times the launcher has restarted the ranks
    )
    one_host: bool = False  # True if all ranks are known to be on this host
    source: str = ""  # the launcher and its variables
    agent: bool = False  # the parent of this process is torchrun's agent

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}, from {self.source}"


def rendezvous(environment: Mapping[str, str]) -> Rendezvous | None:
    """The rank that the environment gives this process, or None."""
    # RANK and WORLD_SIZE come first: torchrun inside a Slurm job sets both
    # kinds.
    if any(name in environment for name in ("RANK", "WORLD_SIZE")):
        at = _torchrun(environment)
    elif "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment:
        # A batch script has no numeric SLURM_STEP_ID; only srun's tasks are ranks.
        at = _slurm(environment)
    else:
        return None
    # A rank's number on its host cannot exceed its number among all.
    if not 0 <= at.rank < at.size or not 0 <= at.local <= at.rank:
        raise EnvironmentMistake(
            f"the environment says rank {at.rank}, local rank {at.local}, of {at.size} ranks: "
            "a rank lies below the number of ranks, and a local rank is at most the rank."
        )
    if not 0 < at.port < 65536:
        raise EnvironmentMistake(
            f"MASTER_PORT is {at.port}; a port lies between 1 and 65535."
        )
    return at


def _torchrun(environment: Mapping[str, str]) -> Rendezvous:
    # Only torchrun's elastic agent sets this; other launchers set RANK alone.
    agent = "TORCHELASTIC_RUN_ID" in environment
    # A Kubernetes pod with one rank does not set it.
    environment = {"LOCAL_RANK": "0", **environment}
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    rank, size, local, port = (
        _whole(environment, name, "torchrun") for name in names
    )
    restarts = "TORCHELASTIC_RESTART_COUNT"
    return Rendezvous(
        rank,
        size,
        local,
        _text(environment, "MASTER_ADDR", "torchrun"),
        port,
        served=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_whole({restarts: "0", **environment}, restarts, "torchrun"),
        # All ranks are local if this host starts as many as there are in
        # total.
        one_host=environment.get("LOCAL_WORLD_SIZE") == str(size),
        source=f"RANK and WORLD_SIZE of {'torchrun' if agent else 'a launcher'}",
        agent=agent,
    )


def _slurm(environment: Mapping[str, str]) -> Rendezvous:
    """The rank of a task of srun.

    A step may have fewer nodes and tasks than its job, so the step's variables come
    first. A Slurm that does not set them has steps as large as the job.
    """
    tasks = (
        "SLURM_STEP_NUM_TASKS"
        if environment.get("SLURM_STEP_NUM_TASKS")
        else "SLURM_NTASKS"
    )
    names = ("SLURM_PROCID", tasks, "SLURM_LOCALID", "SLURM_JOB_ID")
    rank, size, local, job = (
        _whole(environment, name, "srun") for name in names
    )
    one = (
        environment.get("SLURM_STEP_NUM_NODES")
        or environment.get("SLURM_NNODES")
    ) == "1"
    # A user's MASTER_ADDR takes precedence over the first node of the list.
    host = environment.get("MASTER_ADDR")
    if not host:
        of_step = bool(environment.get("SLURM_STEP_NODELIST"))
        name = "SLURM_STEP_NODELIST" if of_step else "SLURM_JOB_NODELIST"
        nodes = _text(environment, name, "srun")
        host = first_node(nodes)
        if not host:
            raise EnvironmentMistake(
                f"{name} is {nodes!r}, which is not a list of nodes."
            )
    # All tasks of a step must guess the same port. Two jobs or steps on a node seldom
    # share it.
    step = environment.get("SLURM_STEP_ID", "")
    # The steps of one job get ports that are 1009 apart.
    offset = job + 1009 * (
        int(step) if re.fullmatch("[0-9]{1,9}", step) else 0
    )
    port = 20000 + offset % 20000
    if environment.get("MASTER_PORT"):
        port = _whole(environment, "MASTER_PORT", "srun")
    source = "SLURM_PROCID and SLURM_NTASKS of Slurm"
    return Rendezvous(
        rank, size, local, host, port, one_host=one, source=source
    )


# a character of a name, or a bracket of numbers
_NODES = r"[^\[\],\s]|\[([0-9]+)[^\[\]\s]*\]"
_FIRST_NODE = re.compile(rf"((?:{_NODES})+)(?:,|$)")


def first_node(nodes: str) -> str:
    """The first node of a Slurm host list such as `rack[1-2]node[03-07,9],io1`.

    A name may have several brackets, with text after them. Each holds numbers and
    ranges; leading zeros of the first number are part of the name. Returns "" if the
    text does not begin with a name.
    """
    match = _FIRST_NODE.match(nodes)
    if match is None:
        return ""
    # `rack[1-2]` -> `rack1`: a bracket stands for its first number.
    return re.sub(_NODES, lambda part: part[1] or part[0], match[1])


def node_command(
    environment: Mapping[str, str], ranks: int | None
) -> list[str] | None:
    """The command that starts this node's ranks, without its arguments, or None.

    Needed if a launcher started one process per node. `ranks` is the number the layout
    needs, if known.
    """
    # A rank was started already: nothing to start on this node.
    if "RANK" in environment or "SLURM_PROCID" in environment:
        return None
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    if "PET_NNODES" in environment:
        return torchrun  # it reads PET_* itself
    # No task of SkyPilot, or one on a single node: the command starts the
    # ranks itself.
    nodes = _whole(
        {"SKYPILOT_NUM_NODES": "1", **environment},
        "SKYPILOT_NUM_NODES",
        "sky launch",
    )
    if nodes == 1:
        return None
    gpus = _whole(environment, "SKYPILOT_NUM_GPUS_PER_NODE", "sky launch")
    addresses = _text(environment, "SKYPILOT_NODE_IPS", "sky launch").split()
    if not addresses:
        raise EnvironmentMistake(
            "SKYPILOT_NODE_IPS is empty; sky launch sets it."
        )
    return [
        *torchrun,
        f"--nnodes={nodes}",
        # Without GPUs, one process for each rank that this node has of the
        # layout.
        f"--nproc-per-node={gpus or max(1, (ranks or nodes) // nodes)}",
        f"--node-rank={_whole(environment, 'SKYPILOT_NODE_RANK', 'sky launch')}",
        f"--master-addr={addresses[0]}",
        f"--master-port={PORT}",
    ]


def launched(environment: Mapping[str, str]) -> bool:
    """True if a launcher started this process, as a rank or as a node."""
    return (
        rendezvous(environment) is not None
        or node_command(environment, None) is not None
    )


def _text(environment: Mapping[str, str], name: str, launcher: str) -> str:
    if not (text := environment.get(name, "")):
        what = f"{name} is not set; start every rank with {launcher}, which sets it."
        raise EnvironmentMistake(what)
    return text


def _whole(environment: Mapping[str, str], name: str, launcher: str) -> int:
    text = _text(environment, name, launcher)
    if not re.fullmatch("-?[0-9]{1,18}", text):
        raise EnvironmentMistake(
            f"{name} is {text[:60]!r}; it must be a whole number."
        )
    return int(text)
