"""Environment variables that CUDA, torch's allocator and NCCL read once at their start.

Asking torch for the number of GPUs starts the driver. So they are set before that: by
the command before it imports torch, and by `join` and `workers` before anything else.
"""

from collections.abc import MutableMapping

SETTINGS = {
    # With the default of 8, streams of communicators and copies share queues and wait
    # for each other.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # Buffers of many sizes come and go: growing segments leave fewer gaps.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    # NCCL's last calls are recorded, and written to a file if one does not end.
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    # torch warns that messages of one communicator wait for each other. Every flow of
    # messages has a communicator of its own.
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
}
_OTHER_NAMES = {
    "PYTORCH_ALLOC_CONF": "PYTORCH_CUDA_ALLOC_CONF",
    # The old name, which torch calls deprecated.
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
}


def set_up(environment: MutableMapping[str, str]) -> None:
    """Set the variables that the user has not set."""
    for name, value in SETTINGS.items():
        if _OTHER_NAMES.get(name, name) not in environment:
            environment.setdefault(name, value)
