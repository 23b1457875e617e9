"""Writer of trl_gradients.jsonl: losses and gradients of TRL's DPO on the pairs of test_dpo.py, in float64.

pip install trl peft
PYTHONPATH=src:torch-shm/src:rank-watch/src:tests python tests/training/trl_numbers.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import test_dpo
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hub_models import in_float64, theirs, widened


def tokens_of_bytes() -> PreTrainedTokenizerFast:
    """A tokenizer for which each character is a token, as TRL's trainer needs one."""
    words = {chr(n) if 32 <= n < 127 else f"<{n}>": n for n in range(256)}
    made = Tokenizer(models.WordLevel(words, unk_token="<0>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # type: ignore[assignment]
    special = {"pad_token": "<0>", "eos_token": "<2>", "unk_token": "<0>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def row(pair: test_dpo.Pair) -> dict[str, list[int]]:
    """A pair as TRL's collator takes it."""
    return {f"{name}_ids": list(text.encode()) for name, text in pair.items()}


def trainer_of(policy: Any, reference: Any, out: Path) -> Any:
    import trl
    from datasets import Dataset

    terms = trl.DPOConfig(
        str(out),
        beta=test_dpo.BETA,
        bf16=False,
        gradient_checkpointing=False,
        max_length=None,
        use_cpu=True,
        report_to=[],
    )
    return trl.DPOTrainer(
        model=policy,
        ref_model=reference,
        args=terms,
        train_dataset=Dataset.from_list(test_dpo.pairs()),
        processing_class=tokens_of_bytes(),
    )


def recorded(start: Path, trainer: Any) -> dict[str, list[Any]]:
    """Trains with SGD; records each step's loss and gradients."""
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    collate = DataCollatorForPreference(pad_token_id=0)
    named = trainer.model.named_parameters()
    trained = {name: x for name, x in named if x.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), test_dpo.RATE)
    found: dict[str, list[Any]] = {name: [] for name in ["loss", *trained]}
    for batch in test_dpo.taken(start):
        optimizer.zero_grad()
        inputs = collate([row(pair) for pair in batch])
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
        found["loss"].append(float(loss.detach()))
        for name, weight in trained.items():
            sums = test_dpo.norm_and_projection(weight.grad)
            found[name].append([float(f"{x:.12g}") for x in sums])
        optimizer.step()
    return found


def main(start: Path) -> None:
    test_dpo.prepare_start(start)
    narrow = theirs("llama", vocab_size=256)
    at_start = test_dpo.weights_at_start(start)
    with widened():
        full = trainer_of(in_float64(narrow), in_float64(narrow), start)
        adapted = test_dpo.with_adapters(in_float64(narrow), at_start)
        # TRL's reference is the model with its adapters turned off
        lora = trainer_of(adapted, None, start)
        kinds = {"full": full, "lora": lora}
        lines = [
            json.dumps([kind, name, steps])
            for kind, trainer in kinds.items()
            for name, steps in recorded(start, trainer).items()
        ]
    test_dpo.TRL.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
