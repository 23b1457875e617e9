"""Timing of messages: launch and completion, bandwidth, and overlap."""

import statistics
import time

import torch

from phalanx_lab.lab import Lab
from phalanx_lab.mlp import start


def asynchronous_launch(lab: Lab) -> None:
    """A timing without synchronisation is wrong: the call returns before the work is done.

    A GPU kernel, or a collective with wait=False, is only *launched* by the call. A clock read when it
    returns measures the launch. On a GPU the cure is torch.cuda.synchronize (or events) before reading
    the clock, or CUDA_LAUNCH_BLOCKING=1 to find errors; here it is .wait().
    """
    group, rank, last = lab.group, lab.rank, lab.n - 1
    gradient, ready = lab.own_gradient(), torch.zeros(1)

    # Here rank 0 is late on purpose: it enters only after the last rank has launched, read its
    # clock and sent a message. At that moment the result cannot exist, however fast the launch was.
    lab.step(
        "an all-reduce that is launched, and what the clock shows",
        gradient=gradient,
    )
    if rank == 0 and last:
        group.receive(ready, source=last)  # late: the others have launched
    begin = time.perf_counter()
    work = group.all_reduce(gradient, "average", wait=False)
    launched = time.perf_counter() - begin
    done = work.done()
    if rank == last and last:
        group.send(ready, to=0)  # only now may rank 0 enter
    with lab.doing("something useful meanwhile"):
        torch.ones(lab.size.width) @ torch.ones(lab.size.width, lab.size.width)
    work.wait()
    waited = time.perf_counter() - begin
    lab.after(gradient=gradient)
    times = f"{1e6 * launched:,.0f} us, the result was there after {1e6 * waited:,.0f} us"
    lab.note(
        f"Rank {rank}: the call returned after {times}. Done when it returned: {done}."
    )
    lab.claim(
        "after waiting, it is one process's gradient",
        gradient,
        lab.whole_gradient(),
    )
    lab.claim(
        "nothing was done before rank 0 came", done and rank == last > 0, False
    )
    if torch.cuda.is_available():
        x = torch.randn(lab.size.width, lab.size.width, device="cuda")
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(10):
            _ = x @ x
        launched = time.perf_counter() - begin
        torch.cuda.synchronize()
        waited = time.perf_counter() - begin
        lab.note(
            f"Ten matmuls on the GPU: {launched:.1e} s to launch, {waited:.1e} s to do them."
        )


CALLS = 6


def bandwidth(lab: Lab) -> None:
    """Bandwidth: what is divided by what, why there is a factor of 2, warm-up and synchronisation.

    A collective of S bytes that takes t seconds has the algorithm bandwidth S/t. But in an all-reduce
    every rank sends 2(n-1)/n of S, so its links carried more: the bus bandwidth, S/t times 2(n-1)/n, is
    what can be compared with the number on a link's box, for any number of ranks. For all-gather and
    reduce-scatter the factor is (n-1)/n. Without it a link seems to become slower with every rank.
    """
    group, n, rows = lab.group, lab.n, []

    # Three rules. The first call is left out: it makes connections, and touches memory for the
    # first time. All ranks enter together, after a barrier: otherwise the clock shows how late the
    # last one was. And it is read when the result is there, not when the call returned.
    for count in (lab.size.width, 32 * lab.size.width, 1024 * lab.size.width):
        x, before = torch.ones(count, dtype=torch.float64), lab.sent()
        lab.step(f"{CALLS} all-reduces of {x.nbytes:,} bytes", x=x)
        seconds = []
        for _ in range(CALLS):
            group.barrier()
            begin = time.perf_counter()
            group.all_reduce(x, "average")
            seconds.append(time.perf_counter() - begin)
        lab.after(x=x)
        lab.claim("the average of ones is one", x, torch.ones(count))
        factor = (lab.sent() - before) / CALLS / x.nbytes
        lab.claim(
            "a rank sends 2(n-1)/n bytes for each byte",
            factor,
            2 * (n - 1) / n,
        )
        median = statistics.median(seconds[1:])
        rows.append((x.nbytes, seconds[0], median, factor))

    # Small messages take as long as the smallest: that is latency. Large ones take as long as their
    # bytes: that is bandwidth. A line through both ends, t = latency + S / bandwidth, is what a
    # planner uses.
    lab.step(
        "seconds as a line", seconds=[seconds for _, _, seconds, _ in rows]
    )
    (least, _, quick, _), *_, (most, _, slow, _) = rows
    slope = max(slow - quick, 1e-12) / (most - least)
    lab.after(seconds_a_byte=slope, latency=max(0.0, quick - slope * least))
    shown = []
    for size, first, median, factor in rows:
        speed = size / median / 1e9
        times = f"{1e6 * first:,.0f}", f"{1e6 * median:,.0f}"
        rates = f"{speed:.3f}", f"{factor:.3g}", f"{speed * factor:.3f}"
        shown.append((f"{size:,}", *times, *rates))
    header = (
        "S",
        "first, us",
        "median, us",
        "S/t, GB/s",
        "factor",
        "bus, GB/s",
    )
    lab.table(f"all-reduce over {n} ranks of this machine", header, shown)


def overlap(lab: Lab) -> None:
    """Streams and overlap: messages travel while the next layer is computed; what that hides.

    A stream is a queue of work that a device does in order. Two streams are done at the same time: one
    for computing, one for messages. An event is a mark in one queue for which another can wait: a
    gradient's message waits until the gradient is computed, the optimizer until the message is there.
    Nothing else may wait, least of all the host, which only fills the queues.
    """
    weights, rows, layers = start(lab.size), lab.rows(0), lab.size.layers

    def in_turn(layer: int, gradient: torch.Tensor) -> torch.Tensor:
        lab.average([gradient])
        return gradient

    # In turn: a layer's backward, its all-reduce, the next layer's backward. Units and links take
    # turns in being idle.
    lab.step("one after the other", weights=weights)
    _, gradients = lab.gradients(weights, rows, gradient=in_turn)
    lab.after(gradients=gradients)
    lab.claim(
        "in turn: gradients are one process's",
        gradients[0],
        lab.whole_gradient(),
    )
    lab.claim(
        "no message was under way while a layer was computed", _beside(lab), 0
    )

    # Overlapped: the message begins as soon as its gradient is there, and is waited for at the very
    # end. Backward goes from the last layer to the first, so only the first layer's message, the
    # last to begin, has nothing left to hide behind.
    lab.step("messages beside the layers below", weights=weights)
    works = []

    def begin(layer: int, gradient: torch.Tensor) -> torch.Tensor:
        works.append(lab.group.all_reduce(gradient, "average", wait=False))
        return gradient

    _, overlapped = lab.gradients(weights, rows, gradient=begin)
    for work in works:
        work.wait()
    lab.after(gradients=overlapped)
    lab.claim("overlapped: gradients are the same", overlapped, gradients)
    lab.claim(
        "all messages but one had layers to hide behind",
        _beside(lab),
        layers - 1,
    )

    # How much that saves, by hand. A layer computes for c, its message takes m, there are L layers.
    # In turn that is L (c + m). With two queues it is L c + m where messages are shorter than
    # layers, and c + L m where they are longer: then the links are always busy, and only fewer
    # bytes would help.
    lab.step("two queues by hand", layers=layers)
    rows_, queues = [], []
    for message in (0.5, 1.0, 2.0):
        computed = sent = 0.0
        for _ in range(layers):
            computed += 1.0
            # The event: the gradient is there.
            sent = max(sent, computed) + message
        queues.append(sent)
        hidden = layers * message - (sent - layers)
        rows_.append(
            (
                message,
                layers * (1 + message),
                sent,
                f"{hidden / message / layers:.0%}",
            )
        )
    formula = [
        layers + m if m <= 1 else 1 + layers * m for m in (0.5, 1.0, 2.0)
    ]
    lab.claim("two queues take what the formula says", queues, formula)
    lab.after(with_two_queues=queues)
    header = ("message / layer", "in turn", "two queues", "of messages hidden")
    lab.table("in units of one layer's backward", header, rows_)
    if torch.cuda.is_available():
        on_streams(lab)


def _beside(lab: Lab) -> int:
    """Return the number of this step's messages that were in flight while a layer was
    computed."""
    layers, messages = (
        [span for span in lab.now.spans if span.lane == lane]
        for lane in ("compute", "messages")
    )
    return sum(
        any(m.start <= c.start and c.end <= m.end for c in layers)
        for m in messages
    )


def on_streams(lab: Lab) -> None:
    """Run a matmul on one GPU stream and a copy to the host on another, with an event
    between them."""
    x = torch.randn(lab.size.width, lab.size.width, device="cuda")
    # Or the copy would hold the host.
    host = torch.empty(x.shape, pin_memory=True)
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    y = x @ x
    # An event: y has been computed.
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        host.copy_(y, non_blocking=True)
    z = y @ x  # beside the copy
    aside.synchronize()
    lab.claim("the copy beside the product is right", host, y, within=1e-6)
    lab.claim(
        "the product beside the copy is right", z, (x @ x) @ x, within=1e-3
    )
