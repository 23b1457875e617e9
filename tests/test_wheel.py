"""A wheel has all that commands need at run time."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _run(*words: object, folder: Path) -> str:
    done = subprocess.run(
        [str(word) for word in words], cwd=folder, capture_output=True, text=True, timeout=600,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_a_wheel_in_a_new_environment_draws_plans_verifies_and_shows_the_lab(
    tmp_path: Path,
) -> None:
    pip = (sys.executable, "-m", "pip")
    trees = tuple(
        ROOT / name
        for name in (".", "torch-shm", "rank-watch", "torch-audit", "lab")
    )
    for tree in trees:
        _run(
            *pip,
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            tmp_path,
            tree,
            folder=tmp_path,
        )
    _run(sys.executable, "-m", "venv", tmp_path / "new", folder=tmp_path)
    python = tmp_path / "new" / "bin" / "python"
    wheels = sorted(tmp_path.glob("*.whl"))
    assert len(wheels) == len(trees)
    _run(python, "-m", "pip", "install", "--no-deps", *wheels, folder=tmp_path)
    # What it depends on is lent from here; its own files are the wheel's.
    purelib = _run(
        python,
        "-c",
        "import sysconfig; print(sysconfig.get_paths()['purelib'])",
        folder=tmp_path,
    )
    lent = Path(purelib.strip()) / "lent.pth"
    lent.write_text(sysconfig.get_paths()["purelib"] + "\n")
    where = _run(
        python,
        "-c",
        "import phalanx; print(phalanx.__file__)",
        folder=tmp_path,
    )
    assert Path(where.strip()).is_relative_to(tmp_path / "new")
    memory = _run(
        python,
        "-c",
        "import torch_shm; print(torch_shm.__file__)",
        folder=tmp_path,
    )
    assert Path(memory.strip()).is_relative_to(tmp_path / "new")
    phalanx = tmp_path / "new" / "bin" / "phalanx"
    assert "bubble" in _run(phalanx, "draw", "1f1b", folder=tmp_path)
    _run(phalanx, "draw", "1f1b", "--out", "step.html", folder=tmp_path)
    _run(phalanx, "schema", "check", folder=tmp_path)
    _run(phalanx, "doctor", "clusters", "h100x64", folder=tmp_path)
    _run(
        phalanx,
        "plan",
        "--model",
        "tiny",
        "--cluster",
        "h100x2",
        folder=tmp_path,
    )
    _run(
        phalanx, "verify", "--layouts", "dp2", "--steps", "1", folder=tmp_path
    )
    _run(
        phalanx,
        "lab",
        "zero-1",
        "--width",
        "16",
        "--html",
        "lab.html",
        folder=tmp_path,
    )
