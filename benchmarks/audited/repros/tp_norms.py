"""torchrun --nproc-per-node 2 tp_norms.py: norms of q_norm's gradient over those of one process."""

import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3Config

folder, torch_dtype = sys.argv[1], getattr(torch, sys.argv[2])
dist.init_process_group("gloo")
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
config = Qwen3Config(**sizes, **heads, num_hidden_layers=1)
AutoModelForCausalLM.from_config(config, dtype=torch_dtype).save_pretrained(folder)  # fmt: skip
dist.barrier()
rows = torch.randint(64, (4, 12))
for microbatches in (1, 2, 4):
    norms = []
    for plan in ({}, {"tp_plan": "auto"}):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch_dtype, **plan)  # fmt: skip
        for part in rows.chunk(
            microbatches
        ):  # plain autograd and accumulation
            (model(input_ids=part, labels=part).loss / microbatches).backward()
        norms.append(model.model.layers[0].self_attn.q_norm.weight.grad.norm().item())  # fmt: skip
    if dist.get_rank() == 0:
        print(f"{microbatches} microbatches: {norms[1] / norms[0]:.3f}")
