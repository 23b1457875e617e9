"""How ranks find each other: a key-value store, a group made over it, and leaving in good order.

Rendezvous is a small shared dictionary. Everyone writes its address and waits for those of the
others. HashStore lives in one process, FileStore in a file that all can open, TCPStore in rank 0
behind a port. All three do set, get, wait and an atomic add. `dist.init_process_group` makes such a
store from MASTER_ADDR and MASTER_PORT and then a group; here both are made by hand, so no global
state is left behind. Backends: nccl where every rank has a GPU of its own, gloo otherwise.

Teardown: barrier, then shut down. A rank that leaves while a peer still waits for it kills the
peer, and a store must outlive its last reader.
"""

import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from phalanx.comm import Group, World
from phalanx.lab.claims import Claim, Held, Size, equal
from phalanx.lab.mlp import batch, gradients_of, one_process, start
from phalanx.lab.note import Note, everyone

dist: Any = torch.distributed  # its stubs leave out the stores
PATIENCE = timedelta(seconds=30)


def run(world: World, size: Size, note: Note) -> Held:
    wire, rank, n = everyone(world), world.rank, world.size
    held: Held = {}
    note.step("backend choice")
    choice = "nccl" if dist.is_nccl_available() and torch.cuda.device_count() >= n else "gloo"
    note.holds("before", gpus=torch.cuda.device_count(), ranks=n)
    note.holds("after", backend=choice)
    with tempfile.TemporaryDirectory() as folder:
        # Rank 0's folder and port are told to everyone: that much must be known to meet at all.
        path = told(wire, str(Path(folder) / "store"))
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = int(told(wire, str(server.port)))
        stores = {
            "HashStore": (dist.HashStore(), 1),  # nobody outside this rank can see it
            "FileStore": (dist.FileStore(path, n), n),
            "TCPStore": (dist.TCPStore("127.0.0.1", port, is_master=False, timeout=PATIENCE), n),
        }
        for name, (store, members) in stores.items():
            note.step(f"{name}: everyone writes its address, waits, and reads the others'")
            me = rank if members > 1 else 0
            store.set(f"address {me}", f"rank {rank} is here")
            keys = [f"address {i}" for i in range(members)]
            note.holds("before", wrote=keys[me])
            store.wait(keys, PATIENCE)
            read = [store.get(key).decode() for key in keys]
            store.add("counted", 1)
            wire.barrier()  # now everyone has added
            held[name] = "; ".join(read) + f"; {store.add('counted', 0)} counted"
            note.holds("after", read=held[name])

        note.step("a group of its own over the TCP store: all-reduce of the gradient")
        rows = size.part("batch", rank, n)
        gradient = gradients_of(start(size), batch(size, 0)[rows])[1][0] / n
        note.holds("before", gradient=gradient)
        held["gradient"] = all_reduced(gradient, stores["TCPStore"][0], rank, n)
        note.holds("after", gradient=gradient)
        wire.barrier()  # rank 0's port and file stay until nobody needs them
    return held


def all_reduced(x: Tensor, store: Any, rank: int, n: int) -> Tensor:
    """The sum over ranks through a gloo group made here and shut down here, on loopback only."""
    gloo = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = PATIENCE
    group = gloo(dist.PrefixStore("lab", store), rank, n, options)
    group.allreduce([x]).wait()
    group.barrier().wait()
    return x


def told(wire: Group, text: str) -> str:
    """What rank 0 says, as everyone hears it: 256 bytes."""
    said = torch.zeros(256, dtype=torch.uint8)
    said[: len(text)] = torch.tensor(list(text.encode()), dtype=torch.uint8)
    wire.broadcast(said, root=0)
    return bytes(said.tolist()).rstrip(b"\0").decode()


def check(results: list[Held], size: Size) -> Iterator[Claim]:
    n = len(results)
    everybody = "; ".join(f"rank {i} is here" for i in range(n)) + f"; {n} counted"
    want = one_process(size).gradients[0]
    for rank, held in enumerate(results):
        alone = f"rank {rank} is here; 1 counted"
        yield equal(f"rank {rank}: a HashStore holds only itself", held["HashStore"], alone)
        yield equal(f"rank {rank}: the FileStore holds all", held["FileStore"], everybody)
        yield equal(f"rank {rank}: the TCPStore holds all", held["TCPStore"], everybody)
        yield equal(
            f"rank {rank}: the group's sum is one process's gradient", held["gradient"], want
        )
