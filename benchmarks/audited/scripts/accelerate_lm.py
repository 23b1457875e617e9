"""accelerate_lm.py LAYOUT ACCUMULATION: a loop of one's own with accelerate."""

import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import GradientAccumulationPlugin
from small import BATCH, MOST, STEPS, Rows, new_model, padded
from torch.utils.data import DataLoader


def main(layout: str, accumulation: int) -> None:
    plugin = None
    if layout == "fsdp2":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )
    elif layout in ("tp", "cp"):
        from accelerate.parallelism_config import ParallelismConfig

        sizes = {f"{layout}_size": 2}
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes))
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=plugin,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=accumulation, sync_with_dataloader=False
        ),
    )
    model = new_model()
    rows = DataLoader(Rows(), BATCH, collate_fn=padded)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, rows = accelerator.prepare(model, optimizer, rows)
    steps = 0
    for batch in rows:
        with accelerator.accumulate(model):
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
