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

from phalanx.lab.lab import Lab
from phalanx.lab.mlp import Kept, backward, draw, forward, loss_of

ROWS, WIDTH, DEPTHS, FEW = 256, 16, (4, 16, 36, 64), 4
UNIT = 8 * ROWS * WIDTH  # bytes of one activation
WAYS = ("everything", "input only", "4 checkpoints", "sqrt checkpoints", "usual, 4", "usual, sqrt")
JOBS = [(way, depth) for way in WAYS for depth in DEPTHS]


def segments(way: str, depth: int) -> int:
    return {"everything": 1, "input only": 1}.get(way, isqrt(depth) if "sqrt" in way else FEW)


def by_hand(way: str, depth: int) -> tuple[int, int]:
    """Forwards, and activations kept. A layer keeps two for its backward: x and x @ w."""
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

    def step(self, x: Tensor, way: str) -> None:
        """Forward and backward once."""
        depth = len(self.weights)
        length = depth // segments(way, depth)
        checkpoints, kept = [], list[Kept]()
        for first in range(0, depth, length):
            checkpoints.append(x)
            x, kept = self.forward(x, first, first + length, keep=way == "everything")
        g = loss_of(x)[1]
        del x
        for first in reversed(range(0, depth, length)):
            start = checkpoints.pop()
            if way.startswith("usual"):
                _, kept = self.forward(start, first, first + length)
            for i in reversed(range(first, first + length)):
                if kept:
                    g = self.backward(i, g, kept.pop())
                else:
                    x, _ = self.forward(start, first, i, keep=False)
                    g = self.backward(i, g, self.forward(x, i, i + 1)[1][0])


def run(lab: Lab) -> None:
    lab.step("forwards and memory: each rank measures some of the ways", ways=len(JOBS))
    counted = torch.zeros(len(JOBS), 2, dtype=torch.float64)
    for number in range(lab.rank, len(JOBS), lab.n):
        way, depth = JOBS[number]
        chain, x = Chain(depth), draw(1, ROWS, WIDTH)
        base = lab.memory.now - UNIT  # the input counts as kept
        lab.memory.most = lab.memory.now
        with lab.doing(f"{way}, {depth} layers"):
            chain.step(x, way)
        counted[number] = torch.tensor([chain.forwards, (lab.memory.most - base) / UNIT])
        says = f"{way}, {depth} layers: the gradient is autograd's"
        lab.claim(says, chain.gradients[0], plain_gradient(depth))
    lab.group.all_reduce(counted)
    lab.after(forwards_and_activations=counted)
    hands = [by_hand(*job) for job in JOBS]
    lab.claim("forwards", counted[:, 0], [forwards for forwards, _ in hands])
    # What is being computed at the moment comes on top, and must not grow with depth.
    extra = (counted[:, 1] - torch.tensor([kept for _, kept in hands])).view(len(WAYS), -1)
    for way, more in zip(WAYS, extra.tolist(), strict=True):
        says = f"{way}: activations kept are those by hand and the ones in use"
        fits = min(more) >= 0 and max(more) <= 5.5 and max(more) - min(more) < 1.5
        lab.claim(f"{says}, {min(more):.2f} to {max(more):.2f} more", fits)
    lab.group.barrier()
    if lab.rank == 0:
        rows = []
        for (way, depth), (forwards, kept), hand in zip(JOBS, counted.tolist(), hands, strict=True):
            ms = f"{1e3 * seconds(way, depth):.1f}"
            rows.append((way, depth, f"{forwards:.0f}", hand[0], f"{kept:.1f}", hand[1], ms))
        header = ("kept", "layers", "forwards", "by hand", "activations", "by hand", "ms")
        lab.table("counted, by hand, and timed on rank 0 alone", header, rows)


def plain_gradient(depth: int) -> Tensor:
    """Of the first layer, by autograd."""
    weights = [w.requires_grad_() for w in Chain(depth).weights]
    x = draw(1, ROWS, WIDTH)
    for w in weights:
        x = F.gelu(x @ w)
    return torch.autograd.grad(x.square().mean(), weights[:1])[0]


def seconds(way: str, depth: int) -> float:
    """The shortest of three, not recorded."""
    times = []
    chain, x = Chain(depth), draw(1, ROWS, WIDTH)
    with _disable_current_modes():
        for _ in range(3):
            begin = time.perf_counter()
            chain.step(x, way)
            times.append(time.perf_counter() - begin)
    return min(times)
