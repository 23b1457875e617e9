"""Seeded faults of SOAP: preconditioners, eigenbases and their owners."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from phalanx.training import soap
from phalanx.training.optimizer import State
from phalanx.training.soap import Soap, SoapUpdate

from .fault import fault, swapped

# The first step makes the bases and updates no matrix.
FIRST_UPDATE = "step 1: the weight of layers."
LATER = "step 2: the weight of layers."


def in_halves(dim: int) -> AbstractContextManager[None]:
    """Keep preconditioners, bases and moments for each half of a matrix."""
    right = Soap.update
    halves_of: dict[int, list[State]] = {}

    def update(self: Soap, state: State, gradient: Tensor) -> Tensor:
        # The matrix's own state only identifies it.
        pieces = gradient.chunk(2, dim)
        states = halves_of.setdefault(
            state["left"].data_ptr(), [_zeros(each) for each in pieces]
        )
        both = zip(states, pieces, strict=True)
        return torch.cat([right(self, *each) for each in both], dim)

    return swapped(Soap, "update", update)


def _zeros(gradient: Tensor) -> State:
    state = {
        each.kind: gradient.new_zeros(each.shape(*gradient.shape))
        for each in soap.MATRICES.owned
    }
    return state | {"step": torch.zeros(())}


@fault(
    "soap: a preconditioner for each shard",
    "gqa",
    "dp2 zero1",
    FIRST_UPDATE,
    optimizer="soap",
)
def _() -> AbstractContextManager[None]:
    return in_halves(0)


@fault(
    "soap: a preconditioner for each rank of tp",
    "gqa",
    "tp2",
    FIRST_UPDATE,
    optimizer="soap",
)
def _() -> AbstractContextManager[None]:
    return in_halves(1)


@fault(
    "soap: eigenbases are never refreshed",
    "gqa",
    "dp2 pp2 zero1 1f1b:3",
    LATER,
    optimizer="soap",
)
def _() -> AbstractContextManager[None]:
    return swapped(soap, "refreshed_basis", lambda moment, basis: basis)


@fault(
    "soap: the average gradient is not rotated into the new bases",
    "gqa",
    "dp2 tp2 zero3",
    LATER,
    optimizer="soap",
)
def _() -> AbstractContextManager[None]:
    right = Soap.update

    def update(self: Soap, state: State, gradient: Tensor) -> Tensor:
        before = state["left_basis"].clone()
        found = right(self, state, gradient)
        # As if it were kept in the basis of this step and read in that of the next.
        turn = state["left_basis"] @ before.mT
        if int(state["step"]) > 1:
            state["exp_avg"].copy_(turn @ state["exp_avg"])
        return found

    return swapped(Soap, "update", update)


@fault(
    "soap: all experts of a rank share one preconditioner",
    "experts",
    "ep2 zero1",
    "the weight of layers.",
    optimizer="soap",
)
def _() -> AbstractContextManager[None]:
    right = SoapUpdate._kept

    def kept(self: SoapUpdate, name: str) -> State:
        weight = name.partition("[")[0]
        first = min(
            each for each in self.owned_shapes if each.startswith(weight)
        )
        return right(self, first)

    return swapped(SoapUpdate, "_kept", kept)


@fault(
    "soap: the owner preconditions a gradient that is not clipped",
    "gqa",
    "dp2",
    LATER,
    optimizer="soap",
)
def _() -> AbstractContextManager[None]:
    return swapped(
        SoapUpdate,
        "contribution",
        lambda self, view, gradient, scale: gradient.to(view.dtype),
    )


@fault(
    "soap: preconditioners advance in a skipped step",
    "gqa",
    "dp2",
    "step 2: the update of",
    dtypes=("float16",),
    optimizer="soap",
)
def _() -> AbstractContextManager[None]:
    right = SoapUpdate.replace_by_updates

    def replace(self: SoapUpdate, matrices: list[tuple[str, Tensor]]) -> None:
        if self.scale is not None and bool(self.scale.skip):
            for state in self.owned.values():
                state["left"].mul_(self.soap.others.beta2)
                state["step"] += 1
        right(self, matrices)  # type: ignore[arg-type]

    return swapped(SoapUpdate, "replace_by_updates", replace)
