"""The log of a run, written by rank 0: metrics.jsonl, lines on the screen, and optional
logging tools.

Each line of metrics.jsonl is one JSON object with an `event`: start, step, validation,
sample, checkpoint, memory, compile, device, skip, straggler, upload, remote, tool,
stop, end, or hang, which the run's watcher writes. A restarted run has several starts in it.
"""

import io
import json
import logging
import math
import os
import platform
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

from rank_watch import Positions
from rank_watch.moment import clock, stamp

from ..comm.join import versions
from ..cost import StepFlops
from ..layout.files import open_regular, printable, write_text
from ..layout.goodput import Goodput
from ..layout.journal import read_journal
from ..layout.output import flush_stream, unblocked
from ..layout.run import Run
from ..layout.url import redacted
from ..program import Program
from .sinks import Sink, end_sinks, open_sinks

_SHOWN = (
    66  # characters of a sample on the screen, in a terminal of 80 columns
)


@contextmanager
def rank_log(out: Path, rank: int, ranks: int) -> Iterator[logging.Logger]:
    """Open the log of one rank, logs/rank-N.log in the run's folder. It ends with the
    traceback, if any."""
    # Loggers are per rank, since ranks may be threads of one process.
    log = logging.getLogger(f"phalanx.rank{rank}")
    handler: logging.Handler = logging.NullHandler()
    with suppress(OSError):  # an unwritable log is no reason to end a run
        (out / "logs").mkdir(exist_ok=True)
        # Never through a link, which could lead to any file of the user's.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        file = open_regular(out / "logs" / f"rank-{rank}.log", flags)
        handler = logging.StreamHandler(
            io.TextIOWrapper(file, "utf-8", write_through=True)
        )
        handler.setFormatter(
            _Redacting("%(asctime)s %(levelname)s %(message)s")
        )
    log.setLevel(logging.DEBUG)
    # `-v` shows it.
    log.propagate = logging.getLogger("phalanx").level == logging.DEBUG
    log.addHandler(handler)
    try:
        log.info(
            "rank %d of %d, process %d on %s",
            rank,
            ranks,
            os.getpid(),
            platform.node(),
        )
        yield log
    except BaseException:
        log.exception("ended by")
        raise
    finally:
        log.removeHandler(handler)
        if isinstance(handler, logging.StreamHandler):
            handler.stream.close()


class _Redacting(logging.Formatter):
    """Hides the secrets in URLs, including those in tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))


class RunLog:
    """The log of one start of a run. Every rank has one; only rank 0's is `active` and
    writes."""

    def __init__(
        self, run: Run, positions: Positions, *, active: bool, quiet: bool
    ) -> None:
        self.positions = positions
        # The start of the process, on the clock of the journal.
        self.began = round(clock() - (time.monotonic() - positions.begun), 3)
        self.run, self.out, self.active, self.quiet = (
            run,
            Path(run.out),
            active,
            quiet,
        )
        self.screen = Screen(run) if active and not quiet else None
        self.sinks: Sequence[Sink] = ()
        if active:
            path, self.goes_on = (
                self.out / "metrics.jsonl",
                run.checkpoint.on_disk_full == "go-on",
            )
            self.goodput = Goodput(read_journal(path))
            self.journal = Journal(path, goes_on=self.goes_on)
            self._write("run.toml", str(run))
            self.sinks = open_sinks(run)

    def start(
        self,
        step: int,
        flops: StepFlops,
        peak: tuple[float, str],
        tokens: int,
        **values: Any,
    ) -> None:
        """Log that the run starts or resumes at a step; each step has `tokens` tokens
        and `flops`."""
        if not self.active:
            return
        self.flops, self.peak, self.tokens = flops, peak[0], tokens
        if self.screen:
            self.screen.start(step)
        if self.goodput.unusable:
            self.say(
                f"{self.journal.path}: {self.goodput.unusable} lines are unusable and were skipped,"
                " and goodput does not count them"
            )
        kept = self.run.checkpoint
        if not kept.every:
            when = (
                "before the end or a stop"
                if kept.at_end
                else "unless the run is stopped"
            )
            self.say(f"checkpoint.every = 0: nothing is saved {when}")
        values |= {
            "flops": flops._asdict(),
            "peak_flops": peak[0],
            "peak_from": peak[1],
        }
        values |= {"steps": self.run.steps, "versions": _versions()}
        text = (
            f"peak {peak[0] / 1e12:.3g} TFLOP/s over all ranks ({peak[1]}); MFU counts causal"
            " attention, HFU also what is computed again"
        )
        self.event("start", text, step=step, **values)

    def say(self, text: str) -> None:
        if self.screen:
            self.screen.say(redacted(text))

    def event(self, event: str, text: str = "", **values: Any) -> None:
        """Write a record of an event, with the text if there are no other values; print
        the text if any."""
        if self.active:
            self._record(event, values or {"text": text})
            if text:
                self.say(text)
            if event in ("end", "stop"):
                self.say(str(self.goodput))

    def step(
        self, step: int, seconds: Sequence[float], numbers: Mapping[str, float]
    ) -> None:
        """Log the values of a step, and the seconds of each step since the last
        line."""
        if not self.active:
            return
        count, total = len(seconds), sum(seconds)
        # Seconds of a step, FLOPs of a step: shares of the peak follow.
        each, flops = total / count, self.flops
        values = {
            **numbers,
            "seconds": each,
            "tokens_per_second": self.tokens / each,
        }
        # MFU counts causal attention, `mfu_full` all pairs, HFU also what is
        # computed again.
        done = {
            "mfu": flops.model,
            "mfu_full": flops.full,
            "hfu": flops.hardware,
        }
        values |= {
            name: work / each / self.peak for name, work in done.items()
        }
        values["goodput"] = self._record(
            "step", {"step": step, "steps": count, **values}
        )
        self._put(values, step)
        if self.screen:
            self.screen.write(step, values)

    def _record(self, event: str, values: Mapping[str, Any]) -> float:
        """Append a record to the journal with the time since the previous one by
        purpose. Return the goodput."""
        record: dict[str, Any] = {
            "event": event,
            **stamp(),
            "began": self.began,
            **values,
        }
        # Seconds of each phase since the record before; reading restarts the
        # count.
        record["spent"] = {
            name: round(s, 4) for name, s in self.positions.taken().items()
        }
        self.goodput.add(record)
        if event in ("step", "end", "stop"):
            record["goodput"] = float(self.goodput)
            if event != "step":
                record["parts"] = self.goodput.spent
        self.journal.write(**record)
        return float(self.goodput)

    def watcher_notices(self) -> None:
        """Log what the watcher process has reported since the last call."""
        while self.positions.notices:
            self.event("watcher", self.positions.notices.popleft())

    def validation(
        self,
        step: int,
        loss: float,
        bits: float | None,
        experts: list[list[int]],
    ) -> None:
        """Log a validation; write how often each expert was chosen in each layer to
        routing.json."""
        unit = "pair" if self.run.loss else "token"
        text = f"step {step}  validation loss {loss:.4f} nats per {unit}"
        text += "" if bits is None else f", {bits:.4f} bits per byte"
        values: dict[str, Any] = {
            "step": step,
            "loss": loss,
            "bits_per_byte": bits,
        }
        if experts:
            values["busiest_expert"] = max(
                max(x) * len(x) / sum(x) for x in experts
            )
            text += f", busiest expert {values['busiest_expert']:.2f} times the mean"
            self._write("routing.json", json.dumps(experts))
        self.event("validation", text, **values)
        self._put({"validation": loss}, step)

    def sample(self, step: int, prompt: str, text: str) -> None:
        """Record a text generated by the model, and print it as one line."""
        if not self.active:
            return
        self._record("sample", {"step": step, "prompt": prompt, "text": text})
        # JSON shows line ends and control characters as escapes, on one line.
        shown = json.dumps(prompt.lstrip() + text, ensure_ascii=False)
        if len(shown) > _SHOWN:
            shown = f"{shown[:_SHOWN]}..."
        self.say(f"step {step}  writes {shown}")

    def timeline(
        self, step: int, layout: str, program: Program, parts: list[str]
    ) -> None:
        """Write the measured step of all ranks with its program to a file that
        `Recorded` reads."""
        if self.active:
            spans = [
                span for part in parts for span in json.loads(part)["spans"]
            ]
            recorded = {
                "phalanx run": 1,
                "step": step,
                "layout": layout,
                "program": str(program),
            }
            self._write(
                "timeline.json", json.dumps(recorded | {"spans": spans})
            )

    def _put(self, numbers: Mapping[str, float], step: int) -> None:
        """Pass values to the logging tools, and report failures of earlier calls."""
        for sink in self.sinks:
            sink.put(numbers, step)
        self._tell_sinks()

    def _tell_sinks(self) -> None:
        for sink in self.sinks:
            while sink.problems:
                self.event("tool", sink.problems.popleft())

    def _write(self, name: str, text: str) -> None:
        try:
            write_text(self.out / name, text)
        except FileNotFoundError:
            # the folder was removed: the next step notices that and saves (`stop.py`)
            pass
        # Any other error of the disk ends the run, unless it goes on without.
        except OSError as error:
            if not self.goes_on:
                raise _disk_error(self.out / name, error) from error

    def close(self) -> None:
        if not self.active:
            return
        with self.positions.phase("saving", "finishing the logging tools"):
            end_sinks(self.sinks)
        # A tool's last problems are worth a line, not an error at the end.
        with suppress(JournalError):  # the run's own end was reported before
            self._tell_sinks()
        if self.journal.lost:
            self.say(
                f"{self.journal.path}: {self.journal.lost} lines could not be written"
            )
        if self.screen:
            self.screen.close()
        self.journal.close()


def _versions() -> dict[str, str]:
    return versions() | {
        "python": platform.python_version(),
        "machine": platform.platform(),
        "device": torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else "CPU",
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


class JournalError(ValueError):
    """Raised if metrics.jsonl cannot be written, with the reason and a way out."""

    exit_code = 1


def _disk_error(path: Path, error: OSError) -> JournalError:
    return JournalError(
        f"{path} cannot be written: {error.strerror}. Free some space and run the same command again; or"
        ' write checkpoint.on_disk_full = "go-on".'
    )


class Journal:
    """Appends records to metrics.jsonl. An incomplete line, after a crash or on a full
    disk, is ignored by readers.

    A write error is fatal, unless the run `goes_on`; then `lost` counts the lost lines.
    """

    def __init__(self, path: Path, *, goes_on: bool = False) -> None:
        self.path, self.goes_on, self.lost = path, goes_on, 0
        path.parent.mkdir(parents=True, exist_ok=True)
        # Links are refused: in a folder from elsewhere one could lead to any file of
        # the user's.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        self.file: BinaryIO = open_regular(path, flags)
        size = os.fstat(self.file.fileno()).st_size
        # A crash may have left half a line: begin behind a line end.
        self.cut = (
            size > 0 and os.pread(self.file.fileno(), 1, size - 1) != b"\n"
        )

    def write(self, **record: Any) -> None:
        line = (redacted(json.dumps(_finite(record))) + "\n").encode()
        try:
            self._append(b"\n" + line if self.cut else line)
        except OSError as error:
            if not self.goes_on:
                raise _disk_error(self.path, error) from error
            self.lost += 1

    def _append(self, line: bytes) -> None:
        # A write may take only a part, on a disk that fills up.
        left = memoryview(line)
        while left:
            left = left[os.write(self.file.fileno(), left) :]
            # A full disk left an incomplete line in the file.
            self.cut = bool(left)

    def close(self) -> None:
        self.file.close()


def _finite(value: Any) -> Any:
    """Convert non-finite numbers to text, as JSON has no NaN."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return (
        str(value)
        if isinstance(value, float) and not math.isfinite(value)
        else value
    )


class Screen:
    """Shows progress: one updated line on a terminal, plain lines elsewhere.

    Training never waits for whoever reads them (`layout/output.py`).
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.bar: Any = None
        self.stream = unblocked(sys.stdout)

    def start(self, step: int) -> None:
        self.begun, self.at = time.monotonic(), step
        # rich is imported on a terminal only: it takes time to load.
        if self.stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            text = TextColumn("{task.fields[text]}")
            console = Console(file=self.stream)
            self.bar = Progress(
                text, BarColumn(12), refresh_per_second=4, console=console
            )
            self.bar.start()
            self.task = self.bar.add_task(
                "", total=self.run.steps, completed=step, text="starting"
            )

    def say(self, text: str) -> None:
        """Print a permanent line."""
        if self.bar:
            self.bar.console.print(
                printable(text), markup=False, highlight=False
            )
        else:
            self.print(text)

    def print(self, text: str) -> None:
        self.stream.write(f"{printable(text)}\n")

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        # Seconds left, by the mean of this start's steps.
        spent, steps = time.monotonic() - self.begun, self.run.steps
        minutes, seconds = divmod(
            round(spent / max(1, step - self.at) * (steps - step)), 60
        )
        hours, minutes = divmod(minutes, 60)
        left = (
            f"{hours}:{minutes:02}:{seconds:02}"
            if hours
            else f"{minutes}:{seconds:02}"
        )
        text = (
            f"step {step}/{steps}  loss {numbers['loss']:.4f}"
            f"  {numbers['tokens_per_second']:,.0f} tokens/s  MFU {100 * numbers['mfu']:.1f} %"
            f" HFU {100 * numbers['hfu']:.1f} %  {numbers['memory'] / 2**30:.2f} GiB  left {left}"
        )
        if self.bar:
            self.bar.update(self.task, completed=step, text=text)
        else:
            self.print(text)

    def close(self) -> None:
        if self.bar:
            self.bar.stop()
        flush_stream(self.stream)


def memory_of(device: torch.device, sharing: int = 1) -> int:
    """Return this rank's peak memory in bytes: of its process, or of its GPU.

    On a GPU that includes memory outside torch's allocator (NCCL buffers, kernels,
    other programs). If `sharing` ranks share the GPU, it is divided among them.
    """
    if device.type == "cuda":
        free, whole = torch.cuda.mem_get_info(device)
        # Used on the GPU, but not by torch's allocator.
        besides = max(0, whole - free - torch.cuda.memory_reserved(device))
        return (torch.cuda.max_memory_allocated(device) + besides) // sharing
    # Kilobytes on Linux, bytes on macOS.
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
