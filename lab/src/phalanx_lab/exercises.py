"""The lecture's exercises: tasks whose answers phalanx's own code checks.

The same code runs in the terminal and, without torch, in the browser. A wrong answer
gets the checker's sentence, or the hint that belongs to a number that people often find.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from phalanx.drawing import Picture
from phalanx.layout import (
    Layout,
    LayoutError,
    Mesh,
    Shape,
    legal,
    staged_pieces,
)
from phalanx.layout.choices import no_such
from phalanx.program import (
    Costs,
    Op,
    Program,
    ProgramError,
    Timeline,
    build,
    check,
    faults,
    ops,
    schedule,
    simulate,
)
from phalanx.program.own_schedule import own_schedule
from phalanx.program.passes import messages

_FILE = Path(__file__).parent / "exercises.toml"
# A forward takes one unit of time, a backward two, each half of a backward one.
_COSTS = Costs(
    {
        ops.FORWARD: 1.0,
        ops.BACKWARD: 2.0,
        ops.INPUT_GRADIENT: 1.0,
        ops.WEIGHT_GRADIENT: 1.0,
    }
)
_NEAR = 0.01  # the error that a predicted number may have, relative to the true one
_BLANK = "?"


class ExerciseError(ValueError):
    """Raised if there is no exercise of a name."""


@dataclass(frozen=True)
class Hint:
    """A number that is often answered, and what is wrong with it."""

    at: float
    words: str


@dataclass(frozen=True)
class Verdict:
    """The result of checking an answer: right or wrong, in words, with a picture of a
    schedule."""

    right: bool
    words: str
    picture: Picture | None = None


@dataclass(frozen=True)
class Exercise:
    """A row of exercises.toml. `terms` are read by the checker of its kind."""

    name: str
    chapter: str
    kind: str
    task: str
    terms: Mapping[str, Any]
    start: str = ""
    answer: str = ""
    hint: str = ""  # follows the checker's sentence
    hints: Sequence[Hint] = field(default_factory=tuple)

    def check(self, answer: str) -> Verdict:
        """Check an answer. Anything can be asked: a wrong form is a wrong answer."""
        if not answer.strip():
            return Verdict(False, "The answer is empty.")
        if _BLANK in answer:
            return Verdict(False, f"Replace each {_BLANK} by an operation.")
        try:
            return _CHECKERS[self.kind](self, answer)
        except (ProgramError, LayoutError) as error:
            return Verdict(False, str(error))


def exercises() -> dict[str, Exercise]:
    """All exercises by name, in order. Those of a damaged program are made here."""
    rows = tomllib.loads(_FILE.read_text(encoding="utf-8"))["exercises"]
    return {name: _made(name, row) for name, row in rows.items()}


def exercise(name: str) -> Exercise:
    """The exercise of this name."""
    known = exercises()
    if name not in known:
        raise ExerciseError(no_such("exercise", name, tuple(known)))
    return known[name]


def _made(name: str, row: Mapping[str, Any]) -> Exercise:
    row = dict(row)
    row["hints"] = tuple(Hint(**hint) for hint in row.get("hints", ()))
    if row["kind"] == "repair":
        whole = _program(row["terms"]["layout"])
        row["start"] = str(_damaged(whole, row["terms"]))
        row["answer"] = str(whole)
    return Exercise(name, **row)


def _program(layout_text: str) -> Program:
    """The step of the small MLP in a layout."""
    layout = Layout.parse(layout_text)
    # An embedding, two layers and a head: four pieces.
    shape = replace(Shape.load("mlp"), layers=2)
    return build(layout, staged_pieces(layout, shape))


# ---- schedules


def _check_schedule(exercise: Exercise, answer: str) -> Verdict:
    terms = exercise.terms
    rows = list(_rows(answer, terms.get("chunks", 1)))
    stages = len(exercise.answer.splitlines())
    program = own_schedule(
        "yours", rows, stages, terms["microbatches"], terms.get("chunks", 1)
    )
    program = messages(program)
    timeline, held = simulate(program, _COSTS), check(program).held
    picture = Picture(exercise.name, timeline, held=held)
    wrong = " ".join(_too_much(terms, timeline, held))
    right = f"Right: the step takes {timeline.makespan:g} units."
    return Verdict(not wrong, wrong or right, picture)


def _rows(answer: str, chunks: int) -> Iterator[list[Op]]:
    """Parse `rank 0: F0 F1 B0 B1`, a line or part before `;` for each rank."""
    lines = [line for line in re.split(r"[;\n]", answer) if line.strip()]
    for rank, line in enumerate(lines):
        head, colon, words = line.rpartition(":")
        if colon and head.split() != ["rank", str(rank)]:
            raise ProgramError(
                f"line {rank + 1} begins with {head.strip()[:40]!r}; write 'rank {rank}:' and its"
                " operations."
            )
        # With one chunk, a rank's piece has the rank's number and need not be written.
        own = str(rank) if chunks == 1 else ""
        yield [
            Op.parse(own + word if re.fullmatch("[A-Z][0-9]+", word) else word)
            for word in words.split()
        ]


def _too_much(
    terms: Mapping[str, Any], timeline: Timeline, held: Sequence[float]
) -> Iterator[str]:
    for rank, (has, most) in enumerate(
        zip(held, terms.get("in_flight", ()), strict=False)
    ):
        if has > most:
            yield f"It runs, but rank {rank} keeps {has:g} microbatches; {most} are allowed."
    longest = terms.get("longest")
    if longest and timeline.makespan > longest:
        idle, rank = max(
            (timeline.inner_idle(rank), rank) for rank in timeline.ranks
        )
        yield f"It runs, but takes {timeline.makespan:g} units; {longest} are possible."
        if idle:
            yield f"Rank {rank} waits {idle:g} units between its operations."


# ---- repairs


def _damaged(whole: Program, terms: Mapping[str, Any]) -> Program:
    """The program without the lost operations; moved ones come right before others."""
    lost = {Op.parse(word) for word in terms.get("lost", ())}
    rows = [[op for op in row if op not in lost] for row in whole.rows]
    for word, before in terms.get("moved", {}).items():
        moved = Op.parse(word)
        for row in rows:
            if moved in row:
                row.remove(moved)
                row.insert(row.index(Op.parse(before)), moved)
    return whole.with_rows(rows)


def _check_repair(exercise: Exercise, answer: str) -> Verdict:
    program = Program.parse(answer, "your program")
    if found := faults(program):
        return Verdict(False, f"{found[0]} {exercise.hint}")
    whole = _program(exercise.terms["layout"])
    if program.mesh != whole.mesh:
        return Verdict(
            False,
            f"The mesh is {str(whole.mesh)!r}; leave it as it was.",
        )
    for rank in range(whole.mesh.size):
        own = Counter(program.rows[program.owner[rank]])
        wanted = Counter(whole.rows[whole.owner[rank]])
        if less := wanted - own:
            return Verdict(
                False,
                f"Nothing contradicts itself now, but rank {rank} no longer does"
                f" {_listed(less)}. Put back what was lost, and take away nothing.",
            )
        if more := own - wanted:
            return Verdict(
                False,
                f"It runs, but rank {rank} does {_listed(more)} without need.",
            )
    return Verdict(
        True, "Right: the step is complete, and no rank waits for ever."
    )


def _listed(found: Counter[Op]) -> str:
    return ", ".join(map(str, found))


# ---- predictions


def _check_prediction(exercise: Exercise, answer: str) -> Verdict:
    number = _number(answer)
    if number is None:
        return Verdict(False, "Write one number, such as 12.5.")
    true, picture = _QUANTITIES[exercise.terms["what"]](exercise.terms)
    if abs(number - true) <= _NEAR * abs(true):
        return Verdict(True, f"Right: {true:.4g}.", picture)
    for hint in exercise.hints:
        if abs(number - hint.at) <= 2 * _NEAR * abs(hint.at):
            return Verdict(False, hint.words)
    way = "small" if number < true else "large"
    return Verdict(
        False,
        f"{number:g} is too {way}. `phalanx lab {exercise.chapter}` shows how it comes about.",
    )


def _number(answer: str) -> float | None:
    """The number in `27.3 %`, `1,024` or `8.03 GB`."""
    found = re.fullmatch(
        r"\s*([0-9][0-9,]*\.?[0-9]*)\s*(%|[A-Za-z]*)\s*", answer
    )
    return float(found[1].replace(",", "")) if found else None


def _pipeline(terms: Mapping[str, Any]) -> tuple[Program, Timeline]:
    program = schedule(
        terms["schedule"],
        terms["stages"],
        terms["microbatches"],
        terms.get("chunks", 1),
    )
    # The time of a stage is divided among its chunks.
    chunks = terms.get("chunks", 1)
    kinds = {kind: time / chunks for kind, time in _COSTS.kinds.items()}
    program = messages(program)
    return program, simulate(program, Costs(kinds))


def _bubble(terms: Mapping[str, Any]) -> tuple[float, Picture]:
    program, timeline = _pipeline(terms)
    held = check(program).held
    picture = Picture(terms["schedule"], timeline, held=held)
    return 100 * timeline.bubble_fraction, picture


def _most_in_flight(terms: Mapping[str, Any]) -> tuple[float, None]:
    program, _ = _pipeline(terms)
    return check(program).held[0], None


def _gathers(terms: Mapping[str, Any]) -> tuple[float, None]:
    program = _program(terms["layout"])
    kinds = Counter(op.kind for op in program.rows[0])
    return kinds[ops.GATHER], None


def _moments(terms: Mapping[str, Any]) -> tuple[float, None]:
    shape, layout = Shape.load(terms["shape"]), Layout.parse(terms["layout"])
    moments, float32 = 2, 4
    return moments * float32 * shape.total / layout.dp / 1e9, None


def _ring(terms: Mapping[str, Any]) -> tuple[float, None]:
    ranks = terms["ranks"]
    return 2 * (ranks - 1) / ranks, None


_QUANTITIES: dict[
    str, Callable[[Mapping[str, Any]], tuple[float, Picture | None]]
] = {
    "bubble": _bubble,
    "in-flight": _most_in_flight,
    "gathers": _gathers,
    "moments": _moments,
    "ring": _ring,
}


# ---- groups and layouts


def _check_group(exercise: Exercise, answer: str) -> Verdict:
    mesh = Mesh.parse(exercise.terms["mesh"])
    rank, axis = exercise.terms["rank"], exercise.terms["axis"]
    words = answer.replace(",", " ").split()
    if not all(word.isdecimal() and len(word) < 6 for word in words):
        return Verdict(False, "Write the numbers of the ranks, such as 0 2.")
    given = sorted(map(int, words))
    if given == list(mesh.group(rank, (axis,))):
        return Verdict(True, "Right.")
    if rank not in given:
        return Verdict(False, f"Rank {rank} is in its own group.")
    for other in (each.name for each in mesh.axes):
        if given == list(mesh.group(rank, (other,))):
            return Verdict(
                False,
                f"These ranks differ along {other}. Count from the right: ranks that differ along the"
                " last axis are neighbours.",
            )
    size = mesh.of(axis)
    if len(given) != size:
        return Verdict(False, f"A group along {axis} has {size} ranks.")
    return Verdict(
        False,
        f"Write each rank with its coordinates; a group's ranks differ only along {axis}.",
    )


def _check_layout(exercise: Exercise, answer: str) -> Verdict:
    terms, layout = exercise.terms, Layout.parse(answer.strip())
    if layout.mesh.size != terms["ranks"]:
        return Verdict(
            False,
            f"It has {layout.mesh.size} ranks; {terms['ranks']} were asked for.",
        )
    broken = legal(layout, Shape.load(terms["shape"]))
    wrong = [str(broken[0])] if broken else list(_not_met(terms, layout))
    if wrong:
        return Verdict(False, wrong[0])
    return Verdict(True, f"Right: {layout}.")


def _not_met(terms: Mapping[str, Any], layout: Layout) -> Iterator[str]:
    if "zero" in terms and layout.zero != terms["zero"]:
        yield f"Weights, gradients and states are sharded by zero3; this is zero{layout.zero}."
    if "shards" in terms and layout.shards != terms["shards"]:
        yield (
            f"Weights are divided by {layout.shards}, not by {terms['shards']}."
            " dpRxS has R copies of S shards each."
        )
    if "stages" in terms and layout.pp != terms["stages"]:
        yield f"It has {layout.pp} pipeline stages; {terms['stages']} were asked for."
    if "microbatches" in terms and layout.microbatches > terms["microbatches"]:
        yield f"It has {layout.microbatches} microbatches; at most {terms['microbatches']} are allowed."
    if "bubble" in terms:
        asked = {
            "schedule": layout.schedule,
            "stages": layout.pp,
            "microbatches": layout.microbatches,
            "chunks": layout.chunks,
        }
        _, timeline = _pipeline(asked)
        idle = timeline.bubble_fraction
        if idle > terms["bubble"]:
            yield (
                f"Its pipeline idles {idle:.1%} of a step; more microbatches, or chunks"
                " (interleaved2), make that less."
            )


_CHECKERS: dict[str, Callable[[Exercise, str], Verdict]] = {
    "schedule": _check_schedule,
    "repair": _check_repair,
    "prediction": _check_prediction,
    "group": _check_group,
    "layout": _check_layout,
}
