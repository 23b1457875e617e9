"""A logging tool that raises, blocks or is slow costs its own numbers and nothing else of a run."""

from __future__ import annotations

import importlib.machinery
import os
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loop_worlds import losses, records, small, trained

from phalanx.training import sinks
from phalanx.training.sinks import Sink, Tool, end_sinks, left_behind


class _Fails(types.ModuleType):
    """Speaks as wandb does; one of its calls raises, or does not return."""

    def __init__(self, call: str, error: BaseException | None) -> None:
        super().__init__("wandb")
        self.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
        self.call, self.error, self.released = call, error, threading.Event()
        self.heard: list[str] = []

    def _heard(self, call: str) -> None:
        self.heard.append(call)
        if call == self.call and self.error is not None:
            raise self.error
        if call == self.call:
            self.released.wait()

    def init(self, **_: Any) -> None:
        self._heard("init")

    def log(self, numbers: dict[str, float], step: int) -> None:
        self._heard("log")

    def finish(self) -> None:
        self._heard("finish")


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sinks, "FINISHING", 0.05)
    monkeypatch.setattr(sinks, "_LEFT_BEHIND", [])
    return


def run(
    out: Path, tool: _Fails, layout: str, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Trains beside the tool; returns the lines about tools."""
    monkeypatch.setitem(sys.modules, "wandb", tool)
    trained(
        small(out, "metrics.wandb=true", "metrics.every=1", "steps=4"), layout
    )
    tool.released.set()
    (end,) = records(out, "end")
    assert end["step"] == 4
    assert (out / "checkpoints" / "step-00000004" / "manifest.json").is_file()
    return [record["text"] for record in records(out, "tool")]


@pytest.mark.parametrize("layout", ["", "dp2"])
@pytest.mark.parametrize("call", ["init", "log", "finish"])
@pytest.mark.parametrize(
    "error",
    [OSError("no route to host"), SystemExit(3), KeyboardInterrupt()],
    ids=repr,
)
def test_a_tool_that_raises_is_named_once_and_the_run_is_as_without_it(
    call: str,
    error: BaseException,
    layout: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = run(tmp_path / "with", _Fails(call, error), layout, monkeypatch)
    assert len(lines) == 1
    assert lines[0].startswith(f"wandb.{call} raised {type(error).__name__}")
    trained(small(tmp_path / "without", "metrics.every=1", "steps=4"), layout)
    assert losses(tmp_path / "with") == losses(tmp_path / "without")


@pytest.mark.parametrize("layout", ["", "dp2"])
@pytest.mark.parametrize("call", ["init", "log", "finish"])
@pytest.mark.usefixtures("no_patience")
def test_a_tool_that_does_not_return_is_left_behind_and_named(
    call: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = run(tmp_path / "run", _Fails(call, None), layout, monkeypatch)
    assert lines == [f"wandb.{call} has not returned: the run ends without it"]
    assert left_behind()


class _Recorder(Tool):
    name = "recorder"

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.may_begin = threading.Event()

    def init(self) -> None:
        self.may_begin.wait()

    def log(self, numbers: sinks.Numbers, step: int) -> None:
        self.steps.append(step)

    def finish(self) -> None:
        self.steps.append(-1)


def test_a_slow_tool_gets_what_fits_its_queue_and_one_line_says_so() -> None:
    tool = _Recorder()
    sink = Sink(tool)
    for step in range(sinks.QUEUED + 500):
        sink.put({"loss": 1.0}, step)
    assert len(sink.problems) == 1
    assert (
        "recorder does not keep up (init has not returned)" in sink.problems[0]
    )
    assert f"from step {sinks.QUEUED} on" in sink.problems[0]
    tool.may_begin.set()
    end_sinks([sink])
    # The end needs a place in the queue: the oldest record gives its own.
    assert tool.steps[-1] == -1
    assert tool.steps[:-1] == sorted(tool.steps[:-1])
    assert len(tool.steps) >= sinks.QUEUED
    assert not sink.problems or len(sink.problems) == 1


def test_all_tools_share_the_time_that_the_end_waits(
    no_patience: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    untils = []

    def ended(self: Sink, until: float) -> bool:
        untils.append(until)
        return True

    monkeypatch.setattr(Sink, "ended", ended)
    tools = [_Recorder() for _ in range(3)]
    end_sinks([Sink(tool) for tool in tools])
    assert len(untils) == 3
    assert len(set(untils)) == 1
    for tool in tools:
        tool.may_begin.set()


HANGS = """
import atexit, threading
def init(**_): atexit.register(threading.Event().wait)
def log(numbers, step): pass
def finish(): threading.Event().wait()
"""


@pytest.mark.slow  # waits for the tool as long as a run does
@pytest.mark.parametrize("layout", ["", "dp2"])
def test_a_command_ends_though_a_tool_never_finishes(
    layout: str, tmp_path: Path
) -> None:
    (tmp_path / "wandb.py").write_text(HANGS)
    words = [
        "model={layers=2,hidden=16,heads=2,ffn=24,vocab=256,sequence=8}",
        "steps=2",
        "batch=4",
    ]
    command = [
        sys.executable,
        "-m",
        "phalanx",
        "train",
        *words,
        f"layout={layout}",
    ]
    done = subprocess.run(
        [
            *command,
            "metrics.wandb=true",
            f"out={tmp_path / 'run'}",
            "machine=",
        ],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (
        "wandb.finish has not returned: the run ends without it"
        in done.stdout + done.stderr
    )
    assert (
        tmp_path / "run" / "checkpoints" / "step-00000002" / "manifest.json"
    ).is_file()
