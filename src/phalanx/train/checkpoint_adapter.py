"""The adapter of a run with LoRA as peft reads it: `adapter_config.json` and one safetensors file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from torch import Tensor

from ..layout.families import FAMILIES, family_of, sources
from ..layout.files import write_text
from .checkpoint_exchange import begun_with, make_empty
from .checkpoint_format import DTYPES, WEIGHT, CheckpointError, read_manifest, write_file
from .checkpoint_load import TensorReader

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def export_adapter(path: Path, out: Path, *, family: str = "", dtype: str = "") -> list[Path]:
    """Write the factors of a checkpoint's LoRA for `PeftModel.from_pretrained`; the files.

    Where their linear packs several of ours, its adapter has the ranks of all: their `a` one below
    another, their `b` in blocks, each in its own rows.
    """
    manifest = read_manifest(path)
    shape = manifest.shape
    if shape is None or not shape.lora_r:
        raise CheckpointError(f"{path}: its run trained no LoRA; export it without --adapter.")
    data = FAMILIES[family_of(shape, family)]
    tensors, ranks = dict[str, Tensor](), dict[str, int]()
    with TensorReader(path, manifest) as reader:

        def factor(name: str, which: str) -> Tensor:
            stored = reader.tensors[WEIGHT, f"{name}.lora.{which}.weight"]
            whole = reader.whole(stored)
            return whole.to(DTYPES[dtype]) if dtype else whole

        parts = {each: "attn" if each.startswith("w") else "mlp" for each in shape.adapters}
        names = [f"layers.{n}.{parts[a]}.{a}" for n in range(shape.layers) for a in parts]
        linears = sources(data, {f"{name}.weight": 2 for name in names}).values()
        for name, packed in dict.fromkeys((each.name, each.packed) for each in linears):
            module, *every = (each.removesuffix(".weight") for each in (name, *packed))
            own = [each for each in every if each in names]
            rows = [shape.linears[each.rpartition(".")[2]][1] for each in every]
            blocks = [
                factor(each, "b") if each in own else torch.zeros(n, 0)
                for each, n in zip(every, rows, strict=True)
            ]
            b: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
            key = f"base_model.model.{module}"
            tensors[f"{key}.lora_A.weight"] = torch.cat([factor(each, "a") for each in own])
            tensors[f"{key}.lora_B.weight"] = b.to(tensors[f"{key}.lora_A.weight"])
            ranks[re.sub(rf"{re.escape(data.layers)}\.[0-9]+\.", "", module)] = len(own)
    more = {module: n for module, n in ranks.items() if n > 1}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": begun_with(manifest),
        "r": shape.lora_r,
        "lora_alpha": shape.lora_alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [*ranks],
        "fan_in_fan_out": data.transposed,
        "inference_mode": True,
        "rank_pattern": {module: n * shape.lora_r for module, n in more.items()},
        "alpha_pattern": {module: n * shape.lora_alpha for module, n in more.items()},
    }
    make_empty(out)
    write_file(out / WEIGHTS, tensors, {"format": "pt"})
    write_text(out / CONFIG, json.dumps(config, indent=2) + "\n", durable=True)
    return [out / WEIGHTS, out / CONFIG]
