"""Sending objects instead of tensors: how it is done, what it costs, and why not to do it.

torch.distributed has object forms (all_gather_object, broadcast_object_list). They pickle, which
means two things. It is slow: a size is exchanged first, everything passes through the host, each
number carries its packaging. And it is unsafe: a pickle is a program, and whoever receives it runs
it. Here an object is sent whose arrival calls a function in the receiver's process; the function
is harmless, but the sender chose it. Text of a fixed form (JSON), sent as a tensor of bytes, has
the first fault and not the second. Numbers belong in tensors.

The object forms are shown on gloo only; this is the one place in phalanx that pickles.
"""

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from phalanx.comm import Group, World
from phalanx.lab.claims import Claim, Held, Size, equal, holds
from phalanx.lab.mlp import batch, gradients_of, one_process, start
from phalanx.lab.note import Note, everyone


class Surprise:
    """Not an object but an order: who unpickles it calls os.getpid and holds the answer."""

    def __reduce__(self) -> tuple[Callable[[], int], tuple[()]]:
        return os.getpid, ()


def all_gather_text(wire: Group, said: Any) -> list[Any]:
    """Everyone's object as JSON: lengths first, then bytes padded to the longest."""
    text = json.dumps(said).encode()
    lengths = torch.empty(wire.size, dtype=torch.int64)
    wire.all_gather(lengths, torch.tensor([len(text)]))
    longest = int(lengths.max())
    mine = torch.zeros(longest, dtype=torch.uint8)
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    out = torch.empty(wire.size * longest, dtype=torch.uint8)
    wire.all_gather(out, mine)
    rows = out.view(wire.size, longest)
    return [json.loads(bytes(row[:n].tolist())) for row, n in zip(rows, lengths, strict=True)]


def run(world: World, size: Size, note: Note) -> Held:
    wire, rank, n = everyone(world), world.rank, world.size
    loss, gradients = gradients_of(start(size), batch(size, 0)[size.part("batch", rank, n)])
    row = gradients[0][0] / n
    said = {"rank": rank, "loss": loss.item(), "gradient": row.tolist()}

    note.step("objects as JSON in a tensor of bytes")
    note.holds("before", rank=rank, loss=loss.item(), row_of_a_gradient=row)
    all_said = all_gather_text(wire, said)
    objects = note.sent()
    total = torch.tensor([each["gradient"] for each in all_said], dtype=torch.float64).sum(0)
    note.holds("after", ranks=[each["rank"] for each in all_said], gradient=total)

    note.step("the same numbers as a tensor")
    note.holds("before", gradient=row)
    same = row.clone()
    wire.all_reduce(same)
    note.holds("after", gradient=same)
    if rank == 0 and n > 1:
        ratio = objects / (note.sent() - objects)
        note.says(f"As text rank 0 sent {ratio:.1f} times the bytes of the all-reduce.")

    pickled, pid = row * n, os.getpid()
    if wire.size > 1 and dist.is_initialized():
        note.step("object forms of torch.distributed (gloo)")
        note.holds("before", rank=rank)
        came: list[Any] = [None] * n
        dist.all_gather_object(came, said)
        pickled = torch.tensor([each["gradient"] for each in came], dtype=torch.float64).sum(0)
        trap: list[Any] = [Surprise()]
        dist.broadcast_object_list(trap, src=0)
        pid = trap[0] if rank else pid
        note.holds("after", gradient=pickled, what_arrived=pid, own_process_id=os.getpid())
        if rank:
            note.says(f"Rank {rank} received its own process id: receiving called a function.")
    elif rank == 0:
        note.says("The object forms need processes: run this with --wire gloo.")
    went = pickled if dist.is_initialized() and wire.size > 1 else total
    return {"gradient": total, "tensor": same, "pickled": went, "ran": int(pid == os.getpid())}


def check(results: list[Held], size: Size) -> Iterator[Claim]:
    want = one_process(size).gradients[0][0]
    for rank, held in enumerate(results):
        for how in ("gradient", "tensor", "pickled"):
            yield equal(f"rank {rank}: {how} sums to one process's gradient", held[how], want)
        yield holds(f"rank {rank}: what arrived was called here", held["ran"] == 1)
