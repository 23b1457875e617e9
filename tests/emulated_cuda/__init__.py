"""CUDA on a machine without a GPU: `environment(gpus)` is that of processes whose torch has GPUs that
compute on the CPU.

Every line that is written for CUDA then runs, with numbers: kernels are looked up under CUDA's key,
streams and events are made, memory is pinned, NCCL's calls are made over gloo, and host and device do
not mix. What it cannot show is order in time: work is done at once, so a missing wait goes unnoticed.

Such a process imports `sitecustomize.py` of this folder, which changes torch while it is imported.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

HERE = Path(__file__).parent
SOURCE = HERE / "device.cpp"
INCLUDE = Path(torch.__file__).parent / "include"
LIBRARIES = Path(torch.__file__).parent / "lib"


def library() -> Path:
    """The compiled device, which is kept from run to run."""
    text = SOURCE.read_bytes() + f"{torch.__version__}{LIBRARIES}".encode()
    key = hashlib.sha256(text).hexdigest()[:16]
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    made = Path(base, "phalanx", "emulated-cuda", f"{key}.so")
    if made.exists():
        return made
    made.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=made.parent) as folder:
        part = Path(folder, "device.so")
        words = [
            "g++", "-std=c++20", "-O1", "-fPIC", "-shared", "-w", f"-I{INCLUDE}", str(SOURCE),
            "-o", str(part), f"-L{LIBRARIES}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{LIBRARIES}",
        ]  # fmt: skip
        subprocess.run(words, check=True, capture_output=True, text=True)
        part.rename(made)
    return made


def environment(
    gpus: int, given: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The environment of processes that see so many GPUs."""
    path = [
        str(HERE),
        given.get("PYTHONPATH", ""),
        sysconfig.get_paths()["purelib"],
    ]
    return dict(given) | {
        "EMULATED_GPUS": str(gpus),
        "EMULATED_CUDA": str(library()),
        # Only Triton makes kernels for a GPU. The graphs are cut and run all the same.
        "PHALANX_COMPILE_BACKEND": "aot_eager",
        "PYTHONPATH": os.pathsep.join(filter(None, path[:2])),
    }
