"""Records a piece's operations as it runs: products, attention, bytes and kernels.

`target.py` handles operations that the target device runs differently from meta
tensors. `plan.price` computes their time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..comm import Message, regions
from ..comm.base import group_named
from ..models import kernels
from ..parallel.context import ring_attention, ring_gradients
from ..parallel.pool import storage_of
from ..program import AttentionLoad, Load, MessageLoad, Product
from .live import Live

# Prefix of the groups of a costing: the process may have a real world as well.
PREFIX = "piece_costs."
_AXES = {"tp": "tp", "ring": "cp.ring", "ulysses": "cp.ulysses"}

_aten = torch.ops.aten


def _mm(a: Tensor, b: Tensor) -> Product:
    # (m, k) @ (k, n)
    return Product(float(a.shape[0]), float(a.shape[1]), float(b.shape[1]))


def _bmm(a: Tensor, b: Tensor) -> Product:
    # (batch, m, k) @ (batch, k, n)
    return Product(
        float(a.shape[1]),
        float(a.shape[2]),
        float(b.shape[2]),
        float(a.shape[0]),
    )


def _solve(a: Tensor, b: Tensor) -> Product:
    # (..., m, m) and (..., m, n): a triangle has half of the multiply-adds of a square.
    rows, columns = map(float, b.shape[-2:])
    return Product(rows, rows / 2, columns, float(b.shape[:-2].numel()))


# Functions of the two factors, and the position of the first among the arguments.
_PRODUCTS: dict[Any, tuple[Callable[[Tensor, Tensor], Product], int]] = {
    _aten.mm: (_mm, 0),
    _aten.addmm: (_mm, 1),
    _aten.addmm_: (_mm, 1),
    _aten._addmm_activation: (_mm, 1),
    _aten.bmm: (_bmm, 0),
    _aten.baddbmm: (_bmm, 1),
    _aten.baddbmm_: (_bmm, 1),
    _aten.linalg_solve_triangular: (_solve, 0),
}
# On meta, attention has this operation's shapes for every target. Position of q,
# position of the causal flag, and number of products.
_ATTENTION: dict[Any, tuple[int, int, float]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: (0, 4, 2.0),
    # Flash attention stores no scores: it recomputes q k', then dv, dp, dq and dk.
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (1, 7, 5.0),
}
_EMPTY = "empty empty_like empty_strided new_empty new_empty_strided"
_ALLOCATES = {getattr(_aten, name) for name in _EMPTY.split()}
# The argument that is not read, or of which only as much as the output is.
_UNREAD: dict[Any, int] = {
    _aten.zero_: 0, _aten.fill_: 0, _aten.copy_: 0,
    _aten.nll_loss_forward: 0, _aten.nll_loss_backward: 1,
}  # fmt: skip
_PICKS = {_aten.embedding, _aten.gather, _aten.index, _aten.index_select}
# Operations that a compiler fuses into one kernel: elementwise ones, and reductions
# over rows.
_ELEMENTS = {torch.Tag.pointwise, torch.Tag.reduction}
_MOVES = {_aten._to_copy, _aten.cat}
# Operations that add only as much to the first argument as the last one holds.
_ADDS_INTO = {_aten.scatter_add_, _aten.index_add_}


def _region(
    x: Tensor, kind: str, name: str, size: int, dim: int, join: int
) -> Tensor:
    return regions.carry(x, kind, group_named(name), dim, join)


def _ring(*args: Any) -> tuple[Tensor, Tensor]:
    q, kv, ids, sinks, name = args
    return ring_attention(q, kv, ids, sinks, group_named(name))


def _gradients(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    gradient, q, kv, ids, sinks, out, lse, name = args
    return ring_gradients(
        gradient, q, kv, ids, sinks, out, lse, group_named(name)
    )


# Opaque operations under selective recomputation. They are opened, so that their
# operations and messages are counted.
_OPAQUE: dict[Any, Callable[..., Any]] = {
    torch.ops.phalanx.region: _region,
    torch.ops.phalanx.attention: kernels.attend_own,
    torch.ops.phalanx.attention_gradients: kernels.all_gradients,
    torch.ops.phalanx.ring: _ring,
    torch.ops.phalanx.ring_gradients: _gradients,
}


@dataclass
class _Page:
    """Everything recorded for one operation of the program."""

    products: list[Product] = field(default_factory=list)
    attention: list[AttentionLoad] = field(default_factory=list)
    moved: float = 0.0
    launches: int = 0
    messages: list[MessageLoad] = field(default_factory=list)


Known = dict[Any, Any]


class Scales(Live):  # type: ignore[no-untyped-call]
    """While active, records everything that runs on the page of the current operation.

    `known` caches outputs by the tensors given: computing a shape on meta takes many
    times as long as a lookup.

    `compiled`: an elementwise operation joins the kernel that made one of its inputs.
    Its output is written once, when another kind of operation reads it or it is kept.
    It reads what no kernel of its chain made. This is the best a compiler can fuse.
    """

    def __init__(
        self, messages: list[Message], known: Known, *, compiled: bool = False
    ) -> None:
        super().__init__()
        self.compiled = compiled
        # Outputs of elementwise operations that nothing else has read: storage and
        # bytes, by storage.
        self.inside: dict[int, tuple[Any, float]] = {}
        self.outputs = known
        self.messages, self.assigned = messages, len(messages)
        self.pages: dict[str, _Page] = {}
        self.page = _Page()  # belongs to no operation until one is on

    @contextmanager
    def on(self, operation: str) -> Iterator[None]:
        # What was sent before belongs to the page before.
        self._assign()
        before, self.page = (
            self.page,
            self.pages.setdefault(operation, _Page()),
        )
        try:
            yield
        finally:
            self._assign()
            # What is still fused is written when the operation ends.
            for number in tuple(self.inside):
                self._leaves(number)
            self.page = before

    def load(self, operation: str) -> Load:
        page = self.pages.get(operation, _Page())
        return Load(
            tuple(page.products),
            tuple(page.attention),
            page.moved,
            float(page.launches),
            tuple(page.messages),
        )

    def _is_inside(self, number: int) -> bool:
        # Its storage may have been freed, and its address used again.
        return number in self.inside and self.inside[number][0]() is not None

    def _leaves(self, number: int) -> None:
        """Count a storage's bytes as written by its kernel, unless it was freed."""
        if self._is_inside(number):
            self.page.moved += self.inside[number][1]
        self.inside.pop(number, None)

    def _fuse(self, given: list[Tensor], out: Any) -> None:
        """Count an elementwise operation as compiled code runs it."""
        read = {
            storage_of(x): x
            for x in given
            if not self._is_inside(storage_of(x))
        }
        # No launch of its own where an input comes from the chain.
        self.page.launches += len(read) == len({storage_of(x) for x in given})
        self.page.moved += sum(map(_extent, read.values()))
        for x in _tensors(out):
            if storage_of(x) in read:  # written in place
                self.page.moved += _extent(x)
            else:
                self.inside[storage_of(x)] = (
                    weakref.ref(x.untyped_storage()),
                    _extent(x),
                )

    def kernel(
        self, reads: Sequence[Tensor | None], writes: Sequence[Tensor]
    ) -> None:
        """Count one kernel that the target has and meta tensors lack."""
        for x in reads:
            if x is not None:
                self._leaves(storage_of(x))
        self.page.launches += 1
        self.page.moved += sum(
            _extent(x) for x in (*reads, *writes) if x is not None
        )

    def _assign(self) -> None:
        """Assign messages sent since the last call to the current page.

        A receive is the other end of a send, and does not count.
        """
        for sent in self.messages[self.assigned :]:
            if sent.collective != "receive":
                name = sent.group.removeprefix(PREFIX)
                self.page.messages.append(
                    MessageLoad(
                        _AXES.get(name, name),
                        sent.collective,
                        float(sent.bytes),
                    )
                )
        self.assigned = len(self.messages)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        packet = func.overloadpacket
        # Run its definition instead, whose operations come back here.
        if packet in _OPAQUE:
            with self:
                return _OPAQUE[packet](*args)
        # Function modes are for calls in the model, not for calls on tensors here.
        with torch._C.DisableTorchFunction():
            # A view moves nothing and allocates nothing.
            if func.is_view:
                return func(*args, **(kwargs or {}))
            given = list(_tensors((args, kwargs or {})))
            storages = {storage_of(x) for x in given}
            out, fresh = self._put_out(func, args, kwargs or {}, storages)
            if fresh:
                for x in _tensors(out):
                    self._note(x.untyped_storage())
            if packet not in _ALLOCATES and (fresh or func._schema.is_mutable):
                # An `out` argument is written. It is read only if it is another
                # argument as well.
                read = {
                    name: x
                    for name, x in (kwargs or {}).items()
                    if name != "out"
                }
                self._write(func, args, list(_tensors((args, read))), out)
        return out

    def _put_out(
        self, func: Any, args: Any, kwargs: Any, storages: set[int]
    ) -> tuple[Any, bool]:
        """The operation's output, and whether it is new instead of a view of an input."""
        key = func, _key(args), _key(kwargs)
        # Found before: make an output of that shape, without torch's shape functions.
        if key in self.outputs:
            known = self.outputs[key]
            if known is _OUT:
                return kwargs["out"], False
            return _made(known, args), known is not _FIRST
        out = func(*args, **kwargs)
        # In place: remember which argument comes back.
        if func._schema.is_mutable:
            if args and out is args[0]:
                self.outputs[key] = _FIRST
            elif "out" in kwargs and out is kwargs["out"]:
                self.outputs[key] = _OUT
            return out, False
        made = list(_tensors(out))
        fresh = bool(made) and not any(storage_of(x) in storages for x in made)
        # Only new meta tensors can be made again from their shapes.
        if fresh and all(x.is_meta for x in made):
            self.outputs[key] = _form(out)
        return out, fresh

    def _write(
        self, func: Any, args: Any, given: list[Tensor], out: Any
    ) -> None:
        packet = func.overloadpacket
        # Elementwise operations of a compiled block join a chain.
        if self.compiled and (
            packet in _MOVES or not _ELEMENTS.isdisjoint(func.tags)
        ):
            self._fuse(given, out)
            return
        # Any other operation reads from memory, so what it reads leaves its chain.
        for x in given:
            self._leaves(storage_of(x))
        if packet in _PRODUCTS:
            of, at = _PRODUCTS[packet]
            self.page.products.append(of(args[at], args[at + 1]))
        elif packet in _ATTENTION:
            self.page.attention.append(_attention(packet, args))
        else:
            self.page.moved += _moved(packet, args, given, out)
        self.page.launches += 1


# Markers in place of an output: the operation wrote into an argument and returned it.
_FIRST = "the first argument"
_OUT = "the argument `out`"


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for x in value:
            yield from _tensors(x)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))


def _key(value: Any) -> Any:
    """The properties of an argument that an output's shape depends on."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, tuple | list):
        return tuple(map(_key, value))
    if isinstance(value, dict):
        return tuple((name, _key(x)) for name, x in value.items())
    return type(value), value  # 1, 1.0 and True are different


def _form(out: Any) -> Any:
    if isinstance(out, Tensor):
        return out.shape, out.stride(), out.dtype
    return [_form(x) if isinstance(x, Tensor) else x for x in out]


def _made(form: Any, args: Any) -> Any:
    if form is _FIRST:
        return args[0]
    if isinstance(form, tuple):
        shape, stride, dtype = form
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return tuple(_made(x, args) if isinstance(x, tuple) else x for x in form)


def _attention(packet: Any, args: Sequence[Any]) -> AttentionLoad:
    at, flag, products = _ATTENTION[packet]
    q, k = args[at], args[at + 1]
    # q: (B, heads, queries, size), k: (B, kv_heads, keys, size)
    batch, heads, queries, size = map(float, q.shape)
    causal = float(bool(args[flag])) if len(args) > flag else 0.0
    kv_heads, keys = float(k.shape[1]), float(k.shape[2])
    return AttentionLoad(
        batch, heads, kv_heads, queries, keys, size, causal, products
    )


def _moved(packet: Any, args: Any, given: list[Tensor], out: Any) -> float:
    """Bytes that a memory-bound operation reads and writes, each element once."""
    written = sum(map(_extent, _tensors(out)))
    if packet in _UNREAD:
        unread = args[_UNREAD[packet]]
        return written + sum(_extent(x) for x in given if x is not unread)
    # Rows that are picked are read and written; the indices are read.
    if packet in _PICKS:
        return 2 * written + sum(_extent(x) for x in given[1:])
    # Read and written where it adds, plus what is added and where.
    if packet in _ADDS_INTO:
        return 2 * _extent(given[-1]) + sum(_extent(x) for x in given[1:])
    return written + sum(map(_extent, given))


def _extent(x: Tensor) -> float:
    """Bytes of a tensor's distinct elements; expanded ones are read from the cache."""
    count = x.element_size()
    # An expanded dim has stride 0: its elements are one in memory.
    for size, stride in zip(x.shape, x.stride(), strict=True):
        if stride:
            count *= size
    return float(count)
