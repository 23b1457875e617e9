"""A difference seen in float64, looked for again in the dtype in which the program trains.

Libraries take other code paths in float64, so a difference there need not exist in the user's runs. Both
programs are recorded once more without `--float64`, with perturbed runs of the reference for the
tolerances.
"""

import hashlib
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from .compare import Verdict
from .launch import LaunchError, Program, record
from .own import Repeated, judged
from .runs import Run, load

# Runs, from which tolerances are measured.
_PERTURBED = 3
# Written last into a folder made here: the digest of the record that it repeats.
_COMPLETE = "complete"


def can_repeat(folders: list[Path]) -> bool:
    """True if all folders were recorded with `--float64` by a command that is known."""
    programs = [Program.read(folder) for folder in folders]
    # A run that was not in float64 has been compared in its own dtype already.
    return all(x is not None and x.settings.float64 for x in programs)


def repeat(
    reference: Path,
    folder: Path,
    exact: Verdict,
    say: Callable[[str], None],
) -> Repeated:
    """Records both programs in their own dtype, into folders beside theirs, and compares these."""
    one = _recorded(reference, 0, say)
    seeds = range(1, _PERTURBED + 1)
    perturbed = [_recorded(reference, seed, say) for seed in seeds]
    run = _recorded(folder, 0, say)
    return judged(exact, one, run, perturbed)


def _recorded(folder: Path, seed: int, say: Callable[[str], None]) -> Run:
    """The record in the own dtype beside a folder; made unless it is there already."""
    program = Program.read(folder)
    if program is None:
        raise LaunchError(
            f"{folder} holds no command, so it cannot be recorded again."
        )
    find_in = program.settings.find_in
    if find_in is not None:
        # Shards are found in the record in the own dtype, which may be none of
        # those compared.
        find_in = _recorded(find_in, 0, say).folder
    out = _own(folder, seed)
    # Another comparison with the same reference uses the record again, if it is
    # whole and belongs to this record in float64.
    complete = out / _COMPLETE
    of_record = _digest(folder)
    if not complete.exists() or complete.read_text() != of_record:
        shutil.rmtree(out, ignore_errors=True)
        say(f"audit: recording {folder} in its own dtype, into {out}")
        say(f"audit: running {shlex.join(program.command)}")
        settings = replace(
            program.settings,
            out=out,
            float64=False,
            perturbed=seed,
            find_in=find_in,
            contents=program.settings.contents and not seed,
        )
        directory = program.directory
        ended, _ = record(
            settings,
            program.command,
            one=program.one,
            # Checks of this record have been reported for the one in float64.
            say=lambda _: None,
            directory=directory,
        )
        if ended:
            raise LaunchError(f"the program of {folder} ended with {ended}")
        complete.write_text(of_record)
    return load(out)


def _own(folder: Path, seed: int = 0) -> Path:
    """The folder of a record in the own dtype: "one-own", and "one-own-1" for a perturbed one."""
    name = f"{folder.resolve().name}-own" + (f"-{seed}" if seed else "")
    return folder.resolve().with_name(name)


def _digest(folder: Path) -> str:
    """A digest of a record's files, which change if the program is recorded again."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()
