"""Joining the world that torchrun or Slurm has started, from what they leave in the environment.

What is wrong with it is reported in one sentence before anything can hang.
"""

import contextlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata
from typing import Any

import torch
import torch.distributed

from phalanx.comm.agree import FAILED, differences, not_alike
from phalanx.comm.alone import AloneWorld
from phalanx.comm.base import CommError, CommMisuse, World, named
from phalanx.comm.devices import Devices, set_up
from phalanx.comm.process import ProcessWorld
from phalanx.layout.choices import GLOO, NCCL

_dist: Any = torch.distributed  # its stubs lack the stores
COMING = 20.0  # seconds that a rank that cannot begin waits for rank 0, to report why
MARGIN = 5.0  # seconds beyond a timeout, for those who wait for the one whose timeout it is


@dataclass(frozen=True)
class Rendezvous:
    """Which rank this process is, of how many, and where all of them meet."""

    rank: int
    size: int
    local: int
    host: str
    port: int
    served: bool  # the launcher runs the store already
    attempt: int = 0  # how often the launcher has started the ranks again

    def store(self, timeout: float) -> Any:
        """The store that all ranks meet at; rank 0 runs it if the launcher does not."""
        serve = self.rank == 0 and not self.served
        if serve:
            _refuse_taken(self.host, self.port)
        wait = timedelta(seconds=timeout)
        try:
            # Who does not come is named in `meet`.
            store = _dist.TCPStore(
                self.host, self.port, self.size, serve, wait, wait_for_workers=False
            )
        except RuntimeError as error:
            raise CommError(
                f"rank {self.rank} reached nobody at {self.host}:{self.port} in {timeout:g} s "
                f"({str(error).splitlines()[0]}): rank 0 must be started, on the host of MASTER_ADDR."
            ) from error
        # A launcher that starts the ranks again keeps its store, with what the last attempt wrote.
        return _dist.PrefixStore(f"phalanx/{self.attempt}", store)


def join(
    ranks: int | None = None,
    *,
    backend: str = "auto",
    timeout: float = 300.0,
    environment: Mapping[str, str] = os.environ,
    devices: Devices | None = None,
) -> World:
    """This process's rank of the world it was started in; alone if nothing has started one.

    `ranks` is how many the run needs, if it knows. `timeout` holds for the meeting and for calls.
    """
    devices = devices or Devices()
    if devices.gpus:
        set_up(os.environ)
    at = rendezvous(environment)
    size = 1 if at is None else at.size
    if ranks is not None and ranks != size:
        started = f"the launcher has started {size}"
        if at is None:
            started = "nothing has started this process as a rank"
        raise CommMisuse(f"the run needs {ranks} ranks and {started}; start {ranks}.")
    if at is None:
        return AloneWorld("cuda:0" if devices.gpus else "cpu")
    gpu = devices.index(at.local)
    store = at.store(timeout)
    backend = meet(store, at, offer(at, backend, devices), timeout)
    return ProcessWorld(backend, store, at.rank, size, gpu=gpu or 0, timeout=timeout)


# ---- what ranks settle before the first of them opens a connection to another


def offer(at: Rendezvous, backend: str, devices: Devices) -> dict[str, str]:
    """What the others have to know about this rank. Facts without a colon have to be the same."""
    if backend not in ("auto", GLOO, NCCL):
        raise CommMisuse(f"backend {backend!r} cannot join processes; use gloo, nccl or auto.")
    gpu = devices.index(at.local)
    return {
        "number of ranks": str(at.size),
        "backend": backend,
        **versions(),
        ":nccl": "yes" if devices.has(NCCL) else "",
        ":gpu": "" if gpu is None else devices.identity(gpu),
        ":gpus": str(devices.gpus),
    }


def versions() -> dict[str, str]:
    """What of the software has to be the same on all ranks."""
    return {
        "python": ".".join(map(str, sys.version_info[:2])),
        "torch": str(torch.__version__),
        "phalanx": metadata.version("phalanx"),
    }


def meet(store: Any, at: Rendezvous, mine: Mapping[str, str], timeout: float) -> str:
    """The backend that all ranks use; all of them raise the same sentence if there is none.

    Every rank appends its offer to one key, which rank 0 reads, and all read rank 0's answer: a rank
    touches as many keys in a world of 10,000 as in one of two.
    """
    if store.add(f"met/{at.rank}", 1) > 1:
        raise CommMisuse(f"two processes were started as rank {at.rank}; give each its own RANK.")
    _append(store, at.rank, mine)
    if at.rank == 0:
        answer, heard = _answer(store, at.size, timeout)
        store.set("answer", json.dumps(answer))
        if "error" in answer and not at.served:
            _let_read(store, heard - 1)
    else:
        # Rank 0 may have come last, and has given up on the missing after its own timeout.
        try:
            store.wait(["answer"], timedelta(seconds=timeout + MARGIN))
        except RuntimeError as error:
            raise CommError(
                f"rank {at.rank} has no answer of rank 0 in {timeout + MARGIN:g} s."
            ) from error
        answer = json.loads(store.get("answer"))
        store.add("read", 1)
    if "error" in answer:
        raise CommMisuse(answer["error"])
    if answer["ranks"] != str(at.size):
        raise CommMisuse(
            f"rank 0 was started as one of {answer['ranks']} ranks, rank {at.rank} of {at.size}."
        )
    return str(answer["backend"])


def _append(store: Any, rank: int, offered: Mapping[str, str]) -> None:
    store.append("offers", json.dumps([rank, offered]) + "\n")


def _answer(store: Any, size: int, timeout: float) -> tuple[dict[str, str], int]:
    """What rank 0 answers to all, and how many ranks have made an offer."""
    deadline = time.monotonic() + timeout
    while True:
        lines = store.get("offers").decode().splitlines()
        offers: dict[int, dict[str, str]] = dict(sorted(map(json.loads, lines)))
        for rank, each in offers.items():
            if FAILED in each:
                return {"error": f"rank {rank} could not begin: {each[FAILED]}"}, len(offers)
        # As soon as two differ: with another number of ranks some would never come.
        if lines_of := differences({rank: _compared(each) for rank, each in offers.items()}):
            return {"error": not_alike(lines_of)}, len(offers)
        if len(offers) >= size:
            break
        if time.monotonic() > deadline:
            missing = named([rank for rank in range(size) if rank not in offers])
            error = f"{missing} not come in {timeout:g} s; {size} ranks were to be started."
            return {"error": error}, len(offers)
        time.sleep(0.02)
    try:
        return {"backend": backend_of(list(offers.values())), "ranks": str(size)}, size
    except CommMisuse as error:
        return {"error": str(error)}, size


def _compared(offered: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in offered.items() if not name.startswith(":")}


def backend_of(offers: Sequence[Mapping[str, str]]) -> str:
    """NCCL if every rank has a GPU of its own, gloo if none sees any; else it has to be chosen."""
    backend = offers[0]["backend"]
    if backend == GLOO or (backend == "auto" and not any(int(each[":gpus"]) for each in offers)):
        return GLOO
    owner: dict[str, int] = {}
    reason = ""
    for fact, name in ((":nccl", "NCCL in torch"), (":gpu", "GPU")):
        without = [rank for rank, each in enumerate(offers) if not each[fact]]
        reason = reason or (f"{named(without)} no {name}" if without else "")
    for rank, each in enumerate(offers):
        other = owner.setdefault(each[":gpu"], rank)
        if other != rank and not reason:
            reason = f"ranks {other} and {rank} have the same GPU"
    if reason:
        raise CommMisuse(
            f"backend nccl cannot be used: {reason}. "
            "Start one rank for each GPU, or use backend gloo, which computes on CPUs."
        )
    return NCCL


def _let_read(store: Any, others: int) -> None:
    """Rank 0 holds the store, and goes when so many others have read why."""
    deadline = time.monotonic() + MARGIN
    while store.add("read", 0) < others and time.monotonic() < deadline:
        time.sleep(0.02)


def report_failure(error: str, environment: Mapping[str, str] = os.environ) -> None:
    """Tell the other ranks of a launcher, if there is one, why this one does not join them."""
    with contextlib.suppress(CommError, RuntimeError):
        at = rendezvous(environment)
        if at is None:
            return
        store = at.store(COMING)
        if at.rank:
            _append(store, at.rank, {FAILED: error})
        else:
            store.set("answer", json.dumps({"error": f"rank 0 could not begin: {error}"}))
            if not at.served:
                _let_read(store, at.size - 1)


def rendezvous(environment: Mapping[str, str]) -> Rendezvous | None:
    """The rank that the environment gives this process, None if it gives none."""
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
    return Rendezvous(rank, size, local, host, port, served, attempt)


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


def _refuse_taken(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise CommMisuse(
                f"rank 0 cannot listen on {host}:{port} ({error.strerror}); choose another MASTER_PORT."
            ) from None
