"""A backend of torch.distributed for the ranks of one machine: importing this registers `shm`.

import torch_shm
import torch.distributed as dist

dist.init_process_group("shm")
"""

from . import backend
from .calls import CommError, CommMisuse
from .watch import CommTimeout

NAME = backend.NAME

__all__ = ["NAME", "CommError", "CommMisuse", "CommTimeout"]
