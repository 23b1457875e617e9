"""Prints the table of docs/audited.md: PYTHONPATH=benchmarks:torch-audit/src python -m audited [WORD ...]

Each cell is a small program of a library, recorded as one process and in a layout, and compared. A cell
that is refuted in float64 is repeated in float32. Words choose the cells whose row has one of them.
"""

import os
import sys
import tempfile
import traceback
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch

from torch_audit.checks import check_run, first_of_each
from torch_audit.compare import EQUAL, REFUTED, Verdict, compare
from torch_audit.own import judged
from torch_audit.recorder import Recorder
from torch_audit.report import finding_text, kinds_text, verdict_text
from torch_audit.runs import Run, load

from . import programs
from .cells import FLOAT32, FLOAT64, LAYOUTS, Cell, Program, cells

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
        if cell.layout in LAYOUTS and cell.model in programs.MODELS:
            # By one process: ranks of a world would each wait for the first to write.
            programs.save(cell.model, cell.dtype)
        one = record(folder / "one", cell, cell.reference, 1, world=False)
        run = record(
            folder / "many", cell, cell.program, cell.ranks, world=True
        )
    except RuntimeError as error:
        return "refused", str(error).splitlines()[0]
    verdict = compare(one, run)
    print(verdict_text(verdict, "the layout", "one process"), file=sys.stderr)
    faults = [x for x in first_of_each(check_run(run)) if x.fault]
    for fault in faults:
        print(finding_text(fault), file=sys.stderr)
    if verdict.result == EQUAL and faults:
        return "refuted", finding_text(faults[0])
    seen = _seen(verdict)
    if verdict.result == REFUTED and cell.dtype == FLOAT64:
        seen += f"; {_repeated(cell, verdict, folder)}"
    return verdict.result, seen


def _repeated(cell: Cell, exact: Verdict, folder: Path) -> str:
    """The same in float32, in which users run, with measured tolerances."""
    own = replace(cell, dtype=FLOAT32)
    if cell.layout in LAYOUTS and cell.model in programs.MODELS:
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


def main(words: list[str]) -> None:
    torch.set_num_threads(1)
    print("| library | model | layout | corner | result | seen |")
    print("|---|---|---|---|---|---|")
    for cell in cells():
        if words and not any(word in cell.row for word in words):
            continue
        with tempfile.TemporaryDirectory() as folder:
            result, seen = conduct(cell, Path(folder))
        library = f"{cell.library} {version(cell.library)}"
        library = library.replace("+cpu", "")
        row = cell.row.replace(cell.library, library, 1)
        print(f"| {row} | {result} | {seen} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
