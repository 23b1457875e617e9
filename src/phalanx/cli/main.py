"""`phalanx VERB ...`: finds the verb, runs it, and turns what goes wrong into a sentence and a code.

0: done. 1: failed (a check that found faults, a run that broke). 2: wrong usage. 130: interrupted.
"""

import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from types import ModuleType

from ..layout.device_environment import set_up
from ..layout.files import reason
from ..layout.output import output_scope
from ..version import VERSION
from .first_process import STOPPED, StoppedEarly, early_requests, leave_first_process
from .usage import OutputError, UsageError, complain, nearest_word, say, silence

# A verb's module stands beside this file and offers run(argv) -> exit code. Nothing is imported
# until its verb is used: most verbs need no torch, and start at once.
VERBS: dict[str, str] = {
    "draw": "a schedule, a layout, a program or a mesh as a picture",
    "check": "whether a layout fits a model and a device; memory of each rank",
    "plan": "the best layouts of a model on a cluster, and why the others lost",
    "cost": "FLOPs, bytes and messages of each piece of a model, on one rank",
    "verify": "layouts against one process: every gradient and every update",
    "train": "a run file, on local ranks or under torchrun; resumes",
    "launch": "a run on Slurm, Kubernetes, Ray, SkyPilot or torchrun",
    "data": "text, JSONL or parquet made into token files",
    "checkpoint": "show, verify, export or import a checkpoint",
    "sample": "text that a trained model writes after a prompt",
    "chat": "a conversation with a model that was trained on chats",
    "report": "one HTML page of a run",
    "top": "a running run in a terminal: step, speed, ranks",
    "bench": "collectives, matrix products, MFU and overlap of this machine",
    "doctor": "what this machine is, and the catalogue of devices and links",
    "demo": "train, kill a rank, resume in another layout, compare and report",
    "lab": "a lecture: every strategy from bare collectives, run and checked",
    "schema": "the JSON Schema of what a command prints with --json",
    "completion": "tab completion for bash, zsh and fish",
}
# Verbs that packages of their own bring: the module, and the folder of this repository to install.
_APART = {"lab": ("phalanx_lab.command", "lab")}
# Their errors are sentences for the user; any other error is a mistake of ours.
_OUR_PACKAGES = ("phalanx", "phalanx_lab", "torch_shm")
_OVERVIEW = """\
phalanx: train one transformer over many devices.

{verbs}

Try:
  phalanx draw 1f1b --stages 4 --microbatches 8
  phalanx draw zb-h2 --costs F=1,I=1,W=1 --repeat 3 --out step.html
  phalanx draw "dp2 pp2 zero3 1f1b:4" --model 124m --costs F=1,B=2,G=0.2,S=0.2
  phalanx draw mesh "dp2 pp2 tp2"
  phalanx check "dp2 pp4 tp2 1f1b:8" --model 8b

Each takes --help, --json, --quiet and -v.
Exit code 0: done, 1: failed, 2: wrong usage."""


def module_of(verb: str) -> ModuleType:
    """Imports the module of a verb."""
    if verb not in _APART:
        return importlib.import_module(f".{verb}", __package__)
    name, folder = _APART[verb]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
        raise UsageError(
            f"phalanx {verb} is a package of its own, which is not installed."
            f" In a clone of phalanx: pip install ./{folder}"
        ) from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; a mistake of the user's never shows a traceback."""
    # Ranks are forked in a twentieth of a second from a process without threads, and numpy would
    # start some the moment it is loaded.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    set_up(os.environ)
    _open_closed()
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] != ["train"]:
        return _answered(words)
    with output_scope():  # how a run has ended is told without blocking, too
        code = _answered(words)
    if argv is None:
        _leave_tools_behind(code)
    return code


def _leave_tools_behind(code: int) -> None:
    """Ends this process at once if a logging tool hangs: what such a tool has registered for the end
    of the process would hang as well."""
    sinks = sys.modules.get("phalanx.train.sinks")
    if sinks is not None and sinks.left_behind():
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _answered(argv: list[str]) -> int:
    """The exit code of a command, after it or its mistake has been told."""
    try:
        code = _run(argv)
        say(end="", flush=True)
    except BrokenPipeError:
        silence()  # who reads us has seen enough (`| head`)
        return 0
    except KeyboardInterrupt:
        # A second one, while files and ranks are closed, would be a traceback.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        complain("phalanx: interrupted.")
        return 130
    except StoppedEarly as stopped:
        complain(
            f"phalanx: stopped by {stopped} before the run began. The same command starts it again."
        )
        return STOPPED
    except OutputError as error:
        silence()
        complain(f"phalanx: cannot write to standard output: {error}.")
        return 1
    except (ValueError, RuntimeError) as error:
        if type(error).__module__.partition(".")[0] not in _OUR_PACKAGES:
            # errors for the user are families of our own; any other is our mistake
            raise
        if isinstance(error, ValueError):
            complain(f"{type(error).__name__}: {error}")
            return getattr(error, "exit_code", 2)
        # A rank that failed, or a collective that gave wrong numbers. What a rank refused is shown
        # without its traceback.
        complain(getattr(error, "refusal", "") or str(error))
        return getattr(error, "exit_code", 1)
    except OSError as error:
        if error.filename is None:
            raise
        complain(f"phalanx: {error.filename}: {reason(error)}.")
        return 2
    return code


def _open_closed() -> None:
    """Standard streams that were closed (`>&-`) are open to nothing: else the first file that is
    opened would get their number, and what is printed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            with suppress(OSError):
                os.fstat(number)
                continue
            # The lowest free number is given.
            setattr(sys, name, open(os.devnull, "r" if number == 0 else "w"))  # noqa: SIM115


def _run(argv: list[str]) -> int:
    verb = argv[0] if argv else "--help"
    if verb in ("-h", "--help", "help"):
        width = max(map(len, VERBS))
        say(
            _OVERVIEW.format(
                verbs="\n".join(f"  {v:{width}}  {VERBS[v]}" for v in VERBS)
            )
        )
        return 0
    if verb == "--version":
        say(f"phalanx {VERSION}")
        return 0
    if verb not in VERBS:
        verb = verb[:60]
        hint = nearest_word(verb, VERBS, 0.4)
        raise UsageError(f"unknown verb {verb!r}.{hint} Verbs are {', '.join(VERBS)}.")
    with early_requests(os.environ) if verb == "train" else nullcontext():
        if verb == "train":
            leave_first_process()
        module = module_of(verb)
        try:
            code: int = module.run(argv[1:])
        except SystemExit as done:  # argparse ends --help so
            return int(done.code or 0)
    return code
