"""Tensor parallelism: weights sharded over `tp`, and regions that join results.

The model itself stays plain: the rule table names the dim of a weight that is sharded.
A module whose input dim is sharded joins at its output. The module that owns it forks
at its input, once for all its column weights. The token lookup and the loss are
replaced by versions for a part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..comm import Group, regions
from ..layout import Layout, LayoutError, pieces
from ..layout.rules import ADAPTER, AXIS_OF, Cut
from ..models import (
    Dropout,
    ExpertProducts,
    Merge,
    RMSNorm,
    Router,
    Spread,
    token_loss,
)
from ..models.loss import Logits, Words
from .experts_parts import ExpertsInParts, RouterOverTime
from .groups import Groups
from .model import Model
from .own_tp import install_views
from .parts import InParts, OverTime, Parts, Shared, add_in_tree
from .preference import PreferenceLoss
from .products import Place


@dataclass(frozen=True)
class Weight:
    """One parameter as this rank holds it.

    `adds` names the group over which the copies' gradients are summed because they did
    different work. `counted` is true on the one rank of the copies that the gradient
    norm counts.
    """

    name: str
    shape: tuple[int, ...]
    cuts: tuple[Cut, ...]
    decay: bool
    adds: str = ""
    counted: bool = True
    rate: float = 0.0  # see `Model.rates`
    frozen: bool = False
    matrices: tuple[tuple[slice, slice], ...] = ()  # see `Rules.matrices`
    over_tp: tuple[bool, ...] = ()  # for each dim, True if tp shards it

    @cached_property
    def local(self) -> tuple[int, ...]:
        return tuple(cut.length for cut in self.cuts)

    @property
    def box(self) -> tuple[slice, ...]:
        """The slices of this rank's part in the whole weight."""
        return tuple(slice(cut.start, cut.stop) for cut in self.cuts)

    def box_at(self, tp: int) -> tuple[slice, ...]:
        """The slices of another tp rank's part in the whole weight."""
        both = zip(self.cuts, self.shape, self.over_tp, strict=True)
        return tuple(
            cut.at(size, tp) if over else slice(cut.start, cut.stop)
            for cut, size, over in both
        )

    @property
    def copies(self) -> int:
        """The number of neighbouring tp ranks with the same part; 0 means all of them."""
        over = zip(self.cuts, self.over_tp, strict=True)
        return max((cut.copies for cut, over in over if over), default=0)

    @cached_property
    def rows(self) -> Tensor:
        """The whole weight's row, from 1, of each row of this part; 0: padding.

        All dims but the last form the rows.
        """
        shape = torch.Size(self.shape[:-1])
        # From 1, so that 0 is left for padded rows.
        # row numbers of the whole weight, sharded like the weight
        part = torch.arange(1, 1 + shape.numel()).view(shape)[self.box[:-1]]
        padded = part.new_zeros(self.local[:-1])
        padded[tuple(slice(0, n) for n in part.shape)] = part
        return padded.flatten()


def cut_of(
    model: Model,
    layout: Layout,
    name: str,
    shape: Sequence[int],
    at: Mapping[str, int],
) -> tuple[Cut, ...]:
    """The part of each dim of a weight that the rank at these coordinates holds."""
    cuts, dims = [], model.rules.dims(name, len(shape))
    for dim, axes, size in zip(dims, layout.axes_of(dims), shape, strict=True):
        # The elements of one indivisible unit: head_dim for heads and kv, otherwise 1.
        unit = max(1, size // model.counts.get(dim, size))
        cuts.append(Cut.of(size, *layout.mesh.part(axes, at), unit))
    return tuple(cuts)


def cut_weights(
    model: Model, layout: Layout, at: Mapping[str, int]
) -> dict[str, Weight]:
    """Every weight of the model as the rank at these coordinates holds it."""
    weights, tp = {}, at.get("tp", 0)
    for name, parameter in model.weights.items():
        shape = tuple(parameter.shape)
        dims = model.rules.dims(name, len(shape))
        cuts = cut_of(model, layout, name, shape, at)
        adds = pieces.sum_over_tp(dims, cuts, layout)
        # A scalar has no dim to shard.
        shared = max((cut.copies for cut in cuts), default=1)
        over_tp = tuple("tp" in axes for axes in layout.axes_of(dims))
        # KV heads are copied over runs of `shared` tp ranks, and weights that tp does
        # not shard over all of them.
        copies = shared if any(over_tp) else layout.tp
        # Of the ranks with one copy, the first counts its gradient in the norm.
        counted = tp % copies == 0
        rate, frozen = model.rates.get(name, 0.0), name in model.frozen
        known = name, shape, cuts, len(shape) > 1, adds, counted, rate, frozen
        weights[name] = Weight(
            *known, model.rules.matrices(name, shape), over_tp
        )
    return weights


class RowLinear(nn.Module):
    """A linear with sharded input features; its bias is added once, after the join."""

    def __init__(
        self, plain: nn.Linear, join: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.join = plain.weight, plain.bias, join
        for name, adapter in plain.named_children():
            self.add_module(name, adapter)
        # `Piece` replaces it by a product that adds the weight's gradient to its unit.
        self.weight_product: Callable[[Tensor], Tensor] = lambda x: F.linear(
            x, self.weight
        )

    def forward(self, x: Tensor) -> Tensor:
        # (B, T, out): this rank's part of each sum
        part = self.weight_product(x)
        # The thin product of an adapter is a partial sum too: one join serves both.
        for adapter in self.children():
            part = part + adapter(x)
        y = self.join(part)
        return y if self.bias is None else y + self.bias


class VocabularyEmbedding(nn.Module):
    """The lookup of a sharded vocabulary: tokens outside this rank's part give zeros.

    The padding token's row has no gradient on the rank that holds it.
    """

    def __init__(
        self, plain: nn.Embedding, cut: Cut, join: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.weight, self.cut, self.join = plain.weight, cut, join
        padding = plain.padding_idx
        mine = padding is not None and cut.start <= padding < cut.stop
        self.padding_idx = (
            padding - cut.start if padding is not None and mine else None
        )

    def forward(self, tokens: Tensor) -> Tensor:
        mine = (tokens >= self.cut.start) & (tokens < self.cut.stop)  # (B, T)
        # Tokens of other ranks look up row 0, and `mine` turns their result to zeros.
        here = torch.where(mine, tokens - self.cut.start, 0)
        # (B, T, hidden)
        rows = F.embedding(here, self.weight, padding_idx=self.padding_idx)
        return self.join(rows * mine.unsqueeze(-1))


class CutRMSNorm(nn.Module):
    """An RMS norm over features that tp shards: ranks add their sums of squares.

    If `copies` ranks hold the same features, each feature counts once.
    """

    def __init__(
        self, plain: RMSNorm, width: int, copies: int, group: Group
    ) -> None:
        super().__init__()
        self.weight, self.eps, self.plus_one = (
            plain.weight,
            plain.eps,
            plain.plus_one,
        )
        self.width, self.copies, self.group = width, copies, group

    def forward(self, x: Tensor) -> Tensor:
        # (..., width / ranks * copies)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = wide.square().sum(-1, keepdim=True)  # (..., 1)
        # `copies` ranks hold the same features: each adds a share of their sum.
        squares = self.group.share(squares, self.copies)
        # Summed in both directions: each rank's result depends on the features of all
        # ranks.
        squares = regions.copy(regions.reduce(squares, self.group), self.group)
        weight = (
            self.weight.to(wide.dtype) + 1.0 if self.plus_one else self.weight
        )
        # The mean is over the features of all ranks.
        y: Tensor = (
            wide * torch.rsqrt(squares / self.width + self.eps) * weight
        )
        return y.to(x.dtype)


class VocabularyCrossEntropy(nn.Module):
    """The summed cross-entropy of logits that are sharded over the vocabulary."""

    def __init__(self, words: Words, z: float = 0.0) -> None:
        super().__init__()
        self.words, self.z = words, z

    def forward(self, logits: Logits, targets: Tensor) -> Tensor:
        # Ranks exchange two numbers per token, never a row of logits.
        return token_loss(logits, targets, self.words, self.z)


def words_of(cut: Cut, group: Group) -> Words:
    """A rank's part of a vocabulary that the ranks of `group` share."""
    return Words(cut.start, cut.stop - cut.start, group.all_reduce)


def _plus_bias(module: Any, x: Tensor) -> Tensor:
    y: Tensor = x + module.bias
    return y


def _copied(group: Group, x: Tensor) -> Tensor:
    return regions.copy(x, group)


def _reduced(group: Group, x: Tensor) -> Tensor:
    return regions.reduce(x, group)


def _gathered(
    group: Group, module: nn.Module, args: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """The tokens of all ranks, gathered so that every rank computes the same."""
    return tuple(regions.gather(x, group, 1) for x in args)


def _own_tokens(
    plain: Callable[..., Tensor], group: Group, y: Tensor, gates: Tensor
) -> Tensor:
    """This rank's tokens of a result that all ranks have."""
    return regions.take(plain(y, gates), group, 1)


def install_regions(model: Model, layout: Layout, groups: Groups) -> None:
    """Replace modules, so that the model computes the same on shards."""
    if layout.tp == 1 and layout.exact < 2:
        return
    for prefix, piece in model.pieces:
        _Installer(model, layout, groups, prefix, piece).run()


class _Installer:
    """Installs the regions in one piece."""

    def __init__(
        self,
        model: Model,
        layout: Layout,
        groups: Groups,
        prefix: str,
        piece: nn.Module,
    ) -> None:
        self.model, self.groups, self.prefix, self.piece = (
            model,
            groups,
            prefix,
            piece,
        )
        # Korthikanti et al. 2022: with seq the residual stream is (B, T / tp, hidden),
        # and a region gathers or scatters time where it otherwise copies or sums.
        self.layout, self.seq, tp = layout, layout.seq, groups.tp
        if layout.seq:
            self.fork: Callable[[Tensor], Tensor] = lambda x: (
                regions.gather_sum(x, tp, 1)
            )
            self.join: Callable[[Tensor], Tensor] = lambda x: (
                regions.scatter_sum(x, tp, 1)
            )
        else:
            self.fork = lambda x: regions.copy(x, tp)
            self.join = lambda x: regions.reduce(x, tp)

        self.parts = None
        if layout.exact > 1:
            count = layout.exact // layout.tp
            self.parts = Parts(tp.rank * count, count)

    def run(self) -> None:
        self._cut_norms()
        rows, columns = self._cut_modules()
        # The module that owns a row weight, such as attention or an MLP, forks its
        # input once for all of its column weights.
        owners = {name.rpartition(".")[0] for name in rows}
        # Whole experts take a rank's own tokens, and their results are complete when
        # they return.
        for module in (
            self.piece.modules() if "tp" not in self.layout.experts else ()
        ):
            if self.parts is not None:
                self._install_expert_parts(module, self.parts)
            elif isinstance(module, Spread):
                self._cut_experts(module)
            elif isinstance(module, ExpertProducts):
                # down's bias is added by every tp rank, each its share.
                module.ranks = self.layout.tp
            elif isinstance(module, Merge):
                module.register_forward_hook(lambda m, args, y: self.join(y))
        if self.parts is None:
            for name in rows:
                self._replace(name, RowLinear(self._at(name), self.join))
            for owner in owners:
                self._fork(self._at(owner))
        else:
            self._install_parts(self.parts, rows, owners)
        # A column weight without a row weight behind it, such as the output projection.
        for name, dim in columns.items():
            if not any(name.startswith(owner + ".") for owner in owners):
                self._single(name, dim)
        install_views(self.piece, self.layout.tp, self.groups.tp.rank)
        if self.seq:
            self._cut_time()

    def _install_parts(
        self, parts: Parts, rows: Sequence[str], owners: Collection[str]
    ) -> None:
        """Run owners of row weights in parts, and other modules on parts of time."""
        # As many ranks of tp have other parts of time.
        ranks = self.layout.tp if self.seq else 1
        times = self.layout.exact // ranks
        group = self.groups.tp if self.seq else None
        for owner in owners:
            module, full = self._at(owner), f"{self.prefix}.{owner}"
            shared = [
                self._shared(f"{full}.{path}", child, key)
                for path, child in module.named_modules()
                for key in self._tensors(child)
            ]
            run = InParts(module.forward, parts, shared, self.fork, self.join)
            module.forward = run
            for name in rows:
                row: Any = self._at(name)
                if name.startswith(owner + ".") and row.bias is not None:
                    plain = partial(_plus_bias, row)
                    add = OverTime(plain, row, ["bias"], times, group)
                    run.biases.append((row, add))
        for name, child in self.piece.named_modules():
            every = child._parameters.items()
            keys = [key for key, x in every if x is not None]
            inside = any(name.startswith(owner + ".") for owner in owners)
            if keys and not inside and self._whole(name, child):
                of = RouterOverTime if isinstance(child, Router) else OverTime
                run_parts = of(child.forward, child, keys, times, group)
                other: Any = child
                other.forward = run_parts

    def _install_expert_parts(self, module: Any, parts: Parts) -> None:
        """Run experts in parts; ranks of tp spread and merge the same tokens."""
        tp = self.groups.tp
        if isinstance(module, ExpertProducts):
            fork, join = partial(_copied, tp), partial(_reduced, tp)
            ExpertsInParts(module, parts.count, fork, join).install()
        elif isinstance(module, Spread) and self.seq:
            module.register_forward_pre_hook(partial(_gathered, tp))
        elif isinstance(module, Merge) and self.seq:
            merge: Any = module
            merge.weighted = partial(_own_tokens, module.weighted, tp)

    def _tensors(self, module: nn.Module) -> list[str]:
        """The names of a module's own weights and buffers."""
        both = *module._parameters.items(), *module._buffers.items()
        return [key for key, x in both if x is not None]

    def _dims(self, path: str, x: Tensor) -> tuple[str, ...]:
        return self.model.rules.dims(path.replace("..", "."), x.dim())

    def _whole(self, name: str, module: nn.Module) -> bool:
        """True if tp shards none of a module's own weights."""
        return not any(
            AXIS_OF.get(dim) == "tp"
            for key, x in module._parameters.items()
            if x is not None
            for dim in self._dims(f"{self.prefix}.{name}.{key}", x)
        )

    def _shared(self, path: str, module: nn.Module, key: str) -> Shared:
        """The places in the parts of a weight or a buffer of an owner."""
        x: Any = getattr(module, key)
        layout, parts, tp = self.layout, self.parts, self.groups.tp
        assert parts is not None
        dims = self._dims(f"{path}.{key}", x)
        places: list[Place] = [(slice(None),)] * parts.count
        copies = layout.exact
        for number, axes in enumerate(layout.axes_of(dims)):
            if "tp" not in axes and AXIS_OF.get(dims[number]) != "tp":
                continue
            size = x.shape[number]
            unit = max(1, size // self.model.counts.get(dims[number], size))
            start = Cut.of(size, layout.tp, tp.rank, unit).start
            places = []
            for part in range(parts.first, parts.first + parts.count):
                cut = Cut.of(size, layout.exact, part, unit)
                copies = cut.copies
                own = slice(cut.start - start, cut.stop - start)
                places.append((*[slice(None)] * number, own))
        group = None
        if copies > parts.count:
            kv = self.groups.units[0].also["kv"]
            group = tp if copies == layout.exact else kv
        return Shared(module, key, tuple(places), group)

    def _cut_norms(self) -> None:
        for name, module in list(self.piece.named_modules()):
            if not isinstance(module, RMSNorm):
                continue
            shape, weight = module.weight.shape, f"{self.prefix}.{name}.weight"
            if AXIS_OF.get(*self.model.rules.dims(weight, 1)) == "tp":
                (cut,) = cut_of(self.model, self.layout, weight, shape, {})
                self._replace(
                    name,
                    CutRMSNorm(module, shape[0], cut.copies, self.groups.tp),
                )

    def _cut_modules(self) -> tuple[list[str], dict[str, str]]:
        """Modules whose weight is sharded by inputs, and those sharded by outputs."""
        rows: list[str] = []
        columns: dict[str, str] = {}
        for name, module in self.piece.named_modules():
            weight = getattr(module, "weight", None)
            if not isinstance(weight, nn.Parameter) or weight.dim() != 2:
                continue
            dims = self.model.rules.dims(
                f"{self.prefix}.{name}.weight".replace("..", "."), 2
            )
            if ADAPTER in dims:
                continue  # an adapter inside a linear, whose regions it shares
            # nn.Linear holds (out, in); a bare x @ weight holds (in, out), and so does
            # a lookup.
            out, into = dims if isinstance(module, nn.Linear) else dims[::-1]
            if AXIS_OF.get(into) == "tp":
                if isinstance(module, nn.Linear):
                    rows.append(name)
                else:
                    cut = self._vocabulary(module)
                    self._replace(
                        name, VocabularyEmbedding(module, cut, self.join)
                    )
            elif AXIS_OF.get(out) == "tp":
                columns[name] = out
        return rows, columns

    def _at(self, name: str) -> Any:
        return self.piece.get_submodule(name)

    def _replace(self, name: str, module: nn.Module) -> None:
        owner, _, child = name.rpartition(".")
        setattr(self._at(owner), child, module)

    def _fork(self, module: nn.Module) -> None:
        fork = self.fork

        def enter(
            module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if args:
                return (fork(args[0]), *args[1:]), named
            # Called by keywords alone: the first parameter holds the activations.
            first = next(iter(signature(module.forward).parameters), "")
            if first not in named:
                raise LayoutError(
                    f"a {type(module).__name__}, whose weights tp shards, is called without its first"
                    f" argument, {first!r}. Pass the activations as that argument."
                )
            return (), {**named, first: fork(named[first])}

        module.register_forward_pre_hook(enter, with_kwargs=True)

    def _cut_experts(self, module: Spread) -> None:
        """Fork the inputs of sharded experts.

        Gates fork too: a rank's part of the results gives only a part of the gates'
        gradient.
        """

        def enter(
            module: nn.Module, args: tuple[Tensor, ...]
        ) -> tuple[Tensor, ...]:
            x, gates, chosen = args
            if self.seq:
                # (B, T / tp, top_k) to (B, T, top_k); indices have no gradient to sum
                chosen = regions.gather(chosen, self.groups.tp, 1)
            return self.fork(x), self.fork(gates), chosen

        module.register_forward_pre_hook(enter)

    def _vocabulary(self, module: Any) -> Cut:
        return Cut.of(
            module.weight.shape[0], self.layout.tp, self.groups.tp.rank
        )

    def _single(self, name: str, dim: str) -> None:
        """Install the regions of a column weight that no row weight follows.

        The output is gathered, unless it is over the vocabulary, whose loss takes the
        shards.
        """
        module, tp = self._at(name), self.groups.tp
        self._fork(module)
        owner = self._at(name.rpartition(".")[0])
        if dim == "vocab":
            self._shard_loss(owner, self._vocabulary(module))
        else:
            # (..., features / tp) to (..., features)
            module.register_forward_hook(
                lambda m, args, y: regions.gather(y, tp, y.dim() - 1)
            )

    def _shard_loss(self, owner: Any, cut: Cut) -> None:
        """Make the loss of a head take this rank's words of the logits."""
        words = words_of(cut, self.groups.tp)
        if self.parts is not None:
            words = words._replace(
                parts=self.parts.count,
                all_parts=self.layout.exact,
                add=add_in_tree,
            )
        if isinstance(owner.loss, PreferenceLoss):
            owner.loss.words = words
            return
        z = getattr(owner.loss, "z", 0.0)
        owner.loss = VocabularyCrossEntropy(words, z)

    def _cut_time(self) -> None:
        """Under seq, give modules between the regions only this rank's tokens.

        These are learned positions, noise, and the marks of tokens that a router
        counts.
        """
        tp = self.groups.tp

        # (B, T) to (B, T / tp), the same run of times as the activations
        def own(x: Tensor) -> Tensor:
            return x.chunk(tp.size, 1)[tp.rank]

        for name, module in self.piece.named_modules():
            if isinstance(
                module, nn.Embedding
            ) and "position" in self.model.rules.dims(
                f"{self.prefix}.{name}.weight"
            ):
                module.register_forward_pre_hook(
                    lambda m, args: (own(args[0]), *args[1:])
                )
            # A dropout without a dot in its name stands on the residual stream.
            # Attention's own dropout is between the regions and sees all tokens.
            elif isinstance(module, Router) or (
                isinstance(module, Dropout) and "." not in name
            ):
                module.register_forward_pre_hook(
                    # args[1] is the router's `valid` or the dropout's `noise`.
                    lambda m, args: (
                        args[0],
                        None if args[1] is None else own(args[1]),
                        *args[2:],
                    )
                )
