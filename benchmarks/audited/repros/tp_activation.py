"""torchrun --nproc-per-node 2 tp_activation.py FOLDER DTYPE: gradients of Apertus' activation by rank."""

import sys

import torch
import torch.distributed as dist
from transformers import ApertusConfig, AutoModelForCausalLM

folder, torch_dtype = sys.argv[1], getattr(torch, sys.argv[2])
dist.init_process_group("gloo")
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
config = ApertusConfig(**sizes, num_attention_heads=4, num_hidden_layers=1)
AutoModelForCausalLM.from_config(config, dtype=torch_dtype).save_pretrained(
    folder
)
dist.barrier()
rows = torch.randint(64, (4, 12))
for plan in ({}, {"tp_plan": "auto"}):  # one process, then two ranks
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch_dtype, **plan
    )
    model(input_ids=rows, labels=rows).loss.backward()  # plain autograd
    gradient = model.model.layers[0].mlp.act_fn.alpha_p.grad.float()
    ranks = [torch.empty_like(gradient) for _ in range(2)]
    dist.all_gather(ranks, gradient)
    if dist.get_rank() == 0:
        print("tp 2" if plan else "one", *(f"{x.item():.3e}" for x in ranks))
