"""torchrun --nproc-per-node 2 fused_loading.py FOLDER DTYPE: weights that are not those in the files."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import HrmTextConfig, HrmTextForCausalLM
from transformers.distributed import DistributedConfig

folder, dtype = sys.argv[1], getattr(torch, sys.argv[2])
dist.init_process_group("gloo")
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
config = HrmTextConfig(**sizes, num_attention_heads=4, num_hidden_layers=2)
saved = HrmTextForCausalLM(config).to(dtype)
saved.save_pretrained(folder)
dist.barrier()
load = HrmTextForCausalLM.from_pretrained
for layout in ({}, {"tp_size": 2}, {"fsdp_size": 2}):
    parallel = {"distributed_config": DistributedConfig(**layout)}
    model = load(folder, dtype=dtype, **(parallel if layout else {}))
    wrong = []
    for name, weight in model.named_parameters():
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        wrong += [] if whole.equal(saved.get_parameter(name)) else [name]
    if dist.get_rank() == 0:
        print(f"{layout or 'whole'}: {len(wrong)} wrong weights")
