"""The table of adapters: each row's weights in the files of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ..layout.lora import LORA
from .lora import merged_lora, peft_lora


class AdapterFiles(NamedTuple):
    """The form of a saved adapter: merged into a model's weights, or alone for peft."""

    merged: Callable[..., Tensor]
    exported: Callable[..., tuple[dict[str, Tensor], dict[str, Any]]]


ADAPTER_FILES = {LORA.key: AdapterFiles(merged_lora, peft_lora)}
