"""Starts a program under the recorder, and prints the checks of each step while the program runs."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .checks import Finding, check_step, first_of_each
from .contents import Contents
from .records import SUFFIX, RecordError, read
from .report import finding_text
from .runs import Step, load
from .start import Settings

_PROGRAM = "program.json"
# Variables by which a launcher tells a process that it is one of many.
_DISTRIBUTED = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


class LaunchError(ValueError):
    """A program that cannot be recorded as asked."""


@dataclass(frozen=True)
class Program:
    """A recorded program's command, kept beside its record so that it can be recorded again."""

    command: list[str]
    directory: str  # in which it was started
    one: bool
    settings: Settings

    def write(self) -> None:
        kept = asdict(self)
        find_in = self.settings.find_in
        if find_in is not None:
            # Both folders may be moved together.
            beside = os.path.relpath(find_in, self.settings.out)
            kept["settings"]["find_in"] = beside
        # Paths are written as text.
        text = json.dumps(kept, indent=1, default=str)
        (self.settings.out / _PROGRAM).write_text(text)

    @classmethod
    def read(cls, folder: Path) -> "Program | None":
        """The program behind a record, or None if the record was not made by `audit run`."""
        path = folder / _PROGRAM
        if not path.exists():
            return None
        try:
            kept = json.loads(path.read_text())
            # The folder may have been moved since.
            out = kept["settings"]["out"] = folder.resolve()
            find_in = kept["settings"]["find_in"]
            beside = (out / find_in).resolve() if find_in else None
            kept["settings"]["find_in"] = beside
            kept["settings"] = Settings(**kept["settings"])
            return cls(**kept)
        except (ValueError, KeyError, TypeError) as error:
            raise RecordError(
                f"{path} is not a program's command: {error}"
            ) from None


def record(
    settings: Settings,
    command: Sequence[str],
    *,
    one: bool = False,
    say: Callable[[str], None] = print,
    directory: str | None = None,
) -> tuple[int, list[Finding]]:
    """Runs a command with the recorder in all of its processes; its exit code, and what the checks saw.

    The checks run in this process, from the files that the ranks write. With `one` the program must be
    a single process.
    """
    _check_options(settings, one=one)
    out = settings.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    # Old files would be taken for ranks of this run.
    if list(out.glob(f"*{SUFFIX}")):
        raise LaunchError(
            f"{out} holds a recorded run already. Name a new folder."
        )
    settings = replace(settings, out=out)
    if settings.find_in is not None:
        find_in = settings.find_in.resolve()
        # Before the program starts: each of its ranks would fail alike.
        Contents.read(find_in)
        settings = replace(settings, find_in=find_in)
    Program(list(command), directory or os.getcwd(), one, settings).write()
    environment = settings.environment(os.environ)
    if one:
        # A shell inside torchrun would hand its variables on.
        for name in _DISTRIBUTED:
            environment.pop(name, None)
    try:
        process = subprocess.Popen(
            list(command), env=environment, cwd=directory
        )
    except OSError as error:
        raise LaunchError(f"{command[0]} cannot be started: {error}") from None
    live = LiveChecks(out, say)
    try:
        while process.poll() is None:
            live.look()
            time.sleep(0.2)
    except KeyboardInterrupt:
        # The program ends by itself, and its last steps are still checked.
        process.send_signal(signal.SIGINT)
        process.wait()
    # The last step has no later one that shows it to be complete.
    live.look(ended=True)
    code = process.returncode
    if not live.seen:
        raise LaunchError(
            f"the command ended with code {code}, and no optimizer made a step in it that was recorded."
            " The recorder needs processes that inherit the environment and run no `python -I` or -E."
        )
    run = load(out)
    if one and run.world > 1:
        raise LaunchError(
            f"--one records a single process; the program had {run.world} ranks."
        )
    return code, live.findings


def _check_options(settings: Settings, *, one: bool) -> None:
    """Refuses options that exclude each other."""
    if settings.perturbed and settings.find_in is not None:
        raise LaunchError(
            "--perturb moves the weights, so that --find-in finds none of them."
            " Perturb the reference instead, without --find-in."
        )
    if settings.contents and not one:
        raise LaunchError(
            "--contents writes the weights of a reference, which is a single process: give --one as well."
        )


class LiveChecks:
    """The checks of a run that goes on: each step is checked once all ranks have come to the next."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder, self.say = folder, say
        self.findings: list[Finding] = []
        self.seen = 0  # steps that were checked
        self._next = 0
        self._before: Step | None = None
        self._reported: list[Finding] = []

    def look(self, *, ended: bool = False) -> None:
        while self._check(ended):
            self._next += 1

    def _check(self, ended: bool) -> bool:
        paths = self._paths(self._next)
        # The first file tells how many files a step must have.
        if not paths:
            return False
        world = read(paths[0]).world
        later = len(self._paths(self._next + 1))
        # A rank that has begun the next step has written all of this one.
        if len(paths) < world or (later < world and not ended):
            return False
        records = {record.rank: record for record in map(read, paths)}
        refused = [x.refused for x in records.values() if x.refused]
        if refused:
            raise RecordError(refused[0])
        step = Step(records)
        found = check_step(self._next, step, self._before)
        self._before = step
        self.seen += 1
        self.findings += found
        for finding in first_of_each(self.findings):
            # A finding is reported once, at the first step that shows it.
            if finding not in self._reported:
                self._reported.append(finding)
                self.say(f"audit: {finding_text(finding)}")
        return True

    def _paths(self, step: int) -> list[Path]:
        return sorted(self.folder.glob(f"rank*-step{step:04}{SUFFIX}"))


def say_at_once(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
