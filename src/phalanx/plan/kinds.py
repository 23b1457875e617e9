"""What the planner asks of `cost`: a model's three kinds of piece, each as a function of its rows.

The function that computes them is handed in, so that planning from cached costs never loads torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from ..layout import Layout, Shape
from ..program import PieceCost

__all__ = ["PieceKinds", "CostFunction"]


class PieceKinds(Protocol):
    """A model's pieces under one cut, each a function of a microbatch's rows."""

    @property
    def embed(self) -> Callable[[float], PieceCost]: ...

    @property
    def block(self) -> Callable[[float], PieceCost]: ...

    @property
    def head(self) -> Callable[[float], PieceCost]: ...


class CostFunction(Protocol):
    """What cached_costs a shape under the cuts of layouts; keys are the cuts."""

    def __call__(
        self, model: Shape | str, layouts: Iterable[Layout], *, sequence: int
    ) -> Mapping[Layout, PieceKinds]: ...
