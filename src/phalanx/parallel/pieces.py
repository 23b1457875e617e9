"""A piece of the model on one rank, cut from autograd at its edges.

Backward is an explicit call from the output's gradient to the input's; input and weight gradients
can be two calls. While a forward runs, a hook packs what autograd saves: a view of a weight as
(unit, place), unpacked from whatever buffer holds the unit then, so a dropped unit is really free in
between; anything else, when activations are offloaded, as a box whose content can leave and return.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from ..comm import Work, regions
from .data import Unit, storage_of
from .recompute import contexts
from .tensor import RowLinear

__all__ = ["Box", "CopyLane", "Piece"]


class _Packed(NamedTuple):
    """A view of a weight: where it is in its unit's buffer."""

    unit: Unit
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class Box:
    """A saved activation, on the device or on the host."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.host: Tensor | None = None
        self.device = tensor.device

    def content(self) -> Tensor:
        assert self.tensor is not None, "backward needs activations that are on the host"
        _uses(self.tensor)
        return self.tensor

    @torch.no_grad()
    def leave(self) -> None:
        assert self.tensor is not None
        _uses(self.tensor)
        # On a machine without a GPU the host copy is a copy all the same, so the way is tested.
        host = torch.empty_like(self.tensor, device="cpu", pin_memory=self.tensor.is_cuda)
        self.host = host.copy_(self.tensor, non_blocking=True)
        self.tensor = None

    @torch.no_grad()
    def come_back(self) -> None:
        assert self.host is not None
        self.tensor = self.host.to(self.device, non_blocking=True)
        self.host = None


def _uses(tensor: Tensor) -> None:
    """The allocator gives this memory to nobody before the current stream is past this point."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


class CopyLane:
    """Copies between the device and the host in one direction, one after the other, beside
    computing: on a stream of their own, or without a GPU on a thread."""

    def __init__(self, device: torch.device) -> None:
        stream: Any = torch.cuda.Stream  # its stubs are not typed
        self.stream = stream(device) if device.type == "cuda" else None
        self.thread = ThreadPoolExecutor(1)  # which starts with its first copy

    def begin(self, copy: Callable[[], None]) -> Work:
        """Begin a copy of what the device has computed so far."""
        if self.stream is None:
            return _OnThread(self.thread.submit(copy))
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            copy()
        return _OnStream(self.stream.record_event())


class _OnThread(Work):
    def __init__(self, copying: Future[None]) -> None:
        self.copying = copying

    def wait(self) -> None:
        self.copying.result()

    def done(self) -> bool:
        return self.copying.done()


class _OnStream(Work):
    def __init__(self, copied: Any) -> None:  # a torch.cuda.Event, whose stubs are not typed
        self.copied = copied

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.copied)

    def done(self) -> bool:
        return bool(self.copied.query())


class _Due(NamedTuple):
    """A weight gradient still to be computed: what went in, and the gradient of what came out."""

    unit: Unit
    name: str
    x: Tensor  # (..., in)
    gradient: Tensor  # (..., out)
    transposed: bool  # the weight is (in, out) and not (out, in)

    def contribute(self) -> None:
        x, gradient = self.x.flatten(0, -2), self.gradient.flatten(0, -2)
        a, b = (x, gradient) if self.transposed else (gradient, x)
        self.unit.contribute(self.name, a.T, b)


@dataclass
class _Kept:
    """What a forward leaves for its backward."""

    root: GradientEdge | None  # not the output itself: its storage would live as long
    like: Tensor  # a zero of the loss's dtype, on its device
    into: list[Tensor] = field(default_factory=list)  # where the input's gradient arrives
    boxes: list[Box] = field(default_factory=list)
    due: list[_Due] = field(default_factory=list)
    whole: Callable[[], None] | None = None  # a backward put off as a whole


class _Edge(torch.autograd.Function):
    """The piece's input as autograd sees it: a leaf would keep the input's storage alive."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, leaf: Tensor, into: list[Tensor]) -> Tensor:
        ctx.into = into
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.into.append(gradient)
        return None, None, None


class _Product(torch.autograd.Function):
    """A product with a weight whose backward adds the weight's gradient where it belongs, or where
    there is a list for it, writes it down for later. Nothing of the weight is saved: backward takes
    it from wherever the unit has it then."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        owner: tuple[Unit, str],
        transposed: bool,
        due: list[_Due] | None,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.owner, ctx.biased, ctx.transposed, ctx.due = owner, bias is not None, transposed, due
        return x @ weight if transposed else F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        unit, name = ctx.owner
        (x,) = ctx.saved_tensors
        weight = unit.parameters[name].detach()
        into = gradient @ (weight.T if ctx.transposed else weight)
        # Detached: an input with its graph would lead back to the list, and neither would be freed.
        due = _Due(unit, name, x.detach(), gradient.detach(), ctx.transposed)
        due.contribute() if ctx.due is None else ctx.due.append(due)
        bias = gradient.flatten(0, -2).sum(0) if ctx.biased else None
        return into, None, bias, None, None, None


class _Linear(nn.Linear):
    """nn.Linear with a product of the piece's."""

    product: Callable[[Tensor, Tensor | None], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias)


_MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)


class _BareProducts(TorchFunctionMode):
    """While it is on, products with a parameter that are written without a module are the piece's."""

    def __init__(self, piece: Piece) -> None:
        super().__init__()
        self.piece = piece

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and isinstance(args[1], nn.Parameter):
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            return self.piece.product(args[1], args[0], bias)
        if func in _MATMULS and isinstance(args[1], nn.Parameter):
            return self.piece.product(args[1], args[0], None, transposed=True)
        return func(*args, **kwargs)


class Piece:
    """One piece: runs forward, backward, and again. `splits`: backward comes as I and W."""

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        takes: Sequence[str],
        *,
        first: bool,
        last: bool,
        splits: bool = False,
        offloads: bool = False,
        selective: bool = False,
    ) -> None:
        self.module, self.units, self.takes = module, tuple(units), tuple(takes)
        self.first, self.last, self.splits, self.offloads = first, last, splits, offloads
        self.selective = selective and not first and not last
        self.kept: dict[int, _Kept] = {}
        self.owners = {p: (u, name) for u in self.units for name, p in u.parameters.items()}
        self.due: list[_Due] | None = (
            None  # of the forward that is running, where backward is split
        )
        # By the rule's shapes: a parameter has none until its unit is gathered.
        bare = {u.parameters[w.name] for u in self.units for w in u.order if len(w.shape) == 2}
        if not first:  # a first piece's input needs no gradient
            bare -= set(self._own_products())
        self.has_bare_products = splits and not first and bool(bare)

    def _own_products(self) -> Iterator[nn.Parameter]:
        """Have the piece's linears multiply by `product`; the weights of these."""
        for module in self.module.modules():
            weight: Any = getattr(module, "weight", None)
            if type(module) is nn.Linear:
                # Another class and not another module, as FSDP2 does: its hooks and names remain.
                module.__class__ = _Linear
            if isinstance(module, _Linear | RowLinear):
                module.product = partial(self.product, weight)
                yield weight

    def product(
        self, weight: nn.Parameter, x: Tensor, bias: Tensor | None, *, transposed: bool = False
    ) -> Tensor:
        """What F.linear gives (or x @ weight), with `_Product`'s backward where there will be one."""
        # Of an input that needs no gradient autograd would not come to the product at all.
        if not (torch.is_grad_enabled() and x.requires_grad and x.dim() > 1 and weight.dim() == 2):
            return x @ weight if transposed else F.linear(x, weight, bias)
        args = x, weight.detach(), bias, self.owners[weight], transposed, self.due
        y: Tensor = _Product.apply(*args)  # type: ignore[no-untyped-call]
        return y

    def forward(
        self, microbatch: int, x: Tensor | None, batch: Mapping[str, Tensor], *, keep: bool
    ) -> Tensor:
        """The piece's output; with `keep` also what its backward needs."""
        named = {name: batch[name] for name in self.takes if name in batch}
        if not keep:
            with torch.no_grad():
                return self._call(x, named)
        kept = _Kept(None, torch.empty(0))
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self._packing(kept.boxes))
            y = self._differentiable(self._edge(x, kept.into), named, kept.due)
        if y.requires_grad:
            kept.root = get_gradient_edge(y)
        if self.last:
            kept.like = torch.zeros_like(y.detach())  # a view would keep the output's storage
        self.kept[microbatch] = kept
        return y.detach()

    def _call(self, x: Tensor | None, named: Mapping[str, Tensor]) -> Tensor:
        y: Tensor = self.module(**named) if self.first else self.module(x, **named)
        return y

    def _differentiable(
        self, x: Tensor | None, named: Mapping[str, Tensor], due: list[_Due]
    ) -> Tensor:
        def call(x: Tensor | None) -> Tensor:
            # Inside: what is recomputed selectively must put off the same gradients again.
            with ExitStack() as stack:
                self.due = due if self.splits else None
                # Kept here, the list would keep what it holds after its weight gradients are done.
                stack.callback(setattr, self, "due", None)
                if self.has_bare_products:
                    stack.enter_context(_BareProducts(self))
                if self.selective:
                    stack.enter_context(regions.opaque())
                return self._call(x, named)

        if not self.selective:
            return call(x)
        y: Tensor = checkpoint(
            call, x, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
        )
        return y

    def _edge(self, x: Tensor | None, into: list[Tensor]) -> Tensor | None:
        if x is None:
            return None
        leaf = torch.zeros((), device=x.device, requires_grad=True)
        edge: Tensor = _Edge.apply(x.detach(), leaf, into)  # type: ignore[no-untyped-call]
        return edge

    def seed(self, microbatch: int, scale: float) -> Tensor:
        """The gradient with which the last piece's backward starts."""
        return torch.full_like(self.kept[microbatch].like, scale)

    def backward(self, microbatch: int, gradient: Tensor) -> Tensor | None:
        """Add to the units' gradients and return the input's; what was kept is let go."""
        kept = self.kept.pop(microbatch)
        self._run(kept, gradient)
        return kept.into[0] if kept.into else None

    def input_gradient(self, microbatch: int, gradient: Tensor) -> Tensor | None:
        """The input's gradient alone (with those of norms and biases, which cost nothing).

        A piece without an input has only weight gradients: its backward is put off as a whole."""
        kept = self.kept[microbatch]
        if self.first:
            kept.whole = lambda: self._run(kept, gradient)
            return None
        self._run(kept, gradient)
        kept.root = None
        kept.boxes.clear()
        return kept.into.pop() if kept.into else None

    @torch.no_grad()
    def weight_gradient(self, microbatch: int) -> None:
        """The weight gradients that were put off: one product each, into the flat gradient."""
        kept = self.kept.pop(microbatch)
        for unit in self.units:
            unit.open()
        if kept.whole:
            kept.whole()
        for due in kept.due:
            due.contribute()

    def _run(self, kept: _Kept, gradient: Tensor) -> None:
        for unit in self.units:
            unit.open()
        if kept.root is not None:
            torch.autograd.backward(kept.root, gradient)

    def leave(self, microbatch: int) -> None:
        """What the forward kept goes to the host."""
        for box in self.kept[microbatch].boxes:
            box.leave()

    def come_back(self, microbatch: int) -> None:
        for box in self.kept[microbatch].boxes:
            box.come_back()

    def _packing(self, boxes: list[Box]) -> AbstractContextManager[Any]:
        units = [u for u in self.units if not u.resident]
        if not units and not self.offloads:
            return nullcontext()
        homes = {u.storage(): u for u in self.units}
        seen: dict[tuple[Any, ...], Box] = {}

        def pack(tensor: Tensor) -> Tensor | _Packed | Box:
            storage = storage_of(tensor)
            unit = homes.get(storage)
            if unit is not None:
                offset = int(tensor.storage_offset())
                return _Packed(unit, offset, tensor.shape, tensor.stride())
            if not self.offloads:
                return tensor
            key = (storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
            if key not in seen:
                seen[key] = Box(tensor)
                boxes.append(seen[key])
            return seen[key]

        return saved_tensors_hooks(pack, _unpack)


def _unpack(packed: Tensor | _Packed | Box) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    if isinstance(packed, Box):
        return packed.content()
    buffer = packed.unit.buffer
    assert buffer is not None, f"backward needs unit {packed.unit.number}, which is dropped"
    return buffer.as_strided(packed.shape, packed.stride, packed.offset)
