"""Replays a layout's own roundings on one process: the second comparison in bfloat16
and float16.

Bounds by perturbation (`compare.py`) are as wide as the effects of rounding, and accept
an error of 5 % in a gradient. Here one process computes the rows of each microbatch of
each rank, with the model's own modules, and accumulates gradients in float32. Under tp
these modules run once for each rank (`over_ranks.py`), so that the same sums are
rounded. The only differences left are:

- the order of float32 sums, and the effect of a weight's last bit,
- under seq and cp, gradients of weights that each rank sums over its own tokens,
- under cp, the order in which a ring adds up attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..layout import Axis, Layout, Mesh
from ..layout.choices import ACCUM
from ..parallel import Model
from ..parallel.batch import share
from .compare import FLOOR, Bounds, Difference, bounds_in_places, compare
from .low_precision import can_replay, sums_of
from .over_ranks import compute_over_ranks, output_over_ranks
from .reference import Trace, TracedStep, reference
from .trial import Setting

# Allowed units in the last place of the compute dtype, for the 2-norm of a tensor. The
# second is for layouts that divide the tokens of a sequence: a rank rounds its part of
# a sum over them, and parts may cancel. The largest that was seen is 3.7.
PLACES, DIVIDED = 2.0, 5.0


def can_be_replayed(layout: Layout, model: Model, setting: Setting) -> bool:
    """True if one process can reproduce the layout's roundings."""
    narrow = setting.precision.compute in (torch.bfloat16, torch.float16)
    return narrow and not not_replayed(layout, model)


def not_replayed(layout: Layout, model: Model) -> str:
    """Return the reason why one process cannot reproduce a layout's roundings, or
    ""."""
    shape = model.shape
    if layout.matmul:
        return "matmuls in 8 bits have bounds of their own"
    if layout.compile:
        return "a compiled graph rounds where it likes"
    if shape is not None and shape.batch_loss:
        return "a loss over the whole batch is no sum over microbatches"
    # These axes split sums inside of pieces.
    if layout.tp == layout.cp == layout.ep == 1:
        return ""
    if shape is None or not can_replay(model, layout):
        return "only the parts of built-in decoders are known"
    if shape.dropout and layout.tp > 1:
        return "a rank of tp draws the noise of its own heads"
    if shape.experts and layout.cp > 1:
        return "a ring rounds outputs otherwise, so a router may choose other experts"
    return ""


def rounding_of(layout: Layout) -> Layout:
    """Return the layout reduced to what determines its roundings: how it divides rows
    and the sums inside of pieces."""
    # ZeRO, stages and schedules do not appear: they round nothing.
    sums = sums_of(layout)
    # Ranks of ep have rows of their own, as those of dp have.
    axes = (Axis("dp", (1, layout.data)), *sums.mesh.axes)
    return replace(
        sums, mesh=Mesh(axes), schedule=ACCUM, microbatches=layout.microbatches
    )


def replay(
    make: Callable[[], Model], setting: Setting, layout: Layout
) -> Trace:
    """Run the first step on one process, with each rank's microbatches separately.

    Later steps would differ by more: the last bit of a weight may change its 16-bit
    value.
    """
    half = setting.precision.compute == torch.float16
    # The same scaler as the layout has.
    first, patience = setting.scaling
    scaler = torch.amp.GradScaler("cpu", first, growth_interval=patience)
    model = make()
    compute_over_ranks(model, layout)
    output_over_ranks(model, layout)
    return reference(
        model,
        setting.batches,
        steps=1,
        optimizer=setting.optimizer,
        rate=setting.rate,
        clip=setting.clip,
        precision=setting.precision,
        seed=setting.seed,
        cut=lambda rows: [*parts_of(rows, layout)],
        own_losses=True,
        scaler=scaler if half else None,
        validations=(),
    )


def parts_of(rows: int, layout: Layout) -> Iterator[Tensor]:
    """Yield the rows of each non-empty microbatch of each rank."""
    for rank in range(layout.data):
        # As the layout divides rows: first over ranks, then over microbatches.
        own = torch.arange(rows)[share(rows, layout.data, rank)]
        for number in range(layout.microbatches):
            part = own[share(len(own), layout.microbatches, number)]
            if len(part):
                yield part


def replay_differences(
    layout: Layout,
    got: Trace,
    known: Trace,
    setting: Setting,
    wide: Bounds,
) -> list[Difference]:
    """Return the differences from the replay in the first step and its update.

    `wide` are the bounds by perturbation.
    """
    got = replace(got, steps=got.steps[: len(known.steps)], validation=None)
    divided = layout.cp > 1 or (layout.seq and layout.tp > 1)
    places = DIVIDED if divided else PLACES
    compute, rate = setting.precision.compute, setting.rate
    bounds = dict(bounds_in_places(known, rate, compute, places))
    vanishing = set(vanishing_gradients(known.steps[0]))
    # These gradients are only rounding, and so are the updates made from them.
    bounds |= {
        key: wide[key]
        for key in bounds
        if key[1] in ("gradient", "update") and key[2] in vanishing
    }
    # Adam divides a gradient by its size. If a gradient is almost zero, its last digit
    # therefore moves a weight by the whole rate.
    if layout.tp * layout.cp * layout.ep > 1:
        bounds |= {
            key: max(bounds[key], wide.get(key, 0.0))
            for key in bounds
            if key[1] == "update"
        }
    return compare(got, known, rate, bounds)


def vanishing_gradients(step: TracedStep) -> Iterator[str]:
    """Yield weights whose true gradient is zero, such as a key's bias without
    rotation."""
    for name, gradient in step.gradients.items():
        if float(gradient.double().norm()) < FLOOR * step.norm:
            yield name
