"""Each rank has a range of layers: one after another, as a pipeline of microbatches in
two orders, and with messages in flight."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from phalanx.comm import Group, Work
from phalanx_lab.lab import Lab
from phalanx_lab.mlp import batch, loss_of, start

MICROBATCHES = 4


class Send(torch.autograd.Function):
    """Send x to the next rank; backward receives its gradient from there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.like = group, torch.empty_like(x)
        group.send(x.contiguous(), to=group.rank + 1)
        return x.new_zeros(())  # a value on which backward can be called

    @staticmethod
    def backward(ctx: Any, *unused: Any) -> Any:
        ctx.group.receive(ctx.like, source=ctx.group.rank + 1)
        return ctx.like, None


class Receive(torch.autograd.Function):
    """Receives from the previous rank, in the shape of x; backward sends the gradient there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        arrived = torch.empty_like(x)
        group.receive(arrived, source=group.rank - 1)
        return arrived

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.group.send(gradients[0].contiguous(), to=ctx.group.rank - 1)
        return None, None


def model_sharding(lab: Lab) -> None:
    """Model sharding: some layers here, the others there, and autograd crosses over by itself.

    One device works at a time, the others wait: with n devices, 1/n of the time is used. It makes a
    model fit, but nothing faster; a pipeline does.
    """
    size, last, own = lab.size, lab.n - 1, lab.part("layers")
    weights = [w.requires_grad_() for w in start(size)[own]]

    # Two devices of one process: the first half of the layers on one, the second on the other, and
    # x.to(device) between them is enough: autograd knows the way back. Without two GPUs they are
    # the CPU under two names.
    gpus = torch.cuda.device_count() > 1
    devices = [
        torch.device("cuda", i) if gpus else torch.device("cpu")
        for i in range(2)
    ]
    where = [devices[2 * i // size.layers] for i in range(size.layers)]
    moved = [
        w.to(at).requires_grad_()
        for w, at in zip(start(size), where, strict=True)
    ]

    def on_two_devices(step: int) -> tuple[Tensor, list[Tensor]]:
        x = batch(size, step)
        for w, device in zip(moved, where, strict=True):
            x = F.gelu(x.to(device) @ w)
        loss = x.square().mean()
        torch.autograd.backward(loss)
        return loss, gradients_of(moved)

    # Between two ranks the crossing is written once, as two autograd functions: what one sends in
    # forward, it receives back as a gradient. Then every rank calls backward on what it has, and
    # the gradients of each arrive by themselves.
    def on_ranks(step: int) -> tuple[Tensor | None, list[Tensor]]:
        x = batch(size, step)
        if lab.rank > 0:
            x = Receive.apply(x.requires_grad_(), lab.group)  # type: ignore[no-untyped-call]
        with lab.doing("F"):
            for w in weights:
                x = F.gelu(x @ w)
        loss = x.square().mean() if lab.rank == last else None
        end = Send.apply(x, lab.group) if loss is None else loss  # type: ignore[no-untyped-call]
        with lab.doing("B"):
            torch.autograd.backward(end)
        return loss, gradients_of(weights)

    # Both train, and both are one process's training.
    lab.train(
        on_ranks,
        weights,
        lambda x: x[own],
        how=", a rank for each range of layers",
    )
    lab.train(on_two_devices, moved, how=", one process with two devices")


def gradients_of(weights: list[Tensor]) -> list[Tensor]:
    """Return and clear the gradients that `backward` accumulated. Unlike `grad`,
    `backward` also runs through the boundary to the previous rank."""
    gradients = [w.grad for w in weights if w.grad is not None]
    for w in weights:
        w.grad = None
    return gradients


class PipelineStage:
    """A range of layers: forward and backward of one microbatch; autograd accumulates
    gradients."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.group, self.size = lab, lab.group, lab.size
        own = start(lab.size)[lab.part("layers")]
        self.weights = [w.requires_grad_() for w in own]
        self.first, self.last = lab.rank == 0, lab.rank == lab.n - 1
        self.most = 0

    def begin(self, step: int) -> None:
        self.step = step
        # input and output of each microbatch
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.loss = torch.zeros((), dtype=torch.float64)

    def post(self, source: int) -> tuple[Tensor, Work]:
        """Post a receive from a neighbour, of an activation or a gradient; return its
        buffer and the work."""
        rows = self.size.part("batch", 0, MICROBATCHES).stop
        x = torch.empty(rows, self.size.width, dtype=torch.float64)
        return x, self.group.receive(x, source, wait=False)

    def receive(self, source: int) -> Tensor:
        """Receive the next message from a neighbour."""
        x, work = self.post(source)
        work.wait()
        return x

    def send(self, x: Tensor, to: int) -> None:
        self.group.send(x, to)

    def forward(self, micro: int) -> None:
        """Run the forward of the batch's rows, or of the activations that the previous
        stage sends."""
        if self.first:
            x = batch(self.size, self.step)[
                self.size.part("batch", micro, MICROBATCHES)
            ]
        else:
            x = self.receive(self.lab.rank - 1)
        y = x.requires_grad_()
        with self.lab.doing(f"F{micro}"):
            for w in self.weights:
                y = F.gelu(y @ w)
        self.kept[micro] = x, y
        self.most = max(self.most, len(self.kept))
        if not self.last:
            self.send(y.detach(), self.lab.rank + 1)

    def backward(self, micro: int) -> None:
        """Run the backward from this stage's loss, or from the gradient that the next
        stage sends."""
        x, y = self.kept.pop(micro)
        if self.last:
            loss, g = loss_of(y.detach(), rows=self.size.batch)
            self.loss += loss
        else:
            g = self.receive(self.lab.rank + 1)
        with self.lab.doing(f"B{micro}"):
            torch.autograd.backward(y, g)
        if not self.first:
            assert x.grad is not None
            self.send(x.grad, self.lab.rank - 1)

    def train(
        self, order: Sequence[tuple[str, int]], most: int, extra: int = 0
    ) -> None:
        """Run all steps with these operations in this order; check how much was kept
        and sent."""

        def train_step(step: int) -> tuple[Tensor | None, list[Tensor]]:
            self.begin(step)
            for kind, micro in order:
                self.forward(micro) if kind == "F" else self.backward(micro)
            return self.loss if self.last else None, gradients_of(self.weights)

        size, lab = self.size, self.lab
        lab.train(
            train_step, self.weights, lambda layers: layers[lab.part("layers")]
        )
        neighbours = (not self.first) + (not self.last)
        formula = (
            size.steps * neighbours * (8 * size.batch * size.width + extra)
        )
        lab.claim("it sent activations to each neighbour", lab.sent(), formula)
        lab.claim("it kept so many microbatches at once", self.most, most)


ALL_FORWARDS_FIRST = [
    (kind, micro) for kind in "FB" for micro in range(MICROBATCHES)
]


def pipeline(lab: Lab) -> None:
    """Pipeline: the batch in microbatches, so that stages work at the same time, forward and backward.

    Each rank has a range of layers. While it works on one microbatch, its neighbour works on the next.
    All forwards first, then all backwards (GPipe, Huang et al. 2019): every stage keeps what all
    microbatches need for backward. Gradients add up over microbatches to those of the batch, as each
    loss is its part of the batch's mean. With M microbatches and P stages of equal cost a rank works
    in M of M+P-1 turns, each way.
    """
    PipelineStage(lab).train(ALL_FORWARDS_FIRST, most=MICROBATCHES)


class PostedStage(PipelineStage):
    """A stage that posts all receives at the start of the step, and uses them in
    order."""

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        self.in_flight: list[int] = []

    def begin(self, step: int) -> None:
        super().begin(step)
        neighbours = [self.lab.rank - 1] * (not self.first) + [
            self.lab.rank + 1
        ] * (not self.last)
        self.posted = {
            at: [self.post(at) for _ in range(MICROBATCHES)]
            for at in neighbours
        }

    def receive(self, source: int) -> Tensor:
        x, work = self.posted[source].pop(0)
        work.wait()
        return x

    def send(self, x: Tensor, to: int) -> None:
        self.in_flight.append(sum(map(len, self.posted.values())))
        super().send(x, to)


def pipeline_async(lab: Lab) -> None:
    """Pipeline with messages in flight: every receive is posted before it is needed, no send waits.

    The same stages and the same order as the plain pipeline. The difference is when a rank asks: space
    for all microbatches is posted at the start of the step, so a neighbour's message arrives while
    this rank computes, and it waits only when there is nothing else to do. That costs the memory of
    the space. It cannot fill the turns in which there is no work: that needs another order.
    """
    stage, m = PostedStage(lab), MICROBATCHES
    stage.train(ALL_FORWARDS_FIRST, most=m)
    if lab.rank == 0:
        counts = " ".join(map(str, stage.in_flight[:m]))
        lab.note(
            f"Receives open on rank 0 when it had computed each microbatch: {counts}."
        )
    # Whenever it sends: what the two neighbours have not sent yet, or not been asked for.
    left, right = not stage.first, not stage.last
    forwards = [left * (m - 1 - i) + m for i in range(m)] * right
    backwards = [right * (m - 1 - i) for i in range(m)] * left
    want = (forwards + backwards) * lab.size.steps
    lab.claim("receives were open while it computed", stage.in_flight, want)


class CountedStage(PipelineStage):
    """A stage that counts its turns, and sends the count along with every message."""

    def begin(self, step: int) -> None:
        super().begin(step)
        self.now, self.turns = 0, list[int]()

    def receive(self, source: int) -> Tensor:
        x, theirs = super().receive(source), torch.empty(1, dtype=torch.int64)
        self.group.receive(theirs, source)
        self.now = max(self.now, int(theirs))
        return x

    def send(self, x: Tensor, to: int) -> None:
        super().send(x, to)
        # the turn that ends with this message
        self.group.send(torch.tensor([self.now + 1]), to)

    def forward(self, micro: int) -> None:
        super().forward(micro)
        self.take()

    def backward(self, micro: int) -> None:
        super().backward(micro)
        self.take()

    def take(self) -> None:
        self.now += 1
        self.turns.append(self.now)


def one_f_one_b(lab: Lab) -> None:
    """1F1B: backward as soon as possible, so that a stage keeps few microbatches; and how many turns
    are used.

    Stage p of P runs P-p forwards, then one backward and one forward in turn. There are as many turns
    as with all forwards first, but stage p never keeps more than P-p microbatches instead of all M
    (Narayanan et al. 2019).
    """
    stage, rank, n, m = CountedStage(lab), lab.rank, lab.n, MICROBATCHES

    # It keeps P-p microbatches; with every activation goes a count of eight bytes. Turns are
    # counted in the real run: each message carries its sender's count, and an operation stands one
    # turn after the latest operation that it needs (Lamport's clock).
    stage.train(order(rank, n, m), most=min(n - rank, m), extra=8 * m)

    # Cells are turns x ranks. The whole batch at once fills P x 2 of P x 2P cells: 1/4 on 4 ranks.
    # With 4 microbatches 4 x 8 of 4 x 14 are filled: 16/28.
    cells = lab.everyone(torch.tensor(stage.turns))  # (ranks, operations)
    used, turns = cells.numel(), range(1, int(cells.max()) + 1)
    count = len(turns) * n
    if rank == 0:
        whole, counted = (
            f"1/{n} of the cells",
            f"{used} of {count}, {used // 2}/{count // 2}",
        )
        lab.note(
            f"The whole batch at once uses {whole}. Counted here: {counted}."
        )
    rows = []
    for i, taken in enumerate(cells.tolist()):
        ops = (f"{kind}{micro}" for kind, micro in order(i, n, m))
        row = dict(zip(taken, ops, strict=True))
        rows.append([f"rank {i}", *(row.get(turn, ".") for turn in turns)])
    lab.table(
        "which operation each rank runs in each turn",
        ("", *map(str, turns)),
        rows,
    )
    says = f"used cells are M/(M+P-1) = {m}/{m + n - 1}"
    lab.claim(says, Fraction(used, count) == Fraction(m, m + n - 1))
    # The first forwards come down the diagonal; the last stage begins backward at once.
    ends = [rank + 1, 2 * (m + n - 1) - rank]
    says = "it began in turn p and ended as the pipeline drained"
    lab.claim(says, [stage.turns[0], stage.turns[-1]], ends)
    lab.claim("its turns rise", sorted(set(stage.turns)), stage.turns)


def order(rank: int, ranks: int, microbatches: int) -> list[tuple[str, int]]:
    """Return one stage's operations: warm-up, alternating forward and backward,
    drain."""
    warm = min(ranks - rank, microbatches)
    ops = [("F", i) for i in range(warm)]
    for i in range(microbatches):
        ops.append(("B", i))
        if warm + i < microbatches:
            ops.append(("F", warm + i))
    return ops
