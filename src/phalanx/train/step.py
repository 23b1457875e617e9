"""One step of a run on one rank, and what its listeners are told of it.

A listener is called after each step. All ranks call the same listeners in the same order, as several
of them communicate: `loop.py` has the list.
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
    """A run that cannot go on: at which step, why, and what to do."""

    exit_code = 1


@dataclass(frozen=True)
class CompletedStep:
    """A step that this rank has made. Times are those of `time.perf_counter`."""

    done: int  # steps that the run has made, this one included
    result: StepResult
    lr: float
    last: bool  # no step is left
    stopped: bool  # steps are left, and a rank was asked to stop: the run ends here
    started: float  # before the batch was read
    loaded: float  # after that
    begun: float  # `started`, or when all ranks began together
    ended: float
    ahead: float  # seconds in which the next batch was read while a GPU computed
    waits: tuple[tuple[float, float], ...]  # when it waited in calls of groups

    @property
    def ends(self) -> bool:
        """True if the run makes no further step."""
        return self.last or self.stopped

    def due(self, every: int) -> bool:
        """True if it is the turn of something that is done every so many steps; 0 is never."""
        return every > 0 and self.done % every == 0


Listener = Callable[[CompletedStep], None]


def make_step(
    rank: Rank, positions: Positions, number: int, *, together: bool = False
) -> CompletedStep:
    """Makes the step of this number, counted from 0. `together`: all ranks begin it at the same time."""
    steps = rank.run.steps
    done = number + 1
    last = done == steps
    positions.words[STEP] = number
    positions.waits.clear()
    started = time.perf_counter()
    lr = learning_rate(rank.run.optimizer, number, steps)
    with positions.phase("loading data", rank.batches.name):
        own = rank.next_batch.take(number)
    loaded = time.perf_counter()
    begun = started
    if together:
        rank.part.everyone.barrier()
        begun = time.perf_counter()

    def read_ahead() -> None:
        with positions.phase("loading data", rank.batches.name):
            rank.next_batch.read_ahead(done)

    result = rank.part.trainer.step(
        own,
        lr,
        timed=together or last or done % rank.run.metrics.every == 0,
        meanwhile=None if last else read_ahead,
    )
    ended = time.perf_counter()
    stopped = result.stops > 0 and not last
    waits = tuple(positions.waits)
    return CompletedStep(
        done, result, lr, last, stopped, started, loaded, begun, ended,
        rank.next_batch.seconds, waits,
    )  # fmt: skip
