"""Context parallelism: attention's core replaced by one whose tokens lie on several ranks.

*Ring* (Liu et al. 2023): queries stay, blocks of keys and values pass from rank to rank, partial
results are merged by their log-sum-exp. *Ulysses* (Jacobs et al. 2023): an all-to-all gives each
rank all tokens of some heads. Both together: Ulysses inside each rank of the ring. Which tokens a
rank holds follows from `batch.held_times`; the causal mask follows from that order and not from
`positions`, which begin again with each document.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..comm import Group, regions
from ..comm.base import group_named
from ..layout import Layout, LayoutError
from ..models.kernels import (
    AttentionBlock,
    add_sinks,
    attend,
    attend_gradients,
    attend_own,
    attention,
    own_gradients,
    sink_gradients,
)
from .batch import held_times
from .model import Model

Ids = Tensor | None  # (batch, time): a number for each token
Sinks = Tensor | None  # (heads)


def install_context(model: Model, layout: Layout, ring: Group, ulysses: Group) -> None:
    """Every child named `core` becomes one that works on this rank's tokens.

    A ring replaces it: it must compute what `phalanx.models.Core` does; one with a window or a soft
    cap gathers keys and values instead. Under Ulysses alone the model's own core goes on, whatever it
    computes, on all tokens and fewer heads.
    """
    if layout.cp == 1:
        return
    replaced = False
    for _, piece in model.pieces:
        for name, core in list(piece.named_modules()):
            owner, _, child = name.rpartition(".")
            if child != "core":
                continue
            replaced = True
            inner = core
            if ring.size > 1:
                limited = getattr(core, "window", 0) or getattr(core, "softcap", 0)
                inner = GatheredCore(core, ring) if limited else RingCore(ring)
            swapped = UlyssesCore(inner, ulysses) if ulysses.size > 1 else inner
            setattr(piece.get_submodule(owner), child, swapped)
    if not replaced:
        raise LayoutError(
            f"cp={layout.cp} cuts attention's core, and no piece has a child named 'core'.\n"
            "  Put softmax(q k') v in a child of that name, called core(q, k, v, positions,"
            " documents), or use dp instead of cp."
        )


class UlyssesCore(nn.Module):
    """A core that gives each rank all tokens of some heads, and `inner` computes on them.

    Of k and v with fewer heads than ranks each is sent to several; their gradients are added.
    """

    def __init__(self, inner: nn.Module, group: Group) -> None:
        super().__init__()
        self.inner, self.group = inner, group

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Ids,
        documents: Ids,
        *sinks: Tensor,
    ) -> Tensor:
        ranks, heads, kv_heads = self.group.size, q.shape[2], k.shape[2]
        if heads % ranks:
            raise LayoutError(
                f"ulysses={ranks} does not divide the {heads} heads of a rank.\n"
                f"  Use a ring for the rest of cp."
            )
        # So often that the ranks divide them; it still divides the query heads, as both do.
        copies = ranks // math.gcd(ranks, kv_heads)
        if copies > 1:
            k, v = k.repeat_interleave(copies, 2), v.repeat_interleave(copies, 2)
        # One message for q, k and v: each rank's heads of all three together.
        parts = [
            x.view(*x.shape[:2], ranks, -1, x.shape[3]).permute(2, 0, 1, 3, 4)
            for x in (q, k, v)
        ]
        sizes = [x.shape[3] for x in parts]  # heads of q, k and v for each rank
        # (ranks, B, T / ranks, heads of all, head_dim) becomes (B, T, heads of all, head_dim)
        mine = regions.exchange(torch.cat(parts, 3), self.group, 0, 2).squeeze(0)
        if positions is not None:
            positions = regions.gather(positions, self.group, 1)
        # Documents are those of whole sequences as they are.
        own = (x.chunk(ranks)[self.group.rank] for x in sinks)
        y: Tensor = self.inner(*torch.split(mine, sizes, 2), positions, documents, *own)
        return regions.exchange(y, self.group, 1, 2)  # (B, T / ranks, heads, head_dim)


class GatheredCore(nn.Module):
    """A core with a window or a soft cap, where each rank of a ring holds two chunks of time: keys and
    values of all ranks are gathered, as Llama 3 was trained (Dubey et al. 2024, section 3.3.2)."""

    def __init__(self, plain: Any, group: Group) -> None:
        super().__init__()
        self.window, self.softcap, self.group = plain.window, plain.softcap, group

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Ids,
        documents: Ids,
        sinks: Sinks = None,
    ) -> Tensor:
        ring, length = self.group, q.shape[1] * self.group.size
        # (2, B, T, kv_heads, head_dim), in the ranks' order
        kv = regions.gather_sum(torch.stack((k, v)), ring, 2)
        times = torch.cat(
            [held_times(length, ring.size, 1, rank) for rank in range(ring.size)]
        )
        k, v = kv.index_select(2, times.argsort().to(q.device))  # in order of time
        # of time: a rank has one of each half
        chunk, parts = length // (2 * ring.size), []
        for rows, own in zip(
            q.chunk(2, 1), (ring.rank, 2 * ring.size - 1 - ring.rank), strict=True
        ):
            stop = (own + 1) * chunk
            seen = slice(
                max(0, own * chunk + 1 - self.window) if self.window else 0, stop
            )
            near = None if documents is None or q.is_meta else documents[:, seen]
            args = k[:, seen], v[:, seen], near, sinks, self.window, self.softcap
            parts.append(attention(rows, *args))
        return torch.cat(parts, 1)


class RingCore(nn.Module):
    """softmax(q k' / sqrt(head_dim)) v, causal, where each rank of a ring holds two chunks of time.

    While a rank computes with a block of keys and values, it is already passing it to the next
    rank and receiving another from the one before. Every block visits every rank, whatever of it
    is needed there, so all ranks send the same. In backward a block makes the round again, and its
    gradient behind it, one rank later; after as many steps as ranks that is home.
    """

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Ids,
        documents: Ids,
        sinks: Sinks = None,
    ) -> Tensor:
        assert q.shape[1] % 2 == 0, "a rank of a ring holds two chunks of one length"
        # Contiguous, so that what is kept is no view of something larger.
        # kv (2, B, T / ranks, kv_heads, head_dim)
        q, kv = q.contiguous(), torch.stack((k, v))
        # On meta nobody knows where documents end: see `models.Core`.
        ids = None if documents is None or q.is_meta else documents
        if regions.is_opaque():
            y: Tensor = _ring_op(q, kv, ids, sinks, self.group.name)[0]
        else:
            y = _Ring.apply(q, kv, ids, sinks, self.group)  # type: ignore[no-untyped-call]
        return y


class _Ring(torch.autograd.Function):
    """Keeps q, k, v, the result and its log-sum-exp for this rank's own tokens; no visitors."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, ids: Ids, sinks: Sinks, group: Group
    ) -> Tensor:
        out, lse = ring_attention(q, kv, ids, sinks, group)
        ctx.save_for_backward(q, kv, ids, sinks, out, lse)
        ctx.group = group
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        sinks = ctx.saved_tensors[3]
        dq, dkv, own = ring_gradients(gradient, *ctx.saved_tensors, ctx.group)  # type: ignore[call-arg]
        return dq, dkv, None, None if sinks is None else own, None


# A compiled graph cannot hold a group: there the ring is an opaque op that carries the group's name,
# as a region is.


@torch.library.custom_op("phalanx::ring", mutates_args=())
def _ring_op(
    q: Tensor, kv: Tensor, ids: Tensor | None, sinks: Tensor | None, name: str
) -> tuple[Tensor, Tensor]:
    return ring_attention(q, kv, ids, sinks, group_named(name))


@torch.library.custom_op("phalanx::ring_gradients", mutates_args=())
def _gradients_op(
    gradient: Tensor,
    q: Tensor,
    kv: Tensor,
    ids: Tensor | None,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    name: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return ring_gradients(gradient, q, kv, ids, sinks, out, lse, group_named(name))


@_ring_op.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=wide)


@_gradients_op.register_fake
def _(
    gradient: Tensor, q: Tensor, kv: Tensor, ids: Ids, sinks: Sinks, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    own = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return torch.empty_like(q), torch.empty_like(kv), own


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.name = inputs
    ctx.save_for_backward(*tensors, *output)


def _back(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    dq, dkv, own = _gradients_op(gradient, *ctx.saved_tensors, ctx.name)
    return dq, dkv, None, own if ctx.needs_input_grad[3] else None, None


_ring_op.register_autograd(_back, setup_context=_keep)


def around(ranks: int) -> list[tuple[int, int]]:
    """The (sender, receiver) pairs of a ring, for the group that is split for it."""
    return [(rank, (rank + 1) % ranks) for rank in range(ranks)] if ranks > 1 else []


def needed(step: int, rank: int, ranks: int, length: int) -> AttentionBlock:
    """Rows and keys that meet in the block visiting at a step, and whether a diagonal cuts them.

    Chunk c of time precedes chunk d if c < d. A rank has one chunk of the first half and its mirror
    in the last half. So two of the four pairs of chunks are needed from any other rank, and three
    of its own, two of which the diagonal cuts: every rank computes the same amount at every step.
    """
    source = (rank - step) % ranks
    whole, half = slice(0, length), length // 2
    if source == rank:
        return AttentionBlock(slice(None), whole, whole, causal=True)
    if source < rank:
        return AttentionBlock(slice(None), whole, slice(0, half))
    return AttentionBlock(slice(None), slice(half, length), whole)


def visiting_blocks(
    step: int, group: Group, length: int, documents: Tensor | None
) -> list[AttentionBlock]:
    """Parts of the visiting block that this rank's rows attend to. All its keys precede the rows,
    so the only common document is the one that ends the keys and begins the rows."""
    block = needed(step, group.rank, group.size, length)
    if documents is None:
        return [block]
    source = (group.rank - step) % group.size
    ids, its = (_ids_of(documents, group, rank) for rank in (group.rank, source))
    rows, keys = ids[:, block.rows], its[:, block.keys]  # each (B, rows or keys)
    counts = ((x == keys[:, -1:]).sum(1).tolist() for x in (rows, keys))
    return [
        AttentionBlock(
            slice(row, row + 1),
            slice(block.rows.start, block.rows.start + seeing),
            slice(block.keys.stop - seen, block.keys.stop),
        )
        for row, (seeing, seen) in enumerate(zip(*counts, strict=True))
        if seeing
    ]


def _ids_of(documents: Tensor, group: Group, rank: int) -> Tensor:
    """Each token's document, counted along its row, for the tokens of a rank of the ring."""
    counted = (documents.diff(dim=1, prepend=documents[:, :1]) != 0).cumsum(1)  # (B, T)
    return counted[:, held_times(counted.shape[1], group.size, 1, rank)]


def ring_attention(
    q: Tensor, kv: Tensor, documents: Tensor | None, sinks: Sinks, group: Group
) -> tuple[Tensor, Tensor]:
    """The result (B, T, heads, size) of this rank's queries and its log-sum-exp (B, T, heads)."""
    wide = torch.promote_types(q.dtype, torch.float32)
    for step, (k, v) in enumerate(_visits(kv, group)):
        if step == 0:
            if documents is None:
                out, lse = attend(
                    q, k, v, needed(0, group.rank, group.size, q.shape[1])
                )
            else:
                own = _ids_of(documents, group, group.rank)
                out, lse = attend_own(q, k, v, own, None)
            out, lse = out.to(wide).contiguous(), lse.contiguous()
            continue
        for block in visiting_blocks(step, group, q.shape[1], documents):
            at = block.batch, block.rows
            _merge(out[at], lse[at], *attend(q, k, v, block))
    out, lse = add_sinks(out, lse, sinks)
    return out.to(q.dtype), lse


def ring_gradients(
    gradient: Tensor,
    q: Tensor,
    kv: Tensor,
    documents: Tensor | None,
    sinks: Sinks,
    out: Tensor,
    lse: Tensor,
    group: Group,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of this rank's q and kv, and what its queries give to that of the sinks; `out` and
    `lse` are what `ring_attention` gave."""
    gradient = gradient.contiguous()
    wide = torch.promote_types(q.dtype, torch.float32)
    into_q = torch.zeros_like(q, dtype=wide)  # (B, T / ranks, heads, head_dim)
    behind: _Passing | None = None  # the gradient that follows the block which is here
    for step, (k, v) in enumerate(_visits(kv, group)):
        # (2, B, T / ranks, kv_heads, head_dim)
        into_kv = torch.zeros_like(kv, dtype=wide)
        if step == 0 and documents is not None:
            own = _ids_of(documents, group, group.rank)
            parts: Sequence[Tensor] = own_gradients(gradient, (q, k, v), own, out, lse)
            for total, part in zip((into_q, *into_kv), parts, strict=True):
                total += part
        else:
            for block in visiting_blocks(step, group, q.shape[1], documents):
                at, keys = (block.batch, block.rows), (block.batch, block.keys)
                parts = attend_gradients(gradient, (q, k, v), out, lse, block)
                totals = into_q[at], into_kv[0][keys], into_kv[1][keys]
                for total, part in zip(totals, parts, strict=True):
                    total += part
        if behind is not None:
            into_kv += behind.come()
        behind = _Passing(into_kv, group)
    assert behind is not None
    into_kv = behind.come()  # home
    return (
        into_q.to(q.dtype),
        into_kv.to(q.dtype),
        sink_gradients(gradient, out, lse, sinks),
    )


class _Passing:
    """A tensor on its way to the next rank, and another on its way from the one before."""

    def __init__(self, x: Tensor, group: Group) -> None:
        # what leaves lives until it has left
        self.x, self.coming = x, torch.empty_like(x)
        before, after = (group.rank - 1) % group.size, (group.rank + 1) % group.size
        self.works = (
            group.send(x, after, wait=False),
            group.receive(self.coming, before, wait=False),
        )

    def come(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.coming


def _visits(kv: Tensor, group: Group) -> Iterator[Tensor]:
    """The blocks in the order in which they come, one's own first. While the caller works with one
    the next is on its way."""
    for step in range(group.size):
        passing = _Passing(kv, group) if step + 1 < group.size else None
        yield kv
        if passing is not None:
            kv = passing.come()


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add the softmax over other keys to one, each costed by its share of the sum.

    Nothing seen yet is -inf, and so is nothing seen in this part; the first part of a row is its
    own rank's, where it sees at least itself.
    """
    both = torch.logaddexp(lse, part_lse)
    scale = torch.where(both == -math.inf, 0.0, both)  # -inf minus -inf would be NaN
    out *= (lse - scale).exp().unsqueeze(-1)
    out.addcmul_(part, (part_lse - scale).exp().unsqueeze(-1))
    lse.copy_(both)
