"""The wheels of all packages, each installed into a new environment, and what the README says to install."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tomllib
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


# Each package, with those of this repository that it needs, and a command that shows it at work.
PACKAGES = {
    "rank-watch": ((), "import rank_watch"),
    "torch-shm": ((), "import torch_shm"),
    "torch-audit": ((), "import torch_audit"),
    "phalanx": (
        ("torch-shm", "rank-watch", "torch-audit"),
        "import phalanx; phalanx.check('dp2 pp2 1f1b:2', 'tiny')",
    ),
    "phalanx-lab": (
        ("phalanx", "torch-shm", "rank-watch", "torch-audit"),
        "import phalanx_lab",
    ),
}  # fmt: skip
FOLDERS = {"phalanx": ".", "phalanx-lab": "lab"}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel of each package."""
    folder = tmp_path_factory.mktemp("wheels")
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps")
    for name in PACKAGES:
        tree = ROOT / FOLDERS.get(name, name)
        _run(*pip, "--no-build-isolation", "-w", folder, tree, folder=folder)
    names = {name: name.replace("-", "_") for name in PACKAGES}
    return {
        name: next(folder.glob(f"{stem}-[0-9]*.whl"))
        for name, stem in names.items()
    }


def _environment(folder: Path, *, lent: bool) -> Path:
    """Return the Python of a new environment; `lent`: other projects' packages are those of this one."""
    _run(sys.executable, "-m", "venv", folder, folder=folder.parent)
    python = folder / "bin" / "python"
    purelib = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    packages = Path(_run(python, "-c", purelib, folder=folder).strip())
    if lent:
        # torch wants a newer setuptools than a new environment has: the lent one.
        remove = (python, "-m", "pip", "uninstall", "-q", "-y", "setuptools")
        _run(*remove, folder=folder.parent)
        here = sysconfig.get_paths()["purelib"]
        (packages / "lent.pth").write_text(here + "\n")
    return python


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_is_installed_into_a_new_environment_with_what_it_requires(
    name: str, wheels: dict[str, Path], tmp_path: Path
) -> None:
    needed, code = PACKAGES[name]
    # rank-watch requires nothing, so nothing is lent to it.
    python = _environment(tmp_path / "new", lent=name != "rank-watch")
    files = [wheels[each] for each in (name, *needed)]
    # Without an index, a requirement that is missing or has another version ends this.
    _run(python, "-m", "pip", "install", "--no-index", *files, folder=tmp_path)
    module = name.replace("-", "_")
    where = f"{code}; import {module}; print({module}.__file__)"
    printed = _run(python, "-c", where, folder=tmp_path).splitlines()[-1]
    assert Path(printed).is_relative_to(tmp_path / "new")


@pytest.mark.slow
def test_a_wheel_in_a_new_environment_draws_plans_verifies_and_shows_the_lab(
    wheels: dict[str, Path], tmp_path: Path
) -> None:
    python = _environment(tmp_path / "new", lent=True)
    install = (python, "-m", "pip", "install", "--no-deps")
    _run(*install, *wheels.values(), folder=tmp_path)
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


@pytest.mark.parametrize("page", ["README.md", "lab/README.md"])
def test_an_installation_names_every_package_that_is_needed(page: str) -> None:
    text = (ROOT / page).read_text()
    commands = re.findall(r"pip install ([^`#\n]*\./[^`#\n]*)", text)
    assert commands
    packages = {FOLDERS.get(name, name): name for name in PACKAGES}
    for command in commands:
        folders = re.findall(r"\./([\w-]+)|(?<=[ '])(\.)(?=[ \['])", command)
        named = {packages[folder or dot] for folder, dot in folders}
        for name in named:
            assert {*PACKAGES[name][0]} <= named, command


def test_the_readme_installs_folders_and_extras_that_exist() -> None:
    lines = re.findall(
        r"pip install ([^`]*\./[^`]*)`", (ROOT / "README.md").read_text()
    )
    assert lines
    for word in " ".join(lines).split():
        folder, _, extras = word.strip("'").partition("[")
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())
        known = project["project"].get("optional-dependencies", {})
        assert set(filter(None, extras.rstrip("]").split(","))) <= set(known)
