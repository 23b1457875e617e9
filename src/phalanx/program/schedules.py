"""Pipeline schedules: the order in which each rank computes, as pure functions.

A schedule takes (stages, microbatches, chunks) and returns one list of F, B (or I and
W) per rank, on virtual stages: an operation's piece is the virtual stage that it
computes. The passes place messages, weights and everything else. To add one, write such
a function in a file of your own and name it `file.py:function` where a schedule's name
is expected.
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

from ..layout import Layout, choices
from ..layout.choices import GPIPE, ONE_F_ONE_B, no_such, traits
from ..layout.choices import SCHEDULES as NAMES
from ..layout.source import load_source, names_source, running, split_name
from .ops import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT
from .own_schedule import own_schedule
from .program import Op, Program, ProgramError

FORWARDS = 500_000  # the most in a program
Rows = list[list[Op]]
Schedule = Callable[[int, int, int], Rows]
_WHOLE = (FORWARD, BACKWARD)
_SPLIT = (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)


def weave(forwards: list[Op], backwards: list[Op], warmup: int) -> list[Op]:
    """Warm-up forwards, then one forward and one backward in turn, then backwards."""
    steady = len(forwards) - warmup
    pairs = zip(forwards[warmup:], backwards[:steady], strict=True)
    return [
        *forwards[:warmup],
        *(op for pair in pairs for op in pair),
        *backwards[steady:],
    ]


def split(row: list[Op], lag: int) -> list[Op]:
    """Split every B into I and W. A W follows its I after `lag` further I's."""
    out: list[Op] = []
    pending: list[Op] = []
    for op in row:
        if op.kind != BACKWARD:
            out.append(op)
            continue
        out.append(op._replace(kind=INPUT_GRADIENT))
        pending.append(op._replace(kind=WEIGHT_GRADIENT))
        if len(pending) > lag:
            out.append(pending.pop(0))
    return out + pending


def accum(stages: int, microbatches: int, chunks: int = 1) -> Rows:
    """No pipeline: forward and backward of one microbatch after the other."""
    return [[Op(k, 0, m) for m in range(microbatches) for k in _WHOLE]]


def gpipe(stages: int, microbatches: int, chunks: int = 1) -> Rows:
    """All forwards, then all backwards (Huang et al. 2019). Holds every microbatch."""
    ms = range(microbatches)
    return [[Op(k, r, m) for k in _WHOLE for m in ms] for r in range(stages)]


def f1b(
    stages: int, microbatches: int, chunks: int = 1, depth: int = 1
) -> Rows:
    """One forward, one backward (Narayanan et al. 2019): rank r holds min(m, P - r)
    microbatches.

    The warm-up has `depth` forwards for each stage behind a rank.
    """
    rows = []
    for r in range(stages):
        forwards, backwards = (
            [Op(k, r, m) for m in range(microbatches)] for k in _WHOLE
        )
        rows.append(
            # None on the last rank, and `depth` forwards more on each rank before it.
            weave(
                forwards,
                backwards,
                min(depth * (stages - r - 1), microbatches),
            )
        )
    return rows


def interleaved(stages: int, microbatches: int, chunks: int) -> Rows:
    """1F1B over chunks of the model (Narayanan et al. 2021): rank r holds stages r, P +
    r, 2P + r ...

    Microbatches pass through all chunks in rounds of P. A remainder makes rounds
    longer, because in a round shorter than P the last ranks would wait for each other.
    """
    count = max(1, microbatches // stages)
    # Rounds of P microbatches, or somewhat more where they do not divide.
    bounds = [i * microbatches // count for i in range(count + 1)]
    rounds = [range(a, b) for a, b in pairwise(bounds)]
    longest = max(map(len, rounds))
    rows = []
    for r in range(stages):
        held = [c * stages + r for c in range(chunks)]
        forwards = [
            Op(FORWARD, stage, m)
            for ms in rounds
            for stage in held
            for m in ms
        ]
        backwards = [
            Op(BACKWARD, stage, m)
            for ms in rounds
            for stage in held[::-1]
            for m in ms
        ]
        # Megatron-LM's count, with the longest round in place of P.
        warmup = (chunks - 1) * longest + 2 * (stages - r - 1)
        rows.append(weave(forwards, backwards, min(warmup, len(forwards))))
    return rows


def zb_h1(stages: int, microbatches: int, chunks: int = 1) -> Rows:
    """1F1B with W delayed by r on rank r: less bubble at 1F1B's memory (Qi et al.
    2023).
    """
    return [
        split(row, lag=r) for r, row in enumerate(f1b(stages, microbatches))
    ]


def zb_h2(stages: int, microbatches: int, chunks: int = 1) -> Rows:
    """Twice the warm-up, with W delayed until nothing waits (Qi et al. 2023)."""
    return [
        split(row, lag=2 * r)
        for r, row in enumerate(f1b(stages, microbatches, depth=2))
    ]


def zb_v(stages: int, microbatches: int, chunks: int = 2) -> Rows:
    """Two chunks in a V, with stages r and 2P - 1 - r on rank r (Qi et al. 2024).

    Zero bubble at 1F1B's memory if F, I and W cost the same.
    """
    # The V is timed for at least 2P - 1 microbatches. With fewer, take the part of it
    # that exists.
    full = (
        _v_row(stages, max(microbatches, 2 * stages - 1), r)
        for r in range(stages)
    )
    return [[op for op in row if op.index < microbatches] for row in full]


def _v_row(stages: int, microbatches: int, r: int) -> list[Op]:
    # A V: stage `down` on the way there, stage `up` on the way back.
    down, up = r, 2 * stages - 1 - r
    out: list[Op] = []
    done = {(k, s): 0 for k in _SPLIT for s in (down, up)}

    def put(kind: str, stage: int) -> None:
        if done[kind, stage] < microbatches:
            out.append(Op(kind, stage, done[kind, stage]))
            done[kind, stage] += 1

    # 1. Forwards until this rank's first microbatch has come back through the V.
    for _ in range(2 * (stages - r) - 1):
        put(FORWARD, down)
    # 2. Forwards of both stages, until the first backward comes from rank 0.
    for _ in range(r):
        put(FORWARD, up)
        put(FORWARD, down)
    # 3. Forward, input and weight gradient of the upper stage alone.
    for _ in range(stages - r):
        for kind in _SPLIT:
            put(kind, up)
    # 4. The steady state: forward, input and weight gradient of both stages in turn.
    while done[FORWARD, up] < microbatches:
        for stage in (down, up):
            for kind in _SPLIT:
                put(kind, stage)
    # 5. Backwards alone, and the weight gradients that were left for the end.
    for _ in range(r):
        put(INPUT_GRADIENT, down)
        put(INPUT_GRADIENT, up)
    for _ in range(stages - r):
        put(INPUT_GRADIENT, down)
        put(WEIGHT_GRADIENT, down)
    for stage in (up, down):
        while done[WEIGHT_GRADIENT, stage] < microbatches:
            put(WEIGHT_GRADIENT, stage)
    return out


def dualpipe_v(stages: int, microbatches: int, chunks: int = 2) -> Rows:
    """DualPipeV: the V placement, with each forward beside a backward of the opposite
    direction.

    DeepSeek-AI 2024, half of DualPipe: with experts, each hides the other's messages.
    """
    full = (
        _dual_row(stages, max(microbatches, 2 * stages), r)
        for r in range(stages)
    )
    return [[op for op in row if op.index < microbatches] for row in full]


def _dual_row(stages: int, microbatches: int, r: int) -> list[Op]:
    down, up, rest = r, 2 * stages - 1 - r, stages - 1 - r
    out: list[Op] = []
    pending: list[
        Op
    ] = []  # weight gradients for the end, where ranks would be idle
    done = {(k, s): 0 for k in _SPLIT for s in (down, up)}

    def put(kind: str, stage: int) -> None:
        out.append(Op(kind, stage, done[kind, stage]))
        done[kind, stage] += 1

    def back(stage: int, *, later: bool = False) -> None:
        put(INPUT_GRADIENT, stage)
        (pending if later else out).append(
            out[-1]._replace(kind=WEIGHT_GRADIENT)
        )

    # The eight steps of DeepSeek's code. 1: forwards down.
    for _ in range(2 * rest):
        put(FORWARD, down)
    # 2. Forwards down and up.
    for _ in range(r + 1):
        put(FORWARD, down)
        put(FORWARD, up)
    # 3. Backwards and forwards of the upper stage.
    for _ in range(rest):
        back(up)
        put(FORWARD, up)
    # 4. The steady state: a forward and a backward of each stage.
    for _ in range(microbatches - 2 * stages + r + 1):
        put(FORWARD, down)
        back(up)
        put(FORWARD, up)
        back(down)
    # 5. The last forwards, with backwards of both stages.
    for _ in range(rest):
        back(up)
        put(FORWARD, up)
        back(down)
    # 6. Backwards of both stages; from the middle on, weight gradients wait.
    half = (r + 1) // 2
    for i in range(r + 1):
        back(up, later=i > half - r % 2)
        back(down, later=i >= half)
    # 7. A waiting weight gradient, then a backward of the lower stage.
    for _ in range(rest):
        out.append(pending.pop(0))
        back(down, later=True)
    # 8. The weight gradients that are left.
    return out + pending


def naive(stages: int, microbatches: int = 1, chunks: int = 1) -> Rows:
    """The whole batch through one stage after the other: one rank works at a time."""
    return gpipe(stages, 1)


SCHEDULES: dict[str, Schedule] = {
    choices.ACCUM: accum,
    choices.NAIVE: naive,
    GPIPE: gpipe,
    ONE_F_ONE_B: f1b,
    choices.INTERLEAVED: interleaved,
    choices.ZB_H1: zb_h1,
    choices.ZB_H2: zb_h2,
    choices.ZB_V: zb_v,
    choices.DUALPIPE_V: dualpipe_v,
}


def schedule(
    name: str, stages: int, microbatches: int, chunks: int = 1
) -> Program:
    """The compute operations of a named schedule, or of a user's `file.py:function`."""
    for what, number in (
        ("stages", stages),
        ("microbatches", microbatches),
        ("chunks", chunks),
    ):
        if number < 1:
            raise ProgramError(
                f"{what} is {number}; a schedule needs 1 or more."
            )
    path, attribute = split_name(name)
    if name not in SCHEDULES and not path:
        raise ProgramError(
            f"{no_such('schedule', name, NAMES)} Schedules are {', '.join(NAMES)};"
            " your own is named file.py:function."
        )
    own = load_source(path, (attribute,), ProgramError) if path else ()
    _possible(name, stages, microbatches, chunks)
    refuse_vast(stages * chunks * microbatches)
    if not own:
        return _named(name, stages, microbatches, chunks)
    with running(path, ProgramError):
        rows = own[0](stages, microbatches, chunks)
    return own_schedule(name, rows, stages, microbatches, chunks)


@lru_cache(maxsize=64)  # a search asks for few schedules, but often
def _named(name: str, stages: int, microbatches: int, chunks: int) -> Program:
    return Program.pipeline(SCHEDULES[name](stages, microbatches, chunks))


def refuse_own(layout: Layout) -> None:
    """Refuse a custom schedule that does not order one training step; runs its file."""
    if names_source(layout.schedule):
        schedule(
            layout.schedule, layout.pp, layout.microbatches, layout.chunks
        )


def refuse_vast(forwards: int) -> None:
    """Refuse a program too large to prove: a million operations take a minute."""
    if forwards > FORWARDS:
        raise ProgramError(
            f"the step would have {2 * forwards:,} operations of computing; at most"
            f" {2 * FORWARDS:,} are supported. Use fewer microbatches, stages or layers."
        )


def _possible(name: str, stages: int, microbatches: int, chunks: int) -> None:
    """Refuse numbers for which a named schedule has no order."""
    kind = traits(name)
    if name in NAMES and not kind.least <= chunks <= kind.most:
        span = (
            str(kind.least)
            if kind.least == kind.most
            else f"{kind.least} to {kind.most}"
        )
        raise ProgramError(
            f"{name} takes {span} chunks a stage, not {chunks}."
        )
    if not kind.pipelined and stages > 1:
        other = f"write {ONE_F_ONE_B}, or another schedule"
        raise ProgramError(f"{name} is for one stage, not {stages}; {other}.")
    if kind.whole_batch and microbatches > 1:
        what = f"{name} takes the batch whole, as 1 microbatch, not {microbatches}"
        raise ProgramError(f"{what}; write {GPIPE}.")
