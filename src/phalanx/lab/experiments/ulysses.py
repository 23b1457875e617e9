"""Ulysses: an all-to-all before attention turns a split by tokens into one by heads, another turns it back.

A rank starts with all heads of some tokens. An all-to-all gives it all tokens of some heads, plain
attention runs as it always does, and another all-to-all returns. Each exchange moves (n-1)/n of a
rank's numbers whatever n, where a ring passes everything n-1 times. But a head cannot be split, so
there can be at most as many ranks as query heads; with more, or where heads do not divide evenly,
the ring takes over (Jacobs et al. 2023). Large runs combine the two: Ulysses inside a machine, the
ring across.
"""

import torch
from torch import Tensor

from phalanx.comm import Group
from phalanx.lab.experiments import ring_attention
from phalanx.lab.experiments.ring_attention import HEADS, claim_attention, whole
from phalanx.lab.lab import Lab


def run(lab: Lab) -> None:
    group, n = lab.group, lab.n
    if HEADS % n:
        lab.note(f"{n} ranks and {HEADS} heads: a head cannot be split, so the ring is used.")
        ring_attention.run(lab)
        return
    own = [x[:, lab.part("batch")].contiguous() for x in whole(lab)]
    lab.step("forward: to heads, attention, back to tokens", qkv=own)
    q, k, v = (to_heads(group, x) for x in own)
    with lab.doing("attention"):
        tokens = q.shape[1]
        later = torch.ones(tokens, tokens).triu(1).bool()
        s = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf)
        p = s.softmax(-1)
    out = to_tokens(group, p @ v)
    lab.after(all_tokens_of_some_heads=q, out=out)
    count = out.numel() * n
    loss = out.square().sum() / count
    group.all_reduce(loss)
    gradient = 2 * out / count
    lab.step("backward: the same exchanges in reverse", gradient_of_out=gradient)
    g = to_heads(group, gradient)
    with lab.doing("attention backward"):
        gp = g @ v.mT
        gs = p * (gp - (gp * p).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
    gradients = [to_tokens(group, x) for x in (gs @ k, gs.mT @ q, p.mT @ g)]
    lab.after(gradients=gradients)
    claim_attention(lab, loss, out, gradients)
    formula = 8 * (n - 1) / n * lab.size.batch * lab.size.width / n * 8 + 2 * (n - 1) / n * 8
    lab.claim("it sent (n-1)/n of its numbers eight times", lab.sent(), formula)


def to_heads(group: Group, x: Tensor) -> Tensor:
    """From (heads, own tokens, d) to (own heads, tokens, d)."""
    heads, tokens, d = x.shape
    out = torch.empty_like(x)
    group.all_to_all(out, x)  # heads are the first dim: part j is rank j's heads
    by_source = out.view(group.size, heads // group.size, tokens, d)
    return by_source.transpose(0, 1).reshape(heads // group.size, group.size * tokens, d)


def to_tokens(group: Group, x: Tensor) -> Tensor:
    """From (own heads, tokens, d) to (heads, own tokens, d)."""
    heads, tokens, d = x.shape
    by_target = x.view(heads, group.size, tokens // group.size, d).transpose(0, 1).contiguous()
    out = torch.empty_like(by_target)
    group.all_to_all(out, by_target)
    return out.view(group.size * heads, tokens // group.size, d)
