"""A run that is killed by SIGKILL again and again, and what must hold after each time.

The run is a command of two ranks; whom the signal meets is drawn: one rank, the command, or all.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep

from loop_worlds import losses, records, weights

from phalanx.training.checkpoint import SAVING, steps
from phalanx.training.checkpoint_format import verify_checkpoint

EVERY = 3  # steps between saves
CODE = "import sys; from phalanx.cli.train import run; sys.exit(run(sys.argv[1:]))"
SMALL = [
    "model={layers=2,hidden=32,heads=2,ffn=48,vocab=256}", "batch=4", "sequence=16",
    "optimizer.lr=1e-2", "optimizer.schedule=constant", "validation.batches=0",
]  # fmt: skip


def _wait(what: Callable[[], bool], why: str, seconds: float = 120.0) -> None:
    end = monotonic() + seconds
    while not what():
        assert monotonic() < end, f"in {seconds:g} s {why}"
        sleep(0.0005)


def family(mark: str) -> list[int]:
    """The processes that have this in the environment they began with; of a zombie it is empty."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return sorted(found)


@dataclass
class Campaign:
    """One run, killed and gone on with. `killed_in_save` counts the kills that left a save behind
    which was begun and never became a checkpoint."""

    out: Path
    layout: str
    asynchronous: bool
    seed: int
    restarts: int = 0
    every: int = EVERY
    more: tuple[str, ...] = ()  # words of the command
    killed: int = 0
    killed_in_save: int = 0
    lost: list[int] = field(default_factory=list)
    chosen: int = 0  # what the next start must begin with

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.folder = self.out / "checkpoints"

    @property
    def mark(self) -> str:
        """What the processes of this run, and no others, have in their environment."""
        return f"TMPDIR={self.out}-temporary"

    def python(self) -> list[str]:
        """What starts Python with the words that follow."""
        return [sys.executable]

    def command(self, last: int) -> subprocess.Popen[bytes]:
        words = [
            *SMALL,
            f"out={self.out}",
            f"steps={last}",
            f"layout={self.layout}",
        ]
        words.append(f"checkpoint.async={str(self.asynchronous).lower()}")
        words.append(f"train.restarts={self.restarts}")
        words.append(f"checkpoint.every={self.every}")
        words += self.more
        name, _, folder = self.mark.partition("=")
        Path(folder).mkdir(parents=True, exist_ok=True)
        return subprocess.Popen(
            [*self.python(), "-c", CODE, *words, "--json"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", name: folder},
        )  # fmt: skip

    def kill(self, *, in_save: bool) -> None:
        """Start the run, kill it at a moment that is drawn, and see what it has left."""
        starts, shared, old = self._starts(), _shared(), self._begun()
        process = self.command(1_000_000)
        try:
            if in_save:
                self._until_it_saves(len(starts), old)
            else:
                self._until_some_moment()
            assert process.poll() is None, "it ended by itself"
        finally:
            for victim in self._victims(process.pid):
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
            code = process.wait(timeout=60)
        assert code != 0
        self.killed += 1
        _wait(
            lambda: not family(self.mark), "some processes did not end", 20.0
        )
        # Saves in memory are other runs'.
        new = _shared() - shared
        left = {
            name
            for name in new
            if "phalanx" in name and "phalanx-memory" not in name
        }
        assert not left, f"in shared memory: {left}"
        for step in self._starts()[len(starts) :]:
            assert step == self.chosen, (
                "it did not begin with the newest that was whole"
            )
        self._look(old)

    def restarted(self, kills: int) -> int:
        """Kill ranks of one command, each time after it has saved; it goes on by itself to its end,
        which is the last step."""
        last = 40 * (kills + 1)
        process = self.command(last)
        for starts in range(kills):
            wanted = self._last() + 2 * EVERY
            self._until(starts, wanted)
            os.kill(
                max(set(family(self.mark)) - {process.pid}), signal.SIGKILL
            )
        assert process.wait(timeout=300) == 0
        assert len(self._starts()) == kills + 1
        assert not family(self.mark)
        return last

    def _until(self, starts: int, step: int) -> None:
        _wait(lambda: len(self._starts()) > starts, "it did not start again")
        _wait(lambda: self._last() > step, "no step was made")

    def _until_some_moment(self) -> None:
        """While it starts, or some steps after that."""
        if self.random.random() < 0.2:
            sleep(self.random.uniform(0.0, 2.0))
            return
        wanted = self._last() + self.random.randrange(1, 3 * EVERY)
        _wait(lambda: self._last() >= wanted, "no step was made")
        sleep(self.random.uniform(0.0, 0.02))

    def _until_it_saves(self, starts: int, old: dict[str, int]) -> None:
        skip, seen = self.random.randrange(3), dict[tuple[str, int], None]()
        _wait(lambda: len(self._starts()) > starts, "it did not start")

        def saves() -> bool:
            seen.update(dict.fromkeys(self._begun().items() - old.items()))
            return len(seen) > skip

        _wait(saves, "nothing was saved")
        sleep(self.random.uniform(0.0, 0.003))

    def _victims(self, pid: int) -> list[int]:
        there = family(self.mark)
        return self.random.choice(
            [[pid], there[-2:-1] or [pid], there[-1:] or [pid], there]
        )

    # ---- what must hold

    def _look(self, old: dict[str, int]) -> None:
        """Every folder that looks like a checkpoint is a whole one; what is lost is little."""
        there = steps(self.folder)
        for path in there:
            assert verify_checkpoint(path) == [], path
        whole = {int(path.name.removeprefix("step-")) for path in there}
        begun = {
            int(name.removeprefix(SAVING))
            for name, _ in self._begun().items() - old.items()
        }
        self.killed_in_save += bool(begun - whole)
        self.chosen = max(whole, default=0)
        self.lost.append(self._last() - self.chosen)
        limit = EVERY * (2 if self.asynchronous else 1)
        assert 0 <= self.lost[-1] <= limit, (self.lost, sorted(whole), begun)

    def end(self, more: int = 4) -> int:
        """Go on to an end some steps on. The last step."""
        last = self._last() + more
        assert self.command(last).wait(timeout=120) == 0
        assert self._starts()[-1] == self.chosen
        assert records(self.out, "damaged") == []
        assert not self._begun(), (
            "what was begun and left is removed by the next save"
        )
        return last

    def undisturbed(self, out: Path, last: int) -> None:
        """The same run without a kill gives the same losses and weights to the bit."""
        alone = Campaign(out, self.layout, self.asynchronous, 0)
        alone.out.parent.mkdir(parents=True, exist_ok=True)
        assert alone.command(last).wait(timeout=300) == 0
        assert losses(alone.out) == losses(self.out)
        assert weights(alone.out, last) == weights(self.out, last)

    def _begun(self) -> dict[str, int]:
        """Saves that have begun and are no checkpoints, by name, and when that was."""
        found = {}
        for path in self.folder.glob(f"{SAVING}*"):
            with suppress(FileNotFoundError):
                found[path.name] = path.stat().st_ctime_ns
        return found

    def _starts(self) -> list[int]:
        return [int(r["step"]) for r in records(self.out, "start")]

    def _last(self) -> int:
        """The last step that was told."""
        return max(
            (int(r["step"]) for r in records(self.out, "step")), default=0
        )


def _shared() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
