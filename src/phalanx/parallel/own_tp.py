"""Shards the linears of a module without a description over tp, by a plan in PyTorch's own words.

A plan maps names of linears to styles, as `parallelize_module` of torch or `base_model_tp_plan` of
transformers takes them: `{"attn.wq": ColwiseParallel(), "attn.wo": RowwiseParallel()}`. It is
translated to rules of our table. A module that owns column and row linears is then run once on the
meta device with the sizes that a rank has, so a head count or width in its code that does not fit is
found before anything starts.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..layout.rules import Cut
from .own_heads import HEADS, KEYS, Heads, heads_of
from .transformers_refused import code_line, error_line

Plan = Mapping[str, Any]
# Arguments of a module and the shape of its output.
Call = tuple[Any, Any, torch.Size]
COLUMN, ROW = "colwise", "rowwise"
_TORCH = {"ColwiseParallel": COLUMN, "RowwiseParallel": ROW}


class UncutError(ValueError):
    """A plan that cannot be followed: the place and the reason."""


@dataclass(frozen=True)
class FeaturePart:
    """A run of features that is sharded by whole units: by heads, or one by one."""

    size: int
    dim: str  # heads, kv or ffn
    units: int

    def cut(self, tp: int, index: int = 0) -> Cut:
        # In whole units: a head has size / units features.
        return Cut.of(self.size, tp, index, max(1, self.size // self.units))


class FusedLinear(nn.Module):
    """A linear whose output is several matrices one after the other, such as q, k and v.

    A rank of tp has the weight whole and multiplies by its rows of each matrix. So the gradient of
    the weight is the sum over the ranks.
    """

    def __init__(self, plain: nn.Linear, parts: Sequence[FeaturePart]) -> None:
        super().__init__()
        self.weight, self.bias, self.parts = (
            plain.weight,
            plain.bias,
            tuple(parts),
        )
        # This rank's rows; empty for all of them.
        self.own: tuple[slice, ...] = ()

    def take(self, tp: int, index: int) -> None:
        """Multiply by the rows of one rank."""
        # [q | k | v]: this rank's rows of each, after the whole matrices before it
        rows, begin = [], 0
        for part in self.parts:
            cut = part.cut(tp, index)
            rows.append(slice(begin + cut.start, begin + cut.stop))
            begin += part.size
        self.own = tuple(rows)

    def _rows(self, x: Tensor) -> Tensor:
        return torch.cat([x[rows] for rows in self.own]) if self.own else x

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self._rows(self.bias)
        # (..., in) to (..., this rank's rows of all parts)
        return F.linear(x, self._rows(self.weight), bias)


@dataclass(frozen=True)
class OwnerView:
    """What the code of a module sees under tp: `sizes` are attributes with the part that each counts,
    and `narrow` gives it activations that look as wide as a rank's part."""

    sizes: Mapping[str, FeaturePart]
    narrow: bool = False

    def install(
        self, owner: nn.Module, columns: Sequence[str], tp: int, index: int
    ) -> None:
        """Makes a module see a rank's part."""
        # Such as self.n_head = n_head / tp, which the code reads in its own forward.
        for name, part in self.sizes.items():
            setattr(owner, name, part.cut(tp, index).length)
        for name in columns:
            linear = owner.get_submodule(name)
            if isinstance(linear, FusedLinear):
                linear.take(tp, index)
        if self.narrow:
            _see_narrow(owner, columns, tp)


def _see_narrow(owner: nn.Module, columns: Sequence[str], tp: int) -> None:
    """The code of a module sees activations of a rank's width, as it may read their size. Its column linears
    get the whole ones in their place."""
    seen: dict[str, Tensor] = {}

    def enter(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        seen["whole"] = args[0]
        # The first hidden / tp features: the code reads their shape, not values.
        seen["narrow"] = args[0][..., : args[0].shape[-1] // tp]
        return (seen["narrow"], *args[1:])

    def column(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        # By identity: only the activations themselves are swapped back.
        whole = args[0] is seen.get("narrow")
        return (seen["whole"], *args[1:]) if whole else args

    def leave(module: nn.Module, args: Any, y: Any) -> None:
        seen.clear()

    owner.register_forward_pre_hook(enter)
    owner.register_forward_hook(leave)
    for name in columns:
        owner.get_submodule(name).register_forward_pre_hook(column)


@dataclass(frozen=True)
class OwnerCut:
    """The sharded linears of one module: the parts of each column linear's output, and its row linears."""

    columns: Mapping[str, tuple[FeaturePart, ...]]
    rows: tuple[str, ...]
    inner: FeaturePart
    heads: Heads
    view: OwnerView = OwnerView({})

    def rules(self, owner: nn.Module) -> Iterator[tuple[str, str]]:
        """The dims of each weight of the module."""
        for name, weight in owner.named_parameters():
            linear, _, key = name.rpartition(".")
            rest = weight.dim() - 1
            parts = self.columns.get(linear, ())
            if len(parts) == 1:
                yield name, " ".join([parts[0].dim, *"-" * rest])
            elif linear in self.rows:
                yield name, f"- {self.inner.dim}" if key == "weight" else "-"
            else:  # its copies see other heads or features: gradients are added
                yield name, " ".join(["head", *"-" * rest])

    def apply(self, owner: Any) -> None:
        """Replaces the fused linears of the module, which notes what its code is to see."""
        for name, parts in self.columns.items():
            if len(parts) > 1:
                parent, _, child = name.rpartition(".")
                fused = FusedLinear(owner.get_submodule(name), parts)
                setattr(owner.get_submodule(parent), child, fused)
        owner.__dict__["tp_cut"] = self

    def install(self, owner: nn.Module, tp: int, index: int) -> None:
        self.view.install(owner, [*self.columns], tp, index)


def install_views(piece: nn.Module, tp: int, index: int) -> None:
    """Makes the modules of a piece that a plan has sharded see a rank's part."""
    for module in piece.modules():
        cut = module.__dict__.get("tp_cut")
        if isinstance(cut, OwnerCut):
            cut.install(module, tp, index)


# ---- from a plan to what is sharded


def planned_cuts(
    blocks: Mapping[str, nn.Module],
    plan: Plan,
    calls: Mapping[nn.Module, Call],
    frame: object,
) -> dict[str, OwnerCut]:
    """By the name of each module in the blocks that owns sharded linears, how. `blocks` are the blocks by
    their names in the module; an UncutError says what cannot be followed, and where."""
    used, found = set[str](), dict[str, OwnerCut]()
    for name, block in blocks.items():
        # 1. Collect the planned linears of each block under the module that owns them.
        owners: dict[str, dict[str, str]] = {}
        for path, module in block.named_modules():
            full = f"{name}.{path}"
            # The first matching key of the plan counts.
            key = next((k for k in plan if _names(k, full)), None)
            if key is None:
                continue
            used.add(key)
            style = style_of(plan[key], full)
            if not style:
                continue
            if type(module) is not nn.Linear:
                kind = type(module).__name__
                raise UncutError(
                    f"{full} is a {kind}, and tp shards nn.Linear"
                )
            owner, _, linear = path.rpartition(".")
            owners.setdefault(owner, {})[linear] = style
        # 2. Find for each owner how its code can run with a part of the features.
        for owner, styles in owners.items():
            where = f"{name}.{owner}".rstrip(".")
            if not owner:
                raise UncutError(
                    f"{', '.join(styles)} of {where} belong to the block itself, whose input also goes past"
                    " them. Put them into a module of their own"
                )
            module = block.get_submodule(owner)
            found[where] = _cut_of(where, module, styles, calls, frame)
    # 3. Refuse what the plan names and the blocks do not have.
    if lost := [
        key for key in plan if key not in used and style_of(plan[key], key)
    ]:
        raise UncutError(
            f"no linear in the blocks is named {', '.join(lost)}. What is outside of them stays whole"
        )
    # The rule table has one number of heads for all blocks.
    if (
        len(
            {
                (c.heads.query, c.heads.key)
                for c in found.values()
                if c.heads.owner
            }
        )
        > 1
    ):
        raise UncutError("its attentions differ in their numbers of heads")
    return found


def _names(pattern: str, name: str) -> bool:
    """True if a key of a plan names a module: in full, or from any of its parents."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def style_of(value: Any, where: str) -> str:
    """The style of an entry of a plan: column, row, or "" for a weight that stays whole."""
    # torch's styles are objects, known by their class; transformers' are words.
    style = (
        value
        if isinstance(value, str)
        else _TORCH.get(type(value).__name__, "")
    )
    if isinstance(value, str) and value.startswith("replicated"):
        return ""
    if style not in (COLUMN, ROW):
        kind = repr(value) if isinstance(value, str) else type(value).__name__
        raise UncutError(f"{where} is planned as {kind}, which is not known")
    return style


def _cut_of(
    where: str,
    owner: nn.Module,
    styles: Mapping[str, str],
    calls: Mapping[nn.Module, Call],
    frame: object,
) -> OwnerCut:
    linears: dict[str, Any] = {
        name: owner.get_submodule(name) for name in styles
    }
    rows = tuple(name for name, style in styles.items() if style == ROW)
    columns = [name for name, style in styles.items() if style == COLUMN]
    # The row linears' input width is the width that tp shards between the two regions.
    widths = {linears[name].in_features for name in rows}
    if not columns or len(widths) != 1:
        raise UncutError(
            f"{where} has no pair of column and row linears of one width"
        )
    (width,) = widths
    # Attention is sharded by heads, an MLP by single features.
    heads = heads_of(owner)
    if heads.owner is not None and (heads.query < 2 or width % heads.query):
        raise UncutError(
            f"{where} has {heads.query} heads, and a width of {width}"
        )
    inner = FeaturePart(width, "heads" if heads.owner else "ffn", heads.query)
    inner = inner if heads.owner else FeaturePart(width, "ffn", width)
    parts = {
        name: _parts_of(
            f"{where}.{name}", linears[name].out_features, inner, heads
        )
        for name in columns
    }
    if owner not in calls:
        raise UncutError(f"{where} gives no tensor")
    # Try the views from the least intrusive on; the first that runs is taken.
    reason = ""
    for view in _views(owner, inner, heads):
        cut = OwnerCut(parts, rows, inner, heads, view)
        failed = _failure(cut, owner, calls[owner], frame)
        if not failed:
            return cut
        reason = reason or failed
    raise UncutError(
        f"{where} does not run with a part of its features: {reason}"
    )


def _parts_of(
    where: str, size: int, inner: FeaturePart, heads: Heads
) -> tuple[FeaturePart, ...]:
    """The matrices in the output of a column linear."""
    kv = FeaturePart(inner.size // heads.query * heads.key, "kv", heads.key)
    attention = heads.owner is not None
    fused = (inner, kv, kv) if attention else (inner, inner)
    # One matrix of the inner width, one of the KV width, or several in one weight.
    for parts in ((inner,), (kv,), fused):
        if sum(part.size for part in parts) == size and (
            attention or kv not in parts
        ):
            return parts
    raise UncutError(
        f"{where} has {size} features, which are not those of its row linear ({inner.size}), nor q, k and v"
        " in one"
    )


def _views(
    owner: nn.Module, inner: FeaturePart, heads: Heads
) -> Iterator[OwnerView]:
    """What the code of a module may need to see, from the least: its own sizes, those of a part, and
    activations of a part's width."""
    yield OwnerView({})
    known = {inner.size: inner}
    if heads.owner is owner:
        kv = FeaturePart(
            inner.size // heads.query * heads.key, "kv", heads.key
        )
        known = {kv.size: kv, **known, 3 * inner.size: inner}
    # Attributes named for heads, and numbers equal to a sharded width.
    sizes: dict[str, FeaturePart] = {}
    for name, value in vars(owner).items():
        if name in HEADS and value == heads.query:
            sizes[name] = FeaturePart(heads.query, "heads", heads.query)
        elif name in KEYS and value == heads.key:
            sizes[name] = FeaturePart(heads.key, "kv", heads.key)
        elif type(value) is int and value in known and value != 3 * inner.size:
            sizes[name] = known[value]
    yield OwnerView(sizes)
    yield OwnerView(sizes, narrow=True)


def _failure(
    cut: OwnerCut, owner: nn.Module, call: Call, frame: object
) -> str:
    """Explains why a module does not run with the sizes of a rank, or returns ""."""
    # Rank 0 of the smallest tp stands for all: parts are equal where units divide.
    tp = _few(cut)
    sizes: dict[str, tuple[int, int]] = {}
    for name, parts in cut.columns.items():
        sizes[name] = 0, sum(part.cut(tp).length for part in parts)
    for name in cut.rows:
        sizes[name] = 1, cut.inner.cut(tp).length
    small = resized(owner, sizes, frame)
    cut.view.install(small, [*cut.columns], tp, 0)
    return failure_of(small, call)


def _few(cut: OwnerCut) -> int:
    """The smallest number of ranks that divides the units."""
    query, key = cut.heads.query, cut.heads.key
    if cut.heads.owner is None:
        query = key = cut.inner.size
    # KV heads are either divided too, or repeated.
    fits = (n for n in range(2, query + 1) if query % n == 0)
    return next((n for n in fits if key % n == 0 or n % key == 0), query)


# ---- a module in the sizes of a rank


def resized(
    owner: nn.Module, sizes: Mapping[str, tuple[int, int]], frame: object
) -> nn.Module:
    """A copy on the meta device in which linears have other sizes: by name the dim and its new size."""
    # The copy shares the frame, which holds the whole model.
    small = copy.deepcopy(owner, {id(frame): frame})
    for module in small.modules():
        for key, x in module._buffers.items():
            module._buffers[key] = None if x is None else x.to("meta")
    for name, (at, size) in sizes.items():
        linear: Any = small.get_submodule(name)
        for key, weight in list(linear.named_parameters()):
            # The bias of a row linear has output features, which are whole.
            if key == "bias" and at:
                continue
            shape = list(weight.shape)
            shape[at] = size
            setattr(
                linear, key, nn.Parameter(torch.empty(shape, device="meta"))
            )
    return small


def failure_of(small: nn.Module, call: Call) -> str:
    """Explains why a module on the meta device does not run as it did whole, or returns ""."""
    args, kwargs, shape = call
    # A cache of transformers holds what the whole run put into it.
    if "past_key_values" in kwargs:
        kwargs = {**kwargs, "past_key_values": None}
    try:
        with torch.device("meta"), torch.no_grad():
            y = small(*args, **kwargs)
    except Exception as error:
        return f"{error_line(error)} ({code_line(error)})"
    y = y[0] if isinstance(y, tuple) else y
    return "" if y.shape == shape else "its output has another shape"


def mlp_width(cuts: Mapping[str, OwnerCut]) -> int:
    """The width that the ranks of tp must divide for all MLPs; 0 if none is sharded."""
    widths = [
        cut.inner.size for cut in cuts.values() if cut.heads.owner is None
    ]
    return math.gcd(*widths)
