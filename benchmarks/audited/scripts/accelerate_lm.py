"""accelerate_lm.py LAYOUT ACCUMULATION: a loop of one's own with accelerate."""

import sys
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import GradientAccumulationPlugin
from any_device import accept_any_device
from small import BATCH, MOST, STEPS, Rows, new_model, padded
from torch.utils.data import DataLoader


def main(layout: str, accumulation: int) -> None:
    options: dict[str, Any] = {}
    if layout not in ("one", "ddp"):
        accept_any_device()
    if layout == "cp":  # which shards weights over the same ranks
        options["parallelism_config"] = ParallelismConfig(cp_size=2)
    if layout in ("fsdp2", "cp"):
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=accumulation, sync_with_dataloader=False
        ),
        **options,
    )
    model = new_model()
    rows = DataLoader(Rows(), BATCH, collate_fn=padded)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, rows = accelerator.prepare(model, optimizer, rows)
    steps = 0
    for batch in rows:
        parts = [batch["input_ids"], batch["labels"]]
        with (
            accelerator.maybe_context_parallel(
                buffers=parts, buffer_seq_dims=[1, 1]
            ),
            accelerator.accumulate(model),
        ):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), MOST)
                steps += 1
            optimizer.step()
            optimizer.zero_grad()
        if steps == STEPS:
            break
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
