"""Prints the table of docs/audited.md: PYTHONPATH=benchmarks:torch-audit/src python -m audited [WORD ...]

Each cell is a small program of a library, recorded as one process and in a layout, and compared. Words
choose the cells whose row has one of them.
"""

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from torch_audit.checks import check_run, first_of_each
from torch_audit.compare import EQUAL, Verdict, compare
from torch_audit.recorder import Recorder
from torch_audit.report import finding_text, kinds_text, verdict_text
from torch_audit.runs import load

from . import programs

LM = Path(__file__).parents[2] / "torch-audit" / "tests"
sys.path.insert(0, str(LM))
import audited_lm  # noqa: E402

FLOAT64, FLOAT32 = torch.float64, torch.float32
Program = Callable[[torch.dtype], None]
_LAYOUTS = {
    "tp 2": programs.tp,
    "DDP 2": programs.ddp,
    "FSDP2 2": programs.fsdp2,
}


@dataclass(frozen=True)
class Cell:
    """One comparison of the table."""

    library: str
    model: str
    layout: str
    corner: str
    dtype: torch.dtype
    ranks: int
    reference: Program
    program: Program

    @property
    def row(self) -> str:
        corner = f"{self.corner}; {_name(self.dtype)}"
        return f"{self.library} | {self.model} | {self.layout} | {corner}"


def cells() -> list[Cell]:
    return [
        *_torch(),
        *_divide_factors(),
        *_transformers(),
        *_trainer(),
        *_auxiliary_losses(),
    ]


def _torch() -> list[Cell]:
    """Plain torch, by the small model of torch-audit's tests."""
    found = []
    for name, layout, ranks in (
        ("ddp", "DDP 2", 2), ("fsdp2", "FSDP2 2", 2), ("hsdp", "HSDP 2x2", 4), ("tp", "TP 2", 2),
        ("tp_sequence", "TP 2 with sequence parallelism", 2), ("fsdp2_tp", "FSDP2 2 x TP 2", 4),
        ("cp", "context parallel 2", 2), ("pipeline", "GPipe 2, tied", 2),
    ):  # fmt: skip
        for dtype in (FLOAT64, FLOAT32, torch.bfloat16):
            corner = f"accumulation 2, uneven labels, clip; {_name(dtype)}"
            bug = "tied" if name == "pipeline" else ""
            reference = partial(_lm, dtype, "one", bug)
            program = partial(_lm, dtype, name)
            found.append(
                Cell(
                    "torch",
                    "small LM",
                    layout,
                    corner,
                    ranks,
                    reference,
                    program,
                )
            )
    return found


def _lm(dtype: torch.dtype, layout: str, bug: str = "") -> None:
    torch.set_default_dtype(dtype)
    try:
        audited_lm.LAYOUTS[layout](bug)
    finally:
        torch.set_default_dtype(FLOAT32)


def _divide_factors() -> list[Cell]:
    found = []
    for dtype in (torch.float64, torch.float16, torch.float32, torch.bfloat16):
        for forced in (False, True):
            corner = f"gradient divide factor 2{', forced sum' if forced else ''}; {_name(dtype)}"
            program = partial(programs.divided, dtype, forced)
            reference = partial(programs.halved, dtype)
            found.append(
                Cell(
                    "torch",
                    "one layer",
                    "FSDP2 1",
                    corner,
                    1,
                    reference,
                    program,
                )
            )
    return found


def _transformers() -> list[Cell]:
    found = []
    for layout, program in _LAYOUTS.items():
        for model in programs.MODELS:
            corners = [(2, FLOAT64)]
            if layout == "tp 2":
                corners = [(1, FLOAT64), (2, FLOAT64)]
                corners += [(2, FLOAT32)] if model.startswith("Qwen3") else []
            for microbatches, dtype in corners:
                words = (model, dtype, microbatches)
                corner = f"accumulation {microbatches}; {_name(dtype)}"
                reference = partial(programs.one, *words)
                many = partial(program, *words)
                found.append(
                    Cell(
                        "transformers",
                        model,
                        layout,
                        corner,
                        2,
                        reference,
                        many,
                    )
                )
    return found


def _trainer() -> list[Cell]:
    """transformers' Trainer, with accumulation, rows of different lengths, and a clip."""
    found = []
    corners: dict[str, dict[str, Any]] = {
        "uneven rows, clip": {}, "and tied": {"tie_word_embeddings": True},
        "and checkpointing": {"checkpointing": True}, "and LoRA": {"lora": True},
    }  # fmt: skip
    for layout in ("DDP", "FSDP2"):
        for words, changes in corners.items():
            corner = f"accumulation 2, {words}; float64"
            reference = partial(
                programs.trainer, "Llama", FLOAT64, 4, 2, **changes
            )
            program = partial(
                programs.trainer, "Llama", FLOAT64, 2, 2, layout, **changes
            )
            name = f"Trainer, {layout} 2"
            found.append(
                Cell(
                    "transformers",
                    "Llama",
                    name,
                    corner,
                    2,
                    reference,
                    program,
                )
            )
    return found


def _auxiliary_losses() -> list[Cell]:
    """Microbatches, or ranks, that are all alike must give the gradient of one of them."""
    found = []
    for ranks, microbatches in ((1, 2), (2, 1)):
        for model, coefficient in (
            ("Mixtral", 0.0),
            ("Mixtral", 0.1),
            ("Qwen3-MoE", 0.1),
        ):
            corner = (
                f"equal microbatches, auxiliary loss {coefficient:g}; float32"
            )
            changes = {"router_aux_loss_coef": coefficient, "alike": True}
            changes |= {"output_router_logits": True}
            reference = partial(
                programs.trainer, model, FLOAT32, 1, 2, **changes
            )
            program = partial(
                programs.trainer, model, FLOAT32, microbatches, 2, **changes
            )
            name = (
                "Trainer, accumulation 2" if ranks == 1 else "Trainer, DDP 2"
            )
            found.append(
                Cell(
                    "transformers",
                    model,
                    name,
                    corner,
                    ranks,
                    reference,
                    program,
                )
            )
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- running


def record(folder: Path, program: Program, ranks: int, *, world: bool) -> None:
    """Records a program on ranks that are forked from this process."""
    folder.mkdir()
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            os._exit(_record_rank(folder, program, rank, ranks, world))
        children.append(child)
    codes = [os.waitpid(child, 0)[1] for child in children]
    if any(codes):
        # A rank that fails ends the messages of the others: their errors are not the cause.
        errors = [path.read_text() for path in sorted(folder.glob("error-*"))]
        raise RuntimeError(min(errors, key=lambda error: "gloo" in error))


def _record_rank(
    folder: Path, program: Program, rank: int, ranks: int, world: bool
) -> int:
    os.dup2(2, 1)  # only the table goes to standard output
    try:
        if world:
            programs.enter_world(str(folder), rank, ranks)
        recorder = Recorder(folder, steps=3)
        recorder.install()
        program()
        recorder.finish()
    except Exception as error:
        (folder / f"error-{rank}").write_text(
            f"{type(error).__name__}: {str(error)[:200]}"
        )
        traceback.print_exc()
        return 1
    return 0


def conduct(cell: Cell, folder: Path) -> tuple[str, str]:
    """The result of a cell in a word, and what was seen."""
    try:
        if cell.layout in _LAYOUTS and cell.model in programs.MODELS:
            # By one process: ranks of a world would each wait for the first to write.
            programs.save(
                cell.model, FLOAT32 if "float32" in cell.corner else FLOAT64
            )
        record(folder / "one", cell.reference, 1, world=False)
        record(folder / "many", cell.program, cell.ranks, world=True)
    except RuntimeError as error:
        return "refused", str(error).splitlines()[0]
    run = load(folder / "many")
    verdict = compare(load(folder / "one"), run)
    print(verdict_text(verdict, "the layout", "one process"), file=sys.stderr)
    faults = [x for x in first_of_each(check_run(run)) if x.fault]
    for fault in faults:
        print(finding_text(fault), file=sys.stderr)
    if verdict.result == EQUAL and faults:
        return "refuted", finding_text(faults[0])
    return verdict.result, _seen(verdict)


def _seen(verdict: Verdict) -> str:
    if verdict.result == EQUAL:
        rounding = f"{verdict.worst:.0e}" if verdict.worst else "0"
        return (
            "rounding of float32, in which a part computes"
            if verdict.inside
            else rounding
        )
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
    chosen = [
        cell
        for cell in cells()
        if not words or any(x in cell.row for x in words)
    ]
    for cell in chosen:
        with tempfile.TemporaryDirectory() as folder:
            result, seen = conduct(cell, Path(folder))
        row = cell.row.replace("torch |", f"torch {version('torch')} |", 1)
        row = row.replace(
            "transformers |", f"transformers {version('transformers')} |", 1
        )
        print(f"| {row} | {result} | {seen} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
