"""Prices every operation of a layout's program on some hardware, under a profile.

`piece_price.py` has the seconds of a piece's own operations. Here are those of
collectives over its weights (`Units`), and those of everything in a program, with its
memory (`Priced`). `step.py` simulates the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from ..layout import (
    Layout,
    PieceRow,
    Shape,
    StagedPieces,
    stage_pieces,
    staged_pieces,
)
from ..layout.choices import DTYPES, GRAPHS, MATMULS
from ..layout.optimizers import OPTIMIZERS
from ..layout.state_bytes import held_bytes
from ..program import Costs, PieceCost, Sizes, ops
from .case import Case, ranks_of
from .hardware import Hardware, lost_beside
from .matrices import (
    Matrices,
    MatrixTimes,
    matrix_bytes,
    matrix_elements,
    matrix_times,
    owned_elements,
    row_matrices,
)
from .piece_price import KindTimes, PieceTimes
from .profile import SoftwareProfile

# bytes per second of host memory for each device: assumed, 300 GB/s for eight
_HOST = 40e9
_NUMBER = 8.0  # bytes of one number that ranks agree on
_CHOICE = 4.0  # bytes of one count of choices
_TOUCHED = 30.0  # bytes that an Adam update reads and writes per parameter


# ---- collectives over units


def distance(layout: Layout, part: str) -> int:
    """The distance in ranks between neighbours along a part of the mesh."""
    # From the innermost axis outwards: each part's stride is the product of
    # those inside it.
    stride = 1
    for axis in reversed(layout.mesh.axes):
        for name, size in reversed(
            list(zip(axis.part_names, axis.parts, strict=True))
        ):
            if part in (name, axis.name):
                return stride
            stride *= size
    return stride


def nearest(layout: Layout, *, routed: bool = False) -> int:
    """The distance between the nearest ranks with copies of a weight."""
    apart = layout.ep_axes if routed else ()
    axes = (
        axis
        for axis in ("cp", "ep")
        if layout.mesh.of(axis) > 1 and axis not in apart
    )
    return min(
        (distance(layout, axis) for axis in axes),
        default=distance(layout, "dp.shard"),
    )


def exchange_seconds(
    layout: Layout,
    shape: Shape,
    hardware: Hardware,
    profile: SoftwareProfile,
    edge: float,
) -> tuple[float, float]:
    """Seconds to exchange token counts, and to exchange `edge` bytes of tokens."""
    # The distance along the nearest of those axes.
    near = min(
        (
            distance(layout, axis)
            for axis in layout.ep_axes
            if layout.mesh.of(axis) > 1
        ),
        default=1,
    )
    seconds, ranks = hardware.network.seconds, layout.ep_ranks
    routed = shape.routed
    # The first message has one count for each expert.
    routes = seconds("all_to_all", _NUMBER * routed.count, ranks, near)
    servers = ranks * near / hardware.node
    if profile.sends_once and servers > 1:
        # One copy of a token for each server with some of its experts, and from
        # there, inside, one for each of them.
        copies = servers * (1 - (1 - 1 / servers) ** routed.chosen)
        sent = edge * copies / routed.chosen
        inside = ranks / servers
        exchanged = max(
            seconds("all_to_all", sent, ranks, near),
            seconds("all_to_all", edge, inside, near),
        )
    else:
        exchanged = seconds("all_to_all", edge, ranks, near)
    return routes / hardware.crowding, exchanged / hardware.crowding


class UnitTimes(NamedTuple):
    """Seconds of the collectives over one unit, and of its update."""

    gather: float = 0.0
    load: float = 0.0  # from the host
    reduce: float = 0.0
    replicas: float = 0.0
    tie: float = 0.0
    update: float = 0.0


class Units:
    """Times of a layout's units, by their numbers of elements."""

    def __init__(
        self, layout: Layout, hardware: Hardware, profile: SoftwareProfile
    ) -> None:
        x, mesh = layout, layout.mesh
        self.layout, self.hardware, self.profile = layout, hardware, profile
        self.shards = float(mesh.of("dp.shard") * x.cp * x.ep)
        self.replicas = mesh.of("dp.replicate")
        self.near = [nearest(x), nearest(x, routed=True)]
        self.far = distance(x, "dp.replicate")
        # The two ends that share a weight are as far apart as two halves of a pipeline.
        self.ends = distance(x, "pp") * x.pp / 2
        self.on_host = "optimizer" in x.offload
        self.weights_on_host = "weights" in x.offload or self.on_host

    def of(
        self,
        numbers: float,
        frozen: float = 0.0,
        routed: float = 0.0,
        narrow: float = 0.0,
    ) -> UnitTimes:
        """The times of a unit with so many trained, frozen and routed elements.

        Experts are a unit of their own on fewer ranks. `narrow` of the trained and
        frozen elements are gathered in 8 bits. A collective that the elements do not
        need takes 0 s.
        """
        found = self._of(numbers, frozen, narrow, self.shards, self.near[0])
        if routed:
            n = self.shards / self.layout.copies_sharing
            apart = self._of(routed, 0.0, 0.0, n, self.near[1])
            found = UnitTimes(
                *(a + b for a, b in zip(found, apart, strict=True))
            )
        return found

    def _seconds(
        self, op: str, size: float, ranks: float, apart: float
    ) -> float:
        """Seconds of a collective over copies of a weight.

        With `one_port`, the ranks of a group that leaves its server are priced as if
        each had its own server, because they share one port.
        """
        leaves_server = apart * ranks > self.hardware.node
        if self.profile.one_port and leaves_server:
            apart = max(apart, self.hardware.node)
        return self.hardware.network.seconds(op, size, ranks, apart)

    def _of(
        self, numbers: float, frozen: float, narrow: float, n: float, near: int
    ) -> UnitTimes:
        seconds, p = self._seconds, self.profile
        # ZeRO-3 and weights on the host gather frozen weights as well; narrow
        # ones take 1 byte.
        cut = self.layout.zero == 3 or self.weights_on_host
        gathered = (numbers + frozen * cut) * p.gathered_bytes - narrow * (
            p.gathered_bytes - 1
        )
        size, part = numbers * p.reduce_bytes, n if self.layout.zero else 1.0
        gather = (
            seconds("all_gather", gathered, n, near)
            if self.layout.zero and gathered
            else 0.0
        )
        load = (
            gathered / part / self.hardware.host
            if self.weights_on_host
            else 0.0
        )
        if not size:
            return UnitTimes(gather, load)
        # Without ZeRO one all-reduce covers shards and replicas.
        replicas = 0.0
        if self.layout.exact:
            every = self.replicas * n
            there = seconds("all_to_all", size, every, near)
            reduce = there + self.add(numbers) * (every > 1)
            # Without ZeRO all copies gather, of which the nearest are neighbours.
            apart = self.far if self.layout.zero else near
            replicas = seconds("all_gather", size / part, every / part, apart)
        elif not self.layout.zero:
            reduce = seconds("all_reduce", size, self.replicas * n, near)
        # HSDP: reduce-scatter inside each group of shards, then all-reduce
        # over its replicas.
        elif n > 1:
            reduce = seconds("reduce_scatter", size, n, near)
            replicas = seconds("all_reduce", size / n, self.replicas, self.far)
        else:
            reduce = seconds("all_reduce", size, self.replicas, self.far)
        # Only the ends of a pipeline share a weight by messages.
        tie = (
            seconds("all_reduce", size / part, 2.0, self.ends)
            if self.layout.pp > 1
            else 0.0
        )
        return UnitTimes(
            gather,
            load,
            reduce,
            replicas,
            tie,
            self._update() * numbers / part,
        )

    def add(self, numbers: float) -> float:
        """Seconds of adding a gradient of so many elements to another one."""
        touched = 3.0 * self.profile.reduce_bytes
        return self.hardware.rates.move(touched) * numbers

    def agree_scales(self, others: float, narrow: float) -> float:
        """Seconds of agreeing on the scales of `narrow` elements.

        `others` are elements that travel in the same message.
        """
        if not narrow:
            return 0.0
        # One scale for each tile of run x run elements.
        squares = narrow / MATMULS[self.layout.matmul].run ** 2
        size = (others + squares) * self.profile.gathered_bytes
        return self._seconds("all_reduce", size, self.shards, self.near[0])

    def _update(self) -> float:
        """Seconds of Adam per element, with transfers if moments are on the host."""
        if self.on_host:
            # The gradient goes to the host here. Weights come back in operations of
            # their own.
            return (
                _TOUCHED / _HOST
                + self.profile.gradient_bytes / self.hardware.host
            )
        return self.hardware.rates.move(_TOUCHED)


# ---- a whole program


class PricedPiece(NamedTuple):
    """One piece of a program: its row, its times, and the number of frozen elements."""

    row: PieceRow
    times: PieceTimes
    frozen: float

    @property
    def trained(self) -> float:
        """Elements of this rank's weights that are trained."""
        return self.times.cost.weights - self.frozen

    @property
    def trained_routed(self) -> float:
        """Trained elements that belong to experts; 0 for a piece with frozen weights."""
        return 0.0 if self.frozen else self.times.cost.routed


@dataclass(frozen=True)
class Priced:
    """A priced case: seconds of every operation, and bytes of every piece and unit.

    Independent of the number of microbatches.
    """

    case: Case
    times: KindTimes
    hardware: Hardware
    profile: SoftwareProfile
    rows: tuple[PieceRow, ...] = ()  # of a model that no shape describes

    @cached_property
    def staged(self) -> StagedPieces:
        """The program's pieces, and the range of them that each virtual stage holds."""
        layout, shape = self.case.layout, self.case.shape
        # A user's own model brings its rows; a shape derives them.
        if not self.rows:
            return staged_pieces(layout, shape)
        return StagedPieces(self.rows, stage_pieces(layout, shape))

    @cached_property
    def pieces(self) -> list[PricedPiece]:
        """The pieces of the program, each with the times of its kind."""
        times = (
            part for piece in self.times for part in piece.parts or (piece,)
        )
        found = []
        for row, time in zip(self.staged.rows, times, strict=True):
            # A frozen row freezes all of the piece; otherwise its cost knows
            # how many elements are.
            frozen = time.cost.weights if row.frozen else time.cost.frozen
            found.append(PricedPiece(row, time, frozen))
        return found

    def _narrow(self, piece: PricedPiece) -> float:
        """The number of elements gathered in fp8; see `parallel/narrow.py`."""
        x, row, cost = self.case.layout, piece.row, piece.times.cost
        if not x.gathers_in_8_bits or (piece.frozen and x.zero < 3):
            return 0.0
        numbers = sum(weight.numel for weight in row.weights if weight.narrow)
        # Tensor parallelism divides the matrices; experts do not count.
        return min(numbers / x.tp, cost.weights - cost.routed)

    def _at_an_end(self, row: PieceRow) -> bool:
        """True for the embedding and the head."""
        return row.piece in (0, len(self.times) - 1)

    def costs(self, slower: float = 1.0) -> Costs:
        """Seconds of every operation, with computing slowed down by a factor."""
        x, shape, profile, hardware = (
            self.case.layout,
            self.case.shape,
            self.profile,
            self.hardware,
        )
        network = hardware.network.seconds
        # Messages were measured among ranks that share cores, and `times` multiplies by
        # crowding again.
        alone = 1.0 / hardware.crowding
        edge, gathered = self.times[1].cost.edge, 0.0
        # Each rank of tp sends its share, and the next stage gathers the
        # shares inside the server.
        if profile.scatters_sends and not x.seq and x.tp > 1:
            edge, gathered = edge / x.tp, network("all_gather", edge, x.tp, 1)
        sent = (
            network("send", edge, x.pp, distance(x, "pp")) + gathered
        ) * alone
        units = Units(x, hardware, profile)
        # Times by the row's kind, the piece's times, and its number of frozen elements.
        alike: dict[tuple[int, int, float], dict[str, float]] = {}
        # Pieces of one kind share their times, and are priced once.
        pieces: dict[tuple[str, int], float] = {}
        for n, piece in enumerate(self.pieces):
            key = piece.row.kind, id(piece.times), piece.frozen
            if key not in alike:
                alike[key] = self._of_piece(piece, units, alone, slower)
                alike[key][ops.RECEIVE] = sent
                if piece.row.partial:
                    alike[key][ops.SUM_PARTS] = (
                        self._sum_of_parts(piece.row) * alone
                    )
            pieces |= {(kind, n): time for kind, time in alike[key].items()}
        owned: dict[Matrices, MatrixTimes] = {}
        update = profile.matrix_row
        rows = self.staged.rows if update else ()
        for n, matrices in enumerate(map(row_matrices, rows)):
            assert update is not None
            # The owners' matmuls are added to the elementwise update. Blocks with the
            # same matrices have the same owners' work.
            took = owned.get(matrices) or matrix_times(
                update, matrices, x, hardware
            )
            owned[matrices] = took
            pieces[ops.UPDATE, n] += took.update
            pieces[ops.TO_OWNERS, n] = took.to_owners * alone
            pieces[ops.FROM_OWNERS, n] = took.from_owners * alone
        for n in self.staged.receivers:
            # Tokens that arrive at the experts go back: a busy rank sends back more
            # than its own.
            edge = self.pieces[n].times.cost.edge
            routes, exchanged = exchange_seconds(
                x, shape, hardware, profile, edge
            )
            pieces[ops.COUNT_ROUTES, n] = routes
            # Dispatch to the experts, and combination in the piece after them.
            for to in (n, n + 1):
                pieces[ops.EXCHANGE, to] = pieces[
                    ops.EXCHANGE_GRADIENT, to
                ] = exchanged
        for n in self.staged.sums_choices:
            pieces[ops.SUM_CHOICES, n] = (
                self._sum_of_choices(self.staged.rows[n]) * alone
            )
        if not profile.overlaps_sends and x.pp > 1:
            # Without overlap the device waits for each send, at the ends of virtual
            # stages.
            for stage in filter(None, self.staged.stages):
                pieces[ops.FORWARD, stage[-1]] += sent * (
                    stage[-1] < len(self.pieces) - 1
                )
                pieces[ops.INPUT_GRADIENT, stage[0]] += sent * (stage[0] > 0)
        pieces[ops.COUNT, -1] = (
            # Messages of one number: the tokens of the step, then the gradient
            # norm.
            network("all_reduce", _NUMBER, x.copies, nearest(x)) * alone
        )
        pieces[ops.AGREE, -1] = (
            network("all_reduce", _NUMBER, x.ranks, 1) * alone
        )
        return Costs({}, pieces)

    def _sum_of_choices(self, row: PieceRow) -> float:
        """Seconds of adding up the choices of tokens over ranks.

        These ranks have other tokens of the same sequences, or of the batch.
        """
        x, shape, seconds = (
            self.case.layout,
            self.case.shape,
            self.hardware.network.seconds,
        )
        # With `seq` the ranks of tp have different tokens, too.
        over_tp = x.tp if x.seq else 1
        near = 1 if over_tp > 1 else nearest(x)
        total = 0.0
        if row.sequence_loss:
            size = _CHOICE * self.case.rows * shape.routed.count
            total += seconds("all_reduce", size, x.cp * over_tp, near)
        if row.batch_loss:
            total += seconds(
                "all_reduce",
                _CHOICE * shape.routed.count,
                x.copies * over_tp,
                near,
            )
        return total

    def _sum_of_parts(self, row: PieceRow) -> float:
        """Seconds of adding up partial gradients over the ranks of tp."""
        size = row.summed_numel(self.case.layout) * self.profile.reduce_bytes
        return self.hardware.network.seconds(
            "all_reduce", size, self.case.layout.tp, 1
        )

    def _of_piece(
        self, piece: PricedPiece, units: Units, alone: float, slower: float
    ) -> dict[str, float]:
        x, host = self.case.layout, self.hardware.host
        t, routed, narrow = (
            piece.times,
            piece.trained_routed,
            self._narrow(piece),
        )
        own = piece.trained - routed
        unit = units.of(own, piece.frozen, routed, narrow)
        part = x.recompute == "selective" and not self._at_an_end(piece.row)
        whole = x.recompute in ("none", "selective")
        kept = (
            t.cost.selected if part else t.cost.kept if whole else t.cost.input
        )
        # seconds of messages beside each operation, every microbatch or once per step
        beside: dict[str, float] = {}
        if self.profile.overlaps_data and not self.hardware.cores:
            each, sums = (
                {"micro": 1.0, "step": 1.0 / x.microbatches},
                unit.reduce + unit.replicas,
            )
            # ZeRO-3 gathers again for the backward.
            again = unit.gather * (x.gather == "micro" and x.zero == 3)
            beside[ops.FORWARD] = unit.gather * each[x.gather]
            beside[ops.INPUT_GRADIENT] = again + sums * each[x.reduce]
        return {
            # Computation is slowed by messages beside it.
            **{
                kind: time * slower + lost_beside(time, beside.get(kind, 0.0))
                for kind, time in t.computed.items()
            },
            ops.RECOMPUTE_PART: t.recompute.total * slower,
            # What is not narrow is exchanged whole, beside the scales of
            # narrow tiles.
            ops.AGREE_SCALES: units.agree_scales(
                max(0.0, own - narrow), narrow
            )
            * alone,
            ops.GATHER: unit.gather * alone,
            ops.LOAD: unit.load,
            ops.REDUCE: unit.reduce * alone,
            ops.REDUCE_REPLICAS: unit.replicas * alone,
            # One addition less than microbatches.
            ops.ADD: units.add(own) * (1.0 - 1.0 / x.microbatches),
            ops.EXCHANGE_PARTS: unit.reduce * alone,
            ops.SHARE_SUMS: unit.replicas * alone,
            ops.TIE: unit.tie * alone,
            ops.UPDATE: unit.update,
            # Bytes over the host's link: what the forward kept goes out and
            # comes back.
            ops.OFFLOAD: kept / host,
            ops.RELOAD: kept / host,
        }

    def _more_moments(self, elements: Sequence[float]) -> tuple[float, ...]:
        """The bytes of the optimizer beyond the profile's, for each piece.

        A profile has the moments of the weight with the fewest. `elements` are those of
        which this rank has moments.
        """
        profile, layout = self.profile, self.case.layout
        row = OPTIMIZERS[profile.optimizer]
        update = row.matrices
        if update is None:
            return (0.0,) * len(elements)
        matrices = [*map(row_matrices, self.staged.rows)]
        fewest = min(len(row.moments), len(update.sharded))
        stages = [
            [piece for stage in held for piece in self.staged.stages[stage]]
            for held in ranks_of(
                layout.virtual_stages, layout.pp, layout.schedule
            )
        ]
        owned = owned_elements(update, matrices, layout, stages)
        found = []
        for own, sides, kept in zip(elements, matrices, owned, strict=True):
            in_matrices = matrix_elements(sides, layout)
            others = max(0.0, own - in_matrices)
            of_others = others * (len(row.moments) - fewest)
            of_matrices = in_matrices * (len(update.sharded) - fewest)
            found.append(
                profile.moment_bytes * (of_others + of_matrices + kept)
            )
        return tuple(found)

    @cached_property
    def sizes(self) -> Sizes:
        """Bytes of every piece and unit."""
        layout, profile = self.case.layout, self.profile
        held = held_bytes(layout, profile.state)
        comes_and_goes = held.gathered > 0
        bucket = (
            profile.bucket if layout.zero == 3 and profile.bucket else math.inf
        )
        # Bytes saved by gathering weights in 8 bits.
        narrow = [
            (profile.gathered_bytes - 1) * self._narrow(piece)
            for piece in self.pieces
        ]

        graphs = layout.compile == GRAPHS
        # A graph is as large as the microbatch with the most rows.
        rows = self.case.rows
        most = math.ceil(rows)
        larger = most / rows if graphs else 1.0

        # Bytes of every piece, from its cost.
        def each(size: Callable[[PieceCost], float]) -> tuple[float, ...]:
            return tuple(
                size(piece.times.cost) * larger for piece in self.pieces
            )

        def whole(size: float) -> tuple[float, ...]:
            """Bytes of all trained weights of each unit."""
            return tuple(size * piece.trained for piece in self.pieces)

        def sharded(size: float) -> tuple[float, ...]:
            """Bytes of this rank's shard of the trained weights.

            Experts are divided into fewer shards than other weights, as ranks of ep
            hold different experts.
            """
            more = layout.copies_sharing - 1 if layout.zero else 0
            return tuple(
                size * (p.trained + more * p.trained_routed)
                for p in self.pieces
            )

        def gathered(piece: PricedPiece, less: float) -> float:
            weights = held.gathered * piece.times.cost.weights - less
            return (
                min(weights, held.gathered * bucket) if comes_and_goes else 0.0
            )

        # Weights that are gathered and dropped have a shard at home, others
        # are whole.
        home = sharded(held.weight) if comes_and_goes else whole(held.weight)
        frozen = [held.frozen * piece.frozen for piece in self.pieces]
        # One buffer for all gradients during the whole run, which ZeRO-2 and 3
        # do not have.
        flat = graphs or (profile.flat_gradients and layout.zero < 2)
        gradient = whole(held.gradient)
        # The exchange is in the dtype of the matrices' update, or of a wider gather.
        update = profile.matrix_row
        matrices = map(row_matrices, self.staged.rows) if update else ()
        exchanged = max(
            profile.gathered_bytes,
            DTYPES[update.gpu_dtype].bytes if update else 0.0,
        )
        element = held_bytes(layout, replace(profile.state, optimizer=1.0))
        found = Sizes(
            kept=each(lambda c: c.kept),
            input=each(lambda c: c.input),
            kept_after_i=each(lambda c: c.kept_after_i),
            temporary=each(lambda c: c.temporary),
            home=tuple(
                # Weights that stay at home in 8 bits: less than the profile's
                # bytes.
                trained + still - (0.0 if comes_and_goes else less)
                for trained, still, less in zip(
                    home, frozen, narrow, strict=True
                )
            ),
            gathered=tuple(map(gathered, self.pieces, narrow)),
            gradient=()
            if flat
            else tuple(min(x, held.gradient * bucket) for x in gradient),
            gradient_shard=sharded(held.gradient_shard)
            # Megatron sums in its buffer; phalanx beside the buffer of graphs.
            if held.gradient_shard and (graphs or not flat)
            else (),
            gradient_home=gradient if flat else (),
            optimizer=tuple(
                fewest + more
                for fewest, more in zip(
                    sharded(held.optimizer),
                    self._more_moments(sharded(element.optimizer)),
                    strict=True,
                )
            ),
            edge=each(lambda c: c.edge),
            selected=each(lambda c: c.selected),
            derived=each(lambda c: c.derived),
            matrices=tuple(
                matrix_bytes(m, layout, exchanged) for m in matrices
            ),
        )
        if not graphs:
            return found
        # Blocks are compiled, the ends are not. Microbatches may differ by a row.
        blocks = range(1, len(self.pieces) - 1)
        return found.in_graphs(blocks, shapes=1 + (most > rows))
