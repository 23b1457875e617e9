"""A rank's share of a model: the pieces of its stages, cut and bound to its units."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ..comm import World
from ..layout import Layout, stage_pieces
from ..models import ExpertsPart
from ..program import Program, ops
from .batch import edge_shape
from .compile import CompiledModule, refuse_uncompiled
from .context import install_context
from .data import BufferPool, PlainUnit, Precision, Unit
from .experts import Exchange, cut_blocks
from .fitness import refuse_unfit
from .groups import Groups, UnitGroups, open_groups
from .model import Derive, Model, start
from .narrow import NarrowUnit, narrow_names
from .pieces import Bundle, Piece
from .tensor import Weight, cut_of, cut_weights, install_regions


@dataclass(frozen=True, eq=False)
class LocalModel:
    """One rank's pieces, units by number (see `Model.unit_of`), groups to other ranks, buffers' pool."""

    pieces: dict[int, Piece]
    units: dict[int, Unit]  # of the weights that are trained
    frozen: dict[int, Unit]  # of those that are not, by the same numbers
    groups: Groups
    exchange: Exchange  # of tokens with the ranks that share experts
    pool: BufferPool
    coordinates: dict[str, int]  # where the rank sits on each axis
    edge: Callable[[int, Mapping[str, Tensor]], Bundle]  # empty tensors for what a piece takes
    derived: Mapping[str, Callable[[Mapping[str, Tensor]], Tensor]]  # what its pieces take of it
    draw: Callable[..., None]  # gives weights (all, or those `chosen` by name) a seed's start

    @torch.no_grad()
    def complete(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A microbatch with what the rank's pieces derive from it."""
        return {**batch, **{name: make(batch) for name, make in self.derived.items()}}

    def weights(self, unit: int) -> list[Unit]:
        """All weights of a unit: what it trains, and what of it is frozen."""
        return [units[unit] for units in (self.units, self.frozen) if unit in units]

    @property
    def every_unit(self) -> list[Unit]:
        return [unit for number in {**self.units, **self.frozen} for unit in self.weights(number)]

    def of_piece(self, piece: int, *, trained: bool = False) -> list[Unit]:
        """The weights of a piece, or those of them that are trained: also its unit of experts."""
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
    """The pieces of every virtual stage; without a shape all blocks cost the same."""
    assert model.shape is not None, "a model without a shape has one stage"
    return stage_pieces(layout, model.shape)


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
    """This rank's part of a model, with the weights of the run's start. Without a seed they are zeros,
    until they are read or drawn.

    Every rank calls it; the model's modules are changed and belong to this rank from here on.
    """
    refuse_unfit(model, layout)
    model = cut_blocks(model, layout)
    mine = [p for p, row in program.host.items() if row == program.owner[world.rank]]
    held = sorted({unit for piece in mine for unit in program.units(piece)})
    count = len(model.pieces)
    held += [piece + count for piece in mine if piece + count in model.unit_of.values()]
    groups = open_groups(world, layout, model, program, prefix=prefix)
    precision = precision or Precision()
    pool = BufferPool(world.device, empty=world.empty, poison=poison)
    at = world_place(layout, world.rank)
    weights = cut_weights(model, layout, at)
    install_context(model, layout, groups.ring, groups.ulysses)
    install_regions(model, layout, groups)
    row = program.rows[program.owner[world.rank]]
    kinds = {op.kind for op in row}
    dropped = {op.piece for op in row if op.kind == ops.DROP}
    # A gradient that comes in parts is added up in place, which autograd does not do.
    once = program.microbatches == 1 and not kinds & {ops.INPUT_GRADIENT, ops.TO_OWNERS}
    same = precision.compute == precision.master == precision.reduce and not precision.matmul
    at_host = bool({"weights", "optimizer"} & set(layout.offload))
    may_be_plain = once and same and not (at_host or dropped or program.replicated)
    narrow = frozenset[str]()
    if layout.gathers_in_8_bits:
        narrow = narrow_names(model, precision.matmul)

    def units_of(*, frozen: bool) -> dict[int, Unit]:
        units: dict[int, Unit] = {}
        for number in held:
            chosen = [
                weight
                for name, weight in weights.items()
                if model.unit_of[name] == number and weight.frozen == frozen
            ]
            # A piece may have no weights, and a unit all the same.
            if not (chosen if frozen or number >= count else number not in program.frozen):
                continue
            whole, own = groups.whole if frozen else None, groups.units[number]
            plain = may_be_plain and not frozen and _stays(chosen, own)
            kind: Any = PlainUnit if plain else Unit
            matrices = narrow & {w.name for w in chosen}
            if matrices and (whole or own).gather.size > 1:
                kind = partial(NarrowUnit, narrow=matrices)
            units[number] = kind(
                number,
                chosen,
                whole or own,
                pool,
                precision,
                resident=number % count not in dropped,
                at_host=at_host,
                replicas_apart=program.replicated,
                frozen=frozen,
                piece=number % count,
            )
        return units

    units, still = units_of(frozen=False), units_of(frozen=True)
    all_units = {n: [u[n] for u in (units, still) if n in u] for n in held}
    _place(model, all_units, mine, layout, at, world.device)
    draw = partial(_fill, model, all_units)
    if seed is not None:
        draw(seed)
    pieces = {p: _piece(model, p, program, all_units, kinds, layout, world.device) for p in mine}

    def edge(piece: int, batch: Mapping[str, Tensor]) -> Bundle:
        if model.edges:
            like = model.edges(piece, batch)
        else:
            width = model.shape.hidden if model.shape else 0
            shape = edge_shape(batch, width, layout.tp if layout.seq else 1)
            like = {"x": torch.empty(shape, dtype=precision.compute, device="meta")}
        return {name: _real(x, world.device) for name, x in like.items()}

    every = (op for each in program.rows for op in each)
    experts = {op.piece for op in every if op.kind == ops.COUNT_ROUTES}
    exchange = Exchange(groups.ep, groups.routes, experts)
    taken = {name for piece in pieces.values() for name in piece.takes}
    derived = {
        name: _at_dtype(make, precision.compute)
        for name, make in model.derived.items()
        if name in taken
    }
    return LocalModel(pieces, units, still, groups, exchange, pool, at, edge, derived, draw)


def _at_dtype(make: Derive, dtype: torch.dtype) -> Callable[[Mapping[str, Tensor]], Tensor]:
    return lambda batch: make(batch, dtype)


def _real(x: Tensor, device: torch.device) -> Tensor:
    """Memory for a tensor on meta. `empty_like` of one imports sympy, which takes 0.3 s."""
    return torch.empty(x.shape, dtype=x.dtype, device=device)


def _stays(weights: Sequence[Weight], groups: UnitGroups) -> bool:
    """True if the gradients of these weights go to no other rank."""
    every = groups.gather, groups.reduce, groups.replica, groups.tie
    return all(group.size == 1 for group in every) and not any(w.adds for w in weights)


def world_place(layout: Layout, rank: int) -> dict[str, int]:
    at = layout.mesh.coordinates(rank)
    at = {**dict.fromkeys(("dp", "pp", "cp", "tp", "ep"), 0), **at}
    return at | {"data": at["dp"] * layout.ep + at["ep"]}  # which share of the batch


def _piece(
    model: Model,
    piece: int,
    program: Program,
    units: Mapping[int, Sequence[Unit]],
    kinds: set[str],
    layout: Layout,
    device: torch.device,
) -> Piece:
    module, compiled = model.pieces[piece][1], None
    # On meta each operation is costed.
    if layout.compile and device.type != "meta" and not isinstance(module, ExpertsPart):
        refuse_uncompiled(device)
        again = layout.recompute == "selective" and 0 < piece < program.pieces - 1
        compiled = CompiledModule(module, layout.compile, device, selective=again)
    numbers = *program.units(piece), piece + len(model.pieces)
    return Piece(
        module,
        [unit for number in numbers for unit in units.get(number, ())],
        model.takes(piece),
        first=piece == 0,
        last=piece == program.pieces - 1,
        splits=ops.INPUT_GRADIENT in kinds,
        offloads=ops.OFFLOAD in kinds,
        compiled=compiled,
    )


def _place(
    model: Model,
    units: Mapping[int, Sequence[Unit]],
    mine: Sequence[int],
    layout: Layout,
    at: Mapping[str, int],
    device: torch.device,
) -> None:
    """The model's parameters become those of the units; its buffers are made and cut."""
    originals = {parameter: name for name, parameter in model.weights.items()}
    every = [unit for each in units.values() for unit in each]
    bound = {name: p for unit in every for name, p in unit.parameters.items()}
    for piece in mine:
        prefix, module = model.pieces[piece]
        for path, child in module.named_modules():
            for key, parameter in list(child._parameters.items()):
                if parameter is not None:
                    child._parameters[key] = bound[originals[parameter]]
            buffers = {key: x for key, x in child._buffers.items() if x is not None}
            for key, x in buffers.items():
                child._buffers[key] = _real(x, device) if x.is_meta else x
            reset = getattr(child, "reset_buffers", None)
            if buffers and callable(reset):
                reset()
            for key in buffers:
                whole = child._buffers[key]
                assert isinstance(whole, Tensor)
                name = f"{prefix}.{path}".rstrip(".") + f".{key}"
                cuts = cut_of(model, layout, name, whole.shape, at)
                child._buffers[key] = whole[tuple(slice(c.start, c.stop) for c in cuts)].clone()


def _fill(
    model: Model,
    units: Mapping[int, Sequence[Unit]],
    seed: int,
    chosen: Callable[[str], bool] = lambda name: True,
) -> None:
    for unit in (unit for each in units.values() for unit in each):
        if unit.home.is_meta:
            continue
        for weight, begin, stop, at in unit.entries():
            if chosen(weight.name):
                wide = weight.local[-1] if weight.local else 1
                rows = weight.rows[begin // wide : -(-stop // wide)]
                box = rows[rows > 0] - 1, weight.box[-1] if weight.box else slice(1)
                part = start(model, weight.name, seed, unit.precision.master, box)
                if part.shape != (len(rows), wide):
                    padded = part.new_zeros(len(rows), wide)
                    padded[rows > 0, : part.shape[1]] = part
                    part = padded
                unit.home[at : at + stop - begin] = part.view(-1)[begin % wide :][: stop - begin]
        unit.bring_up()
