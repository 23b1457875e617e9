"""Products in 8 bits as one process computes them, for `verify`: linears of blocks in plain torch.

The formats are rounded to by arithmetic, not by torch's dtypes, and numbers that share a scale are
taken one slice after the other.

Under tp and cp each rank has the scales of what it sums. One process has these, too, if it cuts the same
sums at the same places: it runs attention and MLPs once for each rank of tp, with that rank's part of the
weights, and adds the results; the gradient of a weight is a sum over the ranks of cp, each with its own
tokens. Of the engine nothing is in it but where these cuts are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from ..layout import Layout, Mesh
from ..layout.choices import MATMULS, MatmulTraits
from ..layout.rules import PARTIAL
from ..models import IGNORED, ExpertMlps
from ..models.attention import HeadsAttention
from ..models.decoder import Mlp
from ..parallel import Model
from ..parallel.batch import DOCUMENTS, VALID, held_times, time_multiple
from ..parallel.tensor import cut_of

# Of a format: digits behind the point, the exponent of its least normal and of its largest number.
_FORMS = {"float8_e4m3fn": (3, -6, 8, 448.0), "float8_e5m2": (2, -14, 15, 57344.0)}


def sums_of(layout: Layout) -> Layout:
    """The layout with nothing but what cuts the sums of products."""
    axes = tuple(axis for axis in layout.mesh.axes if axis.name in ("cp", "tp"))
    seq, whole = (
        layout.seq and layout.tp > 1,
        tuple(x for x in layout.experts if x == "tp"),
    )
    return Layout(Mesh(axes), seq=seq, experts=whole)


def can_replay(model: Model, cuts: Layout) -> bool:
    """True if one process can cut the sums of this model as the layout does."""
    if model.shape is None or model.shape.kind != "decoder":
        return False
    if cuts.tp == 1:
        return True
    whole = Layout()
    for name, block in model.pieces[1:-1]:
        inside = {p for _, owner in _owners(block) for p in owner.parameters()}
        for path, parameter in block.named_parameters():
            place = f"{name}.{path}", parameter.shape
            cut = cut_of(model, cuts, *place, {}) != cut_of(model, whole, *place, {})
            if cut and parameter not in inside:
                return False
    return True


def padded(batch: Mapping[str, Tensor], cuts: Layout) -> Mapping[str, Tensor]:
    """The batch with its time padded as ranks pad it: padding tokens have a part in scales."""
    short = -batch["tokens"].shape[1] % time_multiple(cuts)
    if not short:
        return batch
    fills = {"targets": IGNORED, DOCUMENTS: -1}
    batch = {**batch, VALID: torch.ones_like(batch["tokens"], dtype=torch.bool)}
    return {
        name: F.pad(x, (0, short), value=fills.get(name, 0))
        for name, x in batch.items()
    }


@dataclass
class Rounding:
    """Rounds a matrix whose last dim is summed over to an 8-bit format and back, in a layout with these
    `cuts` of sums. With a `generator` it is not known which sums these are: each is whole or cut into
    equal parts at random."""

    traits: MatmulTraits
    cuts: Layout = Layout()
    generator: torch.Generator | None = None

    def held(self, length: int) -> list[Tensor]:
        """The tokens of a sequence that each rank of cp has."""
        if self.generator:
            return [torch.arange(length)]  # cut at random as other sums are
        ring, ulysses = self.cuts.mesh.of("cp.ring"), self.cuts.mesh.of("cp.ulysses")
        return [
            held_times(length, ring, ulysses, rank) for rank in range(ring * ulysses)
        ]

    def __call__(self, x: Tensor, form: str, *, weight: bool = False) -> Tensor:
        digits, least, last, most = _FORMS[form]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        out = torch.zeros_like(wide)
        k = x.shape[-1]
        run = self.traits.run or k
        rows = run if weight and self.traits.square else 0
        of_rows = (
            [slice(n, n + rows) for n in range(0, len(x), rows)]
            if rows
            else [slice(None)]
        )
        for column in self._runs(k, run):
            for row in of_rows:
                part = wide[row, column]
                largest = part.abs().amax((0, 1) if rows else 1, keepdim=True)
                scale = self._scale(largest, last, most).float()
                # Kernels multiply by the inverse, which is a float32 as well.
                narrow = _nearest((part * scale).float(), digits, least, most)
                out[row, column] = narrow * (1 / scale)
        return out

    def _runs(self, k: int, run: int) -> Iterator[slice]:
        """The columns that share scales."""
        parts = 1
        if self.generator and torch.randint(2, (), generator=self.generator):
            parts = min(k, self.cuts.ranks)
        ends = [k * n // parts for n in range(parts + 1)]
        for start, stop in pairwise(ends):
            yield from (slice(n, min(n + run, stop)) for n in range(start, stop, run))

    def _scale(self, largest: Tensor, last: int, most: float) -> Tensor:
        if self.traits.power:
            exponent = torch.frexp(largest.float())[1] - 1 - last
            return torch.ldexp(torch.ones(largest.shape), -exponent.clamp(min=-127))
        return (most / largest.double().clamp(min=1e-12)).float()


def _nearest(x: Tensor, digits: int, least: int, most: float) -> Tensor:
    """The nearest number of a format, the even one of two: whole multiples of its last digit."""
    x = x.clamp(-most, most).double()
    step = torch.ldexp(
        torch.ones_like(x), (torch.frexp(x)[1] - 1).clamp(min=least) - digits
    )
    return torch.round(x / step) * step


class RoundedLinear(torch.autograd.Function):
    """A linear of x (B, T, in) with each product's factors rounded; the weight's gradient is that of one
    sequence after the other, and of one rank's tokens after the other's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rounding: Rounding) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rounding, form = rounding, rounding.traits.forward
        flat = rounding(x.flatten(0, -2), form)
        return _out(flat @ rounding(weight, form, weight=True).T, x).view(
            *x.shape[:-1], -1
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        rounding: Rounding = ctx.rounding
        of_x, of_gradient = rounding.traits.forward, rounding.traits.gradient
        flat = rounding(gradient.flatten(0, -2), of_gradient)
        into = _out(flat @ rounding(weight.T, of_x, weight=True).T, x).view_as(x)
        held = rounding.held(x.shape[1])
        each = [
            (y[own], g[own]) for y, g in zip(x, gradient, strict=True) for own in held
        ]
        parts = [rounding(g.T, of_gradient) @ rounding(y.T, of_x).T for y, g in each]
        return into, _out(sum(parts[1:], parts[0]), weight), None


class RoundedExpert(torch.autograd.Function):
    """A product of an expert's tokens x (n, in) with factors rounded, but for the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rounding: Rounding) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rounding, form = rounding, rounding.traits.forward
        return _out(rounding(x, form) @ rounding(weight, form, weight=True).T, x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        rounding: Rounding = ctx.rounding
        turned = rounding(weight.T, rounding.traits.forward, weight=True)
        into = rounding(gradient, rounding.traits.gradient) @ turned.T
        return _out(into, x), gradient.T @ x, None


def _out(y: Tensor, like: Tensor) -> Tensor:
    return y.to(like.dtype)


def install(
    model: Model, word: str, cuts: Layout, generator: torch.Generator | None = None
) -> None:
    """From here on the linears of blocks, but for those of adapters, multiply so."""
    if not word:
        return
    rounding = Rounding(MATMULS[word], cuts, generator)
    for name, block in model.pieces[1:-1]:
        loras: list[Any] = [m.lora for m in block.modules() if getattr(m, "lora", None)]
        thin = {child for lora in loras for child in lora.modules()}
        for module in block.modules():
            if isinstance(module, ExpertMlps) and rounding.traits.experts:
                module.product = partial(_of_expert, rounding)
            if isinstance(module, nn.Linear) and module not in thin:
                own: Any = module
                adapted: Callable[..., Tensor] | None = getattr(module, "lora", None)
                own.forward = _forward(own, rounding, adapted)
        for path, module in _owners(block) if cuts.tp > 1 and not generator else ():
            if not (isinstance(module, ExpertMlps) and "tp" in cuts.experts):
                _OverRanks(model, cuts, f"{name}.{path}", module)


def _owners(block: nn.Module) -> list[tuple[str, Any]]:
    """The modules that forks and joins of tp stand around."""
    kinds = HeadsAttention, Mlp, ExpertMlps
    return [
        (path, module)
        for path, module in block.named_modules()
        if isinstance(module, kinds)
    ]


class _OverRanks:
    """A module's forward as ranks of tp compute it together: each with its part of the weights, and the
    results added up. What is gathered before it and summed behind it is whole on one process."""

    def __init__(self, model: Model, cuts: Layout, prefix: str, module: Any) -> None:
        self.module, self.plain, self.running = module, module.forward, False
        self.rank, self.given = 0, dict[nn.Module, Sequence[Tensor]]()
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        # By rank, where its part of each weight and buffer stands; None: a bias that rank 0 adds.
        self.boxes: list[dict[str, tuple[slice, ...] | None]] = []
        for rank in range(cuts.tp):
            boxes: dict[str, tuple[slice, ...] | None] = {}
            for name, x in named.items():
                cut = cut_of(model, cuts, f"{prefix}.{name}", x.shape, {"tp": rank})
                boxes[name] = tuple(slice(side.start, side.stop) for side in cut)
                if rank and _added_once(model, cuts, prefix, name):
                    boxes[name] = None
            # Where there are fewer units than ranks the last ones have nothing but padding.
            if all(
                side.start < side.stop for box in boxes.values() for side in box or ()
            ):
                self.boxes.append(boxes)
        module.forward = self
        wide = getattr(module, "q_wide_norm", None) is not None
        self.wide = [("wq", "q_wide_norm"), ("wk", "k_wide_norm")] if wide else []
        for child in (getattr(module, name) for pair in self.wide for name in pair):
            child.forward = partial(self._recall, child, child.forward)

    def __call__(self, *args: Any) -> Tensor:
        if self.running:
            plain: Tensor = self.plain(*args)
            return plain
        tensors = {
            **dict(self.module.named_parameters()),
            **dict(self.module.named_buffers()),
        }
        parts = [
            {
                name: torch.zeros_like(tensors[name])
                if box is None
                else tensors[name][box]
                for name, box in boxes.items()
            }
            for boxes in self.boxes
        ]
        self.running, results = True, []
        self.given = self._normed(parts, args[0])
        for self.rank, part in enumerate(parts):
            results.append(functional_call(self.module, part, args))
        self.running, self.given = False, {}
        return torch.stack(results).sum(0)

    def _normed(
        self, parts: Sequence[Mapping[str, Tensor]], x: Tensor
    ) -> dict[nn.Module, Sequence[Tensor]]:
        """By module, the outputs by rank of the norms over all heads, and of the linears before them:
        a rank can go on when all have got so far."""
        given: dict[nn.Module, Sequence[Tensor]] = {}
        for names in self.wide:
            linear, norm = (getattr(self.module, name) for name in names)
            outputs = [
                functional_call(linear, _inside(part, names[0]), (x,)) for part in parts
            ]
            weight = torch.cat([part[f"{names[1]}.weight"] for part in parts])
            normed = functional_call(
                norm, {"weight": weight}, (torch.cat(outputs, -1),)
            )
            given[linear] = outputs
            given[norm] = torch.split(normed, [y.shape[-1] for y in outputs], -1)
        return given

    def _recall(
        self, child: nn.Module, plain: Callable[[Tensor], Tensor], x: Tensor
    ) -> Tensor:
        return self.given[child][self.rank] if child in self.given else plain(x)


def _inside(tensors: Mapping[str, Tensor], child: str) -> dict[str, Tensor]:
    prefix = child + "."
    return {
        n.removeprefix(prefix): x for n, x in tensors.items() if n.startswith(prefix)
    }


def _added_once(model: Model, cuts: Layout, prefix: str, name: str) -> bool:
    """True if it is a bias that is added once, behind the sum of the ranks' results."""
    if PARTIAL in model.rules.dims(f"{prefix}.{name}"):
        return True
    owner, _, kind = name.rpartition(".")
    if kind != "bias":
        return False
    return "tp" in cuts.axes_of(model.rules.dims(f"{prefix}.{owner}.weight"))[-1]


def _of_expert(
    rounding: Rounding, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    y: Tensor = RoundedExpert.apply(x, weight, rounding)  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias


def _forward(
    linear: nn.Linear, rounding: Rounding, adapted: Callable[..., Tensor] | None
) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        y: Tensor = RoundedLinear.apply(x, linear.weight, rounding)  # type: ignore[no-untyped-call]
        y = y if linear.bias is None else y + linear.bias
        return y if adapted is None else y + adapted(x)

    return forward
