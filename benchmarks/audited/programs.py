"""Small training programs on released libraries, each as one process and in a layout."""

import os
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.parallelism_config import ParallelismConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.distributed import DistributedConfig

from .scripts.any_device import accept_any_device

VOCABULARY, LENGTH, BATCH, STEPS = 64, 12, 8, 2
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "attention_dropout": 0.0, "pad_token_id": 0,
}  # fmt: skip
# The configuration class of each model, and what it has beside the sizes.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", {}),
    "Llama, tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "Qwen2": ("Qwen2Config", {}),
    "Qwen3": ("Qwen3Config", {"head_dim": 8}),
    "Gemma3": ("Gemma3TextConfig", {"head_dim": 8, "sliding_window": 8}),
    "Phi3": ("Phi3Config", {}),
    "OLMo2": ("Olmo2Config", {}),
    "Mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "Qwen3-MoE": (
        "Qwen3MoeConfig",
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "Apertus": ("ApertusConfig", {}),
    "HRM-Text": ("HrmTextConfig", {"num_key_value_heads": 4}),
    "DeepSeek-V3": (
        "DeepseekV3Config",
        {
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1,
            "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
            "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
        },
    ),
}  # fmt: skip


def has_experts(name: str) -> bool:
    return any("expert" in key for key in MODELS[name][1])


def new_model(name: str, dtype: torch.dtype, **changes: Any) -> nn.Module:
    config_class, own = MODELS[name]
    config = getattr(transformers, config_class)(**(_SIZES | own | changes))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=dtype
    )
    return use_eager_experts(model).train()


def use_eager_experts(model: nn.Module) -> nn.Module:
    # The grouped matmul of experts takes no float64.
    counts = ("num_experts", "num_local_experts", "n_routed_experts")
    if any(getattr(model.config, count, 0) for count in counts):
        model.set_experts_implementation("eager")
    return model


SAVED: dict[tuple[str, torch.dtype], str] = {}


def save(name: str, dtype: torch.dtype) -> None:
    """Writes a model's files: tensor parallelism of transformers loads them."""
    if (name, dtype) not in SAVED:
        SAVED[name, dtype] = tempfile.mkdtemp()
        new_model(name, dtype).save_pretrained(SAVED[name, dtype])


def batch_of(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=generator)


def train(
    model: nn.Module, microbatches: int, dp: int = 1, dp_rank: int = 0
) -> None:
    """Two steps with the model's own loss, divided by the microbatches as its documentation says."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for step in range(STEPS):
        rows = batch_of(step)
        for micro in range(microbatches):
            part = rows.chunk(dp)[dp_rank].chunk(microbatches)[micro]
            loss = model(input_ids=part, labels=part, use_cache=False).loss
            (loss / microbatches).backward()
        optimizer.step()
        optimizer.zero_grad()


# ---- programs: name, dtype and microbatches are the cell's


def loaded(name: str, dtype: torch.dtype, **options: Any) -> nn.Module:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        SAVED[name, dtype], dtype=dtype, attn_implementation="eager", **options
    )
    return use_eager_experts(model).train()


def one(name: str, dtype: torch.dtype, microbatches: int) -> None:
    train(loaded(name, dtype), microbatches)


def native(
    name: str, dtype: torch.dtype, microbatches: int, **sizes: int
) -> None:
    """transformers' own layouts, by the sizes of a DistributedConfig."""
    config = DistributedConfig(**sizes)
    model = loaded(name, dtype, distributed_config=config)
    # Ranks of a tp group follow each other and see the same rows.
    dp_rank = dist.get_rank() // config.tp_size
    train(model, microbatches, config.dp_size, dp_rank)


def ddp(name: str, dtype: torch.dtype, microbatches: int) -> None:
    model = nn.parallel.DistributedDataParallel(loaded(name, dtype))
    train(model, microbatches, dist.get_world_size(), dist.get_rank())


def fsdp2(name: str, dtype: torch.dtype, microbatches: int) -> None:
    model = loaded(name, dtype)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, microbatches, dist.get_world_size(), dist.get_rank())


def trainer(
    name: str,
    dtype: torch.dtype,
    microbatches: int,
    rows: int,
    layout: str = "",
    sizes: dict[str, int] | None = None,
    alike: bool = False,
    lora: bool = False,
    arguments: dict[str, Any] | None = None,
    rows_in_all: int = STEPS * BATCH,
    **changes: Any,
) -> None:
    """transformers' Trainer with rows of different lengths in each microbatch, and a clip.

    `sizes` are those of a DistributedConfig, by which the model is loaded. With `alike` all rows are one:
    microbatches and ranks that see the same compute the same.
    """
    if layout or sizes is not None:
        accept_any_device()
    if sizes is None:
        model = new_model(name, dtype, **changes)
    else:
        config = DistributedConfig(**sizes)
        model = loaded(name, dtype, distributed_config=config, **changes)
    wrapped = type(model.model.layers[0]).__name__
    if lora:
        model = with_lora(model)
    given = dict(arguments or {})
    if layout in ("FSDP2", "cp"):
        given["fsdp"] = "full_shard"
        given["fsdp_config"] = {
            "fsdp_version": 2,
            "transformer_layer_cls_to_wrap": [wrapped],
        }
    if layout == "cp":
        model.set_attn_implementation("sdpa")
        given["parallelism_config"] = ParallelismConfig(cp_size=2)
    with tempfile.TemporaryDirectory() as folder:
        training = transformers.TrainingArguments(
            folder, per_device_train_batch_size=rows, gradient_accumulation_steps=microbatches,
            max_steps=STEPS, learning_rate=1e-3, lr_scheduler_type="constant", max_grad_norm=0.5,
            report_to="none", save_strategy="no", use_cpu=True, remove_unused_columns=False,
            disable_tqdm=True, **given,
        )  # fmt: skip
        data = [row_of(0 if alike else index) for index in range(rows_in_all)]
        Ordered(
            model, training, train_dataset=data, data_collator=padded
        ).train()


class Ordered(transformers.Trainer):
    """A trainer that takes rows in their order, so that all layouts see the same samples."""

    def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def row_of(index: int) -> Tensor:
    generator = torch.Generator().manual_seed(index)
    length = 4 + index * 7 % LENGTH
    return torch.randint(1, VOCABULARY, (length,), generator=generator)


def padded(rows: list[Tensor]) -> dict[str, Tensor]:
    pad = torch.nn.utils.rnn.pad_sequence
    mask = pad([torch.ones_like(row) for row in rows], batch_first=True)
    labels = pad(rows, batch_first=True, padding_value=-100)
    ids = pad(rows, batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def with_lora(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj", "down_proj"]
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=targets))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in adapted.named_parameters():
        if "lora_" not in name:
            continue
        # All ranks draw the whole adapter. B is not zero, as A would have no gradient.
        shape, dtype = parameter.shape, parameter.dtype
        values = torch.randn(shape, generator=generator, dtype=dtype) / 8
        if isinstance(parameter, DTensor):
            values = distribute_tensor(
                values, parameter.device_mesh, parameter.placements
            )
        with torch.no_grad():
            parameter.copy_(values)
    return adapted


class Sum(nn.Module):
    """A layer whose gradient is plain to see."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(4, 4, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).sum()


def train_sum(model: nn.Module, dtype: torch.dtype, scale: float) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    (scale * model(torch.ones(4, 4, dtype=dtype))).backward()
    optimizer.step()


def halved(dtype: torch.dtype) -> None:
    """The reference of a divide factor of 2: half the loss."""
    train_sum(Sum(dtype), dtype, 0.5)


def divided(dtype: torch.dtype, forced: bool = False) -> None:
    """FSDP2 on a shard mesh of one rank, which is told to divide gradients by 2."""
    model = Sum(dtype)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    model.set_gradient_divide_factor(2.0)
    if forced:
        model.set_force_sum_reduction_for_comms(True)
    train_sum(model, dtype, 1.0)


def environment_of(rank: int, ranks: int) -> Iterator[tuple[str, str]]:
    for name in ("RANK", "LOCAL_RANK"):
        yield name, str(rank)
    yield "WORLD_SIZE", str(ranks)
    yield "LOCAL_WORLD_SIZE", str(ranks)


def enter_world(folder: str, rank: int, ranks: int) -> None:
    os.environ.update(environment_of(rank, ranks))
    store = f"file://{folder}/store-{ranks}-{os.getppid()}"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=ranks
    )
