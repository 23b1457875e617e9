"""`phalanx demo`: a run on this machine that is killed, goes on in another layout, and is checked
against one process."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

from ..layout import Layout
from ..layout.run import Run
from .outputs import try_folder
from .usage import Parser, print_json, say

__all__ = ["run"]

FIRST, THEN = "dp2 pp2 zero1 1f1b:2 fp64", "dp2 tp2 zero3 fp64"
STEPS, SAVE, KILL = 40, 10, 25
# In float64 what layouts differ by is rounding alone.
CLOSE = 1e-9
_RUN = f"""
steps = {STEPS}
batch = 8
sequence = 64
model = {{layers = 4, hidden = 64, heads = 4, kv_heads = 2, ffn = 160, vocab = 256}}
optimizer = {{lr = 4e-3, warmup_steps = 10}}
checkpoint = {{every = {SAVE}}}
validation = {{batches = 4}}
"""


def run(argv: list[str]) -> int:
    """Train, kill, go on, compare, report."""
    parser = Parser(
        "phalanx demo",
        "Trains a small decoder on four local ranks, kills one, goes on in another layout, compares"
        " every loss with one process, and writes a page.",
        "About half a minute on two idle cores.\n"
        "Exit code 0: the loss fell and all losses agree; 1: not.",
    )
    parser.add_argument(
        "--out", default="runs/demo", metavar="DIR", help="default runs/demo, made anew"
    )
    parser.add_argument("--json", action="store_true", help="only what was found, as JSON")
    args = parser.read(argv)
    begun = time.monotonic()
    out = Path(args.out)
    for folder in (out, _alone(out)):
        try_folder(str(folder))
    for old in (out, _alone(out)):
        if (old / "metrics.jsonl").is_file():  # only what an earlier demo has written
            shutil.rmtree(old)
    found = _Demo(out, quiet=args.json).play()
    found["seconds"] = round(time.monotonic() - begun, 1)
    if args.json:
        print_json(found)
    else:
        say(f"{found['seconds']} s. The page of the run: {found['report']}")
    return 0 if found["agrees"] and found["fell"] else 1


def _alone(out: Path) -> Path:
    return out.with_name(f"{out.name}-one-process")


class _Demo:
    def __init__(self, out: Path, *, quiet: bool) -> None:
        self.out, self.quiet = out, quiet

    def say(self, text: str) -> None:
        if not self.quiet:
            say(text, flush=True)

    def play(self) -> dict[str, Any]:
        """All scenes; what was found."""
        shape = self.run_of(FIRST).shape
        self.say(f"A decoder of {shape.total:,} parameters learns the Python library's text.")
        self.say(f"\n1. Four ranks as {FIRST}; one is killed after step {KILL}.")
        killed = self.killed()
        self.say(f"   {killed}")
        self.say(f"\n2. The same command, now as {THEN}: it goes on from the last checkpoint.")
        self.trained(self.out, THEN)
        self.say("\n3. The same run on one process, never interrupted.")
        self.trained(_alone(self.out), "fp64")
        losses, truth = losses_of(self.out), losses_of(_alone(self.out))
        off = (
            max(abs(losses[s] / truth[s] - 1) for s in truth)
            if losses.keys() == truth.keys()
            else 1.0
        )
        fell = losses.get(STEPS, 9.0) < losses.get(1, 0.0) - 1.0
        verdict = "agree" if off < CLOSE else "DO NOT AGREE"
        self.say(
            f"   All {len(truth)} losses {verdict}: the largest relative difference is {off:.1e}.\n"
        )
        return {
            "first": FIRST,
            "then": THEN,
            "killed": killed,
            "first_loss": losses.get(1),
            "last_loss": losses.get(STEPS),
            "fell": fell,
            "largest_difference": off,
            "agrees": off < CLOSE,
            "report": str(self.page()),
        }

    def run_of(self, layout: str, out: Path | None = None) -> Run:
        return Run.parse(_RUN, "demo", (f"layout={layout}", f"out={out or self.out}"))

    def killed(self) -> str:
        """Train until a rank is killed; what is then args."""
        from ..comm import RankFailed, launch
        from ..train.loop import train

        self.watch(kill=True)
        try:
            launch(train, Layout.parse(FIRST).ranks, self.run_of(FIRST), FIRST, True)
        except RankFailed as error:
            return str(error).splitlines()[0]
        return "no rank was killed: the run was over before"

    def trained(self, out: Path, layout: str) -> None:
        from ..comm import launch
        from ..train.loop import train

        if out == self.out:
            self.watch(kill=False)
        ranks = Layout.parse(layout).ranks
        launch(
            train,
            ranks,
            self.run_of(layout, out),
            layout,
            True,
            backend="gloo" if ranks > 1 else "auto",
        )

    def watch(self, *, kill: bool) -> None:
        """Beside the run: say the loss now and then, and kill a rank when its step has come."""
        from ..layout.journal import read_journal

        journal = self.out / "metrics.jsonl"
        before = len(read_journal(journal))

        def look() -> None:
            told = before
            while True:
                records = read_journal(journal)
                for record in records[told:]:
                    self.tell(record)
                    if record["event"] == "end":
                        return
                    if kill and record["event"] == "step" and record["step"] >= KILL:
                        _kill_last_rank()
                        return
                told = len(records)
                time.sleep(0.05)

        threading.Thread(target=look, daemon=True).start()

    def tell(self, record: dict[str, Any]) -> None:
        if record["event"] == "step" and (record["step"] % 10 == 0 or record["step"] == 1):
            self.say(f"   step {record['step']:3}  loss {record['loss']:.4f}")
        elif record["event"] == "checkpoint":
            self.say(f"   saved {record['path']}")
        elif record["event"] == "resume":
            self.say(f"   {record['text']}")
        elif record["event"] == "validation":
            self.say(f"   validation loss {record['loss']:.4f} nats per byte")

    def page(self) -> Path:
        from ..layout.files import write_text
        from ..report import report

        path = self.out / "report.html"
        write_text(path, report(self.out))
        return path


def _kill_last_rank() -> None:
    children = multiprocessing.active_children()
    last = max(children, key=lambda child: child.pid or 0, default=None)
    if last is not None and last.pid is not None:
        os.kill(last.pid, signal.SIGKILL)


def losses_of(out: Path) -> dict[int, float]:
    """The loss of every step, as it was last done."""
    from ..layout.journal import read_journal

    records = read_journal(out / "metrics.jsonl")
    return {r["step"]: r["loss"] for r in records if r["event"] == "step"}
