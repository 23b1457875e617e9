"""Worlds of processes that record cases, and references recorded in this process."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from audited_cases import folder_of, record_case

HERE = Path(__file__).parent
SOURCE = HERE.parent / "src"


def python_path() -> str:
    inherited = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join(filter(None, [str(SOURCE), str(HERE), inherited]))


def record_worlds(
    folder: Path,
    worlds: Mapping[int, Sequence[str]],
    dtype: str = "float64",
    seed: int = 0,
) -> None:
    """Records cases on so many ranks each."""
    words = [f"{ranks}:{','.join(cases)}" for ranks, cases in worlds.items()]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": python_path(),
        "AUDITED_SEED": str(seed),
    }
    script = str(HERE / "audited_cases.py")
    done = subprocess.run(
        [sys.executable, script, str(folder), dtype, *words],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]


def record_here(
    folder: Path,
    case: str,
    dtype: torch.dtype = torch.float64,
    perturbed: int = 0,
) -> Path:
    """A reference, recorded in this process."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        record_case(folder, case, perturbed=perturbed)
    finally:
        torch.set_default_dtype(before)
    return folder_of(folder, case)
