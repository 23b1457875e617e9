"""The cells of the table: layouts of torch and transformers, and scripts on other libraries."""

import re
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
# Models of the layouts that differ least between models.
_FEW = (
    "Llama, tied",
    "Qwen3",
    "Mixtral",
    "Apertus",
    "DeepSeek-V3",
    "HRM-Text",
)
_PLANNED = ("Apertus", "DeepSeek-V3", "HRM-Text")
Program = Callable[[torch.dtype], None]
# transformers' own layouts, and torch's wrappers: ranks and program of each.
LAYOUTS = {
    "tp 2": (2, partial(programs.native, tp_size=2)),
    "tp 2 x fsdp 2": (4, partial(programs.native, tp_size=2, fsdp_size=2)),
    "fsdp 2": (2, partial(programs.native, fsdp_size=2)),
    "ep 2": (2, partial(programs.native, fsdp_size=2, ep_size=2)),
    "ep 2 x tp 2": (2, partial(programs.native, tp_size=2, ep_size=2)),
    "ep 4 over tp 2 x fsdp 2": (
        4, partial(programs.native, tp_size=2, fsdp_size=2, ep_size=4),
    ),
    "DDP 2": (2, programs.ddp),
    "FSDP2 2": (2, programs.fsdp2),
}  # fmt: skip


def shards(layout: str) -> bool:
    """True for a layout in which parameters lie on a mesh."""
    return bool(re.search(r"\b(tp|ep|cp|fsdp|TP|FSDP2|HSDP)\b", layout))


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
    repro: str = (
        ""  # of `repros/`, which shows a refuted cell without the recorder
    )

    @property
    def conditions(self) -> str:
        return f"{self.corner}; {dtype_name(self.dtype)}"

    @property
    def sharded(self) -> bool:
        return shards(self.layout)

    @property
    def row(self) -> str:
        return f"{self.library} | {self.model} | {self.layout} | {self.conditions}"


def cells() -> list[Cell]:
    return [
        *_torch(),
        *_divide_factors(),
        *_transformers(),
        *_trainer(),
        *_last_batches(),
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
                "torch",
                "one layer",
                "FSDP2 1",
                corner,
                dtype,
                1,
                one,
                many,
                "divide_factor.py",
            )
            found.append(cell)
    return found


def _transformers() -> list[Cell]:
    """Models of transformers, trained by a loop of our own."""
    found = []
    for layout, (ranks, program) in LAYOUTS.items():
        for model in programs.MODELS:
            if "ep" in layout and not programs.has_experts(model):
                continue
            if "fsdp" in layout and model not in _FEW:
                continue
            # These have a plan, or files, of their own; torch's wrappers do not see it.
            if layout in ("DDP 2", "FSDP2 2") and model in _PLANNED:
                continue
            corners = [(2, FLOAT64)]
            if layout == "tp 2":
                corners = [(1, FLOAT64), (2, FLOAT64)]
                corners += [(2, FLOAT32)] if model.startswith("Qwen3") else []
            elif "ep" in layout:
                # FSDP2 divides experts' gradients twice in float64.
                corners = [(2, FLOAT64), (2, FLOAT32)]
            for microbatches, dtype in corners:
                # One process takes the microbatches of all ranks as one.
                one = partial(programs.one, model, microbatches=microbatches)
                many = partial(program, model, microbatches=microbatches)
                found.append(
                    Cell(
                        "transformers", model, layout, f"accumulation {microbatches}",
                        dtype, ranks, one, many, _repro_of(model, layout),
                    )
                )  # fmt: skip
    return found


def _repro_of(model: str, layout: str) -> str:
    """The repro of what a layout is known to do to a model."""
    if model == "HRM-Text":
        return "fused_loading.py"
    if "tp" in layout and model == "Apertus":
        return "tp_activation.py"
    if "tp" in layout and model.startswith(("Qwen3", "Gemma3")):
        return "tp_norms.py"
    return "divide_factor.py" if "ep" in layout else ""


def _trainer() -> list[Cell]:
    """transformers' Trainer, with accumulation, rows of different lengths, and a clip."""
    found = []
    checkpointing = {"arguments": {"gradient_checkpointing": True}}
    untold = {"arguments": {"average_tokens_across_devices": False}}
    corners: list[tuple[str, str, dict[str, Any]]] = [
        ("Llama", "uneven rows, clip", {}), ("Llama, tied", "uneven rows, clip", {}),
        ("Llama", "and checkpointing", checkpointing), ("Llama", "and LoRA", {"lora": True}),
        ("Qwen3", "uneven rows, clip", {}), ("Mixtral", "uneven rows, clip", {}),
        ("Qwen3-MoE", "uneven rows, clip", {}), ("Apertus", "uneven rows, clip", {}),
        ("Llama", "average_tokens_across_devices=False", untold),
    ]  # fmt: skip
    layouts: dict[str, tuple[int, int, dict[str, Any]]] = {
        "DDP 2": (2, 2, {}), "FSDP2 2": (2, 2, {"layout": "FSDP2"}),
        "fsdp 2": (2, 2, {"sizes": {"fsdp_size": 2}}),
        "tp 2": (2, 1, {"sizes": {"tp_size": 2}}),
        "tp 2 x fsdp 2": (4, 2, {"sizes": {"tp_size": 2, "fsdp_size": 2}}),
        "ep 2": (2, 2, {"sizes": {"fsdp_size": 2, "ep_size": 2}}),
        "ep 2 x tp 2": (2, 1, {"sizes": {"tp_size": 2, "ep_size": 2}}),
        "cp 2": (2, 1, {"layout": "cp"}),
    }  # fmt: skip
    for layout, (ranks, dp, words) in layouts.items():
        for model, corner, changes in corners:
            if "ep" in layout and not programs.has_experts(model):
                continue
            # A model's own plan matters to tp and ep alone.
            alike = layout not in ("tp 2", "ep 2", "ep 2 x tp 2")
            if alike and model in ("Qwen3", "Qwen3-MoE", "Apertus"):
                continue
            if layout == "cp 2" and (changes or model != "Llama"):
                continue
            # Where ranks have samples of their own, the option is to change the mean.
            if changes == untold and dp > 1:
                continue
            repro = _repro_of(model, layout)
            repro = "tp_tokens.py" if changes == untold else repro
            trainer = partial(programs.trainer, model, rows=2, **changes)
            one = partial(trainer, microbatches=2 * dp)
            many = partial(trainer, microbatches=2, **words)
            dtype = FLOAT32 if "ep" in layout else FLOAT64
            name, corner = f"Trainer, {layout}", f"accumulation 2, {corner}"
            found.append(
                Cell(
                    "transformers", model, name, corner, dtype, ranks, one, many, repro,
                )
            )  # fmt: skip
    return found


def _last_batches() -> list[Cell]:
    """Two ranks with 2 rows each, where the last batch of an epoch has 3 rows."""
    trainer = partial(
        programs.trainer, "Llama", rows=2, rows_in_all=4 * programs.STEPS - 1
    )
    corner = "a last batch of 3 rows"
    one, many = partial(trainer, microbatches=2), partial(trainer, microbatches=1)  # fmt: skip
    return [
        Cell(
            "transformers", "Llama", f"Trainer, {layout}", corner, FLOAT64, 2, one,
            partial(many, layout=word),
        )
        for layout, word in (("DDP 2", ""), ("FSDP2 2", "FSDP2"))
    ]  # fmt: skip


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
                "transformers",
                model,
                name,
                corner,
                FLOAT32,
                ranks,
                one,
                many,
                "auxiliary_loss.py",
            )
            found.append(cell)
    return found


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
