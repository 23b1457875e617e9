"""The measured step of each start: all ranks record its operations and their memory for
the report."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ..comm.agree import exchange
from ..parallel import Unit
from ..parallel.compile import graphs
from ..program import Span, Timeline
from ..program.memory import Sizes, peaks
from .log import RunLog
from .parallelize import ModelPart
from .rank import Rank
from .step import CompletedStep


class MeasuredStep:
    """Writes each rank's operations and memory in step `number` (counted from 0) to
    files."""

    def __init__(self, rank: Rank, log: RunLog, start: int) -> None:
        self.rank, self.log = rank, log
        run = rank.run
        # `profile.start` steps after this start, or the last step of a shorter
        # run.
        self.number = min(start + run.profile.start, run.steps - 1)

    def after_step(self, step: CompletedStep) -> None:
        if step.done != self.number + 1:
            return
        part = self.rank.part
        # Seconds since the step's common begin, which all ranks share.
        spans = tuple(
            Span(
                s.rank, s.lane, s.op, s.start - step.begun, s.end - step.begun
            )
            for s in step.result.timeline.spans
        )
        timelines = exchange(
            part.everyone, json.dumps(Timeline(spans).to_json()), 0
        )
        self.log.timeline(step.done, str(part.layout), part.program, timelines)
        own = memory_of_part(part, self.rank.world.rank)
        held = exchange(part.everyone, json.dumps(own), 0)
        self.log.event(
            "memory", step=step.done, ranks=[json.loads(one) for one in held]
        )
        log_graphs(self.rank, self.log, step.done)


def log_graphs(rank: Rank, log: RunLog, done: int) -> None:
    """Log the number of graphs compiled so far."""
    if not rank.part.layout.compile:
        return
    made = graphs()
    text = f"step {done}  {made.compiled} graphs are compiled"
    if made.recompiles:
        text += (
            f", {made.recompiles} of them for other shapes or Python values"
        )
    log.event(
        "compile", text, step=done, graphs=made.compiled, again=made.recompiles
    )


def memory_of_part(part: ModelPart, rank: int) -> dict[str, dict[str, float]]:
    """Return bytes by kind on this rank, as predicted by the program and as
    measured."""
    units = part.local.every_unit
    state: dict[int, int] = {}
    for number, update in part.updates.items():
        tensors = [x for kept in update.state.values() for x in kept.values()]
        # Tensors without dimensions are step counts.
        state[number] = sum(x.nbytes for x in tensors if x.dim())
    row = part.program.owner[rank]
    sizes = _sizes(units, state, part.program.pieces)
    kinds = peaks(part.program, sizes)[row].kinds
    promised = {
        kind: kinds.get(kind, 0.0) for kind in ("weights", "optimizer")
    }
    # No operation gathers a resident unit: its weights are there from the start.
    stay = sum(u.bytes.weights - u.bytes.shared for u in units if u.resident)
    # The peak of both kinds together; alone, each may peak at another time.
    moving = replace(sizes, home=(), optimizer=())
    both = stay + peaks(part.program, moving)[row].total
    pool = part.local.pool
    # A home shard inside the whole weights is already counted with the weights.
    shared = sum(u.bytes.shared for u in units)
    measured = {
        "weights": float(sum(u.home.nbytes + u.beside for u in units)),
        "optimizer": float(sum(state.values())),
        "gathered and gradients": float(pool.most_bytes - shared),
    }
    return {
        "promised": promised | {"gathered and gradients": both},
        "measured": measured,
        # The pool keeps buffers of every size for their next use.
        "idle": {"buffers": float(pool.idle_bytes)},
    }


# Activations count 0: only kinds that can be measured are compared.
def _sizes(
    units: Sequence[Unit], state: Mapping[int, int], pieces: int
) -> Sizes:
    """Return the bytes of this rank's units, without activations, whose size is unknown
    here."""

    def each(bytes_of: Callable[[Unit], float]) -> tuple[float, ...]:
        return tuple(
            float(sum(bytes_of(unit) for unit in units if unit.piece == n))
            for n in range(pieces)
        )

    none = (0.0,) * pieces
    cut = any(unit.groups.reduce.size > 1 for unit in units)
    homes = each(lambda u: u.bytes.gradient_home)
    return Sizes(
        kept=none,
        input=none,
        home=each(lambda u: u.bytes.home + u.bytes.beside),
        gathered=each(lambda u: 0 if u.resident else u.bytes.weights),
        gradient=each(lambda u: u.bytes.gradient),
        gradient_shard=each(lambda u: u.bytes.gradient_shard) if cut else (),
        gradient_home=homes if any(homes) else (),
        optimizer=tuple(float(state.get(n, 0)) for n in range(pieces)),
    )
