"""deepspeed_lm.py STAGE ACCUMULATION: a DeepSpeed engine with a client optimizer."""

import sys

import deepspeed
import torch
from small import BATCH, MOST, STEPS, loader, new_model
from torch import distributed


def main(stage: int, accumulation: int) -> None:
    deepspeed.init_distributed("gloo")
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": MOST,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        },
    )
    rows = loader(distributed.get_world_size(), distributed.get_rank())
    for index, batch in enumerate(rows):
        if index == STEPS * accumulation:
            break
        engine.backward(engine(**batch).loss)
        engine.step()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
