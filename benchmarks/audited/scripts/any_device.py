"""Lets accelerate shard a model on CPUs, where it refuses to, or trains whole copies and says nothing.

What it does with a model behind these checks is the same code for all devices.
"""

from types import SimpleNamespace

import accelerate.state
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DistributedType


def accept_any_device() -> None:
    kinds = {kind.name: kind for kind in DistributedType}
    # A plugin for FSDP counts for a list of devices, in which CPUs take the place of another.
    kinds["MULTI_NEURON"] = DistributedType.MULTI_CPU
    accelerate.state.DistributedType = SimpleNamespace(**kinds)
    ParallelismConfig._validate_accelerator = lambda *_: None
