"""Cells that run in ranks forked from this process, which has imported torch and transformers already."""

import os
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import torch

from torch_audit.checks import check_run, first_of_each
from torch_audit.compare import EQUAL, REFUTED, Verdict, compare
from torch_audit.own import judged
from torch_audit.recorder import Recorder
from torch_audit.records import RecordError
from torch_audit.report import finding_text, kinds_text, verdict_text
from torch_audit.runs import Run, load

from . import programs
from .cells import FLOAT32, FLOAT64, Cell, Program

# The result of a layout that a library does not apply, though it was asked to.
WHOLE = "each rank trained a whole copy: nothing was sharded"
_PERTURBED = 3


def record(
    folder: Path,
    cell: Cell,
    program: Program,
    ranks: int,
    *,
    world: bool,
    perturbed: int = 0,
) -> Run:
    """Records a program on ranks that are forked from this process."""
    folder.mkdir()
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            recorder = Recorder(folder, 3, perturbed)
            here = (rank, ranks) if world else None
            os._exit(_record_rank(recorder, cell.dtype, program, here))
        children.append(child)
    codes = [os.waitpid(child, 0)[1] for child in children]
    if any(codes):
        # A rank that fails ends the messages of the others: their errors are not the cause.
        errors = [path.read_text() for path in sorted(folder.glob("error-*"))]
        raise RuntimeError(min(errors, key=lambda error: "gloo" in error))
    return load(folder)


def _record_rank(
    recorder: Recorder,
    dtype: torch.dtype,
    program: Program,
    here: tuple[int, int] | None,
) -> int:
    """One rank; `here` is the rank and the size of its world."""
    os.dup2(2, 1)  # only the table goes to standard output
    rank = 0
    try:
        if here is not None:
            rank, ranks = here
            programs.enter_world(str(recorder.folder), rank, ranks)
        recorder.install()
        program(dtype)
        recorder.finish()
    except Exception as error:
        text = f"{type(error).__name__}: {str(error)[:200]}"
        (recorder.folder / f"error-{rank}").write_text(text)
        traceback.print_exc()
        return 1
    return 0


def conduct(cell: Cell, folder: Path) -> tuple[str, str]:
    """The result of a cell in a word, and what was seen."""
    try:
        if cell.model in programs.MODELS:
            # By one process: ranks of a world would each wait for the first to write.
            programs.save(cell.model, cell.dtype)
        one = record(folder / "one", cell, cell.reference, 1, world=False)
        run = record(
            folder / "many", cell, cell.program, cell.ranks, world=True
        )
    except (RuntimeError, RecordError) as error:
        return "refused", str(error).splitlines()[0]
    if cell.sharded and not run.first.ranks[0].meshes:
        return "refused", WHOLE
    verdict = compare(one, run)
    print(verdict_text(verdict, "the layout", "one process"), file=sys.stderr)
    faults = [x for x in first_of_each(check_run(run)) if x.fault]
    for fault in faults:
        print(finding_text(fault), file=sys.stderr)
    if verdict.result == EQUAL and faults:
        return "refuted", finding_text(faults[0])
    seen = _seen(verdict)
    if verdict.quantity == "initial weights":
        # Both programs start from the same files or seed.
        return "refuted", seen
    if verdict.result == REFUTED and cell.dtype == FLOAT64:
        seen += f"; {_repeated(cell, verdict, folder)}"
    return verdict.result, seen


def _repeated(cell: Cell, exact: Verdict, folder: Path) -> str:
    """The same in float32, in which users run, with measured tolerances."""
    own = replace(cell, dtype=FLOAT32)
    if cell.model in programs.MODELS:
        programs.save(cell.model, FLOAT32)
    one = record(folder / "own", own, own.reference, 1, world=False)
    perturbed = [
        record(
            folder / f"own-{seed}", own, own.reference, 1,
            world=False, perturbed=seed,
        )
        for seed in range(1, _PERTURBED + 1)
    ]  # fmt: skip
    run = record(folder / "run", own, own.program, own.ranks, world=True)
    repeated = judged(exact, one, run, perturbed)
    if repeated.only_in_float64:
        return "float32: equal"
    if repeated.verdict.result == EQUAL:
        return "float32: rounding is larger"
    return f"float32: {_seen(repeated.verdict)}"


def _seen(verdict: Verdict) -> str:
    if verdict.result == EQUAL:
        return f"{verdict.worst:.0e}" if verdict.worst else "0"
    if not verdict.different:
        return f"{verdict.quantity}: {verdict.text}"
    kinds = kinds_text([each.name for each in verdict.different], 2)
    largest = max(each.relative for each in verdict.different)
    factors = {x.factor and round(x.factor, 4) for x in verdict.different}
    common = factors.pop() if len(factors) == 1 else None
    factor = "" if common is None else f", = {common:.4f} x reference"
    return f"{verdict.quantity} of {kinds}: off by {largest:.2g}{factor}"
