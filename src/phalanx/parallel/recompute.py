"""Selective recomputation: keeps some outputs of a forward for its second run.

It keeps the outputs of matmuls, attention and groups, with two exceptions. Tokens that
tp gathered for a matmul are n times as many as the rank's own, so it keeps its own and
all ranks gather again. Matmuls inside of `models.expansion.expand` are computed again.

If nothing will read an output's values, only its shape is kept: the second run gets a
stand-in without memory, and the matmul's backward needs only its factors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from ..comm import regions
from ..layout import LayoutError
from ..models.expansion import is_expanding
from . import context as _registers_the_ring  # noqa: F401
from .pool import storage_of

_aten = torch.ops.aten
_region = torch.ops.phalanx.region.default
_PRODUCTS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
}
_PRODUCTS.add(_aten._scaled_mm_v2.default)
# Their backward also reads their output.
_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.phalanx.attention.default,
    torch.ops.phalanx.ring.default,
}
_COSTLY = _PRODUCTS | _ATTENTION | {_region}
# Operations that read no values in backward. A block ends in sums, views and dropout: a
# scaling, and a selection that saves its mask.
_ASK_NOTHING = {
    _aten.add.Tensor, _aten._unsafe_view.default, _aten.where.self, _aten.scalar_tensor.default,
}  # fmt: skip


def is_kept(func: Any, args: Sequence[Any]) -> bool:
    """True if an operation's output is kept, rather than computed or gathered again."""
    if func in _PRODUCTS and is_expanding():
        return False
    return func in _COSTLY and not (
        func is _region and args[1] == "gather_sum"
    )


class _Output(NamedTuple):
    """The output of one costly operation."""

    op: Any
    value: Any

    def forgotten(self) -> _Output:
        """The output reduced to its shape."""
        x = self.value
        if not isinstance(x, Tensor):
            return self
        return _Output(self.op, partial(_stand_in, x.shape, x.dtype, x.device))


Selected = deque[_Output]  # in the order in which the forward produced them


class _Keeping(TorchDispatchMode):
    """Records the outputs of costly operations while a forward runs."""

    def __init__(self, kept: Selected) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = kept
        self.used = 0  # outputs from this index on were read by no operation

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        # A write into a kept output would change what the second run gets.
        if func._schema.is_mutable:
            self._refuse(out)
        if func is _region and is_kept(func, args):
            self._join(args[0], args[1])
        elif _asks(func, args, out):
            self.used = len(self.kept)
        if is_kept(func, args):
            # Without its graph, which holds the tensors that are kept.
            self.kept.append(
                _Output(func, tree_map_only(Tensor, Tensor.detach, out))
            )
        # Its backward reads its own output too.
        if func in _ATTENTION:
            self.used = len(self.kept)
        return out

    def _join(self, x: Tensor, kind: str) -> None:
        """Keep only a partial sum's shape if just a region reads it."""
        # The partial sum of a row-parallel matmul, which only the region's sum reads.
        last = (
            self.kept[-1]
            if kind in ("reduce", "scatter_sum") and self.kept
            else None
        )
        if (
            last
            and last.op in _PRODUCTS
            and storage_of(last.value) == storage_of(x)
        ):
            self.kept[-1] = last.forgotten()

    def _refuse(self, written: Any) -> None:
        """Refuse an in-place write to a kept value."""
        storages = set(_storages(written))
        for op, value in self.kept:
            if not storages.isdisjoint(_storages(value)):
                raise LayoutError(
                    f"recompute:selective keeps the output of {op}, and the model writes into it in place.\n"
                    "  Write into a copy there, or use recompute:all."
                )

    def __exit__(self, *error: Any) -> None:
        # Nothing has read these outputs, so their shapes are enough.
        for number in range(self.used, len(self.kept)):
            self.kept[number] = self.kept[number].forgotten()
        super().__exit__(*error)  # type: ignore[no-untyped-call]


class _Giving(TorchDispatchMode):
    """Returns kept outputs in their order while the forward runs again, and frees them."""

    def __init__(self, kept: Selected) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = kept

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not is_kept(func, args):
            return func(*args, **(kwargs or {}))
        # First in, first out: the second run makes the same calls in the same order.
        op, value = self.kept.popleft()
        assert op is func, (
            f"a forward ran {op}, but its recomputation ran {func}"
        )
        return value() if isinstance(value, partial) else value


@contextmanager
def keeping(selected: Selected) -> Iterator[None]:
    """Run a forward that leaves only `selected` behind.

    It runs with gradients enabled, because attention kernels output what a backward
    needs only then.
    """
    with (
        regions.opaque(),
        saved_tensors_hooks(_drop, _drop),
        _Keeping(selected),
    ):
        yield


@contextmanager
def giving(selected: Selected) -> Iterator[None]:
    """Run the forward again. Kept outputs are neither computed nor sent again."""
    with regions.opaque(), _Giving(selected):
        yield


def _drop(tensor: Any) -> Any:
    """Discard what autograd would save: another forward's backward will run."""


def _stand_in(
    shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A tensor of NaN without memory, so that an unexpected read shows."""
    return torch.full((), torch.nan, dtype=dtype, device=device).expand(shape)


def _asks(func: Any, args: Any, out: Any) -> bool:
    """True if an operation, or its backward, may read values.

    Unknown operations may. So may one that creates an empty tensor: its later writer is
    not seen here.
    """
    if func.is_view or func in _ASK_NOTHING:
        return False
    # A product with a number saves nothing.
    if func is _aten.mul.Tensor and not isinstance(args[1], Tensor):
        return False
    return any(
        isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())
        for x in tree_iter(out)
    )


def _storages(value: Any) -> Iterator[int]:
    return (storage_of(x) for x in tree_iter(value) if isinstance(x, Tensor))
