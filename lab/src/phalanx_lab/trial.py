"""Runs an experiment on real ranks."""

import importlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx.comm import RankFailed, World
from phalanx.comm.launch import workers

from .catalogue import Cell, Experiment, LabError, Size, experiment
from .lab import Lab
from .record import Claim, LabStep, RankRecord

# a step's title, and the step on each rank
Titled = tuple[str, list[tuple[int, LabStep]]]


@dataclass(frozen=True)
class LabTrial:
    """One experiment that was run, with the records of every rank."""

    experiment: Experiment
    size: Size
    ranks: int
    backend: str
    records: tuple[RankRecord, ...]

    @property
    def claims(self) -> list[Claim]:
        return [claim for record in self.records for claim in record.claims]

    @property
    def failed(self) -> list[Claim]:
        return [claim for claim in self.claims if not claim.holds]

    @property
    def holds(self) -> bool:
        return not self.failed

    def steps(self) -> list[Titled]:
        """Return each title with (rank, step) of all ranks, in the order in which they
        began."""
        steps: dict[str, list[tuple[int, LabStep]]] = {}
        for record in self.records:
            for step in record.steps:
                steps.setdefault(step.title, []).append((record.rank, step))
        return sorted(
            steps.items(), key=lambda item: min(s.start for _, s in item[1])
        )

    def blocks(self) -> Iterator[tuple[Cell, list[Titled]]]:
        """Yield the cells, cut so that each is followed by the steps recorded in it."""
        here = self.experiment
        # by the line of the statement in which they began
        steps: dict[int, list[Titled]] = {}
        for titled in self.steps():
            line = titled[1][0][1].line
            start = max(
                (at for at in here.starts if at <= line),
                default=here.starts[0],
            )
            steps.setdefault(start, []).append(titled)
        for cell in here.cells:
            if cell.part:
                yield cell, []
                continue
            prose, first, end = (
                cell.prose,
                cell.first,
                cell.first + len(cell.lines),
            )
            # Code up to the second statement that began a step belongs to the first,
            # and so on.
            inside = [line for line in sorted(steps) if first <= line < end]
            for line, following in zip(
                inside or [first], [*inside[1:], end], strict=True
            ):
                cut = following
                while cut < end and _is_comment(
                    cell.lines[cut - 1 - cell.first]
                ):
                    cut -= 1
                code = cell.lines[first - cell.first : cut - cell.first]
                yield Cell(prose, code, first), steps.get(line, [])
                prose, first = "", cut


def conduct(
    names: Sequence[str],
    size: Size | None = None,
    *,
    ranks: int = 4,
    backend: str = "threads",
) -> Iterator[LabTrial]:
    """Run the experiments one after another in one world of ranks."""
    size, backend = size or Size(), backend_for(backend)
    experiments = [experiment(name) for name in names]
    with workers(ranks, backend=backend, timeout=60.0) as run:
        for each in experiments:
            try:
                records = run(on_a_rank, each.module, each.function, size)
            except RankFailed as failed:
                # A size that does not fit can be changed by the user; anything else
                # keeps its traceback.
                kind, _, text = failed.reports[0].error.partition(": ")
                error = (
                    LabError(f"{each.name}: {text}")
                    if kind == "LabError"
                    else failed
                )
                raise error from None
            yield LabTrial(each, size, ranks, backend, tuple(records))


def on_a_rank(
    world: World, module: str, function: str, size: Size
) -> RankRecord:
    """Run the experiment on one rank and record it."""
    carry_out = getattr(importlib.import_module(module), function)
    lab = Lab(world, size, carry_out.__code__)
    with lab.memory:
        carry_out(lab)
    world.clear()
    return lab.close()


def backend_for(backend: str) -> str:
    """Return the requested backend, or threads under a debugger, so that every rank can
    be stopped."""
    # used by debuggers from Python 3.12 on
    monitoring = getattr(sys, "monitoring", None)
    debugged = (
        monitoring is not None
        and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None
    )
    return "threads" if debugged or sys.gettrace() is not None else backend


def _is_comment(line: str) -> bool:
    return line.lstrip().startswith("#")
