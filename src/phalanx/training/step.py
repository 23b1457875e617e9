"""One step of a run on one rank, and its record for listeners.

Listeners are called after each step. All ranks call the same listeners in the same
order, as several of them communicate; `loop.py` lists them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rank_watch import Positions
from rank_watch.positions import STEP

from .executor import StepResult
from .optimizer import learning_rate
from .rank import Rank


class TrainError(ValueError):
    """Raised if a run cannot continue: names the step, the reason and what to do."""

    exit_code = 1


@dataclass(frozen=True)
class CompletedStep:
    """A completed step of this rank. Times are those of `time.perf_counter`."""

    done: int  # completed steps of the run, including this one
    result: StepResult
    lr: float
    last: bool  # no steps are left
    stopped: (
        bool  # steps are left, but a rank was asked to stop: the run ends here
    )
    started: float  # before the batch was read
    loaded: float  # after the batch was read
    begun: float  # `started`, or the time at which all ranks began together
    ended: float
    ahead: (
        float  # seconds spent on reading the next batch while a GPU computed
    )
    # Intervals of waiting in calls of groups.
    waits: tuple[tuple[float, float], ...]

    @property
    def ends(self) -> bool:
        """True if the run makes no further step."""
        return self.last or self.stopped

    def due(self, every: int) -> bool:
        """True if an action that happens every `every` steps is due; 0 means never."""
        return every > 0 and self.done % every == 0


Listener = Callable[[CompletedStep], None]


def make_step(
    rank: Rank, positions: Positions, number: int, *, together: bool = False
) -> CompletedStep:
    """Make step `number`, counted from 0. `together`: all ranks start it at the same
    time."""
    steps = rank.run.steps
    done = number + 1
    last = done == steps
    # For the watcher: the step that this rank is in.
    positions.words[STEP] = number
    positions.waits.clear()
    started = time.perf_counter()
    lr = learning_rate(rank.run.optimizer, number, steps)
    with positions.phase("loading data", rank.batches.name):
        own = rank.next_batch.take(number)
    loaded = time.perf_counter()
    begun = started
    # Ranks of the measured step have one common start on their time axis.
    if together:
        rank.part.everyone.barrier()
        begun = time.perf_counter()

    # While the device computes the step.
    def read_ahead() -> None:
        with positions.phase("loading data", rank.batches.name):
            rank.next_batch.read_ahead(done)

    result = rank.part.trainer.step(
        own,
        lr,
        # Reading events takes time, so only steps that are logged have spans.
        timed=together or last or done % rank.run.metrics.every == 0,
        meanwhile=None if last else read_ahead,
    )
    ended = time.perf_counter()
    # All ranks have the same sum, so they end in the same step.
    stopped = result.stops > 0 and not last
    waits = tuple(positions.waits)
    return CompletedStep(
        done, result, lr, last, stopped, started, loaded, begun, ended,
        rank.next_batch.seconds, waits,
    )  # fmt: skip
