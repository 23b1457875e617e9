"""SOAP (Vyas et al. 2024, arXiv 2409.11321): Adam in the eigenbases of Shampoo's
preconditioners for matrices, AdamW for all other weights.

The owner of a matrix keeps all of its state: the average of its gradient, the average
square of the rotated gradient, both preconditioners and their eigenbases. Gradients
travel to the owner and updates come back (`matrices.py`). All of it is computed in the
weights' dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..layout.optimizer_row import MatrixRow
from ..layout.optimizers import OptimizerChoice
from ..layout.soap import REFRESH
from ..layout.soap import SOAP as ROW
from ..parallel import Unit
from .matrices import MatrixUpdate, OwnedMatrix
from .optimizer import AdamW, Scale, State

assert ROW.matrices is not None
MATRICES = ROW.matrices
# Directions whose eigenvalue is below this share of the mean one count as not reached by
# any gradient yet. Without a floor, rounding alone would choose their basis vectors.
FLOOR = 1e-3


def first_basis(moment: Tensor) -> Tensor:
    """The eigenbasis of a preconditioner, the largest eigenvalue first.

    A gradient of low rank leaves eigenvalues of zero, whose eigenvectors are arbitrary. The
    basis is completed by unit vectors, made orthogonal to those before: first those of
    rows without a gradient, then the others in order. Among the others alone, some would
    be linearly dependent on those before, and rounding would choose their basis vectors.
    """
    values, vectors = torch.linalg.eigh(moment)  # the smallest first
    floor = FLOOR * values.mean()
    reached = vectors[:, values > floor].flip(-1)
    unit_vectors = torch.eye(
        len(moment), dtype=moment.dtype, device=moment.device
    )
    has_gradient = (moment.diagonal() > 0).int()
    order = torch.argsort(has_gradient, stable=True)
    every = torch.cat([reached, unit_vectors[:, order]], dim=1)
    found: Tensor = torch.linalg.qr(every).Q
    return found


def refreshed_basis(moment: Tensor, basis: Tensor) -> Tensor:
    """One step of power iteration from the last basis, made orthogonal by QR.

    Algorithm 4 of the paper. The shift does not change eigenvectors; directions that no
    gradient has reached keep their basis vectors, and so does a matrix without any
    gradient.
    """
    shift = FLOOR * moment.diagonal().mean()
    found: Tensor = torch.linalg.qr(moment @ basis + shift * basis).Q
    return torch.where(shift > 0, found, basis)


@dataclass(frozen=True)
class Soap:
    """Settings of SOAP. The moments' decay rates, eps and weight decay are those of
    `others`, the AdamW of all other weights."""

    name: ClassVar[str] = ROW.stored
    row: ClassVar[MatrixRow] = MATRICES
    whole_matrices: ClassVar[bool] = True
    prepares: ClassVar[int] = 1
    rate: ClassVar[float] = 1.0
    refresh_every: int = REFRESH
    others: AdamW = AdamW()  # immutable, so it can be a default

    @classmethod
    def of_run(cls, choice: OptimizerChoice) -> Soap:
        """The optimizer that a run file describes."""
        return cls(choice.refresh_every, AdamW.of_run(choice))

    @property
    def decay(self) -> float:
        return self.others.decay

    def of(self, unit: Unit) -> SoapUpdate:
        return SoapUpdate(unit, self)

    def update(self, state: State, gradient: Tensor) -> Tensor:
        """Return a matrix's update, and advance its state: Algorithm 3 of the
        paper, with AdamW's bias correction.

        The first gradient makes the bases and no update: in its own eigenbasis it would
        be as large along every direction.
        """
        others, g = self.others, gradient
        state["step"] += 1
        left_basis, right_basis = state["left_basis"], state["right_basis"]
        made = int(state["step"]) - self.prepares  # updates, this one included
        if not made:
            self._add_to_preconditioners(state, g)
            left_basis.copy_(first_basis(state["left"]))
            right_basis.copy_(first_basis(state["right"]))
            return torch.zeros_like(g)

        rotated = left_basis.mT @ g @ right_basis
        average = state["exp_avg"].lerp_(g, 1 - others.beta1)
        square = state["exp_avg_sq"]
        square.mul_(others.beta2)
        square.addcmul_(rotated, rotated, value=1 - others.beta2)
        numerator = left_basis.mT @ average @ right_basis
        numerator /= 1 - others.beta1**made
        denominator = (square / (1 - others.beta2**made)).sqrt_() + others.eps
        update = left_basis @ (numerator / denominator) @ right_basis.mT

        self._add_to_preconditioners(state, g)
        if made % self.refresh_every == 0:
            left_basis.copy_(refreshed_basis(state["left"], left_basis))
            right_basis.copy_(refreshed_basis(state["right"], right_basis))
        return update

    def _add_to_preconditioners(self, state: State, g: Tensor) -> None:
        weight = 1 - self.others.beta2
        state["left"].lerp_(g @ g.mT, weight)
        state["right"].lerp_(g.mT @ g, weight)


class SoapUpdate(MatrixUpdate):
    """SOAP's update of a unit that may contain matrices."""

    def __init__(self, unit: Unit, optimizer: Soap) -> None:
        super().__init__(unit, optimizer)
        self.soap = optimizer

    def contribution(
        self, view: Tensor, gradient: Tensor, scale: Scale | None
    ) -> Tensor:
        own = gradient.to(view.device, view.dtype)
        if scale is None:
            return own
        return own * scale.on(view.device).factor.to(own.dtype)

    def replace_by_updates(self, matrices: Sequence[OwnedMatrix]) -> None:
        # Made in the first step even if it is skipped: a checkpoint holds all state or none.
        states = [self._kept(name) for name, _ in matrices]
        # Read on the host, since eigenvectors of infinite numbers are an error. The results
        # of a skipped step are not applied.
        if self.scale is not None and bool(self.scale.skip):
            return
        for (_, elements), kept in zip(matrices, states, strict=True):
            # With the optimizer's state on the host, it is on the device for the update.
            state = {
                kind: each.to(elements.device)
                for kind, each in kept.items()
                if kind != "step"
            }
            state["step"] = kept["step"]
            elements.copy_(self.soap.update(state, elements))
            for kind, each in state.items():
                if each is not kept[kind]:
                    kept[kind].copy_(each)

    def _kept(self, name: str) -> State:
        """The state of a matrix, zeros before its first step."""
        if name not in self.owned:
            home = self.unit.home
            self.owned[name] = {
                kind: torch.zeros(shape, dtype=home.dtype, device=home.device)
                for kind, shape in self.owned_shapes[name].items()
            }
            # On the host, where each step reads it.
            self.owned[name]["step"] = torch.zeros((), dtype=torch.float32)
        return self.owned[name]
