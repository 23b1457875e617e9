"""Context parallelism: an attention core whose tokens are spread over several ranks.

*Ring* (Liu et al. 2023): queries stay, blocks of keys and values pass from rank to
rank, and partial results are merged by their log-sum-exp. *Ulysses* (Jacobs et al.
2023): an all-to-all gives each rank all tokens of some heads. Combined, Ulysses runs
inside each rank of the ring.

`batch.held_times` decides which tokens a rank holds. The causal mask follows from that
order and not from `positions`, which start again with each document.
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
from ..layout.exact import folded
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
from .mixers import spread_of
from .model import Model
from .parts import join_time, parts_of_time, spread

Ids = Tensor | None  # (B, T): a number for each token
Sinks = Tensor | None  # (heads)


def install_context(
    model: Model, layout: Layout, ring: Group, ulysses: Group
) -> None:
    """Replace every child module named `core` by one that works on this rank's tokens.

    A ring replaces a core that computes what `phalanx.models.Core` does. A core with a
    window or a soft cap gathers keys and values instead. Under Ulysses alone the
    model's own core is kept, whatever it computes, with all tokens and fewer heads.
    Under both, a core of the table in `mixers.py` keeps its tokens and heads.
    """
    if layout.cp == 1 and layout.time_parts < 2:
        return
    replaced = False
    for _, piece in model.pieces:
        # By the name of the child, so that any model can have one.
        for name, core in list(piece.named_modules()):
            owner, _, child = name.rpartition(".")
            if child != "core":
                continue
            replaced = True
            spread_core = spread_of(core)
            if spread_core is not None:
                own = spread_core(core, ring, ulysses)
                setattr(piece.get_submodule(owner), child, own)
                continue
            inner = core
            # A window or soft cap needs whole rows of scores: gather instead of a ring.
            if layout.time_parts > 1:
                inner = TimePartsCore(core, layout, ring)
            elif ring.size > 1:
                limited = getattr(core, "window", 0) or getattr(
                    core, "softcap", 0
                )
                inner = GatheredCore(core, ring) if limited else RingCore(ring)
            # Outside of the ring: Ulysses gives it all tokens of one ring place.
            swapped = (
                UlyssesCore(inner, ulysses) if ulysses.size > 1 else inner
            )
            setattr(piece.get_submodule(owner), child, swapped)
    if not replaced:
        raise LayoutError(
            f"cp={layout.cp} shards attention's core, but no piece has a child named 'core'.\n"
            "  Put softmax(q k') v in a child of that name, called core(q, k, v, positions,"
            " documents), or use dp instead of cp."
        )


class UlyssesCore(nn.Module):
    """A core that gives each rank all tokens of some heads, on which `inner` computes.

    If k and v have fewer heads than there are ranks, each head goes to several ranks
    and their gradients are added.
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
        # Repeat the KV heads up to lcm(kv_heads, ranks). That still divides the query
        # heads, as both do.
        copies = ranks // math.gcd(ranks, kv_heads)
        if copies > 1:
            k, v = (
                k.repeat_interleave(copies, 2),
                v.repeat_interleave(copies, 2),
            )
        # One message for q, k and v: each part holds one rank's heads of all three.
        parts = [
            # (ranks, B, T / ranks, heads / ranks, head_dim)
            x.view(*x.shape[:2], ranks, -1, x.shape[3]).permute(2, 0, 1, 3, 4)
            for x in (q, k, v)
        ]
        # Heads of q, k and v for each rank.
        sizes = [x.shape[3] for x in parts]
        # (ranks, B, T / ranks, q + k + v heads, head_dim) to (B, T, q + k + v heads,
        # head_dim)
        mine = regions.exchange(torch.cat(parts, 3), self.group, 0, 2).squeeze(
            0
        )
        if positions is not None:
            positions = regions.gather(positions, self.group, 1)
        # Every rank already has the documents of whole sequences.
        # sinks: (heads) to (heads / ranks), in the order in which q's heads were sent
        own = (x.chunk(ranks)[self.group.rank] for x in sinks)
        # y: (B, T, heads / ranks, head_dim)
        y: Tensor = self.inner(
            *torch.split(mine, sizes, 2), positions, documents, *own
        )
        # (B, T / ranks, heads, head_dim)
        return regions.exchange(y, self.group, 1, 2)


class GatheredCore(nn.Module):
    """A ring's core with a window or soft cap: gathers keys and values of all ranks.

    Llama 3 was trained this way (Dubey et al. 2024, section 3.3.2). Each rank holds two
    chunks of time.
    """

    def __init__(self, plain: Any, group: Group) -> None:
        super().__init__()
        self.window, self.softcap, self.group = (
            plain.window,
            plain.softcap,
            group,
        )

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
        # kv: (2, B, T, kv_heads, head_dim), in the ranks' order
        kv = regions.gather_sum(torch.stack((k, v)), ring, 2)
        times = torch.cat(
            [
                held_times(length, ring.size, 1, rank)
                for rank in range(ring.size)
            ]
        )
        # In order of time.
        k, v = kv.index_select(2, times.argsort().to(q.device))
        # In time order, a rank has one chunk of each half of the sequence.
        chunk, parts = length // (2 * ring.size), []
        # Each chunk of rows attends as the end of its keys: later keys are cut off, and
        # so are those that lie before the window.
        for rows, own in zip(
            q.chunk(2, 1),
            (ring.rank, 2 * ring.size - 1 - ring.rank),
            strict=True,
        ):
            stop = (own + 1) * chunk
            seen = slice(
                max(0, own * chunk + 1 - self.window) if self.window else 0,
                stop,
            )
            near = (
                None if documents is None or q.is_meta else documents[:, seen]
            )
            args = (
                k[:, seen],
                v[:, seen],
                near,
                sinks,
                self.window,
                self.softcap,
            )
            parts.append(attention(rows, *args))
        return torch.cat(parts, 1)


class TimePartsCore(nn.Module):
    """A core in a layout of `exact`: each part of time attends to all keys before it.

    A ring gathers keys and values, as `GatheredCore` does. The gradients of a key from
    all parts of time are added in one tree, in the order of `folded`.
    """

    def __init__(self, plain: Any, layout: Layout, group: Group) -> None:
        super().__init__()
        self.window, self.softcap = plain.window, plain.softcap
        self.group, self.parts = group, layout.time_parts
        self.order = folded(self.parts)
        own = self.parts // group.size
        self.own = self.order[group.rank * own : (group.rank + 1) * own]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Ids, documents: Ids
    ) -> Tensor:
        # kv: (2, B, T, kv_heads, head_dim), in the order of `folded`
        kv = regions.gather_sum(torch.stack((k, v)), self.group, 2)
        runs = kv.chunk(self.parts, 2)
        in_time = [runs[self.order.index(run)] for run in range(self.parts)]
        copies = spread(torch.cat(in_time, 2), len(self.own))
        queries = parts_of_time(q, len(self.own))
        three = zip(self.own, queries, copies, strict=True)
        return join_time([self._attend(*each, documents) for each in three])

    def _attend(
        self, run: int, q: Tensor, kv: Tensor, documents: Ids
    ) -> Tensor:
        """The output of one part of time (B, T / parts, heads, head_dim)."""
        length = q.shape[1]
        stop = (run + 1) * length
        first = run * length + 1 - self.window if self.window else 0
        seen = slice(max(0, first), stop)
        near = None if documents is None or q.is_meta else documents[:, seen]
        k, v = (_by_head(each) for each in kv[:, :, seen])
        window = self.window if self.window < stop else 0
        return attention(_by_head(q), k, v, near, None, window, self.softcap)


def _by_head(x: Tensor) -> Tensor:
    """x (B, T, heads, size), whose heads lie in memory as matrices of their own."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


class RingCore(nn.Module):
    """Causal softmax(q k' / sqrt(head_dim)) v over a ring of two time chunks per rank.

    While a rank computes with one block of keys and values, it passes that block to the
    next rank and receives another from the previous one. Every block visits every rank,
    needed there or not, so all ranks send the same amount. In backward the blocks make
    the round again. A block's gradient follows it one rank behind, and is home after as
    many steps as there are ranks.
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
        assert q.shape[1] % 2 == 0, (
            "a rank of a ring holds two chunks of equal length"
        )
        # Contiguous, so that what is saved is no view of something larger. kv: (2, B, T
        # / ranks, kv_heads, head_dim)
        q, kv = q.contiguous(), torch.stack((k, v))
        # Meta tensors do not say where documents end: see `models.Core`.
        ids = None if documents is None or q.is_meta else documents
        if regions.is_opaque():
            y: Tensor = _ring_op(q, kv, ids, sinks, self.group.name)[0]
        else:
            y = _Ring.apply(q, kv, ids, sinks, self.group)  # type: ignore[no-untyped-call]
        return y


class _Ring(torch.autograd.Function):
    """Saves q, k, v, output and log-sum-exp of own tokens, not the visiting blocks."""

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


# A compiled graph cannot hold a group. There the ring is an opaque op that carries the
# group's name, as a region is.


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
    return ring_gradients(
        gradient, q, kv, ids, sinks, out, lse, group_named(name)
    )


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


def _keep(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]
) -> None:
    *tensors, ctx.name = inputs
    ctx.save_for_backward(*tensors, *output)


def _back(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    dq, dkv, own = _gradients_op(gradient, *ctx.saved_tensors, ctx.name)
    return dq, dkv, None, own if ctx.needs_input_grad[3] else None, None


_ring_op.register_autograd(_back, setup_context=_keep)


def around(ranks: int) -> list[tuple[int, int]]:
    """The (sender, receiver) pairs of a ring, for the group that is split for it."""
    return (
        [(rank, (rank + 1) % ranks) for rank in range(ranks)]
        if ranks > 1
        else []
    )


def needed(step: int, rank: int, ranks: int, length: int) -> AttentionBlock:
    """The rows and keys that attend in a step's visiting block, and if it is causal.

    Chunk c of time precedes chunk d if c < d. A rank has one chunk of the first half
    and its mirror image in the second half. So it needs two of the four pairs of chunks
    from any other rank, and three of its own, two of them causal: every rank computes
    the same amount at every step.
    """
    source = (rank - step) % ranks
    whole, half = slice(0, length), length // 2
    if source == rank:
        return AttentionBlock(slice(None), whole, whole, causal=True)
    # Their first chunk precedes both of ours, and their second follows both.
    if source < rank:
        return AttentionBlock(slice(None), whole, slice(0, half))
    # Only our second chunk follows theirs, and it follows both.
    return AttentionBlock(slice(None), slice(half, length), whole)


def visiting_blocks(
    step: int, group: Group, length: int, documents: Tensor | None
) -> list[AttentionBlock]:
    """The parts of the visiting block that this rank's rows attend to.

    All keys of the block precede the rows, so the only shared document is the one in
    which the keys end and the rows begin.
    """
    block = needed(step, group.rank, group.size, length)
    if documents is None:
        return [block]
    source = (group.rank - step) % group.size
    ids, its = (
        _ids_of(documents, group, rank) for rank in (group.rank, source)
    )
    rows, keys = ids[:, block.rows], its[:, block.keys]  # (B, rows), (B, keys)
    # (B) each: rows, and keys, that belong to the shared document
    counts = ((x == keys[:, -1:]).sum(1).tolist() for x in (rows, keys))
    # One block for each sequence, as documents begin elsewhere in each.
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
    """The document number of each token that a rank holds, along its sequence."""
    # (B, T)
    counted = (documents.diff(dim=1, prepend=documents[:, :1]) != 0).cumsum(1)
    return counted[:, held_times(counted.shape[1], group.size, 1, rank)]


def ring_attention(
    q: Tensor, kv: Tensor, documents: Tensor | None, sinks: Sinks, group: Group
) -> tuple[Tensor, Tensor]:
    """Return this rank's output (B, T, heads, size) and log-sum-exp (B, T, heads)."""
    wide = torch.promote_types(q.dtype, torch.float32)
    for step, (k, v) in enumerate(_visits(kv, group)):
        # Own block first: there each row sees at least itself, so its lse is finite.
        if step == 0:
            if documents is None:
                out, lse = attend(
                    q, k, v, needed(0, group.rank, group.size, q.shape[1])
                )
            else:
                own = _ids_of(documents, group, group.rank)
                out, lse = attend_own(q, k, v, own, None)
            # Every merge rescales the result, so it stays in float32 until the end.
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
    """The gradients of this rank's q and kv, and its part of the sinks' gradient.

    `out` and `lse` come from `ring_attention`.
    """
    gradient = gradient.contiguous()
    wide = torch.promote_types(q.dtype, torch.float32)
    into_q = torch.zeros_like(q, dtype=wide)  # (B, T / ranks, heads, head_dim)
    behind: _Passing | None = (
        None  # the gradient that follows the visiting block
    )
    for step, (k, v) in enumerate(_visits(kv, group)):
        # (2, B, T / ranks, kv_heads, head_dim)
        into_kv = torch.zeros_like(kv, dtype=wide)
        if step == 0 and documents is not None:
            own = _ids_of(documents, group, group.rank)
            parts: Sequence[Tensor] = own_gradients(
                gradient, (q, k, v), own, out, lse
            )
            for total, part in zip((into_q, *into_kv), parts, strict=True):
                total += part
        else:
            for block in visiting_blocks(step, group, q.shape[1], documents):
                at, keys = (block.batch, block.rows), (block.batch, block.keys)
                parts = attend_gradients(gradient, (q, k, v), out, lse, block)
                totals = into_q[at], into_kv[0][keys], into_kv[1][keys]
                for total, part in zip(totals, parts, strict=True):
                    total += part
        # The previous rank had this block one step ago, and sends the sum so far.
        if behind is not None:
            into_kv += behind.come()
        behind = _Passing(into_kv, group)
    assert behind is not None
    into_kv = behind.come()  # home: the gradient of this rank's own block
    return (
        into_q.to(q.dtype),
        into_kv.to(q.dtype),
        sink_gradients(gradient, out, lse, sinks),
    )


class _Passing:
    """A tensor on its way to the next rank, and one from the previous rank."""

    def __init__(self, x: Tensor, group: Group) -> None:
        # The reference keeps the tensor alive until it is sent.
        self.x, self.coming = x, torch.empty_like(x)
        before, after = (
            (group.rank - 1) % group.size,
            (group.rank + 1) % group.size,
        )
        self.works = (
            group.send(x, after, wait=False),
            group.receive(self.coming, before, wait=False),
        )

    def come(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.coming


def _visits(kv: Tensor, group: Group) -> Iterator[Tensor]:
    """Yield the blocks of keys and values as they arrive, this rank's own first.

    While the caller works with one block, the next is on its way.
    """
    for step in range(group.size):
        # Sent before it is used: both only read it, so they overlap.
        passing = _Passing(kv, group) if step + 1 < group.size else None
        yield kv
        if passing is not None:
            kv = passing.come()


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge attention over more keys into a result, by shares of the softmax sum.

    Rows that have seen no key yet have -inf, and so have rows that see none in this
    part. A row's first part is its own rank's, where it sees at least itself.
    """
    # out = out e^(lse - both) + part e^(part_lse - both)
    both = torch.logaddexp(lse, part_lse)
    # -inf minus -inf would be NaN.
    scale = torch.where(both == -math.inf, 0.0, both)
    out *= (lse - scale).exp().unsqueeze(-1)
    out.addcmul_(part, (part_lse - scale).exp().unsqueeze(-1))
    lse.copy_(both)
