"""Replays a layout's own roundings on one process: the second comparison in bfloat16
and float16.

Bounds by perturbation (`compare.py`) are as wide as the effects of rounding, and accept
an error of 5 % in a gradient. Layouts over dp, ZeRO, microbatches and stages split no
matmul: each microbatch of each rank is computed by the model's own modules, and its
gradients are accumulated in float32. One process does the same with the same rows. The
only differences left are the order of float32 sums, and the effect of a weight's last
bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..layout import Layout
from ..parallel import Model
from ..parallel.batch import share
from .compare import Difference, bounds_in_places, compare
from .reference import Trace, reference
from .trial import Setting

# Allowed units in the last place of the compute dtype, for the 2-norm of a tensor.
PLACES = 2.0


def can_be_replayed(layout: Layout, model: Model, setting: Setting) -> bool:
    """True if one process can reproduce the layout's roundings.

    No matmul may be split, and the loss must be a sum over microbatches.
    """
    shape = model.shape
    # A loss over the whole batch is no sum of losses of microbatches.
    sums = shape is None or shape.batch_loss == 0
    narrow = setting.precision.compute in (torch.bfloat16, torch.float16)
    # These axes split sums inside of pieces.
    cut = layout.tp > 1 or layout.cp > 1 or layout.ep > 1
    return (
        narrow
        and sums
        and not cut
        and not layout.matmul
        and not layout.compile
    )


def rounding_of(layout: Layout) -> Layout:
    """Return the layout reduced to what determines its roundings: how its rows are
    divided."""
    # ZeRO, stages and schedules do not appear: they round nothing.
    count = Layout.parse(f"dp{layout.data}")
    return replace(count, microbatches=layout.microbatches)


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
    return reference(
        make(),
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
    got: Trace,
    known: Trace,
    rate: Callable[[int], float],
    compute: torch.dtype,
) -> list[Difference]:
    """Return the differences from the replay in the first step and its update."""
    got = replace(got, steps=got.steps[: len(known.steps)], validation=None)
    bounds = bounds_in_places(known, rate, compute, PLACES)
    return compare(got, known, rate, bounds)
