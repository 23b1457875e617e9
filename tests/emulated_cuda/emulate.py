"""The Python side of CUDA and of NCCL, in a process whose torch has the emulated device."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch

GPUS = int(os.environ.get("EMULATED_GPUS", "1"))
NAME = "NVIDIA H100 80GB HBM3"
MEMORY = 80 << 30
_here = threading.local()


# ---- torch.cuda


def index_of(device: Any = None) -> int:
    if device is None:
        return int(torch.ops.emulated.get_device())
    if isinstance(device, int):
        return device
    found = torch.device(device).index
    return int(torch.ops.emulated.get_device()) if found is None else found


class Stream(torch.Stream):
    def __new__(
        cls, device: Any = None, priority: int = 0, **kwargs: Any
    ) -> Any:
        if kwargs:
            return super().__new__(cls, **kwargs)
        return super().__new__(
            cls, device=torch.device("cuda", index_of(device))
        )

    @property
    def cuda_stream(self) -> int:
        return int(self.stream_id)


def event(
    enable_timing: bool = False,
    blocking: bool = False,
    interprocess: bool = False,
) -> torch.Event:
    return torch.Event("cuda", enable_timing=enable_timing)


@functools.cache
def default_stream(device: Any = None) -> Stream:
    return Stream(stream_id=0, device_index=index_of(device), device_type=1)


def current_stream(device: Any = None) -> Stream:
    chosen: Stream | None = getattr(_here, "stream", None)
    if chosen is not None and chosen.device_index == index_of(device):
        return chosen
    return default_stream(index_of(device))


@contextmanager
def stream(chosen: Stream | None) -> Iterator[None]:
    before = getattr(_here, "stream", None)
    _here.stream = chosen or before
    try:
        yield
    finally:
        _here.stream = before


@contextmanager
def device(chosen: Any) -> Iterator[None]:
    before = index_of()
    torch.ops.emulated.set_device(index_of(chosen))
    try:
        yield
    finally:
        torch.ops.emulated.set_device(before)


def properties(device: Any = None) -> Any:
    index = index_of(device)
    return SimpleNamespace(
        name=NAME, major=9, minor=0, total_memory=MEMORY, multi_processor_count=132,
        uuid=f"00000000-0000-0000-0000-{index:012}", L2_cache_size=50 << 20,
        is_integrated=False, warp_size=32,
    )  # fmt: skip


def held(device: Any = None) -> int:
    return int(torch.ops.emulated.held_bytes(False))


def free_and_whole(device: Any = None) -> tuple[int, int]:
    return MEMORY - held(), MEMORY


CUDA: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "is_bf16_supported": lambda *_, **__: True,
    "_lazy_init": lambda: None,
    "init": lambda: None,
    "device_count": lambda: GPUS,
    "current_device": index_of,
    "set_device": lambda device: torch.ops.emulated.set_device(
        index_of(device)
    ),
    "device": device,
    "synchronize": lambda device=None: None,
    "Stream": Stream,
    "Event": event,
    "current_stream": current_stream,
    "default_stream": default_stream,
    "stream": stream,
    "get_device_name": lambda device=None: NAME,
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_properties": properties,
    "mem_get_info": free_and_whole,
    "memory_allocated": held,
    "memory_reserved": held,
    "max_memory_allocated": lambda device=None: int(
        torch.ops.emulated.held_bytes(True)
    ),
    "max_memory_reserved": lambda device=None: int(
        torch.ops.emulated.held_bytes(True)
    ),
    "reset_peak_memory_stats": lambda device=None: (
        torch.ops.emulated.forget_most()
    ),
    "memory_stats": lambda device=None: {},
    "empty_cache": lambda: None,
    "ipc_collect": lambda: None,
    "manual_seed": lambda seed: None,
    "manual_seed_all": lambda seed: None,
    "get_arch_list": lambda: ["sm_90"],
    "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
    "get_rng_state_all": list,
    "set_rng_state": lambda *_: None,
}


# ---- NCCL, over gloo


def on_host(value: Any) -> Any:
    """Tensors of the device as tensors of the host, over the same memory."""
    if isinstance(value, torch.Tensor) and value.is_cuda:
        with torch.no_grad():
            return torch.ops.emulated.on_host(value.detach())
    if (
        isinstance(value, list | tuple)
        and value
        and isinstance(value[0], torch.Tensor)
    ):
        return type(value)(map(on_host, value))
    return value


def over_gloo(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_ids", None)
        return function(
            *map(on_host, args), **{k: on_host(v) for k, v in kwargs.items()}
        )

    return called


# Some have two names, of which not every release of torch has both.
SENDING = (
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor",
    "all_gather_single", "gather", "scatter", "reduce_scatter", "reduce_scatter_tensor",
    "reduce_scatter_single", "all_to_all", "all_to_all_single", "send", "recv", "isend", "irecv",
    "barrier",
)  # fmt: skip


class Options:
    """In place of ProcessGroupNCCL.Options."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace()


def emulate_nccl() -> None:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    for name in filter(lambda name: hasattr(c10d, name), SENDING):
        changed = over_gloo(getattr(c10d, name))
        setattr(dist, name, changed)
        setattr(c10d, name, changed)
    dist.is_nccl_available = c10d.is_nccl_available = lambda: True
    available = dist.is_backend_available
    dist.is_backend_available = lambda name: name == "nccl" or available(name)
    begin, new, sends = (
        dist.init_process_group,
        dist.new_group,
        dist.batch_isend_irecv,
    )

    def init_process_group(
        backend: str = "nccl", *args: Any, **kwargs: Any
    ) -> None:
        for name in ("device_id", "pg_options"):
            kwargs.pop(name, None)
        begin("gloo" if "nccl" in backend else backend, *args, **kwargs)

    def new_group(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pg_options", None)
        return new(*args, **kwargs)

    def split_group(
        parent_pg: Any = None, split_ranks: Any = None, timeout: Any = None,
        pg_options: Any = None, group_desc: Any = None,
    ) -> Any:  # fmt: skip
        made = [
            new(ranks, timeout, group_desc=group_desc) for ranks in split_ranks
        ]
        own = [
            group
            for group in made
            if group is not dist.GroupMember.NON_GROUP_MEMBER
        ]
        return own[0] if own else None

    def batch_isend_irecv(listed: list[Any]) -> list[Any]:
        for each in listed:
            each.tensor = on_host(each.tensor)
        return sends(listed)

    class ProcessGroupNCCL:
        pass

    ProcessGroupNCCL.Options = Options  # type: ignore[attr-defined]
    for module in (dist, c10d):
        module.init_process_group = init_process_group
        module.new_group = new_group
        module.split_group = split_group
        module.batch_isend_irecv = batch_isend_irecv
        module.ProcessGroupNCCL = ProcessGroupNCCL
    c10d._abort_process_group = lambda *_: None


# ---- products that only CUDA has


def mm_into(a: Any, b: Any, dtype: Any, *, out: Any) -> Any:
    return torch.mm(a.to(dtype), b.to(dtype), out=out)


def addmm_into(
    c: Any,
    a: Any,
    b: Any,
    dtype: Any,
    *,
    beta: Any = 1,
    alpha: Any = 1,
    out: Any,
) -> Any:
    product = torch.mm(a.to(dtype), b.to(dtype))
    return out.copy_(beta * c.to(dtype) + alpha * product)


def emulate() -> None:
    import attention

    for name, value in CUDA.items():
        setattr(torch.cuda, name, value)
    torch.cuda.nvtx.range = lambda *_, **__: nullcontext()
    torch.version.cuda = "12.8"
    torch.backends.cudnn.version = lambda: 91900
    torch.cuda.random.get_rng_state = CUDA["get_rng_state"]
    kernels = torch.library.Library("aten", "IMPL")
    for name, kernel in attention.KERNELS.items():
        kernels.impl(name, kernel, "CUDA")
    kernels.impl("mm.dtype_out", mm_into, "CUDA")
    kernels.impl("addmm.dtype_out", addmm_into, "CUDA")
    sys.modules[__name__]._kernels = kernels  # type: ignore[attr-defined]
    if torch.distributed.is_available():
        emulate_nccl()
