"""What a process can compute on and send with: the GPUs it sees, the backends torch was built with.

Whatever depends on CUDA when ranks start asks an object of this class, so that a test can pass one
that describes another machine.
"""

import torch
import torch.distributed as dist

from ..layout.choices import GLOO, NCCL


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
