"""`phalanx train`: a run file, on one process, on local ranks, or as a rank of torchrun or Slurm."""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from ..layout import Layout, LayoutError, Shape
from ..layout.choices import BACKENDS
from ..layout.run import Run, RunError, misfits, run_schema
from ..plan import Machine
from .before import refuse_before
from .usage import Parser, UsageError, complain, print_json, report, say

if TYPE_CHECKING:
    from ..comm.join import Rendezvous
    from ..train.loop import Outcome

__all__ = ["STOPPED", "run"]

STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again later, which is what a scheduler then does
_BEGUN = time.time()  # a STOP file older than this process is not meant for it
_EPILOG = """\
Exit code 0: trained to the end; 1: failed; 2: wrong usage; 75: stopped by SIGTERM, SIGHUP, SIGUSR1 or
a STOP file in the run's folder, saved; the same command goes on from there.

  phalanx train steps=50
  phalanx train run.toml optimizer.lr=1e-3 --ranks 4 --layout "dp2 pp2 zero1 1f1b:4"
  torchrun --nproc-per-node 8 --no-python phalanx train run.toml
  phalanx train run.toml --print-config"""


def run(argv: list[str]) -> int:
    """Train a run file's model."""
    parser = Parser(
        "phalanx train",
        "Trains what a run file says, and goes on from its newest checkpoint if there is one.",
        _EPILOG,
    )
    add = parser.add_argument
    add("args", nargs="*", metavar="RUN.toml key=value", help="a run file, and keys to set in it")
    add("--ranks", type=int, metavar="N", help="local processes; one a GPU, or 2 without any")
    add("--layout", metavar="TEXT", help="the layout, as layout=TEXT does")
    add("--backend", default="auto", choices=BACKENDS, help="what carries messages; default auto")
    add("--print-config", action="store_true", help="print the whole run file and end")
    add("--schema", action="store_true", help="print the run file's JSON Schema and end")
    add("--json", action="store_true", help="only what became of the run, as JSON")
    # Keys may stand between the flags, which argparse calls intermixed.
    args, rest = parser.parse_known_intermixed_args(argv)
    if rest:
        parser.read(rest)
    parser.check(args)
    if args.schema:
        print_json(run_schema())
        return 0
    try:
        wanted, notice = _run_of(args)
        if args.print_config:
            say(wanted, end="")
            return 0
        if args.ranks is not None and args.ranks < 1:
            raise UsageError(f"--ranks {args.ranks}: write 1 or more.")
        _refuse_misfit(wanted, args.ranks)
        refuse_before(wanted)
    except (ValueError, OSError) as error:
        if "RANK" in os.environ or "SLURM_PROCID" in os.environ:
            from ..comm.join import report_failure

            report_failure(f"{type(error).__name__}: {error}")
        raise
    return _train(wanted, args, notice)


def _run_of(args: argparse.Namespace) -> tuple[Run, str]:
    """The run, and a line for the screen where its model is that of its newest checkpoint."""
    files = [word for word in args.args if "=" not in word]
    if len(files) > 1:
        raise UsageError(f"{' and '.join(files)}: name one run file; keys are set by key=value.")
    overrides = [word for word in args.args if "=" in word]
    if args.layout is not None:
        overrides.append(f"layout={args.layout}")
    adopted = list[str]()

    def adopt(plain: Run) -> Run:
        found, text = _adopted(plain)
        adopted.extend(filter(None, [text]))
        return found

    run = Run.load(files[0] if files else "", tuple(overrides), adopt)
    return run, "".join(adopted)


def _adopted(run: Run) -> tuple[Run, str]:
    """A run that names no model goes on with that of its newest checkpoint, trained or imported."""
    if not run.checkpoints.is_dir():
        return run, ""
    from ..train.checkpoint import newest
    from ..train.checkpoint_model import differing_sizes, own_model, table_of

    found = newest(run.checkpoints)
    if found is None:
        return run, ""
    path, manifest = found
    if own := own_model(manifest):
        raise UsageError(
            f"{path} is of the model {own!r}, and the run names none. Write model={own!r}: code is"
            " never run because a checkpoint names it."
        )
    shape = manifest.progress.shape
    if shape is None or not differing_sizes(shape, run.shape):
        return run, ""
    text = f"model: {shape.name!r} with {shape.layers} layers, as {path} has it"
    return replace(run, model=table_of(shape)), text


def _refuse_misfit(wanted: Run, ranks: int | None) -> None:
    """What can be known of machine, ranks and layout before torch is loaded."""
    if wanted.machine:
        Machine.load(wanted.machine)
    layout = wanted.layout_of()
    if layout is not None and ranks not in (None, layout.ranks):
        raise UsageError(
            f"layout {str(layout)!r} is for {layout.ranks} ranks, and --ranks says {ranks}."
            f" Write --ranks {layout.ranks}, or leave it out; or --layout auto."
        )


def _train(wanted: Run, args: argparse.Namespace, notice: str) -> int:
    """Find the ranks and the layout, and train."""
    from ..comm import choose
    from ..comm.join import rendezvous
    from ..comm.launch import used_gpus

    at = rendezvous(os.environ)
    if at is not None:
        return _joined(wanted, args, notice, at)
    ranks = _ranks(wanted, args.ranks)
    gpus = used_gpus(choose(args.backend, ranks), ranks)
    layout = _layout_that_fits(wanted, ranks, gpus, notice, quiet=args.json)
    return _local(wanted, layout, args)


def _joined(wanted: Run, args: argparse.Namespace, notice: str, at: Rendezvous) -> int:
    """One rank of those that a launcher has started."""
    from ..comm import CommError, PeerFailed, RanksDiffer, agreement, join
    from ..train.checkpoint_file import CheckpointError
    from ..train.lock import RunLocked
    from ..train.log import JournalError
    from ..train.loop import TrainError, train

    if args.ranks not in (None, at.size):
        raise UsageError(
            f"the launcher has started {at.size} ranks, and --ranks says {args.ranks}."
        )
    world = join(at.size, backend=args.backend)
    gpus = at.size if world.device.type == "cuda" else 0
    try:
        # What one rank refuses ends the others too, with its words.
        with agreement(world):
            layout = _layout_that_fits(
                wanted, at.size, gpus, notice, quiet=args.json or at.rank > 0
            )
    except Exception as error:
        if isinstance(error, ValueError) or not isinstance(error, CommError):
            world.close()  # all ranks are here
        raise
    try:
        outcome = train(world, wanted, str(layout), quiet=args.json)
    except (RanksDiffer, PeerFailed):
        world.close()
        raise
    except RunLocked as error:
        complain(f"rank {at.rank}: RunLocked: {error}")
        return 2
    except (TrainError, CheckpointError, JournalError) as error:  # for the first two all ranks
        report(f"rank {at.rank}: {type(error).__name__}: {error}")
        return 1
    world.close()
    return _ended(wanted, outcome, args.json and at.rank == 0)


def _layout_that_fits(wanted: Run, ranks: int, gpus: int, notice: str, *, quiet: bool) -> Layout:
    """The run's layout. Whatever can be refused before ranks train is refused here, by each rank of a
    launcher, or once for local ranks."""
    from ..parallel import refuse_unfit
    from ..train.program import maker_of, shape_of
    from ..train.rank import batches_of

    if notice and not quiet:
        report(notice)
    shape = shape_of(wanted)
    _refuse_other_model(wanted, shape)
    layout = _layout(wanted, shape, ranks, gpus, quiet=quiet)
    if layout.ranks != ranks:
        raise UsageError(
            f"layout {str(layout)!r} is for {layout.ranks} ranks; the launcher has started {ranks}."
        )
    batches_of(wanted, shape)
    if wanted.own:
        refuse_unfit(maker_of(wanted)(), layout)
    return layout


def _refuse_other_model(wanted: Run, shape: Shape) -> None:
    """Told before any rank starts; the ranks look again at what they choose to go on from."""
    from ..train.checkpoint import newest, refuse_other
    from ..train.checkpoint_model import Identity
    from ..train.program import maker_of

    if found := newest(wanted.checkpoints):
        refuse_other(*found, Identity.of(maker_of(wanted)(), shape, wanted.own))


def _ranks(wanted: Run, told: int | None) -> int:
    if told is not None:
        return told
    if layout := wanted.layout_of():
        return layout.ranks
    from ..comm.devices import Devices

    return Devices().gpus or 2


def _layout(wanted: Run, shape: Shape, ranks: int, gpus: int, *, quiet: bool) -> Layout:
    """The run's layout; `auto` is planned. Refused here: what the file could not know."""
    named = wanted.layout_of(shape)
    if named:
        found = named
    else:
        from .auto import auto

        found, why = auto(wanted, shape, ranks, gpus)
        found = wanted.divided(found, shape.batch)
        if not quiet:
            report(f"auto: {str(found) or 'one rank'}, {why}")
    if wrong := list(misfits(wanted, shape, found)):
        raise RunError(wanted.own or "run" if named else "layout = auto", wrong)
    return found


def _local(wanted: Run, layout: Layout, args: argparse.Namespace) -> int:
    """Ranks of our own, on this machine."""
    from ..comm import RankFailed, RanksDiffer, launch
    from ..program import ProgramError
    from ..train.checkpoint_file import CheckpointError
    from ..train.data import DataError
    from ..train.lock import hold_run
    from ..train.log import JournalError
    from ..train.loop import STOP, TrainError, remove_stale_stop, train
    from ..train.program import maker_of

    refusals = (
        RanksDiffer,
        TrainError,
        CheckpointError,
        JournalError,
        DataError,
        LayoutError,
        ProgramError,
    )
    ours = tuple(kind.__name__ for kind in refusals)
    with hold_run(Path(wanted.out), wanted.checkpoints), _passed_on(Path(wanted.out, STOP)):
        notice = remove_stale_stop(wanted, _BEGUN)
        if not args.json:
            ranks = "1 rank" if layout.ranks == 1 else f"{layout.ranks} ranks"
            count = sum(weight.numel() for weight in maker_of(wanted)().weights.values())
            report(f"{layout}: {ranks}, {count:,} parameters".removeprefix(": "))
            if notice:
                report(notice)
        words = (wanted, str(layout), args.json, True)
        try:
            outcomes = launch(train, layout.ranks, *words, backend=args.backend)
        except RankFailed as error:
            told = error.reports[0].error
            if f"signal {signal.SIGBUS.value}" in told and (cut := _cut_file(wanted)):
                report(f"rank {error.rank}: {told}: {cut}")
                return 1
            # What the run itself refuses is a sentence; anything else needs its traceback.
            report(told if told.startswith(ours) else error)
            return 1
        except (TrainError, CheckpointError, JournalError, DataError) as error:
            report(f"{type(error).__name__}: {error}")
            return 1
    return _ended(wanted, outcomes[0], args.json)


def _cut_file(wanted: Run) -> str:
    """What kills a process that reads a mapped file: one that was cut. Which, if one of ours was."""
    from ..train.data import DataError
    from ..train.program import shape_of
    from ..train.rank import batches_of

    try:
        batches_of(wanted, shape_of(wanted))
    except DataError as error:
        return str(error)
    return ""


@contextmanager
def _passed_on(file: Path) -> Iterator[None]:
    """What asks this process to stop reaches its ranks as a STOP file; Ctrl-C ends them once.

    Ranks that are forked have these handlers too: until they have their own, and when they have
    failed. They must not write STOP then, which would be for a run that comes after them.
    """
    from ..train.loop import stop_signals

    own = os.getpid()

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() == own:
            file.touch()
        elif number == signal.SIGTERM:  # the launcher ends this rank
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def interrupt(number: int, frame: FrameType | None) -> None:
        if os.getpid() == own:  # a terminal interrupts the ranks too; the launcher ends them
            signal.signal(number, signal.SIG_IGN)
            raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    if main and before != signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupt)
    try:
        with stop_signals(stop):
            yield
    finally:
        if main:
            signal.signal(signal.SIGINT, before)
        file.unlink(missing_ok=True)


def _ended(run: Run, outcome: Outcome, as_json: bool) -> int:
    from ..train.checkpoint import steps

    if as_json:
        from dataclasses import asdict

        print_json(asdict(outcome))
    if outcome.unsaved:
        newest = next((path.name for path in steps(run.checkpoints)), "none")
        complain(
            f"step {outcome.step} could not be saved: {outcome.unsaved} The newest checkpoint is {newest}."
        )
        return 1
    return STOPPED if outcome.stopped else 0
