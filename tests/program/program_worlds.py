"""What the tests of programs share: small pipelines, their costs, and ways to spoil a program."""

from __future__ import annotations

import itertools

from phalanx.layout import Layout, plain_pieces
from phalanx.program import Costs, Op, Program, StepOptions, build, schedule
from phalanx.program.passes import messages

# (name, chunks) of every schedule that has a pipeline.
PIPELINES = (
    ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zb-h2", 1),
    ("zb-v", 2),
)  # fmt: skip


def pipeline(
    name: str, stages: int, microbatches: int, chunks: int = 1
) -> Program:
    """A schedule with its messages."""
    return messages(schedule(name, stages, microbatches, chunks))


def split_costs(stages: int, chunks: int = 1, **more: float) -> Costs:
    """F, I and W one each for a whole stage."""
    return Costs(
        {"F": 1, "I": 1, "W": 1, **more}, share=shares(stages, chunks)
    )


def whole_costs(stages: int, chunks: int = 1) -> Costs:
    """F 1 and B 2 for a whole stage."""
    return Costs({"F": 1, "B": 2}, share=shares(stages, chunks))


def shares(stages: int, chunks: int) -> dict[int, float]:
    return dict.fromkeys(range(stages * chunks), 1 / chunks)


def step(
    text: str, pieces: int, *, tied: bool = False, agree: bool = False
) -> Program:
    """The step of a layout over equal stages; tied: the last piece uses the first one's weights."""
    layout = Layout.parse(text)
    n = layout.virtual_stages
    bounds = [i * pieces // n for i in range(n + 1)]
    stages = [range(a, b) for a, b in itertools.pairwise(bounds)]
    return build(
        layout,
        plain_pieces(stages, tied=((pieces - 1, 0),) if tied else ()),
        StepOptions(agree=agree),
    )


def per_rank(program: Program) -> Program:
    """The same program with a list of its own for every rank."""
    rows = tuple(program.rows[row] for row in program.owner)
    return Program(
        rows, program.mesh, tuple(range(program.mesh.size)), program.tied
    )


def without(program: Program, row: int, *words: str) -> Program:
    gone = set(map(Op.parse, words))
    assert gone <= set(program.rows[row])
    return _with(
        program, row, [op for op in program.rows[row] if op not in gone]
    )


def swapped(program: Program, row: int, first: str, second: str) -> Program:
    ops = list(program.rows[row])
    a, b = ops.index(Op.parse(first)), ops.index(Op.parse(second))
    ops[a], ops[b] = ops[b], ops[a]
    return _with(program, row, ops)


def put(program: Program, row: int, word: str, *, after: str) -> Program:
    ops = list(program.rows[row])
    ops.insert(ops.index(Op.parse(after)) + 1, Op.parse(word))
    return _with(program, row, ops)


def moved(program: Program, row: int, word: str, *, after: str) -> Program:
    return put(without(program, row, word), row, word, after=after)


def renamed(program: Program, row: int, word: str, other: str) -> Program:
    ops = [
        Op.parse(other) if op == Op.parse(word) else op
        for op in program.rows[row]
    ]
    return _with(program, row, ops)


def _with(program: Program, row: int, ops: list[Op]) -> Program:
    return program.with_rows(
        ops if r == row else old for r, old in enumerate(program.rows)
    )
