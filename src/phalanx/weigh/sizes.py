"""What pieces keep, found by running them: on meta tensors over a wire that sends nothing.

No formula per model: the piece is the one that trains, cut as the layout cuts it. What is alive when
its forward has ended is what it keeps. Attention runs as the target device's own kernel, whose saved
tensors are not those of torch's decomposition on meta.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..layout import Layout
from ..program import Program, Sizes
from ..split import Model, Piece, Precision
from ..split.batch import edge_shape, microbatches
from ..split.holding import Holding, hold
from ..wire import TallyWorld
from .live import Live

__all__ = ["sizes_of"]

Batch = Mapping[str, Tensor]


class _CpuAttention(TorchFunctionMode):
    """Attention on meta by the kernel that a CPU really runs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        q, k, v = args
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, kwargs.get("is_causal", False), attn_mask=kwargs.get("attn_mask")
        )[0]


def sizes_of(
    make: Callable[[], Model],
    layout: Layout,
    program: Program,
    batch: Batch,
    precision: Precision,
) -> Sizes:
    """The bytes that every piece and unit of a layout takes, for its largest microbatch.

    `batch` is a step's batch, on any device: only its shapes and dtypes count.
    """
    kept = [0.0] * program.pieces
    inputs = [0.0] * program.pieces
    after = [0.0] * program.pieces
    units: dict[str, list[float]] = {
        name: [0.0] * program.pieces for name in ("home", "gathered", "gradient", "shard")
    }
    for row in range(len(program.rows)):
        rank = program.owner.index(row)
        world = TallyWorld(rank, layout.ranks)
        model = make()
        held = hold(world, layout, model, program, precision=precision)
        own = microbatches(_on_meta(batch), layout, held.place["dp"], held.place["cp"])[0]
        _run(held, model, own, layout, kept, inputs, after)
        for number, unit in held.units.items():
            units["home"][number] = unit.home.numel() * unit.home.itemsize
            units["gathered"][number] = (
                0.0 if unit.same else unit.numel * precision.compute.itemsize
            )
            units["gradient"][number] = unit.numel * precision.reduce.itemsize
            units["shard"][number] = unit.part * precision.reduce.itemsize
    return Sizes(
        kept=tuple(kept),
        input=tuple(inputs),
        kept_after_i=tuple(after),
        home=tuple(units["home"]),
        gathered=tuple(units["gathered"]),
        gradient=tuple(units["gradient"]),
        gradient_shard=tuple(units["shard"]) if layout.shards > 1 else (),
        optimizer=tuple(2 * home for home in units["home"]),
    )


def _on_meta(batch: Batch) -> dict[str, Tensor]:
    return {name: x.to("meta") for name, x in batch.items()}


def _run(
    held: Holding,
    model: Model,
    batch: Batch,
    layout: Layout,
    kept: list[float],
    inputs: list[float],
    after: list[float],
) -> None:
    """Each of the rank's pieces forward by itself; what is alive afterwards is kept."""
    width = model.shape.hidden if model.shape else 0
    time_cut = layout.tp if layout.seq else 1
    for number, piece in held.pieces.items():
        for unit in piece.units:
            if unit.buffer is None:
                unit.gather()
        dtype = piece.units[0].precision.compute
        with Live() as live, _CpuAttention():
            x = None
            if not piece.first:
                x = torch.empty(edge_shape(batch, width, time_cut), dtype=dtype, device="meta")
                inputs[number] = float(x.untyped_storage().nbytes())
            y = piece.forward(0, x, batch, keep=True)
            gradient = torch.empty_like(y)
            del x, y
            kept[number] = float(live.bytes() - gradient.untyped_storage().nbytes())
        after[number] = kept[number]
        if piece.splits:
            after[number] = _after_input_gradient(piece, gradient, live)


def _after_input_gradient(piece: Piece, gradient: Tensor, live: Live) -> float:
    """What I leaves for W: inputs and output gradients of the products that were put off."""
    for unit in piece.units:
        unit.open()
    with live, _CpuAttention():
        piece.input_gradient(0, gradient)
    del gradient
    return float(live.bytes())
