"""Judges of one mutation, in a copy of the tree: import and types, `phalanx verify`, the nearest tests.

Each runs as a process of its own with a limit of time and of memory. A run that does not end within its
limit is noticed as a hang; a test only if it ends in less than half of that without the mutation.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from .lines import PACKAGES, ROOT, VERIFY, Recorded, package_of, search_path
from .operators import Mutation

MEMORY = 10 << 30  # bytes that a judge and each of its processes may hold
IMPORTS = "import phalanx.cli.main, phalanx.cli.verify, phalanx.training.loop, phalanx.comm.launch"
MYPY_LIMIT = 900.0
TESTS_LIMIT = 900.0  # seconds of one file of tests


@dataclass(frozen=True)
class Finding:
    """What a judge says: how it noticed the mutation, by which command, and in which words."""

    how: str
    command: str
    said: str = ""


@dataclass(frozen=True)
class Ran:
    """The end of a process; no code if it took too long."""

    code: int | None
    output: str
    seconds: float


@dataclass
class Tree:
    """A copy of the tracked files, in which one file at a time is changed."""

    folder: Path
    # Of the files of tests.
    texts: dict[Path, str] = field(default_factory=dict)

    @property
    def tests(self) -> dict[Path, str]:
        if not self.texts:
            files = sorted(self.folder.rglob("tests/**/test_*.py"))
            self.texts = {
                path.relative_to(self.folder): path.read_text()
                for path in files
            }
        return self.texts

    @contextmanager
    def mutated(self, mutation: Mutation) -> Iterator[None]:
        path = self.folder / mutation.path
        right, stat = path.read_bytes(), path.stat()
        path.write_bytes(mutation.applied(right))
        try:
            yield
        finally:
            path.write_bytes(right)
            # its compiled file stays valid
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    def run(self, command: Sequence[str], limit: float) -> Ran:
        """Runs a command of this tree; what it started is ended with it."""
        environment = os.environ | {
            "PYTHONPATH": search_path(self.folder),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        begun = time.monotonic()
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_limit_memory,
            )  # fmt: skip
            try:
                code: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
            output.seek(0)
            return Ran(code, output.read(), time.monotonic() - begun)


@contextmanager
def copied_tree() -> Iterator[Tree]:
    """A copy of the working tree's tracked files, removed afterwards."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
    )
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        for name in listed.stdout.decode().split("\0"):
            if name and (ROOT / name).is_file():
                target = Path(folder, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target)
        yield Tree(Path(folder))


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a command and the processes of its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# ---- the judges, in their order


def by_import_or_types(tree: Tree) -> Finding | None:
    """The mistake shows before anything runs: at import, or to mypy."""
    ran = tree.run([sys.executable, "-c", IMPORTS], 300.0)
    if ran.code != 0:
        return Finding("import", "import", _last_line(ran.output))
    ran = tree.run(
        [sys.executable, "-m", "mypy", "--no-error-summary"], MYPY_LIMIT
    )
    if ran.code == 1:
        return Finding("types", "mypy", ran.output.partition("\n")[0])
    return None


def by_verify(tree: Tree, case: Recorded) -> Finding | None:
    """What `phalanx verify` says; None if it says that all layouts agree."""
    words = [*VERIFY, *shlex.split(case.command)]
    command = f"phalanx verify {case.command}"
    ran = tree.run(words, 120.0 + 10.0 * case.seconds)
    if ran.code == 0:
        return None
    if ran.code is None:
        return Finding("hung", command, f"not done after {ran.seconds:.0f} s")
    if "Traceback (most recent call last)" in ran.output:
        return Finding("raised", command, _last_line(ran.output))
    failed = _first_failed(ran.output)
    if failed is None:
        return Finding("refused", command, _last_line(ran.output))
    wrong = failed["first_difference"]
    raised = re.match(r"(\w*Error|rank \d+ failed)\b", wrong)
    return Finding(
        "raised" if raised else "differs",
        command,
        f"{failed['layout']}: {wrong}",
    )


def _first_failed(output: str) -> dict[str, str] | None:
    """The first layout that does not agree, in the JSON that verify prints."""
    start = output.find("{")
    try:
        said, _ = json.JSONDecoder().raw_decode(output[max(start, 0) :])
    except ValueError:
        return None
    return next(
        (one for one in said.get("layouts", ()) if not one["passed"]), None
    )


def by_tests(
    tree: Tree, mutation: Mutation, files: Sequence[Path]
) -> Finding | None:
    """What the tests of some files say. One that fails without the mutation, too, says nothing."""
    for path in files:
        some = [str(path), *CHOSEN.get(path.name, ())]
        with tree.mutated(mutation):
            ran = tree.run([*PYTEST, *some], TESTS_LIMIT)
        if ran.code in GREEN:
            continue
        # a hang, if it is done in half of the time without the mutation
        if ran.code is None:
            right = tree.run([*PYTEST, *some], TESTS_LIMIT / 2)
            if right.code in GREEN:
                return Finding(
                    "hung",
                    f"pytest {path}",
                    f"not done after {ran.seconds:.0f} s",
                )
            continue
        failed = re.findall(FAILED, ran.output, re.MULTILINE)
        right = tree.run([*PYTEST, *(failed or some)], TESTS_LIMIT)
        if right.code in GREEN:
            return Finding(
                "failed",
                f"pytest {path}",
                (failed or [_last_line(ran.output)])[0],
            )
    return None


# the name of a test, in which there may be spaces, and its error
FAILED = r"^(?:FAILED|ERROR) (\S+?::.+?|\S+)(?: - .*)?$"
GREEN = (0, 5)  # 5: no test is left, as all of the file are slow ones
PYTEST = (
    sys.executable,
    "-m",
    "pytest",
    "-x",
    "-q",
    "-p",
    "no:cacheprovider",
    "-rfE",
)
# Of these files the tests that are not long runs of `verify` themselves.
CHOSEN = {"test_verify.py": ("-k", "not agree")}


def _last_line(output: str) -> str:
    lines = output.strip().splitlines()
    return lines[-1][:300] if lines else ""


# Packages whose tests say little by their names: all files of their folder are run.
WHOLE = {
    "comm": Path("tests", "comm"),
    "program": Path("tests", "program"),
    "torch_shm": Path("torch-shm", "tests"),
}


def nearest(tree: Tree, mutation: Mutation, most: int) -> list[Path]:
    """The files of tests that are nearest to a function: by its name, its class's, its file's and its
    package's; of some packages all that they have."""
    package = package_of(mutation.path)
    if most and package in WHOLE:
        return [WHOLE[package]]
    inside = Path(mutation.path).relative_to(PACKAGES[package])
    *rooms, module = inside.with_suffix("").parts
    names = [name.strip("_") for name in mutation.function.split(".")]
    names = [name for name in names if len(name) > 4]
    imported = re.compile(rf"\b{package}(\.\w+)*(\.| import .*\b){module}\b")
    scores: dict[Path, int] = {}
    for path, text in tree.tests.items():
        words = path.stem.split("_")
        score = 4 * (module in words) + 3 * sum(
            room in words for room in rooms
        )
        score += 2 * bool(imported.search(text))
        score += 2 * sum(
            bool(re.search(rf"\b_*{re.escape(name)}\b", text))
            for name in names
        )
        score += 3 * (package.replace("_", "-") in path.parts)
        scores[path] = score
    ordered = sorted(
        scores, key=lambda path: (-scores[path], len(tree.tests[path]))
    )
    return [path for path in ordered if scores[path]][:most]
