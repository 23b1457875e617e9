"""One row for each piece of a layout's program, with everything that a reader of a step needs to know.

The rows are derived here from a `Shape`; `parallel/rows.py` derives the same rows from a model's modules
and rule table. Nobody else asks a shape or a model for these facts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, lru_cache

from .kinds import BlockPart, block_kind, parts_of_pieces
from .layout import Layout
from .rules import FEATURES, LATENT, LORA, PARTIAL, Cut
from .shape import Shape
from .stages import stage_pieces
from .weights import Lengths, piece_weights

_NORMS_AND_BIASES = frozenset({"head", LATENT, LORA})


@dataclass(frozen=True)
class WeightRow:
    """One weight of a piece: its name in the piece, its dims by name, their lengths."""

    name: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    granule: tuple[int, ...]  # of each dim: the length that is never divided, as a head's
    trained: bool = True
    # (rows, columns) of each matrix that an optimizer such as Muon updates whole.
    matrices: tuple[tuple[int, int], ...] = ()
    # Linear layers of a block alone multiply by it: where products are in 8 bits it can be gathered so.
    narrow: bool = False

    @property
    def numel(self) -> int:
        count = 1
        for length in self.shape:
            count *= length
        return count

    @property
    def routed(self) -> bool:
        """True for a weight of routed experts, which ep distributes."""
        return "experts" in self.dims

    def cuts(self, layout: Layout, rank: int = 0) -> tuple[Cut, ...]:
        """The part of each dim that a rank of tp holds, of those that share the weight's experts."""
        at = {"tp": rank}
        every = zip(layout.axes_of(self.dims), self.shape, self.granule, strict=True)
        return tuple(
            Cut.of(length, *layout.mesh.part(axes, at), granule) for axes, length, granule in every
        )


class Sum(StrEnum):
    """The reason why ranks of tp add up their gradients of a weight."""

    NONE = ""
    KV = "kv"  # several ranks hold a key and value head, for other query heads each
    NORMS = "norms"  # the weight is whole everywhere, and met other tokens or other heads


def sum_over_tp(dims: Sequence[str], cuts: Sequence[Cut], layout: Layout) -> Sum:
    """The gradient rule along tp: sum over the copies that did different work, over no others."""
    if layout.tp == 1:
        return Sum.NONE
    if any(cut.copies > 1 for cut in cuts):
        return Sum.KV
    sharded = any("tp" in axes for axes in layout.axes_of(dims))
    if sharded or PARTIAL in dims:
        return Sum.NONE
    if _NORMS_AND_BIASES & {*dims}:
        # q and k norms, latents: other heads. A factor of an adapter that is whole, the other being cut.
        return Sum.NORMS
    return Sum.NORMS if layout.seq else Sum.NONE  # norms and row biases: other tokens under seq


@dataclass(frozen=True)
class PieceRow:
    """One piece of a layout's program.

    Pieces of equal `kind` do the same work on weights of the same sizes. `weights` are those of its own
    unit; a piece also reads the units in `uses`, which belong to earlier pieces (tied embeddings).
    `partial`: ranks of tp hold parts of some gradient sums of this unit. `scaled`: its trained matrices
    travel in 8 bits, and ranks agree on their scales once a step. `sequence_loss`, `batch_loss`: its router
    has a loss of that kind; `sums_choices`: ranks have parts of the counts that such a loss needs.
    """

    piece: int  # of the model
    part: BlockPart
    kind: int
    weights: tuple[WeightRow, ...] = ()
    uses: tuple[int, ...] = ()
    partial: bool = False
    frozen: bool = False
    scaled: bool = False
    sequence_loss: bool = False
    batch_loss: bool = False
    sums_choices: bool = False

    def __hash__(self) -> int:
        # Without the weights: rows are keys of caches, and equal kinds have equal weights.
        flags = self.partial, self.frozen, self.scaled, self.sums_choices
        return hash((self.piece, self.part, self.kind, *flags))

    @property
    def receives_tokens(self) -> bool:
        """True for a piece into which tokens travel from other ranks."""
        return self.part is BlockPart.EXPERTS

    @property
    def has_matrices(self) -> bool:
        """True if an optimizer such as Muon updates a matrix of this unit whole."""
        return any(weight.trained and weight.matrices for weight in self.weights)

    @property
    def numel(self) -> int:
        """Parameters of the piece's own unit."""
        return sum(weight.numel for weight in self.weights)

    @property
    def trained_numel(self) -> int:
        """Parameters that are trained."""
        return sum(weight.numel for weight in self.weights if weight.trained)

    @property
    def routed_numel(self) -> int:
        """Parameters of routed experts."""
        return sum(weight.numel for weight in self.weights if weight.routed)


@dataclass(frozen=True)
class StagedPieces:
    """The pieces of a layout's program, and the run of them that each virtual stage holds."""

    rows: tuple[PieceRow, ...]
    stages: tuple[range, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def _numbers(self, chosen: Iterable[bool]) -> tuple[int, ...]:
        return tuple(number for number, yes in enumerate(chosen) if yes)

    @cached_property
    def tied(self) -> tuple[tuple[int, int], ...]:
        """(piece, unit): the piece also uses a weight of an earlier piece's unit."""
        return tuple((number, unit) for number, row in enumerate(self.rows) for unit in row.uses)

    @cached_property
    def frozen(self) -> tuple[int, ...]:
        return self._numbers(row.frozen for row in self.rows)

    @cached_property
    def partial(self) -> tuple[int, ...]:
        return self._numbers(row.partial for row in self.rows)

    @cached_property
    def scaled(self) -> tuple[int, ...]:
        """The units with scales to agree on before they are gathered."""
        return self._numbers(row.scaled for row in self.rows)

    @cached_property
    def sums_choices(self) -> tuple[int, ...]:
        """The pieces with a router whose choices ranks add up, for its losses."""
        return self._numbers(row.sums_choices for row in self.rows)

    @cached_property
    def experts(self) -> tuple[int, ...]:
        """The pieces into which tokens come from other ranks."""
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
    experts: Sequence[int] = (),
    partial: Sequence[int] = (),
    scaled: Sequence[int] = (),
    sums_choices: Sequence[int] = (),
) -> StagedPieces:
    """Equal pieces of which only their numbers matter: those of a schedule without a model."""
    rows = tuple(
        PieceRow(
            number,
            BlockPart.EXPERTS if number in experts else BlockPart.WHOLE,
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


def row_of(piece: int, part: BlockPart, kind: int, weights: Sequence[WeightRow]) -> PieceRow:
    """The row of a piece whose weights are known. A merging part has a unit even without a weight."""
    trains = any(weight.trained for weight in weights)
    has_unit = bool(weights) or part is BlockPart.MERGING
    return PieceRow(piece, part, kind, tuple(weights), frozen=has_unit and not trains)


def in_layout(row: PieceRow, layout: Layout) -> PieceRow:
    """The row with what depends on how the layout cuts and gathers its weights."""
    trained = [weight for weight in row.weights if weight.trained]
    partial = scaled = False
    if layout.tp > 1:
        partial = any(sum_over_tp(w.dims, w.cuts(layout), layout) for w in trained)
    if layout.gathers_in_8_bits:
        scaled = any(weight.narrow for weight in trained)
    within = layout.cp > 1 or (layout.seq and layout.tp > 1)  # ranks have parts of a sequence
    choices = row.sequence_loss and within
    choices = choices or (row.batch_loss and (within or layout.data > 1))
    if not (partial or scaled or choices):
        return row
    return replace(row, partial=partial, scaled=scaled, sums_choices=choices)


@lru_cache(maxsize=512)
def staged_pieces(layout: Layout, shape: Shape) -> StagedPieces:
    """The pieces of a layout's program for a model of this shape."""
    rows = _rows(shape, layout.experts_apart)
    kinds: dict[int, PieceRow] = {}  # the first row of each kind, in the layout
    for row in rows:
        if row.kind not in kinds:
            kinds[row.kind] = in_layout(row, layout)
    placed = (replace(kinds[row.kind], piece=row.piece, uses=row.uses) for row in rows)
    return StagedPieces(tuple(placed), stage_pieces(layout, shape))


def piece_work(row: PieceRow, shape: Shape) -> int:
    """Forward work of one piece for one sequence, in multiply-adds; see `Shape.cost`."""
    routed = shape.routed_cost(row.piece)
    if row.part is BlockPart.WHOLE:
        return shape.cost(row.piece)
    if row.part is BlockPart.ROUTING:
        return shape.cost(row.piece) - routed
    return routed if row.part is BlockPart.EXPERTS else 0


@lru_cache(maxsize=64)
def _rows(shape: Shape, apart: bool) -> tuple[PieceRow, ...]:
    kinds: dict[tuple[object, ...], PieceRow] = {}
    rows = []
    for piece, part in parts_of_pieces(shape, apart):
        weights = _weights_of(shape, piece, part)
        key = _kind(shape, piece, part, frozen=not any(weight.trained for weight in weights))
        if key not in kinds:
            kinds[key] = row_of(piece, part, len(kinds), weights)
        uses = (0,) if shape.tied and piece == shape.pieces - 1 else ()
        routes = part is BlockPart.ROUTING or (part is BlockPart.WHOLE and shape.sparse(piece))
        rows.append(
            replace(
                kinds[key],
                piece=piece,
                uses=uses,
                sequence_loss=routes and shape.sequence_loss > 0,
                batch_loss=routes and shape.batch_loss > 0,
            )
        )
    return tuple(rows)


def _kind(shape: Shape, piece: int, part: BlockPart, *, frozen: bool) -> tuple[object, ...]:
    """Everything in which the pieces of one shape's program can differ."""
    if not 0 < piece <= shape.layers:
        return (piece,)
    if part in (BlockPart.EXPERTS, BlockPart.MERGING):  # without attention
        return part, frozen
    return part, block_kind(shape, piece)._replace(frozen=frozen)


# ---- the weights of the built-in models


def _weights_of(shape: Shape, piece: int, part: BlockPart) -> tuple[WeightRow, ...]:
    weights = _weights(shape, piece)
    if part is BlockPart.WHOLE:
        return weights
    return tuple(weight for weight in weights if _part_of(weight.name) is part)


def _part_of(name: str) -> BlockPart:
    """The part of a block with experts that holds a weight."""
    if name.startswith("mlp.routed."):
        return BlockPart.EXPERTS
    return BlockPart.MERGING if name.startswith("mlp_post_norm.") else BlockPart.ROUTING


def _weights(shape: Shape, piece: int) -> tuple[WeightRow, ...]:
    """The weights of a shape's piece. A tied output weight is the embedding's."""
    counts = {} if shape.kind == "mlp" else {"heads": shape.heads, "kv": shape.kv_heads}
    return tuple(
        WeightRow(
            weight.name,
            weight.dims,
            weight.lengths,
            granules(weight.dims, weight.lengths, counts),
            trained=weight.adapts if shape.lora_r else piece not in shape.frozen,
            matrices=_matrices(weight.dims, weight.lengths),
            narrow=0 < piece <= shape.layers and _is_narrow(weight),
        )
        for weight in piece_weights(shape, piece)
    )


def _is_narrow(weight: Lengths) -> bool:
    """True for a matrix between features that no expert has to itself."""
    return not weight.routed and bool(_matrices(weight.dims, weight.lengths))


def granules(
    dims: Sequence[str], lengths: Sequence[int], counts: Mapping[str, int]
) -> tuple[int, ...]:
    """Of each dim the length that is never divided; `counts` says how many whole units a dim has."""
    every = zip(dims, lengths, strict=True)
    return tuple(max(1, length // counts.get(dim, length)) for dim, length in every)


def _matrices(dims: Sequence[str], lengths: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """A weight between two features is a matrix; one of experts is a matrix for each."""
    if len(dims) < 2 or not {*dims[-2:]} <= {*FEATURES} or dims[:-2] not in ((), ("experts",)):
        return ()
    count = lengths[0] if len(dims) > 2 else 1
    return ((lengths[-2], lengths[-1]),) * count
