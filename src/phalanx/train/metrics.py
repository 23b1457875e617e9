"""What a run tells while it goes on: metrics.jsonl, a line on the screen, and other tools if wanted.

Each line of metrics.jsonl is one JSON object with an `event`: start, step, validation, checkpoint,
memory, skip, stop, end. A run that was restarted has several starts in it.
"""

from __future__ import annotations

import importlib
import io
import json
import math
import os
import resource
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Protocol

import torch

from ..layout.files import open_regular, printable
from ..layout.journal import Record
from ..layout.run import Run

__all__ = ["Goodput", "Journal", "Screen", "Sink", "memory_of", "open_sinks"]


class Sink(Protocol):
    """Another place that hears the numbers of a step."""

    def tell(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Journal:
    """metrics.jsonl, appended to: a line is whole or, if the process dies in it, passed over."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A link is refused: in a folder from elsewhere it could lead to any file of the user's.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        raw = open_regular(path, flags)
        size = os.fstat(raw.fileno()).st_size
        cut = size > 0 and os.pread(raw.fileno(), 1, size - 1) != b"\n"
        self.file: IO[str] = io.TextIOWrapper(raw, encoding="utf-8")
        if cut:
            self.file.write("\n")

    def write(self, event: str, **said: Any) -> None:
        record = {"event": event, "time": round(time.time(), 3), **said}
        self.file.write(json.dumps(_finite(record)) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def _finite(said: Any) -> Any:
    """JSON has no NaN: what is not finite is told as text."""
    if isinstance(said, dict):
        return {name: _finite(value) for name, value in said.items()}
    if isinstance(said, float) and not math.isfinite(said):
        return str(said)
    return said


class Goodput:
    """Time in steps that count over wall time since the first start: what restarts cost is in it.

    Steps that were done again after a restart count once.
    """

    def __init__(self, history: Iterable[Record], step: int) -> None:
        self.first = time.time()
        kept: list[tuple[int, float]] = []
        begun = False
        for record in history:
            if record["event"] == "start":
                if not begun:
                    self.first, begun = float(record["time"]), True
                kept = [k for k in kept if k[0] <= int(record["step"])]
            elif record["event"] == "step":
                kept.append((int(record["step"]), float(record["seconds"]) * int(record["steps"])))
        self.useful = sum(seconds for at, seconds in kept if at <= step)

    def add(self, seconds: float) -> None:
        self.useful += seconds

    def __float__(self) -> float:
        return self.useful / max(1e-9, time.time() - self.first)


class Screen:
    """One line on a terminal that is written anew; plain lines elsewhere."""

    def __init__(self, run: Run, step: int) -> None:
        self.run, self.begun, self.at = run, time.monotonic(), step
        self.bar: Any = None
        self.heard = True
        if sys.stdout.isatty():
            from rich.progress import BarColumn, Progress, TextColumn

            self.bar = Progress(
                TextColumn("{task.fields[said]}"), BarColumn(12), refresh_per_second=4
            )
            self.bar.start()
            self.task = self.bar.add_task("", total=run.steps, completed=step, said="starting")

    def say(self, text: str) -> None:
        """A line that stays."""
        text = printable(text)
        if self.bar:
            self.bar.console.print(text, markup=False, highlight=False)
        else:
            self._print(text)

    def _print(self, text: str) -> None:
        if self.heard:
            try:
                print(text, flush=True)
            except BrokenPipeError:  # `| head` has seen enough; the run goes on
                self.heard = False
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def tell(self, step: int, numbers: Mapping[str, float]) -> None:
        text = self._line(step, numbers)
        if self.bar:
            self.bar.update(self.task, completed=step, said=text)
        else:
            self._print(text)

    def _line(self, step: int, numbers: Mapping[str, float]) -> str:
        done = step - self.at
        left = (time.monotonic() - self.begun) / max(1, done) * (self.run.steps - step)
        return (
            f"step {step}/{self.run.steps}  loss {numbers['loss']:.4f}"
            f"  {numbers['tokens_per_second']:,.0f} tokens/s  MFU {100 * numbers['mfu']:.1f} %"
            f" HFU {100 * numbers['hfu']:.1f} %  {numbers['memory'] / 2**30:.2f} GiB  left {_clock(left)}"
        )

    def close(self) -> None:
        if self.bar:
            self.bar.stop()


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def memory_of(device: torch.device) -> int:
    """The most bytes this rank has held: of the GPU, or of the process where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


class _TensorBoard:
    def __init__(self, run: Run) -> None:
        module = importlib.import_module("torch.utils.tensorboard")
        self.writer = module.SummaryWriter(str(Path(run.out, "tensorboard")))

    def tell(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self.writer.add_scalar(name, number, step)

    def close(self) -> None:
        self.writer.close()


class _Logger:
    """Weights & Biases, and trackio, which speaks as it does."""

    def __init__(self, run: Run, name: str) -> None:
        self.module = importlib.import_module(name)
        self.module.init(project="phalanx", name=Path(run.out).name, config=asdict(run))

    def tell(self, step: int, numbers: Mapping[str, float]) -> None:
        self.module.log(dict(numbers), step=step)

    def close(self) -> None:
        self.module.finish()


def open_sinks(run: Run) -> list[Sink]:
    """The other tools that this run tells its numbers to."""
    sinks: list[Sink] = [_TensorBoard(run)] if run.metrics.tensorboard else []
    names = [n for n in ("wandb", "trackio") if getattr(run.metrics, n)]
    return [*sinks, *(_Logger(run, name) for name in names)]
