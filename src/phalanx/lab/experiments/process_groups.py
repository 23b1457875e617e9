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
from phalanx.lab.lab import Lab
from phalanx.lab.mlp import gradients_of, one_process, start

dist: Any = torch.distributed  # its type stubs leave out the stores
PATIENCE = timedelta(seconds=30)


def run(lab: Lab) -> None:
    group, rank, n = lab.group, lab.rank, lab.n
    with tempfile.TemporaryDirectory() as folder:
        # Everyone must know rank 0's folder and port: that is the least that ranks need to meet.
        path = from_rank_0(group, str(Path(folder) / "store"))
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = int(from_rank_0(group, str(server.port)))
        tcp = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=PATIENCE)
        hashed = dist.HashStore()  # nobody outside this rank can see it
        stores = (hashed, [rank]), (dist.FileStore(path, n), range(n)), (tcp, range(n))
        for store, members in stores:
            name = type(store).__name__
            keys = [f"address {i}" for i in members]
            title = f"{name}: every rank writes its address, waits, and reads the others'"
            lab.step(title, keys=keys)
            store.set(f"address {rank}", f"rank {rank} is here")
            store.wait(keys, PATIENCE)
            read = [store.get(key).decode() for key in keys]
            store.add("counted", 1)
            group.barrier()  # now everyone has added
            counted = store.add("counted", 0)
            lab.after(read=read, counted=counted)
            here = "; ".join(f"rank {i} is here" for i in members)
            lab.claim(f"the {name} contains these ranks", "; ".join(read), here)
            lab.claim(f"so many have added to the {name}", counted, len(members))

        gradient = gradients_of(start(lab.size), lab.rows(0))[1][0]
        lab.step("a new group on the TCP store: all-reduce of the gradient", gradient=gradient)
        gradient = all_reduced(gradient, tcp, rank, n) / n
        lab.after(gradient=gradient)
        group.barrier()  # rank 0's port and file stay until nobody needs them
    want = one_process(lab.size).gradients[0]
    lab.claim("the group's sum is one process's gradient", gradient, want)
    lab.note(f"Here the backend would be {backend(n)}.")


def backend(n: int) -> str:
    enough = dist.is_nccl_available() and torch.cuda.device_count() >= n
    return "nccl" if enough else "gloo"


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
