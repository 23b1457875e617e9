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
from phalanx.lab.catalogue import Size
from phalanx.lab.lab import Lab
from phalanx.lab.mlp import batch, gradients_of, one_process, start
from phalanx.lab.trial import backend_for


def rank_code(world: World, size: Size, group: Group | None = None) -> tuple[Tensor, Tensor]:
    """What every rank does, written once: the gradient before and after it is averaged."""
    group = group or world.split("inner", [range(world.size)])
    rows = batch(size, 0)[size.part("batch", group.rank, group.size)]
    gradient = gradients_of(start(size), rows)[1][0]
    own = gradient.clone()
    group.all_reduce(gradient, "average")
    return own, gradient


def run(lab: Lab) -> None:
    whole = one_process(lab.size).gradients[0]
    quiet = TallyWorld(lab.rank, lab.n, "cpu")
    lab.step("as it is: among its peers", rows=lab.rows(0))
    own, gradient = rank_code(quiet, lab.size, lab.group)
    lab.after(gradient=gradient)
    lab.claim("after the message it is one process's gradient", gradient, whole)

    lab.step("collectives that do nothing: this rank alone", rows=lab.rows(0))
    alone, unsummed = rank_code(quiet, lab.size)
    lab.after(gradient=unsummed)
    lab.claim("alone, it is the same before the message", alone, own)
    lab.claim("and after it nobody has added anything", unsummed, own)
    message = quiet.ledger[0]
    lab.note(f"It would have sent: {message.collective} of {message.bytes:,} bytes.")
    lab.claim("alone, the message is known", [message.bytes, message.size], [whole.nbytes, lab.n])

    lab.step("all ranks as threads of this process", rows=lab.rows(0))
    with _disable_current_modes():
        threads = launch(rank_code, lab.n, lab.size, backend="threads")
    lab.after(gradient=threads[lab.rank][1])
    lab.claim("so it is as a thread", threads[lab.rank][1], whole)
    lab.claim("under a tracer gloo becomes threads", chosen_under_a_tracer(), "threads")


def chosen_under_a_tracer() -> str:
    """The backend for gloo in a thread that a debugger follows."""
    chosen: list[str] = []

    def look() -> None:
        sys.settrace(lambda *_: None)
        chosen.append(backend_for("gloo"))
        sys.settrace(None)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return chosen[0]
