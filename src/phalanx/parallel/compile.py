"""Compiled pieces: one graph for each kind of piece, with the weights as its arguments.

Pieces of one class share a function given to `torch.compile`. Weights and buffers are
arguments of its graph, so equal blocks share one graph. Pieces that differ in what
their forward reads are compiled anew.

The matmuls of weight gradients stay outside, as they add to the flat gradient, at once
or in `W`. For that, a matmul has two *taps*: stand-ins without memory for its input and
its output. The compiled backward returns the two factors as the taps' gradients. Groups
are opaque operations in a graph. The loss, which overwrites the logits, runs between
graphs.
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
from .products import MatmulSpec, into_input, multiply
from .recompute import is_kept
from .tensor import VocabularyCrossEntropy

Named = Mapping[str, Tensor]
_lock = threading.Lock()
# Environment variable that names torch.compile's backend, for tests.
BACKEND = "PHALANX_COMPILE_BACKEND"
_LOSSES = CrossEntropy, VocabularyCrossEntropy
# The graphs of a kind. Beyond this number torch would run it eagerly, without a warning.
_ENTRIES = 64


class Graphs(NamedTuple):
    """The number of graphs compiled in this process.

    A kind of piece needs one graph with gradients and, if it also runs without, a
    second. All others are `recompiles`.
    """

    compiled: int
    recompiles: int


class Factors(NamedTuple):
    """The two factors of a weight gradient."""

    weight: nn.Parameter
    x: Tensor  # (..., in)
    gradient: Tensor  # (..., out)
    spec: MatmulSpec


_counts: Counter[tuple[type[nn.Module], str, bool]] = Counter()


def graphs() -> Graphs:
    return Graphs(_counts.total(), _counts.total() - len(_counts))


def refuse_uncompiled(device: torch.device) -> None:
    """Raise a LayoutError if this machine cannot compile."""
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
                "compile needs Triton to make GPU kernels, and Triton is not installed or does not"
                " support this GPU. Install the triton package, or leave compile out of the layout."
            )


class _TappedProduct(torch.autograd.Function):
    """A matmul whose backward returns factors of the weight's gradient to taps."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, weight: Tensor, *more: Any
    ) -> Tensor:
        # The taps are inputs only so that backward can return gradients for them.
        _x_tap, _y_tap, scales, spec = more
        ctx.save_for_backward(x, weight, scales)
        ctx.biased, ctx.spec = bias is not None, spec
        return multiply(x, weight, bias, spec._replace(scales=scales))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scales = ctx.saved_tensors
        into = into_input(gradient, weight, ctx.spec._replace(scales=scales))
        # (..., out) summed over all but the last dim
        bias = gradient.flatten(0, -2).sum(0) if ctx.biased else None
        # The factors x and gradient go to the taps, which stand in for them in the
        # graph.
        return into, bias, None, x, gradient, None, None


class _Taps(torch.autograd.Function):
    """Stand-ins of given shapes. Their gradients go to `take`."""

    @staticmethod
    def forward(
        ctx: Any,
        leaf: Tensor,
        take: Callable[[Sequence[Tensor]], None],
        shapes: Sequence[tuple[torch.Size, torch.dtype]],
    ) -> tuple[Tensor, ...]:
        ctx.take = take
        return tuple(
            # `expand` of one element: a shape without memory
            leaf.new_zeros((), dtype=dtype).expand(size)
            for size, dtype in shapes
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        # Called once, by autograd, when both factors of every matmul are there.
        ctx.take(gradients)
        return None, None, None


def _product(
    owner: Any, spec: MatmulSpec, x: Tensor, bias: Tensor | None = None
) -> Tensor:
    """The product with a module's weight, as a compiled forward computes it."""
    if owner.taps is None:
        return multiply(
            x, owner.weight, bias, spec._replace(scales=owner.scales)
        )
    args = x, bias, *owner.taps, owner.scales, spec
    y: Tensor = _TappedProduct.apply(*args)  # type: ignore[no-untyped-call]
    return y


class _Tapped(NamedTuple):
    """A module whose matmul has taps, and the taps' shapes."""

    owner: Any
    spec: MatmulSpec
    shapes: tuple[tuple[torch.Size, torch.dtype], ...]


class CompiledModule:
    """A piece's module, compiled and called like the module.

    When backward has computed the input's gradient, `take` receives the factors of the
    weight gradients.
    """

    def __init__(
        self,
        module: nn.Module,
        mode: str,
        device: torch.device,
        *,
        selective: bool = False,
    ) -> None:
        self.module, self.device = module, device
        self.owners: list[tuple[Any, MatmulSpec]] = []
        # A loss at the very end stays out of the graph: it overwrites its logits.
        self.loss: Callable[..., Tensor] | None = None
        # By the inputs' names, shapes and dtypes, and by which need a gradient.
        self.known: dict[tuple[Any, ...], list[_Tapped]] = {}
        self.function = compiled_call(type(module), mode, selective)

    def add(self, owner: Any, spec: MatmulSpec) -> None:
        """Add a module that multiplies by its `weight` in `weight_product`."""
        # Scales change, so they are an argument of the graph and are kept in the
        # module.
        owner.taps, owner.scales = None, spec.scales
        spec = spec._replace(scales=None)
        owner.weight_product = partial(_product, owner, spec)
        self.owners.append((owner, spec))

    def __call__(
        self,
        x: Tensor | None,
        named: Named,
        take: Callable[[list[Factors]], None],
    ) -> Tensor | Mapping[str, Tensor]:
        inputs = {**({} if x is None else {"": x}), **named}
        key = tuple(
            (name, y.shape, y.dtype, y.requires_grad)
            for name, y in inputs.items()
        )
        if key not in self.known:
            self.known[key] = self._trace(x, named)
        tapped = self.known[key] if torch.is_grad_enabled() else []

        def taken(gradients: Sequence[Tensor]) -> None:
            # Each matmul has two taps, whose gradients are its two factors.
            pairs = zip(tapped, gradients[::2], gradients[1::2], strict=True)
            take(
                [
                    Factors(o.owner.weight, x, gradient, o.spec)
                    for o, x, gradient in pairs
                ]
            )

        if tapped:
            leaf = torch.zeros((), device=self.device, requires_grad=True)
            shapes = [shape for each in tapped for shape in each.shapes]
            taps = _Taps.apply(leaf, taken, shapes)  # type: ignore[no-untyped-call]
            # Two taps for each matmul: of its input and of its output.
            for each, *pair in zip(tapped, taps[::2], taps[1::2], strict=True):
                # A parameter would get zeros as its gradient from the graph. `vars` is
                # faster than setattr.
                vars(each.owner)["taps"] = each.owner.weight.detach(), *pair
        try:
            y = self.function(self.module, x, named)
        finally:
            for each in tapped:
                vars(each.owner)["taps"] = (
                    None  # frees what the taps' graph saves
                )
        return self.loss(*y) if self.loss else y

    def _trace(self, x: Tensor | None, named: Named) -> list[_Tapped]:
        """Find the shapes of each matmul's taps by a run on fake tensors.

        A matmul that is called twice, or whose input needs no gradient, has no taps:
        autograd adds its weight's gradient. A loss at the very end of the piece stays
        out of the graph from here on.
        """
        from torch._subclasses.fake_tensor import FakeTensorMode

        calls: dict[Any, list[_Tapped]] = {
            owner: [] for owner, *_ in self.owners
        }
        mode = FakeTensorMode(allow_non_fake_inputs=True)

        def fake(x: Tensor) -> Tensor:
            return mode.from_tensor(x.detach()).requires_grad_(x.requires_grad)

        def product(
            owner: Any, spec: MatmulSpec, x: Tensor, bias: Tensor | None = None
        ) -> Tensor:
            # Detached, as a gradient that exists already may have another dtype.
            weight = owner.weight.detach().requires_grad_(
                owner.weight.requires_grad
            )
            y = multiply(x, weight, bias, spec._replace(scales=owner.scales))
            taps = (
                x.requires_grad
                and x.dim() > 1
                and weight.dim() == 2
                and weight.requires_grad
            )
            shapes = ((x.shape, x.dtype), (y.shape, y.dtype)) if taps else ()
            calls[owner].append(_Tapped(owner, spec, shapes))
            return y

        # 1. Replace matmuls by ones that note their shapes, and losses by zeros.
        losses: list[Any] = [
            m for m in self.module.modules() if isinstance(m, _LOSSES)
        ]
        losses = [] if self.loss else losses
        before = [loss.forward for loss in losses]
        sums: list[Tensor] = []

        def nothing(logits: Tensor, targets: Tensor) -> Tensor:
            sums.append(logits.new_zeros(()))
            return sums[-1]

        try:
            for owner, spec in self.owners:
                owner.weight_product = partial(product, owner, spec)
            for loss in losses:
                loss.forward = nothing
            # 2. Run the piece once without data; groups are opaque, so nothing is sent.
            with torch.enable_grad(), mode, regions.opaque():
                rest = {name: fake(y) for name, y in named.items()}
                y = _call(self.module, None if x is None else fake(x), rest)
        # 3. Put the matmuls back, whatever happened.
        finally:
            for loss, forward in zip(losses, before, strict=True):
                loss.forward = forward
            for owner, spec in self.owners:
                owner.weight_product = partial(_product, owner, spec)
        # 4. A loss whose zero is what the piece returned is the piece's last operation.
        if len(sums) == 1 and y is sums[0] and len(losses) == 1:
            self.loss, losses[0].forward = losses[0].forward, _both
        return [
            each[0]
            for each in calls.values()
            if len(each) == 1 and each[0].shapes
        ]


def _both(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return logits, targets


def _call(module: nn.Module, x: Tensor | None, named: Named) -> Any:
    return module(**named) if x is None else module(x, **named)


def _call_recomputing(
    module: nn.Module, x: Tensor | None, named: Named
) -> Any:
    """Call a piece with selective recomputation as part of the graph."""
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    more: Any = {
        "use_reentrant": False,
        "preserve_rng_state": False,
        "context_fn": contexts,
    }
    return checkpoint(_call, module, x, named, **more)


def _policy(
    context: Any, op: Any, *args: Any, **more: Any
) -> CheckpointPolicy:
    saved = is_kept(op, args)
    return (
        CheckpointPolicy.MUST_SAVE
        if saved
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


def compiled_call(kind: Any, mode: str, selective: bool) -> Any:
    """The compiled call of a class of modules; a kind compiles at its first call."""
    import torch._dynamo

    # Thread-local, so it is set on each call.
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _ENTRIES)
    with _lock:
        return _compiled(
            kind, mode, selective, os.environ.get(BACKEND, "inductor")
        )


@cache
def _compiled(kind: Any, mode: str, selective: bool, backend: str) -> Any:
    inner: Any = torch._dynamo.lookup_backend(backend)
    if backend == "inductor":
        # CUDA graphs would copy the weights, as their buffers change.
        options = {"max_autotune": True} if mode == COMPILE_MAX else None
        inner = partial(torch._inductor.compile, options=options)

    def counting(graph: Any, inputs: Any) -> Any:
        _counts[kind, mode, torch.is_grad_enabled()] += 1
        return inner(graph, inputs)

    # A code object of its own: torch keeps compiled graphs with it and searches them at
    # each call.
    plain = _call_recomputing if selective else _call
    function = FunctionType(
        plain.__code__.replace(co_name=f"call_{kind.__name__}"), globals()
    )
    compiled: Any = torch.compile
    # The shapes of a run are fixed, so graphs need not be dynamic.
    return compiled(function, backend=counting, dynamic=False)
