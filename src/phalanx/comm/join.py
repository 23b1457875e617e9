"""Joining the world that torchrun or Slurm has started, from what they leave in the environment.

What is wrong with it is said in one sentence before anything can hang.
"""

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from phalanx.comm.alone import AloneWorld
from phalanx.comm.base import CommError, CommMisuse, World
from phalanx.comm.process import ProcessWorld, tcp_store


@dataclass(frozen=True)
class Place:
    """Which rank this process is, of how many, and where all of them meet."""

    rank: int
    size: int
    local: int
    host: str
    port: int
    served: bool  # the launcher holds the meeting place already
    attempt: int = 0  # how often the launcher has started the ranks again


def join(
    ranks: int | None = None,
    *,
    wire: str = "auto",
    timeout: float = 300.0,
    environment: Mapping[str, str] = os.environ,
) -> World:
    """This process's rank of the world it was started in; alone if nothing has started one.

    `ranks` is how many the run needs, if it knows. `timeout` holds for the meeting and for calls.
    """
    place = find(environment)
    size = 1 if place is None else place.size
    if ranks is not None and ranks != size:
        started = (
            "nothing has started this process as a rank"
            if place is None
            else (f"the launcher has started {size}")
        )
        raise CommMisuse(f"the run needs {ranks} ranks and {started}; start {ranks}.")
    if place is None:
        return AloneWorld("cuda:0" if torch.cuda.is_available() else "cpu")
    backend = _backend(wire, place.local)
    if place.rank == 0 and not place.served:
        _refuse_taken(place.host, place.port)
    try:
        store = tcp_store(
            place.host,
            place.port,
            place.size,
            place.attempt,
            timeout,
            serve=place.rank == 0 and not place.served,
        )
    except RuntimeError as error:
        raise CommError(
            f"rank {place.rank} did not meet the others at {place.host}:{place.port} "
            f"in {timeout:g} s: {str(error).splitlines()[0]}"
        ) from error
    return ProcessWorld(backend, store, place.rank, place.size, local=place.local, timeout=timeout)


def find(environment: Mapping[str, str]) -> Place | None:
    """The place that the environment gives this process, None if it gives none."""
    if any(name in environment for name in ("RANK", "WORLD_SIZE")):
        rank, size, local, port = (
            _whole(environment, name, "torchrun")
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
        )
        host = _text(environment, "MASTER_ADDR", "torchrun")
        served = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    elif "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment:
        # A batch script itself has no SLURM_STEP_ID of a number; only srun's tasks are ranks.
        rank, size, local, job = (
            _whole(environment, name, "srun")
            for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID")
        )
        host = environment.get("MASTER_ADDR") or _first_node(
            _text(environment, "SLURM_JOB_NODELIST", "srun")
        )
        # All tasks of a job must guess the same port; two jobs on a node seldom share it.
        port = int(environment.get("MASTER_PORT", 20000 + job % 20000))
        served = False
    else:
        return None
    if not 0 <= rank < size or not 0 <= local <= rank:
        raise CommMisuse(
            f"the environment says rank {rank}, local rank {local}, of {size} ranks: "
            "a rank lies below the number of ranks, and a local rank is at most the rank."
        )
    if not 0 < port < 65536:
        raise CommMisuse(f"MASTER_PORT is {port}; a port lies between 1 and 65535.")
    attempt = int(environment.get("TORCHELASTIC_RESTART_COUNT", 0))
    return Place(rank, size, local, host, port, served, attempt)


def _text(environment: Mapping[str, str], name: str, launcher: str) -> str:
    text = environment.get(name, "")
    if not text:
        raise CommMisuse(f"{name} is not set; start every rank with {launcher}, which sets it.")
    return text


def _whole(environment: Mapping[str, str], name: str, launcher: str) -> int:
    text = _text(environment, name, launcher)
    if not re.fullmatch(r"-?\d+", text):
        raise CommMisuse(f"{name} is {text!r}; it must be a whole number.")
    return int(text)


def _first_node(nodes: str) -> str:
    """'gpu[003-007,9],io1' begins with gpu003."""
    match = re.match(r"([^\[,]+)(?:\[(\w+))?", nodes)
    if match is None:
        raise CommMisuse(f"SLURM_JOB_NODELIST is {nodes!r}, which names no node.")
    return match[1] + (match[2] or "")


def _backend(wire: str, local: int) -> str:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    has_nccl = dist.is_available() and dist.is_nccl_available()
    if wire == "auto":
        wire = "nccl" if has_nccl and local < gpus else "gloo"
    if wire not in ("gloo", "nccl"):
        raise CommMisuse(f"wire {wire!r} cannot join processes; use gloo, nccl or auto.")
    if wire == "nccl" and not (has_nccl and local < gpus):
        raise CommMisuse(
            f"wire nccl cannot be used: local rank {local} has no GPU of the {gpus} here"
            f"{'' if has_nccl else ', and this build of torch has no NCCL'}; use wire gloo."
        )
    return wire


def _refuse_taken(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise CommMisuse(
                f"rank 0 cannot listen on {host}:{port} ({error.strerror}); choose another MASTER_PORT."
            ) from None
