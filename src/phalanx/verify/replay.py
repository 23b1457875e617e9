"""A layout's own roundings on one process: the second comparison in bfloat16 and float16.

Bounds by perturbation (`compare.py`) are as wide as what rounding may do, and let an error of 5 % of a
gradient pass. Layouts over dp, ZeRO, microbatches and stages cut no product: each microbatch of each rank is
computed by the model's own modules, and its gradients are added in float32. One process does the same with
the same rows. Then nothing differs but the order of sums in float32, and what a last bit of a weight does.
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

# Units in the last place of the dtype that is computed in, of a tensor's root of the squares' sum.
PLACES = 2.0


def can_be_replayed(layout: Layout, model: Model, setting: Setting) -> bool:
    """True if one process can have the layout's roundings: no product is cut, and the loss is a sum over
    microbatches."""
    shape = model.shape
    sums = shape is None or shape.batch_loss == 0
    narrow = setting.precision.compute in (torch.bfloat16, torch.float16)
    cut = layout.tp > 1 or layout.cp > 1 or layout.ep > 1
    return narrow and sums and not cut and not layout.matmul and not layout.compile


def rounding_of(layout: Layout) -> Layout:
    """The layout with nothing but what decides its roundings: the parts that its rows are cut into."""
    count = Layout.parse(f"dp{layout.data}")
    return replace(count, microbatches=layout.microbatches)


def replay(make: Callable[[], Model], setting: Setting, layout: Layout) -> Trace:
    """The first step on one process, with the rows of each microbatch of each rank by themselves. Later ones
    would differ by more: a last bit of a weight becomes another number in 16 bits."""
    half = setting.precision.compute == torch.float16
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
    """The rows of each microbatch of each rank that are any."""
    for rank in range(layout.data):
        own = torch.arange(rows)[share(rows, layout.data, rank)]
        for number in range(layout.microbatches):
            part = own[share(len(own), layout.microbatches, number)]
            if len(part):
                yield part


def replay_differences(
    got: Trace, known: Trace, rate: Callable[[int], float], compute: torch.dtype
) -> list[Difference]:
    """Differences from the replay in the first step and its update."""
    got = replace(got, steps=got.steps[: len(known.steps)], validation=None)
    bounds = bounds_in_places(known, rate, compute, PLACES)
    return compare(got, known, rate, bounds)
