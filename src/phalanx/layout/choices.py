"""The words that flags and settings take, known before torch is loaded."""

from __future__ import annotations

__all__ = [
    "DEVICES", "DTYPES", "FAMILIES", "LOCAL_RANKS", "OPTIMIZERS", "PRODUCTS", "STORED", "BACKENDS",
]  # fmt: skip

BACKENDS = ("auto", "threads", "shm", "gloo", "nccl")  # what carries messages
LOCAL_RANKS = 256  # that one command starts on this machine
DEVICES = ("auto", "cpu", "cuda")
# Precisions in which matrix products are measured, and the dtypes of their tensors.
PRODUCTS = {
    "bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "tf32": "float32", "fp64": "float64",
}  # fmt: skip
# Torch's dtypes in which layouts are compared, and what a layout calls them.
DTYPES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
OPTIMIZERS = ("adamw", "sgd")
# Models of Hugging Face that are read and written, and what they are called there.
FAMILIES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
}  # fmt: skip
# What numbers in a checkpoint may be, as safetensors calls torch's dtypes.
STORED = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
