"""Losses and gradient norms of TRL's DPO on the pairs of test_dpo.py, which that test has as numbers.

pip install trl
PYTHONPATH=src:torch-shm/src:rank-watch/src:tests python tests/train/trl_numbers.py
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

from hub_models import saved, theirs
from phalanx.cli import main


def tokens_of_bytes() -> PreTrainedTokenizerFast:
    """A tokenizer for which each character is a token, as TRL's trainer needs one."""
    words = {chr(n) if 32 <= n < 127 else f"<{n}>": n for n in range(256)}
    made = Tokenizer(models.WordLevel(words, unk_token="<0>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # type: ignore[assignment]
    special = {"pad_token": "<0>", "eos_token": "<2>", "unk_token": "<0>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def inputs(batch: list[test_dpo.Pair], collate: Any) -> Any:
    names = {
        "prompt_ids": "prompt",
        "chosen_ids": "chosen",
        "rejected_ids": "rejected",
    }
    rows = [
        {n: list(pair[name].encode()) for n, name in names.items()}
        for pair in batch
    ]
    return collate(rows)


def numbers(start: Path) -> tuple[list[float], list[float]]:
    import trl
    from datasets import Dataset
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    saved(theirs("llama", vocab_size=256), start / "hub")
    (start / "pairs.jsonl").write_text(
        "\n".join(map(json.dumps, test_dpo.pairs()))
    )
    words = ["--out", f"{start}/tokens", "--held-out", "0"]
    assert main(["data", "prepare", f"{start}/pairs.jsonl", *words]) == 0
    policy, reference = (
        theirs("llama", vocab_size=256).double() for _ in range(2)
    )
    plain = {
        "bf16": False,
        "gradient_checkpointing": False,
        "max_length": None,
    }
    terms = trl.DPOConfig(
        str(start), beta=test_dpo.BETA, use_cpu=True, report_to=[], **plain
    )
    trainer = trl.DPOTrainer(
        model=policy,
        ref_model=reference,
        args=terms,
        train_dataset=Dataset.from_list(test_dpo.pairs()),
        processing_class=tokens_of_bytes(),
    )
    model, collate = trainer.model, DataCollatorForPreference(pad_token_id=0)
    optimizer = torch.optim.SGD(model.parameters(), test_dpo.RATE)
    losses, norms = [], []
    for batch in test_dpo.taken(start):
        optimizer.zero_grad()
        loss = trainer.compute_loss(model, inputs(batch, collate))
        loss.backward()
        gradient = torch.cat([x.grad.flatten() for x in model.parameters()])
        losses.append(float(loss.detach()))
        norms.append(float(gradient.norm()))
        optimizer.step()
    return losses, norms


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(*numbers(Path(folder)), sep="\n")
