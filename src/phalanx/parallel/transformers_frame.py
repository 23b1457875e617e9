"""Runs the forward of a transformers model piece by piece, by means of `frame.py`.

Attention reaches us through `ALL_ATTENTION_FUNCTIONS` and runs in a child `core`, which
context parallelism replaces.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..models import Core
from ..models.loss import CrossEntropy
from .frame import Frame, Key, OuterModules, Reached, Running, StandIn, stop
from .transformers_refused import refuse

ATTENTION = "phalanx"  # our name in their table of attention functions
# Arguments of their attention that `attend` may ignore: there is no cache, nothing is
# dropped, and the documents decide which tokens attend to which.
_NOTHING = (
    "dropout is_causal position_ids use_cache cache_position position_embeddings output_attentions"
    " output_hidden_states return_dict layer_idx past_key_values"
)


class InFloat64(TorchFunctionMode):
    """Computes in float64 what transformers' code computes in float32 or wider, such as
    norms.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        named = {
            k: torch.float64 if x is torch.float32 else x
            for k, x in (kwargs or {}).items()
        }
        return func(
            *(torch.float64 if x is torch.float32 else x for x in args),
            **named,
        )


class TransformersFrame(Frame):
    """A transformers model whose forward is called with buffers that this class
    creates.

    A module of another piece returns its input unchanged.
    """

    def __init__(self, causal: Any, base: Any) -> None:
        super().__init__()
        self.causal, self.base = causal, base
        self.dtype, self.made = (
            torch.float32,
            (torch.device("meta"), torch.float32),
        )
        # positions, documents
        self.shared: tuple[Tensor | None, Tensor | None] = None, None
        self.tuples = False  # a block returns (x, ...)

    def passed_by(self, key: Key, args: Any, kwargs: Any) -> Any:
        x = args[0] if args else next(iter(kwargs.values()))
        # A lookup of another piece: (B, T) becomes zeros (B, T, 1).
        if not x.is_floating_point():
            return x.new_zeros((*x.shape, 1), dtype=self.dtype)
        return (x,) if isinstance(key, int) and self.tuples else x

    def run(
        self,
        running: Running,
        dtype: torch.dtype,
        positions: Tensor,
        documents: Tensor | None = None,
        tokens: Tensor | None = None,
        *,
        whole: bool = False,
    ) -> Any:
        """Run their forward with these modules in it.

        Returns the value with which a module stopped it, or else its output.
        """
        self.dtype, self.shared = dtype, (positions, documents)
        wide = torch.promote_types(dtype, torch.float32)
        # Their code casts to float32 in places; in a float64 trial it must not.
        with InFloat64() if wide == torch.float64 else nullcontext():
            self._make_buffers(positions.device, wide)
            given: dict[str, Any] = {"input_ids": tokens}
            # Another piece looks up the tokens. Only this tensor's shape and dtype are
            # used.
            if tokens is None:
                given = {
                    "inputs_embeds": positions.new_zeros(
                        (*positions.shape, 1), dtype=dtype
                    )
                }
            model = self.causal if whole else self.base
            given |= {"position_ids": positions, "use_cache": False}
            try:
                return self.until_reached(running, partial(model, **given))
            finally:
                # Emptied, so that a batch's tensors do not outlive the call.
                self.shared = None, None

    def _make_buffers(self, device: torch.device, wide: torch.dtype) -> None:
        """Create their buffers, such as rope's frequencies, which are neither on meta
        nor in files.
        """
        if self.made == (device, wide):
            return
        self.made = device, wide
        for module in self.causal.modules():
            if not isinstance(module, StandIn):
                make_tables(self.causal, module, device, wide)


def make_tables(
    causal: Any, module: nn.Module, device: torch.device, wide: torch.dtype
) -> None:
    """Recreate the buffers of one of their modules, filled by their own code."""
    if not module._buffers:
        return
    for key, x in module._buffers.items():
        if x is not None:
            dtype = wide if x.is_floating_point() else x.dtype
            module._buffers[key] = torch.empty_like(
                x, dtype=dtype, device=device
            )
    with torch.no_grad():
        causal._init_weights(module)


class _Outer(OuterModules):
    """Modules of theirs around the blocks."""

    frame: TransformersFrame


class TransformersEmbed(_Outer):
    """The part of the transformers forward before its first block."""

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        dtype = next(self.parameters()).dtype
        x: Tensor = self.frame.run(
            self.running(0, stop), dtype, positions, tokens=tokens
        )
        return x


class TransformersHead(_Outer):
    """The part of the transformers forward after its last block, and the summed loss."""

    def __init__(
        self,
        frame: TransformersFrame,
        children: Mapping[str, nn.Module],
        last: int,
    ) -> None:
        super().__init__(frame, children)
        self.last, self.loss = last, CrossEntropy()

    def logits(self, x: Tensor, positions: Tensor) -> Tensor:
        # The last block gives x; everything after it is this piece's.
        def end(*args: Any, **kwargs: Any) -> Any:
            return (x,) if self.frame.tuples else x

        running = self.running(self.last, end)
        y: Tensor = self.frame.run(
            running, x.dtype, positions, whole=True
        ).logits
        return y

    def forward(self, x: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
        loss: Tensor = self.loss(self.logits(x, positions), targets)
        return loss


def _forward(
    self: Any, x: Tensor, positions: Tensor, documents: Tensor | None = None
) -> Tensor:
    """Run one of their blocks as a piece: its own forward, with the arguments that
    their model builds.
    """

    def block(*args: Any, **kwargs: Any) -> None:
        # Without their `hidden_states`: it comes from stand-ins, and x is the real one.
        kwargs.pop("hidden_states", None)
        y = self.theirs(x, *args[1:], **kwargs)
        raise Reached(y[0] if isinstance(y, tuple) else y)

    y: Tensor = self.frame.run(
        {self._number: block}, x.dtype, positions, documents
    )
    return y


@functools.cache
def _block_class(kind: Any) -> type[nn.Module]:
    return type(
        kind.__name__, (kind,), {"forward": _forward, "theirs": kind.forward}
    )


def as_block(block: Any, number: int) -> None:
    """Turn one of their blocks into a piece.

    Only its class changes, so names of weights and references from their model remain
    valid.
    """
    kind: Any = type(block)
    block.__class__ = _block_class(kind)
    block._number = number


# ---- attention


def attend(
    module: Any,
    query: Tensor,  # (B, heads, T, head_dim)
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Entry in transformers' table of attention functions: calls the module's child
    `core`.

    The first call creates that child.
    """
    # The first call sees all arguments: whatever ours does not know is refused here.
    if "core" not in module._modules:
        unknown = sorted(
            k
            for k, x in more.items()
            if k not in _NOTHING.split() and _is_set(x)
        )
        refuse(
            {
                f"its attention takes {', '.join(unknown)}": unknown,
                "its attention has a mask of its own": attention_mask
                is not None,
                "tokens attend to later ones": getattr(
                    module, "is_causal", True
                )
                is False
                or more.get("is_causal") is False,
                "keys and values differ in width": key.shape[-1]
                != value.shape[-1],
            }
        )
        module.core = Core(sliding_window or 0, softcap or 0.0)
        plain = 1 / math.sqrt(query.shape[-1])
        module.query_scale = 1.0 if scaling is None else float(scaling) / plain
        module.heads_seen = query.shape[1], key.shape[1], query.shape[-1]
    # (B, T, heads, head_dim)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if not math.isclose(module.query_scale, 1.0, rel_tol=1e-15):
        q = q * module.query_scale  # the core divides by sqrt(head_dim)
    return module.core(q, k, v, *module.frame.shared), None


def _is_set(value: Any) -> bool:
    return isinstance(value, Tensor) or bool(value)
