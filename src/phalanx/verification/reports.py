"""Compares a trial's own reports with values that are computed here.

The reports are the order of the records in its journal, the start's description of the
run, goodput, memory, the files of its ranks, and the ranks named as slow.
"""

from __future__ import annotations

import json
import math
import resource
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..layout.goodput import Goodput
from ..layout.journal import Record
from ..layout.run import Run
from ..program import Program
from ..training.stragglers import NAMES, Stragglers

# Seconds by which rounded times may differ: records have four decimals, clock times
# three.
_ROUNDED = 2e-3
# Phases that docs/logging.md counts as useful time, and the others' parts.
_USEFUL = {"in a step", "first step", "loading data"}
_PARTS = {
    "starting": {"starting", "reading a checkpoint"},
    "compiling": {"compiling"},
    "saving": {"saving"},
    "validating": {"validating", "comparing copies", "sampling"},
}
# Records whose order is compared. Others depend on the machine.
_ORDERED = ("damaged", "resume", "start", "step", "validation", "stop", "end")


@dataclass(frozen=True)
class Start:
    """One start of a run: its layout and ranks, its first step and its last."""

    layout: str
    ranks: int
    first: int
    last: int


def report_faults(
    run: Run,
    records: Sequence[Record],
    starts: Sequence[Start],
    parameters: int,
    shape: Mapping[str, Any],
) -> Iterator[str]:
    """Describe mistakes in what the starts of a run report."""
    out = Path(run.out)
    wanted = [*_order(run, starts)]
    found = [
        (record["event"], record.get("step"))
        for record in records
        if record["event"] in _ORDERED
    ]
    if found != wanted:
        yield f"the journal has the records {found}; expected {wanted}"
        return
    yield from _saves(run, records, starts)
    yield from _descriptions(run, records, starts, parameters, shape)
    yield from _memory(records)
    yield from _bytes(records)
    yield from _timeline(out, records)
    yield from _goodput(records)
    yield from _lost_steps(records)
    read = Run.parse((out / "run.toml").read_text(), "run.toml")
    # As JSON stores them, with lists in place of tuples.
    if json.dumps(asdict(read)) != json.dumps(asdict(run)):
        yield "run.toml is read back as another run"
    for rank in range(max(start.ranks for start in starts)):
        yield from _rank_log(out, rank, starts)


def _order(
    run: Run, starts: Sequence[Start]
) -> Iterator[tuple[str, int | None]]:
    """The events of all starts with their steps."""
    for start in starts:
        if start.first:
            # A damaged checkpoint lies beside the one from which it resumes.
            yield from (("damaged", None), ("resume", None))
        yield "start", start.first
        yield from (
            ("step", n) for n in range(start.first + 1, start.last + 1)
        )
        if start.last < run.steps:
            yield "stop", start.last
            continue
        if run.validation.batches:
            yield "validation", start.last
        yield "end", start.last


def _saves(
    run: Run, records: Sequence[Record], starts: Sequence[Start]
) -> Iterator[str]:
    every = run.checkpoint.every
    wanted = [
        step
        for start in starts
        for step in range(start.first + 1, start.last + 1)
        if step % every == 0 or step == start.last
    ]
    saves = [record for record in records if record["event"] == "checkpoint"]
    steps = [record["step"] for record in saves]
    if steps != wanted:
        yield f"the journal tells of checkpoints of the steps {steps}; expected {wanted}"
    for record in saves:
        path = run.checkpoints / f"step-{record['step']:08}"
        if record["error"] or record["path"] != str(path):
            yield f"the journal tells of a checkpoint {record['path']} with the error {record['error']!r}"


def _descriptions(
    run: Run,
    records: Sequence[Record],
    starts: Sequence[Start],
    parameters: int,
    shape: Mapping[str, Any],
) -> Iterator[str]:
    begun = [record for record in records if record["event"] == "start"]
    for record, start in zip(begun, starts, strict=True):
        wanted = {
            "layout": start.layout,
            "ranks": start.ranks,
            "steps": run.steps,
            "parameters": parameters,
            "model": json.loads(json.dumps(shape)),
        }
        for name, value in wanted.items():
            if record[name] != value:
                yield f"the journal's {name} of a start is {record[name]!r}; expected {value!r}"
        if not 0 < record["held"] <= parameters:
            yield f"a rank holds {record['held']} of {parameters} parameters"


def _memory(records: Sequence[Record]) -> Iterator[str]:
    """Compare memory with that of this process, whose threads the ranks are."""
    if torch.cuda.is_available():
        return
    unit = 1 if sys.platform == "darwin" else 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    last = 0.0
    for record in records:
        if record["event"] != "step":
            continue
        # A peak never falls.
        if not last <= record["memory"] <= most:
            yield f"step {record['step'] - 1}: memory of {record['memory']}, after {last} and before {most}"
        last = record["memory"]


def _bytes(records: Sequence[Record]) -> Iterator[str]:
    """Compare the bytes that the ranks measured with those that their program promises."""
    held = 0
    for record in records:
        if record["event"] == "start":
            held = record["held"]
        if record["event"] != "memory":
            continue
        first = record["ranks"][0]["measured"]
        if first["weights"] < 2 * held:
            yield f"rank 0 has {held} elements of weights in {first['weights']:g} bytes"
        for rank, kinds in enumerate(record["ranks"]):
            measured, promised = kinds["measured"], kinds["promised"]
            for kind, amount in measured.items():
                # Kept from start to end, or the most at any time.
                stays = kind in ("weights", "optimizer")
                if amount > promised[kind] or (
                    stays and amount < promised[kind]
                ):
                    yield (
                        f"rank {rank} has {amount:g} bytes of {kind}, and the program promises"
                        f" {promised[kind]:g}"
                    )


def _timeline(out: Path, records: Sequence[Record]) -> Iterator[str]:
    """Compare the measured step with its program: each rank has each operation once, in
    the order of its list, within the time of the step."""
    recorded = json.loads((out / "timeline.json").read_text())
    program = Program.parse(recorded["program"])
    step = [record for record in records if record["event"] == "step"][-1]
    if recorded["step"] != step["step"]:
        yield f"the measured step is {recorded['step']}; expected {step['step']}"
    by_rank: dict[int, list[tuple[float, float, str]]] = {}
    for rank, _, op, start, end in recorded["spans"]:
        by_rank.setdefault(rank, []).append((start, end, op))
    if sorted(by_rank) != [*range(program.mesh.size)]:
        yield f"the measured step has the ranks {sorted(by_rank)} of {program.mesh.size}"
    for rank, spans in by_rank.items():
        wanted = [str(op) for op in program.rows[program.owner[rank]]]
        found = [op for _, _, op in sorted(spans)]
        if sorted(found) != sorted(wanted):
            odd = sorted({*found} ^ {*wanted}) or found
            yield f"rank {rank} has measured other operations than its list: {odd[0]}"
        # The journal has the time of rank 0; others may end their step later.
        most = math.inf if rank else step["seconds"] + _ROUNDED
        for start, end, op in spans:
            if not -_ROUNDED <= start <= end <= most:
                yield (
                    f"rank {rank}: {op} lasts from {start:.4g} to {end:.4g} s in a step of"
                    f" {step['seconds']:.4g} s"
                )


def _rank_log(out: Path, rank: int, starts: Sequence[Start]) -> Iterator[str]:
    text = (out / "logs" / f"rank-{rank}.log").read_text()
    for start in starts:
        if (
            rank < start.ranks
            and f"rank {rank} of {start.ranks}, " not in text
        ):
            yield f"rank-{rank}.log does not report its start as one of {start.ranks} ranks"


# ---- goodput


def _goodput(records: Sequence[Record]) -> Iterator[str]:
    """Compare a run's goodput with sums of the times in its records."""
    first = records[0]["began"]
    parts = dict.fromkeys(("steps", *_PARTS), 0.0)
    began, lost = None, 0.0
    for number, record in enumerate(records):
        for phase, seconds in record["spent"].items():
            name = _part_of(phase)
            # All before a process's first record is its start.
            if name in parts and record["began"] == began:
                parts[name] += seconds
        if record["began"] != began:
            parts["starting"] += record["clock"] - record["began"]
            began = record["began"]
        if record["event"] == "start":
            lost += sum(_seconds_of_steps(records[:number], record["step"]))
        total = record["clock"] - first
        near = _ROUNDED * len(records)
        useful = parts["steps"] - lost
        if "parts" in record:
            wanted = {**parts, "steps": useful, "lost steps": lost}
            yield from _part_faults(record["parts"], wanted, total, near)
        if "goodput" not in record:
            continue
        share = useful / total
        if not math.isclose(record["goodput"], share, abs_tol=near / total):
            yield f"the journal's goodput is {record['goodput']:.4g}; its records have {share:.4g}"


def _part_of(phase: str) -> str:
    if phase in _USEFUL:
        return "steps"
    return next((name for name, of in _PARTS.items() if phase in of), "other")


def _part_faults(
    told: Mapping[str, float],
    wanted: Mapping[str, float],
    total: float,
    near: float,
) -> Iterator[str]:
    for name, seconds in wanted.items():
        if not math.isclose(told[name], seconds, abs_tol=near):
            yield f"the journal has {told[name]:.4g} s of {name}; its records have {seconds:.4g} s"
    # Every second is of one part.
    if not math.isclose(sum(told.values()), total, abs_tol=near):
        yield f"the journal's parts of {total:.4g} s are {told}"


def _lost_steps(records: Sequence[Record]) -> Iterator[str]:
    """Compare the time that goodput would count as lost, had the last start begun at an
    earlier step, with the time of the steps in between."""
    at = max(
        n for n, record in enumerate(records) if record["event"] == "start"
    )
    before = records[:at]
    known = Goodput(before).spent["lost steps"]
    for first in range(records[at]["step"] + 1):
        resumed = {**records[at], "step": first}
        lost = Goodput([*before, resumed]).spent["lost steps"] - known
        wanted = sum(_seconds_of_steps(before, first))
        if not math.isclose(lost, wanted, abs_tol=_ROUNDED):
            yield f"goodput loses {lost:.4g} s by a resume at step {first}; the steps took {wanted:.4g} s"


def _seconds_of_steps(
    records: Sequence[Record], first: int
) -> Iterator[float]:
    """The seconds of steps after the step `first`, and of those without a record."""
    waiting = 0.0
    began = records[0]["began"] if records else 0.0
    for number, record in enumerate(records):
        # The first record of a process has the time of its start.
        if number and record["began"] == began:
            spent = record["spent"].items()
            waiting += sum(s for phase, s in spent if phase in _USEFUL)
        began = record["began"]
        if record["event"] == "step":
            if record["step"] > first:
                yield waiting
            waiting = 0.0
    yield waiting


# ---- slow ranks


def straggler_faults() -> Iterator[str]:
    """Describe mistakes in naming slow ranks, by a table of times in which one is slow."""
    ranks, factor, slow = 5, 1.5, 3
    rows = [0, 1, 0, 1, 1]  # ranks 1, 3 and 4 are peers, and so are 0 and 2
    named = Stragglers(factor, rows)
    # Seconds of each operation; every rank has some of its own.
    table = [
        [1e-4 * (name + rank) for name in range(len(NAMES))]
        for rank in range(ranks)
    ]
    table[slow][4] += 0.2
    table[slow][7] += 0.05
    totals = [sum(parts) for parts in table]
    lines = [
        [total, *parts] for total, parts in zip(totals, table, strict=True)
    ]
    peers = [
        rank
        for rank in range(ranks)
        if rows[rank] == rows[slow] and rank != slow
    ]
    usual = statistics.median(totals[rank] for rank in peers)
    # A rank is named once it has lost a second beyond the factor since the last line.
    beyond = totals[slow] - factor * usual
    if [*named.look(lines, math.floor(0.99 / beyond))]:
        yield "a rank is named as slow that lost less than a second"
    named = Stragglers(factor, rows)
    found = [*named.look(lines, math.ceil(1.01 / beyond))]
    if [each.rank for each in found] != [slow]:
        yield f"ranks {[each.rank for each in found]} are named as slow; expected {slow}"
        return
    (one,) = found
    if not math.isclose(one.seconds, totals[slow]) or not math.isclose(
        one.usual, usual
    ):
        yield f"rank {slow} is reported to take {one.seconds} s where {one.usual} s are usual"
    worst = [*one.operations][:2]
    if worst != [NAMES[4], NAMES[7]]:
        yield f"rank {slow} is reported as slow in {worst}"
    for name, (own, others) in one.operations.items():
        at = NAMES.index(name)
        median = statistics.median(table[rank][at] for rank in peers)
        if not math.isclose(own, table[slow][at]) or not math.isclose(
            others, median
        ):
            yield f"rank {slow} is reported to take {own} s for {name}, others {others} s"
    even = [lines[0]] * ranks
    if any(named.look(even, 1000)):
        yield "a rank is named as slow where all take the same time"
