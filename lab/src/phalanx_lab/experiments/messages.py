"""Messages between ranks: collectives, send and receive, rendezvous, the numbering of
ranks, and how to debug one of them."""

import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from phalanx.comm import Group, World
from phalanx.comm.agree import broadcast_text
from phalanx.comm.launch import launch
from phalanx.comm.tally import TallyWorld
from phalanx_lab.catalogue import Size
from phalanx_lab.lab import Lab, gathered, scattered
from phalanx_lab.mlp import batch, draw, gradients_of, start
from phalanx_lab.trial import backend_for

dist: Any = torch.distributed  # its type stubs leave out the stores
PATIENCE = timedelta(seconds=30)


def collectives(lab: Lab) -> None:
    """Every collective once, with numbers that show which rank they come from; and which is whose
    gradient.

    A collective is a call that all ranks of a group make together. Rank r starts with 10 r + 0,
    10 r + 1, ...: the tens digit is the sender, the ones digit the place, so that every result shows
    where its numbers are from.
    """
    group, rank, n = lab.group, lab.rank, lab.n
    # Row r is what rank r starts with: (ranks, numbers).
    table = torch.arange(n).double() + 10 * torch.arange(n)[:, None]

    # Each collective is one call. It is shown before and after, and compared with what one process
    # computes from the table.
    def show(
        name: str, call: Callable[[Tensor], object], want: Tensor
    ) -> None:
        x = table[rank].clone()
        lab.step(name, x=x)
        result = call(x)
        result = result if isinstance(result, Tensor) else x
        lab.after(result=result)
        lab.claim(f"{name} is what one process computes", result, want)

    def transposed(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        group.all_to_all(out, x)
        return out

    def collected(x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(n)] if rank == 0 else None
        group.gather(parts, x, root=0)
        return torch.cat(parts) if parts else x

    def handed_out(x: Tensor) -> Tensor:
        out = x.new_empty(1)
        group.scatter(
            out, list(torch.split(x, 1)) if rank == 0 else None, root=0
        )
        return out

    total, first = table.sum(0), rank == 0

    # From many to all: the sum, or everything. Reduce and broadcast are from all to one, the root,
    # and from the root to all; gather and scatter are the same for parts.
    show("all-reduce", group.all_reduce, total)  # everyone gets the sum
    show(
        "reduce",
        lambda x: group.reduce(x, root=0),
        total if first else table[rank],
    )
    show("broadcast", lambda x: group.broadcast(x, root=n - 1), table[n - 1])
    # everyone gets everything
    show("all-gather", lambda x: gathered(group, x), table.flatten())
    # one part of the sum
    show("reduce-scatter", lambda x: scattered(group, x), total[rank])
    # part j goes to rank j: a transpose over ranks
    show("all-to-all", transposed, table[:, rank])
    show("gather", collected, table.flatten() if first else table[rank])
    show("scatter", handed_out, table[0, rank])  # rank 0 hands out its parts

    # Collectives come in pairs. What one does to values in forward, the other does to gradients in
    # backward: all-gather and reduce-scatter, broadcast and reduce; all-reduce and all-to-all are
    # their own partners. That is why splitting a layer always costs a message in each direction.
    # Here the loss is the sum over ranks of weight_r . all_gather(x), and its gradient comes back
    # summed and in parts.
    # (ranks, n n)
    rows = torch.arange(n)[:, None].double()
    weights = torch.cos(torch.arange(n * n) + rows)
    leaves = [row.clone().requires_grad_() for row in table]
    want = torch.autograd.grad((weights @ torch.cat(leaves)).sum(), leaves)
    title = "the gradient of an all-gather is a reduce-scatter"
    show(title, lambda _: scattered(group, weights[rank].clone()), want[rank])


def all_reduce(lab: Lab) -> None:
    """All-reduce: five operators, and why it is a reduce-scatter followed by an all-gather.

    An all-reduce combines what all ranks have, number by number, and gives everyone the result. It is
    the most used collective: one of all gradients in every step of data parallel.
    """
    group, rank, n = lab.group, lab.rank, lab.n
    # Row r is what rank r starts with: (ranks, numbers).
    table = 1 + torch.arange(n).double() + 10 * torch.arange(n)[:, None]

    # Sum and average are for gradients and losses, and their own gradient is another all-reduce.
    # The others are for decisions: the maximum of flags is 1 if any rank has found something (an
    # overflow), their minimum and their product are 1 if all have; the minimum of numbers is the
    # newest checkpoint that everybody can read.
    least, most = table.aminmax(dim=0)
    results = [table.sum(0), table.mean(0), least, most, table.prod(0)]
    for op, want in zip(
        ("sum", "average", "min", "max", "product"), results, strict=True
    ):
        x = table[rank].clone()
        lab.step(f"operator: {op}", x=x)
        group.all_reduce(x, op)
        lab.after(x=x)
        lab.claim(f"{op} is what one process computes", x, want)

    # First half: every rank receives the sum of one part only, number r on rank r.
    begun = lab.sent()
    lab.step("first half: reduce-scatter", x=table[rank])
    part = scattered(group, table[rank])
    lab.after(part=part)
    lab.claim("a part of the sum", part, table.sum(0)[rank])

    # Second half: the parts are collected on every rank. Each half sends (n-1)/n of the numbers, so
    # the whole sends 2(n-1)/n, nearly twice the size whatever n is. ZeRO-1 is nothing but the two
    # halves with the optimizer between them.
    lab.step("second half: all-gather", part=part)
    whole = gathered(group, part)
    lab.after(x=whole)
    lab.claim("the two halves are an all-reduce", whole, table.sum(0))
    halves = lab.sent() - begun
    lab.claim(
        "the halves sent 2(n-1)/n of the numbers",
        halves,
        2 * (n - 1) / n * whole.nbytes,
    )

    # How it is done with messages between neighbours, a ring. In each of n-1 hops a rank sends one
    # part to the next rank, which adds it to its own; after that each part is complete somewhere.
    # In n-1 more hops complete parts go round. Every link is busy all the time, and no rank sends
    # more than another.
    x, begun = table[rank].clone(), lab.sent()
    lab.step("the same as a ring", x=x)
    for hop in range(2 * (n - 1)):
        send, take = (rank - hop) % n, (rank - hop - 1) % n
        arrived = torch.empty(1, dtype=x.dtype)
        group.send(x[send : send + 1].clone(), to=(rank + 1) % n)
        group.receive(arrived, source=(rank - 1) % n)
        x[take] = x[take] + arrived[0] if hop < n - 1 else arrived[0]
        lab.shows(f"hop {hop + 1}", x=x)
    lab.after(x=x)
    lab.claim("the ring's result is the sum", x, table.sum(0))
    lab.claim("and it sent as many bytes", lab.sent() - begun, halves)


def point_to_point(lab: Lab) -> None:
    """Send and receive: a value passes through all ranks and is changed, its gradient travels back.

    Point to point is for what only two ranks have to do with: the stages of a pipeline, the
    neighbours of a ring.
    """
    group, rank, n = lab.group, lab.rank, lab.n
    factor = draw(rank, 4)

    # A send does not wait for its peer, a receive does. So every rank but the first begins by
    # waiting.
    lab.step(
        "forward: every rank multiplies by its factor and sends the result on",
        factor=factor,
    )
    x = torch.ones(4, dtype=torch.float64)
    if rank > 0:
        group.receive(x, source=rank - 1)
    y = x * factor
    if rank < n - 1:
        group.send(y, to=rank + 1)
    lab.after(x=x, y=y)

    # What was sent in forward comes back as a gradient in backward, over the same link.
    lab.step(
        "backward: the gradient comes from the next rank and goes to the previous one",
        y=y,
    )
    g = torch.ones(4, dtype=torch.float64)
    if rank < n - 1:
        group.receive(g, source=rank + 1)
    if rank > 0:
        group.send(g * factor, to=rank - 1)
    lab.after(gradient_of_y=g, gradient_of_factor=g * x)

    factors = [draw(i, 4).requires_grad_() for i in range(n)]
    products = [torch.stack(factors[: i + 1]).prod(0) for i in range(n)]
    gradients = torch.autograd.grad(products[-1].sum(), factors)
    lab.claim("y is that of one process", y, products[rank])
    lab.claim("the gradient is autograd's", g * x, gradients[rank])

    # Messages between two ranks keep their order, and only the order identifies them. Two ranks
    # that both send first do not block each other; two that both receive first wait for ever.
    first, second = torch.tensor([1.0 + rank]), torch.tensor([100.0 + rank])
    lab.step(
        "two messages to the next rank arrive in order",
        first=first,
        second=second,
    )
    # Everyone sends before anyone receives, so the ring does not block.
    group.send(first, to=(rank + 1) % n)
    group.send(second, to=(rank + 1) % n)
    arrived = [torch.empty(1), torch.empty(1)]
    before = (rank - 1) % n
    for message in arrived:
        group.receive(message, source=before)
    lab.after(arrived_first=arrived[0], arrived_second=arrived[1])
    lab.claim(
        "messages kept their order",
        torch.cat(arrived),
        [1 + before, 100 + before],
    )


def process_groups(lab: Lab) -> None:
    """Rendezvous of ranks: a key-value store, a group built on it, and an orderly shutdown.

    `dist.init_process_group` makes a store from MASTER_ADDR and MASTER_PORT and then a group on it;
    here both are made by hand, so that no global state remains. The group's backend is nccl where
    every rank has a GPU of its own, otherwise gloo.
    """
    group, rank, n = lab.group, lab.rank, lab.n

    # Rendezvous is a small shared dictionary. Every rank writes its address and waits for those of
    # the others. HashStore exists in one process, FileStore in a file that all can open, TCPStore
    # in rank 0 behind a port. All three have set, get, wait and an atomic add. On the last one a
    # group is built. Shutting down: first a barrier, then leave. A rank that leaves while a peer
    # still waits for it ends the peer, and a store must exist until its last reader is done.
    with tempfile.TemporaryDirectory() as folder:
        # Everyone must know rank 0's folder and port: that is the least that ranks need to meet.
        path = broadcast_text(lab.group, str(Path(folder) / "store"))
        server = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        port = int(broadcast_text(lab.group, str(server.port)))
        tcp = dist.TCPStore(
            "127.0.0.1", port, is_master=False, timeout=PATIENCE
        )
        hashed = dist.HashStore()  # nobody outside this rank can see it
        file = dist.FileStore(path, n)
        stores = (hashed, [rank]), (file, range(n)), (tcp, range(n))
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
            lab.claim(
                f"the {name} contains these ranks", "; ".join(read), here
            )
            lab.claim(
                f"so many have added to the {name}", counted, len(members)
            )

        gradient = lab.own_gradient()
        lab.step(
            "a new group on the TCP store: all-reduce of the gradient",
            gradient=gradient,
        )
        gradient = all_reduced(gradient, tcp, rank, n) / n
        lab.after(gradient=gradient)
        group.barrier()  # rank 0's port and file stay until nobody needs them
    lab.claim(
        "the group's sum is one process's gradient",
        gradient,
        lab.whole_gradient(),
    )
    enough = dist.is_nccl_available() and torch.cuda.device_count() >= n
    lab.note(f"Here the backend would be {'nccl' if enough else 'gloo'}.")


def all_reduced(x: Tensor, store: Any, rank: int, n: int) -> Tensor:
    """Return the sum over ranks, through a temporary gloo group on the loopback
    interface."""
    gloo = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = PATIENCE
    group = gloo(dist.PrefixStore("lab", store), rank, n, options)
    group.allreduce([x]).wait()
    group.barrier().wait()
    return x


def one_process(lab: Lab) -> None:
    """One rank's code in one process: under a debugger, without its peers, or with them as threads.

    A breakpoint in one of four processes stops one and leaves three waiting until they time out. There
    are two ways out, and both need the rank's code to be a function that takes its world and its group.
    """
    whole = lab.whole_gradient()
    quiet = TallyWorld(lab.rank, lab.n, "cpu")
    lab.step("as it is: among its peers", rows=lab.rows(0))
    own, gradient = rank_code(quiet, lab.size, lab.group)
    lab.after(gradient=gradient)
    lab.claim(
        "after the message it is one process's gradient", gradient, whole
    )

    # With collectives that do nothing, any rank runs alone: what it computes before the first
    # message is right, what it receives is whatever the buffer contained, and the list of its
    # messages is exact.
    lab.step("collectives that do nothing: this rank alone", rows=lab.rows(0))
    alone, unsummed = rank_code(quiet, lab.size)
    lab.after(gradient=unsummed)
    lab.claim("alone, it is the same before the message", alone, own)
    lab.claim("and after it nobody has added anything", unsummed, own)
    message = quiet.ledger[0]
    lab.note(
        f"It would have sent: {message.collective} of {message.bytes:,} bytes."
    )
    lab.claim(
        "alone, the message is known",
        [message.bytes, message.size],
        [whole.nbytes, lab.n],
    )

    # With ranks as threads everything is right, and stopping one stops all. `phalanx lab` uses
    # threads by itself when a tracer is on (`sys.gettrace`, or `sys.monitoring` since 3.12).
    lab.step("all ranks as threads of this process", rows=lab.rows(0))
    with _disable_current_modes():
        threads = launch(rank_code, lab.n, lab.size, backend="threads")
    lab.after(gradient=threads[lab.rank][1])
    lab.claim("so it is as a thread", threads[lab.rank][1], whole)
    before = sys.gettrace()
    sys.settrace(lambda *_: None)
    chosen = backend_for("gloo")
    sys.settrace(before)
    lab.claim("under a tracer gloo becomes threads", chosen, "threads")


def rank_code(
    world: World, size: Size, group: Group | None = None
) -> tuple[Tensor, Tensor]:
    """The code of every rank: return the gradient before and after it is averaged."""
    group = group or world.split("inner", [range(world.size)])
    rows = batch(size, 0)[size.part("batch", group.rank, group.size)]
    gradient = gradients_of(start(size), rows)[1][0]
    own = gradient.clone()
    group.all_reduce(gradient, "average")
    return own, gradient


AXES = ("dp", "pp", "cp", "tp")


def grid(lab: Lab) -> None:
    """The grid: a rank's coordinate along every axis of a mesh, and the groups that differ in only one.

    Ranks are numbered like the digits of a number, the last axis fastest. Neighbours along the last
    axis have neighbouring numbers and so are in one machine: what communicates most (tensor parallel)
    comes last.
    """
    rank, sizes = lab.rank, shape_of(lab.n)
    own = coordinates(rank, sizes)
    ranks = torch.arange(lab.n).reshape(sizes)  # a second way to number them
    lab.claim(
        "it is where the array has it", own, (ranks == rank).nonzero()[0]
    )
    gradient = lab.own_gradient() / lab.n
    title = "a mesh of " + " x ".join(
        f"{a}{s}" for a, s in zip(AXES, sizes, strict=True)
    )

    # The groups along an axis are the ranks that agree in all other digits. Summing along every
    # axis in turn is summing over everybody, so the axes of a layout can be considered one at a
    # time.
    lab.step(title, rank=rank, coordinates=own, gradient=gradient)
    for axis, name in enumerate(AXES):
        group = lab.split(name, groups_along(axis, sizes))
        met = gathered(group, torch.tensor([rank])).tolist()
        group.all_reduce(gradient)
        lab.note(f"Rank {rank}'s group along {name}: {met}")
        line = ranks[
            tuple(
                slice(None) if i == axis else digit
                for i, digit in enumerate(own)
            )
        ]
        lab.claim(f"its group along {name} is a line of the array", met, line)
    lab.group.barrier()
    lab.after(gradient=gradient)
    lab.claim(
        "the sums along every axis are the sum over all",
        gradient,
        lab.whole_gradient(),
    )
    four = (2, 2, 2, 2)
    rows = [(axis, *groups_along(i, four)) for i, axis in enumerate(AXES)]
    lab.table("groups of dp2 pp2 cp2 tp2", ("axis", *[""] * 8), rows)


def shape_of(n: int) -> list[int]:
    """Return four sizes whose product is n: its prime factors in turn, the last axis
    first."""
    sizes, axis = [1] * len(AXES), -1
    for factor in range(2, n + 1):
        while n % factor == 0:
            sizes[axis % len(AXES)] *= factor
            n, axis = n // factor, axis - 1
    return sizes


def coordinates(rank: int, sizes: Sequence[int]) -> list[int]:
    """Return the digits of a rank."""
    return [
        rank // prod(sizes[i + 1 :]) % size for i, size in enumerate(sizes)
    ]


def groups_along(axis: int, sizes: Sequence[int]) -> list[list[int]]:
    """Return the groups of ranks that differ in one digit only, in order of that
    digit."""
    stride = prod(sizes[axis + 1 :])
    firsts = [
        rank
        for rank in range(prod(sizes))
        if coordinates(rank, sizes)[axis] == 0
    ]
    return [
        [first + i * stride for i in range(sizes[axis])] for first in firsts
    ]
