"""Recomputation: keep fewer activations, compute forward again; what each choice costs, measured.

For N layers, forwards (time) and activations kept (memory) grow as

    keeps everything                 O(N)          O(N)
    keeps the input only             O(N^2)        O(1)       each layer from the start again
    C checkpoints                    O(N^2 / C)    O(C)       nothing kept inside a segment
    sqrt(N) checkpoints              O(N sqrt N)   O(sqrt N)
    usual: sqrt(N), segment kept     2 N           O(sqrt N)

The usual form (Chen et al. 2016) recomputes a segment once and keeps it during its backward: never
more than one extra forward. The gradients are the same in all of them.
"""

import time
from math import isqrt

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from phalanx.lab.claims import Claim, Claims, Results, Size, Values, equal, every
from phalanx.lab.lab import Lab
from phalanx.lab.mlp import Kept, backward, draw, forward, loss_of

ROWS, WIDTH, DEPTHS, FEW = 256, 16, (4, 16, 36, 64), 4
UNIT = 8 * ROWS * WIDTH  # bytes of one activation
WAYS = ("everything", "input only", "4 checkpoints", "sqrt checkpoints", "usual, 4", "usual, sqrt")
JOBS = [(way, depth) for depth in DEPTHS for way in WAYS]


def segments(way: str, depth: int) -> int:
    return {"everything": 1, "input only": 1}.get(way, isqrt(depth) if "sqrt" in way else FEW)


def cost(way: str, depth: int) -> tuple[int, int]:
    """Forwards and activations by hand. A layer keeps two for its backward: x and x @ w."""
    c = segments(way, depth)
    s = depth // c
    if way == "everything":
        return depth, 2 * depth
    if way.startswith("usual"):
        return 2 * depth, c + 2 * s
    return depth + c * s * (s + 1) // 2, c


class Chain:
    """A chain of layers that counts the forwards."""

    def __init__(self, depth: int) -> None:
        self.weights = [(2 / WIDTH) ** 0.5 * draw(i, WIDTH, WIDTH) for i in range(depth)]
        self.gradients = [torch.zeros_like(w) for w in self.weights]
        self.forwards = 0

    def forward(
        self, x: Tensor, first: int, last: int, *, keep: bool = True
    ) -> tuple[Tensor, list[Kept]]:
        """Layers first to last, and what their backward needs if it is to be kept."""
        kept = []
        for i in range(first, last):
            x, saved = forward(x, self.weights[i])
            kept += [saved] * keep
            del saved
        self.forwards += last - first
        return x, kept

    def backward(self, i: int, g: Tensor, kept: Kept) -> Tensor:
        g, gradient = backward(g, kept, self.weights[i])
        self.gradients[i] += gradient
        return g


def step(chain: Chain, x: Tensor, way: str) -> None:
    """Forward and backward once."""
    depth = len(chain.weights)
    length = depth // segments(way, depth)
    checkpoints, kept = [], list[Kept]()
    for first in range(0, depth, length):
        checkpoints.append(x)
        x, kept = chain.forward(x, first, first + length, keep=way == "everything")
    g = loss_of(x)[1]
    del x
    for first in reversed(range(0, depth, length)):
        start = checkpoints.pop()
        if way.startswith("usual"):
            _, kept = chain.forward(start, first, first + length)
        for i in reversed(range(first, first + length)):
            if kept:
                g = chain.backward(i, g, kept.pop())
            else:
                x, _ = chain.forward(start, first, i, keep=False)
                g = chain.backward(i, g, chain.forward(x, i, i + 1)[1][0])


def run(lab: Lab) -> Values:
    lab.step("forwards and memory: each rank measures some of the ways")
    lab.shows("before", ways=len(JOBS))
    counted = torch.zeros(len(JOBS), 2, dtype=torch.float64)
    gradients: list[Tensor] = []
    for number in range(lab.rank, len(JOBS), lab.n):
        way, depth = JOBS[number]
        chain, x = Chain(depth), draw(1, ROWS, WIDTH)
        base = lab.memory.now - UNIT  # the input counts as kept
        lab.memory.most = lab.memory.now
        with lab.doing(f"{way}, {depth} layers"):
            step(chain, x, way)
        counted[number] = torch.tensor([chain.forwards, (lab.memory.most - base) / UNIT])
        gradients.append(chain.gradients[0])
        if depth == DEPTHS[-1]:
            lab.shows(f"after: {way}, {depth} layers", gradients=chain.gradients)
    lab.group.all_reduce(counted)
    lab.step("time: rank 0 alone, not recorded")
    lab.shows("before", forwards_and_activations=counted)
    took = [seconds(way, depth) for way, depth in JOBS] if lab.rank == 0 else []
    lab.group.barrier()
    lab.shows("after", seconds=took)
    if lab.rank == 0:
        show(lab, [(*row, s) for row, s in zip(counted.tolist(), took, strict=True)])
    return {"gradients": gradients, "counted": counted}


def seconds(way: str, depth: int) -> float:
    """The shortest of three."""
    times = []
    chain, x = Chain(depth), draw(1, ROWS, WIDTH)
    with _disable_current_modes():
        for _ in range(3):
            begin = time.perf_counter()
            step(chain, x, way)
            times.append(time.perf_counter() - begin)
    return min(times)


def show(lab: Lab, measured: list[tuple[float, ...]]) -> None:
    table = dict(zip(JOBS, measured, strict=True))
    for column, y in enumerate(("forwards of a layer", "activations kept", "seconds")):
        lines = {way: [(d, table[way, d][column]) for d in DEPTHS] for way in WAYS}
        lab.curves(f"{y} over the number of layers", "layers", y, lines)
    rows = []
    for way in WAYS:
        (forwards, activations, took), hand = table[way, DEPTHS[-1]], cost(way, DEPTHS[-1])
        counts = (f"{forwards:.0f}", hand[0], f"{activations:.1f}", hand[1])
        rows.append((way, *counts, f"{1e3 * took:.1f}"))
    header = ("kept", "forwards", "by hand", "activations", "by hand", "ms")
    lab.table(f"{DEPTHS[-1]} layers", header, rows)


def check(results: Results, size: Size) -> Claims:
    for rank, values in enumerate(results):
        for (way, depth), gradient in zip(
            JOBS[rank :: len(results)], values["gradients"], strict=True
        ):
            weights = [w.requires_grad_() for w in Chain(depth).weights]
            x = draw(1, ROWS, WIDTH)
            for w in weights:
                x = F.gelu(x @ w)
            (want,) = torch.autograd.grad(x.square().mean(), weights[:1])
            yield equal(f"{way}, {depth} layers: the gradient is autograd's", gradient, want)
    counted = results[-1]["counted"]
    yield from every(results, "counted", "all ranks have the same counts", counted)
    table = dict(zip(JOBS, counted.tolist(), strict=True))
    for way in WAYS:
        by_hand = [cost(way, depth) for depth in DEPTHS]
        forwards = [table[way, depth][0] for depth in DEPTHS]
        yield equal(f"{way}: forwards", forwards, [hand for hand, _ in by_hand])
        # What is being computed at the moment comes on top, and must not grow with depth.
        extra = [
            table[way, depth][1] - most for depth, (_, most) in zip(DEPTHS, by_hand, strict=True)
        ]
        says = f"{way}: activations kept are those by hand and the ones in use"
        fits = min(extra) >= 0 and max(extra) <= 5.5 and max(extra) - min(extra) < 1.5
        yield Claim(says, fits, f"{min(extra):.2f} to {max(extra):.2f} more")
