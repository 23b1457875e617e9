"""Seeded faults in layouts of `exact`: those that `verify --exact` finds in bfloat16.

A fault is in the engine, so it also changes the one process with which bits are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from phalanx.layout import Layout, LayoutError, Mesh
from phalanx.layout.choices import BF16
from phalanx.layout.exact import exact_batch, folded
from phalanx.layout.legal import legal
from phalanx.layout.shape import Shape
from phalanx.models import Router
from phalanx.parallel import batch, context, exact, parts, tensor
from phalanx.parallel.context import TimePartsCore
from phalanx.parallel.exact import ExactUnit
from phalanx.parallel.parts import Shared
from phalanx.program import Op, ops
from phalanx.training.executor import Executor
from phalanx.verification import SHAPES
from phalanx.verification.exact import verify_exact

from .fault import Fault, Patch, swapped
from .late import used_at_once
from .narrow import TWENTIETH


def _parts_to_wrong_ranks() -> AbstractContextManager[None]:
    right = ExactUnit._by_rank

    def by_rank(self: ExactUnit, full: Any) -> Any:
        sent = right(self, full)
        sent.copy_(sent.view(2, -1).flip(0).reshape(-1))
        return sent

    return swapped(ExactUnit, "_by_rank", by_rank)


def _half_of_the_ranks() -> AbstractContextManager[None]:
    right = exact.merges

    def merges(count: int) -> Iterator[tuple[int, int]]:
        return right(count // 2)

    return swapped(exact, "merges", merges)


def _last_leaf_alone() -> AbstractContextManager[None]:
    right = ExactUnit.add

    def add(self: ExactUnit, user: int, microbatch: int, count: int) -> None:
        for total in self.sums.get(user, {}).values():
            total.zero_()
        right(self, user, microbatch, count)

    return swapped(ExactUnit, "add", add)


def _exchange_not_awaited() -> AbstractContextManager[None]:
    right = Executor._wait

    def wait(self: Executor, op: Op) -> None:
        if op.kind == ops.EXCHANGE_PARTS:
            _, start = self.under_way.pop(op)
            self.moments.append((op, start, self._end(op)))
            return
        right(self, op)

    return swapped(Executor, "_wait", wait)


def _twentieth() -> AbstractContextManager[None]:
    right = ExactUnit.add

    def add(self: ExactUnit, user: int, microbatch: int, count: int) -> None:
        for leaf in self.leaf(user, microbatch):
            if "layers.2.attn.wq.weight" in leaf:
                leaf["layers.2.attn.wq.weight"].mul_(1.05)
        right(self, user, microbatch, count)

    return swapped(ExactUnit, "add", add)


def _bias_in_each_part() -> AbstractContextManager[None]:
    right = parts.swapped

    def without_hidden(swaps: Any) -> Any:
        return right([swap for swap in swaps if swap[2] is not None])

    return swapped(parts, "swapped", without_hidden)


def _own_parts_alone() -> AbstractContextManager[None]:
    right = Shared.values

    def values(self: Shared) -> Any:
        return right(replace(self, group=None))

    return swapped(Shared, "values", values)


def _routers_own_counts() -> AbstractContextManager[None]:
    right = Shared.values

    def values(self: Shared) -> Any:
        counts = isinstance(self.module, Router) and self.key == "bias"
        return right(replace(self, group=None) if counts else self)

    return swapped(Shared, "values", values)


def _tokens_of_one_part() -> AbstractContextManager[None]:
    """Let an expert's tokens have the gradient of a rank's parts alone."""
    return swapped(tensor, "_copied", lambda group, x: x)


def _attending(
    change: Callable[[int, Any, Any], tuple[int, Any, Any]],
) -> AbstractContextManager[None]:
    """Replace the part of time, the keys or the documents of attention."""
    right = TimePartsCore._attend

    def attend(
        self: TimePartsCore, run: int, q: Any, kv: Any, documents: Any
    ) -> Any:
        run, kv, documents = change(run, kv, documents)
        return right(self, run, q, kv, documents)

    return swapped(TimePartsCore, "_attend", attend)


def _first_keys_skipped(run: int, kv: Any, documents: Any) -> Any:
    first = kv.shape[2] // 4
    kept = kv.clone()
    kept[:, :, :first] = 0.0
    return run, kept, documents


def _later_keys_seen(run: int, kv: Any, documents: Any) -> Any:
    return min(run + 1, 3), kv, documents


def _without_documents(run: int, kv: Any, documents: Any) -> Any:
    return run, kv, None


def _keys_without_others_gradients() -> AbstractContextManager[None]:
    return swapped(context.regions, "gather_sum", context.regions.gather)


def _targets_in_order() -> AbstractContextManager[None]:
    right = batch._held

    def held(whole: Any, layout: Layout, cp: int) -> Any:
        found = right(whole, layout, cp)
        alone = replace(layout, mesh=Mesh(), exact=1)
        every = right(whole, alone, 0)["targets"]
        in_order = every.chunk(layout.time_parts, 1)
        order = folded(layout.time_parts)
        targets = [in_order[order.index(n)] for n in range(len(order))]
        own = torch.cat(targets, 1).chunk(layout.cp, 1)[cp]
        return found | {"targets": own}

    return swapped(batch, "_held", held)


def _leaves_changed(
    change: Callable[[ExactUnit, Any, Any], None],
) -> AbstractContextManager[None]:
    """Change each weight's gradient before it is added."""
    right = ExactUnit.add

    def add(self: ExactUnit, user: int, microbatch: int, count: int) -> None:
        weights = {weight.name: weight for weight in self.order}
        for leaf in self.leaf(user, microbatch):
            for name, gradient in leaf.items():
                change(self, weights[name], gradient)
        right(self, user, microbatch, count)

    return swapped(ExactUnit, "add", add)


def _count_not_added(unit: ExactUnit, weight: Any, gradient: Any) -> None:
    if weight.rate and unit.copies.rank:
        gradient.zero_()


def _half_of_experts(unit: ExactUnit, weight: Any, gradient: Any) -> None:
    if unit.senders > 1:
        gradient /= 2


# Faults in sums that exact replaces: the same mistake in its own operations.
INSTEAD: dict[str, Patch] = {
    "gradient shards go to the wrong ranks": _parts_to_wrong_ranks,
    "replicas of a shard are not summed (HSDP)": _half_of_the_ranks,
    "only the last microbatch's gradient is kept": _last_leaf_alone,
    "a reduction's result is read before it has arrived": (
        lambda: used_at_once("all_to_all")
    ),
    "a reduction over all ranks is not waited for": _exchange_not_awaited,
    TWENTIETH: _twentieth,
    "row bias is added on every rank": _bias_in_each_part,
    "seq: norm gradients are not summed over tp": _own_parts_alone,
    "q and k norms: gradients of other heads are missing": _own_parts_alone,
    "replicated k and v: gradients of other heads are missing": _own_parts_alone,
    "tp: gradients of latents cover only a rank's heads": _own_parts_alone,
    "seq: token counts are not summed over tp": _routers_own_counts,
    "tp: a gate's gradient covers only a part of each expert": (
        _tokens_of_one_part
    ),
    "a step of the ring is skipped": lambda: _attending(_first_keys_skipped),
    "the causal block of the ring is not masked": (
        lambda: _attending(_later_keys_seen)
    ),
    "document masks are ignored on visiting blocks": (
        lambda: _attending(_without_documents)
    ),
    "gradients of visiting blocks are not returned": (
        _keys_without_others_gradients
    ),
    "targets are sharded in order, but tokens by head and tail": (
        _targets_in_order
    ),
    "experts: a rank does not add its counts": (
        lambda: _leaves_changed(_count_not_added)
    ),
    "ep: gradients of experts are divided by ep": (
        lambda: _leaves_changed(_half_of_experts)
    ),
}
# Faults in code that no layout of exact runs.
NOT_RUN = {
    "cross-entropy counts the padding of the vocabulary": (
        "exact pads no vocabulary"
    ),
    "partial softmaxes are averaged, not weighted": (
        "a ring of exact merges no partial softmaxes"
    ),
    "a ring merges partial results in 16 bits": (
        "a ring of exact merges no partial results"
    ),
    "a ring sums the gradients of keys and values in 16 bits": (
        "exact adds these gradients in the dtype of the keys"
    ),
    "mtp: the shared output projection learns from the next token alone": (
        "exact with tp makes no logits in chunks"
    ),
}


@dataclass(frozen=True)
class ExactCatch:
    """A fault, its layout of `exact`, and what `verify --exact` says of it.

    `refused` is the reason if the layout cannot be exact.
    """

    fault: str
    layout: str
    refused: str
    first_difference: str

    @property
    def result(self) -> str:
        """The first difference without its values."""
        first = self.first_difference.partition(" is ")[0]
        return first.partition(", which")[0] or "NOT FOUND"


def exact_shape(fault: Fault) -> Shape:
    """The model of a fault, with a vocabulary that ranks of tp can share."""
    shape = SHAPES[fault.shape]
    return replace(shape, vocab=40) if fault.layout.tp > 1 else shape


def exact_layout(fault: Fault) -> Layout:
    """The layout of a fault with the word `exact`; raises if it cannot be exact.

    Each rank of tp has one part, and each of cp an early and a late one. Three
    microbatches of a rank that shares the batch with others are no subtree; it gets
    four.
    """
    if set(fault.dtypes) == {"float16"}:
        raise LayoutError("exact does not cover float16")
    if fault.name in NOT_RUN:
        raise LayoutError(NOT_RUN[fault.name])
    if fault.z_loss:
        raise LayoutError("verify --exact takes no z-loss")
    layout = fault.layout
    count = layout.microbatches
    if layout.data > 1 and count == 3:
        count = 4
    exact = replace(
        layout,
        precision=BF16,
        microbatches=count,
        reduce="",
        exact=layout.tp,
        time_parts=2 * layout.cp if layout.cp > 1 else 1,
    )
    if reasons := legal(exact, exact_shape(fault), batch=exact_batch(exact)):
        raise LayoutError(reasons[0])
    return exact


def catch_exactly(fault: Fault) -> ExactCatch:
    """Compare the bits of a fault's layout with the fault in place."""
    try:
        layout = exact_layout(fault)
    except LayoutError as error:
        return ExactCatch(fault.name, str(fault.layout), str(error), "")
    patch = INSTEAD.get(fault.name, fault.patch)
    with patch():
        (verdict,) = verify_exact(
            exact_shape(fault),
            [layout],
            precisions=[BF16],
            packed=fault.packed,
            dropout=fault.dropout,
            optimizer=fault.optimizer,
        )
    return ExactCatch(fault.name, verdict.layout, "", verdict.first_difference)


def table(caught: Sequence[ExactCatch]) -> str:
    """A row for each fault whose layout can be exact, and the number of the others."""
    rows = [
        f"| {c.fault} | {c.layout} | {c.result} |"
        for c in caught
        if not c.refused
    ]
    found = sum(bool(c.first_difference) for c in caught)
    refused = len(caught) - len(rows)
    return "\n".join(
        (
            "| fault | layout | verify --exact says |",
            "|---|---|---|",
            *rows,
            "",
            f"verify --exact finds {found} of {len(rows)} in bfloat16. {refused} other faults are"
            " in layouts that cannot be exact.",
        )
    )
