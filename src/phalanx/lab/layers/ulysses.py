"""Ulysses: before attention the cut turns from tokens to heads, after it back; two exchanges each way.

A rank comes with all heads of some tokens. An all-to-all gives it all tokens of some heads, plain
attention runs as it always does, and another all-to-all returns. Each exchange moves (n-1)/n of a
rank's numbers whatever n, where a ring passes everything n-1 times. But a head cannot be cut, so
there can be at most as many ranks as query heads; with more, or where heads do not deal out evenly,
the ring takes over (Jacobs et al. 2023). Large runs combine the two: Ulysses inside a machine, the
ring across.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from phalanx.comm import Group, World
from phalanx.lab.claims import Claim, Held, Size, equal
from phalanx.lab.layers import ring_attention
from phalanx.lab.layers.ring_attention import HEADS, attention_of_one_process, whole
from phalanx.lab.note import Note, everyone


def run(world: World, size: Size, note: Note) -> Held:
    n = world.size
    if HEADS % n:
        note.says(f"{n} ranks and {HEADS} heads: a head cannot be cut, so the ring does it.")
        return ring_attention.run(world, size, note) | {"how": "ring"}
    wire = everyone(world)
    mine = size.part("batch", wire.rank, n)
    own = [each[:, mine].contiguous() for each in whole(size)]
    note.step("forward: to heads, attention, back to tokens")
    note.holds("before", q=own[0], k=own[1], v=own[2])
    q, k, v = (to_heads(wire, each) for each in own)
    with note.doing("attention"):
        tokens = q.shape[1]
        later = torch.ones(tokens, tokens).triu(1).bool()
        s = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf)
        p = s.softmax(-1)
    out = to_tokens(wire, p @ v)
    note.holds("after", all_tokens_of_some_heads=q, out=out)
    count = out.numel() * n
    loss = out.square().sum() / count
    wire.all_reduce(loss)
    note.step("backward: the same exchanges, the other way round")
    gradient = 2 * out / count
    note.holds("before", gradient_of_out=gradient)
    g = to_heads(wire, gradient)
    with note.doing("attention backward"):
        gp = g @ v.mT
        gs = p * (gp - (gp * p).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
    gq, gk, gv = (to_tokens(wire, each) for each in (gs @ k, gs.mT @ q, p.mT @ g))
    note.holds("after", gradient_q=gq, gradient_k=gk, gradient_v=gv)
    held = {"out": out, "loss": loss, "q": gq, "k": gk, "v": gv}
    return held | {"sent": note.sent(), "how": "ulysses"}


def to_heads(wire: Group, x: Tensor) -> Tensor:
    """From all heads of own tokens to all tokens of own heads."""
    heads, tokens, d = x.shape
    out = torch.empty_like(x)
    wire.all_to_all(out, x)  # heads are the first dim: part j is rank j's heads
    by_source = out.view(wire.size, heads // wire.size, tokens, d)
    return by_source.transpose(0, 1).reshape(heads // wire.size, wire.size * tokens, d)


def to_tokens(wire: Group, x: Tensor) -> Tensor:
    """From all tokens of own heads to all heads of own tokens."""
    heads, tokens, d = x.shape
    by_target = x.view(heads, wire.size, tokens // wire.size, d).transpose(0, 1).contiguous()
    out = torch.empty_like(by_target)
    wire.all_to_all(out, by_target)
    return out.view(wire.size * heads, tokens // wire.size, d)


def check(results: list[Held], size: Size) -> Iterator[Claim]:
    n = len(results)
    if HEADS % n:
        yield from ring_attention.check(results, size)
    else:
        yield from attention_of_one_process(results, size)
    for rank, held in enumerate(results):
        how = "ring" if HEADS % n else "ulysses"
        yield equal(f"rank {rank} took the way that {n} ranks allow", held["how"], how)
        if HEADS % n == 0:
            formula = 8 * (n - 1) / n * size.batch * size.width / n * 8 + 2 * (n - 1) / n * 8
            yield equal(f"rank {rank} sent (n-1)/n of it eight times", held["sent"], formula)
