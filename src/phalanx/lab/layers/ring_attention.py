"""Ring attention: queries stay, keys and values travel round, and softmax is put together on the way.

Every rank has a run of the sequence. In each of n rounds it attends to the keys and values that
are with it and passes them on, the next ones being on their way while it computes. softmax needs the
sum over all keys, so each rank keeps, for every query, the logarithm of the sum so far and the
output so far, and rescales the output when a round adds to the sum. A causal mask makes some rounds
empty: the first rank sees only its own keys, the last sees all, so equal runs are unequal work.
Backward goes round once more; keys and values travel with the gradient collected for them, and one
last hop brings that home (Liu et al. 2023).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from phalanx.comm import Group, Work, World
from phalanx.lab.claims import Claim, Held, Size, equal
from phalanx.lab.mlp import draw
from phalanx.lab.note import Note, everyone

HEADS = 4


def whole(size: Size) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, each (heads, tokens, numbers of a head)."""
    if size.width % HEADS:
        size.part("width", 0, HEADS)
    shape = (HEADS, size.batch, size.width // HEADS)
    return draw(1, *shape), draw(2, *shape), draw(3, *shape)


def run(world: World, size: Size, note: Note) -> Held:
    wire = everyone(world)
    mine = size.part("batch", wire.rank, wire.size)
    q, k, v = (each[:, mine].contiguous() for each in whole(size))
    note.step("forward: n rounds")
    note.holds("before", q=q, k=k, v=v)
    out, log_sum = forward(wire, q, k, v, note)
    note.holds("after", out=out, log_sum=log_sum)
    count = HEADS * size.batch * (size.width // HEADS)
    loss = out.square().sum() / count
    wire.all_reduce(loss)
    note.step("backward: once more round, gradients travel with keys and values")
    gradient = 2 * out / count
    note.holds("before", gradient_of_out=gradient)
    gq, gk, gv = backward(wire, (q, k, v), out, log_sum, gradient, note)
    note.holds("after", gradient_q=gq, gradient_k=gk, gradient_v=gv)
    return {"out": out, "loss": loss, "q": gq, "k": gk, "v": gv, "sent": note.sent()}


def scores(wire: Group, q: Tensor, k: Tensor, source: int) -> Tensor:
    """q k' / sqrt(d) of own queries and the keys of `source`, later keys masked."""
    count = q.shape[1]
    s: Tensor = q @ k.mT / q.shape[-1] ** 0.5
    rows = torch.arange(count)[:, None] + wire.rank * count
    return s.masked_fill(torch.arange(count) + source * count > rows, -torch.inf)


def pass_on(wire: Group, *tensors: Tensor) -> tuple[list[Tensor], list[Work]]:
    """Send to the right; what comes from the left, and what to wait for before using it."""
    n, rank = wire.size, wire.rank
    came = [torch.empty_like(each) for each in tensors]
    for each in tensors:
        wire.send(each, to=(rank + 1) % n)
    return came, [wire.receive(each, source=(rank - 1) % n, wait=False) for each in came]


def forward(wire: Group, q: Tensor, k: Tensor, v: Tensor, note: Note) -> tuple[Tensor, Tensor]:
    out = torch.zeros_like(q)
    log_sum = torch.full((*q.shape[:2], 1), -torch.inf, dtype=q.dtype)
    for hop in range(wire.size):
        source = (wire.rank - hop) % wire.size
        last = hop == wire.size - 1
        (next_k, next_v), works = ([k, v], []) if last else pass_on(wire, k, v)
        if source <= wire.rank:  # later ranks hold only later keys
            with note.doing(f"keys of {source}"):
                s = scores(wire, q, k, source)
                total = torch.logaddexp(log_sum, s.logsumexp(-1, keepdim=True))
                out = out * (log_sum - total).exp() + (s - total).exp() @ v
                log_sum = total
        for work in works:
            work.wait()
        k, v = next_k, next_v
    return out, log_sum


def backward(
    wire: Group, qkv: tuple[Tensor, ...], out: Tensor, log_sum: Tensor, g: Tensor, note: Note
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv
    gq, gk, gv = (torch.zeros_like(each) for each in qkv)
    inner = (g * out).sum(-1, keepdim=True)
    for hop in range(wire.size):
        source = (wire.rank - hop) % wire.size
        if source <= wire.rank:
            with note.doing(f"keys of {source}"):
                p = (scores(wire, q, k, source) - log_sum).exp()
                gs = p * (g @ v.mT - inner) / q.shape[-1] ** 0.5
                gq += gs @ k
                gk += gs.mT @ q
                gv += p.mT @ g
        # Keys and values are not needed after the last round; their gradients must still get home.
        moving = (gk, gv) if hop == wire.size - 1 else (gk, gv, k, v)
        came, works = pass_on(wire, *moving) if wire.size > 1 else (list(moving), [])
        for work in works:
            work.wait()
        gk, gv, k, v = (*came, k, v)[:4]
    return gq, gk, gv


def check(results: list[Held], size: Size) -> Iterator[Claim]:
    yield from attention_of_one_process(results, size)
    n = len(results)
    for rank, held in enumerate(results):
        block = 8 * size.batch * size.width / n
        formula = (2 * (n - 1) + 2 * (n - 1) + 2 * n) * block if n > 1 else 0
        says = f"rank {rank} sent keys and values twice, their gradients once"
        yield Claim(says, abs(held["sent"] - formula - 2 * (n - 1) / n * 8) < 1, f"{formula:,.0f}")


def attention_of_one_process(results: list[Held], size: Size) -> Iterator[Claim]:
    """Own rows of output and of gradients are those of plain attention."""
    n = len(results)
    q, k, v = (each.requires_grad_() for each in whole(size))
    later = torch.ones(size.batch, size.batch).triu(1).bool()
    s = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf)
    out = s.softmax(-1) @ v
    loss = out.square().mean()
    torch.autograd.backward(loss)
    for rank, held in enumerate(results):
        mine = size.part("batch", rank, n)
        yield equal(f"rank {rank}: output is that of its tokens", held["out"], out[:, mine])
        yield equal(f"rank {rank}: the loss is one process's", held["loss"], loss)
        for name, leaf in (("q", q), ("k", k), ("v", v)):
            assert leaf.grad is not None
            says = f"rank {rank}: gradient of {name} is that of its tokens"
            yield equal(says, held[name], leaf.grad[:, mine])
