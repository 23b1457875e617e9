"""The cells of the table: layouts of torch and transformers, and scripts on other libraries."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import programs

LM = Path(__file__).parents[2] / "torch-audit" / "tests"
sys.path.insert(0, str(LM))
import audited_lm  # noqa: E402

FLOAT64, FLOAT32 = torch.float64, torch.float32
BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
Program = Callable[[torch.dtype], None]
LAYOUTS = {
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
        corner = f"{self.corner}; {dtype_name(self.dtype)}"
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
    corner = "accumulation 2, uneven labels, clip"
    for name, layout, ranks in (
        ("ddp", "DDP 2", 2), ("fsdp2", "FSDP2 2", 2), ("hsdp", "HSDP 2x2", 4), ("tp", "TP 2", 2),
        ("tp_sequence", "TP 2 with sequence parallelism", 2), ("fsdp2_tp", "FSDP2 2 x TP 2", 4),
        ("cp", "context parallel 2", 2), ("pipeline", "GPipe 2, tied", 2),
    ):  # fmt: skip
        bug = "tied" if name == "pipeline" else ""
        one = partial(_lm, "one", bug)
        many = partial(_lm, name, "")
        for dtype in (FLOAT64, FLOAT32, BFLOAT16):
            cell = Cell(
                "torch", "small LM", layout, corner, dtype, ranks, one, many
            )
            found.append(cell)
    return found


def _lm(layout: str, bug: str, dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    try:
        audited_lm.LAYOUTS[layout](bug)
    finally:
        torch.set_default_dtype(FLOAT32)


def _divide_factors() -> list[Cell]:
    found = []
    for dtype in (FLOAT64, FLOAT16, FLOAT32, BFLOAT16):
        for forced in (False, True):
            corner = "gradient divide factor 2"
            corner += ", forced sum" if forced else ""
            one = programs.halved
            many = partial(programs.divided, forced=forced)
            cell = Cell(
                "torch", "one layer", "FSDP2 1", corner, dtype, 1, one, many
            )
            found.append(cell)
    return found


def _transformers() -> list[Cell]:
    found = []
    for layout, program in LAYOUTS.items():
        for model in programs.MODELS:
            corners = [(2, FLOAT64)]
            if layout == "tp 2":
                corners = [(1, FLOAT64), (2, FLOAT64)]
                corners += [(2, FLOAT32)] if model.startswith("Qwen3") else []
            for microbatches, dtype in corners:
                corner = f"accumulation {microbatches}"
                words = {"microbatches": microbatches}
                one = partial(programs.one, model, **words)
                many = partial(program, model, **words)
                cell = Cell(
                    "transformers", model, layout, corner, dtype, 2, one, many
                )
                found.append(cell)
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
            corner = f"accumulation 2, {words}"
            trainer = partial(programs.trainer, "Llama", rows=2, **changes)
            one = partial(trainer, microbatches=4)
            many = partial(trainer, microbatches=2, layout=layout)
            name = f"Trainer, {layout} 2"
            cell = Cell(
                "transformers", "Llama", name, corner, FLOAT64, 2, one, many
            )
            found.append(cell)
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
            corner = f"equal microbatches, auxiliary loss {coefficient:g}"
            changes = {"router_aux_loss_coef": coefficient, "alike": True}
            changes |= {"output_router_logits": True}
            trainer = partial(programs.trainer, model, rows=2, **changes)
            one = partial(trainer, microbatches=1)
            many = partial(trainer, microbatches=microbatches)
            name = "Trainer, DDP 2"
            if ranks == 1:
                name = "Trainer, accumulation 2"
            cell = Cell(
                "transformers", model, name, corner, FLOAT32, ranks, one, many
            )
            found.append(cell)
    return found


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
