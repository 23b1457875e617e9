"""Seeded faults of 8-bit matmuls: scales and formats."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from phalanx.comm import Work
from phalanx.parallel import low_precision, pieces
from phalanx.parallel.low_precision import Rounded
from phalanx.parallel.narrow import NarrowUnit
from phalanx.parallel.products import MatmulSpec

from .fault import fault, swapped

right: Any = low_precision.rounded


@fault(
    "8-bit matmuls omit the scales of the weights",
    "gqa",
    "dp2 fp8",
    "step 0: the output of layers.0",
)
def _() -> AbstractContextManager[None]:
    def weight(self: Any, weight: Tensor) -> Rounded:
        z: Rounded = right(weight, self.traits.forward, **self.shared)
        return z._replace(scales=z.scales.clone().fill_(1.0))

    return swapped(low_precision.EightBits, "_weight", weight)


@fault(
    "a weight gets the scales of its transpose",
    "gqa",
    "dp2 zero3 fp8",
    "step 0: the output of layers.0",
)
def _() -> AbstractContextManager[None]:
    def weight(self: Any, weight: Tensor) -> Rounded:
        z, other = (
            right(w, self.traits.forward, **self.shared)
            for w in (weight, weight.mT)
        )
        same: bool = z.scales.shape == other.scales.shape
        taken: Rounded = z._replace(scales=other.scales) if same else z
        return taken

    return swapped(low_precision.EightBits, "_weight", weight)


@fault(
    "activations are rounded to the gradients' format",
    "gqa",
    "dp2 fp8",
    "step 0: the output of layers.0",
)
def _() -> AbstractContextManager[None]:
    def rounded(x: Tensor, form: str, **how: Any) -> Rounded:
        z: Rounded = right(x, "float8_e5m2", **how)
        return z

    return swapped(low_precision, "rounded", rounded)


@fault(
    "a gradient is rounded twice: for the input, and again for the weight",
    "gqa",
    "dp2 fp8",
    "step 0: the gradient of layers.",
)
def _() -> AbstractContextManager[None]:
    plain = low_precision.EightBits.weight_gradient

    def weight_gradient(self: Any, x: Tensor, gradient: Tensor) -> Tensor:
        twice = right(
            gradient.flatten(0, -2), self.traits.gradient, **self.shared
        )
        return plain(self, x, twice.restored(gradient.dtype).view_as(gradient))

    return swapped(low_precision.EightBits, "weight_gradient", weight_gradient)


@fault(
    "a scale spans all sequences of a microbatch",
    "gqa",
    "dp2 fp8",
    "step 0: the gradient of layers.",
)
def _() -> AbstractContextManager[None]:
    plain = low_precision.EightBits.weight_gradient

    def weight_gradient(self: Any, x: Tensor, gradient: Tensor) -> Tensor:
        return plain(self, x.flatten(0, -2), gradient.flatten(0, -2))

    return swapped(low_precision.EightBits, "weight_gradient", weight_gradient)


@fault(
    "the head's matmul is in 8 bits too",
    "gqa",
    "pp2 1f1b:3 fp8",
    "step 0: the loss",
)
def _() -> AbstractContextManager[None]:
    from phalanx.parallel.pieces import Piece, _Factor
    from phalanx.parallel.products import MatmulSpec

    plain = Piece.__init__

    def init(self: Piece, *args: Any, **named: Any) -> None:
        plain(self, *args, **named)
        for weight, (unit, name) in self.owners.items() if self.last else ():
            for module in self.module.modules():
                if getattr(module, "weight", None) is weight and hasattr(
                    module, "weight_product"
                ):
                    own: Any = module
                    spec = MatmulSpec(
                        transposed=False, matmul=unit.precision.matmul
                    )
                    own.weight_product = self._product(
                        _Factor(weight, unit, name, spec)
                    )

    return swapped(Piece, "__init__", init)


@fault(
    "a tile on two ranks uses each rank's own maximum",
    "gqa",
    "dp2 zero3 fp8:tile",
    "step 0: the output of layers.",
)
def _() -> AbstractContextManager[None]:
    plain = low_precision.EightBits.narrowed

    def narrowed(
        self: Any, weight: Tensor, largest: Tensor | None = None
    ) -> Rounded:
        return plain(self, weight)

    return swapped(low_precision.EightBits, "narrowed", narrowed)


@fault(
    "weights gathered in 8 bits keep the scales of the previous step",
    "gqa",
    "dp2 zero3 fp8:tile",
    "step 1: the output of layers.0",
)
def _() -> AbstractContextManager[None]:
    right = NarrowUnit.agree_scales

    def agree_scales(self: Any) -> Work:
        if vars(self).setdefault("agreed", False):
            return Work()
        self.agreed = True
        return right(self)

    return swapped(NarrowUnit, "agree_scales", agree_scales)


@fault(
    "the input's gradient uses the scales of other tiles",
    "gpt",
    "dp2 zero1 accum:2 fp8:tile",
    "step 0: the gradient of layers.",
)
def _() -> AbstractContextManager[None]:
    plain = low_precision.EightBits.input_gradient

    def input_gradient(self: Any, gradient: Tensor, weight: Any) -> Tensor:
        return plain(
            self,
            gradient,
            weight._replace(scales=weight.scales.roll(1, 0) * 2),
        )

    return swapped(low_precision.EightBits, "input_gradient", input_gradient)


@fault(
    "experts' weight gradients are scaled over the tokens of one rank",
    "experts",
    "dp2 ep2 fp8:experts",
    "step 0: the gradient of layers.",
)
def _() -> AbstractContextManager[None]:
    right = pieces._contribute

    def contribute(
        unit: Any, name: str, x: Tensor, gradient: Tensor, spec: MatmulSpec
    ) -> None:
        if spec.expert is None or spec.matmul is None:
            right(unit, name, x, gradient, spec)
            return
        product = spec.matmul.weight_gradient(x, gradient)
        unit.parameters[name].grad[spec.expert] += product

    return swapped(pieces, "_contribute", contribute)


@fault(
    "tp: partial 8-bit matmuls are rounded to bfloat16 before the sum",
    "gqa",
    "tp2 fp8",
    "step 0: the output of layers.0",
)
def _() -> AbstractContextManager[None]:
    plain = low_precision.EightBits.forward

    def forward(self: Any, x: Tensor, weight: Any) -> Tensor:
        return plain(self, x, weight).bfloat16().to(x.dtype)

    return swapped(low_precision.EightBits, "forward", forward)


@fault(
    "tp: a rank's shard of a weight uses the scales of its first row",
    "gqa",
    "tp2 seq fp8",
    "step 0: the output of layers.0",
)
def _() -> AbstractContextManager[None]:
    def weight(self: Any, weight: Tensor) -> Rounded:
        z: Rounded = right(weight, self.traits.forward, **self.shared)
        return z._replace(scales=z.scales[:1].expand_as(z.scales))

    return swapped(low_precision.EightBits, "_weight", weight)


@fault(
    "cp: inputs are rounded per token, then again for a weight's gradient",
    "gqa",
    "cp2 fp8",
    "step 0: the gradient of layers.",
)
def _() -> AbstractContextManager[None]:
    plain = low_precision.EightBits.weight_gradient

    def weight_gradient(self: Any, x: Tensor, gradient: Tensor) -> Tensor:
        twice = right(x.flatten(0, -2), self.traits.forward, **self.shared)
        return plain(self, twice.restored(x.dtype).view_as(x), gradient)

    return swapped(low_precision.EightBits, "weight_gradient", weight_gradient)
