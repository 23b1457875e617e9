"""Logging tools that receive a run's metrics: TensorBoard, Weights & Biases, trackio.

A tool may raise, wait for an unresponsive network, or never return. Each one is called
only in a thread of its own, which takes its work from a bounded queue. Training never
waits for that thread; the end of a run waits for it at most `FINISHING` seconds.
"""

import importlib
import json
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..layout.run import Run
from ..layout.url import redacted

QUEUED = 1000  # calls queued for a slow tool; further ones are dropped
FINISHING = 20.0  # seconds that the end of a run waits for all tools together
_LENGTH = 300  # maximum characters of an error's text

Numbers = Mapping[str, float]


class Tool(ABC):
    """A logging tool, called in its sink's thread. Every call may raise or block."""

    name = ""

    @abstractmethod
    def init(self) -> None:
        """Import the tool and start its run."""

    @abstractmethod
    def log(self, numbers: Numbers, step: int) -> None: ...

    @abstractmethod
    def finish(self) -> None: ...


class TensorBoard(Tool):
    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def init(self) -> None:
        module = importlib.import_module("torch.utils.tensorboard")
        self.writer = module.SummaryWriter(str(self.folder))

    def log(self, numbers: Numbers, step: int) -> None:
        for name, number in numbers.items():
            self.writer.add_scalar(name, number, step)

    def finish(self) -> None:
        self.writer.close()


class WandbLike(Tool):
    """Weights & Biases, or trackio, which has the same interface."""

    def __init__(self, name: str, run: str, config: dict[str, Any]) -> None:
        self.name, self.run, self.config = name, run, config

    def init(self) -> None:
        self.module = importlib.import_module(self.name)
        self.module.init(project="phalanx", name=self.run, config=self.config)

    def log(self, numbers: Numbers, step: int) -> None:
        self.module.log(dict(numbers), step=step)

    def finish(self) -> None:
        self.module.finish()


class Sink:
    """The queue and thread of one tool. `problems` has one line for each kind of
    failure."""

    def __init__(self, tool: Tool) -> None:
        self.tool = tool
        self.problems: deque[str] = deque()
        self._noted = set[str]()
        self._queue: queue.Queue[tuple[Numbers, int] | None] = queue.Queue(
            QUEUED
        )
        self._ended = threading.Event()
        self._call = "init"  # the call that the thread is in
        threading.Thread(
            target=self._work, name=tool.name, daemon=True
        ).start()

    def put(self, numbers: Numbers, step: int) -> None:
        """Queue a step's values. They are dropped if the tool has failed or does not
        keep up."""
        # A tool that has failed gets no more values.
        if self._ended.is_set():
            return
        try:
            # Never wait: a slow tool must not slow training.
            self._queue.put_nowait((dict(numbers), step))
        except queue.Full:
            text = f"{self.tool.name} does not keep up ({self._call} has not returned)"
            self._tell(
                "full",
                f"{text}: some of its numbers are dropped from step {step} on",
            )

    def end(self) -> None:
        """Ask the tool to finish after the queued calls, without waiting."""
        with suppress(queue.Empty):
            # drop the oldest values: the end must not wait for space in the queue
            while self._queue.full():
                self._queue.get_nowait()
        # There is room now, and nobody else puts.
        self._queue.put(None)  # only this thread puts

    def ended(self, until: float) -> bool:
        """True if the tool finishes before `until`, a time of `time.monotonic`."""
        if self._ended.wait(max(0.0, until - time.monotonic())):
            return True
        text = f"{self.tool.name}.{self._call} has not returned: the run ends without it"
        self._tell("end", text)
        return False

    def _work(self) -> None:
        try:
            # A tool that cannot start gets no further call.
            if not self._try("init"):
                return
            while (work := self._queue.get()) is not None:
                self._try("log", *work)
            self._try("finish")
        finally:
            self._ended.set()

    def _try(self, call: str, *given: Any) -> bool:
        """Call a method of the tool; return False if it raised."""
        self._call = call
        try:
            getattr(self.tool, call)(*given)
        # Also SystemExit: it would end only this thread, unnoticed.
        except BaseException as error:
            self._tell(
                call,
                f"{self.tool.name}.{call} raised {_described(error)}{_CONSEQUENCE[call]}",
            )
            return False
        return True

    def _tell(self, kind: str, text: str) -> None:
        # Each kind of problem is told once.
        if kind not in self._noted:
            self._noted.add(kind)
            self.problems.append(redacted(text))


_CONSEQUENCE = {
    "init": "; the run continues without it",
    "log": "; its numbers of that step are lost, and further errors of log are not reported",
    "finish": "; its last numbers may be missing",
}


def _described(error: BaseException) -> str:
    try:
        text = " ".join(str(error).split())
    except Exception:  # `__str__` of the tool's error may raise, too
        text = ""
    return (
        f"{type(error).__name__}: {text[:_LENGTH]}"
        if text
        else type(error).__name__
    )


def open_sinks(run: Run) -> list[Sink]:
    """Open the sinks of the tools that a run names."""
    tools: list[Tool] = []
    if run.metrics.tensorboard:
        tools.append(TensorBoard(Path(run.out, "tensorboard")))
    # The tool sends the configuration to a server, so secrets in URLs are removed.
    config = json.loads(redacted(json.dumps(asdict(run))))
    names = [
        name for name in ("wandb", "trackio") if getattr(run.metrics, name)
    ]
    tools += [WandbLike(name, Path(run.out).name, config) for name in names]
    return [Sink(tool) for tool in tools]


# Tools that have not finished. Their exit handlers may block, too.
_LEFT_BEHIND: list[Sink] = []


def end_sinks(sinks: Sequence[Sink]) -> None:
    """Let all tools finish, and abandon those that take longer than `FINISHING`
    seconds."""
    for sink in sinks:
        sink.end()
    until = time.monotonic() + FINISHING
    # Kept, so that the end of the process knows of threads that may block it.
    _LEFT_BEHIND.extend([sink for sink in sinks if not sink.ended(until)])


def left_behind() -> bool:
    """True if a tool of this process has not finished."""
    return bool(_LEFT_BEHIND)
