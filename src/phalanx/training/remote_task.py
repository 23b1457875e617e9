"""Network calls that may never return: they run in abandonable threads while the ranks
keep meeting.

A call into a file system library cannot be interrupted. So it runs in a daemon thread,
which the run abandons when it makes no progress. Such a thread stops as soon as its
call returns.
"""

import json
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

from ..comm import Group
from ..comm.agree import broadcast_text

TRIES = 6  # attempts of each piece of work
WAIT = 1.0  # seconds before the second attempt; doubled for each further one
ROUND = 1.0  # seconds after which ranks that wait for rank 0 meet again
# units of progress in an attempt, after which the next one may take as long again
MOVED = 64

Item = TypeVar("Item")


class Abandoned(BaseException):
    """Ends an abandoned thread. It is not an Exception, so that no handler on its way
    catches it."""


class Task:
    """Work in a thread of its own, which reports progress by calling `moved`.

    A unit of progress is a returned call of the file system, or a chunk of a file. A
    repeated attempt makes progress only when it gets further than those before. So a
    server that accepts a few calls and then hangs cannot hold the work forever.
    """

    def __init__(self, work: Callable[["Task"], str]) -> None:
        self._work = work
        # called in the thread, after `finished`
        self.on_end: Callable[[], None] = lambda: None
        self._units = self._most = 0
        self.last = time.monotonic()  # time of the last progress
        self.abandoned = False
        self.finished = threading.Event()
        self.problem = ""  # error of the last attempt
        self.result = ""
        self.there = (
            False  # the upload itself is complete, whatever fails afterwards
        )
        self.raised: Exception | None = None
        self.thread = threading.Thread(
            target=self._run, name="remote", daemon=True
        )

    def start(self) -> "Task":
        self.thread.start()
        return self

    def _run(self) -> None:
        try:
            self.result = self._work(self)
        # Abandoned: nobody waits for its outcome.
        except Abandoned:
            return
        except Exception as error:
            self.raised = error
        # First finished, then the callback: it may look at the task.
        self.finished.set()
        self.on_end()

    def check(self) -> None:
        """End this thread if its work was abandoned."""
        if self.abandoned:
            raise Abandoned

    def moved(self) -> None:
        """Count a unit of progress."""
        self.check()
        self._units += 1
        if self._units > self._most:
            self._most = self._units
            self.last = time.monotonic()

    def begin_try(self) -> None:
        """Restart the count. After an attempt that moved much data, the next one may
        move it again."""
        # A large upload that failed at its end may take as long again.
        if self._units >= MOVED:
            self._most = 0
            self.last = time.monotonic()
        self._units = 0

    def stands(self, timeout: float) -> str:
        """Describe a stall if there was no progress for `timeout` seconds, else return
        "".

        A timeout of 0 means no limit.
        """
        idle = time.monotonic() - self.last
        if not timeout or idle < timeout or self.finished.is_set():
            return ""
        last = f"; the last error was: {self.problem}" if self.problem else ""
        return f"no progress for {idle:.0f} s (checkpoint.remote_timeout = {timeout:g}){last}"


def try_often(
    task: Task,
    work: Callable[[], object],
    describe: Callable[[Exception], str],
    in_vain: Callable[[], bool] = lambda: False,
    final: tuple[type[Exception], ...] = (),
) -> str:
    """Run the work, retrying after errors; return the last error's description, or "".

    It is not retried if it is `in_vain` by now, and a `final` error is raised.
    """
    # Seconds of waiting double: 1, 2, 4, ...
    for number in range(TRIES):
        task.begin_try()
        try:
            work()
            return ""
        except final:
            raise
        except (
            Exception
        ) as wrong:  # file system libraries raise errors of any type
            task.problem = describe(wrong)
        # An abandoned task makes no further attempt.
        task.check()
        if in_vain():
            break
        if number + 1 < TRIES:
            time.sleep(WAIT * 2**number)
    return task.problem


def in_threads(
    work: Callable[[Item], None],
    items: Iterable[Item],
    count: int,
    check: Callable[[], None],
) -> None:
    """Run the work for each item in `count` threads; the first error ends all.

    The threads are daemons: an executor's would be joined at exit, and one that hangs
    in a call would block it.
    """
    left, lock, errors = list(items), threading.Lock(), list[BaseException]()

    def run() -> None:
        # The first error stops all threads before their next item.
        while not errors:
            with lock:
                if not left:
                    return
                item = left.pop(0)
            try:
                work(item)
            except BaseException as error:
                errors.append(error)

    threads = [
        threading.Thread(target=run, daemon=True)
        for _ in range(min(count, len(left)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            # Joined in short turns, in which `check` may end the caller.
            thread.join(0.2)
            check()
    if errors:
        raise errors[0]


class Answer(NamedTuple):
    """The outcome of work on rank 0: a result, or an error. `refused` marks a
    refusal."""

    result: str = ""
    error: str = ""
    refused: bool = False


def on_first_rank(
    group: Group,
    work: Callable[[Task], str],
    timeout: float,
    describe: Callable[[Exception], str],
    refusals: tuple[type[Exception], ...] = (),
) -> Answer:
    """Run work in a thread of rank 0, and return its outcome on all ranks. Collective.

    Work without progress for `timeout` seconds is abandoned. The ranks meet every
    `ROUND` seconds, however long the work takes, so that no collective waits long and
    the watcher sees all of them progress.
    """
    task = Task(work).start() if group.rank == 0 else None
    while True:
        answer = None
        # Rank 0 waits for its thread, the others in the broadcast below.
        if task is not None and task.finished.wait(ROUND):
            answer = Answer(task.result)
            if task.raised is not None:
                refused = isinstance(task.raised, refusals)
                answer = Answer(error=describe(task.raised), refused=refused)
        elif task is not None and (text := task.stands(timeout)):
            task.abandoned = True
            answer = Answer(error=text)
        # Empty: the work goes on, and all ranks meet again.
        if text := broadcast_text(group, json.dumps(answer) if answer else ""):
            return Answer(*json.loads(text))
