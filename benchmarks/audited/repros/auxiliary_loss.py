"""python auxiliary_loss.py FOLDER: gradient norms of equal microbatches, which should be that of one."""

import sys

import torch
import transformers

rows = [{"input_ids": list(range(1, 9)), "labels": list(range(1, 9))}] * 64
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
heads = {"num_attention_heads": 4, "num_hidden_layers": 2}
experts = {"num_key_value_heads": 2, "num_local_experts": 4}


def gradient_norm(coefficient: float, microbatches: int) -> float:
    torch.manual_seed(0)
    options = {"output_router_logits": True, "router_aux_loss_coef": coefficient}  # fmt: skip
    config = transformers.MixtralConfig(**sizes, **heads, **experts, **options)
    model = transformers.MixtralForCausalLM(config)
    args = transformers.TrainingArguments(
        sys.argv[1], per_device_train_batch_size=2, max_steps=1, use_cpu=True, report_to="none",
        gradient_accumulation_steps=microbatches, save_strategy="no", logging_steps=1,
    )  # fmt: skip
    trainer = transformers.Trainer(model, args, train_dataset=rows)
    trainer.train()
    return trainer.state.log_history[0]["grad_norm"]


for coefficient in (0.0, 0.1):
    norms = [gradient_norm(coefficient, n) for n in (1, 2, 4)]
    print(f"coefficient {coefficient}: {norms}")
