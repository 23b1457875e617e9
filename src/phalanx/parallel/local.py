"""One rank's part of a model: the pieces of its stages, sharded and bound to its units."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm import World
from ..layout import Layout, LayoutError, stage_pieces
from ..layout.choices import GRAPHS
from ..layout.graphs import SPLIT_BACKWARD
from ..layout.rules import ROUTED
from ..layout.stages import stage_blocks
from ..models.loss import ExtraLoss
from ..models.routed import ReceivingPart
from ..program import Program, ops
from . import graphs
from .batch import edge_shape
from .block_parts import cut_blocks
from .compile import CompiledModule, refuse_uncompiled
from .context import install_context
from .data import PlainUnit, Precision, SteadyUnit, Unit
from .exact import ExactUnit
from .exchange import Exchange
from .fitness import refuse_unfit
from .groups import Groups, UnitGroups, open_groups
from .model import Derive, Model, start
from .narrow import NarrowUnit, narrow_names
from .pieces import Bundle, Piece, chunked_child, extra_losses
from .pool import BufferPool
from .preference import preference_loss
from .tensor import Weight, cut_of, cut_weights, install_regions


class ExactPlace(NamedTuple):
    """A rank's place among those that see other tokens, in a layout of `exact`."""

    ranks: int  # with other sequences
    rank: int
    time_parts: int  # of all ranks
    own: slice  # the parts of time that this rank computes


def exact_place(layout: Layout, at: Mapping[str, int]) -> ExactPlace | None:
    """The place of the rank at these coordinates, or None."""
    if not layout.exact:
        return None
    parts = layout.time_parts
    each = parts // layout.cp
    own = slice(at["cp"] * each, (at["cp"] + 1) * each)
    return ExactPlace(layout.data, at["data"], parts, own)


@dataclass(frozen=True, eq=False)
class LocalModel:
    """One rank's pieces, units by number (`Model.unit_of`), groups and buffer pool."""

    pieces: dict[int, Piece]
    units: dict[int, Unit]  # of the trained weights
    frozen: dict[int, Unit]  # of the frozen weights, by the same numbers
    groups: Groups
    exchange: Exchange  # sends tokens to the ranks that share experts
    pool: BufferPool
    coordinates: dict[str, int]  # the rank's place on each axis
    exact_place: ExactPlace | None  # None: the layout is not `exact`
    ahead: int  # modules that predict later tokens
    # The losses that the last piece returns beside its own.
    extra_losses: Mapping[str, ExtraLoss]
    # Makes empty tensors in the shapes of a piece's inputs.
    edge: Callable[[int, Mapping[str, Tensor]], Bundle]
    # Tensors derived from a microbatch, by the names under which this rank's pieces
    # take them.
    derived: Mapping[str, Callable[[Mapping[str, Tensor]], Tensor | None]]
    # Initializes weights from a seed: all, or those `chosen` by name.
    draw: Callable[..., None]
    # Fills all weights with the values of whole tensors, by name.
    fill: Callable[[Mapping[str, Tensor]], None]

    @torch.no_grad()
    def complete(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A microbatch with the tensors that the rank's pieces derive from it."""
        made = {name: make(batch) for name, make in self.derived.items()}
        found = {name: x for name, x in made.items() if x is not None}
        return {**batch, **found}

    def weights(self, unit: int) -> list[Unit]:
        """A unit's trained weights and its frozen weights."""
        return [
            units[unit] for units in (self.units, self.frozen) if unit in units
        ]

    @property
    def every_unit(self) -> list[Unit]:
        return [
            unit
            for number in {**self.units, **self.frozen}
            for unit in self.weights(number)
        ]

    def of_piece(self, piece: int, *, trained: bool = False) -> list[Unit]:
        """The units of a piece, including its experts; only the trained ones if asked."""
        return self._by_piece[piece, trained]

    @cached_property
    def _by_piece(self) -> Mapping[tuple[int, bool], list[Unit]]:
        found: dict[tuple[int, bool], list[Unit]] = defaultdict(list)
        for unit in self.every_unit:
            found[unit.piece, False].append(unit)
        for unit in self.units.values():
            found[unit.piece, True].append(unit)
        return found


def model_stages(model: Model, layout: Layout) -> tuple[range, ...]:
    """The pieces of each virtual stage, balanced by parameters without a shape."""
    if model.shape is not None:
        return stage_pieces(layout, model.shape)
    count = len(model.pieces)
    if count < 3:
        if layout.virtual_stages > 1:
            raise LayoutError(
                f"{layout} has {layout.virtual_stages} stages, but the model is one piece."
                " Pass an example batch to prepare, which finds the model's blocks with it;"
                " describe the model (docs/bring-your-model.md); or use no pp."
            )
        return (range(count),)
    # Parameters stand for work, and 1 counts a piece without any.
    work = [1] * count
    for name, weight in model.weights.items():
        work[model.unit_of[name] % count] += weight.numel()
    # Blocks are balanced; the embedding joins the first stage, the head the last.
    blocks = stage_blocks(layout, "the model", work)
    ends = [0, *(1 + block for block in accumulate(blocks))]
    ends[-1] = count  # the head goes with the last stage
    return tuple(range(a, b) for a, b in pairwise(ends))


def _begin_backward_thread(device: torch.device) -> None:
    """Make CUDA's context current on the thread that runs the backwards of a GPU.

    The thread's first kernel does so. Without it, the first kernel would be the matmul
    of a loss, and cuBLAS warns if it finds no context.
    """
    if device.type == "cuda":
        x = torch.ones(1, device=device, requires_grad=True)
        torch.autograd.backward(x * x)


def build_local(
    world: World,
    layout: Layout,
    model: Model,
    program: Program,
    *,
    seed: int | None = 0,
    precision: Precision | None = None,
    poison: bool = False,
    prefix: str = "",
) -> LocalModel:
    """Build this rank's part of a model, with the weights of the run's start.

    Without a seed the weights are zeros until they are read or drawn. Every rank calls
    it. The model's modules are changed and belong to this rank from here on.
    """
    refuse_unfit(model, layout)
    # 1. The program's pieces, and this rank's part in it.
    model = cut_blocks(model, layout)
    precision = precision or Precision()
    at = world_place(layout, world.rank)
    role = _Role.of(program, world.rank)
    # 2. Communicators, which all ranks open together.
    groups = open_groups(world, layout, model, program, prefix=prefix)
    # 3. This rank's part of each weight, and modules that compute on such parts.
    weights = cut_weights(model, layout, at)
    install_context(model, layout, groups.ring, groups.ulysses)
    install_regions(model, layout, groups)
    # A pair's tokens are on several ranks of cp, which sum their margins.
    if pairs := preference_loss([piece for _, piece in model.pieces]):
        pairs.shard_time((groups.ring, groups.ulysses))
    # 4. Units with their homes; flat buffers where the world shares memory.
    _begin_backward_thread(world.device)
    pool = BufferPool(world.device, empty=world.empty, poison=poison)
    maker = _UnitMaker(
        model, layout, program, role, groups, pool, precision, weights
    )
    trained, frozen = maker.units(frozen=False), maker.units(frozen=True)
    of_number = {
        n: [u[n] for u in (trained, frozen) if n in u] for n in maker.held
    }
    # 5. Weights become views of the units' buffers, and get their initial values.
    _place(model, of_number, role.pieces, layout, at, world.device)
    draw = partial(_draw, model, of_number)
    if seed is not None:
        draw(seed)
    # 6. The pieces, whose products add to the units' gradients.
    pieces = {
        p: _piece(model, p, program, of_number, role, layout, world.device)
        for p in role.pieces
    }
    if layout.compile == GRAPHS:
        if role.splits:
            raise LayoutError(f"{SPLIT_BACKWARD}.")
        _record_graphs(pieces.values(), world.device)
    taken = {name for piece in pieces.values() for name in piece.takes}
    # Derived tensors that no piece of this rank takes are not computed here.
    derived = {
        name: _at_dtype(make, precision.compute)
        for name, make in model.derived.items()
        if name in taken
    }
    return LocalModel(
        pieces,
        trained,
        frozen,
        groups,
        Exchange(groups.ep, groups.routes, _receiving(program)),
        pool,
        at,
        exact_place(layout, at),
        model.shape.predictors if model.shape else 0,
        extra_losses(model.pieces[-1][1]),
        partial(_edge, model, layout, precision.compute, world.device),
        derived,
        draw,
        partial(_fill_from, of_number),
    )


@dataclass(frozen=True)
class _Role:
    """The role of a rank in a program, as far as its units and pieces depend on it."""

    pieces: tuple[int, ...]  # the pieces it computes
    dropped: frozenset[int]  # the pieces whose weights it drops after use
    splits: bool  # backward comes in two parts
    offloads: bool  # activations go to the host
    adds: bool  # gradients accumulate in place, which autograd's own cannot

    @classmethod
    def of(cls, program: Program, rank: int) -> "_Role":
        number = program.owner[rank]
        row = program.rows[number]
        kinds = {op.kind for op in row}
        splits = ops.INPUT_GRADIENT in kinds
        return cls(
            pieces=tuple(
                piece for piece, row in program.host.items() if row == number
            ),
            dropped=frozenset(op.piece for op in row if op.kind == ops.DROP),
            splits=splits,
            offloads=ops.OFFLOAD in kinds,
            adds=program.microbatches > 1 or splits or ops.TO_OWNERS in kinds,
        )


class _UnitMaker:
    """Creates a rank's units, each of the class that it needs."""

    def __init__(
        self,
        model: Model,
        layout: Layout,
        program: Program,
        role: _Role,
        groups: Groups,
        pool: BufferPool,
        precision: Precision,
        weights: Mapping[str, Weight],
    ) -> None:
        self.model, self.program, self.role, self.groups = (
            model,
            program,
            role,
            groups,
        )
        self.pool, self.precision, self.weights = pool, precision, weights
        self.count = len(model.pieces)
        self.at_host, self.exact = layout.weights_on_host, layout.exact
        self.steady = layout.compile == GRAPHS
        self.mesh, self.time_parts = layout.mesh, own_time_parts(layout)
        own = {unit for piece in role.pieces for unit in program.units(piece)}
        routed = [piece + self.count for piece in role.pieces]
        # The numbers of this rank's units: those of its pieces, and those of their
        # experts.
        self.held = sorted(own) + [
            n for n in routed if n in model.unit_of.values()
        ]
        self.narrow = frozenset[str]()
        if layout.gathers_in_8_bits:
            self.narrow = narrow_names(model, precision.matmul)

    def units(self, *, frozen: bool) -> dict[int, Unit]:
        """The units of the trained weights, or of the frozen ones."""
        units = {}
        for number in self.held:
            chosen = [
                weight
                for name, weight in self.weights.items()
                if self.model.unit_of[name] == number
                and weight.frozen == frozen
            ]
            # A piece without weights still has a unit of trained ones, unless the
            # program freezes it.
            of_piece = not frozen and number < self.count
            if number not in self.program.frozen if of_piece else chosen:
                units[number] = self._unit(number, chosen, frozen=frozen)
        return units

    def _unit(
        self, number: int, weights: Sequence[Weight], *, frozen: bool
    ) -> Unit:
        # Experts are numbered behind the pieces; see `Model.unit_of`.
        piece = number % self.count
        groups = self.groups.units[number]
        # ZeRO-1 and 2 keep frozen weights whole on each rank.
        if frozen and self.groups.whole is not None:
            groups = self.groups.whole[number]
        given: Any = (number, weights, groups, self.pool, self.precision)
        terms: Any = {
            "resident": piece not in self.role.dropped,
            "at_host": self.at_host,
            "replicas_apart": self.program.replicated,
            "frozen": frozen,
            "piece": piece,
        }
        if self.exact and not frozen:
            dims = (
                self.model.rules.dims(w.name, len(w.shape)) for w in weights
            )
            # Experts meet the tokens of all ranks that share them.
            routed = any(ROUTED in each for each in dims)
            senders = self.groups.ep.size if routed else 1
            assert groups.copies is not None
            at = [self.mesh.coordinates(r) for r in groups.copies.ranks]
            places = [each.get("cp", 0) for each in at]
            return ExactUnit(
                *given,
                senders=senders,
                time_parts=self.time_parts,
                over_time=places,
                **terms,
            )
        # 8-bit gathers only save something where a gather has other ranks to reach.
        in_8_bits = self.narrow & {weight.name for weight in weights}
        if in_8_bits and groups.gather.size > 1:
            return NarrowUnit(*given, narrow=in_8_bits, **terms)
        if self.steady and not frozen:
            return SteadyUnit(*given, **terms)
        if not frozen and self._may_be_plain and _stays(weights, groups):
            return PlainUnit(*given, **terms)
        return Unit(*given, **terms)

    @cached_property
    def _may_be_plain(self) -> bool:
        """True if weights are stored in the compute dtype, not as masters."""
        p = self.precision
        same = p.compute == p.master == p.reduce and not p.matmul
        stays = not (
            self.at_host or self.role.dropped or self.program.replicated
        )
        return same and stays and not self.role.adds


def _receiving(program: Program) -> set[int]:
    every = (op for each in program.rows for op in each)
    return {op.piece for op in every if op.kind == ops.COUNT_ROUTES}


def _edge(
    model: Model,
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device,
    piece: int,
    batch: Mapping[str, Tensor],
) -> Bundle:
    """Empty tensors in the shapes of a piece's inputs."""
    if model.edges:
        # Tensors in the weights' dtype take the run's precision, others keep theirs.
        own = next(iter(model.weights.values())).dtype
        edges = model.edges(piece, batch)
        like = {
            n: x.to(dtype) if x.dtype == own else x for n, x in edges.items()
        }
    else:
        width = model.shape.hidden if model.shape else 0
        shape = edge_shape(batch, width, layout.tp if layout.seq else 1)
        like = {"x": torch.empty(shape, dtype=dtype, device="meta")}
    return {name: _real(x, device) for name, x in like.items()}


def _at_dtype(
    make: Derive, dtype: torch.dtype
) -> Callable[[Mapping[str, Tensor]], Tensor | None]:
    return lambda batch: make(batch, dtype)


def _real(x: Tensor, device: torch.device) -> Tensor:
    """Allocate memory for a meta tensor; `empty_like` would import sympy (0.3 s)."""
    return torch.empty(x.shape, dtype=x.dtype, device=device)


def _stays(weights: Sequence[Weight], groups: UnitGroups) -> bool:
    """True if the gradients of these weights go to no other rank."""
    every = groups.gather, groups.reduce, groups.replica, groups.tie
    return all(group.size == 1 for group in every) and not any(
        w.adds for w in weights
    )


def world_place(layout: Layout, rank: int) -> dict[str, int]:
    at = layout.mesh.coordinates(rank)
    at = {**dict.fromkeys(("dp", "pp", "cp", "tp", "ep"), 0), **at}
    # "data" is the index of this rank's share of the batch
    return at | {"data": at["dp"] * layout.ep + at["ep"]}


def _piece(
    model: Model,
    piece: int,
    program: Program,
    units: Mapping[int, Sequence[Unit]],
    role: _Role,
    layout: Layout,
    device: torch.device,
) -> Piece:
    module, compiled = model.pieces[piece][1], None
    # On meta each operation is costed on its own, so nothing is compiled.
    # A head whose loss makes the logits has nothing but a norm to compile.
    apart = (
        isinstance(module, ReceivingPart)
        or chunked_child(module)
        or getattr(module, "uncompiled", False)
    )
    if layout.compile and device.type != "meta" and not apart:
        refuse_uncompiled(device)
        # Blocks only: the first and the last piece are never recomputed selectively.
        again = (
            layout.recompute == "selective" and 0 < piece < program.pieces - 1
        )
        compiled = CompiledModule(
            module, layout.compile, device, selective=again
        )
    numbers = *program.units(piece), piece + len(model.pieces)
    return Piece(
        module,
        [unit for number in numbers for unit in units.get(number, ())],
        model.takes(piece),
        number=piece,
        first=piece == 0,
        last=piece == program.pieces - 1,
        splits=role.splits,
        offloads=role.offloads,
        compiled=compiled,
        exact=layout.exact > 0,
        time_parts=own_time_parts(layout),
        ep_ranks=layout.ep_ranks,
    )


def _record_graphs(pieces: Iterable[Piece], device: torch.device) -> None:
    """Let compiled pieces record graphs, in one pool of memory."""
    capture = graphs.capture_of(device)
    for piece in pieces:
        # The last piece has its loss only after the backward.
        if capture is not None and piece.compiled and not piece.last:
            piece.graphs = graphs.PieceGraphs(piece, capture)


def own_time_parts(layout: Layout) -> int:
    """The parts of a sequence that a rank computes apart; 0: it does not."""
    parts = layout.time_parts
    return parts // layout.cp if parts > 1 else 0


def _place(
    model: Model,
    units: Mapping[int, Sequence[Unit]],
    mine: Sequence[int],
    layout: Layout,
    at: Mapping[str, int],
    device: torch.device,
) -> None:
    """Replace the model's parameters by the units', and create its buffers."""
    # By identity: the modules still hold the parameters that the model was made with.
    originals = {parameter: name for name, parameter in model.weights.items()}
    every = [unit for each in units.values() for unit in each]
    bound = {name: p for unit in every for name, p in unit.parameters.items()}
    for piece in mine:
        prefix, module = model.pieces[piece]
        for path, child in module.named_modules():
            for key, parameter in list(child._parameters.items()):
                if parameter is not None:
                    child._parameters[key] = bound[originals[parameter]]
            # Meta buffers have no values: allocate whole, reset, then shard.
            buffers = {
                key: x for key, x in child._buffers.items() if x is not None
            }
            for key, x in buffers.items():
                child._buffers[key] = (
                    _real(x, device) if x.is_meta else x.to(device)
                )
            reset = getattr(child, "reset_buffers", None)
            if buffers and callable(reset):
                reset()
            for key in buffers:
                whole = child._buffers[key]
                assert isinstance(whole, Tensor)
                name = f"{prefix}.{path}".rstrip(".") + f".{key}"
                cuts = cut_of(model, layout, name, whole.shape, at)
                child._buffers[key] = whole[
                    tuple(slice(c.start, c.stop) for c in cuts)
                ].clone()


# The rows (ascending) and columns of a weight. All dims but the last form the rows.
_Part = tuple[Tensor, slice]
_PartOf = Callable[[str, torch.dtype, _Part], Tensor]


def _draw(
    model: Model,
    units: Mapping[int, Sequence[Unit]],
    seed: int,
    chosen: Callable[[str], bool] = lambda name: True,
) -> None:
    def drawn(name: str, dtype: torch.dtype, part: _Part) -> Tensor:
        return start(model, name, seed, dtype, part)

    _fill(units, drawn, chosen)
    if model.own_start is not None:
        model.own_start.forget()


def _fill_from(
    units: Mapping[int, Sequence[Unit]], values: Mapping[str, Tensor]
) -> None:
    def taken(name: str, dtype: torch.dtype, part: _Part) -> Tensor:
        rows, columns = part
        whole = values[name].detach()
        # All dims but the last form the rows, as in `Weight.rows`.
        wide = whole.shape[-1] if whole.dim() else 1
        chosen = whole.reshape(-1, wide)[rows.to(whole.device)]
        return chosen[:, columns].to(dtype).contiguous()

    _fill(units, taken, lambda name: True)


def _fill(
    units: Mapping[int, Sequence[Unit]],
    part_of: _PartOf,
    chosen: Callable[[str], bool],
) -> None:
    for unit in (unit for each in units.values() for unit in each):
        if unit.home.is_meta:
            continue
        for weight, begin, stop, at in unit.entries():
            if chosen(weight.name):
                wide = weight.local[-1] if weight.local else 1
                # The shard may begin inside a row: whole rows are drawn, then cut.
                rows = weight.rows[begin // wide : -(-stop // wide)]
                box = (
                    rows[rows > 0] - 1,
                    weight.box[-1] if weight.box else slice(1),
                )
                part = part_of(weight.name, unit.precision.master, box)
                # Zeros for the rows and columns that only pad the shard.
                if part.shape != (len(rows), wide):
                    padded = part.new_zeros(len(rows), wide)
                    padded[rows > 0, : part.shape[1]] = part
                    part = padded
                unit.home[at : at + stop - begin] = part.view(-1)[
                    begin % wide :
                ][: stop - begin]
        # Gathers the other shards, so every rank fills its units in one order.
        unit.bring_up()
