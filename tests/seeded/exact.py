"""Seeded faults in layouts of `exact`: those that `verify --exact` finds in bfloat16.

A fault is in the engine, so it also changes the one process with which bits are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from phalanx.layout import Layout, LayoutError
from phalanx.layout.choices import BF16
from phalanx.layout.exact import NOT_MATRICES, exact_batch
from phalanx.layout.legal import legal
from phalanx.parallel import exact
from phalanx.parallel.exact import ExactUnit
from phalanx.program import Op, ops
from phalanx.train.executor import Executor
from phalanx.verify import SHAPES
from phalanx.verify.exact import verify_exact
from phalanx.verify.optimizers import OPTIMIZERS

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
        (leaf,) = self.leaf(user, microbatch)
        if "layers.2.attn.wq.weight" in leaf:
            leaf["layers.2.attn.wq.weight"].mul_(1.05)
        right(self, user, microbatch, count)

    return swapped(ExactUnit, "add", add)


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


def exact_layout(fault: Fault) -> Layout:
    """The layout of a fault with the word `exact`; raises if it cannot be exact.

    Three microbatches of a rank that shares the batch with others are no subtree; it
    gets four.
    """
    if OPTIMIZERS[fault.optimizer].whole_matrices:
        raise LayoutError(NOT_MATRICES)
    if set(fault.dtypes) == {"float16"}:
        raise LayoutError("exact does not cover float16")
    if fault.z_loss:
        raise LayoutError("verify --exact takes no z-loss")
    layout = fault.layout
    count = layout.microbatches
    if layout.data > 1 and count == 3:
        count = 4
    exact = replace(
        layout, precision=BF16, microbatches=count, reduce="", exact=True
    )
    if reasons := legal(exact, SHAPES[fault.shape], batch=exact_batch(exact)):
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
            SHAPES[fault.shape],
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
