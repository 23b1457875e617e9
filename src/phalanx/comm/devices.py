"""What a process can compute on and send with: the GPUs it sees, the backends torch was built with.

Whatever depends on CUDA when ranks start asks an object of this class, so that a test can pass one
that describes another machine.
"""

import os
from collections.abc import MutableMapping

import torch
import torch.distributed as dist

from ..layout.choices import GLOO, NCCL

# What CUDA, torch's allocator and NCCL read from the environment when they start, and what for.
SETTINGS = {
    # With 8, the default, streams of communicators and copies share queues and wait for each other.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # Buffers of many sizes come and go: segments that grow leave fewer gaps.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    # NCCL's calls are kept, and written down where one does not end.
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
_OTHER_NAMES = {
    "PYTORCH_ALLOC_CONF": "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "TORCH_FR_BUFFER_SIZE",
}


def set_up(environment: MutableMapping[str, str]) -> None:
    """Set what is not set. Before the first thing is done on a GPU."""
    for name, value in SETTINGS.items():
        if _OTHER_NAMES.get(name) not in environment:
            environment.setdefault(name, value)


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Devices:
    """The GPUs and backends of this process."""

    @property
    def gpus(self) -> int:
        """How many GPUs this process sees."""
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def identity(self, index: int) -> str:
        """A name of one GPU that is the same for every process that sees it."""
        return str(torch.cuda.get_device_properties(index).uuid)

    def has(self, backend: str) -> bool:
        """Whether this build of torch has a backend of that name."""
        if not dist.is_available():
            return False
        return {NCCL: dist.is_nccl_available, GLOO: dist.is_gloo_available}[backend]()

    def index(self, local: int) -> int | None:
        """The GPU of the rank that is number `local` on its host, None if there is none for it.

        Slurm's `--gpus-per-task=1` shows each rank one GPU, its own, which is number 0 for all.
        """
        if self.gpus == 1:
            return 0
        return local if local < self.gpus else None
