"""megatron_lm.py RANKS ACCUMULATION: Megatron's GPT model with tensor parallelism, and torch's optimizer."""

import os
import sys
from contextlib import nullcontext

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from torch import distributed

VOCABULARY, LENGTH, BATCH, STEPS = 64, 12, 8, 2
# The words of a launcher, for the one process of the reference; port 0 is any free one.
ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}


def run_on_cpu() -> None:
    """Two replacements by which the model runs on a CPU; its layers are those of a GPU."""
    # Buffers are made on the current device.
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    # Without dropout nothing is drawn from the generators of the devices.
    get_cuda_rng_tracker().fork = lambda *_: nullcontext()


def new_model() -> GPTModel:
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2,
        attention_dropout=0.0, hidden_dropout=0.0, params_dtype=torch.get_default_dtype(),
        use_cpu_initialization=True, gradient_accumulation_fusion=False,
        bias_dropout_fusion=False, masked_softmax_fusion=False, persist_layer_norm=False,
    )  # fmt: skip
    return GPTModel(
        config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=LENGTH,
        share_embeddings_and_output_weights=True, position_embedding_type="learned_absolute",
    )  # fmt: skip


def main(ranks: int, accumulation: int) -> None:
    if "RANK" not in os.environ:
        os.environ |= ALONE
    distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    run_on_cpu()
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    hidden = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
    positions = torch.arange(LENGTH)[None]
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        size = (BATCH, LENGTH + 1)
        rows = torch.randint(VOCABULARY, size, generator=generator)
        for part in rows.chunk(accumulation):
            tokens, labels = part[:, :-1], part[:, 1:].contiguous()
            places = positions.expand(tokens.shape)
            losses = model(tokens, places, hidden, labels=labels)
            (losses.mean() / accumulation).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
