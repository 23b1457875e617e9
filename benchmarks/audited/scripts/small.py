"""A small Llama, rows of tokens and a tokenizer of words, for scripts on other libraries."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

VOCABULARY, ROWS, BATCH, STEPS, MOST = 64, 64, 2, 2, 0.5
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def new_model(*, tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, tie_word_embeddings=tied)
    model = LlamaForCausalLM(config)
    # transformers does not follow torch's default dtype.
    return model.to(torch.get_default_dtype())


def with_lora(model: nn.Module) -> nn.Module:
    """The model with adapters, whose B is not zero, as A would have no gradient."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    targets = ["q_proj", "v_proj", "down_proj"]
    config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    return get_peft_model(model, config)


class Rows(Dataset[Tensor]):
    """Rows of different lengths."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Tensor:
        if index >= ROWS:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(index)
        length = 4 + index * 7 % 12
        return torch.randint(1, VOCABULARY, (length,), generator=generator)


def padded(rows: Sequence[Tensor]) -> dict[str, Tensor]:
    listed = list(rows)
    ones = [torch.ones_like(row) for row in listed]
    return {
        "input_ids": pad_sequence(listed, batch_first=True),
        "attention_mask": pad_sequence(ones, batch_first=True),
        "labels": pad_sequence(listed, batch_first=True, padding_value=-100),
    }


def loader(ranks: int = 1, rank: int = 0) -> DataLoader[Tensor]:
    """Batches in their order, of which ranks take one after another."""
    batches = torch.arange(ROWS).chunk(ROWS // BATCH)
    ours = [batch.tolist() for batch in batches[rank::ranks]]
    return DataLoader(Rows(), batch_sampler=ours, collate_fn=padded)


def words_of(row: Tensor) -> str:
    return " ".join(f"w{token}" for token in row.tolist())


def new_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{token}": token for token in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="w0", eos_token="w2"
    )
