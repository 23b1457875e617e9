"""A run on one rank from start to end; `train` shows it in one paragraph.

Every rank calls `train` with the same run. `rank.py` builds the rank, `step.py` makes a
step, and each listener of a step is in a file of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from rank_watch import Positions

from ..comm import World
from ..comm.agree import errors_of
from ..layout import Layout
from ..layout.run import Run, refuse_random_by_name
from ..models.kernels import use_flash_3
from .agreement import agreed_data
from .copy_check import CopyCheck
from .data.token_files import DataError
from .hold import hold_from_first_rank
from .lock import hold_as_rank
from .log import RunLog, rank_log
from .measured_step import MeasuredStep, log_graphs
from .peak import peak_of
from .precision import device_notices
from .program import layout_for
from .rank import Rank, counted_steps, device_memory, keep_freed_memory
from .reference_margins import give_reference
from .resume import RunState, load_or_draw
from .samples import Samples
from .saves import DiskSaves, MemorySaves
from .skipped_steps import SkippedSteps
from .starts import DoneSteps
from .step import CompletedStep, Listener, TrainError, make_step
from .step_lines import StepLines
from .stop import FOR_GOOD, REMOVED, STOP, StopRequests, stop_requests
from .trace import traced
from .uploads import Uploads
from .validation import Validations
from .watched import watched


@dataclass(frozen=True)
class Outcome:
    """The end of a run.

    `stopped`: it ended before its last step, by the signal or STOP file named in `by`.
    `unsaved`: the reason why the last save failed, if the run continues without saves.
    `not_uploaded`: the reason why its newest checkpoint, complete on the disk, is not
    at `checkpoint.remote`.
    """

    step: int
    loss: float | None
    validation: float | None
    stopped: bool
    unsaved: str = ""
    by: str = ""  # the cause of the stop: STOP, SIGTERM, ...
    not_uploaded: str = ""


# Makes a listener for a rank whose weights are loaded; it is called first after each
# step.
Observe = Callable[[Rank, int], Listener]


def train(
    world: World,
    run: Run,
    layout: str = "",
    quiet: bool = False,
    held: bool = False,
    observe: Observe | None = None,
) -> Outcome:
    """Train to the end, or until asked to stop. Collective.

    Without `layout`, the run's layout for the world's number of ranks is used; `auto`
    then means the recipe, since only the command plans. `held`: the process that
    started the ranks has locked the run's folders (`lock.py`); otherwise rank 0 locks
    them. `observe` is called with the rank and its first step before that step;
    `verify` uses it.
    """
    refuse_random_by_name(run)
    # From here on a run has steps, not epochs.
    run = counted_steps(run)
    with (
        # Locks first, so that nothing of another run is touched.
        hold_from_first_rank(world, run, held=held),
        hold_as_rank(Path(run.out), run.checkpoints),
        rank_log(Path(run.out), world.rank, world.size) as own_log,
        watched(world, run) as positions,
    ):
        chosen = (
            Layout.parse(layout) if layout else layout_for(run, world.size)
        )
        own_log.info("layout %s on %s", chosen or "of one rank", world.device)
        keep_freed_memory(world.device)
        # Weights are not drawn yet: a checkpoint may replace them.
        # Builds the program, shards the model and opens the groups.
        rank = Rank(world, run, chosen, drawn=False)
        rank.write_to(positions)
        # From here on signals end the run after its step.
        with stop_requests(
            Path(run.out, STOP), first=world.rank == 0
        ) as requests:
            rank.part.trainer.wants_to_stop = requests
            outcome = _from_start_to_end(
                rank, positions, requests, quiet=quiet, observe=observe
            )
            own_log.info("%s", outcome)
            return outcome


def _from_start_to_end(
    rank: Rank,
    positions: Positions,
    requests: StopRequests,
    *,
    quiet: bool,
    observe: Observe | None,
) -> Outcome:
    """Load or draw the weights, make the steps, save."""
    run = rank.run
    # Before the log is opened: ranks with different data leave the run's folder
    # unchanged.
    with positions.phase(
        "starting", f"reading {rank.batches.name} for its digest"
    ):
        data = agreed_data(rank.part.everyone, rank.batches.corpora)
    first = rank.world.rank == 0
    with (
        closing(RunLog(run, positions, active=first, quiet=quiet)) as log,
        closing(Uploads(rank, log)) as uploads,
        # read by the process that restarts the ranks
        closing(DoneSteps(Path(run.out), opened=first)) as done_steps,
    ):
        state = RunState(rank, data, uploads)
        memory = MemorySaves(rank, log, state.progress)
        with (
            positions.phase("reading a checkpoint", str(run.checkpoints)),
            uploads.claimed(),
        ):
            # Claimed before reading: another run's folder is neither read nor
            # changed.
            start = load_or_draw(state, log, memory.checkpoints)
            give_reference(rank, log, start)
        disk = DiskSaves(rank, log, state.progress, uploads)
        copies = CopyCheck(rank, log, disk, memory, uploads)
        validations = Validations(rank, log)
        measured = MeasuredStep(rank, log, start)
        observers = [observe(rank, start)] if observe else []
        if run.train.audit:
            # Imported here: it loads DTensors, which takes a second.
            from .audit import AuditRecords

            observers.append(AuditRecords(rank, start).after_step)
        _log_start(rank, log, start)
        with traced(rank) as trace:
            # Called after each step, in the same order on all ranks: several
            # communicate.
            listeners: list[Listener] = [
                *observers,
                SkippedSteps(rank, log).after_step,
                measured.after_step,
                StepLines(rank, log).after_step,
                trace,
                lambda step: done_steps.write(step.done),
                validations.after_step,
                Samples(rank, log).after_step,
                # before the saves: corrupt weights must not replace a good checkpoint
                copies.after_step,
                memory.after_step,
                disk.after_step,
                uploads.after_step,
                lambda step: log.watcher_notices(),
            ]
            last = make_steps(
                rank, positions, start, measured.number, listeners
            )
        # In this order: the last checkpoint must be complete before its upload
        # is waited for.
        disk.finish()
        not_uploaded = uploads.finish()
        memory.close()
        done = last.done if last else start
        log_graphs(rank, log, done)
        stopped = last is not None and last.stopped
        outcome = Outcome(
            done,
            loss=last.result.total if last else None,
            validation=validations.loss,
            stopped=stopped,
            unsaved=disk.unsaved,
            by=_stopped_by(rank, requests) if stopped else "",
            not_uploaded=not_uploaded,
        )
        _log_end(rank, log, outcome)
        return outcome


def make_steps(
    rank: Rank,
    positions: Positions,
    start: int,
    measured: int,
    listeners: Sequence[Listener],
) -> CompletedStep | None:
    """Make the steps from `start` to the end of the run or a stop; return the last one.

    All ranks start the `measured` step at the same time.
    """
    # The watcher measures from here.
    positions.begin()
    completed = None
    for number in range(start, rank.run.steps):
        try:
            # The first step compiles and allocates, so it has a phase of its
            # own.
            with positions.phase("in a step" if completed else "first step"):
                completed = make_step(
                    rank, positions, number, together=number == measured
                )
            for listen in listeners:
                listen(completed)
        # the run had begun, so it is not a usage error of the command
        except DataError as unusable:
            raise TrainError(f"step {number + 1}: {unusable}") from unusable
        if completed.stopped:
            break
    return completed


def nothing_held_out(rank: Rank) -> str:
    """Explain why a run has no validation loss, with a way out."""
    documents = sum(
        len(corpus.train.starts) - 1 for corpus in rank.batches.corpora
    )
    return (
        f"no validation loss: none of {documents:,} documents of {rank.batches.name} is held out. Prepare"
        " the data with a larger share (prepare.held_out, or data prepare --held-out)"
    )


def _log_start(rank: Rank, log: RunLog, start: int) -> None:
    run = rank.run
    for notice in rank.batches.notices:
        log.event("data", notice)
    if run.validation.batches and not rank.batches.validations:
        log.event("data", nothing_held_out(rank))
    for notice in rank.notices:
        # Each rank's device may differ; rank 0 reports its own.
        log.event("model", notice)
    device = rank.world.device
    for notice in device_notices(
        rank.part.layout, device, rank.shape.head_dim or 128
    ):
        log.event("device", notice)
    if use_flash_3(device):
        log.event("device", "flash attention is that of version 3")
    log.start(
        start,
        rank.flops,
        peak_of(rank),
        tokens=rank.shape.batch * rank.batches.sequence,
        layout=str(rank.part.layout),
        ranks=rank.world.size,
        model=asdict(rank.shape),
        sequence=rank.run.tokens(rank.shape),
        own=rank.run.own,
        parameters=rank.parameters,
        data=rank.batches.name,
        held=sum(unit.part for unit in rank.part.local.every_unit),
        device_memory=device_memory(run, rank.world, os.environ),
    )


def _stopped_by(rank: Rank, requests: StopRequests) -> str:
    """Return the cause of the stop, the same on all ranks: a final one if any, else the
    first signal."""
    # "rank 3: SIGTERM" -> "SIGTERM".
    each_rank = errors_of(rank.part.everyone, requests.by)
    names = [each.partition(": ")[2] for each in each_rank]
    return next((name for name in names if name in FOR_GOOD), names[0])


def _log_end(rank: Rank, log: RunLog, outcome: Outcome) -> None:
    done, by = outcome.step, outcome.by
    if not outcome.stopped:
        log.event(
            "end", step=done, loss=outcome.loss, validation=outcome.validation
        )
        return
    asked = f"asked to stop by {by}"
    if by == REMOVED:
        asked = f"{rank.run.out} was removed or renamed during the run"
    text = (
        f"{asked}: saved at step {done}; the same command continues from there"
    )
    if outcome.unsaved:
        text = f"{asked}: step {done} could not be saved: {outcome.unsaved}"
    log.event("stop", text, step=done, by=by)
