"""One rank's code in one process: under a debugger, without its peers, or with them as threads.

A breakpoint in one of four processes stops one and leaves three waiting until they time out. There
are two ways out. With collectives that do nothing, any rank runs alone: what it computes before the
first message is right, what it receives is whatever the buffer contained, and the list of its
messages is exact. With ranks as threads everything is right, and stopping one stops all. `phalanx
lab` uses threads by itself when a tracer is on (`sys.gettrace`, or `sys.monitoring` since 3.12).
"""

import sys
import threading

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from phalanx.comm import Group, World
from phalanx.comm.launch import launch
from phalanx.comm.tally import TallyWorld
from phalanx.lab.claims import Claims, Results, Size, Values, every
from phalanx.lab.lab import Lab
from phalanx.lab.mlp import batch, gradients_of, one_process, start
from phalanx.lab.trial import backend_for, traced


def rank_code(group: Group, size: Size) -> tuple[Tensor, Tensor]:
    """What every rank does, written once: the gradient before and after it is averaged."""
    own = gradient_of(size, group.rank, group.size)
    gradient = own.clone()
    group.all_reduce(gradient, "average")
    return own, gradient


def gradient_of(size: Size, rank: int, n: int) -> Tensor:
    return gradients_of(start(size), batch(size, 0)[size.part("batch", rank, n)])[1][0]


def inner(world: World) -> Group:
    return world.split("inner", [range(world.size)])


def as_thread(world: World, size: Size) -> tuple[Tensor, Tensor]:
    return rank_code(inner(world), size)


def run(lab: Lab) -> Values:
    lab.step("as it is: among its peers")
    own, gradient = rank_code(lab.group, lab.size)
    lab.shows("before the message", gradient=own)
    lab.shows("after", gradient=gradient)

    lab.step("collectives that do nothing: this rank alone")
    quiet = TallyWorld(lab.rank, lab.n, "cpu")
    alone, unsummed = rank_code(inner(quiet), lab.size)
    lab.shows("before the message", gradient=alone)
    lab.shows("after", gradient=unsummed)
    message = quiet.ledger[0]
    lab.note(f"It would have sent: {message.collective} of {message.bytes:,} bytes.")

    lab.step("all ranks as threads of this process")
    with _disable_current_modes():
        thread = launch(as_thread, lab.n, lab.size, backend="threads")[lab.rank]
    lab.shows("before the message", gradient=thread[0])
    lab.shows("after", gradient=thread[1])
    if lab.rank == 0:
        state = "on" if traced() else "off"
        lab.note(f"A tracer is {state}: for --backend gloo the lab uses {backend_for('gloo')}.")
    return {
        "own": own,
        "gradient": gradient,
        "alone": alone,
        "unsummed": unsummed,
        "threads": thread[1],
        "message": [message.bytes, message.size],
        "chosen": chosen_under_a_tracer(),
    }


def chosen_under_a_tracer() -> str:
    """What is used for gloo in a thread that is traced, as a debugger traces it."""
    chosen: list[str] = []

    def choose() -> None:
        before = sys.gettrace()
        sys.settrace(lambda *_: None)
        try:
            chosen.append(backend_for("gloo"))
        finally:
            sys.settrace(before)

    thread = threading.Thread(target=choose)
    thread.start()
    thread.join()
    return chosen[0]


def check(results: Results, size: Size) -> Claims:
    n = len(results)
    want = one_process(size).gradients[0]
    yield from every(results, "gradient", "among peers, the gradient is one process's", want)
    yield from every(results, "threads", "so it is as a thread", want)
    for how in ("own", "alone", "unsummed"):
        says = f"{how} is the gradient of its rows"
        yield from every(results, how, says, lambda rank: gradient_of(size, rank, n))
    yield from every(results, "message", "alone, the message is known", [want.nbytes, n])
    yield from every(results, "chosen", "under a tracer gloo becomes threads", "threads")
