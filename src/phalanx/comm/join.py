"""Joins the world that torchrun or Slurm has started, by its environment.

Mistakes in it are reported in one sentence before anything can hang.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from phalanx.comm.agree import FAILED, differences, not_alike
from phalanx.comm.alone import AloneWorld
from phalanx.comm.base import CommError, CommMisuse, World, named
from phalanx.comm.devices import Devices, name_unused
from phalanx.comm.network import (
    WAYS_OUT,
    Address,
    await_master,
    check_routes,
    listen,
)
from phalanx.comm.process import ProcessWorld
from phalanx.layout.choices import GLOO, NCCL
from phalanx.layout.device_environment import set_up
from phalanx.layout.environment import Rendezvous, rendezvous
from phalanx.version import VERSION

_dist: Any = torch.distributed  # its stubs lack the stores
NOTICE = 15.0  # seconds after which a rank reports whom it waits for
COMING = 20.0  # seconds that a rank that cannot begin waits for rank 0, to report why
# Seconds beyond a timeout for ranks that wait for the rank with that timeout.
MARGIN = 5.0


def open_store(at: Rendezvous, mine: Address, timeout: float) -> Any:
    """Open the store where all ranks meet. Rank 0 serves it if the launcher does not."""
    serve = at.rank == 0 and not at.served
    terms: dict[str, Any] = {"timeout": timedelta(seconds=timeout)}
    if serve:
        # Opened here, so that an error names the address.
        terms["master_listen_fd"] = listen(at).detach()
    elif reason := await_master(at, mine, timeout, NOTICE):
        raise CommError(
            f"rank {at.rank} at {mine} could not reach anyone at {at.host}:{at.port} in {timeout:g} s"
            f" ({reason}): rank 0 must be started, on the host of MASTER_ADDR. {WAYS_OUT}"
        )
    try:
        # Missing ranks are named in `meet`, so no waiting for workers here.
        store = _dist.TCPStore(
            at.host, at.port, at.size, serve, wait_for_workers=False, **terms
        )
    except RuntimeError as error:
        raise CommError(
            f"rank {at.rank} cannot open the store at {at.host}:{at.port}: {str(error).splitlines()[0]}"
        ) from error
    # A launcher that restarts the ranks keeps its store, with what the last attempt
    # wrote. If rank 0 has begun a new store, an agent that joined late counts fewer
    # attempts than the others.
    return _dist.PrefixStore(
        f"phalanx/{at.attempt if at.served else 0}", store
    )


def join(
    ranks: int | None = None,
    *,
    backend: str = "auto",
    timeout: float = 300.0,
    interface: str = "",
    call_timeout: float | None = None,
    environment: Mapping[str, str] | None = None,
    devices: Devices | None = None,
) -> World:
    """Join the world that this process was started in, or a world of one rank.

    An existing process group of torch.distributed is used as it is, and stays when the
    world closes. `ranks` is the number that the run needs, if known. `timeout` limits
    the meeting, and calls if no `call_timeout` is given. `interface` defaults to the
    one from which rank 0's host is reached. `environment` holds the variables that name
    the world; it defaults to those of this process.
    """
    # No default of `os.environ`: a signature shows its defaults, and so would print
    # every secret in it.
    environment = os.environ if environment is None else environment
    set_up(os.environ)
    devices = devices or Devices()
    # A process group of Accelerate, Ray or a loop of the user's: take it as it is.
    if _dist.is_initialized():
        if ranks not in (None, _dist.get_world_size()):
            there = f"the existing process group has {_dist.get_world_size()}"
            raise CommMisuse(
                f"the run needs {ranks} ranks, but {there}; start {ranks}."
            )
        return ProcessWorld.existing(call_timeout or timeout)
    # 1. Where the launcher says that the ranks meet.
    at = rendezvous(environment)
    size = 1 if at is None else at.size
    if ranks not in (None, size):
        started = "nothing has started this process as a rank"
        if at is not None:
            started = f"the launcher has started {size} ({at.source})"
        raise CommMisuse(
            f"the run needs {ranks} ranks, but {started}; start {ranks}."
        )
    if backend == "auto" and (at is None or at.rank == 0):
        name_unused(devices)
    if at is None:
        return AloneWorld("cuda:0" if devices.gpus else "cpu")
    # 2. The store through which they meet.
    mine = Address.choose(at, interface)
    store = open_store(at, mine, timeout)
    # 3. Agree on versions and the backend, before any backend starts.
    backend = meet(
        store,
        at,
        offer(at, backend, devices) | {":address": str(mine)},
        timeout,
    )
    # 4. Use this interface, and try the routes between hosts.
    mine.use(os.environ)
    if not at.one_host:
        check_routes(store, at, mine)
    # 5. Only now the process group, in which a mistake would hang.
    gpu = devices.index(at.local) or 0
    return ProcessWorld(
        backend, store, at.rank, size, gpu=gpu, timeout=call_timeout or timeout
    )


# ---- agreed on before a rank connects to another


def offer(at: Rendezvous, backend: str, devices: Devices) -> dict[str, str]:
    """This rank's facts; those without a leading colon must be equal on all ranks."""
    if backend not in ("auto", GLOO, NCCL):
        raise CommMisuse(
            f"backend {backend!r} cannot join processes; use gloo, nccl or auto."
        )
    # A colon in front: a fact for choosing the backend, which may differ between ranks.
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
    """Software versions that must be equal on all ranks."""
    return {
        "python": ".".join(map(str, sys.version_info[:2])),
        "torch": str(torch.__version__),
        "phalanx": VERSION,
    }


def meet(
    store: Any, at: Rendezvous, mine: Mapping[str, str], timeout: float
) -> str:
    """Agree on the backend of all ranks; without one, all raise the same error.

    Every rank appends its offer to one key, which rank 0 reads, and all read rank 0's
    answer. So a rank touches as many keys in a world of 10,000 as in one of two.
    """
    # `add` returns the count: a second process with this rank sees 2.
    if store.add(f"met/{at.rank}", 1) > 1:
        raise CommMisuse(
            f"two processes were started as rank {at.rank}; give each its own RANK."
        )
    store.append("offers", json.dumps([at.rank, mine]) + "\n")
    if at.rank == 0:
        answer, heard = _answer(store, at, timeout)
        store.set("answer", json.dumps(answer))
        # A store of our own ends with rank 0, so the others must have read the error.
        if "error" in answer and not at.served:
            _let_read(store, heard - 1)
    else:
        # Rank 0 may arrive last, and give up on missing ranks only after its own
        # timeout.
        try:
            store.wait(["answer"], timedelta(seconds=timeout + MARGIN))
        except RuntimeError as error:
            raise CommError(
                f"rank {at.rank} got no answer from rank 0 within {timeout + MARGIN:g} s."
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


def _answer(
    store: Any, at: Rendezvous, timeout: float
) -> tuple[dict[str, str], int]:
    """Rank 0's answer to all ranks, and the number of ranks that have made an offer."""
    begun, size, noted = time.monotonic(), at.size, False
    while True:
        lines = store.get("offers").decode().splitlines()
        offers: dict[int, dict[str, str]] = dict(
            sorted(map(json.loads, lines))
        )
        # A rank that failed reports it in place of its facts.
        for rank, each in offers.items():
            if FAILED in each:
                return {
                    "error": f"rank {rank} could not begin: {each[FAILED]}"
                }, len(offers)
        # Compare as soon as two have arrived: with different numbers of ranks, some
        # would never come.
        compared = {
            rank: {
                name: value
                for name, value in each.items()
                if not name.startswith(":")
            }
            for rank, each in offers.items()
        }
        if differing := differences(compared):
            return {"error": not_alike(differing)}, len(offers)
        if len(offers) >= size:
            break
        # Wait for missing ranks, and name them once before giving up.
        waited = time.monotonic() - begun
        if waited > timeout:
            return {"error": _missing(offers, at, timeout)}, len(offers)
        if waited > NOTICE and not noted:
            noted = True
            text = f"{_missing(offers, at, NOTICE)} Rank 0 waits until {timeout:g} s."
            print(text, file=sys.stderr, flush=True)
        time.sleep(0.02)
    try:
        return {
            "backend": backend_of(list(offers.values())),
            "ranks": str(size),
        }, size
    except CommMisuse as error:
        return {"error": str(error)}, size


def _missing(
    offers: Mapping[int, Mapping[str, str]], at: Rendezvous, seconds: float
) -> str:
    missing = named([rank for rank in range(at.size) if rank not in offers])
    came = ", ".join(
        f"{rank} from {each.get(':address', '?')}"
        for rank, each in offers.items()
    )
    if len(offers) > 16:
        came = f"{len(offers)} ranks"
    return (
        f"{missing} not come in {seconds:g} s; {at.size} ranks were to be started ({at.source})."
        f" There are {came}. {WAYS_OUT}"
    )


def backend_of(offers: Sequence[Mapping[str, str]]) -> str:
    """NCCL if every rank has its own GPU, gloo if none has one; otherwise raises."""
    backend = offers[0]["backend"]
    # gloo if asked for, or where no rank sees a GPU.
    if backend == GLOO or (
        backend == "auto" and not any(int(each[":gpus"]) for each in offers)
    ):
        return GLOO
    # The first reason wins: no NCCL, then no GPU, then a shared GPU.
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
    """Keep rank 0's store open until others have read the error, or for a while."""
    deadline = time.monotonic() + MARGIN
    while store.add("read", 0) < others and time.monotonic() < deadline:
        time.sleep(0.02)


def report_failure(
    error: str, environment: Mapping[str, str] | None = None
) -> None:
    """Tell the other ranks, if a launcher started any, why this one does not join them."""
    with contextlib.suppress(CommError, RuntimeError):
        at = rendezvous(os.environ if environment is None else environment)
        if at is None:
            return
        store = open_store(at, Address.choose(at), COMING)
        # Rank 0's failure is the answer to all; another rank's is its offer.
        if at.rank:
            store.append(
                "offers", json.dumps([at.rank, {FAILED: error}]) + "\n"
            )
        else:
            store.set(
                "answer",
                json.dumps({"error": f"rank 0 could not begin: {error}"}),
            )
            if not at.served:
                _let_read(store, at.size - 1)
