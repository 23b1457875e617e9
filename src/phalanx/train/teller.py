"""Rank 0's voice: what a run tells to its journal, the screen and other tools. Other ranks are mute."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ..cost import StepFlops
from ..layout.files import write_text
from ..layout.journal import read_journal
from ..layout.run import Run
from ..program import Timeline
from .metrics import Goodput, Journal, JournalError, Screen, Sink, open_sinks

__all__ = ["Teller"]


class Teller:
    """Tells of one start of a run. Made on every rank; only the first one speaks."""

    def __init__(self, run: Run, *, speaks: bool, quiet: bool) -> None:
        self.run, self.out, self.speaks = run, Path(run.out), speaks
        self.seconds: list[float] = []
        self.screen: Screen | None = None
        if not speaks:
            return
        path = self.out / "metrics.jsonl"
        self.history = read_journal(path)
        self.goes_on = run.checkpoint.on_disk_full == "go-on"
        self.journal = Journal(path, goes_on=self.goes_on)
        self._write("run.toml", str(run))
        self.sinks: list[Sink] = open_sinks(run)
        self.quiet = quiet

    def start(
        self, step: int, flops: StepFlops, peak: tuple[float, str], tokens: int, **said: Any
    ) -> None:
        """The run begins, or goes on, at a step; each has so many tokens and FLOPs."""
        if not self.speaks:
            return
        self.flops, self.peak, self.tokens = flops, peak[0], tokens
        self.goodput = Goodput(self.history, step)
        self.screen = None if self.quiet else Screen(self.run, step)
        if self.goodput.unusable:
            self.say(
                f"{self.journal.path}: {self.goodput.unusable} lines are not usable and were passed"
                " over; goodput does not count them"
            )
        if not self.run.checkpoint.every:
            self.say("checkpoint.every = 0: nothing is saved before the end or a stop")
        self.journal.write(
            "start", step=step, steps=self.run.steps, flops=flops._asdict(),
            peak_flops=peak[0], peak_from=peak[1], versions=_versions(), **said,
        )  # fmt: skip
        self.say(
            f"peak {peak[0] / 1e12:.3g} TFLOP/s over all ranks ({peak[1]}); MFU counts causal"
            " attention, HFU also what is computed again"
        )

    def say(self, text: str) -> None:
        if self.speaks and self.screen:
            self.screen.say(text)

    def event(self, event: str, text: str = "", **said: Any) -> None:
        """Something that happened: a record, and a line if there is a text."""
        if self.speaks:
            self.journal.write(event, **said)
            if text:
                self.say(text)

    def took(self, seconds: float) -> None:
        """One more step that counts."""
        self.seconds.append(seconds)

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        """The numbers of the steps since the last line, of which the last is number `step`."""
        count, total = len(self.seconds), sum(self.seconds)
        self.seconds = []
        if not self.speaks or not count:
            return
        each = total / count
        self.goodput.add(total)
        told = {
            **numbers,
            "seconds": each,
            "tokens_per_second": self.tokens / each,
            "mfu": self.flops.model / each / self.peak,
            "mfu_full": self.flops.full / each / self.peak,
            "hfu": self.flops.hardware / each / self.peak,
            "goodput": float(self.goodput),
        }
        self.journal.write("step", step=step, steps=count, **told)
        for sink in self.sinks:
            sink.tell(step, told)
        if self.screen:
            self.screen.tell(step, told)

    def validation(self, step: int, loss: float, bits: float | None) -> None:
        if not self.speaks:
            return
        more = "" if bits is None else f", {bits:.4f} bits per byte"
        self.event(
            "validation", f"step {step}  validation loss {loss:.4f} nats per token{more}",
            step=step, loss=loss, bits_per_byte=bits,
        )  # fmt: skip
        for sink in self.sinks:
            sink.tell(step, {"validation": loss})

    def timeline(self, step: int, layout: str, parts: list[str]) -> None:
        """The measured step of all ranks, as one timeline in a file."""
        if not self.speaks:
            return
        spans = [span for part in parts for span in json.loads(part)["spans"]]
        said = {"step": step, "layout": layout, "spans": spans, "memory": {}}
        Timeline.from_json(json.dumps(said))
        self._write("timeline.json", json.dumps(said))

    def _write(self, name: str, text: str) -> None:
        try:
            write_text(self.out / name, text)
        except OSError as error:
            if not self.goes_on:
                raise JournalError(
                    f"{self.out / name} cannot be written: {error.strerror}. Make room, and the same"
                    ' command goes on; or write checkpoint.on_disk_full = "go-on".'
                ) from error

    def close(self) -> None:
        if self.speaks:
            for sink in self.sinks:
                sink.close()
            if self.journal.lost:
                self.say(f"{self.journal.path}: {self.journal.lost} lines could not be written")
            if self.screen:
                self.screen.close()
            self.journal.close()


def _versions() -> dict[str, str]:
    return {
        "phalanx": version("phalanx"), "torch": str(torch.__version__),
        "python": platform.python_version(), "machine": platform.platform(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
    }  # fmt: skip
