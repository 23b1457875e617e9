"""The row of LoRA: two thin matrices beside a linear (Hu et al. 2021), and its keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .adapter_row import AdapterRow, AdapterWeight
from .codec import key

ALL_LINEAR = "all-linear"  # as peft writes it
# "q_proj" -> "wq": the names that peft uses for Llama's linears.
_PEFT = {f"{name}_proj": f"w{name}" for name in "qkvo"}
_PEFT |= {f"{name}_proj": name for name in ("gate", "up", "down")}


@dataclass(frozen=True, kw_only=True)
class LoraSizes:
    """Keys of a shape that are LoRA's own."""

    lora_r: int = key(
        0, "rank of LoRA in the blocks, all else frozen; 0: none"
    )
    lora_alpha: float = key(
        8.0, "LoRA's output is multiplied by alpha / r", above=0
    )
    lora_targets: tuple[str, ...] = key(
        (), "linears with LoRA; empty: all of a block"
    )


@dataclass(frozen=True)
class LoraChoice:
    """Low-rank adapters in the linears of the blocks; all other weights are frozen."""

    r: int = key(
        0,
        "rank of the adapters; 0: no adapters, all weights are trained",
        maximum=1 << 16,
    )
    alpha: float = key(
        8.0, "the adapter's output is multiplied by alpha / r", above=0
    )
    targets: tuple[str, ...] = key(
        (ALL_LINEAR,),
        "wq, wk, wv, wo, gate, up, down, or peft's names such as q_proj",
    )


def _sizes(choice: LoraChoice) -> dict[str, Any]:
    if not choice.r:
        return {}
    named = (name for name in choice.targets if name != ALL_LINEAR)
    targets = tuple(_PEFT.get(name, name) for name in named)
    return {
        "lora_r": choice.r,
        "lora_alpha": choice.alpha,
        "lora_targets": targets,
    }


LORA = AdapterRow(
    name="LoRA",
    key="lora",
    keys={
        "lora_r": "lora.r",
        "lora_alpha": "lora.alpha",
        "lora_targets": "lora.targets",
    },
    targets="lora_targets",
    weights=(AdapterWeight("a.weight", "ri"), AdapterWeight("b.weight", "or")),
    sizes=_sizes,
    small_rank=4,
    columns=("lora_r", "lora_rank", "lora_dim"),
    usual_rank=16,  # its matmuls hardly count
)
