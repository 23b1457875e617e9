"""Matmuls split into a fixed number of equal parts: tensor parallelism of `exact`.

Matmuls of different shapes round differently, and so do sums in another order. So with
`exact:4` attention and an MLP run four times, each time with a quarter of their heads or
features, whether one rank computes all four parts or each of four ranks one. The
results, and the gradients of what the parts share, are added in the tree of
`program/tree.py`: first the parts of a rank, then those of the ranks (`Group.in_tree`).

Modules between the regions, such as norms, see all features of a token. The gradients of
their weights are sums over tokens, so these run on equal parts of time: the tokens of a
rank may be all (without `seq`) or some of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..comm import Group
from ..program.tree import merges
from .products import Place

Run = Callable[..., Tensor]


def add_in_tree(terms: Sequence[Tensor]) -> Tensor:
    """The sum of the parts, in the order of `program/tree.py`."""
    sums = [*terms]
    for into, term in merges(len(sums)):
        sums[into] = sums[into] + sums[term]
    return sums[0]


class _Spread(torch.autograd.Function):
    """Activations for several parts, whose gradients are added in the tree."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return add_in_tree(gradients), None


def spread(x: Tensor, count: int) -> tuple[Tensor, ...]:
    """`count` times x, whose gradients are added in the tree."""
    copies: tuple[Tensor, ...] = _Spread.apply(x, count)  # type: ignore[no-untyped-call]
    return copies


class _SpreadWeight(torch.autograd.Function):
    """A weight for several parts, of which other ranks of a group compute some.

    Its gradient is complete on every rank. Sums are in float32 or wider, and rounded
    once.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, count: int, group: Group | None
    ) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(x.view_as(x) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        narrow = gradients[0].dtype
        wide = torch.promote_types(narrow, torch.float32)
        parts = [gradient.to(wide) for gradient in gradients]
        total = add_in_tree(parts).contiguous()
        if ctx.group is not None and ctx.group.size > 1:
            # A sum in place must not change a gradient that autograd holds.
            total = total.clone() if total is gradients[0] else total
            ctx.group.all_reduce(total)
        return total.to(narrow), None, None


class _TimeParts(torch.autograd.Function):
    """Equal parts (B, T / count, ...) of x (B, T, ...), each contiguous."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> tuple[Tensor, ...]:
        return _cut_time(x, count)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return torch.cat(gradients, 1), None


class _JoinTime(torch.autograd.Function):
    """Parts of time, joined again; their gradients are contiguous too.

    A sum over a part of a larger tensor may add in another order than a sum over a
    tensor of its own.
    """

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.count = len(parts)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return _cut_time(gradient, ctx.count)


def _cut_time(x: Tensor, count: int) -> tuple[Tensor, ...]:
    parts = x.chunk(count, 1)
    return tuple(
        part.clone(memory_format=torch.contiguous_format) for part in parts
    )


@dataclass(frozen=True)
class Parts:
    """The parts of split products that a rank computes: `count`, from `first` on."""

    first: int
    count: int


@dataclass(frozen=True)
class Shared:
    """A weight or a buffer of a module, and its places in the parts.

    Neighbouring parts with the same place share it. With a `group`, its other ranks
    compute parts that share it too.
    """

    module: nn.Module
    key: str
    places: tuple[Place, ...]
    group: Group | None = None

    @property
    def apart(self) -> bool:
        """True if each part has a place of its own."""
        counts = map(self.places.count, self.places)
        return self.group is None and max(counts) == 1

    def values(self) -> list[Tensor]:
        """The tensor of each part."""
        whole: Tensor = getattr(self.module, self.key)
        found: list[Tensor] = []
        while len(found) < len(self.places):
            place = self.places[len(found)]
            sharing = self.places.count(place)
            part = whole[place]
            if sharing == 1 and self.group is None:
                found.append(part)
            else:
                found += _SpreadWeight.apply(part, sharing, self.group)  # type: ignore[no-untyped-call]
        return found


def parts_of_time(x: Tensor, count: int) -> tuple[Tensor, ...]:
    """Equal parts (B, T / count, ...) of x (B, T, ...), each contiguous."""
    parts: tuple[Tensor, ...] = _TimeParts.apply(x, count)  # type: ignore[no-untyped-call]
    return parts


def parts_of(x: Any, count: int) -> Sequence[Any]:
    """Equal parts of time of a tensor (B, T, ...); other values repeat in each part."""
    if not isinstance(x, Tensor) or x.dim() < 2:
        return [x] * count
    return parts_of_time(x, count)


def join_time(parts: Sequence[Tensor]) -> Tensor:
    """Parts of time, joined again."""
    x: Tensor = _JoinTime.apply(*parts)  # type: ignore[no-untyped-call]
    return x


# A module's table of parameters, buffers or attributes; a key of it; a value.
Swap = tuple[dict[str, Any], str, Any]


@contextmanager
def swapped(swaps: Sequence[Swap]) -> Iterator[None]:
    """A context in which entries of tables have other values."""
    before = [table.get(key) for table, key, _ in swaps]
    for table, key, value in swaps:
        table[key] = value
    try:
        yield
    finally:
        for (table, key, _), value in zip(swaps, before, strict=True):
            table[key] = value


class InParts:
    """The forward of a module whose products run in parts, such as attention.

    `fork` and `join` are the regions at its input and its output. `bias` adds the bias
    of the last product to the whole sum.
    """

    def __init__(
        self,
        plain: Run,
        parts: Parts,
        shared: Sequence[Shared],
        fork: Run,
        join: Run,
    ) -> None:
        self.plain, self.parts, self.shared = plain, parts, shared
        self.fork, self.join = fork, join
        self.biases: list[tuple[nn.Module, OverTime]] = []

    def __call__(self, x: Tensor, *args: Any, **named: Any) -> Tensor:
        run = partial(self._plain, args, named)
        return self.joined(self.each(run, self.inputs(x)))

    def _plain(self, args: Any, named: Any, x: Tensor) -> Tensor:
        y: Tensor = self.plain(x, *args, **named)
        return y

    def inputs(self, x: Tensor) -> Sequence[Tensor]:
        """The input of each part."""
        return spread(self.fork(x), self.parts.count)

    def each(
        self, run: Callable[..., Any], inputs: Sequence[Tensor]
    ) -> list[Any]:
        """The results of `run` on the input of each part, with the part's weights."""
        by_part = [self._swaps(shared) for shared in self.shared]
        hidden: list[Swap] = [
            (module._parameters, "bias", None) for module, _ in self.biases
        ]
        found: list[Any] = []
        for number, each in enumerate(inputs):
            swaps = [swap[number] for swap in by_part]
            with swapped([*swaps, *hidden]):
                found.append(run(each))
        return found

    def joined(self, found: Sequence[Tensor]) -> Tensor:
        """The sum of the parts' outputs over all ranks, with the last bias."""
        y: Tensor = self.join(add_in_tree(found))
        for _, add in self.biases:
            y = add(y)
        return y

    def _swaps(self, shared: Shared) -> list[Swap]:
        """The entry of a module's tables that each part sees."""
        module, key = shared.module, shared.key
        own: Any = module.__dict__
        product = own.get("weight_product") if key == "weight" else None
        if product is not None and shared.apart:
            # The product adds the gradient to its place by itself.
            return [
                (own, "weight_product", partial(product, place=place))
                for place in shared.places
            ]
        values = shared.values()
        if product is not None:
            products = [partial(_linear, weight=value) for value in values]
            return [(own, "weight_product", each) for each in products]
        parameters: Any = module._parameters
        buffers: Any = module._buffers
        table = parameters if key in parameters else buffers
        return [(table, key, value) for value in values]


def _linear(
    x: Tensor, bias: Tensor | None = None, *, weight: Tensor
) -> Tensor:
    return F.linear(x, weight, bias)


class OverTime:
    """The forward of a module between the regions, on equal chunks of the sequence.

    With a `group`, its other ranks hold the other chunks. `keys` names the module's
    parameters.
    """

    def __init__(
        self,
        plain: Run,
        module: nn.Module,
        keys: Sequence[str],
        count: int,
        group: Group | None,
    ) -> None:
        self.plain, self.count = plain, count
        places = ((slice(None),),) * count
        self.shared = [Shared(module, key, places, group) for key in keys]

    def __call__(self, x: Tensor, *args: Any) -> Tensor:
        inputs = parts_of_time(x, self.count)
        return join_time(self.each([(part, *args) for part in inputs]))

    def each(self, inputs: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The results of the module on the arguments of each chunk."""
        by_part = [shared.values() for shared in self.shared]
        tables: list[Any] = [each.module._parameters for each in self.shared]
        found: list[Any] = []
        for number, args in enumerate(inputs):
            swaps = [
                (table, shared.key, values[number])
                for table, shared, values in zip(
                    tables, self.shared, by_part, strict=True
                )
            ]
            with swapped(swaps):
                found.append(self.plain(*args))
        return found
