"""trl_lm.py sft|dpo LAYOUT ACCUMULATION FOLDER: trainers of TRL."""

import sys
from typing import Any

from any_device import accept_any_device
from datasets import Dataset
from small import BATCH, MOST, STEPS, Rows, new_model, new_tokenizer, words_of
from torch.utils.data import SequentialSampler
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer


def in_order(trainer: Any) -> Any:
    """The trainer with rows in their order, so that all layouts see the same samples."""
    trainer._get_train_sampler = lambda *_: SequentialSampler(
        trainer.train_dataset
    )
    return trainer


def main(kind: str, layout: str, accumulation: int, folder: str) -> None:
    options: dict[str, Any] = {
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": accumulation,
        "max_steps": STEPS,
        "max_grad_norm": MOST,
        "learning_rate": 1e-3,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
    }
    if layout == "fsdp2":
        accept_any_device()
        options["fsdp"] = "full_shard"
        options["fsdp_config"] = {
            "fsdp_version": 2,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        }
    rows = list(Rows())
    tokenizer, model = new_tokenizer(), new_model()
    if kind == "sft":
        data = Dataset.from_dict({"text": [words_of(row) for row in rows]})
        config = SFTConfig(folder, **options)
        trainer: Any = SFTTrainer(
            model, config, train_dataset=data, processing_class=tokenizer
        )
    else:
        answers = [words_of(row) for row in rows]
        others = [words_of(row.flip(0)) for row in rows]
        columns = {"prompt": ["w3 w4 "] * len(rows)}
        columns |= {"chosen": answers, "rejected": others}
        trainer = DPOTrainer(
            model,
            new_model(),
            args=DPOConfig(folder, **options),
            train_dataset=Dataset.from_dict(columns),
            processing_class=tokenizer,
        )
    in_order(trainer).train()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
