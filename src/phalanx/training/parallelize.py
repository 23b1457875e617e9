"""One rank's part of a model in a layout, ready for training steps.

The caller provides the rows of each batch. Nothing here depends on a run file, a data
set, a log or a checkpoint; `rank.py` adds those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..comm import Group, World
from ..layout import Layout
from ..layout.choices import FP16
from ..parallel import Model, Precision, microbatches, on_device, share
from ..parallel.local import LocalModel, build_local
from ..parallel.own_loss import BY_TARGETS, Measure
from ..program import Program
from ..program.build import forward_only
from .executor import Executor, Validator
from .optimizer import Optimizer, Update
from .precision import LossScale


@dataclass(frozen=True, eq=False)
class ModelPart:
    """One rank's part of a model: its weights, its groups, and the executors of its
    program."""

    layout: Layout
    model: Model
    program: Program
    local: LocalModel
    trainer: Executor
    validator: Validator

    @property
    def everyone(self) -> Group:
        """The group of all ranks."""
        return self.local.groups.everyone

    @property
    def updates(self) -> dict[int, Update]:
        """The optimizer's update of each unit."""
        return self.trainer.updates

    @property
    def names(self) -> list[str]:
        """The names of the model's pieces."""
        return [name for name, _ in self.model.pieces]

    def rows_of(self, size: int) -> slice:
        """Return this rank's rows of a batch of `size` sequences."""
        return share(size, self.layout.data, self.local.coordinates["data"])

    def microbatches(
        self, rows: Mapping[str, Tensor]
    ) -> list[dict[str, Tensor]]:
        """Split this rank's rows into microbatches on its device, with its part of the
        sequence."""
        own = microbatches(
            rows,
            self.layout,
            None,
            self.local.coordinates["cp"],
            ahead=self.local.ahead,
        )
        return [on_device(each, self.local.pool.device) for each in own]


def parallelize(
    world: World,
    layout: Layout,
    model: Model,
    program: Program,
    optimizer: Optimizer,
    *,
    precision: Precision,
    clip: float = 0.0,
    seed: int | None = None,
    measure: Measure = BY_TARGETS,
    prefix: str = "",
) -> ModelPart:
    """Build this rank's part of a model: shard its modules, open its groups, make its
    executors.

    Collective. `seed` initializes the weights; without one they are zeros, to be loaded
    or drawn later. `measure` defines what losses are divided by, and the metrics that
    come with them. `prefix` names the groups of a second part in the same world.
    """
    local = build_local(
        world,
        layout,
        model,
        program,
        seed=seed,
        precision=precision,
        prefix=prefix,
    )
    # float16 alone has too little range for small gradients.
    scaling = LossScale() if layout.precision == FP16 else None
    rank = world.rank
    # Both executors divide losses alike; only the trainer has an optimizer.
    terms: Any = {"clip": clip, "scaling": scaling, "measure": measure}
    trainer = Executor(local, program, rank, optimizer, **terms)
    validator = Validator(local, forward_only(program, layout), rank, measure)
    return ModelPart(layout, model, program, local, trainer, validator)
