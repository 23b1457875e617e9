"""Takes a module that nobody described apart: its blocks, what runs before them, and what runs after.

The module runs whole once, on meta, with an example batch. What is around the blocks is found by the
order of its calls, and runs by the means of `frame.py`, as transformers' own code does: a module of
another piece gives zeros of the shape that it gave then. Nothing of the weights is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..layout import LayoutError, Rules
from ..models import IGNORED
from .frame import (
    Frame,
    Key,
    OuterModules,
    Reached,
    Running,
    StandIn,
    around_blocks,
    stop,
    take_out,
)
from .model import Model
from .own_loss import arguments_for
from .own_tp import OwnerCut, Plan, UncutError, planned_cuts
from .probe import bind_weights
from .transformers_refused import code_line, refuse
from .whole import TARGETS, Whole

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class _Given:
    """The input and output of a module around the blocks in the example, as a stand-in needs them."""

    took: torch.Size
    shape: torch.Size
    dtype: torch.dtype

    def shape_for(self, took: torch.Size) -> tuple[int, ...]:
        """The shape for another input: its first sizes are the input's as far as they were in the
        example."""
        # Leading dims shared with the input follow it: (B, T) to (B, T, hidden).
        alike = 0
        for a, b in zip(self.took, self.shape, strict=False):
            if a != b:
                break
            alike += 1
        if (
            not alike
            and self.took
            and self.shape
            and not self.shape[0] % self.took[0]
        ):
            # several rows for each of the batch, as for pairs of texts
            return (self.shape[0] // self.took[0] * took[0], *self.shape[1:])
        return (*took[:alike], *self.shape[alike:])


class WeightOutside(Tensor):
    """A weight of another piece, of which a forward may read the dtype, device and shape alone."""

    reason = ""
    # attributes and methods of tensors, as torch hands them to __torch_function__
    _FACTS = (
        *(
            getattr(Tensor, name).__get__
            for name in ("dtype", "device", "shape")
        ),
        Tensor.size,
        Tensor.dim,
    )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in cls._FACTS:
            plain: Any = super().__torch_function__
            return plain(func, types, args, kwargs or {})
        # Anything but a fact needs values, which this piece does not have.
        every = tree_leaves((args, kwargs))
        outside = next(x for x in every if isinstance(x, WeightOutside))
        raise LayoutError(outside.reason)


class OwnFrame(Frame):
    """A user's module, whose forward is called with the entries of a batch that its arguments name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.given: dict[Key, _Given] = {}
        self.ignored = IGNORED  # the target that its own loss leaves out
        # Weights that belong to the modules around the blocks themselves: the module, the weight's name
        # there, and its name in the first piece, which computes with it.
        self.bare: list[tuple[nn.Module, str, str]] = []

    def passed_by(self, key: Key, args: Any, kwargs: Any) -> Any:
        x = _first_tensor(args, kwargs)
        # A block of another piece passes its activations on unchanged.
        if isinstance(key, int):
            return x
        # A module around the blocks gives zeros that take no memory.
        known = self.given[key]
        zero = x.new_zeros((), dtype=known.dtype)
        return zero.expand(known.shape_for(x.shape))

    def attribute(self, real: nn.Module, name: str) -> Any:
        value = getattr(real, name)
        if isinstance(value, nn.Parameter):
            known: WeightOutside = value.detach().as_subclass(WeightOutside)
            known.reason = f"it reads the weight {name} of a {type(real).__name__} outside of that module"
            return known
        return value

    def run(
        self, running: Running, batch: Batch, own: nn.Module | None = None
    ) -> Any:
        """Runs the forward. `own` is the first piece, if that runs: it has the bare weights."""
        # Only the first piece has the bare weights; the others get zeros.
        for owner, key, name in self.bare:
            weight = None if own is None else own._parameters[name]
            owner._parameters[key] = self._nothing(owner, key, batch, weight)
        device = next(iter(batch.values())).device
        self._bring_buffers(device)
        given = arguments_for(
            self.module.forward, with_ignored(batch, self.ignored)
        )
        # On meta, where pieces are costed, what the forward makes by itself is on meta too.
        with torch.device(device) if device.type == "meta" else nullcontext():
            return self.until_reached(running, partial(self.module, **given))

    @staticmethod
    def _nothing(
        owner: nn.Module, key: str, batch: Batch, weight: nn.Parameter | None
    ) -> nn.Parameter:
        """The weight, or zeros in its place where another piece runs."""
        if weight is not None:
            return weight
        like = owner._parameters[key]
        assert like is not None
        zero = next(iter(batch.values())).new_zeros((), dtype=like.dtype)
        return nn.Parameter(zero.expand(like.shape), requires_grad=False)

    @cached_property
    def _around(self) -> tuple[nn.Module, ...]:
        """The modules that no stand-in has replaced."""
        every = self.module.modules()
        return tuple(x for x in every if not isinstance(x, StandIn))

    def _bring_buffers(self, device: torch.device) -> None:
        """Tables around the pieces come to the device that computes."""
        for module in self._around:
            own = module._buffers
            for key, x in own.items():
                if x is not None:
                    own[key] = x.to(device)


def with_ignored(batch: Batch, ignored: int) -> Batch:
    """A batch in which targets that count nothing are those that a model's own loss leaves out."""
    if ignored == IGNORED or TARGETS not in batch:
        return batch
    targets = batch[TARGETS]
    return {**batch, TARGETS: targets.masked_fill(targets == IGNORED, ignored)}


@dataclass(frozen=True, eq=False)
class OwnWhole(Whole):
    """A user's module as it is; its own loss leaves out the targets `ignored`."""

    ignored: int = IGNORED

    def given(self, batch: Batch) -> dict[str, Tensor]:
        return super().given(with_ignored(batch, self.ignored))


def _first_tensor(args: Any, kwargs: Any) -> Tensor:
    every = (*args, *kwargs.values())
    return next(x for x in every if isinstance(x, Tensor))


class _OwnOuter(OuterModules):
    """Modules around the blocks, by names without dots."""

    frame: OwnFrame
    takes_batch = True
    uncompiled = True  # it is left by an exception


class OwnEmbed(_OwnOuter):
    """The module's forward before its first block."""

    def forward(self, **batch: Tensor) -> Tensor:
        x: Tensor = self.frame.run(self.running(0, stop), batch, self)
        return x


class OwnHead(_OwnOuter):
    """The module's forward after its last block; it returns what the module returns."""

    def __init__(
        self, frame: OwnFrame, children: Mapping[str, nn.Module], last: int
    ) -> None:
        super().__init__(frame, children)
        self.last = last

    def forward(self, x: Tensor, /, **batch: Tensor) -> Any:
        # The last block's stand-in gives x; everything before it runs on zeros.
        return self.frame.run(
            self.running(self.last, lambda *_, **__: x), batch
        )


def _block_forward(self: Any, x: Tensor, /, **batch: Tensor) -> Tensor:
    """A block as a piece: with the other arguments that the forward around it makes."""
    # No tensor beside the activations: the block runs without the frame.
    if self._alone is not None:
        args, kwargs = self._alone
        y: Tensor = self.theirs(x, *args, **kwargs)
        return y

    # The frame runs up to this block and is left there with the block's output.
    def block(first: Tensor, *args: Any, **kwargs: Any) -> None:
        first = first if self._after_other else x
        raise Reached(self.theirs(first, *args, **kwargs))

    running: dict[Key, Callable[..., Any]] = {self._number: block}
    # What the forward makes of the last block's output is this piece's.
    if self._after_other:
        running[self._number - 1] = lambda *_, **__: x
    reached: Tensor = self.frame.run(running, batch)
    return reached


@cache
def _block_class(kind: Any) -> type[nn.Module]:
    members = {
        "forward": _block_forward,
        "theirs": kind.forward,
        "takes_batch": True,
    }
    return type(kind.__name__, (kind,), members)


@dataclass(frozen=True)
class Apart:
    """A module taken apart, and what its run on the example has shown.

    `returned` is what the forward gave, on meta. `words` are the rows of the table in which it looks up its
    first argument, `places` those of the table of positions; 0 where there is none.
    """

    model: Model
    frame: OwnFrame
    blocks: Sequence[nn.Module]
    # By the name of the module that owns sharded linears.
    cuts: Mapping[str, OwnerCut]
    width: int
    returned: Any
    words: int
    places: int


def take_apart(
    module: nn.Module, example: Batch, plan: Plan | None = None
) -> Apart:
    """The pieces of a module on meta; a LayoutError says why it cannot be cut, and where."""
    kind = type(module).__name__
    try:
        return _taken_apart(module, example, plan or {})
    except LayoutError as error:
        raise LayoutError(
            f"{kind} cannot be cut into pieces: {str(error).rstrip('.')}. Describe it"
            " (docs/bring-your-model.md), or give no example: then it is one piece, for dp and ZeRO."
        ) from None


def _taken_apart(module: nn.Module, example: Batch, plan: Plan) -> Apart:
    path, layers = blocks_of(module)
    blocks = list(layers.children())
    names = {owner: name for name, owner in module.named_modules()}
    bare = [
        (owner, key, weight)
        for owner in path
        for key, weight in owner.named_parameters(recurse=False)
    ]

    def named(owner: nn.Module, child: str) -> str:
        return f"{names[owner]}.{child}".lstrip(".").replace(".", "_")

    # 1. Replace the blocks and the modules around them by stand-ins.
    frame = OwnFrame(module)
    outer = take_out(frame, path, layers, named)
    # 2. Run the whole once on meta to learn the order of calls and every shape.
    trial = _RunOnMeta(frame, blocks, outer)
    around = around_blocks(trial.run(example), outer)
    # 3. Translate the plan for tp. If it does not fit, the blocks stay whole.
    children = [
        f"{names[layers]}.{child}" for child, _ in layers.named_children()
    ]
    listed = dict(zip(children, blocks, strict=True))
    cuts, why_whole = dict[str, OwnerCut](), ""
    try:
        cuts = planned_cuts(listed, plan, trial.calls, frame)
    except UncutError as error:
        why_whole = str(error)
    # 4. Make each block a piece by changing its class alone.
    for number, block in enumerate(blocks):
        own_kind: Any = type(block)
        block.__class__ = _block_class(own_kind)
        alone = trial.others[number]
        block.__dict__.update(_number=number, _alone=alone, frame=frame)
        block.__dict__["_after_other"] = number in trial.after_other
        # a frame is left by an exception
        block.__dict__["uncompiled"] = alone is None
    # 5. Give the first piece the weights that belong to no module around the blocks.
    embed = OwnEmbed(frame, around.before)
    for owner, key, weight in bare:
        name = named(owner, key)
        embed.register_parameter(name, weight)
        frame.bare.append((owner, key, name))
    head = OwnHead(frame, around.after, len(blocks) - 1)
    inner = tuple((f"blocks.{n}", block) for n, block in enumerate(blocks))
    pieces = (("embed", embed), *inner, ("head", head))
    # 6. Describe the activations between pieces, and list each weight as whole.
    given = next(iter(arguments_for(module.forward, example).values()))
    known = _Given(given.shape, trial.edge.shape, trial.edge.dtype)
    edges = _Edges(frame, known)
    lines = dict[str, None]()
    for prefix, piece in pieces:
        for name, x in (*piece.named_parameters(), *piece.named_buffers()):
            lines[f"{prefix}.{name} : {' '.join('-' * x.dim())}"] = None
    # The plan's lines come first, and the first matching line counts.
    rules = _sharded(listed, cuts) + list(lines)
    counts = {
        dim: number
        for cut in cuts.values()
        if cut.heads.owner is not None
        for dim, number in (("heads", cut.heads.query), ("kv", cut.heads.key))
    }
    table = Rules.parse("\n".join(rules))
    model = Model(
        pieces, table, counts, edges=edges, as_it_is=True, why_whole=why_whole
    )
    width = trial.edge.shape[-1]
    lookups = trial.words, trial.places
    return Apart(model, frame, blocks, cuts, width, trial.returned, *lookups)


def _sharded(
    blocks: Mapping[str, nn.Module], cuts: Mapping[str, OwnerCut]
) -> list[str]:
    """Rules of the weights that a plan shards, whose modules are changed for it."""
    lines = []
    for number, (name, block) in enumerate(blocks.items()):
        for owner, cut in cuts.items():
            if not owner.startswith(f"{name}."):
                continue
            path = owner.removeprefix(f"{name}.")
            module = block.get_submodule(path)
            rules = cut.rules(module)
            lines += [
                f"blocks.{number}.{path}.{key} : {dims}" for key, dims in rules
            ]
            cut.apply(module)
    return lines


def blocks_of(module: nn.Module) -> tuple[list[nn.Module], nn.Module]:
    """The modules from the whole down to the one that owns the blocks, and its blocks: the list of modules
    of one class that has the most parameters."""
    best, most = "", 0
    for name, each in module.named_modules():
        if not isinstance(each, nn.ModuleList | nn.Sequential):
            continue
        children = list(each.children())
        size = sum(x.numel() for x in each.parameters())
        # The largest list of one class: a list inside a block has fewer parameters.
        alike = len({type(child) for child in children}) == 1
        if name and len(children) > 1 and alike and size > most:
            best, most = name, size
    if not best:
        raise LayoutError(
            "it has no list of blocks: an nn.ModuleList or nn.Sequential of two or more modules of one"
            " class"
        )
    parts = best.split(".")
    owners = [
        module.get_submodule(".".join(parts[:n])) for n in range(len(parts))
    ]
    return owners, module.get_submodule(best)


class _LossSeen(TorchFunctionMode):
    """Notes which target a cross-entropy leaves out while it is on."""

    ignored = IGNORED

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        if func in (F.cross_entropy, F.nll_loss):
            self.ignored = named.get("ignore_index", IGNORED)
        return func(*args, **named)


class _RunOnMeta:
    """The whole forward on meta, with the calls of all modules around the blocks and of the blocks."""

    def __init__(
        self,
        frame: OwnFrame,
        blocks: Sequence[nn.Module],
        outer: Mapping[str, nn.Module],
    ) -> None:
        self.frame, self.order = frame, list[Key]()
        # Blocks that take something else than what the block before gives.
        self.after_other = set[int]()
        self.words = self.places = 0
        self.last: Any = None
        # Of each module in the blocks its arguments, and the shape of its output.
        self.calls: dict[nn.Module, tuple[Any, Any, torch.Size]] = {}
        self.returned: Any = None
        # Of each block its arguments besides the first, if none of them is a tensor.
        self.others: dict[int, tuple[Any, Any] | None] = {}
        self.every: dict[Key, Callable[..., Any]] = {}
        self.roots = [frame.module, *blocks, *outer.values()]
        self.blocks = blocks
        for number, block in enumerate(blocks):
            self.every[number] = partial(self._block, number, block)
        for name, module in outer.items():
            self.every[name] = partial(self._outer, name, module)

    def run(self, example: Batch) -> list[Key]:
        """The modules in the order in which the forward calls them."""
        meta = {
            name: torch.empty_like(x, device="meta")
            for name, x in example.items()
        }
        first = next(
            iter(arguments_for(self.frame.module.forward, meta).values())
        )
        # Note lookups in tables, and the calls with which a plan is tried.
        seen = _LossSeen()
        hooks = [
            module.register_forward_pre_hook(partial(self._looked_up, first))
            for root in self.roots
            for module in root.modules()
            if isinstance(module, nn.Embedding)
        ]
        hooks += [
            module.register_forward_hook(self._called, with_kwargs=True)
            for block in self.blocks
            for module in block.modules()
        ]
        try:
            # What the forward makes by itself, as a mask, is on meta too.
            with torch.no_grad(), self._buffers_on_meta(), seen:
                self.returned = self.frame.run(self.every, meta)
        except LayoutError:
            raise
        except Exception as error:
            raise LayoutError(_with_its_line(error)) from None
        finally:
            for hook in hooks:
                hook.remove()
        self.frame.ignored = seen.ignored
        return self.order

    def _called(
        self, module: nn.Module, args: Any, kwargs: Any, y: Any
    ) -> None:
        y = y[0] if isinstance(y, tuple) else y
        if isinstance(y, Tensor):
            self.calls[module] = args, kwargs, y.shape

    def _looked_up(self, first: Tensor, table: nn.Module, args: Any) -> None:
        """Notes how many rows the tables of tokens and of positions have."""
        assert isinstance(table, nn.Embedding)
        rows, time = table.num_embeddings, args[0].shape[-1]
        # The argument itself is looked up: the table of tokens.
        if args[0] is first:
            self.words = rows
        # Something else of the length of a sequence is: the table of positions.
        elif first.dim() > 1 and time == first.shape[1] and rows >= time:
            self.places = rows

    @contextmanager
    def _buffers_on_meta(self) -> Iterator[None]:
        tables = [
            (owner, key, x)
            for root in self.roots
            for owner in root.modules()
            for key, x in owner._buffers.items()
            if x is not None and not isinstance(owner, StandIn)
        ]
        # A table with values cannot meet tensors on meta, so it waits outside.
        for owner, key, x in tables:
            owner._buffers[key] = torch.empty_like(x, device="meta")
        try:
            yield
        finally:
            for owner, key, x in tables:
                owner._buffers[key] = x

    def _block(
        self, number: int, block: nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        self.order.append(number)
        if not number and args:
            self.edge = args[0]
        y = block(*args, **kwargs)
        kind = type(block).__name__
        refuse(
            {
                f"its blocks ({kind}) do not take activations first": not args
                or not isinstance(args[0], Tensor)
                or not args[0].is_floating_point(),
                f"its blocks ({kind}) return a {type(y).__name__}": not isinstance(
                    y, Tensor
                ),
            }
        )
        # What the block before gave was changed on the way, for example by a residual.
        if number and args[0] is not self.last:
            self.after_other.add(number)
        self.last = y
        # Arguments without tensors are the same in each step.
        others = args[1:], kwargs
        tensors = [
            x for x in (*args[1:], *kwargs.values()) if isinstance(x, Tensor)
        ]
        framed = tensors or number in self.after_other
        self.others[number] = None if framed else others
        return y

    def _outer(
        self, name: str, module: nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        self.order.append(name)
        y = module(*args, **kwargs)
        if not isinstance(y, Tensor):
            raise LayoutError(
                f"its module {name} returns a {type(y).__name__}"
            )
        # The output's shape in the example, for the stand-in's zeros.
        took = _first_tensor(args, kwargs)
        self.frame.given[name] = _Given(took.shape, y.shape, y.dtype)
        return y


def _with_its_line(error: Exception) -> str:
    """An error with the line of the user's code at which it was raised."""
    text = " ".join(str(error).split())[:200]
    return f"its forward cannot be run on meta: {type(error).__name__}: {text} ({code_line(error)})"


@dataclass(frozen=True)
class _Edges:
    """Empty activations of a microbatch: each block takes what the first one took."""

    frame: OwnFrame
    known: _Given

    def __call__(self, piece: int, batch: Batch) -> dict[str, Tensor]:
        given = arguments_for(self.frame.module.forward, batch)
        took = next(iter(given.values())).shape
        shape = self.known.shape_for(took)
        return {"x": torch.empty(shape, dtype=self.known.dtype, device="meta")}


def refuse_other_pieces(
    module: nn.Module,
    model: Model,
    weights: Mapping[str, nn.Parameter],
    example: Batch,
) -> None:
    """Runs a module whole and in pieces on the example, with its own weights: both must give the same."""
    bind_weights(model, weights)
    with torch.no_grad():
        whole = module(**arguments_for(module.forward, example))
        (_, embed), *blocks, (_, head) = model.pieces
        # The pieces one after the other, as ranks of a pipeline would run them.
        x = embed(**example)
        for _, block in blocks:
            x = block(x, **example)
        pieces = head(x, **example)
    pairs = zip(_tensors(whole), _tensors(pieces), strict=True)
    for own, ours in pairs:
        if own.shape != ours.shape or not torch.allclose(
            own, ours, rtol=1e-4, atol=1e-5
        ):
            raise LayoutError(
                f"{type(module).__name__} gives something else in pieces than whole: what runs before"
                " its blocks is used after them, or by more than the first. Describe it"
                " (docs/bring-your-model.md), or give no example: then it is one piece, for dp and ZeRO."
            )


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]
