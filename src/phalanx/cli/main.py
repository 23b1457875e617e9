"""`phalanx VERB ...`: finds the verb, runs it, and turns errors into a sentence and an
exit code.

0: done. 1: failed (a check found faults, a run broke). 2: wrong usage. 130:
interrupted.
"""

import gc
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from types import ModuleType

from ..layout.device_environment import set_up
from ..layout.files import reason
from ..layout.output import output_scope
from ..version import VERSION
from .first_process import (
    STOPPED,
    StoppedEarly,
    early_requests,
    leave_first_process,
)
from .usage import (
    OutputError,
    UsageError,
    complain,
    nearest_word,
    say,
    silence,
)

# Each verb is a module beside this file with run(argv) -> exit code. It is imported
# only when its verb is used: most verbs need no torch and start at once.
VERBS: dict[str, str] = {
    "draw": "draw a schedule, a layout, a program or a mesh",
    "check": "check that a layout fits a model and a device; memory of each rank",
    "plan": "find the fastest layouts of a model on a cluster",
    "cost": "show FLOPs, bytes and messages of each piece of a model",
    "verify": "compare layouts with one process: every gradient and every update",
    "audit": "compare any torch program's gradients with one process",
    "train": "train a run file, on local ranks or under torchrun; resumes",
    "launch": "start a run on Slurm, Kubernetes, Ray, SkyPilot or torchrun",
    "data": "make token files from text, JSONL or Parquet",
    "checkpoint": "show, verify, export or import a checkpoint",
    "sample": "generate text with a trained model",
    "chat": "chat with a trained model",
    "eval": "measure a trained model's loss on text, or in tasks of lm-eval",
    "report": "write a run's report as one HTML page",
    "top": "watch a running run in a terminal: step, speed, ranks",
    "bench": "measure collectives, matmuls, MFU and overlap on this machine",
    "doctor": "inspect this machine, and the catalogue of devices and links",
    "demo": "train, kill a rank, resume in another layout, compare and report",
    "lab": "a lecture: every strategy from bare collectives, run and checked",
    "schema": "print the JSON Schema of a command's --json output",
    "completion": "print a tab completion script for bash, zsh or fish",
}
# Verbs of separate packages: the module, and the folder of this repository to install.
_APART = {"lab": ("phalanx_lab.command", "lab")}
# Their ValueErrors and RuntimeErrors are messages for the user; any other error is a
# bug.
_OUR_PACKAGES = ("phalanx", "phalanx_lab", "torch_shm", "torch_audit")
_OVERVIEW = """\
phalanx: train one transformer over many devices.

{verbs}

Try:
  phalanx draw 1f1b --stages 4 --microbatches 8
  phalanx draw zb-h2 --costs F=1,I=1,W=1 --repeat 3 --out step.html
  phalanx draw "dp2 pp2 zero3 1f1b:4" --model 124m --costs F=1,B=2,G=0.2,S=0.2
  phalanx draw mesh "dp2 pp2 tp2"
  phalanx check "dp2 pp4 tp2 1f1b:8" --model 8b

Every command takes --help, --json, --quiet and -v.
Exit code 0: done, 1: failed, 2: wrong usage."""


def module_of(verb: str) -> ModuleType:
    """Import the module of a verb."""
    if verb not in _APART:
        return importlib.import_module(f".{verb}", __package__)
    name, folder = _APART[verb]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
        raise UsageError(
            f"phalanx {verb} is a separate package, which is not installed."
            f" In a clone of phalanx: pip install ./{folder}"
        ) from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. A user's mistake never shows a
    traceback."""
    # Forking ranks takes 50 ms from a process without threads, and numpy would start
    # some as soon as it is loaded.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    set_up(os.environ)
    _open_closed()
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] != ["train"]:
        own_process = argv is None
        keeps = own_process and words[:1] in (["plan"], ["check"])
        with _without_collection() if keeps else nullcontext():
            return _answered(words)
    with output_scope():  # the end of a run is reported without blocking, too
        code = _answered(words)
    if argv is None:
        _leave_tools_behind(code)
    return code


@contextmanager
def _without_collection() -> Iterator[None]:
    """Turn garbage collection off for a command whose process ends with it.

    Programs are millions of tuples without reference cycles. Searching them for cycles,
    during the command and again at exit, took a sixth of a plan's time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()


def _leave_tools_behind(code: int) -> None:
    """End this process at once if a logging tool hangs, since the tool's exit handlers
    would hang too."""
    sinks = sys.modules.get("phalanx.training.sinks")
    if sinks is not None and sinks.left_behind():
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _answered(argv: list[str]) -> int:
    """Run a command, report its errors, and return its exit code."""
    try:
        code = _run(argv)
        say(end="", flush=True)
    except BrokenPipeError:
        silence()  # the reader of the output has stopped (`| head`)
        return 0
    except KeyboardInterrupt:
        # Ranks may be threads of this process: only the main thread can set
        # handlers.
        # A second Ctrl-C while files and ranks are closed would show a traceback.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        complain("phalanx: interrupted.")
        # 128 plus SIGINT's number, as shells report it.
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
            # errors for the user have our own types; any other is a bug
            raise
        if isinstance(error, ValueError):
            complain(f"{type(error).__name__}: {error}")
            # 2 by default: a ValueError is wrong usage unless its class says
            # otherwise.
            return getattr(error, "exit_code", 2)
        # A rank failed, or a collective gave wrong values. A refusal by a rank is shown
        # without its traceback.
        complain(getattr(error, "refusal", "") or str(error))
        return getattr(error, "exit_code", 1)
    except OSError as error:
        # Without a file name it is an error of ours, not of the user's disk.
        if error.filename is None:
            raise
        complain(f"phalanx: {error.filename}: {reason(error)}.")
        return 2
    return code


def _open_closed() -> None:
    """Open closed standard streams (`>&-`) to /dev/null.

    Otherwise the first opened file would get their number, and receive what is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        # Python has None in place of a stream that was closed when it started.
        if getattr(sys, name) is None:
            with suppress(OSError):
                os.fstat(number)
                continue
            # the lowest free number is assigned
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
        raise UsageError(
            f"unknown verb {verb!r}.{hint} Verbs are {', '.join(VERBS)}."
        )
    # From here on a stop signal ends a run that has not begun, with its own
    # exit code.
    with early_requests(os.environ) if verb == "train" else nullcontext():
        if verb == "train":
            leave_first_process()
        module = module_of(verb)
        try:
            code: int = module.run(argv[1:])
        except SystemExit as done:  # argparse ends --help this way
            return int(done.code or 0)
    return code
