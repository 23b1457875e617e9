"""How ranks find each other: a key-value store, a group built on it, and shutting down in order.

Rendezvous is a small shared dictionary. Every rank writes its address and waits for those of the
others. HashStore exists in one process, FileStore in a file that all can open, TCPStore in rank 0
behind a port. All three have set, get, wait and an atomic add. `dist.init_process_group` makes such
a store from MASTER_ADDR and MASTER_PORT and then a group; here both are made by hand, so that no
global state remains. Backends: nccl where every rank has a GPU of its own, otherwise gloo.

Shutting down: first a barrier, then leave. A rank that leaves while a peer still waits for it ends
the peer, and a store must exist until its last reader is done.
"""

import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from phalanx.comm import Group
from phalanx.lab.claims import Claims, Results, Size, Values, every
from phalanx.lab.lab import Lab
from phalanx.lab.mlp import gradients_of, one_process, start

dist: Any = torch.distributed  # its type stubs leave out the stores
PATIENCE = timedelta(seconds=30)


def run(lab: Lab) -> Values:
    group, rank, n = lab.group, lab.rank, lab.n
    values: Values = {}
    lab.step("choice of the backend")
    choice = "nccl" if dist.is_nccl_available() and torch.cuda.device_count() >= n else "gloo"
    lab.shows("before", gpus=torch.cuda.device_count(), ranks=n)
    lab.shows("after", backend=choice)
    with tempfile.TemporaryDirectory() as folder:
        # Everyone must know rank 0's folder and port: that is the least that ranks need to meet.
        path = from_rank_0(group, str(Path(folder) / "store"))
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = int(from_rank_0(group, str(server.port)))
        stores = {
            "HashStore": (dist.HashStore(), 1),  # nobody outside this rank can see it
            "FileStore": (dist.FileStore(path, n), n),
            "TCPStore": (dist.TCPStore("127.0.0.1", port, is_master=False, timeout=PATIENCE), n),
        }
        for name, (store, members) in stores.items():
            lab.step(f"{name}: every rank writes its address, waits, and reads the others'")
            store.set(f"address {rank if members > 1 else 0}", f"rank {rank} is here")
            keys = [f"address {i}" for i in range(members)]
            lab.shows("before", keys=keys)
            store.wait(keys, PATIENCE)
            read = [store.get(key).decode() for key in keys]
            store.add("counted", 1)
            group.barrier()  # now everyone has added
            values[name] = "; ".join(read) + f"; {store.add('counted', 0)} counted"
            lab.shows("after", read=values[name])

        lab.step("a new group on the TCP store: all-reduce of the gradient")
        gradient = gradients_of(start(lab.size), lab.rows(0))[1][0] / n
        lab.shows("before", gradient=gradient)
        values["gradient"] = all_reduced(gradient, stores["TCPStore"][0], rank, n)
        lab.shows("after", gradient=gradient)
        group.barrier()  # rank 0's port and file stay until nobody needs them
    return values


def all_reduced(x: Tensor, store: Any, rank: int, n: int) -> Tensor:
    """The sum over ranks through a gloo group that exists only here, on loopback."""
    gloo = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = PATIENCE
    group = gloo(dist.PrefixStore("lab", store), rank, n, options)
    group.allreduce([x]).wait()
    group.barrier().wait()
    return x


def from_rank_0(group: Group, text: str) -> str:
    """Rank 0's text on every rank: at most 256 bytes."""
    message = torch.zeros(256, dtype=torch.uint8)
    message[: len(text)] = torch.tensor(list(text.encode()), dtype=torch.uint8)
    group.broadcast(message, root=0)
    return bytes(message.tolist()).rstrip(b"\0").decode()


def check(results: Results, size: Size) -> Claims:
    n = len(results)
    says, alone = "a HashStore contains only this rank", "rank {} is here; 1 counted"
    yield from every(results, "HashStore", says, alone.format)
    everybody = "; ".join(f"rank {i} is here" for i in range(n)) + f"; {n} counted"
    for name in ("FileStore", "TCPStore"):
        yield from every(results, name, f"the {name} contains all ranks", everybody)
    says = "the group's sum is one process's gradient"
    yield from every(results, "gradient", says, one_process(size).gradients[0])
