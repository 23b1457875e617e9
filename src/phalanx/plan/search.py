"""The best layouts for a model on some hardware: all screened in closed form, the best simulated.

Costing is handed in, so that a plan from cached cached_costs never loads torch. A layout whose pieces
are not costed yet has a time that it cannot beat (`priced.py`); only those that this leaves among
the best are costed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from ..layout import Layout, Shape, legal
from ..program import Sizes, Timeline, simulate
from ..program.memory import peaks
from .candidates import Candidates, Cut, Space, candidates
from .columns import Case, Columns, case_of, columns_of
from .estimate import Estimates, Ranks, estimate, held_by_stage
from .hardware import Hardware
from .kinds import CostFunction
from .local import crowded
from .pipes import blocks_of, on_ranks
from .priced import Priced, Three, pipeline, pipeline_costs
from .profile import Profile
from .refused import Refusal, refusals

__all__ = ["Choice", "Plan", "PlanError", "judge", "search", "timeline"]

_BEST = 300  # of the screened, those whose pipelines are simulated
_OPS = 120_000  # operations simulated in all
_NEAR = 1.1  # of the best time: who is slower than that is not priced again
_CUTS = 1  # costed together, when they may be the best
_SURELY = 0.97  # the screened order is that of closed forms, whose bubble may be this much too long
_CLEARLY = 0.999  # of the best time: who is no faster than that need not be costed

Mask = NDArray[np.bool_]


class PlanError(ValueError):
    """What was asked for is not possible: why, and what would have to change."""


@dataclass(frozen=True)
class Choice:
    """One layout with what it takes: seconds of a step in parts, bytes of the fullest rank."""

    layout: Layout
    case: Case
    parts: Mapping[str, float]
    memory: Mapping[str, float]
    simulated: bool  # the bubble is that of the program; else of a closed form
    stages: tuple[Mapping[str, float], ...] = ()  # bytes of every rank of a pipeline

    @property
    def step(self) -> float:
        return sum(self.parts.values())

    @property
    def bytes(self) -> float:
        return sum(self.memory.values())


@dataclass(frozen=True)
class Plan:
    """The best layouts, best first, and why each kind of other layout is not among them."""

    layouts: tuple[Choice, ...]
    refused: tuple[Refusal, ...]
    considered: int
    fitting: int
    costed: int
    room: float  # bytes that a rank may hold
    # Seconds and bytes of all that were screened, for a picture.
    points: tuple[NDArray[np.float64], NDArray[np.float64]]


def search(
    shape: Shape, hardware: Hardware, piece_costs: CostFunction, *, profile: Profile,
    sequence: int, batch: int,
    precision: str = "bf16", limit: float = 0.85, top: int = 10, model: str = "",
) -> Plan:  # fmt: skip
    """The plan. `batch` counts sequences, `limit` is the part of a device's memory that may be used,
    `model` names somebody's own as FILE.py:Class."""
    space = Space(shape, hardware, sequence, batch, precision)
    room = limit * hardware.memory
    priced = Priced(
        shape, hardware, profile, piece_costs, sequence=sequence, precision=precision, model=model
    )
    space = replace(space, seq_only=_seq_only(space, priced))
    # Only where nothing fits: keep the input of fewer blocks, then the optimizer on the host.
    fewer = replace(space, recomputes=("every=2", "every=4", "every=8"))
    away = replace(space, recomputes=("all", "every=4"), offload=("optimizer",))
    for each in (space, fewer, away):
        found, times, own = _screened(each, priced, profile, room)
        fits = times.bytes <= room
        chosen = _simulated(found, times, fits & own, priced, top, room) if fits.any() else ()
        if chosen:
            break
    return Plan(
        layouts=chosen,
        refused=refusals(found, times, fits, own, room),
        considered=len(found),
        fitting=int(fits.sum()),
        costed=priced.cuts,
        room=room,
        points=(times.step, times.bytes),
    )


def _seq_only(space: Space, priced: Priced) -> frozenset[int]:
    """The sizes of tensor parallel that are never faster without `seq`, which holds more and sends
    as many bytes in fewer messages: the shortest microbatch tells it for all."""
    sizes = [tp for tp in space.tensor if tp > 1 and space.shape.kind == "decoder"]
    cuts = {tp: [Cut(tp, 1, 1, seq, False, False) for seq in (True, False)] for tp in sizes}
    priced.piece_costs(cut for both in cuts.values() for cut in both)
    found = []
    for tp, both in cuts.items():
        cut, plain = (priced.three(each, space.least)[1] for each in both)
        if plain.forward.total + plain.backward >= cut.forward.total + cut.backward:
            found.append(tp)
    return frozenset(found)


def _screened(
    space: Space, priced: Priced, profile: Profile, room: float
) -> tuple[Candidates, Estimates, Mask]:
    """All candidates estimated, and which of them with their own pieces: the best are."""
    found = candidates(space)
    cuts = [cut for cut, _ in found.keys]
    priced.piece_costs({cut.base for cut in cuts})
    table = [priced.three(cut, rows) for cut, rows in found.keys]
    times = _estimated(found.columns, table, priced.hardware, profile)
    key = found.columns.key.astype(int)
    exact = np.array([priced.known(cut) for cut in cuts])
    fits = times.bytes <= room
    while True:
        step, own = times.step, exact[key]
        bound = step[fits & own].min(initial=np.inf)
        hopeful = np.flatnonzero(fits & ~own & (step < bound * _CLEARLY))
        if not len(hopeful):
            # What was never costed cannot be the best: its own time is not needed.
            return found, times, own
        first = hopeful[np.argsort(step[hopeful], kind="stable")]
        asked = set(list(dict.fromkeys(cuts[k] for k in key[first]))[:_CUTS])
        priced.piece_costs(asked)
        # Others that were told by less until now are told by these.
        felt = asked | {cut._replace(ring=1, ulysses=1) for cut in asked}
        told = np.array([c in asked or c._replace(ring=1, ulysses=1) in felt for c in cuts])
        changed = np.flatnonzero(told[key] & fits & (step < bound * _NEAR))
        used = np.unique(key[changed])
        exact[used] = [priced.known(cuts[k]) for k in used]
        table = [priced.three(*found.keys[int(k)]) for k in used]
        # All that have these pieces, so that no one is told by others than it is said to be.
        changed = np.flatnonzero(np.isin(key, used))
        _, again = np.unique(key[changed], return_inverse=True)
        some = replace(found.columns.take(changed), key=again.astype(float))
        _put(times, changed, _estimated(some, table, priced.hardware, profile))
        fits[changed] = times.bytes[changed] <= room


def _estimated(
    c: Columns, table: Sequence[Three], hardware: Hardware, profile: Profile
) -> Estimates:
    return crowded(estimate(c, table, hardware, profile), c, hardware)


def _put(all_: Estimates, rows: NDArray[np.intp], some: Estimates) -> None:
    for name in ("compute", "tensor", "data", "pipe", "bubble", "update", "first"):
        getattr(all_, name)[rows] = getattr(some, name)
    for kind, held in some.memory.items():
        np.asarray(all_.memory[kind])[rows] = held


def _simulated(
    found: Candidates, times: Estimates, able: Mask, priced: Priced, top: int, room: float
) -> tuple[Choice, ...]:
    """The best few hundred with the bubble of their programs, in that order."""
    ready, steps, held = np.flatnonzero(able), times.step, times.bytes
    # Of two that are as fast, the one that holds less.
    order = np.lexsort((held[ready], np.round(np.log(steps[ready]), 4)))
    runs = _Runs(priced)
    choices: list[Choice] = []
    least = steps - times.bubble
    for i in _apart(found, ready[order])[:_BEST]:
        ahead = sorted(choice.step for choice in choices)[:top]
        if len(ahead) == top and (runs.spent > _OPS or ahead[-1] < least[i] * _SURELY):
            break
        choices.append(_choice_at(i, found, times, runs))
    choices.sort(key=lambda c: c.step)
    best = tuple(islice(_holding(choices, found.space, priced, room), top))
    if best:
        return best
    # The fast ones hold more than a closed form says: then the first that fits of the emptiest.
    emptiest = ready[np.argsort(held[ready], kind="stable")][:_BEST]
    others = (_choice_at(int(i), found, times, runs) for i in emptiest)
    return tuple(islice(_holding(others, found.space, priced, room), 1))


def _holding(
    choices: Iterable[Choice], space: Space, priced: Priced, room: float
) -> Iterator[Choice]:
    """Those of the choices that are legal and whose ranks, by the program, hold no more than fits."""
    batch, sequence = space.batch, space.sequence
    for choice in choices:
        if not legal(choice.layout, space.shape, batch=batch, sequence=sequence):
            staged = _staged(choice, priced)
            if staged.bytes <= room:
                yield staged


def _choice_at(i: int, found: Candidates, times: Estimates, runs: _Runs) -> Choice:
    cut, rows = found.keys[int(found.columns.key[i])]
    return _choice(found.case(i), times, i, runs, cut, rows)


def _apart(found: Candidates, order: NDArray[np.intp]) -> list[int]:
    """Of candidates that differ in the order of axes, HSDP's groups or blocks of a stage and in
    nothing else, the first: a list of ten should be ten different ideas."""
    seen, kept = set(), []
    for i in order[: 20 * _BEST]:
        idea = found.idea(int(i))
        if idea not in seen:
            seen.add(idea)
            kept.append(int(i))
    return kept


class _Runs:
    """Simulated pipelines; candidates that differ in what a pipeline does not feel share one."""

    def __init__(self, priced: Priced) -> None:
        self.priced = priced
        self.spent = 0
        self._known: dict[object, float] = {}

    def bubble(self, layout: Layout, stages: Sequence[int], cut: Cut, rows: float) -> float:
        """Seconds in which the busiest rank waits. Once a pipeline is full each further round of
        microbatches takes as long as the busiest rank works, so that a few rounds tell."""
        again, pp = layout.recompute != "none", layout.pp
        rounds = 2 if layout.schedule == "zb-v" else 1
        count = min(layout.microbatches, rounds * pp + layout.microbatches % pp)
        key = (layout.schedule, count, tuple(stages), cut, rows, again)
        if key not in self._known:
            program = pipeline(layout.schedule, pp, count, layout.chunks)
            self.spent += sum(map(len, program.rows))
            costs = pipeline_costs(self.priced.three(cut, rows), stages, again)
            timeline = simulate(program, costs)
            self._known[key] = timeline.makespan - timeline.ideal
        return self._known[key]


def _choice(case: Case, times: Estimates, i: int, runs: _Runs, cut: Cut, rows: float) -> Choice:
    parts, layout, hardware = times.breakdown(i), case.layout, runs.priced.hardware
    # A simulated stage that waits leaves no core to the others: there the closed form is nearer.
    told = bool(hardware.cores) and hardware.ranks > hardware.cores
    if layout.pp > 1 and not told:
        parts["bubble"] = runs.bubble(layout, blocks_of(layout, case.shape), cut, rows)
    return Choice(layout, case, parts, times.held(i), not told)


def _staged(choice: Choice, priced: Priced) -> Choice:
    """The choice with what each rank of its pipeline holds, by its program: as many forwards are
    kept there as its order keeps, which two rounds of microbatches show."""
    case, layout = choice.case, choice.layout
    if layout.pp == 1:
        return choice
    embed, block, head = three = priced.three(Cut.of(layout), case.rows)
    columns = columns_of([case], [0])
    keeps = block.input / float(columns.segment[0]) if columns.whole[0] else block.kept
    blocks, pp = blocks_of(layout, case.shape), layout.pp
    kept = [count * keeps for count in blocks]
    kept[0] += embed.kept
    kept[-1] += head.kept
    count = min(layout.microbatches, 2 * pp + layout.microbatches % pp)
    program = pipeline(layout.schedule, pp, count, layout.chunks)
    most = peaks(program, Sizes(kept=tuple(kept), input=()))
    place = np.arange(pp)
    ranks = Ranks(
        blocks=np.array(on_ranks(blocks, pp, layout.schedule), float),
        embed=(place == 0) * 1.0,
        head=(place == (0 if layout.schedule == "zb-v" else pp - 1)) * 1.0,
    )
    stages = held_by_stage(
        columns, three, ranks, np.array([x.kinds["activations"] for x in most]),
        priced.profile, priced.hardware,
    )  # fmt: skip
    fullest = max(stages, key=lambda held: sum(held.values()))
    return replace(choice, memory=fullest, stages=tuple(stages))


def judge(
    layouts: Sequence[Layout], shape: Shape, hardware: Hardware, piece_costs: CostFunction, *,
    profile: Profile, sequence: int, batch: int, model: str = "",
) -> tuple[Choice, ...]:  # fmt: skip
    """Layouts of one precision that somebody named, estimated as those of a search are."""
    if not layouts:
        return ()
    (precision,) = {layout.precision for layout in layouts}
    priced = Priced(
        shape, hardware, profile, piece_costs, sequence=sequence, precision=precision, model=model
    )
    cases = [case_of(shape, layout, batch=batch, sequence=sequence) for layout in layouts]
    cuts = [Cut.of(layout) for layout in layouts]
    priced.piece_costs(cuts)
    table = [priced.three(cut, case.rows) for cut, case in zip(cuts, cases, strict=True)]
    times = _estimated(columns_of(cases, range(len(cases))), table, priced.hardware, profile)
    runs = _Runs(priced)
    return tuple(
        _staged(_choice(case, times, i, runs, cut, case.rows), priced)
        for i, (case, cut) in enumerate(zip(cases, cuts, strict=True))
    )


def timeline(
    choice: Choice,
    hardware: Hardware,
    piece_costs: CostFunction,
    *,
    profile: Profile,
    model: str = "",
    most: int = 0,
) -> Timeline:
    """When each stage computes which microbatch, of at most so many: whole stages as operations."""
    layout, case = choice.layout, choice.case
    priced = Priced(
        case.shape, hardware, profile, piece_costs,
        sequence=case.sequence, precision=layout.precision, model=model,
    )  # fmt: skip
    cut = Cut.of(layout)
    priced.piece_costs([cut])
    stages = blocks_of(layout, case.shape)
    count = min(layout.microbatches, most or layout.microbatches)
    costs = pipeline_costs(priced.three(cut, case.rows), stages, layout.recompute != "none")
    return simulate(pipeline(layout.schedule, layout.pp, count, layout.chunks), costs)
