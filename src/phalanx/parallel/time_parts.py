"""Pieces on equal parts of a sequence: context parallelism of `exact`.

With `exact:1x4` a sequence has four parts of time. Every module with weights runs once
for each, whether one rank computes all parts or each of four ranks one. The gradients of
a weight from different parts are kept apart until they are added in one tree
(`exact.py`). Attention computes queries, keys and values of each part, and its core
joins them (`context.py`).

With parts of products too (`parts.py`), these are inside: each part of time is computed
in parts of features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..models import Merge
from ..models.attention import HeadsAttention
from ..models.ends import Embed, LossHead
from ..models.experts import Experts, Sending, inverse, ordered
from ..models.routed import ReceivingPart
from .data import Unit
from .exact import ExactUnit
from .experts_parts import join_terms
from .parts import InParts, Run, Swap, join_time, parts_of, swapped

# The unit of each parameter of a piece, and its name there.
Owners = Mapping[nn.Parameter, tuple[Unit, str]]


class WeightsOfTime:
    """A module's weights as its forward on one part of time uses them."""

    def __init__(self, module: nn.Module, owners: Owners) -> None:
        self.module, self.owners = module, owners

    def of_part(self, number: int) -> AbstractContextManager[None]:
        """A context in which gradients of weights go to the number's part of a leaf."""
        return swapped([*self._swaps(number)])

    def _swaps(self, number: int) -> Iterator[Swap]:
        for child in self.module.modules():
            own: Any = child.__dict__
            table: Any = child._parameters
            for key, weight in child._parameters.items():
                if weight is None:
                    continue
                unit, name = self.owners[weight]
                if not isinstance(unit, ExactUnit):
                    continue  # frozen
                alias = unit.of_slot(name, weight, number)
                # Parts that share a linear's weight take it from the table.
                yield table, key, alias
                product = own.get("weight_product")
                if key == "weight" and product is not None:
                    yield own, "weight_product", partial(product, slot=number)


class InTime:
    """The forward of a module that runs on each part of time."""

    def __init__(self, plain: Run, weights: WeightsOfTime, count: int) -> None:
        self.plain, self.weights, self.count = plain, weights, count

    def __call__(self, *args: Any, **named: Any) -> Tensor:
        by_part = [parts_of(x, self.count) for x in args]
        named_parts = {n: parts_of(x, self.count) for n, x in named.items()}
        found: list[Tensor] = []
        for number in range(self.count):
            own = [parts[number] for parts in by_part]
            more = {name: parts[number] for name, parts in named_parts.items()}
            with self.weights.of_part(number):
                found.append(self.plain(*own, **more))
        # A head has one loss for each part.
        return join_time(found) if found[0].dim() else torch.stack(found)


class AttentionInTime:
    """The forward of attention whose products run on each part of time.

    `in_parts` is set if products are also in parts of features.
    """

    def __init__(
        self,
        attention: HeadsAttention,
        in_parts: InParts | None,
        weights: WeightsOfTime,
        count: int,
    ) -> None:
        self.attention, self.in_parts = attention, in_parts
        self.weights, self.count = weights, count

    def __call__(
        self,
        x: Tensor,
        positions: Tensor,
        documents: Tensor | None = None,
        noise: Tensor | None = None,
        angles: Tensor | None = None,
        document_ids: Tensor | None = None,  # of other mixers
    ) -> Tensor:
        times = parts_of(positions, self.count)
        # by part of time and of features: q, k and v
        by_time: list[list[Any]] = []
        for number, part in enumerate(parts_of(x, self.count)):
            # Angles are computed for each part: a kernel may round the last elements
            # of a tensor differently.
            run = partial(self.attention.projected, positions=times[number])
            with self.weights.of_part(number):
                by_time.append(self._projected(run, part))
        outputs = [
            self._core(by_part, positions, documents)
            for by_part in zip(*by_time, strict=True)
        ]
        noises = parts_of(noise, self.count)
        found: list[Tensor] = []
        for number, own in enumerate(zip(*outputs, strict=True)):
            merged = partial(self.attention.merged, noise=noises[number])
            with self.weights.of_part(number):
                found.append(self._merged(merged, own))
        return join_time(found)

    def _projected(self, run: Callable[..., Any], x: Tensor) -> list[Any]:
        if self.in_parts is None:
            return [run(x)]
        return self.in_parts.each(run, self.in_parts.inputs(x))

    def _core(
        self,
        by_time: Sequence[tuple[Tensor, ...]],
        positions: Tensor,
        documents: Tensor | None,
    ) -> Sequence[Tensor]:
        """The core's output (B, T, heads, size) on all parts, cut again."""
        q, k, v = (join_time(each) for each in zip(*by_time, strict=True))
        y = self.attention.core(q, k, v, positions, documents)
        return parts_of(y, self.count)

    def _merged(self, run: Run, outputs: Sequence[Tensor]) -> Tensor:
        if self.in_parts is None:
            (only,) = outputs
            y: Tensor = run(only)
            return y
        return self.in_parts.joined(self.in_parts.each(run, outputs))


class ExpertsInTime:
    """`Experts.with_terms` on each part of time: experts get the tokens of one part."""

    def __init__(
        self, experts: Experts, weights: WeightsOfTime, count: int
    ) -> None:
        self.plain = experts.with_terms
        self.weights, self.count = weights, count

    def __call__(
        self, x: Tensor, valid: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        valids = parts_of(valid, self.count)
        found: list[Tensor] = []
        terms: list[dict[str, Tensor]] = []
        for number, part in enumerate(parts_of(x, self.count)):
            with self.weights.of_part(number):
                y, own = self.plain(part, valids[number])
            found.append(y)
            terms.append(own)
        return join_time(found), join_terms(terms)


class SendingInTime:
    """The forward of `Sending` on each part of time.

    Tokens are sorted by the rank that they go to, then by part of time, then by expert.
    So each rank receives a run of every sender and part.
    """

    def __init__(
        self, sending: Sending, weights: WeightsOfTime, count: int, ranks: int
    ) -> None:
        self.plain, self.experts = sending.forward, sending.spread.experts
        self.weights, self.count, self.ranks = weights, count, ranks

    def __call__(
        self, x: Tensor, valid: Tensor | None = None
    ) -> dict[str, Tensor]:
        valids = parts_of(valid, self.count)
        found: list[dict[str, Tensor]] = []
        for number, part in enumerate(parts_of(x, self.count)):
            with self.weights.of_part(number):
                found.append(self.plain(part, valids[number]))
        several = {name: [each.pop(name) for each in found] for name in _SENT}
        if "shared" in found[0]:
            several["shared"] = [each.pop("shared") for each in found]
        counts = torch.stack(several["counts"])  # (parts of time, experts)
        joined = {
            name: join_time(several[name])
            for name in ("gates", "shared")
            if name in several
        }
        # (n): each part's rows, behind those of the parts before it
        tokens, each = torch.cat(several["sent"]), several["sent"][0].shape[0]
        sources = [
            order + number * each
            for number, order in enumerate(several["order"])
        ]
        by_rank = self._by_rank(counts, len(tokens))
        return {
            "sent": ordered(tokens, by_rank),
            "counts": counts,
            "order": torch.cat(sources)[by_rank],
            **joined,
            **join_terms(found),
        }

    def _by_rank(self, counts: Tensor, rows: int) -> Tensor:
        """The order (n) of rows by the rank that has their expert, stable in a rank."""
        own = -(-self.experts // self.ranks)
        owner = torch.arange(self.experts, device=counts.device) // own
        owners = owner.repeat(len(counts)).repeat_interleave(
            counts.flatten(), output_size=rows
        )
        return owners.argsort(stable=True)


_SENT = ("sent", "counts", "gates", "order")  # of every `Sending`


class MergeInTime:
    """The forward of `Merge`, run on each part of time of the returned results."""

    def __init__(self, merge: Merge, count: int) -> None:
        self.merge, self.count = merge, count

    def __call__(self, y: Tensor, gates: Tensor, order: Tensor) -> Tensor:
        # y: (n, hidden); back in the order of parts of time
        by_part = ordered(y, inverse(order)).chunk(self.count)
        both = zip(by_part, parts_of(gates, self.count), strict=True)
        return join_time([self.merge.weighted(*each) for each in both])


def run_in_time(
    module: nn.Module, owners: Owners, count: int, ep_ranks: int
) -> None:
    """Make a piece run on each of this rank's `count` parts of time.

    `ep_ranks` share the experts.
    """
    if isinstance(module, ReceivingPart):
        return  # it gets a run of tokens for each part
    weights = WeightsOfTime(module, owners)
    whole: Any = module
    if isinstance(module, Embed | LossHead):
        whole.forward = InTime(module.forward, weights, count)
        return
    for child in module.children():
        own: Any = child
        within = WeightsOfTime(child, owners)
        if isinstance(child, HeadsAttention):
            parts = own.forward if isinstance(own.forward, InParts) else None
            own.forward = AttentionInTime(child, parts, within, count)
        elif isinstance(child, Experts):
            own.with_terms = ExpertsInTime(child, within, count)
        elif isinstance(child, Sending):
            own.forward = SendingInTime(child, within, count, ep_ranks)
        elif isinstance(child, Merge):
            own.forward = MergeInTime(child, count)
        elif any(True for _ in child.parameters()):
            plain: Callable[..., Tensor] = own.forward
            own.forward = InTime(plain, within, count)
