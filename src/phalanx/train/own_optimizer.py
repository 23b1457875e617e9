"""The user's torch optimizer on a rank's shards: an instance of the same class for each unit, with a run of
numbers for each weight and the options of the user's parameter groups.

The user's own instance updates nothing. Its groups are where options are read before each update, so
torch's learning-rate schedulers change it as usual.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..layout import LayoutError
from ..parallel import Unit
from .checkpoint_format import CheckpointError
from .optimizer import Scale, State, Update, beside

# Each element is updated by itself, and all that is kept is one value for each, and a count.
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
    "Muon": "phalanx.train has it as optimizer.name = muon",
    "NAdam": "it keeps a product of its rates for each weight; Adam and RAdam are taken",
    "ASGD": "it keeps rates for each weight; SGD is taken",
    "LBFGS": "it calls the loss several times in a step",
}


def refuse_other_than_elementwise(optimizer: object) -> None:
    """Raise a LayoutError for an optimizer that does not update each element of a weight by itself."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise LayoutError(
            f"prepare takes a torch.optim.Optimizer, not a {type(optimizer).__name__}."
        )
    kind = type(optimizer)
    torchs = kind.__module__.startswith("torch.optim")
    if (torchs and kind.__name__ in ELEMENTWISE) or getattr(kind, "elementwise", False):
        return
    reason = WAY_OUT.get(kind.__name__, "") if torchs else ""
    reason = reason or (
        f"taken are {', '.join(ELEMENTWISE)} of torch.optim, and a class that says elementwise = True"
    )
    raise LayoutError(
        f"{kind.__name__} is not known to update each element of a weight by itself, and a rank may"
        f" hold any part of a weight: {reason}."
    )


class OwnOptimizer:
    """The user's optimizer, for all units of this rank.

    `names` maps the weights of the model to parameters of the user's module, by which groups are found.
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
        group_of = {
            parameter: number
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        if strange := group_of.keys() - {*names.values()}:
            shapes = sorted(str(list(x.shape)) for x in strange)
            raise LayoutError(
                f"the optimizer has {len(strange)} parameters that are not the model's (of the shapes"
                f" {', '.join(shapes[:3])}). Make it of model.parameters()."
            )
        left = [n for n, x in names.items() if x.requires_grad and x not in group_of]
        if left:
            raise LayoutError(
                f"{left[0]} ({len(left)} of the model's weights) is trained and not in the optimizer."
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
        """The options of the user's groups as they are now."""
        return [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]

    def stored_groups(self) -> list[dict[str, Any]]:
        """The options of the groups as JSON has them; a rate may be a tensor."""
        return [
            {key: float(x) if isinstance(x, Tensor) else x for key, x in group.items()}
            for group in self.groups
        ]

    def restore_groups(self, stored: object, where: str) -> None:
        """Sets the options of a checkpoint, as torch's own `load_state_dict` does: schedulers go on from
        these rates."""
        groups = self.optimizer.param_groups
        if not isinstance(stored, list) or len(stored) != len(groups):
            raise CheckpointError(
                f"{where} was saved with another number of parameter groups than the {len(groups)} of"
                " this optimizer."
            )
        for group, options in zip(groups, stored, strict=True):
            for key, value in options.items():
                group[key] = tuple(value) if isinstance(value, list) else value

    def of(self, unit: Unit) -> Update:
        return OwnUpdate(unit, self)

    def stepped(self) -> None:
        """Notes a step in the user's instance; a scheduler warns where it sees none."""
        noted: Any = self.optimizer
        noted._opt_called = True


class OwnUpdate(Update):
    """The update of one unit by an instance of the user's optimizer class."""

    def __init__(self, unit: Unit, own: OwnOptimizer) -> None:
        self.unit, self.own, self.name = unit, own, own.name
        self.runs = []
        in_groups: dict[int, list[Tensor]] = {}
        for entry in unit.entries():
            stop = entry.offset + entry.stop - entry.start
            run = slice(entry.offset, stop)
            home = unit.home[run]
            self.runs.append((run, home))
            in_groups.setdefault(own.group_of[entry.weight.name], []).append(home)
        self.every_run = self.runs
        self.numbers = [*in_groups]
        options = own.groups
        groups = [{**options[n], "params": views} for n, views in in_groups.items()]
        self.instance = _alike(own.optimizer, groups) if groups else None

    @property
    def state(self) -> Mapping[Tensor, State]:  # type: ignore[override]  # made by the instance
        return {} if self.instance is None else self.instance.state

    def restore(self, view: Tensor, state: State) -> None:
        assert self.instance is not None
        if "step" in state and view.device.type != "cpu" and not self._on_device:
            state["step"] = state["step"].cpu()
        self.instance.state[view] = state

    @property
    def _on_device(self) -> bool:
        """True if counts of steps are kept where the weights are."""
        return any(
            group.get("fused") or group.get("capturable") for group in self.own.groups
        )

    def __call__(self, lr: float, scale: Scale | None = None) -> None:
        """One step with the unit's gradient, by the rates of the user's groups."""
        if self.instance is not None:
            self._step(self.instance, scale and scale.on(self.unit.home.device))
        self.unit.spend()
        self.unit.refresh()

    def _step(self, instance: Any, scale: Scale | None) -> None:
        options = self.own.groups
        for number, group in zip(self.numbers, instance.param_groups, strict=True):
            group.update(options[number])
        runs = [run for run, _ in self.runs]
        views = [view for _, view in self.runs]
        for view, gradient in zip(views, self.unit.gradients(runs), strict=True):
            same = gradient.dtype == view.dtype and gradient.device == view.device
            view.grad = gradient if same else beside(gradient, view)
        skips = False
        if scale is not None and all(group.get("fused") for group in options):
            # As torch's GradScaler hands them to fused optimizers: nothing is read on the host.
            instance.grad_scale, instance.found_inf = scale.divisor, scale.skip
        elif scale is not None:
            skips = bool(scale.skip)
            if self.own.scaled:
                gradients: Any = [view.grad for view in views]
                for gradient in gradients:
                    gradient.mul_(scale.factor.view(()))
        if not skips:
            instance.step()
        for view in views:
            view.grad = None


def _alike(optimizer: Any, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Another instance of an optimizer's class, with other parameters."""
    kind = type(optimizer)
    taken = inspect.signature(kind.__init__).parameters
    defaults = {key: x for key, x in optimizer.defaults.items() if key in taken}
    try:
        made: torch.optim.Optimizer = kind(groups, **defaults)
    except TypeError as error:
        raise LayoutError(
            f"{kind.__name__} cannot be made for a rank's part of the weights: {error}. Its arguments"
            " must be those that it keeps as `defaults`."
        ) from error
    return made
