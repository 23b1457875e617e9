"""Recomputation: hold fewer activations, compute forward again; what each choice costs, measured.

For N layers, forwards (time) and activations held (memory) grow as

    holds everything                 O(N)          O(N)
    holds the input only             O(N^2)        O(1)       each layer from the start again
    C checkpoints                    O(N^2 / C)    O(C)       nothing held inside a segment
    sqrt(N) checkpoints              O(N sqrt N)   O(sqrt N)
    usual: sqrt(N), segment held     2 N           O(sqrt N)

The usual form (Chen et al. 2016) recomputes a segment once and holds it while going back through
it: never more than one forward extra. The gradients are the same in all of them.
"""

import time
from collections.abc import Iterator
from math import isqrt

import torch
from torch import Tensor
from torch.nn import functional as F

from phalanx.comm import World
from phalanx.lab.claims import Claim, Held, Size, equal, holds
from phalanx.lab.mlp import Kept, backward, draw, forward, loss_of
from phalanx.lab.note import Note, everyone

ROWS, WIDTH, DEPTHS, FEW = 256, 16, (4, 16, 36, 64), 4
UNIT = 8 * ROWS * WIDTH  # bytes of one activation
WAYS = ("everything", "input only", "4 checkpoints", "sqrt checkpoints", "usual, 4", "usual, sqrt")
JOBS = [(way, depth) for depth in DEPTHS for way in WAYS]


def segments(way: str, depth: int) -> int:
    return {"everything": 1, "input only": 1}.get(way, isqrt(depth) if "sqrt" in way else FEW)


def cost(way: str, depth: int) -> tuple[int, int]:
    """Forwards and activations by hand. A layer holds two for its backward: x and x @ w."""
    c = segments(way, depth)
    s = depth // c
    if way == "everything":
        return depth, 2 * depth
    if way.startswith("usual"):
        return 2 * depth, c + 2 * s
    return depth + c * s * (s + 1) // 2, c


class Chain:
    """Some layers; counts every forward of one."""

    def __init__(self, depth: int) -> None:
        self.weights = [(2 / WIDTH) ** 0.5 * draw(i, WIDTH, WIDTH) for i in range(depth)]
        self.gradients = [torch.zeros_like(w) for w in self.weights]
        self.forwards = 0

    def forward(self, i: int, x: Tensor) -> tuple[Tensor, Kept]:
        self.forwards += 1
        return forward(x, self.weights[i])

    def backward(self, i: int, g: Tensor, kept: Kept) -> Tensor:
        g, gradient = backward(g, kept, self.weights[i])
        self.gradients[i] += gradient
        return g

    def run(self, x: Tensor, first: int, last: int) -> tuple[Tensor, list[Kept]]:
        """Layers first to last, all that they keep held."""
        kept = []
        for i in range(first, last):
            x, saved = self.forward(i, x)
            kept.append(saved)
        return x, kept

    def pass_through(self, x: Tensor, first: int, last: int) -> Tensor:
        """The same, nothing held."""
        for i in range(first, last):
            x = self.forward(i, x)[0]
        return x


def step(chain: Chain, x: Tensor, way: str) -> None:
    """Forward and backward once."""
    depth = len(chain.weights)
    each = depth // segments(way, depth)
    if way == "everything":
        x, kept = chain.run(x, 0, depth)
        g = loss_of(x)[1]
        del x
        for i in reversed(range(depth)):
            g = chain.backward(i, g, kept.pop())
        return
    checkpoints = []
    for first in range(0, depth, each):
        checkpoints.append(x)
        x = chain.pass_through(x, first, first + each)
    g = loss_of(x)[1]
    del x
    for first in reversed(range(0, depth, each)):
        start = checkpoints.pop()
        held = chain.run(start, first, first + each)[1] if way.startswith("usual") else []
        for i in reversed(range(first, first + each)):
            again = held or chain.run(chain.pass_through(start, first, i), i, i + 1)[1]
            g = chain.backward(i, g, again.pop())


def run(world: World, size: Size, note: Note) -> Held:
    wire, rank, n = everyone(world), world.rank, world.size
    note.step("forwards and memory: each rank measures some of the ways")
    note.holds("before", ways=len(JOBS))
    counted = torch.zeros(len(JOBS), 2, dtype=torch.float64)
    gradients: list[Tensor] = []
    for number in range(rank, len(JOBS), n):
        way, depth = JOBS[number]
        chain, x = Chain(depth), draw(1, ROWS, WIDTH)
        base = note.live.now - UNIT  # the input counts as held
        note.live.reset_peak()
        with note.doing(f"{way}, {depth} layers"):
            step(chain, x, way)
        counted[number] = torch.tensor([chain.forwards, (note.live.peak - base) / UNIT])
        gradients.append(chain.gradients[0])
        if depth == DEPTHS[-1]:
            note.holds(f"after: {way}, {depth} layers", gradients=chain.gradients)
    wire.all_reduce(counted)
    note.step("time: rank 0 by itself, unwatched")
    note.holds("before", forwards_and_activations=counted)
    seconds = [_seconds(way, depth, note) for way, depth in JOBS] if rank == 0 else []
    wire.barrier()
    note.holds("after", seconds=seconds)
    if rank == 0:
        _draw(note, counted, torch.tensor(seconds))
    return {"gradients": gradients, "counted": counted}


def _seconds(way: str, depth: int, note: Note) -> float:
    """The shortest of three."""
    times = []
    chain, x = Chain(depth), draw(1, ROWS, WIDTH)
    with note.unwatched():
        for _ in range(3):
            begin = time.perf_counter()
            step(chain, x, way)
            times.append(time.perf_counter() - begin)
    return min(times)


def _draw(note: Note, counted: Tensor, seconds: Tensor) -> None:
    measured = torch.cat([counted, seconds[:, None].double()], 1)
    for column, y in enumerate(("forwards of a layer", "activations held", "seconds")):
        lines = {
            way: [(d, measured[JOBS.index((way, d)), column].item()) for d in DEPTHS]
            for way in WAYS
        }
        note.curves(f"{y} over the number of layers", "layers", y, lines)
    rows = []
    for way in WAYS:
        at = JOBS.index((way, DEPTHS[-1]))
        forwards, activations, took = measured[at].tolist()
        hand = cost(way, DEPTHS[-1])
        rows.append(
            (way, f"{forwards:.0f}", hand[0], f"{activations:.1f}", hand[1], f"{1e3 * took:.1f}")
        )
    header = ("held", "forwards", "by hand", "activations", "by hand", "ms")
    note.table(f"{DEPTHS[-1]} layers", header, rows)


def check(results: list[Held], size: Size) -> Iterator[Claim]:
    n = len(results)
    for rank, held in enumerate(results):
        for (way, depth), gradient in zip(JOBS[rank::n], held["gradients"], strict=True):
            weights = [w.requires_grad_() for w in Chain(depth).weights]
            x = draw(1, ROWS, WIDTH)
            for w in weights:
                x = F.gelu(x @ w)
            want = torch.autograd.grad(x.square().mean(), weights[0])[0]
            yield equal(f"{way}, {depth} layers: the gradient is autograd's", gradient, want)
        says = f"rank {rank}: everything counted, by all together"
        yield equal(says, held["counted"], results[-1]["counted"])
    for rank, held in enumerate(results):
        table = dict(zip(JOBS, held["counted"].tolist(), strict=True))
        for way in WAYS:
            extra = []
            for depth in DEPTHS:
                forwards, activations = table[way, depth]
                by_hand, most = cost(way, depth)
                extra.append(activations - most)
                yield equal(f"rank {rank}: {way}, {depth} layers: forwards", forwards, by_hand)
            # What is being computed at the moment comes on top, and must not grow with depth.
            says = f"rank {rank}: {way}: activations held are those by hand and the ones at work"
            fits = min(extra) >= 0 and max(extra) <= 5.5 and max(extra) - min(extra) < 1.5
            yield holds(says, fits, f"{min(extra):.2f} to {max(extra):.2f} more")
