"""torchrun --nproc-per-node 2 tp_tokens.py FOLDER DTYPE: autograd's gradient norm, and Trainer's under tp."""

import sys

import torch
import transformers
from accelerate.parallelism_config import ParallelismConfig
from transformers.distributed import DistributedConfig

folder, dtype = sys.argv[1], getattr(torch, sys.argv[2])
ParallelismConfig._validate_accelerator = lambda *_: None  # it refuses CPUs
torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
config = transformers.LlamaConfig(hidden_size=64, intermediate_size=48, num_hidden_layers=1)  # fmt: skip
transformers.LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
torch.distributed.barrier()
load = transformers.LlamaForCausalLM.from_pretrained
rows = [{"input_ids": [*range(1, 9)], "labels": [*range(1, 9)]}]
one = load(folder, dtype=dtype)
one(**{k: torch.tensor([v]) for k, v in rows[0].items()}).loss.backward()
norms = [torch.nn.utils.get_total_norm([x.grad for x in one.parameters()]).item()]  # fmt: skip
given = {"max_steps": 1, "use_cpu": True, "logging_steps": 1, "save_strategy": "no"}  # fmt: skip
for across in (True, False):
    args = transformers.TrainingArguments(folder, average_tokens_across_devices=across, **given)  # fmt: skip
    model = load(folder, dtype=dtype, distributed_config=DistributedConfig(tp_size=2))  # fmt: skip
    trainer = transformers.Trainer(model, args, train_dataset=rows)
    trainer.train()
    norms.append(trainer.state.log_history[0]["grad_norm"])
print("\ngradient norms:", *(f"{norm:.4g}" for norm in norms))
