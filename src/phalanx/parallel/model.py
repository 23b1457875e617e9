"""A model as the engine sees it: pieces, dims of its weights, and their initialization.

It also defines the interface for users' models: `describe` in their file returns a
`Model`.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..layout import Rules, Shape
from ..layout.adapters import adapts
from ..models import (
    Decoder,
    DecoderSizes,
    DeepMlp,
    RopeScaling,
    adapt,
    decoder,
    draw_adapter,
    mlp,
)
from .own_class import OwnStart
from .whole import Whole

Draw = Callable[[str, Tensor, torch.Generator], None]
Edges = Callable[[int, Mapping[str, Tensor]], Mapping[str, Tensor]]
Derive = Callable[[Mapping[str, Tensor], torch.dtype], Tensor | None]
EVERY = "*"  # in the names that a piece takes: all entries of the batch
# the most columns and elements of a tile drawn on its own
COLUMNS, NUMBERS = 256, 1 << 16


def entries_named(
    names: tuple[str, ...], batch: Mapping[str, Any]
) -> tuple[str, ...]:
    """The names that a piece takes, including all entries of a batch if it takes `EVERY`."""
    return (*names, *batch) if EVERY in names else names


def _draw(name: str, weight: Tensor, generator: torch.Generator) -> None:
    """The default initialization of a weight, as GPT-2's."""
    if weight.dim() < 2:
        weight.fill_(0.0 if name.endswith("bias") else 1.0)
    else:
        weight.normal_(0.0, 0.02, generator=generator)


@dataclass(frozen=True)
class Original:
    """A model in transformers' own code: its weights' names, its plans' faults."""

    files: Mapping[str, str]
    notes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Model:
    """Pieces in the order of the data, on the meta device or with weights of their own.

    A piece is called with the activations of the previous piece (the first piece
    without) and with the entries of the batch that its `forward` names. It may return a
    dict of named tensors, `x` among them. A later piece that names one of them gets it,
    and the pieces between pass it by. `edges(piece, batch)` returns a piece's inputs as
    meta tensors; those in the dtype of the weights take the dtype of the computation.
    `derived` names tensors computed from a microbatch and the activations' dtype, such
    as angles of positions. A function returns None if the microbatch lacks its source.
    Each tensor is computed once on a rank; pieces name it like an entry of the batch.

    `counts` gives the number of indivisible units in a dim that is sharded by units:
    heads and kv. `rates` names weights that an update moves by the sign of their
    gradient alone, and the distance; the gradient norm excludes them. The last piece
    returns the loss as a sum. A parameter that requires no gradient is frozen.
    """

    pieces: tuple[tuple[str, nn.Module], ...]
    rules: Rules
    counts: Mapping[str, int] = field(default_factory=dict)
    draw: Draw = _draw
    shape: Shape | None = None
    rates: Mapping[str, float] = field(default_factory=dict)
    edges: Edges | None = None  # needed if more than `x` passes between stages
    derived: Mapping[str, Derive] = field(default_factory=dict)
    original: Original | None = None
    # Makes the model as it was before it was taken apart, or None if it has no forward
    # of its own. Call it while the weights are still on meta.
    whole: Callable[[], Whole | None] | None = None
    # A module without a description, whose pieces were found by running it.
    as_it_is: bool = False
    why_whole: str = ""  # the reason why its plan for tp cannot be followed
    # the weights that its own constructor draws with a seed
    own_start: OwnStart | None = None
    # By the name of a lookup's weight: the row of its padding token.
    padding: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        # Collected now, because a layout replaces lookups and parameters.
        names = {parameter: name for name, parameter in self.weights.items()}
        rows = {
            names[cast(nn.Parameter, module.weight)]: module.padding_idx
            for _, piece in self.pieces
            for module in piece.modules()
            if isinstance(module, nn.Embedding)
            and module.padding_idx is not None
        }
        object.__setattr__(self, "padding", rows)

    @cached_property
    def weights(self) -> dict[str, nn.Parameter]:
        """Every parameter once, under the first name by which the model refers to it."""
        # A tied weight is met again under other names, which setdefault leaves out.
        first: dict[nn.Parameter, str] = {}
        for prefix, module in self.pieces:
            for name, parameter in module.named_parameters():
                first.setdefault(parameter, f"{prefix}.{name}")
        return {name: parameter for parameter, name in first.items()}

    @cached_property
    def frozen(self) -> frozenset[str]:
        """The names of the weights that are not trained."""
        return frozenset(
            name for name, p in self.weights.items() if not p.requires_grad
        )

    @cached_property
    def unit_of(self) -> dict[str, int]:
        """The unit of each parameter: the first piece that uses it.

        Experts that share a piece with other weights are a unit of their own, as they
        have groups of their own. Its number is the piece's plus the number of pieces.
        """
        names = {parameter: name for name, parameter in self.weights.items()}
        units: dict[str, int] = {}
        for piece, (_, module) in enumerate(self.pieces):
            mine = [names[parameter] for parameter in module.parameters()]
            routed = {
                name for name in mine if "experts" in self.rules.dims(name)
            }
            # A piece of experts alone is one unit under its own number.
            beside = len(self.pieces) if len(routed) < len(mine) else 0
            for name in mine:
                units.setdefault(name, piece + beside * (name in routed))
        return units

    @cached_property
    def tied(self) -> tuple[tuple[int, int], ...]:
        """The (piece, unit) pairs in which a piece uses an earlier piece's weight."""
        names, count = (
            {parameter: name for name, parameter in self.weights.items()},
            len(self.pieces),
        )
        pairs = (
            (piece, self.unit_of[names[parameter]])
            for piece, (_, module) in enumerate(self.pieces)
            for parameter in module.parameters()
        )
        # Without the piece that owns the unit.
        return tuple(
            dict.fromkeys((p, unit) for p, unit in pairs if p != unit % count)
        )

    def takes(self, piece: int) -> tuple[str, ...]:
        """The names of a piece's inputs.

        All pieces but the first take the activations as their first argument, under any
        name. A piece with `takes_batch` takes every entry of the batch.
        """
        signature = inspect.signature(
            type(self.pieces[piece][1]).forward
        ).parameters
        names = [
            n
            for n, p in signature.items()
            if p.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        open_ended = len(names) < len(signature)
        shared: tuple[str, ...] = ()
        # **kwargs: whatever the blocks of a decoder share.
        if open_ended:
            shared = ("positions", "documents", "noise")
        if getattr(self.pieces[piece][1], "takes_batch", False):
            shared = (EVERY,)
        # Without `self`, whose place the first name has.
        return (*names[1:], *shared)


class Undrawn(TorchFunctionMode):
    """Skips random initialization and `arange` while active.

    On the meta device there is nothing to fill, but torch imports its compiler for it,
    which takes longer than all the rest of the start.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        draws = func in (Tensor.normal_, Tensor.uniform_)
        if draws or getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        if func is torch.arange and not kwargs:
            return torch.empty(len(range(*args)), dtype=torch.int64)
        return func(*args, **(kwargs or {}))


def build_model(shape: Shape) -> Model:
    """Build the built-in model of a shape on the meta device."""
    with torch.device("meta"), Undrawn():
        if shape.kind == "mlp":
            deep = DeepMlp(width=shape.hidden, layers=shape.layers)
            pieces, rules = mlp.describe(deep)
            model = Model(pieces, Rules.parse(rules), {}, deep.draw, shape)
            return _freeze(model, shape)
        plain = decoder_of(shape)
        pieces, rules = decoder.describe(plain)
        # The adapters' rules come first, and the first matching line counts.
        rules = _adapt(plain, Rules.parse(rules), shape) + rules
    counts = shape.unit_counts
    made = Model(
        pieces,
        Rules.parse(rules),
        counts,
        plain.draw,
        shape,
        derived=plain.derived,
    )
    made = _freeze(made, shape)
    # The router's bias moves by the sign of its gradient, at a rate of its own.
    balanced = (
        n
        for n in made.weights
        if n.endswith("router.bias") and n not in made.frozen
    )
    return replace(made, rates=dict.fromkeys(balanced, shape.balance_rate))


def _freeze(model: Model, shape: Shape) -> Model:
    """Freeze untrained weights; a shared weight belongs to its first piece."""
    for name, weight in model.weights.items():
        weight.requires_grad_(
            adapts(name)
            if shape.adapter
            else model.unit_of[name] % len(model.pieces) not in shape.frozen
        )
    return model


def _adapt(model: Decoder, rules: Rules, shape: Shape) -> str:
    """Give adapters to the linears that the shape names; returns their rules."""
    row, lines = shape.adapter, []
    if row is None:
        return ""
    settings = row.settings(shape)
    for name, module in model.layers.named_modules():
        path = name.partition(".")[2]
        if path.rpartition(".")[2] not in shape.adapters or not isinstance(
            module, nn.Linear
        ):
            continue
        adapt(module, row.key, row.rank_of(shape), **settings)
        beside = rules.dims(f"layers.{name}.weight")
        for each in row.weights:
            # One pattern covers all blocks that have this linear.
            pattern = f"layers.*.{path}{row.mark}{each.name}"
            lines.append(f"{pattern} : {each.dims(beside)}\n")
    return "".join(dict.fromkeys(lines))


def decoder_of(shape: Shape, **changes: Any) -> Decoder:
    """The built-in decoder of a shape. Keywords have the names of a shape's keys."""
    names = {each.name for each in fields(DecoderSizes)} & vars(shape).keys()
    sizes: dict[str, Any] = {name: getattr(shape, name) for name in names}
    sizes["rope_scaling"] = None  # in a shape, this key is a word
    if shape.rope_factor != 1:
        sizes["rope_scaling"] = RopeScaling(
            shape.rope_factor,
            shape.rope_low,
            shape.rope_high,
            shape.rope_original,
            kind=shape.rope_scaling,
            attention=shape.rope_attention,
            longest=shape.sequence,
            truncated=shape.rope_truncated,
        )
    return Decoder(**sizes | changes)


class _DrawnTile(NamedTuple):
    """A tile of a weight that is drawn on its own, by its place among the tiles."""

    row: int
    column: int
    rows: slice  # those of the part that lie in it


def _tile_rows(rows: Any, down: int) -> Iterator[tuple[int, slice]]:
    """Yield each row of tiles that has some of `rows`, and the run of them in it."""
    # `rows` ascends, so the part's rows in a tile are one run.
    for i in (rows // down).unique_consecutive().tolist():
        ends = torch.tensor([i * down, (i + 1) * down])
        yield i, slice(*torch.searchsorted(rows, ends).tolist())


def _in_threads(
    draw: Callable[[_DrawnTile], None], tiles: Sequence[_DrawnTile]
) -> None:
    """Draw the tiles on as many threads as torch computes with.

    torch draws normal numbers on one thread: 7 s for the 1.2e9 weights of a 1B model.
    """
    threads = min(torch.get_num_threads(), len(tiles))
    if threads < 2:
        for tile in tiles:
            draw(tile)
        return
    with ThreadPoolExecutor(threads) as pool:
        for done in pool.map(draw, tiles):
            assert done is None


def start(
    model: Model,
    name: str,
    seed: int,
    dtype: torch.dtype = torch.float32,
    part: Any = None,
) -> Tensor:
    """The initial value of a weight, the same in every layout.

    Returns the whole weight, or `part`: (ascending rows, columns), where all dims but
    the last form the rows. Tiles of a matrix are drawn on their own, so a rank draws
    little more than its part. A user's own rule gets the weight whole, as it may read
    its shape. Values are drawn in float32 for any dtype, so runs in other precisions
    start from the same weights.
    """
    shape = model.weights[name].shape
    # high x wide: the weight as a matrix, with all dims but the last as its rows
    high, wide = shape[:-1].numel(), shape[-1] if shape else 1
    known = model.draw is _draw or isinstance(
        getattr(model.draw, "__self__", 0), Decoder | DeepMlp
    )
    # Tiles of `down` x `across` elements, at most COLUMNS wide and NUMBERS large.
    tiled = known and len(shape) > 1 and not adapts(name)
    across = min(wide, COLUMNS) if tiled else wide
    down = NUMBERS // across if tiled else high
    rows, columns = part or (torch.arange(high), slice(wide))
    # A class that draws its own weights draws all of them; the part is cut from these.
    if model.own_start is not None:
        whole = model.own_start(seed)[name]
        chosen = whole.reshape(high, wide)[rows][:, columns]
        return (chosen if part else chosen.view(shape)).to(dtype).contiguous()
    left, right, _ = columns.indices(wide)
    # float32, also where the user's default is narrower
    wide_type = torch.promote_types(torch.get_default_dtype(), torch.float32)
    out = torch.empty(len(rows), right - left, dtype=wide_type)

    # numpy copies on this thread alone. torch would start threads in each of ours.
    drawn = out.numpy()

    def draw(tile: _DrawnTile) -> None:
        i, j = tile.row, tile.column
        size = min(down, high - i * down), min(across, wide - j * across)
        # Seeded by the seed, the name and the tile: the same in every layout.
        number = i * -(-wide // across) + j
        key = hashlib.sha256(
            f"{seed}:{name}{f':{number}' * (number > 0)}".encode()
        ).digest()
        generator = torch.Generator().manual_seed(
            int.from_bytes(key[:8], "big") >> 1
        )
        values = torch.empty(size if tiled else shape, dtype=wide_type)
        draw_start = draw_adapter if adapts(name) else model.draw
        draw_start(name, values, generator)
        # The overlap of the tile's columns with the part's.
        first, last = (
            max(left, j * across),
            min(right, j * across + size[1]),
        )
        own = values.view(size)[:, first - j * across : last - j * across]
        here = tile.rows
        if here.stop - here.start < size[0]:
            own = own[rows[here] - i * down]
        drawn[here, first - left : last - left] = own.numpy()

    _in_threads(
        draw,
        [
            _DrawnTile(i, j, here)
            for i, here in _tile_rows(rows, down)
            for j in range(left // across, -(-right // across))
        ],
    )
    if model.draw is _draw and name in model.padding:
        out[rows == model.padding[name]] = (
            0.0  # as nn.Embedding initializes it
        )
    return (out if part else out.view(shape)).to(dtype)
