"""`phalanx train`: trains the model of a run file in one process, on local ranks, or as a rank
of torchrun or Slurm. It resumes from the newest checkpoint if there is one.

Exit code 0: trained to the end, or saved and stopped by a file STOP in the run's folder; 1: failed;
2: wrong usage; 75: saved and stopped by SIGTERM, SIGHUP, SIGUSR1 or Ctrl-C. After a stop the same
command resumes the run.

  phalanx train steps=50
  phalanx train run.toml optimizer.lr=1e-3 --layout "dp2 pp2 zero1 1f1b:4"
  torchrun --nproc-per-node 8 --no-python phalanx train run.toml
  phalanx train run.toml hang.timeout=300    # seconds without progress that count as a hang; 0: never
  phalanx train run.toml hang.straggler=1.5  # report ranks slower than their peers by this factor
  phalanx train run.toml --print-config
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from rank_watch.watcher import FILE as HANG

from ..layout import Layout
from ..layout.choices import AUTO, BYTES, PYTHON
from ..layout.codec import schema
from ..layout.environment import (
    EnvironmentMistake,
    Rendezvous,
    launched,
    node_command,
    rendezvous,
)
from ..layout.mesh import RANKS
from ..layout.output import (
    flush_output,
    output_scope,
    put_line,
    settle_output,
    unblock_output,
)
from ..layout.run import Run, RunError
from ..layout.run_checks import misfits
from ..layout.shape import HUB
from ..planner import Machine
from .arguments import hide_secrets, without_secrets
from .before import refuse_before
from .first_process import STOPPED
from .parser import Parser, whole
from .run_words import adopted, load_run
from .train_verify import refuse_different, refuse_unverified
from .usage import UsageError, complain, hush, print_json, progress, say

if TYPE_CHECKING:
    from ..comm import World
    from ..training.loop import Outcome
    from ..training.starts import Starts

_INTERRUPTED = (
    "The step is finished and saved. Ctrl-C again ends the run at once."
)
# A STOP file older than this process is from an earlier run.
_BEGUN = time.time()


def run(argv: list[str]) -> int:
    parser = Parser(__doc__)
    add = parser.add
    add(
        "words",
        nargs="*",
        metavar="RUN.toml key=value",
        help="a run file, and keys to set in it",
    )
    add(
        "--ranks",
        type=whole(1, RANKS),
        help="number of local processes; default: one for each GPU, or 2",
    )
    add(
        "--layout",
        empty=True,
        metavar="TEXT",
        help="the layout, the same as layout=TEXT",
    )
    add(
        "--adopt",
        action="store_true",
        help="resume from a checkpoint with other model settings",
    )
    add(
        "--force",
        action="store_true",
        help="start even if the estimated memory does not suffice",
    )
    add("--backend")
    add(
        "--print-config",
        action="store_true",
        help="print the whole run file and exit",
    )
    add(
        "--schema",
        action="store_true",
        help="print the run file's JSON Schema and exit",
    )
    args = parser.read(argv, intermixed=True)
    if args.schema:
        print_json(schema(Run, "phalanx run file"))
        return 0
    # From here on `ps` shows no secret of a URL.
    hide_secrets(argv)
    try:
        config, notice = _run_of(args)
        if args.print_config:
            say(config, end="")
            return 0
        # A run may have layouts for other numbers of ranks.
        if args.ranks:
            config = config.for_ranks(args.ranks)
        if config.machine:
            Machine.load(config.machine)
        layout = config.layout_of()
        if layout is not None and args.ranks not in (None, layout.ranks):
            raise UsageError(
                f"layout {str(layout)!r} is for {layout.ranks} ranks, but --ranks is {args.ranks}."
                f" Write --ranks {layout.ranks}, or leave it out; or --layout auto."
            )
        # Epochs become steps once the tokens are counted.
        config = _with_steps(_prepared(config))
        refuse_before(config)
    except (ValueError, OSError) as error:
        # Under a launcher the other ranks learn why this one does not come.
        if (
            not isinstance(error, EnvironmentMistake)
            and rendezvous(os.environ) is not None
        ):
            from ..comm.join import report_failure

            report_failure(f"{type(error).__name__}: {error}")
        raise
    # A launcher that starts one process on each node: torchrun starts the
    # ranks.
    if command := node_command(os.environ, layout.ranks if layout else None):
        os.execv(
            command[0],
            [*command, "-m", "phalanx", "train", *without_secrets(argv)],
        )
    with output_scope():
        unblock_output()  # a paused reader of the output must not pause the run
        return _train(config, args, notice)


def _run_of(args: argparse.Namespace) -> tuple[Run, str]:
    """Return the run, and a notice if it takes its model from its newest checkpoint."""
    words = [*args.words]
    if args.layout is not None:
        words.append(f"layout={args.layout}")
    if args.adopt:
        words.append("checkpoint.adopt=true")
    notices: list[str] = []

    def adopt(plain: Run) -> Run:
        run, notice = adopted(plain)
        notices.append(notice)
        return run

    run = load_run(words, adopt)
    return run, "".join(notices)


def _prepared(run: Run) -> Run:
    """Convert text and chats to tokens of the model's own tokenizer, in the run's folder.

    Return the run with these as its data.
    """
    from_hub = any(path.startswith(HUB) for path, _ in run.sources)
    if not run.hub and not from_hub:
        return run
    made = [
        _tokens_of(run, path, n) for n, (path, _) in enumerate(run.sources)
    ]
    # One source keeps no weight.
    if len(made) == 1:
        return replace(run, data=made[0])
    pairs = zip(made, run.sources, strict=True)
    data = tuple(
        f"{path}:{weight}" if weight else path for path, (_, weight) in pairs
    )
    return replace(run, data=data)


def _with_steps(run: Run) -> Run:
    """Return the run with the number of steps in its epochs, from its token count."""
    if not run.epochs:
        return run
    from ..training.rank import counted_steps

    counted = counted_steps(run)
    progress(f"epochs = {run.epochs:g}: {counted.steps:,} steps")
    return counted


def _tokens_of(run: Run, data: str, number: int) -> str:
    """Return the folder with the tokens of a source, after preparing them if missing."""
    from ..training.data.token_files import has_tokens
    from ..training.data.vocabulary import open_vocabulary
    from .data import left_out, prepare_shown

    # Bytes are tokens of a model without a tokenizer.
    if data == PYTHON and not run.hub:
        return data
    if data == PYTHON:
        raise UsageError(
            f"data = {PYTHON!r} is bytes, but model = {run.model!r} has a tokenizer. Name text or chats:"
            " a text, .jsonl or .parquet file, or a folder of these."
        )
    if has_tokens(Path(data)):
        return data
    out = str(Path(run.out, f"tokens-{number}" if number else "tokens"))
    # Ranks of a launcher would all prepare the same files.
    if launched(os.environ) and not has_tokens(Path(out)):
        raise UsageError(
            f"data = {data!r} is text, which one process must prepare before many are started:"
            f" phalanx data prepare {data} --tokenizer {run.hub or 'tokenizer.json'} --out {out}"
        )
    how = run.prepare
    words = open_vocabulary(run.hub_folder if run.hub else None)
    skip = how.on_bad == "skip"
    done = prepare_shown(
        data,
        out,
        words,
        field=how.field,
        share=how.held_out,
        skip=skip,
        workers=0,
    )
    complain(f"{out}: {done.form}{left_out(done)}")
    return out


def _train(config: Run, args: argparse.Namespace, notice: str) -> int:
    """Determine the ranks and the layout, and train."""
    from ..comm import choose
    from ..comm.devices import Devices
    from ..comm.launch import used_gpus

    at = rendezvous(os.environ)
    if at is not None:
        return _joined(config, args, notice, at)
    count = Devices().gpus
    # Fewer GPUs than the first layout needs: a fallback may fit.
    if count and not args.ranks:
        config = config.for_ranks(count, fewer=True)
    named = config.layout_of()
    ranks = args.ranks or (named.ranks if named else count or 2)
    # The backend decides whether ranks compute on GPUs.
    gpus = used_gpus(choose(args.backend, ranks), ranks)
    layout = _layout_that_fits(config, ranks, gpus, notice)
    _say_memory(config, layout, gpus, force=args.force)
    return _local(config, layout, args)


def _joined(
    config: Run, args: argparse.Namespace, notice: str, at: Rendezvous
) -> int:
    """Train as one of the ranks that a launcher has started."""
    from ..comm import CommError, PeerFailed, RanksDiffer, agreement, join
    from ..comm.base import exit_code_of
    from ..comm.pool import be_killed_with_parent
    from ..training.loop import train
    from ..training.watched import call_timeout

    # The launcher has the last word about the number of ranks.
    if args.ranks not in (None, at.size):
        started = f"the launcher has started {at.size} ranks"
        raise UsageError(f"{started}, but --ranks is {args.ranks}.")
    if at.agent:
        # otherwise torchrun's ranks would run on after their agent is killed
        be_killed_with_parent()
    config = config.for_ranks(at.size)
    # One rank prints; all of them log to files.
    if at.rank:
        hush()
    progress(str(at))
    world = join(
        at.size,
        backend=args.backend,
        call_timeout=call_timeout(config),
        interface=config.network.interface,
    )
    gpus = at.size if world.device.type == "cuda" else 0
    try:
        # A refusal on one rank ends the others too, with the same message.
        with agreement(world):
            layout = _layout_that_fits(config, at.size, gpus, notice)
            if not at.rank:
                _verify(config, layout)
            # the number of ranks that share a host's memory is unknown
            if gpus and not at.rank:
                _say_memory(config, layout, gpus, force=args.force)
    # After an error of communication there is nobody to close with.
    except Exception as error:
        if isinstance(error, ValueError) or not isinstance(error, CommError):
            world.close()  # all ranks are here
        raise
    try:
        of_first = _layout_of_first(world, layout)
        if config.layout.strip() == AUTO:
            layout = of_first
        outcome = train(world, config, str(layout), quiet=args.quiet)
    except (RanksDiffer, PeerFailed):
        # All ranks have raised it, so closing is collective and ends.
        world.close()
        raise
    except BaseException as error:
        # The other ranks would wait: end them as well.
        world.abort()
        if not (code := exit_code_of(error)):
            raise
        complain(f"rank {at.rank}: {type(error).__name__}: {error}")
        return code
    world.close()
    return _ended(config, outcome, args.json and at.rank == 0)


def _layout_of_first(world: World, layout: Layout) -> Layout:
    """Return the layout that rank 0 has chosen. Hosts may have other memory or GPUs."""
    from ..comm.agree import exchange

    everyone = world.split("auto", [range(world.size)])
    return Layout.parse(exchange(everyone, str(layout))[0])


def _layout_that_fits(
    config: Run, ranks: int, gpus: int, notice: str
) -> Layout:
    """Return the run's layout, after all checks that are possible before training.

    Each rank of a launcher performs them; for local ranks they are performed once.
    """
    from ..parallel import refuse_mixing, refuse_unfit
    from ..training.checkpoint_load import (
        ModelIdentity,
        newest,
        refuse_optimizer,
        refuse_other,
    )
    from ..training.program import maker_of, shape_of
    from ..training.rank import batches_of
    from ..training.text import refuse_unknown_vocabulary
    from .memory import auto

    if notice:
        progress(notice)
    shape = shape_of(config)
    if (
        any(path == PYTHON for path, _ in config.sources)
        and shape.vocab > BYTES
    ):
        progress(
            f"data: text of Python's library as bytes, {BYTES} of the model's {shape.vocab:,} tokens;"
            " data=PATH selects your own"
        )
    saved = newest(config.checkpoints)
    # Read again by each rank, so a change in between is noticed.
    # The ranks check the checkpoint that they load once more.
    if saved and not config.checkpoint.adopt:
        refuse_other(
            *saved, ModelIdentity.of(maker_of(config)(), shape, config.own)
        )
    if saved:
        refuse_optimizer(*saved, config.optimizer.name)
    named = config.layout_of(shape)
    if named is None:
        layout, why = auto(config, shape, ranks, gpus)
        layout = config.divided(layout, shape.batch)
        progress(f"auto: {str(layout) or 'one rank'}, {why}")
    else:
        layout = named
    # What `legal` cannot know without the model's sizes.
    # Checks that need the sizes of the model.
    if wrong := list(misfits(config, shape, layout)):
        raise RunError(
            config.own or "run" if named else "layout = auto", wrong
        )
    if layout.ranks != ranks:
        raise UsageError(
            f"layout {str(layout)!r} is for {layout.ranks} ranks; the launcher has started {ranks}."
            " Set train.fallback to layouts for other numbers of ranks."
        )
    batches_of(config, shape)
    refuse_unknown_vocabulary(config)
    if config.own:
        own = maker_of(config)()
        refuse_unfit(own, layout)
        if not launched(os.environ):  # otherwise rank 0 tries it
            refuse_mixing(own, layout)
    return layout


def _say_memory(
    config: Run, layout: Layout, gpus: int, *, force: bool
) -> None:
    from ..training.program import shape_of
    from .memory import estimated

    progress(estimated(config, shape_of(config), layout, gpus, force=force))


def _verify(config: Run, layout: Layout) -> None:
    """Compare the run, or a model of the user's own, with one process."""
    if config.verify:
        refuse_different(config, layout)
    else:
        refuse_unverified(config, layout)


def _local(config: Run, layout: Layout, args: argparse.Namespace) -> int:
    """Train on local ranks started by this process."""
    from ..training.lock import hold_run
    from ..training.starts import Starts
    from ..training.stop import STOP, remove_stale_stop

    with (
        # In this order: signals count as soon as the folder is ours.
        hold_run(Path(config.out), config.checkpoints),
        _passed_on(Path(config.out, STOP)),
    ):
        notice = remove_stale_stop(config, _BEGUN)
        _verify(config, layout)
        ranks = "1 rank" if layout.ranks == 1 else f"{layout.ranks} ranks"
        progress(
            f"{layout}: {ranks}, {_parameters(config)}".removeprefix(": ")
        )
        if notice:
            progress(notice)
        with closing(
            Starts(Path(config.out), config.train.restarts)
        ) as starts:
            outcome = _until_it_ends(config, layout, args, starts)
    return 1 if outcome is None else _ended(config, outcome, args.json)


def _parameters(config: Run) -> str:
    """Describe the number of the model's parameters, and of trained ones if some are frozen."""
    from ..parallel.rows import model_pieces
    from ..training.program import maker_of

    model = maker_of(config)()
    count = sum(weight.numel() for weight in model.weights.values())
    trained = sum(
        row.trained_numel for row in model_pieces(model, Layout()).rows
    )
    if trained == count:
        return f"{count:,} parameters"
    return f"{count:,} parameters, {trained:,} ({trained / count:.2%}) trained"


def _until_it_ends(
    config: Run, layout: Layout, args: argparse.Namespace, starts: Starts
) -> Outcome | None:
    """Train, restarting the ranks after a failure up to `train.restarts` times.

    Return None if that did not help. Ranks that fail repeatedly at the same step are not
    restarted.
    """
    from ..comm import RankFailed, launch
    from ..training.checkpoint import steps
    from ..training.checkpoint_memory import newest_in_memory
    from ..training.watched import call_timeout

    restarts = config.train.restarts
    terms = {
        "backend": args.backend,
        "apart": restarts > 0,
        "timeout": call_timeout(config),
    }
    for left in range(restarts, -1, -1):
        # For the watcher's report, which must be newer than this attempt.
        begun = time.time()
        starts.begin()
        # Forked ranks must not inherit a thread's lock.
        try:
            settle_output()  # ranks must be forked from a process without other threads
            outcomes = launch(
                _rank, layout.ranks, config, str(layout), args.quiet, **terms
            )
            first: Outcome = outcomes[0]
            return first
        except RankFailed as error:
            if not error.restart_helps or (error.refusal and not left):
                raise  # an explained refusal
            text = error.reports[0].error
            # A mapped data file became shorter: another start would fail, too.
            if f"signal {signal.SIGBUS.value}" in text and (
                cut := _cut_file(config)
            ):
                complain(f"rank {error.rank}: {text}: {cut}")
                break
            # written if the watcher has ended the ranks; it has printed the reason
            hang = Path(config.out, HANG)
            hung = hang.is_file() and hang.stat().st_mtime >= begun
            report = f"the run hung and was ended; the stacks of all its ranks are in {hang}"
            complain(report if hung else error.refusal or str(error))
            if not left:
                break
        # Failures at one step again and again are not bad luck.
        if why := starts.in_vain():
            complain(f"The ranks are not restarted: {why}.")
            break
        saved = max(
            newest_in_memory(config),
            *(p.name for p in steps(config.checkpoints)),
            "",
        )
        saved = saved or "the beginning"
        complain(
            f"The ranks are restarted from {saved}; restarts left: {left - 1}."
        )
    return None


def _rank(world: World, config: Run, layout: str, quiet: bool) -> Outcome:
    """Run one local rank. Its process may have been forked from this one, or be new."""
    from ..training.loop import train

    with output_scope():
        unblock_output()
        try:
            return train(world, config, layout, quiet, True)
        finally:
            flush_output()


def _cut_file(config: Run) -> str:
    """Name the mapped data file that has become shorter, if any, or return "".

    Reading beyond its end kills a process with SIGBUS.
    """
    from ..training.data.token_files import DataError
    from ..training.program import shape_of
    from ..training.rank import batches_of

    try:
        batches_of(config, shape_of(config))
    except DataError as error:
        return str(error)
    return ""


@contextmanager
def _passed_on(file: Path) -> Iterator[None]:
    """Pass stop signals on to the ranks as a STOP file; a second Ctrl-C ends them at once.

    Forked ranks inherit this handler until they install their own, and after they have
    failed. They must not write STOP then: it would stop a later run.
    """
    from ..training.stop import PassedOn, stop_signals

    own, passed_on = os.getpid(), PassedOn(file)

    def stop(number: int, frame: FrameType | None) -> None:
        # A forked rank: only the command itself writes STOP.
        if os.getpid() != own:
            return
        if not passed_on.ask(number):
            # No file can be created. Ranks that already train handle the signal itself.
            for rank in multiprocessing.active_children():
                rank.terminate()
        if number == signal.SIGINT:
            # The second Ctrl-C ends the run at once.
            signal.signal(number, interrupt)
            put_line(sys.stderr, _INTERRUPTED)

    def interrupt(number: int, frame: FrameType | None) -> None:
        if os.getpid() == own:
            signal.signal(number, signal.SIG_IGN)
            raise KeyboardInterrupt

    try:
        with stop_signals(stop):
            yield
    finally:
        passed_on.close()


def _ended(run: Run, outcome: Outcome, as_json: bool) -> int:
    from ..training.checkpoint import steps
    from ..training.lock import RUN
    from ..training.stop import REMOVED, STOP

    if as_json:
        print_json(asdict(outcome))
    # The run is over, but its last state is not on the disk.
    if outcome.unsaved:
        newest = next((path.name for path in steps(run.checkpoints)), "none")
        complain(
            f"step {outcome.step} could not be saved: {outcome.unsaved} The newest checkpoint is {newest}."
        )
        return 1
    if outcome.not_uploaded:
        why = outcome.not_uploaded.rstrip(".")
        complain(
            f"step {outcome.step} is saved in {run.checkpoints}, but not at"
            f" {run.checkpoint.remote}: {why}. The same command retries the upload."
        )
        return 1
    if outcome.by == REMOVED:
        complain(
            f"{run.out}, or its file {RUN}, was removed or renamed during the run. Step {outcome.step} is"
            f" saved in {run.checkpoints}, and the same command continues from there."
        )
        return 1
    # Launchers restart a command whose exit code is not 0; a STOP file ends the run for good.
    return STOPPED if outcome.stopped and outcome.by != STOP else 0
