"""One rank's code in one process: under a debugger, without its peers, or with them as threads.

A breakpoint in one of four processes stops one and leaves three waiting until they give up. Two
ways out. With collectives that do nothing, any rank runs alone: what it computes before the first
message is right, what it receives is whatever the buffer held, and the list of its messages is
exact. With ranks as threads everything is right, and stopping one stops all. `phalanx lab` takes
threads by itself when it finds a tracer on (`sys.gettrace`, or `sys.monitoring` from 3.12 on).
"""

import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from phalanx.comm import World
from phalanx.comm.launch import launch
from phalanx.comm.tally import TallyWorld
from phalanx.lab.claims import Claim, Held, Size, equal, holds
from phalanx.lab.conduct import traced, wire_for
from phalanx.lab.mlp import batch, gradients_of, one_process, start
from phalanx.lab.note import Note, everyone


def rank_code(world: World, size: Size) -> tuple[Tensor, Tensor]:
    """What every rank does, written once: the gradient before and after it is averaged."""
    wire = world.split("inner", [range(world.size)])
    rows = size.part("batch", world.rank, world.size)
    own = gradients_of(start(size), batch(size, 0)[rows])[1][0]
    gradient = own.clone()
    wire.all_reduce(gradient, "average")
    return own, gradient


def run(world: World, size: Size, note: Note) -> Held:
    rank, n = world.rank, world.size
    everyone(world).barrier()
    note.step("as it is: among its peers")
    own, gradient = rank_code(world, size)
    note.holds("before the message", gradient=own)
    note.holds("after", gradient=gradient)

    note.step("collectives that do nothing: this rank alone")
    quiet = TallyWorld(rank, n, "cpu")
    alone, unsummed = rank_code(quiet, size)
    note.holds("before the message", gradient=alone)
    note.holds("after", gradient=unsummed)
    message = quiet.ledger[0]
    note.says(f"It would have sent: {message.collective} of {message.bytes:,} bytes.")

    note.step("all ranks as threads of this process")
    with note.live.paused():
        everybody = launch(rank_code, n, size, wire="threads")
    note.holds("before the message", gradient=everybody[rank][0])
    note.holds("after", gradient=everybody[rank][1])
    if rank == 0:
        state = "on" if traced() else "off"
        note.says(f"A tracer is {state}: asked for gloo, the lab takes {wire_for('gloo')}.")
    return {
        "own": own,
        "gradient": gradient,
        "alone": alone,
        "unsummed": unsummed,
        "threads": everybody[rank][1],
        "message": [message.bytes, message.size],
        "chosen": chosen_under_a_tracer(),
    }


def chosen_under_a_tracer() -> str:
    """The wire taken for gloo in a thread that is traced, as a debugger traces it."""
    chosen: list[str] = []
    thread = threading.Thread(target=lambda: chosen.append(_traced_choice()))
    thread.start()
    thread.join()
    return chosen[0]


def _traced_choice() -> str:
    import sys

    before = sys.gettrace()
    sys.settrace(lambda *_: None)
    try:
        return wire_for("gloo")
    finally:
        sys.settrace(before)


def check(results: list[Held], size: Size) -> Iterator[Claim]:
    n = len(results)
    want = one_process(size).gradients[0]
    for rank, held in enumerate(results):
        rows = size.part("batch", rank, n)
        own = gradients_of(start(size), batch(size, 0)[rows])[1][0]
        yield equal(
            f"rank {rank}: among peers, the gradient is one process's", held["gradient"], want
        )
        yield equal(f"rank {rank}: as a thread too", held["threads"], want)
        for how in ("own", "alone", "unsummed"):
            yield equal(f"rank {rank}: {how} is the gradient of its rows", held[how], own)
        bytes_and_ranks = [8 * torch.numel(want), n]
        yield equal(f"rank {rank}: the message is known alone", held["message"], bytes_and_ranks)
        says = f"rank {rank}: under a tracer gloo becomes threads"
        yield holds(says, held["chosen"] == "threads", held["chosen"])
