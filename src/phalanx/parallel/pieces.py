"""A piece of the model on one rank, separated from autograd at its edges.

A piece takes and returns a *bundle* of named tensors; in a plain model the only one is
`x`. Backward is an explicit call from the gradients of the outputs to those of the
inputs. Input and weight gradients can be two calls.

While a forward runs, a hook packs the tensors that autograd saves. A view of a weight
becomes (unit, offset) and is unpacked from the buffer that holds the unit then, so a
dropped unit is really freed in between. When activations are offloaded, any other
tensor becomes a box whose content can move to the host and back.
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
from torch.autograd.graph import (
    GradientEdge,
    get_gradient_edge,
    saved_tensors_hooks,
)
from torch.autograd.graph import _engine_run_backward as run_compiled_backward

from ..comm import Work
from ..models import AdaptedLinear, ExpertProducts, in_adapters
from ..models.ends import LossHead
from ..models.function import FrequentFunction
from ..models.loss import ChunkedLogits, CrossEntropy, ExtraLoss
from ..models.routed import TERMS, losing_chooser
from ..models.side_by_side import SideBySide, has_hooks
from .compile import CompiledModule, Factors
from .data import Unit
from .exact import ExactUnit
from .graphs import Key, PieceGraphs, Slot, key_of
from .low_precision import EightBits, of_expert
from .model import EVERY
from .pool import storage_of
from .preference import PreferenceLoss
from .products import MatmulSpec, Place, into_input, multiply
from .recompute import Selected, giving, keeping
from .tensor import RowLinear, VocabularyCrossEntropy
from .time_parts import run_in_time
from .works import ChainedWork

Bundle = dict[str, Tensor]

_engine: Any = Variable._execution_engine  # its stubs leave it out


class _Packed(NamedTuple):
    """A saved view of a weight, as its place in the unit's buffer."""

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
        # Allocated on the copy stream, and read here on the compute stream.
        _uses(self.tensor)
        return self.tensor

    @torch.no_grad()
    def leave(self) -> None:
        assert self.tensor is not None
        # Allocated on the compute stream, and read here on the copy stream.
        _uses(self.tensor)
        # Without a GPU this is a copy too, so the path is tested.
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
    """Keep memory from being reused before the current stream has passed this point."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


class CopyLane:
    """Copies between device and host in one direction, in order, beside computation.

    They run on a stream of their own or, without a GPU, on a thread.
    """

    def __init__(self, device: torch.device) -> None:
        stream: Any = torch.cuda.Stream  # its stubs are not typed
        self.stream = stream(device) if device.type == "cuda" else None
        # Its thread starts with the first copy.
        self.thread = ThreadPoolExecutor(1)

    def begin(self, copy: Callable[[], object]) -> Work:
        """Start a copy that waits for the work launched on the device so far."""
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
    """A postponed weight gradient: a product's input, and its output's gradient."""

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
    """Add a product's weight gradient to that of its unit."""
    if spec.expert is not None:
        # The layout decides which tokens of an expert are on one rank, and in which order.
        # So this sum over them keeps the layout's precision, also beside fp8 matmuls.
        unit.contribute_expert(name, gradient.mT, x, spec.expert)
        return
    # Scales end with a sequence, so x keeps its sequence dim here.
    if spec.matmul:
        product = spec.matmul.weight_gradient(x, gradient)
        unit.contribute_sum(name, product.mT if spec.transposed else product)
        return
    # x: (tokens, in), gradient: (tokens, out)
    x, gradient = x.flatten(0, -2), gradient.flatten(0, -2)
    if spec.slot is not None:
        assert isinstance(unit, ExactUnit)
        unit.contribute_to_slot(name, gradient.mT, x, spec.slot, spec.place)
    elif spec.place is not None:
        unit.contribute_part(name, gradient.mT, x, spec.place)
    elif spec.transposed:
        unit.contribute(name, x.mT, gradient)
    else:
        unit.contribute(name, gradient.mT, x)


def _weight_gradient(
    pending: list[_PendingGradient] | None,
    unit: Unit,
    name: str,
    x: Tensor,
    gradient: Tensor,
    spec: MatmulSpec,
) -> None:
    """Add a product's weight gradient to that of its unit, or postpone it."""
    if pending is None:
        _contribute(unit, name, x, gradient, spec)
        return
    # Detached: with its graph, an input would lead back to the list, and neither would
    # be freed.
    factors = x.detach(), gradient.detach()
    pending.append(_PendingGradient(unit, name, *factors, spec))


class _Taken(NamedTuple):
    """The names that a piece takes from bundle and batch, and those passing it by."""

    mine: tuple[str, ...]
    named: tuple[str, ...]
    past: tuple[str, ...]


@dataclass(slots=True)
class _Kept:
    """Values that a forward keeps for its backward."""

    # Edges, not the outputs themselves, whose storage would stay alive.
    roots: dict[str, GradientEdge]
    like: Tensor  # a scalar zero with the loss's dtype and device
    # Receives the gradients of the inputs.
    into: Bundle = field(default_factory=dict)
    # the names that passed the piece by, as their gradients do
    past: tuple[str, ...] = ()
    boxes: list[Box] = field(default_factory=list)
    pending: list[_PendingGradient] = field(default_factory=list)
    whole: Callable[[], None] | None = None  # a backward postponed as a whole
    # Where graphs are recorded: the slot that ran, or the shapes of a run without one.
    slot: Slot | None = None
    shapes: Key = ()


class _Edge(FrequentFunction):
    """A piece's input as autograd sees it. A leaf would keep the input's storage alive."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, leaf: Tensor, into: Bundle, name: str
    ) -> Tensor:
        ctx.into, ctx.name = into, name
        # `leaf` requires a gradient, so this backward runs although x is detached.
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        ctx.into[ctx.name] = gradient
        return None, None, None, None


class _Factor(NamedTuple):
    """The weight of a product, and where its gradient goes."""

    weight: nn.Parameter
    unit: Unit
    name: str
    spec: MatmulSpec


class _Product(FrequentFunction):
    """A matmul with a weight whose backward adds the weight's gradient to its unit.

    If there is a list `pending`, backward appends the gradient's factors to it instead.
    The weight is not saved: backward reads it from wherever the unit holds it then.
    """

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
        bias = (
            gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        )
        if unit.frozen:  # only the input needs a gradient
            return into, bias, None, None
        (x,) = ctx.saved_tensors
        _weight_gradient(ctx.pending, unit, name, x, gradient, spec)
        return into, bias, None, None


class _JointProduct(FrequentFunction):
    """`_Product` of one input with several weights, as one node of autograd's graph.

    The gradients of the input are added in the order in which separate nodes would run,
    so the bits are the same if nothing else reads the input.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        factors: Sequence[_Factor],
        pending: list[_PendingGradient] | None,
        *biases: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.factors, ctx.pending = factors, pending
        if not all(factor.unit.frozen for factor in factors):
            ctx.save_for_backward(x)
        return tuple(
            [
                multiply(x, factor.weight, bias, factor.spec)
                for factor, bias in zip(factors, biases, strict=True)
            ]
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        biased = ctx.needs_input_grad[3:]
        biases: list[Tensor | None] = [None] * len(biased)
        saved = ctx.saved_tensors
        into: Any = None
        # The last call's node would run first.
        for number in reversed(range(len(gradients))):
            gradient = gradients[number]
            weight, unit, name, spec = ctx.factors[number]
            term = into_input(gradient, weight, spec)
            into = term if into is None else into.add_(term)
            if biased[number]:
                biases[number] = gradient.flatten(0, -2).sum(0)
            if unit.frozen:
                continue
            (x,) = saved
            _weight_gradient(ctx.pending, unit, name, x, gradient, spec)
        return into, None, None, *biases


def _expert_product(x: Tensor, factor: _Factor, bias: Tensor | None) -> Tensor:
    """The product of an expert's tokens x (n, in) with its weight; n may be 0."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return multiply(x, factor.weight, bias, factor.spec)
    # Never postponed to `W`: grouped kernels compute these weight gradients in `I`.
    y: Tensor = _Product.call(x, bias, factor, None)
    return y


def chunked_child(module: nn.Module) -> str:
    """The name of the projection whose product a head leaves to its loss, or ""."""
    # Such a loss has its value after the backward only. A subclass may go on computing
    # with it, and a user's loss needs the logits, so both get whole ones.
    declared = isinstance(module, LossHead) and "by_chunks" in vars(
        type(module)
    )
    losses = (CrossEntropy, VocabularyCrossEntropy, PreferenceLoss)
    if not declared or type(module.loss) not in losses:
        return ""
    return str(module.by_chunks)


def extra_losses(module: nn.Module) -> Mapping[str, ExtraLoss]:
    """The losses that a head returns beside its own, by their names."""
    found: Mapping[str, ExtraLoss] = getattr(module, "extra_losses", {})
    return found


def _same_weight(key: str, weight: Tensor, run: int) -> Tensor:
    """A frozen weight for one run of tokens: no run has a gradient of its own."""
    return weight


def _by_chunks(
    weight: nn.Parameter,
    unit: Unit,
    name: str,
    x: Tensor,
    bias: None,
    slot: int | None = None,
) -> ChunkedLogits:
    """The product of an output projection, left to the loss."""
    # The losses of several parts of time are joined after the forward.
    in_time = slot is not None
    if unit.frozen:
        return ChunkedLogits(x, weight, None, at_once=in_time)

    def contribute(a: Tensor, b: Tensor, rows: slice | None = None) -> None:
        """Add a product to the gradient of all rows or of some."""
        if slot is not None:
            assert isinstance(unit, ExactUnit)
            unit.contribute_to_slot(name, a, b, slot, rows and (rows,))
        elif rows is None:
            unit.contribute(name, a, b)
        else:
            unit.contribute_part(name, a, b, (rows,))

    return ChunkedLogits(x, weight, contribute, at_once=in_time)


class _Linear(nn.Linear):
    """nn.Linear with the piece's own matmul."""

    weight_product: Callable[[Tensor, Tensor | None], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        return self.weight_product(x, self.bias)


def narrowable(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a block whose matmul with `weight` may use fewer bits."""
    # The thin matrices of an adapter keep the layout's precision.
    adapters = in_adapters(module)
    for child in module.modules():
        product = type(child) in (nn.Linear, _Linear) or hasattr(
            child, "weight_product"
        )
        if product and child not in adapters:
            yield child


class Piece:
    """One piece: forward, backward and recomputation; `splits`: backward as I and W."""

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        takes: Sequence[str],
        *,
        number: int = 0,
        first: bool,
        last: bool,
        splits: bool = False,
        offloads: bool = False,
        compiled: CompiledModule | None = None,
        exact: bool = False,
        time_parts: int = 0,
        ep_ranks: int = 1,
    ) -> None:
        self.module, self.units, self.takes = (
            module,
            tuple(units),
            tuple(takes),
        )
        self.trained = tuple(unit for unit in units if not unit.frozen)
        self.number = number
        self.first, self.last, self.splits, self.offloads = (
            first,
            last,
            splits,
            offloads,
        )
        self.compiled, self.exact = compiled, exact
        # Set where graphs are recorded: see `local.py`.
        self.graphs: PieceGraphs | None = None
        self.ep_ranks = ep_ranks
        # Saved tensors are replaced only where units are dropped, or for offloading.
        self.packs = offloads or any(not unit.resident for unit in units)
        self.kept: dict[int, _Kept] = {}
        self.known: dict[tuple[tuple[str, ...], ...], _Taken] = {}
        # the chooser whose loss terms the piece outputs
        self.chooser = losing_chooser(module)
        self.extra_losses = extra_losses(module)
        device = self.units[0].pool.device if self.units else None
        # A root for all graphs. It never receives a gradient.
        self.leaf = torch.zeros((), device=device, requires_grad=True)
        self.owners = {
            p: (u, name)
            for u in self.units
            for name, p in u.parameters.items()
        }
        # The pending weight gradients of the running forward, if backward is split.
        self.pending: list[_PendingGradient] | None = None
        ours = {
            weight
            for weight, (unit, _) in self.owners.items()
            if not unit.plain
        }
        # The head's matmul and an adapter's thin ones would lose more accuracy in 8
        # bits than they gain.
        narrow = set() if first or last else set(narrowable(module))
        chunked = self._chunked_output()
        factors: dict[nn.Module, _Factor] = {}
        for child in module.modules():
            if isinstance(child, ExpertProducts):
                self._install_experts(child)
            if child is chunked:
                head: Any = child
                head.__class__ = _Linear
                unit, name = self.owners[head.weight]
                head.weight_product = partial(
                    _by_chunks, head.weight, unit, name
                )
                continue
            if child._parameters.get("weight") not in ours:
                continue
            if type(child) is nn.Linear:
                # Change the class, not the module, as FSDP2 does: hooks and names
                # remain.
                child.__class__ = _Linear
            # A model's own module takes part if it multiplies by its `weight` (in, out)
            # in a method `weight_product(x)`.
            if hasattr(child, "weight_product") or isinstance(child, _Linear):
                own: Any = child
                transposed = not isinstance(
                    child, _Linear | RowLinear | AdaptedLinear
                )
                unit, name = self.owners[own.weight]
                matmul = unit.precision.matmul if child in narrow else None
                spec = MatmulSpec(transposed, matmul, unit.scales.get(name))
                if compiled:
                    compiled.add(own, spec)
                else:
                    factor = _Factor(own.weight, unit, name, spec)
                    own.weight_product = self._product(factor)
                    factors[own] = factor

        self._join_products(factors)
        if time_parts:
            run_in_time(module, self.owners, time_parts, ep_ranks)

    def _of_run(
        self, child: ExpertProducts
    ) -> Callable[[str, Tensor, int], Tensor]:
        """Give experts' weights for one run of tokens, by their keys."""
        names = {
            key: self.owners[weight]
            for key, weight in child._parameters.items()
            if weight is not None
        }

        def weight_of(key: str, weight: Tensor, run: int) -> Tensor:
            unit, name = names[key]
            assert isinstance(unit, ExactUnit)
            return unit.of_slot(name, weight, run)

        return weight_of

    def _install_experts(self, experts: ExpertProducts) -> None:
        """Give experts the layout's matmul, and weight gradients without temporaries."""
        unit, _ = self.owners[experts.up]
        # `exact` multiplies the tokens of each sender apart, by frozen weights too.
        if self.exact and self.ep_ranks > 1:
            frozen = unit.frozen
            of_run = _same_weight if frozen else self._of_run(experts)
            experts.weight_of_run = of_run
        matmul: EightBits | None = None
        given = unit.precision.matmul
        if isinstance(given, EightBits) and given.traits.routed:
            matmul = given
            experts.grouped_kernels = False
        if unit.plain or self.compiled or self.exact:
            # Gradients are autograd's own, or go to slots of a leaf. `exact` may have
            # put products in parts in the place of the experts' own.
            if matmul is not None:
                experts.product = partial(of_expert, matmul)
            return
        spec = MatmulSpec(transposed=False, matmul=matmul)

        def each_expert(weight: Any) -> list[_Factor]:
            owner, name = self.owners[weight]
            return [
                _Factor(weight, owner, name, spec._replace(expert=number))
                for number in range(len(weight))
            ]

        experts.each_expert, experts.product = each_expert, _expert_product

    def _chunked_output(self) -> nn.Module | None:
        """The output projection of a head whose loss makes the logits by chunks."""
        name = chunked_child(self.module)
        if not name or self.first or self.compiled:
            return None
        output = self.module.get_submodule(name)
        plain = type(output) is nn.Linear and output.bias is None
        return output if plain else None

    def _product(self, factor: _Factor) -> Callable[..., Tensor]:
        """F.linear (or x @ weight), with the backward of `_Product` for gradients."""
        weight = factor.weight

        def product(
            x: Tensor,
            bias: Tensor | None = None,
            place: Place | None = None,
            slot: int | None = None,
        ) -> Tensor:
            spec = factor.spec
            if place is not None or slot is not None:
                spec = spec._replace(place=place, slot=slot)
            # If the input needs no gradient, autograd would not reach the product's
            # backward.
            if (
                x.requires_grad
                and torch.is_grad_enabled()
                and x.dim() > 1
                and weight.dim() == 2
            ):
                used = factor._replace(spec=spec)
                y: Tensor = _Product.call(x, bias, used, self.pending)
                return y
            return multiply(x, weight, bias, spec)

        return product

    def _join_products(self, factors: Mapping[nn.Module, _Factor]) -> None:
        """Compute layers that share an input in one node, if all of them are plain.

        `exact` replaces the products of single layers by parts of features or time, and
        those of frozen layers too.
        """
        plain = {
            layer
            for layer, factor in factors.items()
            if type(layer) is _Linear
            and factor.spec.matmul is None
            and not self.exact
        }
        for child in self.module.modules():
            if not isinstance(child, SideBySide):
                continue
            layers = [child._modules.get(each) for each in child.side_by_side]
            found = [layer for layer in layers if layer in plain]
            if not child.only_reader or len(found) < len(layers):
                child.joint_product = None
            else:
                own = tuple(factors[layer] for layer in found)
                joint = partial(self._joint_product, found, own)
                child.joint_product = joint

    def _joint_product(
        self,
        layers: Sequence[nn.Module],
        factors: Sequence[_Factor],
        x: Tensor,
    ) -> Sequence[Tensor] | None:
        """The outputs of layers on x, or None where they must be called separately."""
        # Same conditions as for a single product. Hooks must see each layer's own call.
        needed = x.requires_grad and torch.is_grad_enabled() and x.dim() > 1
        if not needed or any(map(has_hooks, layers)):
            return None
        biases = [layer._parameters["bias"] for layer in layers]
        found: Sequence[Tensor] = _JointProduct.call(
            x, factors, self.pending, *biases
        )
        return found

    def forward(
        self,
        microbatch: int,
        bundle: Bundle,
        batch: Mapping[str, Tensor],
        *,
        keep: bool,
        selected: Selected | None = None,
    ) -> Bundle:
        """Run the piece; returns its output with the values that pass it by.

        With `keep`, also keep what the backward needs. With `selected`, call it first
        without `keep` and then with it: the first forward keeps some values in
        `selected`, and the second computes the rest from them.

        A piece takes the names of its forward's arguments, from the bundle or else from
        the batch. Its first argument is `x` if the bundle has nothing of its name. The
        rest of the bundle passes it by.
        """
        taken = self._taken(bundle, batch)
        mine = {name: bundle[name] for name in taken.mine}
        past = {name: bundle[name] for name in taken.past}
        named = {name: batch[name] for name in taken.named}
        if not keep and selected is None:
            with torch.no_grad():
                return past | self._call(mine, named)
        kept = _Kept({}, self.leaf, past=taken.past)
        if keep and self.graphs is not None:
            # Graphs are compiled for the strides of a slot's tensors.
            mine = {name: x.contiguous() for name, x in mine.items()}
            named = {name: x.contiguous() for name, x in named.items()}
            kept.shapes = key_of(mine, named)
            kept.slot = self.graphs.slot(mine, named)
            if kept.slot is not None:
                self.kept[microbatch] = kept
                return past | kept.slot.forward(mine, named)
        self.pending = kept.pending if self.splits else None
        # Nothing has to be packed: autograd saves tensors as it always does.
        if selected is None and not self.packs and torch.is_grad_enabled():
            out = self.run_forward(mine, named, kept.into)
        else:
            # The second of selective recomputation's forwards keeps its graph.
            again = (
                nullcontext()
                if selected is None
                else (giving if keep else keeping)(selected)
            )
            # What belongs to the batch is not offloaded.
            stays = (
                {storage_of(x) for x in named.values()}
                if self.offloads
                else set[int]()
            )
            with torch.enable_grad(), self._packing(kept.boxes, stays), again:
                out = self.run_forward(mine, named, kept.into)
        # The attribute would keep the list alive after its weight gradients are
        # computed.
        self.pending = None
        if keep:
            kept.roots = {
                name: get_gradient_edge(y)
                for name, y in out.items()
                if y.requires_grad
            }
            if self.last:
                # Zeros, because a view would keep the output's storage alive.
                kept.like = torch.zeros_like(out["x"].detach())
            self.kept[microbatch] = kept
        # A chooser's loss terms go no further: backward starts from their roots.
        return past | {
            name: y.detach() for name, y in out.items() if name not in TERMS
        }

    def _taken(self, bundle: Bundle, batch: Mapping[str, Tensor]) -> _Taken:
        """The tensors that a piece takes from a bundle and a batch with these names."""
        key = tuple(bundle), tuple(batch)
        if (known := self.known.get(key)) is None:
            names = (
                self.takes
                if self.first or self.takes[0] in bundle
                else ("x", *self.takes[1:])
            )
            # A piece that takes every entry may get one of the name of its activations.
            every = tuple(batch) if EVERY in names else ()
            mine = tuple(name for name in names if name in bundle)
            others = (
                name for name in names if name in batch and name not in mine
            )
            named = every or tuple(others)
            past = tuple(name for name in bundle if name not in mine)
            known = self.known[key] = _Taken(mine, named, past)
        return known

    def _call(self, mine: Bundle, named: Bundle) -> Bundle:
        # The first input goes by position, the others by name.
        x = None
        if mine:
            first = next(iter(mine))
            x = mine[first]
            others = {name: y for name, y in mine.items() if name != first}
            named = {**others, **named}
        if self.compiled:
            y = self.compiled(x, named, partial(self._take, self.pending))
        else:
            y = self.module(**named) if x is None else self.module(x, **named)
        return {"x": y} if isinstance(y, Tensor) else dict(y)

    def _take(
        self,
        pending: list[_PendingGradient] | None,
        factors: Sequence[Factors],
    ) -> None:
        """Accept the factors of weight gradients from a compiled backward."""
        for factor in factors:
            unit, name = self.owners[factor.weight]
            one = _PendingGradient(unit, name, *factor[1:])
            one.contribute() if pending is None else pending.append(one)

    def run_forward(self, mine: Bundle, named: Bundle, into: Bundle) -> Bundle:
        """Run the module on a piece's inputs, whose gradients will go to `into`."""
        return self._call(self._edges(mine, into), named)

    def run_backward(
        self,
        roots: Sequence[GradientEdge],
        gradients: Sequence[Tensor],
        *,
        keep: bool = False,
    ) -> None:
        """Run autograd; with `keep`, keep its graph and all that it saves."""
        # torch.autograd.backward ends in this call. Its Python code before costs some
        # 10 us a call, and the engine checks its arguments itself. A compiled backward
        # needs some of that code.
        run = run_compiled_backward if self.compiled else _engine.run_backward
        run(tuple(roots), tuple(gradients), keep, False, (), True, True)

    def _edges(self, mine: Bundle, into: Bundle) -> Bundle:
        edges = dict(mine)
        for name, x in mine.items():
            # Indices and counts have no gradient, so they enter as they are.
            if x.is_floating_point():
                edges[name] = _Edge.call(x.detach(), self.leaf, into, name)
        return edges

    def seed(self, microbatch: int, scale: Tensor) -> Bundle:
        """The gradients of the losses with which the last piece's backward starts."""
        like = self.kept[microbatch].like
        own = scale.view(()).to(like.dtype).expand_as(like)
        others = {
            name: own * (each.share * each.factor)
            for name, each in self.extra_losses.items()
        }
        return {"x": own, **others}

    def backward(self, microbatch: int, gradients: Bundle) -> Bundle:
        """Add to units' gradients and return the inputs'; frees kept values."""
        kept = self.kept.pop(microbatch)
        self._run(microbatch, kept, gradients)
        # Some microbatches of a schedule may have a whole backward although others
        # split it into I and W.
        if kept.pending:
            self._contribute(kept)
        return self._passed(kept, gradients)

    def input_gradient(self, microbatch: int, gradients: Bundle) -> Bundle:
        """Return the gradients of the inputs, postponing the weight gradients.

        Those of norms and biases cost nothing and are added here. A piece without an
        input has only weight gradients: its backward is postponed as a whole.
        """
        kept = self.kept[microbatch]
        if self.first:
            kept.whole = lambda: self._run(microbatch, kept, gradients)
            return {}
        self._run(microbatch, kept, gradients)
        # The graph is spent. Only the factors in `kept.pending` are still needed.
        kept.roots = {}
        kept.boxes.clear()
        return self._passed(kept, gradients)

    @torch.no_grad()
    def _contribute(self, kept: _Kept) -> None:
        for pending in kept.pending:
            pending.contribute()

    @torch.no_grad()
    def weight_gradient(self, microbatch: int) -> None:
        """Compute postponed weight gradients, one matmul each, into flat ones."""
        kept = self.kept.pop(microbatch)
        for unit in self.trained:
            unit.open(self.number, microbatch)
        # The first piece has only weight gradients: its whole backward runs here.
        if kept.whole:
            kept.whole()
        self._contribute(kept)

    def _run(self, microbatch: int, kept: _Kept, gradients: Bundle) -> None:
        for unit in self.trained:
            unit.open(self.number, microbatch)
        if kept.slot is not None:
            assert self.graphs is not None
            kept.into = kept.slot.backward(gradients)
            self.graphs.release(kept.slot)
            return
        # An output that no later piece used has no gradient.
        roots = {
            name: root
            for name, root in kept.roots.items()
            if name in gradients
        }
        if roots:
            own = [gradients[name] for name in roots]
            if self.graphs is None:
                self.run_backward([*roots.values()], own)
            else:
                self.graphs.warm_up([*roots.values()], own, kept.shapes)

    def _passed(self, kept: _Kept, gradients: Bundle) -> Bundle:
        past = {
            name: gradients[name] for name in kept.past if name in gradients
        }
        # `kept` may outlive this call, with pending weight gradients alone.
        into, kept.into = kept.into, {}
        return past | into

    def leave(self, microbatch: int) -> None:
        """Move the kept activations of a forward to the host."""
        for box in self.kept[microbatch].boxes:
            box.leave()

    def come_back(self, microbatch: int) -> None:
        for box in self.kept[microbatch].boxes:
            box.come_back()

    def _packing(
        self, boxes: list[Box], stays: Collection[int]
    ) -> AbstractContextManager[Any]:
        """Pack the tensors that autograd saves.

        Storages in `stays` belong to the batch. Other pieces need them too, so they are
        not offloaded.
        """
        if not self.packs:
            return nullcontext()
        # Weights are known by their storage, so views of them are found too.
        homes = {u.storage(): u for u in self.units}
        seen: dict[tuple[Any, ...], Box] = {}

        def pack(tensor: Tensor) -> Tensor | _Packed | Box:
            if self.compiled and type(tensor) not in (Tensor, nn.Parameter):
                return tensor  # a graph is being traced
            storage = storage_of(tensor)
            unit = homes.get(storage)
            if unit is not None:
                offset = int(tensor.storage_offset())
                return _Packed(unit, offset, tensor.shape, tensor.stride())
            if not self.offloads or storage in stays:
                return tensor
            # A tensor that is saved twice leaves for the host once.
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
    # By now the unit may be in another buffer, at the same offset.
    return buffer.as_strided(packed.shape, packed.stride, packed.offset)
