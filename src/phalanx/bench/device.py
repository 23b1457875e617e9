"""Describes this machine before anything is measured: devices, memory, cores, torch's abilities."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ..layout.choices import DEVICES, GLOO, NCCL, PRECISIONS, TF32
from ..layout.choices import DTYPES as TRAITS
from ..layout.host import available_memory, machine_memory
from ..plan import Device, MachineError, device_named

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, TRAITS[name].torch) for name in PRECISIONS
}


@dataclass(frozen=True)
class LocalDevice:
    """The device that benches run on, and what surrounds it."""

    name: str  # what the driver or the system calls it
    kind: str  # "cpu" or "cuda"
    count: int
    cores: int
    memory: int  # bytes of one device
    free: int
    entry: Device | None  # None: the catalogue does not know it
    backends: tuple[str, ...]

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if self.kind == "cuda" else torch.device("cpu")

    def peak(self, dtype: str) -> float:
        """FLOP/s by its maker's word; 0 for a device that is unknown."""
        return self.entry.peak(dtype) if self.entry else 0.0

    def known(self) -> str:
        """Says in a sentence if the catalogue knows the device."""
        if self.entry is None:
            return f"{self.name} is unknown to the catalogue: its peak is what is measured here, not a guess."
        return f"{self.name} is {self.entry.name} in the catalogue."


def local_device(kind: str = "auto") -> LocalDevice:
    """This machine's devices of a kind; `auto` takes GPUs where there are any."""
    cuda = torch.cuda.is_available()
    if kind not in DEVICES:
        raise MachineError(
            f"unknown kind of device {kind!r}; use {', '.join(DEVICES)}."
        )
    if kind == "cuda" and not cuda:
        raise MachineError(
            "torch sees no GPU here; leave --device out, or use --device cpu."
        )
    cores = (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count()
    )
    if kind == "cpu" or not cuda:
        kind, name, count = "cpu", _cpu_name(), 1
        total, free = int(machine_memory()), int(available_memory())
    else:
        kind, name, count = (
            "cuda",
            torch.cuda.get_device_name(0),
            torch.cuda.device_count(),
        )
        free, total = torch.cuda.mem_get_info(0)
    usable = (
        b
        for b in (NCCL, GLOO, "mpi")
        if dist.is_available() and dist.is_backend_available(b)
    )
    entry = device_named(name)
    return LocalDevice(name, kind, count, cores or 1, total, free, entry, tuple(usable))


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = [
            line.split(":", 1)[1].strip()
            for line in lines
            if line.startswith("model name")
        ]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine() or "a CPU"


def dtype_of(name: str, kind: str) -> torch.dtype:
    """The dtype of tensors for a precision that people name."""
    if name not in DTYPES:
        raise MachineError(f"unknown precision {name!r}; use {', '.join(DTYPES)}.")
    if name == TF32 and kind != "cuda":
        raise MachineError("tf32 is how GPUs multiply fp32; on a CPU use fp32 or bf16.")
    return DTYPES[name]


@contextmanager
def products_in(dtype: str) -> Iterator[None]:
    """Inside, products of float32 are made in full, or in TF32 where that is asked for."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == TF32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
