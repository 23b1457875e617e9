"""deepspeed_lm.py STAGE ACCUMULATION [tied|lora]: a DeepSpeed engine with a client optimizer."""

import os
import sys

import deepspeed
import torch
from small import BATCH, MOST, STEPS, loader, new_model, with_lora
from torch import distributed

# The words of a launcher, for the one process of the reference; port 0 is any free one.
ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}


def main(stage: int, accumulation: int, corner: str = "") -> None:
    if "RANK" not in os.environ:
        # Without them DeepSpeed looks for MPI.
        os.environ |= ALONE
    deepspeed.init_distributed("gloo")
    model = new_model(tied=corner == "tied")
    if corner == "lora":
        model = with_lora(model)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
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
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
