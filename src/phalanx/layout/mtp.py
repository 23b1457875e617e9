"""The keys of multi-token prediction, and the pieces that it adds (DeepSeek-V3 2024).

Each module predicts one token further ahead. It adds two pieces after the last block: a
join, which takes a hidden state and a later token's embedding, and a block. See
`models/mtp.py`. Other files ask a shape for its `predictors` and its `joins`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .codec import Mistake, key

if TYPE_CHECKING:
    from .shape import Shape


@dataclass(frozen=True, kw_only=True)
class MtpKeys:
    """The keys of a shape about multi-token prediction."""

    mtp: int = key(
        0, "modules that predict later tokens too; 0: none", maximum=16
    )
    mtp_weight: float = key(
        0.3, "factor of the mean of their losses", above=0, maximum=100
    )

    @property
    def predictors(self) -> int:
        """The number of modules that predict later tokens."""
        return self.mtp

    @property
    def extra_losses(self) -> Mapping[str, int]:
        """The keys that give the head losses beside its own, with their values."""
        return {"mtp": self.mtp} if self.mtp else {}


def mtp_mistakes(shape: Shape) -> Iterator[Mistake]:
    """Conflicts between sizes that are valid alone."""
    if shape.mtp and (shape.kind == "mlp" or shape.positions != "rope"):
        what = "mtp in a model that is not a decoder with rope"
        yield Mistake("mtp", what, "Leave it out")
