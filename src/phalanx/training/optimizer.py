"""Optimizers on flat shards: torch's fused kernels, applied to a few views of a unit's
home.

torch.optim is not used, because its wrapper around these kernels imports the compiler,
which adds a second or two to the start of every rank. The state has torch's own names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from ..comm import Work
from ..layout.optimizers import ADAMW, OPTIMIZERS, SGD, OptimizerChoice
from ..parallel import Unit
from ..parallel.data import Segment
from ..parallel.tensor import Weight

_torch: Any = torch  # torch's stubs omit the kernels
State = dict[str, Tensor]


class Optimizer(Protocol):
    """Makes the update of a unit: a function of the learning rate and the gradient's
    scale.

    An elementwise optimizer updates any slice of a weight by itself. With
    `whole_matrices`, an owner updates each matrix, and the program has operations that
    move matrices to owners and back.
    """

    @property
    def whole_matrices(self) -> bool: ...

    # as torch spells it
    @property
    def name(self) -> str: ...

    def of(self, unit: Unit) -> Update: ...


class Scale(NamedTuple):
    """The scale of a step's gradients, agreed on by all ranks.

    It consists of tensors on the device: reading them on the host would wait for the
    device.
    """

    factor: Tensor  # gradients are multiplied by it; float64
    divisor: Tensor  # the fused kernels divide gradients by it; float32
    skip: Tensor  # 1 if the norm is not finite and nothing is updated; float32
    done: Tensor  # 1 - skip as a scalar: the number of updates made

    @classmethod
    def of(cls, norm: Tensor, clip: float, loss_scale: float) -> Scale:
        divisor = torch.ones_like(norm)
        if clip:
            # like torch's clip_grad_norm_, including its 1e-6
            divisor = (norm + 1e-6).div_(clip).clamp_(min=1.0)
        # Gradients carry the loss scale: divide by it.
        if loss_scale != 1.0:
            divisor *= loss_scale
        # 1 leaves weights and state of the fused kernels untouched. Zero times a number
        # that is not finite is NaN, which differs from zero.
        skip = (norm * 0.0).ne(0.0).float()
        return cls(
            divisor.reciprocal(), divisor.float(), skip, 1.0 - skip.view(())
        )

    def on(self, device: torch.device) -> Scale:
        return (
            self
            if device == self.skip.device
            else Scale(*(x.to(device) for x in self))
        )


@dataclass(eq=False)
class _Alike:
    """Runs of a unit's home that one call of a fused kernel updates. `kept` has a list
    for each kind of state."""

    decay: float
    rate: float
    runs: list[slice]
    views: list[Tensor]
    kept: list[list[Tensor]]


class Update:
    """The elementwise update of a unit, or of some `segments` of it, by a fused kernel.

    Runs of the flat home with equal decay share a kernel call. `state` is keyed by run
    and made at the first step; all runs share its step count. `owned` is the state of
    whole matrices that this rank alone keeps, by the name of the matrix; `owned_shapes`
    are its shapes, by name and kind, from the start.
    """

    def __init__(
        self,
        unit: Unit,
        optimizer: AdamW | Sgd,
        segments: Sequence[Segment] | None = None,
    ) -> None:
        self.unit, self.optimizer, self.name = unit, optimizer, optimizer.name
        self.runs: list[tuple[slice, Tensor]] = []
        self.every_run = self.runs  # all runs that have a state
        self.state: dict[Tensor, State] = {}
        self.owned: dict[str, State] = {}
        self.owned_shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        # number of updates so far, on the device
        self.count: Tensor | None = None
        self.prepared = False
        alike: dict[tuple[float, float], _Alike] = {}
        for segment in unit.own_segments() if segments is None else segments:
            # Elements of the flat home; views, so the kernel writes into it.
            run = slice(segment.start, segment.stop)
            home = unit.home[run]
            self.runs.append((run, home))
            # Runs with equal decay and rate share one call of the kernel.
            key = optimizer.decay if segment.decay else 0.0, segment.rate
            one = alike.setdefault(key, _Alike(*key, [], [], []))
            one.runs.append(run)
            one.views.append(home)
        self.alike = list(alike.values())

    def restore(self, view: Tensor, state: State) -> None:
        """Replace a run's state by a checkpoint's."""
        # New tensors: the lists for the kernel are made again.
        self.state[view], self.prepared = state, False

    @property
    def steps_made(self) -> set[float]:
        """The numbers of steps that this rank's state counts; empty if it counts none."""
        kept = (*self.state.values(), *self.owned.values())
        return {float(state["step"]) for state in kept if "step" in state}

    def rate_of(self, weight: Weight, lr: float, made: float) -> float:
        """The rate at which the step that was the `made`-th has changed a weight."""
        return weight.rate or lr

    def _prepare(self) -> None:
        """Create missing state, and the lists that are passed to the kernel at each
        step."""
        self.prepared = True
        states = [self.state.setdefault(view, {}) for _, view in self.runs]
        # All runs share one count, on the device.
        if self.optimizer.counts and states:
            device = self.runs[0][1].device
            made = states[0].get("step")
            self.count = (
                torch.zeros((), dtype=torch.float32, device=device)
                if made is None
                else made
            )
        for (_, view), state in zip(self.runs, states, strict=True):
            for kind in self.optimizer.kinds:
                if kind not in state:
                    state[kind] = torch.zeros_like(view)
            if self.count is not None:
                state["step"] = self.count
        for one in self.alike:
            each = [self.state[view] for view in one.views]
            # One list for each kind of state, in the order of the views.
            one.kept = [
                [state[kind] for state in each]
                for kind in self.optimizer.kinds
            ]

    def to_owners(self, scale: Scale | None) -> Work:
        """Start sending matrices to their owners; an elementwise update has none."""
        return Work()

    def from_owners(self) -> Work:
        """Start sending the updates of matrices back."""
        return Work()

    def __call__(self, lr: float, scale: Scale | None = None) -> None:
        """Apply one step with the unit's scaled gradient, which is consumed."""
        scale = scale and scale.on(self.unit.home.device)
        if not self.prepared:
            self._prepare()
        if self.count is not None:
            # A skipped step is not counted, so bias correction stays right.
            self.count.add_(1.0 if scale is None else scale.done)
        for one in self.alike:
            views = one.views
            own = self.unit.gradients(one.runs)
            # The gradient may be in another dtype, or on the GPU while the
            # weights are on the host.
            if (
                own[0].dtype != views[0].dtype
                or own[0].device != views[0].device
            ):
                own = [beside(*both) for both in zip(own, views, strict=True)]
            common: dict[str, Any] = {
                "lr": lr,
                "weight_decay": one.decay,
                "maximize": False,
            }
            if scale is not None:
                # The kernels divide the gradients and skip the update by
                # themselves.
                common |= {
                    "grad_scale": scale.divisor,
                    "found_inf": scale.skip,
                }
                # A float32 divisor would round float64 gradients: scale them
                # before.
                if own[0].dtype == torch.float64:
                    _torch._foreach_mul_(own, scale.factor.view(()))
                    del common["grad_scale"]  # it is float32
            if one.rate:
                # Sign updates. The optimizer changes nothing here and keeps zeros as
                # its state, so that a checkpoint has the same tensors for these weights
                # as for others.
                for view, each in zip(views, own, strict=True):
                    moved = each.sign() * one.rate
                    view -= (
                        moved
                        if scale is None
                        else moved * (1.0 - scale.skip.to(moved.dtype))
                    )
                own, common["lr"] = (
                    [torch.zeros_like(each) for each in own],
                    0.0,
                )
            self.optimizer.kernel(views, own, one.kept, self.count, **common)
        # The gradient is consumed: its memory is free for the next one.
        self.unit.spend()
        # The copy for computing follows the home.
        self.unit.refresh()


def beside(gradient: Tensor, view: Tensor) -> Tensor:
    """Return a gradient in the dtype and on the device of the weights that it
    updates."""
    own = gradient.to(view.dtype)
    if view.device == own.device:
        return own
    # The update waits here for the copy, so use the fastest way, to pinned memory.
    # torch caches freed pinned buffers.
    room = torch.empty_like(own, device=view.device, pin_memory=own.is_cuda)
    return room.copy_(own)


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019); norms and biases
    do not decay."""

    name: ClassVar[str] = OPTIMIZERS[ADAMW].stored
    whole_matrices: ClassVar[bool] = False
    # state kept for each element
    kinds: ClassVar[tuple[str, ...]] = OPTIMIZERS[ADAMW].moments
    counts: ClassVar[bool] = True  # it counts its updates
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    decay: float = 0.1

    @classmethod
    def of_run(cls, choice: OptimizerChoice) -> AdamW:
        """The optimizer that a run file describes."""
        beta1, beta2 = choice.betas
        return cls(beta1, beta2, choice.eps, choice.weight_decay)

    def of(self, unit: Unit) -> Update:
        return Update(unit, self)

    def kernel(
        self,
        runs: list[Tensor],
        own: list[Tensor],
        kept: list[list[Tensor]],
        count: Tensor | None,
        **common: Any,
    ) -> None:
        _torch._fused_adamw_(
            # amsgrad keeps a maximum, for which no state is passed.
            runs, own, *kept, [], [count] * len(runs),
            beta1=self.beta1, beta2=self.beta2, eps=self.eps, amsgrad=False, **common,
        )  # fmt: skip


@dataclass(frozen=True)
class Sgd:
    """Gradient descent with momentum."""

    name: ClassVar[str] = OPTIMIZERS[SGD].stored
    whole_matrices: ClassVar[bool] = False
    counts: ClassVar[bool] = False
    momentum: float = 0.0
    decay: float = 0.0

    @classmethod
    def of_run(cls, choice: OptimizerChoice) -> Sgd:
        """The optimizer that a run file describes."""
        return cls(choice.momentum or 0.0, choice.weight_decay)

    def of(self, unit: Unit) -> Update:
        return Update(unit, self)

    @property
    def kinds(self) -> tuple[str, ...]:
        # Zeros instead of the kernel's own first step, which would be lost if that step
        # is skipped.
        return OPTIMIZERS[SGD].moments if self.momentum else ()

    def kernel(
        self,
        runs: list[Tensor],
        own: list[Tensor],
        kept: list[list[Tensor]],
        count: Tensor | None,
        **common: Any,
    ) -> None:
        buffers = kept[0] if kept else []
        _torch._fused_sgd_(
            runs, own, buffers, momentum=self.momentum, dampening=0.0,
            nesterov=False, is_first_step=False, **common,
        )  # fmt: skip


def learning_rate(choice: OptimizerChoice, step: int, steps: int) -> float:
    """Return the learning rate of step `step` (from 0) of `steps`: a pure function, so
    resuming needs no state.

    It rises linearly from lr / warmup_steps in the first step, and reaches `min_lr` in
    the last one.
    """
    # From lr / warmup in the first step to lr in the last one of the warmup.
    if step < choice.warmup_steps:
        return choice.lr * (step + 1) / choice.warmup_steps
    start = choice.warmup_steps
    if choice.schedule == "constant":
        return choice.lr
    if choice.schedule == "wsd":
        # Hu et al. 2024: constant, then a short decay; the last tenth of the run by
        # default.
        start = max(start, steps - (choice.decay_steps or -(-steps // 10)))
    # 1 in the last step, so that it has the lowest rate.
    done = (step - start + 1) / max(1, steps - start)
    done = min(1.0, max(0.0, done))
    falls = (
        (1 + math.cos(math.pi * done)) / 2
        if choice.schedule == "cosine"
        else 1 - done
    )
    lowest = choice.lr / 10 if choice.min_lr is None else choice.min_lr
    return lowest + (choice.lr - lowest) * falls
