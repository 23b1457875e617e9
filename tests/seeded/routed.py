"""Seeded faults of experts: routing, counts and gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.comm import Work
from phalanx.layout import Mesh, pieces
from phalanx.models import ExpertMlps, ExpertProducts, Router
from phalanx.models.experts import _Counted
from phalanx.parallel import Unit, batch, groups, local
from phalanx.parallel.exchange import Choices
from phalanx.parallel.groups import UnitAxes
from phalanx.parallel.tensor import Weight, _Installer
from phalanx.training import executor

from .fault import fault, swapped

BIAS = "gradient of layers.3.mlp.router.bias"


@fault(
    "experts: the selection bias is included in the gate",
    "experts",
    "dp2",
    "step 1: the output of layers.1",
)
@contextmanager
def _() -> Iterator[None]:
    right = Router.scored

    def scored(self: Router, x: Tensor) -> Tensor:
        assert self.bias is not None
        return right(self, x) + self.bias.detach()

    with ExitStack() as stack:
        stack.enter_context(swapped(Router, "scored", scored))
        stack.enter_context(
            swapped(Router, "ranked", lambda self, scores: scores.detach())
        )
        yield


@fault(
    "experts: results keep the experts' order",
    "experts",
    "dp2",
    "output of layers.1",
)
def _() -> AbstractContextManager[None]:
    right = ExpertMlps.forward

    def forward(self: Any, x: Tensor, gates: Tensor, chosen: Tensor) -> Tensor:
        by_expert = chosen.flatten().sort(stable=True).values
        return right(self, x, gates, by_expert.view(chosen.shape))

    return swapped(ExpertMlps, "forward", forward)


@fault(
    "experts: tokens beyond a capacity are dropped",
    "experts",
    "dp2",
    "output of layers.1",
)
def _() -> AbstractContextManager[None]:
    right = ExpertProducts.on_sorted

    def on_sorted(self: Any, tokens: Tensor, counts: Tensor) -> Tensor:
        runs = right(self, tokens, counts).split(counts.tolist())
        capacity = 5 * len(tokens) // (4 * len(counts))
        taken = [torch.arange(len(run)) < capacity for run in runs]
        return torch.cat(
            [
                run * own.unsqueeze(-1)
                for run, own in zip(runs, taken, strict=True)
            ]
        )

    return swapped(ExpertProducts, "on_sorted", on_sorted)


@fault(
    "experts: one token's group mask is used for all",
    "latent",
    "dp2",
    "the routing of layers.1",
)
def _() -> AbstractContextManager[None]:
    right = Router.ranked

    def ranked(self: Router, scores: Tensor) -> Tensor:
        found = right(self, scores)
        left = found[:1, :1].isfinite()
        return (
            (scores + self.bias.detach())
            .detach()
            .masked_fill(~left, -torch.inf)
        )  # type: ignore[union-attr]

    return swapped(Router, "ranked", ranked)


@fault("experts: a rank does not add its counts", "experts", "dp2", BIAS)
def _() -> AbstractContextManager[None]:
    right = Unit.reduce

    def reduce(unit: Unit) -> Work:
        for weight in unit.order:
            grad = unit.parameters[weight.name].grad
            if weight.rate and unit.groups.replica.rank and grad is not None:
                grad.zero_()
        return right(unit)

    return swapped(Unit, "reduce", reduce)


@fault(
    "experts: recomputation counts tokens again",
    "experts",
    "recompute:selective accum:3",
    BIAS,
)
@contextmanager
def _() -> Iterator[None]:
    counts: dict[int, Tensor] = {}

    def forward(
        ctx: Any, gates: Tensor, bias: Tensor, excess: Tensor
    ) -> Tensor:
        ctx.bias = id(bias)
        counts[id(bias)] = counts.get(id(bias), 0) + excess
        return gates.view_as(gates)

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, counts.pop(ctx.bias), None

    with ExitStack() as stack:
        stack.enter_context(
            swapped(_Counted, "forward", staticmethod(forward))
        )
        stack.enter_context(
            swapped(_Counted, "backward", staticmethod(backward))
        )
        yield


@fault("seq: token counts are not summed over tp", "experts", "tp2 seq", BIAS)
def _() -> AbstractContextManager[None]:
    right = pieces.sum_over_tp

    def adds(dims: Any, *rest: Any) -> str:
        return "" if dims == ("-",) else right(dims, *rest)

    return swapped(pieces, "sum_over_tp", adds)


@fault("experts: padding is counted", "experts", "cp2", BIAS)
def _() -> AbstractContextManager[None]:
    return swapped(batch, "VALID", "unread")


@fault(
    "tp: a gate's gradient covers only a part of each expert",
    "experts",
    "tp2",
    "mlp.router.weight",
)
def _() -> AbstractContextManager[None]:
    def cut(self: Any, module: nn.Module) -> None:
        module.register_forward_pre_hook(
            lambda m, args: (self.fork(args[0]), *args[1:])
        )

    return swapped(_Installer, "_cut_experts", cut)


def _weights(**wrong: Any) -> AbstractContextManager[None]:
    """Change attributes of the weights of experts and routers."""
    right = local.cut_weights

    def cut(*args: Any) -> Mapping[str, Weight]:
        return {
            name: replace(weight, **wrong) if ".ro" in name else weight
            for name, weight in right(*args).items()
        }

    return swapped(local, "cut_weights", cut)


@fault("experts: the norm excludes them", "experts", "dp2", "step 0: the norm")
def _() -> AbstractContextManager[None]:
    return _weights(counted=False)


@fault(
    "experts: the bias is updated like a weight",
    "experts",
    "dp2",
    "step 0: the norm",
)
def _() -> AbstractContextManager[None]:
    return _weights(rate=0.0)


@fault(
    "tp: gradients of latents cover only a rank's heads",
    "latent",
    "tp2",
    "attn.kv_a_norm",
)
def _() -> AbstractContextManager[None]:
    right = pieces.sum_over_tp

    def adds(dims: Any, *rest: Any) -> str:
        return "" if "latent" in dims else right(dims, *rest)

    return swapped(pieces, "sum_over_tp", adds)


def _own_choices() -> AbstractContextManager[None]:
    """Let losses count the routing of this rank's tokens only."""
    return swapped(Choices, "sum", lambda self, groups: Work())


@fault(
    "cp: a sequence's loss uses the counts of only a part of it",
    "latent",
    "cp2",
    "mlp.router.weight",
)
def _() -> AbstractContextManager[None]:
    return _own_choices()


@fault(
    "seq: a sequence's loss uses the counts of one rank",
    "latent",
    "tp2 seq",
    "mlp.router.weight",
)
def _() -> AbstractContextManager[None]:
    return _own_choices()


@fault(
    "experts: losses are averaged over one rank's tokens",
    "latent",
    "dp2",
    "mlp.router.weight",
)
def _() -> AbstractContextManager[None]:
    right = executor.count_tokens
    return swapped(executor, "count_tokens", lambda batch: right(batch) // 2)


# ---- experts over ranks


def _axes(wrong: tuple[str, ...]) -> AbstractContextManager[None]:
    """Give units of experts wrong groups, such as those of the other weights."""
    right = groups.unit_axes

    def axes(model: Any, layout: Any, unit: int) -> UnitAxes:
        found, names = right(model, layout, unit), model.unit_of.items()
        routed = any(
            ".routed." in name and number == unit for name, number in names
        )
        return UnitAxes(found.shard, wrong) if routed else found

    return swapped(groups, "unit_axes", axes)


@fault(
    "ep: experts are summed over the dense group",
    "experts",
    "dp2 ep2",
    "mlp.routed",
)
def _() -> AbstractContextManager[None]:
    return _axes(("dp", "cp", "ep"))


@fault(
    "ep: gradients of experts are not summed over dp",
    "experts",
    "dp2 ep2",
    "mlp.routed",
)
def _() -> AbstractContextManager[None]:
    return _axes(())


@fault(
    "ep: gradients of experts are divided by ep",
    "experts",
    "dp2 ep2",
    "mlp.routed",
)
def _() -> AbstractContextManager[None]:
    right = Unit.reduce

    def reduce(unit: Unit) -> Work:
        for weight in unit.order:
            grad = unit.parameters[weight.name].grad
            if ".routed." in weight.name and grad is not None:
                grad /= 2
        return right(unit)

    return swapped(Unit, "reduce", reduce)


@fault(
    "ep: received tokens are not sorted by expert",
    "experts",
    "ep2",
    "output of layers.1",
)
def _() -> AbstractContextManager[None]:
    right = ExpertProducts.on_runs

    def on_runs(self: Any, tokens: Tensor, counts: Tensor) -> Tensor:
        return right(self, tokens.flip(0), counts).flip(0)

    return swapped(ExpertProducts, "on_runs", on_runs)


@fault(
    "ep: the token count omits the ranks of ep", "experts", "ep2", "the loss"
)
def _() -> AbstractContextManager[None]:
    right = groups.open_groups

    def opened(world: Any, *args: Any, **more: Any) -> Any:
        found = right(world, *args, **more)
        alone = world.split("alone", [(rank,) for rank in range(world.size)])
        return replace(found, count=alone)

    return swapped(local, "open_groups", opened)


# ---- experts sharded over tp or cp too


@fault(
    "experts:tp: gradients of experts are summed over tp",
    "experts",
    "tp2 seq experts:tp",
    "mlp.routed",
)
def _() -> AbstractContextManager[None]:
    return _axes(("dp", "cp", "ep", "tp"))


@fault(
    "experts:cp: experts are summed over cp",
    "experts",
    "cp2 experts:cp",
    "mlp.routed",
)
def _() -> AbstractContextManager[None]:
    return _axes(("dp", "cp", "ep"))


@fault(
    "experts:tp: the order of experts on ranks and of sent tokens differ",
    "experts",
    "ep2 tp2 seq experts:tp",
    "output of layers.1",
)
def _() -> AbstractContextManager[None]:
    right = Mesh.part

    def part(self: Mesh, axes: Any, at: Mapping[str, int]) -> tuple[int, int]:
        return right(replace(self, axes=self.axes[::-1]), axes, at)

    return swapped(Mesh, "part", part)


@fault(
    "experts:tp: the norm has the experts of only one rank of tp",
    "experts",
    "tp2 seq experts:tp",
    "step 0: the norm",
)
def _() -> AbstractContextManager[None]:
    right = local.cut_weights

    def cut(
        model: Any, layout: Any, at: Mapping[str, int]
    ) -> Mapping[str, Weight]:
        return {
            name: replace(
                weight,
                counted=weight.counted
                and not (".routed." in name and at["tp"]),
            )
            for name, weight in right(model, layout, at).items()
        }

    return swapped(local, "cut_weights", cut)


@fault(
    "experts:tp: tokens are counted on all ranks of tp",
    "experts",
    "tp2 seq experts:tp",
    BIAS,
)
def _() -> AbstractContextManager[None]:
    right = Unit.reduce

    def reduce(unit: Unit) -> Work:
        for weight in unit.order:
            grad = unit.parameters[weight.name].grad
            if weight.rate and grad is not None:
                grad *= unit.groups.also["norms"].size
        return right(unit)

    return swapped(Unit, "reduce", reduce)


@fault(
    "experts:tp: a whole expert adds only a share of its bias",
    "sinks",
    "tp2 seq experts:tp",
    "output of layers.0",
)
def _() -> AbstractContextManager[None]:
    right = _Installer.run

    def run(self: Any) -> None:
        right(self)
        for module in self.piece.modules():
            if isinstance(module, ExpertProducts):
                module.ranks = self.layout.tp

    return swapped(_Installer, "run", run)
