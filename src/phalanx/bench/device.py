"""This machine before any measurement: devices, memory, cores, and what torch
supports."""

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
from ..planner import Device, MachineError, device_named

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, TRAITS[name].torch) for name in PRECISIONS
}


@dataclass(frozen=True)
class LocalDevice:
    """The device to measure, and its machine."""

    name: str  # as the driver or the system names it
    kind: str  # "cpu" or "cuda"
    count: int
    cores: int
    memory: int  # bytes of one device
    free: int
    entry: Device | None  # None if it is not in the catalogue
    backends: tuple[str, ...]

    @property
    def device(self) -> torch.device:
        return (
            torch.device("cuda", 0)
            if self.kind == "cuda"
            else torch.device("cpu")
        )

    def peak(self, dtype: str) -> float:
        """Return the FLOP/s that its manufacturer states; 0 for an unknown device."""
        return self.entry.peak(dtype) if self.entry else 0.0

    def known(self) -> str:
        """Say in a sentence whether the catalogue has this device."""
        if self.entry is None:
            return f"{self.name} is not in the catalogue: its peak is the measured one, not a guess."
        return f"{self.name} is {self.entry.name} in the catalogue."


def local_device(kind: str = "auto") -> LocalDevice:
    """Return this machine's devices of a kind; `auto` takes GPUs if there are any."""
    cuda = torch.cuda.is_available()
    if kind not in DEVICES:
        raise MachineError(
            f"unknown kind of device {kind!r}; use {', '.join(DEVICES)}."
        )
    if kind == "cuda" and not cuda:
        raise MachineError(
            "torch sees no GPU here; leave --device out, or use --device cpu."
        )
    # Cores that this process may use, not all of the machine's.
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
        # Bytes free now, and in total.
        free, total = torch.cuda.mem_get_info(0)
    usable = (
        b
        for b in (NCCL, GLOO, "mpi")
        if dist.is_available() and dist.is_backend_available(b)
    )
    entry = device_named(name)
    return LocalDevice(
        name, kind, count, cores or 1, total, free, entry, tuple(usable)
    )


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
    return (
        names[0]
        if names
        else platform.processor() or platform.machine() or "a CPU"
    )


def dtype_of(name: str, kind: str) -> torch.dtype:
    """Return the tensor dtype of a precision's name."""
    if name not in DTYPES:
        raise MachineError(
            f"unknown precision {name!r}; use {', '.join(DTYPES)}."
        )
    if name == TF32 and kind != "cuda":
        raise MachineError(
            "tf32 is a GPU format for fp32 matmuls; on a CPU use fp32 or bf16."
        )
    return DTYPES[name]


@contextmanager
def products_in(dtype: str) -> Iterator[None]:
    """Inside, compute float32 matmuls in full precision, or in TF32 if `dtype` says
    so."""
    before = torch.get_float32_matmul_precision()
    # "high" allows TF32 on a GPU; "highest" does not.
    torch.set_float32_matmul_precision("high" if dtype == TF32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
