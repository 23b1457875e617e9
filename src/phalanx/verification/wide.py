"""Checks which operations of a rank have 16-bit results, and that its compute weights
are its own weights rounded.

In mixed precision, chosen operations have 16-bit results: matmuls, activations, sums of
the residual stream. Norms, angles, routers, losses, merges of partial results and sums
of gradients have 32 bits. A mistake in that choice changes a gradient by less than the
surrounding roundings, so comparing results cannot reveal it. Here every operation that
a rank executes in its first step is examined instead (in its first two if the optimizer
updates whole matrices: SOAP's first step has no update).

Not detected: a wrong value of the right dtype; torch's own backward, if the table has
its operation; the inside of a fused kernel, or of a composite operation of torch;
users' own models; compiled layouts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..models import Decoder, DeepMlp
from ..parallel import Model, Precision, Unit
from ..parallel.narrow import NarrowUnit
from .mixers import narrow_operations

HALVES = (torch.bfloat16, torch.float16)
_PACKAGE = "/phalanx/"  # last folder of a path to our source
_OWN = Path(__file__).parent.name

# operations that compute nothing
_MOVES = """
    _unsafe_view alias as_strided cat clone constant_pad_nd detach embedding empty empty_like empty_strided
    expand fill_ full full_like gather index index_put_ index_select lift_fresh masked_fill masked_fill_
    new_empty new_empty_strided new_full new_zeros ones ones_like permute repeat reshape scalar_tensor scatter
    scatter_ select select_backward slice slice_backward split split_with_sizes squeeze stack t transpose
    unbind unfold unsqueeze view zero_ zeros zeros_like
"""
MOVES = frozenset(_MOVES.split())

# Operations with 16-bit results, by the function that calls them: matmuls, activations,
# sums of the residual stream, and rounding of values computed in 32 bits (_to_copy,
# copy_).
_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
NARROW = {
    "models/attention.py:Attention.projected": "mul",
    "models/attention.py:Core.forward": _FLASH,
    # gates of attention and of shared experts, as in transformers
    "models/attention.py:HeadsAttention.forward": "mul sigmoid",
    "models/attention.py:LatentAttention.projected": "mul",
    "models/block.py:add_mlp": "add",
    "models/block.py:attend": "add",
    "models/ends.py:Embed.forward": "add",
    "models/ends.py:scaled": "mul",
    "models/experts_block.py:MergingPart.forward": "add",
    "models/dense.py:Mlp.forward": "gelu silu",
    **narrow_operations(),
    "models/experts.py:ExpertProducts.on_sorted": "addmm mm",
    "models/experts.py:Experts.with_terms": "add",
    "models/experts.py:Merge.weighted": "_to_copy",
    "models/experts.py:SharedGate.forward": "mm sigmoid",
    "models/experts.py:_Repeated.backward": "sum",
    "models/experts.py:_Share.forward": "div",
    "models/experts.py:_of_shared": "mul",
    "models/dense.py:gated": "add clamp gelu mul sigmoid silu",
    "models/kernels.py:_cpu": _FLASH,
    "models/kernels.py:_cpu_back": f"{_FLASH}_backward",
    "models/kernels.py:_block_gradients": "_to_copy copy_",
    "models/kernels.py:_in_blocks": "copy_",
    "models/kernels.py:sink_gradients": "_to_copy neg",
    "models/lora.py:Lora.forward": "mul",
    "models/adapters.py:AdaptedLinear.forward": "add",
    # the last product, its soft cap, and their gradients
    "models/loss.py:_logit_chunks": "div_ mm mul tanh_",
    "models/loss.py:_send_back": "copy_ mm tanh_backward",
    "models/loss.py:_write_gradient": "copy_",
    "models/loss.py:soft_cap": "div mul tanh",
    "models/mlp.py:Layer.forward": "gelu",
    "models/noise.py:Dropout.forward": "mul where",
    # in float16; its statistics have 32 bits
    "models/norm.py:LayerNorm.forward": "native_layer_norm",
    "models/norm.py:_LayerNormalized.backward": "_to_copy",
    "models/norm.py:_LayerNormalized.forward": "native_layer_norm",
    "models/norm.py:_RootMeanSquare.backward": "_to_copy",
    "models/norm.py:_RootMeanSquare.forward": "_to_copy",
    "models/rope.py:rotate": "_to_copy",
    "parallel/context.py:ring_attention": "_to_copy",
    "parallel/context.py:ring_gradients": "_to_copy",
    "parallel/data.py:Unit.contribute_part": "mm",
    "parallel/exact.py:ExactUnit.contribute_to_slot": "mm",
    # the bias of experts behind the sum over parts of a product
    "parallel/experts_parts.py:_PartProduct.backward": "mm sum",
    "parallel/experts_parts.py:_PartProduct.forward": "addmm mm",
    "parallel/experts_parts.py:_plus_biases": "add",
    "parallel/data.py:Unit.gather": "_to_copy",
    "parallel/data.py:Unit.load": "copy_",
    "parallel/data.py:Unit.refresh": "copy_",
    "parallel/data.py:_add_product": "mm",
    "parallel/products.py:into_input": "mm",
    # a bias, beside fp8 matmuls
    "parallel/products.py:multiply": "add addmm mm",
    # weights that travel in 8 bits, and matmuls with them, whose sums have 32
    "parallel/low_precision.py:_OfExpert.backward": "mm",
    "parallel/low_precision.py:largest_of": "abs amax",
    "parallel/low_precision.py:of_expert": "add",
    "parallel/low_precision.py:product": "_to_copy",
    "parallel/narrow.py:NarrowUnit._parts": "_to_copy",
    "parallel/narrow.py:NarrowUnit._rows": "copy_",
    "parallel/narrow.py:NarrowUnit.agree_scales": "copy_",
    # operations of autograd's own backward of all these
    "parallel/pieces.py:Piece.run_backward": (
        f"{_FLASH}_backward _to_copy add add_ div embedding_dense_backward gelu_backward index_add mm mul"
        " native_layer_norm_backward neg sigmoid_backward silu_backward sum tanh_backward where"
    ),
    # sums over the parts of a product, and products of a part with a shared weight
    "parallel/parts.py:_SpreadWeight.backward": "_to_copy",
    "parallel/parts.py:_linear": "addmm mm",
    # a whole linear layer, such as the join of multi-token prediction
    "parallel/parts.py:OverTime.each": "mm",
    "parallel/parts.py:add_in_tree": "add",
    "parallel/pieces.py:_JointProduct.backward": "add_ sum",
    "parallel/pieces.py:_Product.backward": "sum",
    "parallel/tensor.py:CutRMSNorm.forward": "_to_copy",
    "parallel/tensor.py:RowLinear.forward": "add",
    "parallel/tensor.py:VocabularyEmbedding.forward": "mul",
    "parallel/tensor.py:_plus_bias": "add",
    "comm/base.py:Group._part_in_tree": "add_",
}
# skipped: frames between a function and its operation
_BETWEEN = "/parallel/recompute.py"


class NarrowArithmetic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Examines each operation, and records the first one with a 16-bit result that is
    not in the table."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = ""
        # operations and code found in the table before
        self.known: set[tuple[Any, Any]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # The operation is run first, as its result is what counts.
        result = func(*args, **(kwargs or {}))
        if not self.found and _has_16_bits(result):
            # The caller of this method, and from there outwards.
            frame = _own_frame(sys._getframe(1))
            # By operation and code: a rank repeats the same few in every layer
            # and step.
            key = func, frame.f_code if frame else None
            if key not in self.known:
                self.known.add(key)
                self.found = _breach(func, frame)
        return result


def _has_16_bits(result: Any) -> bool:
    several = result if isinstance(result, list | tuple) else (result,)
    return any(isinstance(x, Tensor) and x.dtype in HALVES for x in several)


def _own_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of a function of this package."""
    while frame is not None:
        if _is_own(frame.f_code.co_filename):
            break
        frame = frame.f_back
    return frame


@cache  # asked for each frame below each operation
def _is_own(file: str) -> bool:
    return _PACKAGE in file and not file.endswith(_BETWEEN)


def _breach(func: Any, frame: FrameType | None) -> str:
    namespace, _, name = str(func).partition(".")
    name = name.partition(".")[0]
    # Kernels of our own and moves of data round nothing.
    if frame is None or namespace != "aten" or name in MOVES:
        return ""
    code = frame.f_code
    file = code.co_filename.rpartition(_PACKAGE)[2]
    if file.startswith(f"{_OWN}/") or (
        file.startswith("comm/") and name == "copy_"
    ):
        return ""  # groups copy the tensors that they transport
    # A function inside another counts as the outer one.
    function = code.co_qualname.partition(".<locals>")[0]
    if name in NARROW.get(f"{file}:{function}", "").split():
        return ""
    return (
        f"{file}: {function} computes {name} in 16 bits, which is not among the operations that may"
        " have so few (verification/wide.py)"
    )


def looked_at(
    model: Model, precision: Precision, device: torch.device
) -> NarrowArithmetic | None:
    """Return the mode that examines a rank's operations, for modules and kernels that
    the table covers."""
    built_in = isinstance(
        # Users' own modules may round where they like.
        getattr(model.draw, "__self__", None),
        Decoder | DeepMlp,
    )
    if not built_in or precision.compute not in HALVES or device.type != "cpu":
        return None
    return NarrowArithmetic()


def unrounded(units: Iterable[Unit]) -> Iterator[str]:
    """Yield units whose compute weights are not this rank's own weights rounded to
    nearest."""
    for unit in units:
        if unit.buffer is None or isinstance(unit, NarrowUnit):
            continue
        own = unit.buffer[unit.start : unit.start + unit.part]
        wanted = unit.home.to(own.dtype).to(own.device)
        # As bytes, as NaN differs from itself.
        if not torch.equal(own.view(torch.uint8), wanted.view(torch.uint8)):
            names = ", ".join(weight.name for weight in unit.order[:1])
            yield f"the weights of {names} that are computed with are not the rounded ones"
