"""Ring attention: queries stay, keys and values travel round the ring, softmax is combined on the way.

Every rank has a part of the sequence. In each of n rounds it attends to the keys and values that it
has at the moment and passes them on, while the next ones arrive. softmax needs the sum over all
keys, so each rank keeps, for every query, the logarithm of the sum so far and the output so far,
and rescales the output when a round adds to the sum. A causal mask makes some rounds empty: the
first rank sees only its own keys, the last sees all, so equal parts are unequal work. Backward goes
round once more; keys and values travel with the gradient collected for them, and one last hop
brings that home (Liu et al. 2023).
"""

import torch
from torch import Tensor

from phalanx.comm import Group, Work
from phalanx.lab.claims import Claims, Results, Size, Values, every
from phalanx.lab.lab import Lab
from phalanx.lab.mlp import draw

HEADS = 4


def whole(size: Size) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, each (heads, tokens, head_dim)."""
    if size.width % HEADS:
        size.part("width", 0, HEADS)
    shape = (HEADS, size.batch, size.width // HEADS)
    return draw(1, *shape), draw(2, *shape), draw(3, *shape)


def run(lab: Lab) -> Values:
    q, k, v = (x[:, lab.part("batch")].contiguous() for x in whole(lab.size))
    lab.step("forward: n rounds")
    lab.shows("before", q=q, k=k, v=v)
    out, log_sum = forward(lab, q, k, v)
    lab.shows("after", out=out, log_sum=log_sum)
    count = out.numel() * lab.n
    loss = out.square().sum() / count
    lab.group.all_reduce(loss)
    lab.step("backward: once more round, gradients travel with keys and values")
    gradient = 2 * out / count
    lab.shows("before", gradient_of_out=gradient)
    gq, gk, gv = backward(lab, (q, k, v), out, log_sum, gradient)
    lab.shows("after", gradient_q=gq, gradient_k=gk, gradient_v=gv)
    return {"out": out, "loss": loss, "q": gq, "k": gk, "v": gv, "sent": lab.sent()}


def scores(lab: Lab, q: Tensor, k: Tensor, source: int) -> Tensor:
    """q k' / sqrt(d) of own queries and the keys of `source`, later keys masked."""
    count = q.shape[1]
    s: Tensor = q @ k.mT / q.shape[-1] ** 0.5  # (heads, own tokens, source's tokens)
    rows = torch.arange(count)[:, None] + lab.rank * count
    return s.masked_fill(torch.arange(count) + source * count > rows, -torch.inf)


def pass_on(group: Group, *tensors: Tensor) -> tuple[list[Tensor], list[Work]]:
    """Send to the next rank; what the previous rank sends, and what to wait for before using it."""
    n, rank = group.size, group.rank
    arriving = [torch.empty_like(x) for x in tensors]
    for x in tensors:
        group.send(x, to=(rank + 1) % n)
    return arriving, [group.receive(x, source=(rank - 1) % n, wait=False) for x in arriving]


def forward(lab: Lab, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.zeros_like(q)
    log_sum = torch.full((*q.shape[:2], 1), -torch.inf, dtype=q.dtype)
    for hop in range(lab.n):
        source = (lab.rank - hop) % lab.n
        last = hop == lab.n - 1
        (next_k, next_v), works = ([k, v], []) if last else pass_on(lab.group, k, v)
        if source <= lab.rank:  # later ranks have only later keys
            with lab.doing(f"keys of {source}"):
                s = scores(lab, q, k, source)
                total = torch.logaddexp(log_sum, s.logsumexp(-1, keepdim=True))
                out = out * (log_sum - total).exp() + (s - total).exp() @ v
                log_sum = total
        for work in works:
            work.wait()
        k, v = next_k, next_v
    return out, log_sum


def backward(
    lab: Lab, qkv: tuple[Tensor, ...], out: Tensor, log_sum: Tensor, g: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv
    gq, gk, gv = (torch.zeros_like(x) for x in qkv)
    inner = (g * out).sum(-1, keepdim=True)
    for hop in range(lab.n):
        source = (lab.rank - hop) % lab.n
        if source <= lab.rank:
            with lab.doing(f"keys of {source}"):
                p = (scores(lab, q, k, source) - log_sum).exp()
                gs = p * (g @ v.mT - inner) / q.shape[-1] ** 0.5
                gq += gs @ k
                gk += gs.mT @ q
                gv += p.mT @ g
        # Keys and values are not needed after the last round; their gradients must still get home.
        moving = (gk, gv) if hop == lab.n - 1 else (gk, gv, k, v)
        arriving, works = pass_on(lab.group, *moving) if lab.n > 1 else (list(moving), [])
        for work in works:
            work.wait()
        gk, gv, k, v = (*arriving, k, v)[:4]
    return gq, gk, gv


def check(results: Results, size: Size) -> Claims:
    yield from attention_of_one_process(results, size)
    n = len(results)
    block = 8 * size.batch * size.width / n
    formula = (2 * (n - 1) + 2 * (n - 1) + 2 * n) * block if n > 1 else 0.0
    says = "it sent keys and values twice, their gradients once"
    yield from every(results, "sent", says, formula + 2 * (n - 1) / n * 8)  # and the loss


def attention_of_one_process(results: Results, size: Size) -> Claims:
    """Own rows of output and of gradients are those of plain attention."""
    q, k, v = (x.requires_grad_() for x in whole(size))
    later = torch.ones(size.batch, size.batch).triu(1).bool()
    s = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf)
    out = s.softmax(-1) @ v
    loss = out.square().mean()
    want = dict(zip("qkv", torch.autograd.grad(loss, (q, k, v)), strict=True)) | {"out": out}
    yield from every(results, "loss", "the loss is one process's", loss)
    for name, x in want.items():
        says = "the output is that of its tokens" if name == "out" else f"gradient of {name}"
        parts = [x[:, size.part("batch", rank, len(results))] for rank in range(len(results))]
        yield from every(results, name, says, parts.__getitem__)
