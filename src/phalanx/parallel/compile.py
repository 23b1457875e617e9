"""Pieces as compiled graphs: one for each kind of piece, with its weights as arguments.

Pieces of one class share a function given to `torch.compile`. Weights and buffers are arguments of its
graph, so equal blocks share one; where pieces differ in what their forward reads, it is compiled anew.
Products of a weight's gradient stay outside, as they go into the flat gradient, at once or in `W`: a
product has two *taps*, stand-ins without memory for its input and its output, and the compiled
backward returns as their gradients the two factors. Groups are opaque operations inside a graph, and
the loss, which writes over the logits, is between graphs.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ..comm import regions
from ..layout import LayoutError
from ..layout.choices import COMPILE_MAX
from ..models.loss import CrossEntropy
from .products import How, into_input, multiply
from .recompute import is_kept
from .tensor import VocabularyCrossEntropy

Named = Mapping[str, Tensor]
_lock = threading.Lock()
# in the environment: which of torch.compile's, for tests
BACKEND = "PHALANX_COMPILE_BACKEND"
_LOSSES = CrossEntropy, VocabularyCrossEntropy
_ENTRIES = 64  # graphs of a kind, before torch would run it eagerly without a word


class Graphs(NamedTuple):
    """Compiled graphs of this process. A kind of piece needs one graph with gradients and, if it
    also runs without, another; all further ones are `recompiles`."""

    compiled: int
    recompiles: int


class Factors(NamedTuple):
    """The two factors of a weight gradient."""

    weight: nn.Parameter
    x: Tensor  # (..., in)
    gradient: Tensor  # (..., out)
    how: How


_counts: Counter[tuple[type[nn.Module], str, bool]] = Counter()


def graphs() -> Graphs:
    return Graphs(_counts.total(), _counts.total() - len(_counts))


def refuse_uncompiled(device: torch.device) -> None:
    """Raise a LayoutError where nothing here can compile."""
    if os.environ.get(BACKEND, "inductor") != "inductor":
        return
    names = (os.environ.get("CXX", "g++"), "g++", "clang++")
    if not any(map(shutil.which, names)):
        raise LayoutError(
            "compile needs a C++ compiler, and there is no g++ or clang++ on the path."
            " Install one, or leave compile out of the layout."
        )
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise LayoutError(
                "compile needs Triton to make kernels for a GPU, and it is not installed or does not"
                " know this one. Install the triton package, or leave compile out of the layout."
            )


class _TappedProduct(torch.autograd.Function):
    """A product whose backward gives the factors of the weight's gradient to the taps."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, weight: Tensor, *more: Any
    ) -> Tensor:
        _x_tap, _y_tap, scales, how = more
        ctx.save_for_backward(x, weight, scales)
        ctx.biased, ctx.how = bias is not None, how
        return multiply(x, weight, bias, how._replace(scales=scales))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scales = ctx.saved_tensors
        into = into_input(gradient, weight, ctx.how._replace(scales=scales))
        bias = gradient.flatten(0, -2).sum(0) if ctx.biased else None
        return into, bias, None, x, gradient, None, None


class _Taps(torch.autograd.Function):
    """Stand-ins of some shapes; `take` gets their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        leaf: Tensor,
        take: Callable[[Sequence[Tensor]], None],
        shapes: Sequence[tuple[torch.Size, torch.dtype]],
    ) -> tuple[Tensor, ...]:
        ctx.take = take
        return tuple(
            leaf.new_zeros((), dtype=dtype).expand(size) for size, dtype in shapes
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.take(gradients)
        return None, None, None


def _product(owner: Any, how: How, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product with a module's weight, as a compiled forward calls it."""
    if owner.taps is None:
        return multiply(x, owner.weight, bias, how._replace(scales=owner.scales))
    args = x, bias, *owner.taps, owner.scales, how
    y: Tensor = _TappedProduct.apply(*args)  # type: ignore[no-untyped-call]
    return y


class _Tapped(NamedTuple):
    """A module whose product has taps, and their shapes."""

    owner: Any
    how: How
    shapes: tuple[tuple[torch.Size, torch.dtype], ...]


class CompiledModule:
    """A piece's module, called as the module is. `take` gets the factors of a weight's gradient when
    backward has computed the input's."""

    def __init__(
        self,
        module: nn.Module,
        mode: str,
        device: torch.device,
        *,
        selective: bool = False,
    ) -> None:
        self.module, self.device = module, device
        self.owners: list[tuple[Any, How]] = []
        self.loss: Callable[..., Tensor] | None = None
        self.known: dict[tuple[Any, ...], list[_Tapped]] = {}
        self.function = compiled_call(type(module), mode, selective)

    def add(self, owner: Any, how: How) -> None:
        """A module that multiplies by its `weight` in `weight_product`."""
        # Scales are an argument of the graph, so they stand in the module.
        owner.taps, owner.scales = None, how.scales
        how = how._replace(scales=None)
        owner.weight_product = partial(_product, owner, how)
        self.owners.append((owner, how))

    def __call__(
        self, x: Tensor | None, named: Named, take: Callable[[list[Factors]], None]
    ) -> Tensor | Mapping[str, Tensor]:
        inputs = {**({} if x is None else {"": x}), **named}
        key = tuple(
            (name, y.shape, y.dtype, y.requires_grad) for name, y in inputs.items()
        )
        if key not in self.known:
            self.known[key] = self._trace(x, named)
        tapped = self.known[key] if torch.is_grad_enabled() else []

        def taken(gradients: Sequence[Tensor]) -> None:
            pairs = zip(tapped, gradients[::2], gradients[1::2], strict=True)
            take(
                [
                    Factors(o.owner.weight, x, gradient, o.how)
                    for o, x, gradient in pairs
                ]
            )

        if tapped:
            leaf = torch.zeros((), device=self.device, requires_grad=True)
            shapes = [shape for each in tapped for shape in each.shapes]
            taps = _Taps.apply(leaf, taken, shapes)  # type: ignore[no-untyped-call]
            for each, *pair in zip(tapped, taps[::2], taps[1::2], strict=True):
                # Of a parameter the graph would return zeros as gradient. `vars`: it takes less time.
                vars(each.owner)["taps"] = each.owner.weight.detach(), *pair
        try:
            y = self.function(self.module, x, named)
        finally:
            for each in tapped:
                vars(each.owner)["taps"] = None  # which lead to what backward needs
        return self.loss(*y) if self.loss else y

    def _trace(self, x: Tensor | None, named: Named) -> list[_Tapped]:
        """Shapes that each product takes and gives, from a run on fake tensors. A product that is
        called twice, or whose input needs no gradient, has no taps: autograd adds its weight's
        gradient.

        A loss at the very end of the piece stays out of the graph from here on.
        """
        from torch._subclasses.fake_tensor import FakeTensorMode

        calls: dict[Any, list[_Tapped]] = {owner: [] for owner, *_ in self.owners}
        mode = FakeTensorMode(allow_non_fake_inputs=True)

        def fake(x: Tensor) -> Tensor:
            return mode.from_tensor(x.detach()).requires_grad_(x.requires_grad)

        def product(
            owner: Any, how: How, x: Tensor, bias: Tensor | None = None
        ) -> Tensor:
            # Detached: a gradient that is there already may be of another dtype.
            weight = owner.weight.detach().requires_grad_(owner.weight.requires_grad)
            y = multiply(x, weight, bias, how._replace(scales=owner.scales))
            taps = (
                x.requires_grad
                and x.dim() > 1
                and weight.dim() == 2
                and weight.requires_grad
            )
            shapes = ((x.shape, x.dtype), (y.shape, y.dtype)) if taps else ()
            calls[owner].append(_Tapped(owner, how, shapes))
            return y

        losses: list[Any] = [m for m in self.module.modules() if isinstance(m, _LOSSES)]
        losses = [] if self.loss else losses
        before = [loss.forward for loss in losses]
        sums: list[Tensor] = []

        def nothing(logits: Tensor, targets: Tensor) -> Tensor:
            sums.append(logits.new_zeros(()))
            return sums[-1]

        try:
            for owner, how in self.owners:
                owner.weight_product = partial(product, owner, how)
            for loss in losses:
                loss.forward = nothing
            with torch.enable_grad(), mode, regions.opaque():
                rest = {name: fake(y) for name, y in named.items()}
                y = _call(self.module, None if x is None else fake(x), rest)
        finally:
            for loss, forward in zip(losses, before, strict=True):
                loss.forward = forward
            for owner, how in self.owners:
                owner.weight_product = partial(_product, owner, how)
        if len(sums) == 1 and y is sums[0] and len(losses) == 1:
            self.loss, losses[0].forward = losses[0].forward, _both
        return [each[0] for each in calls.values() if len(each) == 1 and each[0].shapes]


def _both(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return logits, targets


def _call(module: nn.Module, x: Tensor | None, named: Named) -> Any:
    return module(**named) if x is None else module(x, **named)


def _again(module: nn.Module, x: Tensor | None, named: Named) -> Any:
    """Calls a piece with selective recomputation as a part of the graph."""
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    more: Any = {
        "use_reentrant": False,
        "preserve_rng_state": False,
        "context_fn": contexts,
    }
    return checkpoint(_call, module, x, named, **more)


def _policy(context: Any, op: Any, *args: Any, **more: Any) -> CheckpointPolicy:
    saved = is_kept(op, args)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def compiled_call(kind: Any, mode: str, selective: bool) -> Any:
    """The function that calls modules of a class, compiled for each kind when it is called first."""
    import torch._dynamo

    config: Any = torch._dynamo.config  # each thread has its own
    config.recompile_limit = max(config.recompile_limit, _ENTRIES)
    with _lock:
        return _compiled(kind, mode, selective, os.environ.get(BACKEND, "inductor"))


@cache
def _compiled(kind: Any, mode: str, selective: bool, backend: str) -> Any:
    inner: Any = torch._dynamo.lookup_backend(backend)
    if backend == "inductor":
        # Graphs of CUDA would copy the weights, which lie in buffers that change.
        options = {"max_autotune": True} if mode == COMPILE_MAX else None
        inner = partial(torch._inductor.compile, options=options)

    def counting(graph: Any, inputs: Any) -> Any:
        _counts[kind, mode, torch.is_grad_enabled()] += 1
        return inner(graph, inputs)

    # A code object of its own: what torch has compiled hangs on it, and is searched at each call.
    plain = _again if selective else _call
    function = FunctionType(
        plain.__code__.replace(co_name=f"call_{kind.__name__}"), globals()
    )
    compiled: Any = torch.compile
    return compiled(function, backend=counting, dynamic=False)
