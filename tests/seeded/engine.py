"""Seeded faults of tensor and data parallelism, the loss, the norm and the update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from phalanx.comm import Group, Work, regions
from phalanx.layout import pieces
from phalanx.layout.rules import Cut
from phalanx.models.loss import Words
from phalanx.parallel import Unit, count_valid, local, tensor
from phalanx.parallel.data import Segment
from phalanx.parallel.pool import BufferPool
from phalanx.parallel.tensor import RowLinear, VocabularyEmbedding, Weight
from phalanx.parallel.works import ChainedWork
from phalanx.training.executor import Executor
from phalanx.training.optimizer import Update

from .fault import counted_by, fault, swapped


def _whole(x: Tensor, group: Group, *dims: int) -> Tensor:
    return x


# ---- regions


@fault(
    "column region: input gradients are not summed",
    "gqa",
    "tp2",
    "gradient of head.norm",
)
def _() -> AbstractContextManager[None]:
    return swapped(regions, "copy", _whole)


@fault("row region: outputs are not summed", "gqa", "tp2", "output of embed")
def _() -> AbstractContextManager[None]:
    return swapped(regions, "reduce", _whole)


@fault(
    "seq: a region's output is scattered but not summed",
    "gqa",
    "tp2 seq",
    "output of embed",
)
def _() -> AbstractContextManager[None]:
    return swapped(
        regions,
        "scatter_sum",
        lambda x, w, dim: x.chunk(w.size, dim)[w.rank] * 1,
    )


@fault(
    "seq: gathered input keeps only its own gradient",
    "gqa",
    "tp2 seq",
    "gradient of head.norm",
)
def _() -> AbstractContextManager[None]:
    right = regions.gather
    return swapped(regions, "gather_sum", lambda x, w, dim: right(x, w, dim))


@fault(
    "row bias is added on every rank",
    "gpt",
    "tp2",
    "step 1: the output of layers.0",
)
def _() -> AbstractContextManager[None]:
    def forward(self: RowLinear, x: Tensor) -> Tensor:
        y = torch.nn.functional.linear(x, self.weight)
        return self.join(y if self.bias is None else y + self.bias)

    return swapped(RowLinear, "forward", forward)


# ---- sums over tp


def _adds(
    wrong: Callable[[str, tuple[str, ...]], str],
) -> AbstractContextManager[None]:
    right = pieces.sum_over_tp
    return swapped(
        pieces,
        "sum_over_tp",
        lambda dims, cuts, x: wrong(right(dims, cuts, x), tuple(dims)),
    )


@fault(
    "seq: norm gradients are not summed over tp",
    "gqa",
    "tp2 seq",
    "gradient of head.norm",
)
def _() -> AbstractContextManager[None]:
    return _adds(lambda right, dims: "" if dims == ("embed",) else right)


@fault(
    "q and k norms: gradients of other heads are missing",
    "qwen",
    "tp2",
    "gradient of layers.6.attn.k_norm",
)
def _() -> AbstractContextManager[None]:
    return _adds(lambda right, dims: "" if dims == ("head",) else right)


@fault(
    "norms are summed over tp although all ranks did the same work",
    "gqa",
    "tp2",
    "gradient of head.norm",
)
def _() -> AbstractContextManager[None]:
    return _adds(lambda right, dims: "norms" if dims == ("embed",) else right)


@fault(
    "replicated k and v: gradients of other heads are missing",
    "gqa",
    "tp4",
    "gradient of layers.3.attn.wv",
)
def _() -> AbstractContextManager[None]:
    return _adds(lambda right, dims: "" if right == "kv" else right)


@fault(
    "tied weight: the head's gradient is lost",
    "gpt",
    "dp2",
    "gradient of embed.tokens",
)
def _() -> AbstractContextManager[None]:
    right = Unit.contribute

    def wrong(unit: Any, name: str, *product: Any) -> None:
        # Autograd computes the lookup's gradient; only the head multiplies by this
        # weight.
        if name != "embed.tokens.weight":
            right(unit, name, *product)

    return swapped(Unit, "contribute", wrong)


# ---- positions of shards


@fault(
    "the shard offset of k and v is forgotten",
    "gqa",
    "tp2",
    "start of layers.0.attn.wk",
)
def _() -> AbstractContextManager[None]:
    right = tensor.cut_of

    def wrong(
        model: Any, layout: Any, name: str, shape: Any, at: Any
    ) -> tuple[Cut, ...]:
        here = right(model, layout, name, shape, at)
        if ".wk." not in name and ".wv." not in name:
            return here
        first = right(model, layout, name, shape, {})
        return tuple(
            replace(a, start=a.start, stop=a.stop, copies=b.copies)
            for a, b in zip(first, here, strict=True)
        )

    return swapped(tensor, "cut_of", wrong)


@fault(
    "lookup: the vocabulary's offset is forgotten",
    "gqa",
    "tp2",
    "output of embed",
)
def _() -> AbstractContextManager[None]:
    def forward(self: VocabularyEmbedding, tokens: Tensor) -> Tensor:
        rows = torch.nn.functional.embedding(
            tokens % self.weight.shape[0], self.weight
        )
        return self.join(rows / 2)

    return swapped(VocabularyEmbedding, "forward", forward)


@fault(
    "cross-entropy counts the padding of the vocabulary",
    "gqa",
    "tp2",
    "the loss",
)
def _() -> AbstractContextManager[None]:
    class Unpadded(Cut):
        @property
        def full(self) -> int:
            return self.length

    right = tensor.words_of

    def words_of(cut: Cut, group: Group) -> Words:
        return right(replace(cut, stop=cut.start + cut.length), group)

    return swapped(tensor, "words_of", words_of)


@fault(
    "weights are gathered from the wrong ranks",
    "gqa",
    "dp2 zero3",
    "output of embed",
)
def _() -> AbstractContextManager[None]:
    right = Unit.gather

    def gather(self: Unit) -> Any:
        work = right(self)
        work.wait()
        assert self.buffer is not None
        self.buffer.copy_(self.buffer.view(2, -1).flip(0).reshape(-1))
        return work

    return swapped(Unit, "gather", gather)


@fault(
    "gradient shards go to the wrong ranks",
    "gqa",
    "dp2 zero2",
    "gradient of head",
)
def _() -> AbstractContextManager[None]:
    right = Unit.reduce

    def reduce(self: Unit) -> Any:
        assert self.full is not None
        self.full.copy_(self.full.view(2, -1).flip(0).reshape(-1))
        return right(self)

    return swapped(Unit, "reduce", reduce)


# ---- sums of gradients


@fault(
    "gradients are averaged over dp in addition to the global count",
    "gqa",
    "dp2",
    "1/2 of it: not summed over an axis of 2",
)
def _() -> AbstractContextManager[None]:
    return _summed(lambda unit, part: part.div_(unit.groups.replica.size))


def _summed(
    change: Callable[[Unit, Tensor], object],
) -> AbstractContextManager[None]:
    right = Unit.summed

    def summed(self: Unit, full: Tensor, part: Tensor) -> None:
        change(self, part)
        right(self, full, part)

    return swapped(Unit, "summed", summed)


@fault(
    "replicas of a shard are not summed (HSDP)",
    "gqa",
    "dp2x2 zero2",
    "gradient of head",
)
def _() -> AbstractContextManager[None]:
    def reduce_replicas(self: Unit) -> Work:
        part = self.parts.pop(0)
        return ChainedWork(Work(), lambda: self.summed(part, part))

    return swapped(Unit, "reduce_replicas", reduce_replicas)


@fault(
    "only the last microbatch's gradient is kept",
    "gqa",
    "dp2 zero2 accum:3",
    "gradient of head",
)
def _() -> AbstractContextManager[None]:
    def summed(self: Unit, full: Tensor, part: Tensor) -> None:
        if part is not full:
            self.pool.give(full)
        if self.gradient is not None:
            self.pool.give(self.gradient)
        self.gradient = part

    return swapped(Unit, "summed", summed)


@fault("the gradient buffer is not zeroed", "gqa", "dp2", "gradient of head")
def _() -> AbstractContextManager[None]:
    right = BufferPool.take

    class Stale(Tensor):
        def zero_(self) -> Tensor:
            return self.fill_(1e-3).as_subclass(Tensor)

    def take(self: BufferPool, numel: int, dtype: torch.dtype) -> Tensor:
        return right(self, numel, dtype).as_subclass(Stale)

    return swapped(BufferPool, "take", take)


@fault(
    "a stale gathered buffer is used after the first step",
    "gqa",
    "dp2 zero1",
    "step 1: the output of embed",
)
def _() -> AbstractContextManager[None]:
    right, gathered = Unit.gather, set[int]()

    def gather(self: Unit) -> Any:
        if id(self) in gathered:
            return Work()
        gathered.add(id(self))
        return right(self)

    right_fill = local._fill

    def fill(*args: Any) -> None:
        right_fill(*args)
        of_rank = [unit for each in args[0].values() for unit in each]
        gathered.difference_update(map(id, of_rank))

    @contextmanager
    def both() -> Iterator[None]:
        with swapped(Unit, "gather", gather), swapped(local, "_fill", fill):
            yield

    return both()


# ---- loss, norm and update


@fault("each rank divides by its own token count", "gqa", "dp2", "the loss")
def _() -> AbstractContextManager[None]:
    def count(self: Executor, op: Any) -> None:
        self.count = (
            torch.stack([*map(count_valid, self.batches)])
            .sum()
            .double()
            .view(1)
        )

    return swapped(Executor, "_count", count)


@fault("ignored targets count as tokens", "gqa", "dp2", "the loss")
def _() -> AbstractContextManager[None]:
    def count(batch: Mapping[str, Tensor]) -> Tensor:
        return torch.tensor(next(iter(batch.values())).numel())

    return counted_by(count)


@fault(
    "the norm counts copied weights on every tp rank", "gqa", "tp2", "the norm"
)
def _() -> AbstractContextManager[None]:
    right = tensor.Weight.__init__

    def init(self: Weight, *args: Any, **named: Any) -> None:
        right(self, *args, **named)
        object.__setattr__(self, "counted", True)

    return swapped(tensor.Weight, "__init__", init)


@fault("each rank clips by its own norm", "gqa", "tp2", "the norm")
def _() -> AbstractContextManager[None]:
    right = Executor._agree

    def agree(self: Executor, op: Any) -> Work:
        everyone = self.local.groups.everyone

        class Alone:
            def all_reduce(self, x: Tensor, *, wait: bool) -> Work:
                return Work()

        object.__setattr__(self.local.groups, "everyone", Alone())
        work = right(self, op)
        object.__setattr__(self.local.groups, "everyone", everyone)
        return work

    return swapped(Executor, "_agree", agree)


@fault(
    "weight decay applies to norms and biases",
    "gqa",
    "dp2 zero1",
    "weight of head.norm",
)
def _() -> AbstractContextManager[None]:
    right = Unit.own_segments

    def segments(self: Unit) -> list[Segment]:
        return [s._replace(decay=True) for s in right(self)]

    return swapped(Unit, "own_segments", segments)


@fault(
    "the update ignores the clipping factor", "gqa", "dp2", "weight of head"
)
def _() -> AbstractContextManager[None]:
    right = Update.__call__
    return swapped(
        Update, "__call__", lambda self, lr, scale: right(self, lr, None)
    )


@fault(
    "a shard of a weight is drawn instead of taken from the whole",
    "gqa",
    "tp2",
    "start of embed",
)
def _() -> AbstractContextManager[None]:
    right = Weight.rows.func
    return swapped(
        Weight,
        "rows",
        property(lambda self: torch.arange(1, 1 + len(right(self)))),
    )
