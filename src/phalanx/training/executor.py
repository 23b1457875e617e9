"""Executes one rank's row of a program, operation by operation, and measures it.

Operations are issued in list order from one thread; the executor decides nothing.
Compute operations run where they stand. The others (gathers, reductions, messages)
start where they stand and run concurrently. Before an operation starts, the executor
waits for the operations on other lanes that it needs: the edges that `program/state.py`
yields, which `simulate` reads too.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from rank_watch.positions import DEVICE, OP, WAITS, WORDS, Positions
from torch_shm.settle import HALVES

from ..comm import CommError, Group, Work
from ..models.routed import CHOICES, Chooser
from ..parallel import Unit
from ..parallel.batch import count_tokens
from ..parallel.exact import ExactUnit
from ..parallel.exchange import Choices
from ..parallel.local import LocalModel
from ..parallel.own_loss import BY_TARGETS, METRICS, Measure
from ..parallel.pieces import Box, Bundle, CopyLane
from ..parallel.recompute import Selected
from ..parallel.works import ChainedWork, WorkGroup
from ..program import Op, Program, ProgramError, Span, Timeline, ops
from ..program.graph import lane
from ..program.state import INPUT, State, restarts
from .device_progress import DeviceProgress
from .optimizer import Optimizer, Scale, Update
from .precision import LossScale
from .totals import totals_of

Batch = Mapping[str, Tensor]
Key = tuple[int, int]  # a piece and a microbatch

_USES_BATCH = {ops.FORWARD, *ops.RECOMPUTES, *ops.PROPAGATES}
# dtypes whose sums are accumulated in float32
WIDE = dict.fromkeys(HALVES, torch.float32)


@dataclass(frozen=True)
class StepResult:
    """A rank's results of a step.

    `loss` is the rank's own sum, zero if it counts none. `norm` is None if the program
    computes none. `total` is the mean loss of all ranks, `stops` the number of ranks
    that want to stop, and `metrics` the means of the loss's own metrics. Without a
    norm, `metrics` are this rank's sums.
    """

    timeline: Timeline
    loss: float
    count: float
    norm: float | None = None
    total: float = 0.0
    stops: float = 0.0
    metrics: tuple[float, ...] = ()

    @property
    def finite(self) -> bool:
        return self.norm is None or math.isfinite(self.norm)


class Executor:
    """Executes one rank's row of a checked program, step by step.

    Loss, count, norm and the scale of updates stay on the device. They are read once,
    after the last operation, so that the host never waits for a GPU inside a step.

    A non-finite loss skips the step like a non-finite gradient: no rank updates
    anything.

    `checked`, for tests: compare what the rank holds with the program's state after
    every operation.
    """

    checked = False
    # Receives the index of each operation; `first` is that of the row's first.
    words: memoryview[int] | list[int] = [0] * WORDS
    first = 0
    wants_to_stop: Callable[[], bool] = staticmethod(lambda: False)
    # context manager in which a profiler sees each operation
    ranges: Callable[[Op], Any] | None = None

    def __init__(
        self,
        local: LocalModel,
        program: Program,
        rank: int,
        optimizer: Optimizer | None,
        *,
        clip: float = 0.0,
        scaling: LossScale | None = None,
        measure: Measure = BY_TARGETS,
    ) -> None:
        self.local, self.program, self.rank = local, program, rank
        # Losses beside the main one are logged like metrics.
        metrics = (*measure.metrics, *local.extra_losses)
        self.measure = replace(measure, metrics=metrics)
        self.number = program.owner[rank]
        state = State(program, self.number)
        self.row, self.recomputes = state.ops, state.recomputes
        # Recomputations that start from a kept input, not from the one before.
        self.restarting = {
            key for key in state.recomputes if restarts(state.at, *key)
        }
        self.lanes = {op: lane(op, program, self.number) for op in self.row}
        # The operations on other lanes that each operation waits for.
        self.waits: dict[Op, tuple[Op, ...]] = {
            op: tuple(
                n
                for n in needs
                if isinstance(n, Op) and self.lanes[n] != ops.COMPUTE
            )
            for op, needs in state.walk()
        }
        # Frozen units have no update, and a validation has none at all.
        self.updates = (
            {n: optimizer.of(u) for n, u in local.units.items()}
            if optimizer
            else {}
        )
        # After these operations nothing needs the values derived from a microbatch.
        uses = {op.index: op for op in self.row if op.kind in _USES_BATCH}
        self.last_uses = frozenset(uses.values())
        self.trains = any(op.kind in ops.PROPAGATES for op in self.row)
        self.has_losses = any(piece.chooser for piece in local.pieces.values())
        self.clip, self.scaling = clip, scaling
        self.totals = totals_of(local)
        self.clock = clock_of(local.pool.device)
        self.places = {op: place for place, op in enumerate(self.row)}
        # Set for a GPU that is watched: only its events come later than the host.
        self.progress: DeviceProgress | None = None
        # Copies to the host and back have a lane, and on a GPU a stream, each.
        self.out, self.back = (
            CopyLane(local.pool.device),
            CopyLane(local.pool.device),
        )
        self.handlers: dict[str, Callable[[Op], Work | None]] = {
            ops.COUNT: self._count, ops.FORWARD: self._forward, ops.RECOMPUTE: self._recompute,
            ops.RECOMPUTE_PART: self._recompute,
            ops.BACKWARD: self._backward, ops.INPUT_GRADIENT: self._backward,
            ops.WEIGHT_GRADIENT: self._weight_gradient, ops.AGREE_SCALES: self._agree_scales,
            ops.GATHER: self._gather, ops.DROP: self._drop, ops.REDUCE: self._reduce,
            ops.TIE: self._tie, ops.AGREE: self._agree,
            ops.REDUCE_REPLICAS: partial(self._of_trained, methodcaller("reduce_replicas")),
            ops.SUM_PARTS: partial(self._of_trained, methodcaller("sum_parts")),
            ops.ADD: self._add, ops.EXCHANGE_PARTS: self._exchange_parts,
            ops.SHARE_SUMS: partial(self._of_trained, methodcaller("share_sums")),
            ops.UPDATE: self._update, ops.SEND: self._send, ops.RECEIVE: self._receive,
            ops.OFFLOAD: self._leave, ops.RELOAD: self._come_back, ops.LOAD: self._load,
            ops.TO_OWNERS: self._to_owners, ops.FROM_OWNERS: self._from_owners,
            ops.SUM_CHOICES: self._sum_choices, ops.COUNT_ROUTES: self._count_routes,
            ops.EXCHANGE: self._exchange, ops.EXCHANGE_GRADIENT: self._exchange,
        }  # fmt: skip
        # Units with matrices in 8 bits, and those whose scales the program
        # agrees on.
        scaled = {unit.piece for unit in local.units.values() if unit.scaled}
        agreed = {op.piece for op in self.row if op.kind == ops.AGREE_SCALES}
        if scaled != agreed:
            raise ProgramError(
                f"ranks agree on scales ({ops.AGREE_SCALES}) of the units {sorted(agreed)} in the program,"
                f" and matrices of the units {sorted(scaled)} travel in 8 bits."
                " Build it for this layout."
            )
        _refuse_other_sums(local, program)
        # The program has to fit the layout: a sum that is missing would go
        # unnoticed.
        for number in {op.piece for op in self.row if op.kind == ops.REDUCE}:
            unit, groups = local.units[number], local.units[number].groups
            both = groups.reduce.size > 1 and groups.replica.size > 1
            if unit.replicas_apart != program.replicated or (
                both and not program.replicated
            ):
                raise ProgramError(
                    f"the program sums over replicas {'' if program.replicated else 'not '}apart"
                    f" ({ops.REDUCE_REPLICAS}); the gradient of unit {number} has"
                    f" {groups.reduce.size} shards and {groups.replica.size} replicas."
                    " Build it for this layout."
                )

    def step(
        self,
        batches: Sequence[Batch],
        lr: float,
        *,
        timed: bool = True,
        meanwhile: Callable[[], object] | None = None,
    ) -> StepResult:
        """Run one training step on this rank's microbatches.

        `meanwhile` is called when all operations are queued, before their results are
        read. On a GPU a step that is not `timed` has no spans, as reading its events
        takes time.
        """
        # Numbers of a step, in float64 on the device.
        wide: Any = {
            "dtype": torch.float64,
            "device": self.local.pool.device,
        }
        self.batches = batches
        # by microbatch, with the values that pieces derive from it
        self.completed: dict[int, Batch] = {}
        self.lr = lr
        # Inputs of forwards that have not run.
        self.inputs: dict[Key, Bundle] = {}
        # gradients of backwards that have not run
        self.gradients: dict[Key, Bundle] = {}
        self.arrivals = {
            ops.FORWARD: self.inputs,
            ops.BACKWARD: self.gradients,
        }
        self.segments: dict[Key, Bundle] = {}  # inputs kept for recomputation
        # tensors kept for partial recomputation
        self.selected: dict[Key, Selected] = {}
        # both of the above in boxes, while they are on the host
        self.away: dict[Key, tuple[Any, ...]] = {}
        self.outgoing: dict[tuple[str, int, int], Bundle] = {}
        # started and not waited for, with the start time
        self.under_way: dict[Op, tuple[Work, Any]] = {}
        # of experts, from a forward to its backward
        self.choices: dict[Key, Choices] = {}
        # this rank's sums: the loss, then its metrics
        losses = 1 + len(self.measure.metrics)
        self.own_losses = torch.zeros(losses, **wide)
        self.loss, self.metrics = self.own_losses[:1], self.own_losses[1:]
        self.count = torch.ones(1, **wide)
        # the token count of all ranks, or 1 if the step counts none
        self.divisor = self.count
        # Of microbatches, until their backward.
        self.losses: dict[int, Bundle] = {}
        self.totals.begin(len(batches), losses)
        # all tokens, with or without a target: the divisor of choosers' losses
        self.tokens = self.count
        self.norm: Tensor | None = None
        # reduced over all ranks, by the result's field names
        self.sums: dict[str, Tensor] = {}
        # sums of all pieces' outputs, by direction and piece
        self.sums_of: dict[tuple[str, int], Tensor] = {}
        self.scale: Scale | None = None
        # Start and end of each operation.
        self.moments: list[tuple[Op, Any, Any]] = []
        self.clock.begin(timed=timed, watched=self.progress is not None)
        state = State(self.program, self.number) if self.checked else None
        words = self.words
        for place, op in enumerate(self.row, self.first):
            # For the watcher: the operation that this rank is in.
            words[OP] = place
            self._perform(op)
            if state:
                state.apply(op, state.needs(op))
                self._compare(state, op)
        # What nobody needed in this step, such as the last messages.
        for op in tuple(self.under_way):
            self._wait(op)
        words[OP] = -1
        # Sent tensors stay in memory until they have left.
        for group in (
            self.local.groups.activations,
            self.local.groups.gradients,
        ):
            group.flush()
        named = self._numbers()
        # Work of the host while the device is still computing.
        if meanwhile is not None:
            meanwhile()
        # From here the host waits for the device, in one read for all values.
        words[WAITS] = DEVICE if self.local.pool.device.type == "cuda" else 0
        read = dict(
            zip(named, torch.cat([*named.values()]).tolist(), strict=True)
        )
        words[WAITS] = 0
        if self.progress is not None:
            # The device has passed everything that was queued before.
            self.progress.forget()
        at = self.clock.seconds
        spans = [
            Span(self.rank, self.lanes[op], op, at(a), at(b))
            for op, a, b in (self.moments if self.clock.timed else ())
        ]
        result = StepResult(Timeline(tuple(spans)), **_result_fields(read))
        if self.norm is not None and self.scaling:
            self.scaling.saw(finite=result.finite)
        return result

    def write_to(self, positions: Positions, names: Sequence[str]) -> None:
        """From now on, record the current operation in `positions`, described with the
        pieces' names."""
        self.words = positions.words
        if self.local.pool.device.type == "cuda":
            self.progress = DeviceProgress(self.local.pool.device)
            looks = positions.look_at_device
            positions.look_at_device = partial(
                _first_waiting, self.progress, looks
            )
        self.first = positions.texts(
            [f"{op} ({op.described(names)})" for op in self.row]
        )

    def _numbers(self) -> dict[str, Tensor]:
        """Scalars to read after a step, each of shape (1,)."""
        norm = {} if self.norm is None else {"norm": self.norm}
        places = range(len(self.measure.metrics))
        metrics = {f"{METRICS} {n}": self.metrics[n : n + 1] for n in places}
        return {
            "loss": self.loss,
            "count": self.count,
            **norm,
            **self.sums,
            **metrics,
        }

    def _perform(self, op: Op) -> None:
        try:
            if self.ranges is None:
                # A profiler sees the operation as a range.
                start, work = self._issue(op)
            else:
                with self.ranges(op):
                    start, work = self._issue(op)
            if op in self.last_uses:
                self.completed.pop(op.index, None)
        except CommError as error:
            # The operation, beside what the group says.
            # Every rank reports at which operation it lost the others.
            error.args = (f"{error} Rank {self.rank} was at {op}.",)
            raise
        except Exception as error:
            error.add_note(f"rank {self.rank} was at {op}.")
            raise
        # Computed already, or under way until somebody waits.
        if work is None:
            self.moments.append((op, start, self._end(op)))
        else:
            self.under_way[op] = work, start

    def _issue(self, op: Op) -> tuple[Any, Work | None]:
        """Wait for an operation's needs, then run or start it. Return its start and its
        pending work."""
        # A need may have been waited for by an earlier operation.
        for need in self.waits[op]:
            if need in self.under_way:
                self._wait(need)
        start = self.clock.start()
        return start, self.handlers[op.kind](op)

    def _wait(self, op: Op) -> None:
        """Wait for a pending operation. Its span ends here."""
        work, start = self.under_way.pop(op)
        work.wait()
        self.moments.append((op, start, self._end(op)))

    def _end(self, op: Op) -> Any:
        """Record the moment at which an operation ends, also for a watched device."""
        moment = self.clock.end()
        if self.progress is not None:
            self.progress.add(self.first + self.places[op], moment)
        return moment

    def _compare(self, state: State, op: Op) -> None:
        """Raise if what this rank holds after an operation differs from the program's
        state."""
        # An expert unit is held or dropped with its piece's other units.
        pieces, count = self.local.pieces, self.program.pieces
        units = {n: u for n, u in self.local.units.items() if n < count}
        still = (n for n in self.local.frozen if n < count)
        weights = {n: self.local.weights(n)[-1] for n in (*units, *still)}
        # Gathered and dropped weights; others are always there.
        # dropped after use
        dropped = {n: u for n, u in weights.items() if not u.resident}
        kept = {
            (p, m): k
            for p, piece in pieces.items()
            for m, k in piece.kept.items()
        }
        copied = {
            # Between start and wait a copy is on neither side.
            (o.piece, o.index)
            for o in self.under_way
            if o.kind in (ops.OFFLOAD, ops.RELOAD)
        }
        away = {
            # Boxes without a tensor: their content is on the host.
            key
            for key, k in kept.items()
            if any(box.tensor is None for box in k.boxes)
        }
        there = {**state.kept, **state.away} if self.trains else {}
        # the first piece has no input to keep
        there = {
            k: what
            for k, what in there.items()
            if what != INPUT or not pieces[k[0]].first
        }
        parts = {key for key, what in there.items() if what == ops.SELECTED}
        inputs = {key for key, what in there.items() if what == INPUT} | parts
        segments = self.restarting & {*self.segments, *self.away}
        under_way = {o for o in self.under_way if o.kind in ops.REDUCTIONS}
        held: list[tuple[str, set[Any], set[Any]]] = [
            (
                "gathered units",
                {n for n, u in dropped.items() if u.buffer is not None},
                {*state.gathered, *state.loaded} & {*dropped},
            ),
            (
                "open gradients",
                {n for n, u in units.items() if u.is_open},
                {*state.open},
            ),
            (
                "reduced gradients",
                {n for n, u in units.items() if u.has_gradient},
                state.arrived,
            ),
            ("reductions under way", under_way, {*state.under_way}),
            ("kept activations", {*kept}, {*there} - inputs),
            ("inputs of segments", segments - copied, inputs - copied),
            (
                "selected outputs",
                {*self.selected},
                parts - {*state.away} - copied,
            ),
            (
                "activations on the host",
                (away | {*self.away}) - copied,
                ({*state.away} & {*there}) - copied,
            ),
        ]
        for what, here, expected in held:
            if here != expected:
                raise ProgramError(
                    f"after {op} rank {self.rank} holds {what} {sorted(here)}; by the program"
                    f" {sorted(expected)}."
                )

    # ---- tokens and agreement

    def _count(self, op: Op) -> Work:
        # Valid targets, and all tokens where choosers have losses.
        kinds = [self.measure.count] + [count_tokens] * self.has_losses
        each = [kind(batch) for kind in kinds for batch in self.batches]
        every = torch.stack(each).view(len(kinds), -1)
        sums = self.totals.counts(every)

        def counted() -> None:
            total = self.totals.counted(sums, len(kinds))
            self.count, self.tokens = total[:1], total[1:]
            self.divisor = self.count.where(self.count != 0.0, 1.0)

        return ChainedWork(
            self.local.groups.count.all_reduce(sums, wait=False), counted
        )

    def _agree(self, op: Op) -> Work:
        # Each logical weight is counted by one rank among its copies, and on one stage.
        # The norms are kept for `first_bad`: a unit's norms are finite only if all its
        # elements are.
        host, stage = self.program.host, self.program.owner[self.rank]
        # A unit is counted on the stage that runs its own piece.
        home = {
            n: u for n, u in self.local.units.items() if host[u.piece] == stage
        }
        self.norms = {
            n: self.totals.squares(u) for n, u in home.items() if u.counts_norm
        }
        own = self.totals.own(self.norms.values(), self.own_losses)
        # Rides with the norm, so that stopping needs no message of its own.
        wants = torch.full_like(self.loss, float(self.wants_to_stop()))
        sums = torch.cat((wants, *own))

        def agreed() -> None:
            squares, losses = self.totals.agreed(sums[1:])
            self._use_sums(squares, losses / self.divisor, sums[:1])
            assert self.norm is not None
            self.scale = Scale.of(self.norm, self.clip, self._loss_scale)

        return ChainedWork(
            self.local.groups.everyone.all_reduce(sums, wait=False), agreed
        )

    def _use_sums(self, squares: Tensor, means: Tensor, stops: Tensor) -> None:
        """Take the values that were reduced together.

        They are the sum of squared gradients, the means of the loss and its metrics, and
        the number of ranks that want to stop.
        """
        total, self.metrics = means[:1], means[1:]
        self.sums = {"total": total, "stops": stops}
        # Gradients carry the loss scale, which the norm must not.
        norm = squares.sqrt() / self._loss_scale
        # A loss that is not finite makes the norm NaN, so that no rank updates anything.
        # Zero times a finite loss is zero, and times any other it is NaN: two kernels,
        # where `isfinite` and `where` start six.
        self.norm = norm + total * 0.0

    @property
    def _loss_scale(self) -> float:
        return self.scaling.scale if self.scaling else 1.0

    # ---- computing

    def _batch(self, m: int) -> Batch:
        """Return a microbatch with the values derived from it, cached from its first
        use to its last."""
        if m not in self.completed:
            self.completed[m] = self.local.complete(self.batches[m])
        return self.completed[m]

    def _forward(self, op: Op) -> None:
        p, m = op.piece, op.index
        piece = self.local.pieces[p]
        taken = {} if piece.first else self.inputs.pop((p, m))
        # Kept for a recomputation that starts here.
        if taken and (p, m) in self.restarting:
            self.segments[p, m] = taken
        recompute = self.recomputes.get((p, m))
        # What is recomputed keeps nothing now.
        keep = self.trains and recompute is None
        # A deque: the recomputation takes the results in the order of the
        # forward.
        if recompute and recompute.kind == ops.RECOMPUTE_PART:
            self.selected[p, m] = deque()
        selected = self.selected.get((p, m))
        out = piece.forward(
            m, taken, self._batch(m), keep=keep, selected=selected
        )
        own = out.pop(CHOICES, None)
        if own is not None and self.trains:
            self.choices[p, m] = Choices(own)
        if piece.last:
            losses = {name: out[name] for name in ("x", *piece.extra_losses)}
            if self.trains:  # values may be there only after the backward
                self.losses[m] = losses
            else:
                self._take_losses(m, losses)
            if METRICS in out and self.local.groups.tp.rank == 0:
                self.metrics += out[METRICS]
                self.totals.record(m, 1, out[METRICS])
        # The head's output is the loss; others go to the next piece.
        else:
            self._pass_on(ops.FORWARD, p, p + 1, m, out)

    def _add_loss(self, y: Tensor) -> None:
        self._watch(ops.FORWARD, self.program.pieces - 1, y)
        # Every tp rank computes the same loss; count it once.
        if self.local.groups.tp.rank == 0:
            # Parts of time have a loss each.
            self.loss += y.sum() if y.dim() else y

    def _take_losses(self, microbatch: int, losses: Bundle) -> None:
        """Add a microbatch's losses, whose values are there now."""
        self._add_loss(losses["x"])
        if self.local.groups.tp.rank:
            return
        self.totals.record(microbatch, 0, losses["x"].view(1, -1))
        extra = self.local.extra_losses.items()
        for number, (name, each) in enumerate(extra):
            mean = losses[name].double() * each.share
            self.metrics[number] += mean.sum()
            self.totals.record(microbatch, 1 + number, mean.view(1, -1))

    def _recompute(self, op: Op) -> None:
        p, m = op.piece, op.index
        piece = self.local.pieces[p]
        taken = {} if piece.first else self.segments.pop((p, m))
        selected = self.selected.pop((p, m), None)
        out = piece.forward(
            m, taken, self._batch(m), keep=True, selected=selected
        )
        out.pop(CHOICES, None)  # the forward's choices are summed already
        # A recomputation that starts from the one before takes its output.
        if (p + 1, m) in self.recomputes and (p + 1, m) not in self.restarting:
            self.segments[p + 1, m] = out

    def _backward(self, op: Op) -> None:
        p, m = op.piece, op.index
        piece = self.local.pieces[p]
        if piece.last:  # a step without valid tokens has zero gradients
            # The loss is a mean over the valid tokens of all ranks.
            gradients = piece.seed(m, self._loss_scale / self.divisor)
        else:
            gradients = self.gradients.pop((p, m))
        if piece.chooser:
            gradients = gradients | self._loss_gradients(piece.chooser, (p, m))
        whole = op.kind == ops.BACKWARD
        into = (piece.backward if whole else piece.input_gradient)(
            m, gradients
        )
        if piece.last:
            self._take_losses(m, self.losses.pop(m))
        if not piece.first:
            self._pass_on(ops.BACKWARD, p, p - 1, m, into)

    def _loss_gradients(self, chooser: Chooser, key: Key) -> Bundle:
        """Return the gradients of the terms of a chooser's losses."""
        choices, share = self.choices.pop(key), self._loss_scale / self.tokens
        return chooser.term_gradients(
            share, choices.of_sequences, choices.of_batch
        )

    def _weight_gradient(self, op: Op) -> None:
        self.local.pieces[op.piece].weight_gradient(op.index)

    def _leave(self, op: Op) -> Work:
        # The activations of a microbatch, or what its recomputation needs.
        key = op.piece, op.index
        if key in self.segments:  # recomputed later: only its input is kept
            kept = self.segments.pop(key), self.selected.pop(key, None)
            # Boxes hold a tensor here or on the host.
            self.away[key] = boxed = tree_map_only(Tensor, Box, kept)
            return self.out.begin(lambda: tree_map_only(Box, Box.leave, boxed))
        if key in self.recomputes:
            return Work()  # the first piece, recomputed, keeps nothing
        return self.out.begin(
            partial(self.local.pieces[op.piece].leave, op.index)
        )

    def _come_back(self, op: Op) -> Work:
        key = op.piece, op.index
        if key in self.away:
            boxed = self.away.pop(key)

            def back() -> None:
                self.segments[key], selected = tree_map_only(
                    Box, Box.content, boxed
                )
                if selected is not None:
                    self.selected[key] = selected

            return ChainedWork(
                self.back.begin(
                    lambda: tree_map_only(Box, Box.come_back, boxed)
                ),
                back,
            )
        if key in self.recomputes:
            return Work()
        return self.back.begin(
            partial(self.local.pieces[op.piece].come_back, op.index)
        )

    def _pass_on(
        self, way: str, p: int, to: int, m: int, bundle: Bundle
    ) -> None:
        # Sums of outputs and gradients, to find the first bad one later.
        for x in bundle.values():
            self._watch(way, p, x)
        # The next piece is on this rank, or a message carries it.
        if to in self.local.pieces:
            self.arrivals[way][to, m] = bundle
        else:
            self.outgoing[way, p, m] = bundle

    # ---- routing of tokens to experts and back

    def _sum_choices(self, op: Op) -> Work:
        return self.choices[op.piece, op.index].sum(self.local.groups)

    def _count_routes(self, op: Op) -> Work:
        key = op.piece, op.index
        return self.local.exchange.exchange_counts(*key, self.inputs[key])

    def _exchange(self, op: Op) -> Work:
        gradient = op.kind == ops.EXCHANGE_GRADIENT
        bundles = self.gradients if gradient else self.inputs
        # A backward has passed its gradient on to the piece before.
        bundle = bundles[op.piece - gradient, op.index]
        return self.local.exchange.begin(
            op.piece, op.index, bundle, gradient=gradient
        )

    # ---- messages between stages

    def _edge(self, op: Op) -> tuple[str, Group, Bundle]:
        """Return a message's direction, its group, and empty tensors of its shapes."""
        groups = self.local.groups
        # Shapes follow from the batch: the receiver allocates before the
        # message comes.
        edge = self.local.edge(max(op.piece, op.peer), self.batches[op.index])
        if op.of == ops.FORWARD:
            return ops.FORWARD, groups.activations, edge
        # Integers, such as counts of tokens, have no gradients.
        edge = {name: x for name, x in edge.items() if x.is_floating_point()}
        return ops.BACKWARD, groups.gradients, edge

    def _send(self, op: Op) -> Work:
        way, group, edge = self._edge(op)
        out = self.outgoing.pop((way, op.piece, op.index))
        # A tensor that nothing depends on has no gradient, but the receiver waits for
        # one: send zeros.
        there = {
            n: out[n] if n in out or way == ops.FORWARD else x.zero_()
            for n, x in edge.items()
        }
        # `host` maps a piece to the rank of its stage.
        to = self.program.host[op.peer]
        return WorkGroup(
            [
                group.send(x.contiguous(), to, wait=False)
                for x in there.values()
            ]
        )

    def _receive(self, op: Op) -> Work:
        way, group, edge = self._edge(op)
        # Filled by the message; whoever reads it waits for this operation
        # first.
        self.arrivals[way][op.piece, op.index] = edge
        at = self.program.host[op.peer]
        return WorkGroup(
            [group.receive(x, at, wait=False) for x in edge.values()]
        )

    # ---- weights and gradients

    def _gather(self, op: Op) -> Work:
        units = self.local.of_piece(op.piece)
        return WorkGroup(
            [
                unit.gather()
                for unit in units
                # Frozen weights that are at home whole need no gather.
                if not (unit.frozen and unit.same)
            ]
        )

    def _agree_scales(self, op: Op) -> Work:
        units = self.local.of_piece(op.piece, trained=True)
        return WorkGroup([unit.agree_scales() for unit in units])

    def _load(self, op: Op) -> Work:
        copies = [unit.load() for unit in self.local.of_piece(op.piece)]
        return self.back.begin(lambda: [copy() for copy in copies])

    def _drop(self, op: Op) -> None:
        for unit in self.local.of_piece(op.piece):
            unit.drop()

    def _reduce(self, op: Op) -> Work:
        return self._of_trained(methodcaller("reduce"), op)

    def _add(self, op: Op) -> None:
        user, m = self.program.tree_of(op)
        for unit in self._exact_units(op):
            unit.add(user, m, self.program.microbatches)

    def _exchange_parts(self, op: Op) -> Work:
        user, _ = self.program.tree_of(op)
        units = self._exact_units(op)
        return WorkGroup([unit.exchange_parts(user) for unit in units])

    def _exact_units(self, op: Op) -> list[ExactUnit]:
        trained = self.local.of_piece(op.piece, trained=True)
        return [unit for unit in trained if isinstance(unit, ExactUnit)]

    def _of_trained(self, call: Callable[[Unit], Work], op: Op) -> Work:
        return WorkGroup(
            [*map(call, self.local.of_piece(op.piece, trained=True))]
        )

    def _tie(self, op: Op) -> Work:
        unit = self.local.units[op.piece]
        assert unit.gradient is not None
        # On the shards, so the sum over two stages has few bytes.
        return unit.groups.tie.all_reduce(unit.gradient, wait=False)

    def _to_owners(self, op: Op) -> Work:
        return WorkGroup(
            [update.to_owners(self.scale) for update in self._updates(op)]
        )

    def _from_owners(self, op: Op) -> Work:
        return WorkGroup(
            [update.from_owners() for update in self._updates(op)]
        )

    def _update(self, op: Op) -> None:
        # Every rank has the same norm, so either all update or none does.
        for update in self._updates(op):
            update(self.lr, self.scale)

    def _updates(self, op: Op) -> list[Update]:
        """Return the updates of a piece's units, including its experts'."""
        # Experts have a unit of their own, numbered behind all pieces.
        units = (op.piece, op.piece + self.program.pieces)
        return [self.updates[n] for n in units if n in self.updates]

    # ---- the origin of non-finite values

    def _watch(self, way: str, piece: int, x: Tensor) -> None:
        # A sum is finite only if all its terms are. It is always computed but only read
        # after a bad step: running the step again might not reproduce a transient
        # fault.
        if not self.trains:
            return
        # In float32: a sum in 16 bits could overflow by itself.
        total = x.sum(dtype=WIDE[x.dtype]) if x.dtype in WIDE else x.sum()
        known = self.sums_of.get((way, piece))
        self.sums_of[way, piece] = total if known is None else known + total

    def first_bad(self, names: Sequence[str]) -> tuple[int, str] | None:
        """Return the first non-finite value that this rank produced in the last step.

        The result is its position along the step and its description with the pieces'
        names. A gradient summed over ranks is not attributed to one of them.
        """
        pieces, units = self.program.pieces, self.local.units
        bad = {
            key
            for key, total in self.sums_of.items()
            if not math.isfinite(float(total))
        }
        causes = [
            (p, f"the output of piece {names[p]}")
            for way, p in bad
            if way == ops.FORWARD
        ]
        gradients = [(p, 1) for way, p in bad if way == ops.BACKWARD]
        summed = (
            units[n]
            for n, norms in self.norms.items()
            if not norms.isfinite().all()
        )
        gradients += (
            (u.piece, u.groups.reduce.size * u.groups.replica.size)
            for u in summed
        )
        for p, ranks in gradients:  # backward starts at the last piece
            several = (
                f", a sum over {ranks} ranks of which any may have made it,"
            )
            text = f"the gradient of piece {names[p]}{several if ranks > 1 else ''}"
            # Positions along a step: outputs from 0, then gradients from the
            # last piece to the first.
            causes.append((3 * pieces - 2 * p + (ranks > 1), text))
        return min(causes, default=None)


class Validator(Executor):
    """Executes forward only, to compute the loss of a batch over all ranks."""

    def __init__(
        self,
        local: LocalModel,
        program: Program,
        rank: int,
        measure: Measure = BY_TARGETS,
    ) -> None:
        super().__init__(local, program, rank, None, measure=measure)

    def mean_loss(self, batches: Iterable[Sequence[Batch]]) -> float | None:
        """Return the mean loss over all valid targets and all ranks, or None if there
        are none."""
        losses, targets = 0.0, 0.0
        device, choosers = (
            self.local.groups.everyone.device,
            dict(self._choosers()),
        )
        for chooser in choosers.values():
            # Counts of choices are added while batches run.
            chooser.tally = torch.zeros(
                chooser.options, dtype=torch.int64, device=device
            )
        for own in batches:
            loss, count = self.loss_of(own)
            losses, targets = losses + loss, targets + count
        # by piece, how often this rank's tokens chose each expert
        self.chosen = {
            n: x.tally for n, x in choosers.items() if x.tally is not None
        }
        for chooser in choosers.values():
            chooser.tally = None
        return losses / targets if targets else None

    def _choosers(self) -> Iterator[tuple[int, Chooser]]:
        for number, piece in self.local.pieces.items():
            yield from (
                (number, x)
                for x in piece.module.modules()
                if isinstance(x, Chooser)
            )

    def loss_of(self, batches: Sequence[Batch]) -> tuple[float, float]:
        """Return the sum of the losses and the number of targets over all ranks."""
        (loss, *_), count = self.sums_over_ranks(batches)
        return loss, count

    def sums_over_ranks(
        self, batches: Sequence[Batch]
    ) -> tuple[list[float], float]:
        """Return the sums of the loss and of each metric, and the number of targets,
        over all ranks."""
        result = self.step(batches, 0.0)
        group = self.local.groups.everyone
        # Each rank has its share of the sums.
        own = (result.loss, *result.metrics)
        sums = torch.tensor(own, dtype=torch.float64, device=group.device)
        reduced = self.totals.own_losses(sums)
        group.all_reduce(reduced)
        total = self.totals.summed_losses(reduced)
        with group.reading():
            return total.tolist(), result.count


def _result_fields(read: Mapping[str, float]) -> dict[str, Any]:
    """Map the values read after a step to the fields of its result."""
    metrics = tuple(x for name, x in read.items() if name.startswith(METRICS))
    fields = {n: x for n, x in read.items() if not n.startswith(METRICS)}
    return {**fields, "metrics": metrics}


def _refuse_other_sums(local: LocalModel, program: Program) -> None:
    """Raise if a program adds gradients in the tree and the units do not, or reverse."""
    # Not by the rank's units: all of them may be frozen.
    exact = local.exact_place is not None
    trains = any(
        op.kind in ops.FIRST_SUMS for row in program.rows for op in row
    )
    if trains and exact != program.exact:
        raise ProgramError(
            f"the program has {'' if program.exact else 'no '}sums in a tree ({ops.ADD});"
            f" the layout is {'' if exact else 'not '}exact. Build it for this layout."
        )


def _first_waiting(
    progress: DeviceProgress, other: Callable[[], tuple[int, int]] | None
) -> tuple[int, int]:
    """Combine the device's positions of two executors, of which at most one is
    active."""
    at, passed = progress.look()
    if other is None:
        return at, passed
    its, more = other()
    return max(at, its), passed + more


class StepClock:
    """Start and end times of a step's operations, in seconds of `time.perf_counter`.

    A moment may have no time until the step's results have been read.
    """

    timed = True  # this step's moments become spans

    def begin(self, *, timed: bool, watched: bool) -> None:
        """Start a step. Its moments are needed if it is `timed` or its device is
        `watched`."""

    # The moments at which an operation starts and ends.
    start: Callable[[], Any] = staticmethod(time.perf_counter)
    end: Callable[[], Any] = staticmethod(time.perf_counter)

    # A moment in seconds of `time.perf_counter`.
    seconds: Callable[[Any], float] = staticmethod(float)


class DeviceClock(StepClock):
    """Times of a GPU's operations, by one event on the compute stream after each.

    Nothing runs on that stream between the end of an operation and the start of the
    next, so one event serves both. Events are reused in the next step: its results have
    been read, so the device has passed them all. Times are read only in a timed step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[Any] = []
        # the end of the last operation
        self.start, self.end = self._last_event, self._next_event

    def begin(self, *, timed: bool, watched: bool) -> None:
        self.timed = timed
        self._records = timed or watched
        self._stream = torch.cuda.current_stream(self._device)
        self._used = 0
        # The device is idle: the previous step's results have been read.
        self._begun = self._last = self._event()
        self._begun_at = time.perf_counter()

    def _last_event(self) -> Any:
        return self._last

    def _next_event(self) -> Any:
        if self._records:
            # Without spans or a watcher no event is needed.
            self._last = self._event()
        return self._last

    def _event(self) -> Any:
        if self._used == len(self._events):
            made: Any = torch.cuda.Event  # torch's stubs are untyped
            self._events.append(made(enable_timing=True))
        event = self._events[self._used]
        self._used += 1
        event.record(self._stream)
        return event

    def seconds(self, moment: Any) -> float:
        # Milliseconds between events, after the start that the host has noted.
        return self._begun_at + float(self._begun.elapsed_time(moment)) / 1e3


def clock_of(device: torch.device) -> StepClock:
    """Return the clock for operations of a device."""
    return DeviceClock(device) if device.type == "cuda" else StepClock()
