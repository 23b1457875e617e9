"""The user's torch optimizer on a rank's shards.

Each unit has an instance of the same class, with one parameter per run of elements of a
weight, and the options of the user's parameter groups. The user's own instance updates
nothing; its groups' options are read before each update, so torch's learning-rate
schedulers work as usual.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..layout import LayoutError
from ..layout.optimizers import OPTIMIZERS
from ..parallel import Unit
from .checkpoint_format import CheckpointError
from .optimizer import Scale, State, Update, beside

# These update each element independently; their state is one value per element, and a
# step count.
ELEMENTWISE = (
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
WAY_OUT = {
    "NAdam": "it stores a product of its rates for each weight; use Adam or RAdam",
    "ASGD": "it stores rates for each weight; use SGD",
    "LBFGS": "it calls the loss several times in a step",
}


def refuse_other_than_elementwise(optimizer: object) -> None:
    """Raise a LayoutError for an optimizer that does not update elements
    independently."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise LayoutError(
            f"prepare takes a torch.optim.Optimizer, not a {type(optimizer).__name__}."
        )
    kind = type(optimizer)
    # A user's class of the same name is not torch's; it says itself that it is
    # elementwise.
    torchs = kind.__module__.startswith("torch.optim")
    if (torchs and kind.__name__ in ELEMENTWISE) or getattr(
        kind, "elementwise", False
    ):
        return
    rows = {row.stored: row for row in OPTIMIZERS.values()}
    # Optimizers of whole matrices are those of a run, not of one's own loop.
    if torchs and kind.__name__ in rows:
        reason = (
            "phalanx.train supports it with optimizer.name ="
            f" {rows[kind.__name__].name}"
        )
    else:
        reason = WAY_OUT.get(kind.__name__, "") if torchs else ""
    reason = reason or (
        f"use {', '.join(ELEMENTWISE)} of torch.optim, or a class that sets elementwise = True"
    )
    raise LayoutError(
        f"{kind.__name__} is not known to update each element of a weight independently, but a rank may"
        f" hold any part of a weight: {reason}."
    )


class OwnOptimizer:
    """The user's optimizer, for all units of this rank.

    `names` maps the model's weights to parameters of the user's module, which determine
    the groups.
    """

    whole_matrices: ClassVar[bool] = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[str, nn.Parameter],
        *,
        scaled: bool,
    ) -> None:
        refuse_other_than_elementwise(optimizer)
        self.optimizer, self.scaled = optimizer, scaled
        # Tensors are keys by identity.
        group_of = {
            parameter: number
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        if strange := group_of.keys() - {*names.values()}:
            shapes = sorted(str(list(x.shape)) for x in strange)
            raise LayoutError(
                f"the optimizer has {len(strange)} parameters that are not the model's (of the shapes"
                f" {', '.join(shapes[:3])}). Create it from model.parameters()."
            )
        # A weight that is trained and not updated would stay at its start,
        # without an error.
        left = [
            n
            for n, x in names.items()
            if x.requires_grad and x not in group_of
        ]
        if left:
            raise LayoutError(
                f"{left[0]} ({len(left)} of the model's weights) is trained but not in the optimizer."
                " Add it, or freeze it with requires_grad_(False)."
            )
        self.group_of = {
            name: group_of[x] for name, x in names.items() if x in group_of
        }

    @property
    def name(self) -> str:
        return type(self.optimizer).__name__

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Current options of the user's groups."""
        return [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]

    def stored_groups(self) -> list[dict[str, Any]]:
        """Return the groups' options in a form for JSON. A learning rate may be a
        tensor."""
        return [
            {
                key: float(x) if isinstance(x, Tensor) else x
                for key, x in group.items()
            }
            for group in self.groups
        ]

    def restore_groups(self, stored: object, where: str) -> None:
        """Restore the options saved in a checkpoint.

        As with torch's `load_state_dict`, schedulers continue from these rates.
        """
        groups = self.optimizer.param_groups
        if not isinstance(stored, list) or len(stored) != len(groups):
            raise CheckpointError(
                f"{where} was saved with a different number of parameter groups than the {len(groups)} of"
                " this optimizer."
            )
        for group, options in zip(groups, stored, strict=True):
            # JSON has made lists of tuples such as `betas`.
            for key, value in options.items():
                group[key] = tuple(value) if isinstance(value, list) else value

    def of(self, unit: Unit) -> Update:
        return OwnUpdate(unit, self)

    def stepped(self) -> None:
        """Mark a step in the user's instance, so that schedulers do not warn of a
        missing one."""
        noted: Any = self.optimizer
        noted._opt_called = True


class OwnUpdate(Update):
    """Update of one unit by an instance of the user's optimizer class."""

    def __init__(self, unit: Unit, own: OwnOptimizer) -> None:
        self.unit, self.own, self.name = unit, own, own.name
        self.runs = []
        in_groups: dict[int, list[Tensor]] = {}
        # Views of the unit's flat buffer: one for each weight, as weights may
        # be in different groups.
        for entry in unit.entries():
            stop = entry.offset + entry.stop - entry.start
            run = slice(entry.offset, stop)
            home = unit.home[run]
            self.runs.append((run, home))
            in_groups.setdefault(own.group_of[entry.weight.name], []).append(
                home
            )
        self.every_run = self.runs
        self.owned, self.owned_shapes = {}, {}
        self.numbers = [*in_groups]
        options = own.groups
        groups = [
            {**options[n], "params": views} for n, views in in_groups.items()
        ]
        # A rank may hold no element of this unit.
        self.instance = _alike(own.optimizer, groups) if groups else None

    @property
    def state(self) -> Mapping[Tensor, State]:  # type: ignore[override]  # made by the instance
        return {} if self.instance is None else self.instance.state

    def restore(self, view: Tensor, state: State) -> None:
        assert self.instance is not None
        if (
            # torch keeps step counts on the CPU, unless a fused or capturable
            # update reads them on the device.
            "step" in state
            and view.device.type != "cpu"
            and not self._on_device
        ):
            state["step"] = state["step"].cpu()
        self.instance.state[view] = state

    @property
    def _on_device(self) -> bool:
        """True if step counts are stored on the device of the weights."""
        return any(
            group.get("fused") or group.get("capturable")
            for group in self.own.groups
        )

    def __call__(self, lr: float, scale: Scale | None = None) -> None:
        """Run one step with the unit's gradient, at the rates of the user's groups."""
        if self.instance is not None:
            self._step(
                self.instance, scale and scale.on(self.unit.home.device)
            )
        self.unit.spend()
        self.unit.refresh()

    def _step(self, instance: Any, scale: Scale | None) -> None:
        options = self.own.groups
        # Rates may have changed since the last step, by a scheduler or by
        # hand.
        for number, group in zip(
            self.numbers, instance.param_groups, strict=True
        ):
            group.update(options[number])
        runs = [run for run, _ in self.runs]
        views = [view for _, view in self.runs]
        for view, gradient in zip(
            views, self.unit.gradients(runs), strict=True
        ):
            # torch requires a gradient of the parameter's dtype and device.
            same = (
                gradient.dtype == view.dtype and gradient.device == view.device
            )
            view.grad = gradient if same else beside(gradient, view)
        skips = False
        if scale is not None and all(group.get("fused") for group in options):
            # As torch's GradScaler passes them to fused optimizers, without a read on
            # the host. AdamW takes scalars only, where gradients are checked at once.
            instance.grad_scale = scale.divisor.view(())
            instance.found_inf = scale.skip.view(())
        elif scale is not None:
            # A read on the host: all other optimizers must be told on the CPU
            # to skip.
            skips = bool(scale.skip)
            if self.own.scaled:
                gradients: Any = [view.grad for view in views]
                for gradient in gradients:
                    gradient.mul_(scale.factor.view(()))
        if not skips:
            instance.step()
        # Released, as the buffer of gradients is reused.
        for view in views:
            view.grad = None


def _alike(
    optimizer: Any, groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """Create another instance of the optimizer's class, with other parameters."""
    kind = type(optimizer)
    # Only arguments of the constructor: `defaults` of some classes hold more.
    taken = inspect.signature(kind.__init__).parameters
    defaults = {
        key: x for key, x in optimizer.defaults.items() if key in taken
    }
    try:
        made: torch.optim.Optimizer = kind(groups, **defaults)
    except TypeError as error:
        raise LayoutError(
            f"{kind.__name__} cannot be created for a rank's part of the weights: {error}. Its arguments"
            " must be those that it stores as `defaults`."
        ) from error
    return made
