"""Rows of a layout's pieces, with everything that readers of a step need to know.

The rows are derived here from a `Shape`. `parallel/rows.py` derives the same rows from
a model's modules and rule table, and a test checks that both are equal. These are the
only sources of these facts. The bytes that a piece keeps and the work of its operations
are not here: `cost` finds them by running the piece, once for each `kind`.

The file has two parts: rows and everything derived from them, and the weights of the
built-in models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from .adapters import adapts
from .kinds import BlockPart, block_kind, parts_of_pieces
from .layout import Layout
from .mixers import MIXER_LINEARS
from .mlp_row import ChoiceLosses
from .mlps import mlp_linears
from .rules import ADAPTER, FEATURES, LATENT, PARTIAL, ROUTED, Cut
from .stages import stage_blocks

if TYPE_CHECKING:
    from .shape import Shape

_NORMS_AND_BIASES = frozenset({"head", LATENT, ADAPTER})
_TOKENS = "tokens"  # the embedding, which is also the output if they are tied


class LinearProduct(NamedTuple):
    """A matmul of each token with a weight: features in and out, repetitions."""

    name: str
    into: int
    out: int
    times: int
    weight: WeightRow

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds for one token."""
        return self.into * self.out * self.times


@dataclass(frozen=True)
class WeightRow:
    """One weight of a piece: its name in the piece, its dims by name, their lengths."""

    name: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    # For each dim, the length that is never divided, such as a head's.
    granule: tuple[int, ...]
    trained: bool = True
    # (rows, columns) of each matrix that an optimizer may update whole.
    matrices: tuple[tuple[int, int], ...] = ()
    # Only linear layers of a block read it, so with fp8 matmuls it can be gathered in 8
    # bits.
    narrow: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def routed(self) -> bool:
        """True for a weight of routed MLPs, which ep distributes."""
        return ROUTED in self.dims

    @property
    def adapts(self) -> bool:
        """True for a weight of an adapter."""
        return adapts(self.name)

    def cuts(self, layout: Layout, rank: int = 0) -> tuple[Cut, ...]:
        """The part of each dim that a rank of tp holds."""
        at = {"tp": rank}
        every = zip(
            # For each dim: the axes that shard it, its length, and the part
            # that stays whole.
            layout.axes_of(self.dims),
            self.shape,
            self.granule,
            strict=True,
        )
        return tuple(
            Cut.of(length, *layout.mesh.part(axes, at), granule)
            for axes, length, granule in every
        )

    def held(self, layout: Layout) -> int:
        """The elements held by the tp rank that holds most."""
        return math.prod(cut.stop - cut.start for cut in self.cuts(layout))

    def sum_over_tp(self, layout: Layout) -> Sum:
        """The reason why ranks of tp add up their gradients of this weight."""
        return sum_over_tp(self.dims, self.cuts(layout), layout)


class Sum(StrEnum):
    """The reason why ranks of tp add up their gradients of a weight."""

    NONE = ""
    KV = "kv"  # several ranks hold a KV head, each for other query heads
    # The weight is whole everywhere, but saw other tokens or other heads.
    NORMS = "norms"


def sum_over_tp(
    dims: Sequence[str], cuts: Sequence[Cut], layout: Layout
) -> Sum:
    """The gradient rule along tp: sum over copies that did different work."""
    # With `exact` the backward of a piece adds them, in the tree.
    if layout.tp == 1 or layout.exact:
        return Sum.NONE
    # Fewer KV heads than ranks: several hold the same one.
    if any(cut.copies > 1 for cut in cuts):
        return Sum.KV
    # A weight sharded by tp has different rows on each rank; a partial bias a
    # share on each.
    sharded = any("tp" in axes for axes in layout.axes_of(dims))
    if sharded or PARTIAL in dims:
        return Sum.NONE
    if _NORMS_AND_BIASES & {*dims}:
        # q and k norms and latents saw other heads. An adapter's whole factor, beside a
        # sharded one, did too.
        return Sum.NORMS
    # Norms and row biases saw other tokens under seq.
    return Sum.NORMS if layout.seq else Sum.NONE


@dataclass(frozen=True)
class PieceRow:
    """One piece of a layout's program.

    Pieces of equal `kind` do the same work on weights of the same sizes. `weights` are
    those of its own unit. A piece also reads the units in `uses`, which belong to
    earlier pieces: the weights in `tied`. `takes` and `gives` name the tensors of the
    bundle that it takes from the piece before and gives to the next.

    `partial`: ranks of tp hold parts of some gradient sums of this unit. `scaled`: its
    trained matrices are gathered in 8 bits, and ranks agree on their scales once a
    step. `sequence_loss`, `batch_loss`: it has a loss of that kind, which needs the choices of tokens.
    `sums_choices`: ranks hold parts of the counts that such a loss needs.
    """

    piece: int  # the model's piece
    part: BlockPart
    kind: int
    weights: tuple[WeightRow, ...] = ()
    tied: tuple[WeightRow, ...] = ()
    uses: tuple[int, ...] = ()
    takes: tuple[str, ...] = ("x",)
    gives: tuple[str, ...] = ("x",)
    partial: bool = False
    frozen: bool = False
    scaled: bool = False
    sequence_loss: bool = False
    batch_loss: bool = False
    sums_choices: bool = False

    def __hash__(self) -> int:
        # Without the weights: rows are keys of caches, and equal kinds have equal
        # weights.
        flags = self.partial, self.frozen, self.scaled, self.sums_choices
        return hash((self.piece, self.part, self.kind, *flags))

    @property
    def keeps(self) -> tuple[str, ...]:
        """The tensors of the bundle that stay until its backward if it is recomputed."""
        return self.takes

    @property
    def receives_tokens(self) -> bool:
        """True for a piece that receives tokens from other ranks."""
        return self.part is BlockPart.ROUTED

    @property
    def has_matrices(self) -> bool:
        """True if an optimizer may update a matrix of this unit whole."""
        return any(
            weight.trained and weight.matrices for weight in self.weights
        )

    @property
    def numel(self) -> int:
        """The parameters of the piece's own unit."""
        return sum(weight.numel for weight in self.weights)

    @property
    def trained_numel(self) -> int:
        """The parameters that are trained."""
        return sum(weight.numel for weight in self.weights if weight.trained)

    @property
    def routed_numel(self) -> int:
        """The parameters of routed MLPs."""
        return sum(weight.numel for weight in self.weights if weight.routed)

    def active_numel(self, shape: Shape) -> int:
        """The parameters that a token uses; of routed MLPs only the chosen ones count."""
        all_routed, mlps = self.routed_numel, shape.routed
        chosen = all_routed // max(1, mlps.count) * mlps.chosen
        return self.numel - all_routed + chosen

    def summed_numel(self, layout: Layout) -> int:
        """The elements of this unit on a rank whose gradients are summed over tp."""
        trained = (weight for weight in self.weights if weight.trained)
        return sum(
            weight.held(layout)
            for weight in trained
            if weight.sum_over_tp(layout)
        )


@dataclass(frozen=True)
class StagedPieces:
    """The pieces of a layout's program, and the run of them on each virtual stage."""

    rows: tuple[PieceRow, ...]
    stages: tuple[range, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def _numbers(self, chosen: Iterable[bool]) -> tuple[int, ...]:
        return tuple(number for number, yes in enumerate(chosen) if yes)

    @cached_property
    def tied(self) -> tuple[tuple[int, int], ...]:
        """The (piece, unit) pairs in which a piece uses an earlier piece's weight."""
        return tuple(
            (number, unit)
            for number, row in enumerate(self.rows)
            for unit in row.uses
        )

    @cached_property
    def frozen(self) -> tuple[int, ...]:
        return self._numbers(row.frozen for row in self.rows)

    @cached_property
    def partial(self) -> tuple[int, ...]:
        return self._numbers(row.partial for row in self.rows)

    @cached_property
    def scaled(self) -> tuple[int, ...]:
        """The units whose scales must be agreed on before they are gathered."""
        return self._numbers(row.scaled for row in self.rows)

    @cached_property
    def sums_choices(self) -> tuple[int, ...]:
        """The pieces whose choices are summed over ranks, for their losses."""
        return self._numbers(row.sums_choices for row in self.rows)

    @cached_property
    def receivers(self) -> tuple[int, ...]:
        """The pieces that receive tokens from other ranks."""
        return self._numbers(row.receives_tokens for row in self.rows)

    @cached_property
    def matrices(self) -> tuple[int, ...]:
        """The units with matrices that an optimizer may need whole."""
        return self._numbers(row.has_matrices for row in self.rows)


def plain_pieces(
    stages: Sequence[range],
    *,
    tied: Sequence[tuple[int, int]] = (),
    frozen: Sequence[int] = (),
    receivers: Sequence[int] = (),
    partial: Sequence[int] = (),
    scaled: Sequence[int] = (),
    sums_choices: Sequence[int] = (),
) -> StagedPieces:
    """Equal pieces that differ only in their numbers, for a schedule without a model."""
    rows = tuple(
        PieceRow(
            number,
            BlockPart.ROUTED if number in receivers else BlockPart.WHOLE,
            0,
            uses=tuple(unit for piece, unit in tied if piece == number),
            partial=number in partial,
            scaled=number in scaled,
            sums_choices=number in sums_choices,
            frozen=number in frozen,
        )
        for number in range(max((stage.stop for stage in stages), default=0))
    )
    return StagedPieces(rows, tuple(stages))


def row_of(
    piece: int, part: BlockPart, kind: int, weights: Sequence[WeightRow]
) -> PieceRow:
    """The row of a piece with known weights; merging has a unit even without."""
    trains = any(weight.trained for weight in weights)
    # A piece without weights has no unit, except merging, whose norm is
    # optional.
    has_unit = bool(weights) or part is BlockPart.MERGING
    return PieceRow(
        piece, part, kind, tuple(weights), frozen=has_unit and not trains
    )


def in_layout(row: PieceRow, layout: Layout) -> PieceRow:
    """The row with what depends on sharding and gathering its weights."""
    trained = [weight for weight in row.weights if weight.trained]
    partial = scaled = False
    if layout.tp > 1:
        partial = any(weight.sum_over_tp(layout) for weight in trained)
    if layout.gathers_in_8_bits:
        scaled = any(weight.narrow for weight in trained)
    # Ranks hold parts of a sequence.
    within = layout.cp > 1 or (layout.seq and layout.tp > 1)
    choices = row.sequence_loss and within
    # A loss over the batch also needs the choices of other data-parallel
    # ranks.
    choices = choices or (row.batch_loss and (within or layout.data > 1))
    if not (partial or scaled or choices):
        return row
    return replace(row, partial=partial, scaled=scaled, sums_choices=choices)


@lru_cache(maxsize=512)
def staged_pieces(layout: Layout, shape: Shape) -> StagedPieces:
    """The pieces of a layout's program for a model of this shape."""
    rows = shape_rows(shape, layout.parts_apart)
    # Rows of one kind are sharded alike, so each kind is placed once.
    kinds: dict[int, PieceRow] = {}  # each kind's first row, in the layout
    for row in rows:
        if row.kind not in kinds:
            kinds[row.kind] = in_layout(row, layout)
    placed = (
        replace(kinds[row.kind], piece=row.piece, uses=row.uses, tied=row.tied)
        for row in rows
    )
    return StagedPieces(tuple(placed), stage_pieces(layout, shape))


def stage_pieces(layout: Layout, shape: Shape) -> tuple[range, ...]:
    """The program's pieces on every virtual stage, in the order of the data flow.

    `stages:2-2-2-1` counts blocks. The embedding goes with the first stage, the head
    with the last.
    """
    counts = stage_blocks(layout, shape.name, work_of_pieces(shape))
    # The first program piece of each model piece: a block in parts has
    # three.
    first = dict[int, int]()
    for number, (piece, _) in enumerate(
        parts_of_pieces(shape, layout.parts_apart)
    ):
        first.setdefault(piece, number)
    # Piece 0 is the embedding.
    ends = [first[1 + b] for b in accumulate(counts, initial=0)]
    ends[0], ends[-1] = 0, 1 + first[shape.pieces - 1]
    return tuple(range(a, b) for a, b in pairwise(ends))


# ---- the work of one piece


@lru_cache(maxsize=1024)
def linear_products(row: PieceRow, shape: Shape) -> tuple[LinearProduct, ...]:
    """The matmuls of a piece with weights that each token needs. A lookup is none."""
    if row.piece == 0:
        return ()
    # A tied weight is the output's, except for a later lookup in the embedding.
    tied = () if shape.is_join(row.piece) else row.tied
    every = (*row.weights, *tied)
    products = [
        product for weight in every for product in _product(weight, shape)
    ]
    # The output serves the loss of the next token and those of later ones.
    if row.piece == shape.pieces - 1:
        uses = 1 + shape.predictors
        products = [each._replace(times=uses) for each in products]
    return tuple(products)


def _product(weight: WeightRow, shape: Shape) -> Iterator[LinearProduct]:
    # A vector is no matmul, and neither are biases of routed MLPs, one vector for each.
    if len(weight.shape) != 2 + weight.routed:
        return
    out, into = weight.shape[-2:]
    # A token passes through some of the routed MLPs.
    times = shape.routed.chosen if weight.routed else 1
    yield LinearProduct(linear_name(weight), into, out, times, weight)


def linear_name(weight: WeightRow) -> str:
    """The name of a weight's linear layer, as in the targets of adapters."""
    if weight.adapts:
        return ADAPTER
    path = weight.name.removesuffix(".weight")
    # A tied output multiplies by the embedding's weight.
    return "output" if path == _TOKENS else path.rpartition(".")[2]


def piece_work(row: PieceRow, shape: Shape) -> int:
    """Forward multiply-adds of a piece for one sequence, to balance stages.

    A lookup counts nothing, the head multiplies by the whole vocabulary, attention
    counts as causal, and adapters do not count. For the MLP it is the work of one row.
    """
    products = linear_products(row, shape)
    token = sum(
        product.multiply_adds
        for product in products
        if not product.weight.adapts
    )
    if shape.kind == "mlp":
        return token
    attends = shape.is_block(row.piece) and row.part in (
        BlockPart.WHOLE,
        BlockPart.ROUTING,
    )
    if attends:
        token += shape.mixing_work(row.piece, shape.sequence)
    return shape.sequence * token


@lru_cache(maxsize=256)
def work_of_pieces(shape: Shape) -> tuple[int, ...]:
    """The forward work of the embedding, of each block, and of the head; see
    `piece_work`.

    Modules that predict later tokens are on the head's stage and count as part of it.
    """
    # Blocks of one kind do the same work, which is counted once.
    known: dict[int, int] = {}
    for row in shape.rows:
        if row.kind not in known:
            known[row.kind] = piece_work(row, shape)
    each = [known[row.kind] for row in shape.rows]
    behind = 1 + shape.layers
    return (*each[:behind], sum(each[behind:]))


# ---- the rows of the built-in models


@lru_cache(maxsize=64)
def shape_rows(shape: Shape, apart: bool) -> tuple[PieceRow, ...]:
    """A row for each piece; three for a block whose routed MLPs are `apart`."""
    kinds: dict[tuple[object, ...], PieceRow] = {}
    rows: list[PieceRow] = []
    for piece, part in parts_of_pieces(shape, apart):
        weights = _weights_of(shape, piece, part)
        key = _kind(
            shape,
            piece,
            part,
            frozen=not any(weight.trained for weight in weights),
        )
        # The first piece of a kind makes its row; the others differ in their
        # number alone.
        if key not in kinds:
            row = row_of(piece, part, len(kinds), weights)
            takes, gives = _bundle(shape, piece, part)
            losses = _losses(shape, piece, part)
            kinds[key] = replace(
                row,
                takes=takes,
                gives=gives,
                sequence_loss=losses.sequence,
                batch_loss=losses.batch,
            )
        row = replace(kinds[key], piece=piece)
        # The output reads the embedding's weight, which stays in the unit of
        # piece 0. So do later lookups.
        output = shape.tied and piece == shape.pieces - 1
        if output or shape.is_join(piece):
            tied = tuple(
                weight
                for weight in rows[0].weights
                if weight.name == f"{_TOKENS}.weight"
            )
            row = replace(row, uses=(0,), tied=tied)
        rows.append(row)
    return tuple(rows)


def _kind(
    shape: Shape, piece: int, part: BlockPart, *, frozen: bool
) -> tuple[object, ...]:
    """Everything in which the pieces of one shape's program can differ."""
    # Embedding and head are kinds of their own, and so are joins.
    if not shape.is_block(piece):
        return (piece,)
    if part in (BlockPart.ROUTED, BlockPart.MERGING):  # without attention
        return part, frozen
    return part, block_kind(shape, piece)._replace(frozen=frozen)


def _losses(shape: Shape, piece: int, part: BlockPart) -> ChoiceLosses:
    """The losses of a piece that need the choices of other tokens."""
    mlp = shape.mlp(piece)
    # Only the piece that chooses knows the choices.
    chooses = part in (BlockPart.WHOLE, BlockPart.ROUTING)
    if mlp is None or not chooses:
        return ChoiceLosses()
    return mlp.losses(shape)


def _bundle(
    shape: Shape, piece: int, part: BlockPart
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The tensors of the bundle that a piece takes and gives, by name."""
    if part is BlockPart.ROUTED:
        # The counts have become routes: the number of tokens from each rank.
        return ("sent", "routes"), ("sent",)
    # What merging needs later passes the routed MLPs by, with the residual stream.
    mlp = shape.mlp(piece)
    results = () if mlp is None else mlp.results(shape)
    if part is BlockPart.ROUTING:
        return ("x",), ("x", "sent", "counts", *results)
    if part is BlockPart.MERGING:
        return ("x", "sent", *results), ("x",)
    # The head also needs the hidden states before the last module's.
    if shape.predictors and not shape.is_block(piece) and piece:
        known = ("x", "hidden")
        if piece == shape.pieces - 1:
            return known, ()
        return known if piece > 1 + shape.layers else ("x",), known
    # The first piece takes token indices, and the last one gives the loss: no
    # bundle.
    last = shape.pieces - 1
    return ("x",) if piece else (), ("x",) if piece < last else ()


# ---- the weights of the built-in models, without torch, as in `models/decoder.py` and `models/mlp.py`


def _weights_of(
    shape: Shape, piece: int, part: BlockPart
) -> tuple[WeightRow, ...]:
    weights = _weights(shape, piece)
    if part is BlockPart.WHOLE:
        return weights
    mlp = shape.mlp(piece)
    assert mlp is not None
    prefix = mlp.routed_prefix
    return tuple(
        weight for weight in weights if _part_of(weight.name, prefix) is part
    )


def _part_of(name: str, routed_prefix: str) -> BlockPart:
    """The part of a block that holds a weight."""
    if name.startswith(routed_prefix):
        return BlockPart.ROUTED
    return (
        BlockPart.MERGING
        if name.startswith("mlp_post_norm.")
        else BlockPart.ROUTING
    )


def _weights(shape: Shape, piece: int) -> tuple[WeightRow, ...]:
    """The weights of a shape's piece. A tied output weight is the embedding's."""
    counts = {} if shape.kind == "mlp" else shape.unit_counts
    adapted = shape.adapter is not None
    frozen = piece in shape.frozen

    def complete(weight: WeightRow) -> WeightRow:
        # Adapters are trained, and nothing else.
        trained = weight.adapts if adapted else not frozen
        granule = granules(weight.dims, weight.shape, counts)
        matrices = _matrices(weight.dims, weight.shape)
        # A matrix between features, outside the routed MLPs.
        inside = 0 < piece < shape.pieces - 1
        narrow = inside and bool(matrices) and not weight.routed
        return replace(
            weight,
            granule=granule,
            trained=trained,
            matrices=matrices,
            narrow=narrow,
        )

    return tuple(map(complete, _plain_weights(shape, piece)))


def granules(
    dims: Sequence[str], lengths: Sequence[int], counts: Mapping[str, int]
) -> tuple[int, ...]:
    """The indivisible length in each dim; `counts` are the numbers of units."""
    every = zip(dims, lengths, strict=True)
    return tuple(
        # A dim that is not counted is one unit, so its granule is 1.
        max(1, length // counts.get(dim, length))
        for dim, length in every
    )


def _matrices(
    dims: Sequence[str], lengths: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """The matrices of a weight: one between two features, or one for each routed MLP."""
    # Lookup tables, dims named "-" and vectors are no matrices.
    if (
        len(dims) < 2
        or not {*dims[-2:]} <= {*FEATURES}
        or dims[:-2] not in ((), (ROUTED,))
    ):
        return ()
    count = lengths[0] if len(dims) > 2 else 1
    return ((lengths[-2], lengths[-1]),) * count


def _weight(name: str, dims: str, *lengths: int) -> WeightRow:
    return WeightRow(name, tuple(dims.split()), lengths, ())


def _plain_weights(shape: Shape, piece: int) -> Iterator[WeightRow]:
    """Yield the names, dims and lengths of a piece's weights in order of use."""
    if shape.kind == "mlp":
        if 0 < piece <= shape.layers:
            yield _weight("weight", "embed ffn", shape.hidden, shape.hidden)
    elif piece == 0:
        yield _weight(
            f"{_TOKENS}.weight", "vocab embed", shape.vocab, shape.hidden
        )
        if shape.positions == "learned":
            yield _weight(
                "positions.weight",
                "position embed",
                shape.sequence,
                shape.hidden,
            )
    elif shape.is_block(piece):
        for weight in _block(shape, piece):
            yield weight
            yield from _adapter(shape, weight)
    elif shape.is_join(piece):
        width = shape.hidden
        yield from _norm(shape, "token_norm", "embed", width)
        yield from _norm(shape, "hidden_norm", "embed", width)
        yield _weight("proj.weight", "embed embed", width, 2 * width)
    else:
        yield from _norm(shape, "norm", "embed", shape.hidden)
        # A tied output weight is the embedding's.
        if not shape.tied:
            yield _weight(
                "output.weight", "vocab embed", shape.vocab, shape.hidden
            )
        for module in range(shape.predictors):
            name = f"predicted.{module}.norm"
            yield from _norm(shape, name, "embed", shape.hidden)


def _norm(
    shape: Shape, name: str, dim: str, length: int
) -> Iterator[WeightRow]:
    yield _weight(f"{name}.weight", dim, length)
    if shape.norm == "layer":
        yield _weight(f"{name}.bias", dim, length)


def _block(shape: Shape, piece: int) -> Iterator[WeightRow]:
    # "pre": before attention and MLP; "post": after them; "both": on both
    # sides.
    norms = ["attn_norm", "mlp_norm"] if shape.norms != "post" else []
    norms += (
        ["attn_post_norm", "mlp_post_norm"] if shape.norms != "pre" else []
    )
    for name in norms:
        yield from _norm(shape, name, "embed", shape.hidden)
    mixer = shape.mixer(piece)
    assert mixer is not None
    for name, dims, lengths in mixer.weights(shape):
        yield _weight(name, dims, *lengths)
    mlp = shape.mlp(piece)
    assert mlp is not None
    for name, dims, lengths in mlp.weights(shape):
        yield _weight(name, dims, *lengths)


def block_linears(shape: Shape) -> dict[str, WeightRow]:
    """Weights of blocks' linears that may carry adapters, by layer name."""
    if shape.kind == "mlp":
        return {}
    names = (*MIXER_LINEARS, *mlp_linears(shape))
    # Vectors carry no adapters.
    # Blocks with other layers in the place of attention have other linears.
    period = max(1, min(len(shape.mixers), shape.layers))
    named = {
        linear_name(weight): weight
        for piece in range(1, 1 + period)
        for weight in _block(shape, piece)
        if len(weight.dims) == 2
    }
    return {name: weight for name, weight in named.items() if name in names}


def _adapter(shape: Shape, weight: WeightRow) -> Iterator[WeightRow]:
    """The weights of the adapter beside a linear's weight, if the shape gives it one."""
    row = shape.adapter
    if row is None or len(weight.dims) != 2:
        return
    if linear_name(weight) not in shape.adapters:
        return
    path = weight.name.removesuffix(".weight")
    rank = row.rank_of(shape)
    for each in row.weights:
        lengths = each.lengths(weight.shape, rank)
        dims = each.dims(weight.dims)
        yield _weight(f"{path}{row.mark}{each.name}", dims, *lengths)
