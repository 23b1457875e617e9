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
from phalanx.lab.lab import Lab
from phalanx.lab.mlp import draw

HEADS = 4


def whole(lab: Lab) -> list[Tensor]:
    """Queries, keys and values, each (heads, tokens, head_dim)."""
    if lab.size.width % HEADS:
        lab.size.part("width", 0, HEADS)
    return [draw(i, HEADS, lab.size.batch, lab.size.width // HEADS) for i in (1, 2, 3)]


def run(lab: Lab) -> None:
    n, qkv = lab.n, [x[:, lab.part("batch")].contiguous() for x in whole(lab)]
    lab.step("forward: n rounds", qkv=qkv)
    out, log_sum = forward(lab, *qkv)
    lab.after(out=out, log_sum=log_sum)
    count = out.numel() * n
    loss = out.square().sum() / count
    lab.group.all_reduce(loss)
    gradient = 2 * out / count
    title = "backward: once more round, gradients travel with keys and values"
    lab.step(title, gradient_of_out=gradient)
    gradients = backward(lab, qkv, out, log_sum, gradient)
    lab.after(gradients=gradients)
    claim_attention(lab, loss, out, gradients)
    block = 8 * lab.size.batch * lab.size.width / n
    formula = (2 * (n - 1) + 2 * (n - 1) + 2 * n) * block if n > 1 else 0.0
    formula += 2 * (n - 1) / n * 8  # and the loss
    lab.claim("it sent keys and values twice, their gradients once", lab.sent(), formula)


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


def backward(lab: Lab, qkv: list[Tensor], out: Tensor, log_sum: Tensor, g: Tensor) -> list[Tensor]:
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
    return [gq, gk, gv]


def claim_attention(lab: Lab, loss: Tensor, out: Tensor, gradients: list[Tensor]) -> None:
    """Own rows of output and of gradients are those of plain attention."""
    q, k, v = (x.requires_grad_() for x in whole(lab))
    later = torch.ones(lab.size.batch, lab.size.batch).triu(1).bool()
    s = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf)
    plain = s.softmax(-1) @ v
    mean, own = plain.square().mean(), lab.part("batch")
    lab.claim("the loss is one process's", loss, mean)
    lab.claim("the output is that of its tokens", out, plain[:, own])
    for name, x, want in zip("qkv", gradients, torch.autograd.grad(mean, (q, k, v)), strict=True):
        lab.claim(f"gradient of {name}", x, want[:, own])
