"""Objects as messages. The object forms are shown on gloo only; this is the only file
of phalanx that uses pickle."""

import json
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from phalanx.comm import Group
from phalanx_lab.lab import Lab, gathered
from phalanx_lab.mlp import gradients_of, start


class Surprise:
    """A command in the form of an object: unpickling it calls os.getpid and returns the
    answer."""

    def __reduce__(self) -> tuple[Callable[[], int], tuple[()]]:
        return os.getpid, ()


def all_gather_text(group: Group, value: Any) -> list[Any]:
    """Gather every rank's object as JSON: lengths first, then bytes padded to the
    longest."""
    text = json.dumps(value).encode()
    lengths = gathered(group, torch.tensor([len(text)]))
    mine = torch.zeros(int(lengths.max()), dtype=torch.uint8)
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = gathered(group, mine).view(group.size, -1)
    return [
        json.loads(bytes(row[:n].tolist()))
        for row, n in zip(rows, lengths, strict=True)
    ]


def objects(lab: Lab) -> None:
    """Sending objects instead of tensors: how it is done, what it costs, and why not to do it.

    torch.distributed has object forms (all_gather_object, broadcast_object_list). They are slow, and
    not safe: numbers belong in tensors, and other values in text of a fixed form.
    """
    rank, n = lab.rank, lab.n
    loss, gradients = gradients_of(start(lab.size), lab.rows(0))
    row, want = gradients[0][0] / n, lab.whole_gradient()[0]
    message = {"rank": rank, "loss": loss.item(), "gradient": row.tolist()}

    def summed(messages: list[Any]) -> torch.Tensor:
        gradients = [each["gradient"] for each in messages]
        return torch.tensor(gradients, dtype=torch.float64).sum(0)

    # An object is sent as text: a size is exchanged first, everything passes through the host, and
    # each number is written out in digits. Slow, but safe: reading JSON runs nothing.
    lab.step(
        "objects as JSON in a tensor of bytes",
        loss=loss.item(),
        row_of_a_gradient=row,
    )
    total = summed(all_gather_text(lab.group, message))
    as_text = lab.sent()
    lab.after(gradient=total)
    lab.claim("as text, the sum is one process's gradient", total, want)

    lab.step("the same numbers as a tensor", gradient=row)
    lab.group.all_reduce(row)
    lab.after(gradient=row)
    lab.claim("as a tensor, the sum is one process's gradient", row, want)
    if rank == 0 and n > 1:
        ratio = as_text / (lab.sent() - as_text)
        lab.note(
            f"As text rank 0 sent {ratio:.1f} times the bytes of the all-reduce."
        )
    if n == 1 or not dist.is_initialized():
        lab.note(
            "The object forms need processes: run this with --backend gloo."
        )
        return

    # The object forms use pickle, and a pickle is a program that the receiver runs. Here an object is sent
    # whose arrival calls a function in the receiver's process; the function is harmless, but the sender
    # chose it.
    lab.step(
        "object forms of torch.distributed (gloo)", own_process_id=os.getpid()
    )
    messages: list[Any] = [None] * n
    dist.all_gather_object(messages, message)
    trap: list[Any] = [Surprise()]
    dist.broadcast_object_list(trap, src=0)
    lab.after(gradient=summed(messages), received=trap[0])
    lab.claim(
        "pickled, the sum is one process's gradient", summed(messages), want
    )
    if rank:
        lab.claim(
            "receiving the object called a function here", trap[0], os.getpid()
        )
