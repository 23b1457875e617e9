"""Attention and MLPs computed on one process as all ranks of tp compute them.

Each module runs once for each rank, with that rank's part of the weights, and the
results are added. The gradient of its input is the sum of those of all ranks. So a
narrow precision rounds the same sums as the layout does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from ..layout import Layout
from ..layout.rules import PARTIAL, Cut
from ..models import ExpertMlps
from ..models.dense import Mlp
from ..models.ends import LossHead
from ..models.mixers import KINDS
from ..parallel import Model
from ..parallel.tensor import cut_of


def compute_over_ranks(model: Model, cuts: Layout) -> None:
    """Make the modules of blocks that tp splits run once for each of its ranks from now
    on."""
    if cuts.tp == 1:
        return
    for name, block in model.pieces[1:-1]:
        for path, module in owners(block):
            # With tp over whole experts a rank has all of an expert's sums.
            if not (isinstance(module, ExpertMlps) and "tp" in cuts.ep_axes):
                _OverRanks(model, cuts, f"{name}.{path}", module)


def output_over_ranks(model: Model, cuts: Layout) -> None:
    """Make the output projection compute each rank's words of the vocabulary from now
    on."""
    head = model.pieces[-1][1]
    if cuts.tp > 1 and isinstance(head, LossHead):
        output: Any = head.output
        output.forward = _WordsOverRanks(output, cuts.tp)


def owners(block: nn.Module) -> list[tuple[str, Any]]:
    """Return the modules that tp surrounds with forks and joins."""
    kinds = *KINDS, Mlp, ExpertMlps
    return [
        (path, module)
        for path, module in block.named_modules()
        if isinstance(module, kinds)
    ]


class _OverRanks:
    """A module's forward as computed by all tp ranks: each with its part of the
    weights, results added.

    What is gathered before the module and summed after it is whole on one process.
    """

    def __init__(
        self, model: Model, cuts: Layout, prefix: str, module: Any
    ) -> None:
        self.module, self.plain, self.running = module, module.forward, False
        self.rank, self.given = 0, dict[nn.Module, Sequence[Tensor]]()
        named = {
            **dict(module.named_parameters()),
            **dict(module.named_buffers()),
        }
        # By rank, the box of its part of each weight and buffer; None for a bias that
        # rank 0 adds.
        self.boxes: list[dict[str, tuple[slice, ...] | None]] = []
        for rank in range(cuts.tp):
            boxes: dict[str, tuple[slice, ...] | None] = {}
            for name, x in named.items():
                cut = cut_of(
                    model, cuts, f"{prefix}.{name}", x.shape, {"tp": rank}
                )
                # Slices of the global tensor that this rank holds.
                boxes[name] = tuple(
                    slice(side.start, side.stop) for side in cut
                )
                if rank and _added_once(model, cuts, prefix, name):
                    boxes[name] = None
            # If there are fewer units than ranks, the last ranks have only padding.
            if all(
                side.start < side.stop
                for box in boxes.values()
                for side in box or ()
            ):
                self.boxes.append(boxes)
        module.forward = self
        # OLMo 2's norms over all heads need every rank's part before any rank
        # can go on.
        wide = getattr(module, "q_wide_norm", None) is not None
        self.wide = (
            [("wq", "q_wide_norm"), ("wk", "k_wide_norm")] if wide else []
        )
        for child in (
            getattr(module, name) for pair in self.wide for name in pair
        ):
            child.forward = partial(self._recall, child, child.forward)

    def __call__(self, *args: Any) -> Tensor:
        # Called again from inside `functional_call`: this time the module's
        # own forward.
        if self.running:
            plain: Tensor = self.plain(*args)
            return plain
        tensors = {
            **dict(self.module.named_parameters()),
            **dict(self.module.named_buffers()),
        }
        parts = [
            {
                # A bias that is added once is zero on all ranks but the first.
                name: torch.zeros_like(tensors[name])
                if box is None
                else tensors[name][box]
                for name, box in boxes.items()
            }
            for boxes in self.boxes
        ]
        self.running, results = True, []
        inputs = _copies(args[0], len(parts))
        # Computed for all ranks beforehand, and looked up while each of them
        # runs.
        self.given = self._normed(parts, inputs)
        for self.rank, part in enumerate(parts):
            own = inputs[self.rank], *args[1:]
            results.append(functional_call(self.module, part, own))
        self.running, self.given = False, {}
        # The sum that tp makes after the module.
        return torch.stack(results).sum(0)

    def _normed(
        self, parts: Sequence[Mapping[str, Tensor]], inputs: Sequence[Tensor]
    ) -> dict[nn.Module, Sequence[Tensor]]:
        """Return the outputs by rank of norms over all heads and of the linears before
        them, by module.

        A rank can continue only when all have reached the norm.
        """
        given: dict[nn.Module, Sequence[Tensor]] = {}
        for names in self.wide:
            linear, norm = (getattr(self.module, name) for name in names)
            outputs = [
                functional_call(linear, _inside(part, names[0]), (x,))
                for part, x in zip(parts, inputs, strict=True)
            ]
            # The whole norm's weight and input, joined from all ranks.
            weight = torch.cat([part[f"{names[1]}.weight"] for part in parts])
            normed = functional_call(
                norm, {"weight": weight}, (torch.cat(outputs, -1),)
            )
            given[linear] = outputs
            given[norm] = torch.split(
                normed, [y.shape[-1] for y in outputs], -1
            )
        return given

    def _recall(
        self, child: nn.Module, plain: Callable[[Tensor], Tensor], x: Tensor
    ) -> Tensor:
        return (
            self.given[child][self.rank] if child in self.given else plain(x)
        )


class _InputCopies(torch.autograd.Function):
    """A copy for each rank. Their gradients are added once, after each is complete."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> tuple[Tensor, ...]:
        return tuple(x.clone() for _ in range(ranks))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return torch.stack(gradients).sum(0), None


def _copies(x: Tensor, ranks: int) -> tuple[Tensor, ...]:
    # (B, T, hidden) for each rank
    return _InputCopies.apply(x, ranks)  # type: ignore[no-untyped-call,no-any-return]


class _WordsOverRanks:
    """A linear layer whose output features, the words, are divided among the ranks."""

    def __init__(self, linear: nn.Linear, ranks: int) -> None:
        self.linear = linear
        words = linear.weight.shape[0]
        cuts = [Cut.of(words, ranks, rank) for rank in range(ranks)]
        # The last ranks may have only padding.
        self.cuts = [cut for cut in cuts if cut.start < cut.stop]

    def __call__(self, x: Tensor) -> Tensor:
        inputs = _copies(x, len(self.cuts))
        parts = [
            F.linear(each, self.linear.weight[cut.start : cut.stop])
            for each, cut in zip(inputs, self.cuts, strict=True)
        ]
        return torch.cat(parts, -1)  # (B, T, words)


def _inside(tensors: Mapping[str, Tensor], child: str) -> dict[str, Tensor]:
    prefix = child + "."
    return {
        n.removeprefix(prefix): x
        for n, x in tensors.items()
        if n.startswith(prefix)
    }


def _added_once(model: Model, cuts: Layout, prefix: str, name: str) -> bool:
    """True for a bias that is added once, after the sum of the ranks' results."""
    if PARTIAL in model.rules.dims(f"{prefix}.{name}"):
        return True
    owner, _, kind = name.rpartition(".")
    if kind != "bias":
        return False
    return (
        "tp" in cuts.axes_of(model.rules.dims(f"{prefix}.{owner}.weight"))[-1]
    )
