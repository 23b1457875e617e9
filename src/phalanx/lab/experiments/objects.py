"""Sending objects instead of tensors: how it is done, what it costs, and why not to do it.

torch.distributed has object forms (all_gather_object, broadcast_object_list). They use pickle, which
has two consequences. It is slow: a size is exchanged first, everything passes through the host, and
each number is wrapped in text or opcodes. And it is unsafe: a pickle is a program that the receiver
runs. Here an object is sent whose arrival calls a function in the receiver's process; the function
is harmless, but the sender chose it. Text of a fixed form (JSON), sent as a tensor of bytes, is slow
too, but safe. Numbers belong in tensors.

The object forms are shown on gloo only; this is the one file of phalanx that uses pickle.
"""

import json
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from phalanx.comm import Group
from phalanx.lab.claims import Claims, Results, Size, Values, every
from phalanx.lab.lab import Lab, gathered
from phalanx.lab.mlp import gradients_of, one_process, start


class Surprise:
    """Not an object but a command: whoever unpickles it calls os.getpid and gets the answer."""

    def __reduce__(self) -> tuple[Callable[[], int], tuple[()]]:
        return os.getpid, ()


def all_gather_text(group: Group, value: Any) -> list[Any]:
    """Everyone's object as JSON: lengths first, then bytes padded to the longest."""
    text = json.dumps(value).encode()
    lengths = gathered(group, torch.tensor([len(text)]))
    mine = torch.zeros(int(lengths.max()), dtype=torch.uint8)
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = gathered(group, mine).view(group.size, -1)
    return [json.loads(bytes(row[:n].tolist())) for row, n in zip(rows, lengths, strict=True)]


def run(lab: Lab) -> Values:
    rank, n = lab.rank, lab.n
    loss, gradients = gradients_of(start(lab.size), lab.rows(0))
    row = gradients[0][0] / n
    message = {"rank": rank, "loss": loss.item(), "gradient": row.tolist()}

    lab.step("objects as JSON in a tensor of bytes")
    lab.shows("before", rank=rank, loss=loss.item(), row_of_a_gradient=row)
    messages = all_gather_text(lab.group, message)
    as_text = lab.sent()
    total = torch.tensor([each["gradient"] for each in messages], dtype=torch.float64).sum(0)
    lab.shows("after", ranks=[each["rank"] for each in messages], gradient=total)

    lab.step("the same numbers as a tensor")
    lab.shows("before", gradient=row)
    same = row.clone()
    lab.group.all_reduce(same)
    lab.shows("after", gradient=same)
    if rank == 0 and n > 1:
        ratio = as_text / (lab.sent() - as_text)
        lab.note(f"As text rank 0 sent {ratio:.1f} times the bytes of the all-reduce.")

    pickled, pid = total, os.getpid()
    if n > 1 and dist.is_initialized():
        lab.step("object forms of torch.distributed (gloo)")
        lab.shows("before", rank=rank)
        objects: list[Any] = [None] * n
        dist.all_gather_object(objects, message)
        pickled = torch.tensor([each["gradient"] for each in objects], dtype=torch.float64).sum(0)
        trap: list[Any] = [Surprise()]
        dist.broadcast_object_list(trap, src=0)
        pid = trap[0] if rank else pid
        lab.shows("after", gradient=pickled, received=pid, own_process_id=os.getpid())
        if rank:
            lab.note(f"Rank {rank} received its own process id: receiving called a function.")
    elif rank == 0:
        lab.note("The object forms need processes: run this with --backend gloo.")
    return {"text": total, "tensor": same, "pickled": pickled, "called": int(pid == os.getpid())}


def check(results: Results, size: Size) -> Claims:
    want = one_process(size).gradients[0][0]
    for how in ("text", "tensor", "pickled"):
        yield from every(results, how, f"as {how}, the sum is one process's gradient", want)
    yield from every(results, "called", "the object called a function here", 1)
