"""LoRA in the files of others: peft's format, and merged into the model's weights."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from ..layout import Shape, families
from ..layout.pieces import block_linears
from .checkpoint_format import DTYPES, WEIGHT, CheckpointError
from .checkpoint_load import TensorReader


def merged_lora(
    reader: TensorReader, shape: Shape, name: str, whole: Tensor
) -> Tensor:
    """W + alpha / r B A (Hu et al. 2021), of a weight that has an adapter."""
    path = name.removesuffix("weight")
    a, b = ((WEIGHT, f"{path}lora.{each}.weight") for each in "ab")
    if a not in reader.tensors:
        return whole
    # In float32 or wider: the product of two 16-bit factors needs more digits than the
    # factors have.
    wide = torch.promote_types(whole.dtype, torch.float32)
    up, down = (reader.whole(reader.tensors[each]).to(wide) for each in (b, a))
    merged = whole.to(wide) + shape.lora_alpha / shape.lora_r * (up @ down)
    return merged.to(whole.dtype)


def peft_lora(
    reader: TensorReader, shape: Shape, data: families.Family, dtype: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the configuration of an adapter in peft's format.

    A linear layer of a Hugging Face model may pack several of ours. The rank of its
    adapter is then the sum of our ranks: the A factors are stacked, and the B factors
    form a block-diagonal matrix.
    """
    tensors, ranks = dict[str, Tensor](), dict[str, int]()

    def factor(name: str, which: str) -> Tensor:
        whole = reader.whole(
            reader.tensors[WEIGHT, f"{name}.lora.{which}.weight"]
        )
        return whole.to(DTYPES[dtype]) if dtype else whole

    # In some blocks another layer stands in the place of attention or the MLP.
    end = ".lora.a.weight"
    names = [
        name.removesuffix(end)
        for kind, name in reader.tensors
        if kind == WEIGHT and name.endswith(end)
    ]
    theirs = families.sources(
        data, {f"{name}.weight": 2 for name in names}
    ).values()
    if mixed := {each.name for each in theirs if each.groups}:
        inner = {re.sub(r".*?\.[0-9]+\.", "", name) for name in mixed}
        packed_names = ", ".join(sorted(inner))
        raise CheckpointError(
            f"adapters of {shape.name} cannot be written for peft: {packed_names} pack rows of"
            " several linears, by heads. Export it without --adapter, which merges them."
        )
    linears = block_linears(shape)
    for name, packed in dict.fromkeys(
        (each.name, each.packed) for each in theirs
    ):
        module, *every = (
            each.removesuffix(".weight") for each in (name, *packed)
        )
        # Some of the packed layers may have no adapter.
        own = [each for each in every if each in names]
        rows = {
            each: linears[each.rpartition(".")[2]].shape[0] for each in every
        }
        # A layer without an adapter adds rows but no columns.
        blocks = [
            factor(e, "b") if e in own else torch.zeros(rows[e], 0)
            for e in every
        ]
        b: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
        key = f"base_model.model.{module}"
        tensors[f"{key}.lora_A.weight"] = torch.cat(
            [factor(each, "a") for each in own]
        )
        # In the dtype of A, whatever the empty blocks have.
        tensors[f"{key}.lora_B.weight"] = b.to(tensors[f"{key}.lora_A.weight"])
        # "model.layers.3.self_attn.q_proj" -> "self_attn.q_proj", for all
        # blocks.
        ranks[re.sub(rf"{re.escape(data.layers)}\.[0-9]+\.", "", module)] = (
            len(own)
        )
    # Exceptions to the usual rank, in peft's format: packed layers have the sum of
    # ranks.
    more = {module: n for module, n in ranks.items() if n > 1}
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": shape.lora_r,
        "lora_alpha": shape.lora_alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [*ranks],
        "fan_in_fan_out": data.transposed,
        "inference_mode": True,
        "rank_pattern": {
            module: n * shape.lora_r for module, n in more.items()
        },
        "alpha_pattern": {
            module: n * shape.lora_alpha for module, n in more.items()
        },
    }
    return tensors, config
