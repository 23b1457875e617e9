"""A piece of the model on one rank, cut from autograd at its edges.

A piece takes and returns a *bundle*: named tensors, of which a plain model has one, `x`. Backward is
an explicit call from the gradients of what it put out to those of what it took; input and weight
gradients can be two calls. While a forward runs, a hook packs what autograd saves: a view of a weight
as (unit, offset), unpacked from whatever buffer holds the unit then, so a dropped unit is really free in
between; anything else, when activations are offloaded, as a box whose content can leave and return.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.autograd.graph import _engine_run_backward as run_compiled_backward

from ..comm import Work
from ..models import ExpertProducts, LoraLinear
from ..models.experts import TERMS, loss_router
from .compile import CompiledModule, Factors
from .data import Unit
from .low_precision import EightBits, of_expert
from .model import EVERY
from .pool import storage_of
from .products import MatmulSpec, into_input, multiply
from .recompute import Selected, giving, keeping
from .tensor import RowLinear
from .works import ChainedWork

Bundle = dict[str, Tensor]

_engine: Any = Variable._execution_engine  # its stubs leave it out


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
        assert self.tensor is not None, (
            "backward needs activations that are on the host"
        )
        _uses(self.tensor)
        return self.tensor

    @torch.no_grad()
    def leave(self) -> None:
        assert self.tensor is not None
        _uses(self.tensor)
        # On a machine without a GPU the host copy is a copy all the same, so the way is tested.
        host = torch.empty_like(
            self.tensor, device="cpu", pin_memory=self.tensor.is_cuda
        )
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

    def begin(self, copy: Callable[[], object]) -> Work:
        """Begin a copy of what the device has computed so far."""
        if self.stream is None:
            return ChainedWork(Work(), self.thread.submit(copy).result)
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            copy()
        copied = self.stream.record_event()
        return ChainedWork(
            Work(), lambda: torch.cuda.current_stream().wait_event(copied)
        )


class _PendingGradient(NamedTuple):
    """A weight gradient still to be computed: what went in, and the gradient of what came out."""

    unit: Unit
    name: str
    x: Tensor  # (..., in)
    gradient: Tensor  # (..., out)
    spec: MatmulSpec

    def contribute(self) -> None:
        _contribute(*self)


def _contribute(
    unit: Unit, name: str, x: Tensor, gradient: Tensor, spec: MatmulSpec
) -> None:
    """Adds a product's weight gradient to that of its unit."""
    if spec.matmul:
        product = spec.matmul.weight_gradient(x, gradient)
        unit.contribute_sum(name, product.mT if spec.transposed else product)
        return
    x, gradient = x.flatten(0, -2), gradient.flatten(0, -2)
    if spec.transposed:
        unit.contribute(name, x.mT, gradient)
    else:
        unit.contribute(name, gradient.mT, x)


class _Taken(NamedTuple):
    """The names of what a piece takes of a bundle and of the batch, and of what goes past it."""

    mine: tuple[str, ...]
    named: tuple[str, ...]
    past: tuple[str, ...]


@dataclass(slots=True)
class _Kept:
    """Values that a forward keeps for its backward."""

    # not the outputs themselves: their storage would live as long
    roots: dict[str, GradientEdge]
    like: Tensor  # a zero of the loss's dtype, on its device
    into: Bundle = field(default_factory=dict)  # where the inputs' gradients arrive
    past: tuple[str, ...] = ()  # what went past the piece: its gradients do, too
    boxes: list[Box] = field(default_factory=list)
    pending: list[_PendingGradient] = field(default_factory=list)
    whole: Callable[[], None] | None = None  # a backward put off as a whole


class _Function(torch.autograd.Function):
    """An autograd function that is called by `call`: `apply` without what it looks at first, which takes
    a fifth of its time. No transform of torch.func and no compiler sees these functions."""

    @classmethod
    def call(cls, *args: Any) -> Any:
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]


class _Edge(_Function):
    """A piece's input as autograd sees it: a leaf would keep the input's storage alive."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, leaf: Tensor, into: Bundle, name: str) -> Tensor:
        ctx.into, ctx.name = into, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        ctx.into[ctx.name] = gradient
        return None, None, None, None


class _Factor(NamedTuple):
    """The weight of a product."""

    weight: nn.Parameter
    unit: Unit
    name: str
    spec: MatmulSpec


class _Product(_Function):
    """A product with a weight whose backward adds the weight's gradient where it belongs, or where
    there is a list for it, writes it down for later. Nothing of the weight is saved: backward takes
    it from wherever the unit has it then."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        factor: _Factor,
        pending: list[_PendingGradient] | None,
    ) -> Tensor:
        weight, unit, _, spec = ctx.factor = factor
        ctx.pending = pending
        if not unit.frozen:
            ctx.save_for_backward(x)
        return multiply(x, weight, bias, spec)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, unit, name, spec = ctx.factor
        into = into_input(gradient, weight, spec)
        bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        if unit.frozen:
            return into, bias, None, None
        (x,) = ctx.saved_tensors
        if ctx.pending is None:
            _contribute(unit, name, x, gradient, spec)
        else:
            # Detached: an input with its graph would lead back to the list, and neither be freed.
            ctx.pending.append(
                _PendingGradient(unit, name, x.detach(), gradient.detach(), spec)
            )
        return into, bias, None, None


class _Linear(nn.Linear):
    """nn.Linear with a product of the piece's."""

    weight_product: Callable[[Tensor, Tensor | None], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        return self.weight_product(x, self.bias)


def narrowable(module: nn.Module) -> Iterator[nn.Module]:
    """The modules of a block whose products with their `weight` may have fewer digits."""
    loras: list[Any] = [m.lora for m in module.modules() if getattr(m, "lora", None)]
    adapters = {x for lora in loras for x in lora.modules()}
    for child in module.modules():
        product = type(child) in (nn.Linear, _Linear) or hasattr(
            child, "weight_product"
        )
        if product and child not in adapters:
            yield child


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
        compiled: CompiledModule | None = None,
    ) -> None:
        self.module, self.units, self.takes = module, tuple(units), tuple(takes)
        self.trained = tuple(unit for unit in units if not unit.frozen)
        self.first, self.last, self.splits, self.offloads = (
            first,
            last,
            splits,
            offloads,
        )
        self.compiled = compiled
        self.packs = offloads or any(not unit.resident for unit in units)
        self.kept: dict[int, _Kept] = {}
        self.known: dict[tuple[tuple[str, ...], ...], _Taken] = {}
        self.loss_router = loss_router(module)  # whose losses the piece adds
        device = self.units[0].pool.device if self.units else None
        # Of all graphs, and no gradient comes to it.
        self.leaf = torch.zeros((), device=device, requires_grad=True)
        self.owners = {
            p: (u, name) for u in self.units for name, p in u.parameters.items()
        }
        # Of the forward that is running, where backward is split.
        self.pending: list[_PendingGradient] | None = None
        ours = {weight for weight, (unit, _) in self.owners.items() if not unit.plain}
        # The head's and an adapter's thin products lose more by fewer digits than they gain.
        narrow = set() if first or last else set(narrowable(module))
        for child in module.modules():
            if isinstance(child, ExpertProducts):
                matmul = self.owners[child.up][0].precision.matmul
                if isinstance(matmul, EightBits) and matmul.traits.experts:
                    child.product = partial(of_expert, matmul)
            if child._parameters.get("weight") not in ours:
                continue
            if type(child) is nn.Linear:
                # Another class and not another module, as FSDP2 does: its hooks and names remain.
                child.__class__ = _Linear
            # Of a model's own modules those that multiply by a `weight` (in, out) in a method
            # `weight_product(x)`.
            if hasattr(child, "weight_product") or isinstance(child, _Linear):
                own: Any = child
                transposed = not isinstance(child, _Linear | RowLinear | LoraLinear)
                unit, name = self.owners[own.weight]
                matmul = unit.precision.matmul if child in narrow else None
                spec = MatmulSpec(transposed, matmul, unit.scales.get(name))
                if compiled:
                    compiled.add(own, spec)
                else:
                    factor = _Factor(own.weight, unit, name, spec)
                    own.weight_product = self._product(factor)

    def _product(self, factor: _Factor) -> Callable[..., Tensor]:
        """F.linear (or x @ weight), with `_Product`'s backward if there will be one."""
        weight, spec = factor.weight, factor.spec

        def product(x: Tensor, bias: Tensor | None = None) -> Tensor:
            # Of an input that needs no gradient autograd would not come to the product at all.
            if (
                x.requires_grad
                and torch.is_grad_enabled()
                and x.dim() > 1
                and weight.dim() == 2
            ):
                y: Tensor = _Product.call(x, bias, factor, self.pending)
                return y
            return multiply(x, weight, bias, spec)

        return product

    def forward(
        self,
        microbatch: int,
        bundle: Bundle,
        batch: Mapping[str, Tensor],
        *,
        keep: bool,
        selected: Selected | None = None,
    ) -> Bundle:
        """Runs the piece and returns its output, with the values that pass it by; with `keep` it
        also keeps what the backward needs.

        `selected` comes first without `keep` and then with it: the first forward keeps some values
        in it, and the second one computes the rest from them.

        A piece takes the names of its forward: from the bundle, else from the batch. Its first
        argument is `x` if nothing in the bundle has its name. The rest of the bundle passes it by.
        """
        taken = self._taken(bundle, batch)
        mine = {name: bundle[name] for name in taken.mine}
        past = {name: bundle[name] for name in taken.past}
        named = {name: batch[name] for name in taken.named}
        if not keep and selected is None:
            with torch.no_grad():
                return past | self._call(mine, named)
        kept = _Kept({}, self.leaf, past=taken.past)
        self.pending = kept.pending if self.splits else None
        if selected is None and not self.packs and torch.is_grad_enabled():
            out = self._call(self._edges(mine, kept.into), named)
        else:
            again = (
                nullcontext()
                if selected is None
                else (giving if keep else keeping)(selected)
            )
            stays = (
                {storage_of(x) for x in named.values()} if self.offloads else set[int]()
            )
            with torch.enable_grad(), self._packing(kept.boxes, stays), again:
                out = self._call(self._edges(mine, kept.into), named)
        # the list would keep what it holds after its weight gradients are done
        self.pending = None
        if keep:
            kept.roots = {
                name: get_gradient_edge(y) for name, y in out.items() if y.requires_grad
            }
            if self.last:
                # a view would keep its storage
                kept.like = torch.zeros_like(out["x"].detach())
            self.kept[microbatch] = kept
        return past | {name: y.detach() for name, y in out.items() if name not in TERMS}

    def _taken(self, bundle: Bundle, batch: Mapping[str, Tensor]) -> _Taken:
        """The tensors that a piece takes of a bundle and of a batch with these names."""
        key = tuple(bundle), tuple(batch)
        if (known := self.known.get(key)) is None:
            names = (
                self.takes
                if self.first or self.takes[0] in bundle
                else ("x", *self.takes[1:])
            )
            if EVERY in names:
                names = (*names, *batch)
            mine = tuple(name for name in names if name in bundle)
            named = tuple(name for name in names if name in batch and name not in mine)
            past = tuple(name for name in bundle if name not in mine)
            known = self.known[key] = _Taken(mine, named, past)
        return known

    def _call(self, mine: Bundle, named: Bundle) -> Bundle:
        x = None
        if mine:
            first = next(iter(mine))
            x = mine[first]
            named = {**mine, **named}
            del named[first]
        if self.compiled:
            y = self.compiled(x, named, partial(self._take, self.pending))
        else:
            y = self.module(**named) if x is None else self.module(x, **named)
        return {"x": y} if isinstance(y, Tensor) else dict(y)

    def _take(
        self, pending: list[_PendingGradient] | None, factors: Sequence[Factors]
    ) -> None:
        """Accepts the weight gradients' factors that a compiled backward leaves."""
        for factor in factors:
            unit, name = self.owners[factor.weight]
            one = _PendingGradient(unit, name, *factor[1:])
            one.contribute() if pending is None else pending.append(one)

    def _edges(self, mine: Bundle, into: Bundle) -> Bundle:
        edges = dict(mine)
        for name, x in mine.items():
            if x.is_floating_point():
                edges[name] = _Edge.call(x.detach(), self.leaf, into, name)
        return edges

    def seed(self, microbatch: int, scale: Tensor) -> Bundle:
        """The gradient with which the last piece's backward starts."""
        like = self.kept[microbatch].like
        return {"x": scale.view(()).to(like.dtype).expand_as(like)}

    def backward(self, microbatch: int, gradients: Bundle) -> Bundle:
        """Add to the units' gradients and return those of the inputs; what was kept is let go."""
        kept = self.kept.pop(microbatch)
        self._run(kept, gradients)
        # where a schedule splits the backward of other microbatches into I and W
        if kept.pending:
            self._contribute(kept)
        return self._passed(kept, gradients)

    def input_gradient(self, microbatch: int, gradients: Bundle) -> Bundle:
        """The inputs' gradients alone (with those of norms and biases, which cost nothing).

        A piece without an input has only weight gradients: its backward is put off as a whole."""
        kept = self.kept[microbatch]
        if self.first:
            kept.whole = lambda: self._run(kept, gradients)
            return {}
        self._run(kept, gradients)
        kept.roots = {}
        kept.boxes.clear()
        return self._passed(kept, gradients)

    @torch.no_grad()
    def _contribute(self, kept: _Kept) -> None:
        for pending in kept.pending:
            pending.contribute()

    @torch.no_grad()
    def weight_gradient(self, microbatch: int) -> None:
        """The weight gradients that were put off: one product each, into the flat gradient."""
        kept = self.kept.pop(microbatch)
        for unit in self.trained:
            unit.open()
        if kept.whole:
            kept.whole()
        self._contribute(kept)

    def _run(self, kept: _Kept, gradients: Bundle) -> None:
        for unit in self.trained:
            unit.open()
        roots = {name: root for name, root in kept.roots.items() if name in gradients}
        if roots:
            # What torch.autograd.backward ends in: its Python before that takes some 10 us a call, and
            # the engine itself checks what it is given. A compiled backward needs some of it.
            run = run_compiled_backward if self.compiled else _engine.run_backward
            own = tuple([gradients[name] for name in roots])
            run(tuple(roots.values()), own, False, False, (), True, True)

    def _passed(self, kept: _Kept, gradients: Bundle) -> Bundle:
        past = {name: gradients[name] for name in kept.past if name in gradients}
        into, kept.into = kept.into, {}
        return past | into

    def leave(self, microbatch: int) -> None:
        """Moves the kept activations of a forward to the host."""
        for box in self.kept[microbatch].boxes:
            box.leave()

    def come_back(self, microbatch: int) -> None:
        for box in self.kept[microbatch].boxes:
            box.come_back()

    def _packing(
        self, boxes: list[Box], stays: Collection[int]
    ) -> AbstractContextManager[Any]:
        """Packs what autograd saves. Storages that `stays` names belong to the batch: other pieces need
        them too, so they are not offloaded."""
        if not self.packs:
            return nullcontext()
        homes = {u.storage(): u for u in self.units}
        seen: dict[tuple[Any, ...], Box] = {}

        def pack(tensor: Tensor) -> Tensor | _Packed | Box:
            if self.compiled and type(tensor) not in (Tensor, nn.Parameter):
                return tensor  # while a graph is traced
            storage = storage_of(tensor)
            unit = homes.get(storage)
            if unit is not None:
                offset = int(tensor.storage_offset())
                return _Packed(unit, offset, tensor.shape, tensor.stride())
            if not self.offloads or storage in stays:
                return tensor
            key = (
                storage,
                tensor.storage_offset(),
                tensor.shape,
                tensor.stride(),
                tensor.dtype,
            )
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
    assert buffer is not None, (
        f"backward needs unit {packed.unit.number}, which is dropped"
    )
    return buffer.as_strided(packed.shape, packed.stride, packed.offset)
