"""lightning_lm.py STRATEGY RANKS ACCUMULATION: Lightning's Trainer."""

import sys
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from small import MOST, STEPS, loader, new_model
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWS = ("o_proj", "down_proj")
# Data-parallel and tensor-parallel ranks of the strategies.
SIZES = {"fsdp2": (2, 1), "tp": (1, 2)}


class Module(lightning.LightningModule):
    def __init__(self, strategy: str) -> None:
        super().__init__()
        self.model = new_model()
        self.dp, self.tp = SIZES.get(strategy, (1, 1))

    def configure_model(self) -> None:
        if self.tp > 1:
            mesh = self.device_mesh["tensor_parallel"]
            plan: dict[str, Any] = {
                f"*.{name}": ColwiseParallel() for name in COLUMNS
            }
            plan |= {f"*.{name}": RowwiseParallel() for name in ROWS}
            for layer in self.model.model.layers:
                parallelize_module(layer, mesh, plan)
        if self.dp == 1:
            return
        mesh = self.device_mesh["data_parallel"]
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        return self.model(**batch).loss

    def train_dataloader(self) -> Any:
        world, rank = self.trainer.world_size, self.trainer.global_rank
        # Ranks of a tensor-parallel group follow each other, with the same rows.
        return loader(world // self.tp, rank // self.tp)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(strategy: str, ranks: int, accumulation: int) -> None:
    chosen: Any = strategy
    if strategy in SIZES:
        dp, tp = SIZES[strategy]
        chosen = ModelParallelStrategy(
            data_parallel_size=dp, tensor_parallel_size=tp
        )
    # Lightning's own dtype is float32, whatever torch's default is.
    double = torch.get_default_dtype() == torch.float64
    trainer = lightning.Trainer(
        accelerator="cpu", devices=ranks, strategy=chosen, max_steps=STEPS,
        accumulate_grad_batches=accumulation, gradient_clip_val=MOST,
        precision="64-true" if double else "32-true",
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Module(strategy))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
