"""Seeded faults of pipelines, context parallelism, recomputation and offload."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from phalanx.comm import Group, Work, regions
from phalanx.layout import Layout
from phalanx.models.kernels import AttentionBlock
from phalanx.parallel import batch, context, recompute
from phalanx.parallel.pieces import Box, Piece
from phalanx.program import Op, ops
from phalanx.training.executor import Executor

from .fault import fault, swapped

# ---- pipelines


@fault(
    "the loss of a microbatch is not divided by the number of them",
    "gqa",
    "pp2 1f1b:3",
    "3 times as much",
)
def _() -> AbstractContextManager[None]:
    right = Piece.seed
    return swapped(
        Piece, "seed", lambda self, m, scale: right(self, m, 3 * scale)
    )


@fault(
    "a tied weight's gradients are not summed over the stages",
    "gpt",
    "pp2 1f1b:3",
    "gradient of embed",
)
def _() -> AbstractContextManager[None]:
    return swapped(Executor, "_tie", lambda self, op: None)


@fault(
    "gradients are averaged where they cross stages",
    "gqa",
    "pp2 1f1b:3",
    "1/2 of it",
)
def _() -> AbstractContextManager[None]:
    right = Executor._send

    def send(self: Executor, op: Op) -> Work:
        if op.of != ops.FORWARD:
            self.outgoing[ops.BACKWARD, op.piece, op.index]["x"].div_(2)
        return right(self, op)

    return swapped(Executor, "_send", send)


@fault(
    "the head uses the targets of another microbatch",
    "gqa",
    "pp2 gpipe:3",
    "the loss",
)
def _() -> AbstractContextManager[None]:
    right = Executor._forward

    def forward(self: Executor, op: Op) -> None:
        kept = self.batches, self.completed
        if self.local.pieces[op.piece].last:
            first, second, third = self.batches
            # Equal in size.
            self.batches, self.completed = (
                [first, third, second],
                {},
            )
        right(self, op)
        self.batches, self.completed = kept

    return swapped(Executor, "_forward", forward)


@fault(
    "the last deferred weight gradient is never computed",
    "gqa",
    "pp2 zb-h1:3",
    "gradient of layers.3.",
)
def _() -> AbstractContextManager[None]:
    right = Piece.weight_gradient

    def weight_gradient(self: Piece, m: int) -> None:
        if m == 2:
            self.kept[m].pending.clear()
        right(self, m)

    return swapped(Piece, "weight_gradient", weight_gradient)


@fault(
    "the embedding's deferred backward is lost",
    "gqa",
    "pp2 zb-h2:3",
    "gradient of embed.tokens",
)
def _() -> AbstractContextManager[None]:
    right = Piece.weight_gradient

    def weight_gradient(self: Piece, m: int) -> None:
        self.kept[m].whole = None
        right(self, m)

    return swapped(Piece, "weight_gradient", weight_gradient)


@fault(
    "a deferred matmul uses the input of the wrong microbatch",
    "gqa",
    "pp2 zb-h2:3",
    "gradient of layers.3.",
)
def _() -> AbstractContextManager[None]:
    right = Piece.weight_gradient

    def weight_gradient(self: Piece, m: int) -> None:
        self.kept[m].pending = [
            each._replace(x=each.x.flip(0)) for each in self.kept[m].pending
        ]
        right(self, m)

    return swapped(Piece, "weight_gradient", weight_gradient)


# ---- context parallelism


@fault("a step of the ring is skipped", "gqa", "cp2", "output of layers.0")
def _() -> AbstractContextManager[None]:
    right = context.needed

    def needed(
        step: int, place: int, places: int, length: int
    ) -> AttentionBlock:
        visible = right(step, place, places, length)
        return visible._replace(keys=slice(0, 1)) if step else visible

    return swapped(context, "needed", needed)


@fault(
    "the causal block of the ring is not masked",
    "gqa",
    "cp2",
    "output of layers.0",
)
def _() -> AbstractContextManager[None]:
    right = context.needed
    return swapped(
        context, "needed", lambda *where: right(*where)._replace(causal=False)
    )


@fault(
    "a cp rank applies rope with local positions",
    "gqa",
    "cp2",
    "output of layers.0",
)
def _() -> AbstractContextManager[None]:
    right = batch._held

    def held(
        whole: Mapping[str, Tensor], layout: Layout, cp: int
    ) -> dict[str, Tensor]:
        mine = right(whole, layout, cp)
        time = torch.arange(mine["tokens"].shape[1])
        return mine | {
            "positions": time.expand_as(mine["tokens"]).contiguous()
        }

    return swapped(batch, "_held", held)


@fault(
    "targets are sharded in order, but tokens by head and tail",
    "gqa",
    "cp2",
    "the loss",
)
def _() -> AbstractContextManager[None]:
    right = batch._held

    def held(
        whole: Mapping[str, Tensor], layout: Layout, cp: int
    ) -> dict[str, Tensor]:
        mine = right(whole, layout, cp)
        return mine | {
            "targets": whole["targets"].chunk(layout.cp, 1)[cp].contiguous()
        }

    return swapped(batch, "_held", held)


@fault(
    "document masks are ignored on visiting blocks",
    "gqa",
    "cp2",
    "output of layers.0",
    packed=True,
)
def _() -> AbstractContextManager[None]:
    right = context.visiting_blocks
    return swapped(
        context, "visiting_blocks", lambda *args: right(*args[:3], None)
    )


@fault(
    "partial softmaxes are averaged, not weighted",
    "gqa",
    "cp2",
    "output of layers.0",
)
def _() -> AbstractContextManager[None]:
    right = context._merge

    def merge(
        out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor
    ) -> None:
        known = lse > -torch.inf
        right(out, lse, part, torch.where(known, lse, part_lse))

    return swapped(context, "_merge", merge)


@fault(
    "gradients of visiting blocks are not returned",
    "gqa",
    "cp2",
    "gradient of layers.3.attn.wv",
)
def _() -> AbstractContextManager[None]:
    right = context.ring_gradients

    def gradients(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        into_q, into_kv, into_sinks = right(*args)
        return into_q, into_kv.roll(1, 2), into_sinks

    return swapped(context, "ring_gradients", gradients)


@fault(
    "Ulysses returns heads in the wrong order",
    "gqa",
    "cp2:ulysses",
    "output of layers.0",
)
def _() -> AbstractContextManager[None]:
    right = regions.exchange

    def exchange(x: Tensor, group: Group, split: int, join: int) -> Tensor:
        y = right(x, group, split, join)
        return y.flip(2) if split == 1 else y

    return swapped(regions, "exchange", exchange)


@fault(
    "gradients are summed over dp but not over cp",
    "gqa",
    "dp2 cp2",
    "gradient of head",
)
def _() -> AbstractContextManager[None]:
    wrong = property(lambda self: ("dp.replicate",) if self.zero else ("dp",))
    return swapped(Layout, "replica_axes", wrong)


# ---- recomputation and offload


@fault(
    "dropout is recomputed with another mask",
    "gqa",
    "recompute:all accum:3",
    "gradient of layers.3",
    dropout=0.2,
)
def _() -> AbstractContextManager[None]:
    right = Executor._recompute

    def recompute(self: Executor, op: Op) -> None:
        kept = self.batches, self.completed
        self.batches = [{**b, "noise": b["noise"] + 1} for b in self.batches]
        self.completed = {}
        right(self, op)
        self.batches, self.completed = kept

    return swapped(Executor, "_recompute", recompute)


@fault(
    "a piece is recomputed from the input of another",
    "gqa",
    "recompute:all accum:3",
    "gradient of layers.3",
)
def _() -> AbstractContextManager[None]:
    right = Executor._recompute

    def recompute(self: Executor, op: Op) -> None:
        key = op.piece, op.index
        if key in self.segments:
            self.segments[key] = {"x": self.segments[key]["x"].flip(0)}
        right(self, op)

    return swapped(Executor, "_recompute", recompute)


@fault(
    "a part is recomputed from the activations of another row",
    "gqa",
    "recompute:selective accum:3",
    "gradient of layers.3",
)
def _() -> AbstractContextManager[None]:
    right = Executor._recompute

    def recompute(self: Executor, op: Op) -> None:
        selected = self.selected[op.piece, op.index]
        product = next(
            n
            for n, kept in enumerate(selected)
            if isinstance(kept.value, Tensor)
        )
        selected[product] = selected[product]._replace(
            value=selected[product].value.flip(0)
        )
        right(self, op)

    return swapped(Executor, "_recompute", recompute)


@fault(
    "tp gathers activations again in the wrong order",
    "gqa",
    "tp2 seq recompute:selective",
    "gradient of layers.3",
)
def _() -> AbstractContextManager[None]:
    right = recompute._Giving.__torch_dispatch__

    def dispatch(
        self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = right(self, func, types, args, kwargs)
        if func is recompute._region and args[1] == "gather_sum":
            return torch.cat(out.chunk(args[3], args[4])[::-1], args[4])
        return out

    return swapped(recompute._Giving, "__torch_dispatch__", dispatch)


@fault(
    "offloaded activations are read back before they were copied out",
    "gqa",
    "accum:3 offload:activations",
    "gradient of layers",
)
def _() -> AbstractContextManager[None]:
    right = Box.come_back

    def come_back(self: Box) -> None:
        assert self.host is not None
        self.host = torch.zeros_like(self.host)
        right(self)

    return swapped(Box, "come_back", come_back)


@fault(
    "document masks apply to only one row of the batch",
    "gqa",
    "cp2",
    "output of layers.0",
    packed=True,
)
def _() -> AbstractContextManager[None]:
    right = batch._held

    def held(
        whole: Mapping[str, Tensor], layout: Layout, cp: int
    ) -> dict[str, Tensor]:
        mine = right(whole, layout, cp)
        ids = mine["documents"].clone()
        ids[1:] = 1
        return mine | {"documents": ids}

    return swapped(batch, "_held", held)
