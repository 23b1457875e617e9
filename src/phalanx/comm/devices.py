"""The devices and backends of a process: GPUs it sees, backends torch was built with.

Everything that depends on CUDA at start-up asks an object of this class, so a test can
pass one that describes another machine.
"""

import os
import sys

import torch
import torch.distributed as dist

from ..layout.choices import GLOO, NCCL


def cores() -> int:
    """The number of cores this process may use."""
    # The affinity mask, as a container or Slurm may give fewer cores than there are.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def name_unused(devices: "Devices") -> None:
    """Print one line if this machine has an accelerator that phalanx cannot use."""
    if kind := devices.unused:
        text = f"torch sees a device of kind {kind!r}; phalanx computes on NVIDIA and AMD GPUs only"
        print(f"{text}, so this run uses the CPU", file=sys.stderr)


class Devices:
    """The GPUs and backends of this process."""

    @property
    def gpus(self) -> int:
        """The number of GPUs this process sees."""
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def identity(self, index: int) -> str:
        """The name of a GPU, equal for every process that sees it.

        Parts of one GPU (MIG) are distinguished by the names that made them visible:
        the driver returns the unique id of the whole GPU for each.
        """
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        # "MIG-<id>" as CUDA_VISIBLE_DEVICES lists it.
        if index < len(visible) and visible[index].startswith("MIG-"):
            return visible[index]
        return str(torch.cuda.get_device_properties(index).uuid)

    @property
    def unused(self) -> str:
        """The accelerator that only torch supports, such as "mps", or ""."""
        # ROCm's devices are of type cuda as well.
        found = torch.accelerator.current_accelerator()
        return "" if found is None or found.type == "cuda" else found.type

    def has(self, backend: str) -> bool:
        """True if this build of torch has the named backend."""
        if not dist.is_available():
            return False
        return {NCCL: dist.is_nccl_available, GLOO: dist.is_gloo_available}[
            backend
        ]()

    def index(self, local: int) -> int | None:
        """The GPU for the rank with number `local` on its host, or None.

        Slurm's `--gpus-per-task=1` shows each rank only its own GPU, as number 0.
        """
        # One visible GPU is this rank's, whatever its number on the host.
        if self.gpus == 1:
            return 0
        return local if local < self.gpus else None
