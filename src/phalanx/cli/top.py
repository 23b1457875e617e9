"""`phalanx top`: watches a running run in a terminal: steps, speed, memory, ranks, last
messages.

It shows the values of the last log line, goodput, the ranks, and the last messages.
Ranks of other hosts are shown if the run's folder is shared; of an ended run only the
log is shown. The line of a rank has its state (R running, S waiting, D waiting for a
disk, T stopped), its host memory, step and operation, and the time since it last
progressed.

  phalanx top runs/run
  phalanx top runs/run --once

Ctrl-C ends only top. Exit code 0: done; 2: wrong usage.
"""

import signal
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import Any

from rank_watch import ask_elsewhere, diagnose, snapshot
from rank_watch.positions import OVER

from ..layout.files import printable
from ..layout.goodput import Goodput
from ..layout.journal import JournalReader, Record
from ..layout.numbers import binary_text
from .parser import POSITIVE, Parser
from .usage import UsageError, complain, result, say, screen

_MESSAGES = 6
_ENDS = {
    "end": "ended",
    "stop": "stopped, can be resumed",
    "hang": "hung and was ended",
}
_QUIET = ("step", "memory", "compile")  # records that are not messages


def run(argv: list[str]) -> int:
    parser = Parser(__doc__)
    add = parser.add
    add("folder", metavar="RUNDIR", help="the folder of a run: its `out`")
    add(
        "--once",
        action="store_true",
        help="print once and exit, as without a terminal",
    )
    add(
        "--every",
        type=POSITIVE,
        default=1.0,
        metavar="SECONDS",
        help="time between updates",
    )
    add("--width")
    args = parser.read(argv)
    watched = _Run(Path(args.folder))
    if not watched.records:
        raise UsageError(
            f"{args.folder} is not the folder of a run: it has no records in metrics.jsonl. Name the `out`"
            " of one that has started."
        )
    width, terminal = screen(args.width)
    if args.once or args.json or not terminal:
        # A single look gives other hosts time to answer.
        watched.look(wait=2.0)
        for notice in watched.notices if args.json else ():
            complain(f"phalanx top: {notice}")
        result(args, watched.figures(), "\n".join(watched.lines(width)))
    else:
        _shown(watched, args.width, args.every)
    return 0


def _shown(watched: "_Run", width: int | None, every: float) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    # restores the screen on SIGTERM, too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console(highlight=False)
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                watched.look()
                lines = watched.lines(screen(width)[0], console.height)
                live.update(
                    Text(printable("\n".join(lines)), no_wrap=True),
                    refresh=True,
                )
                time.sleep(every)
    except KeyboardInterrupt:
        say("\n".join(watched.lines(screen(width)[0])))


class _Run:
    """The current state of a run, as `top` shows it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.goodput = folder, Goodput()
        self.records: list[Record] = []  # the last messages
        self.last: dict[str, Record] = {}  # the last record of each kind
        self.unseen: list[str] = []  # hosts whose ranks are not visible
        self.notices: tuple[str, ...] = ()  # about the owner of the ranks
        self.reader = JournalReader(folder / "metrics.jsonl")
        self._read()

    def _read(self) -> None:
        for record in self.reader.more():
            if not isinstance(record["event"], str):
                continue  # the file may contain anything
            self.goodput.add(record)
            self.last[record["event"]] = record
            if record["event"] not in _QUIET:
                # One more than shown, so that the newest never pushes out its
                # reason.
                self.records = [*self.records[-_MESSAGES:], record]

    def look(self, wait: float = 0.0) -> None:
        """Read the current state, waiting up to `wait` seconds for other hosts."""
        here = snapshot(self.folder, 0.1, stacks=False)
        self.notices = here.notices
        others, self.unseen = ask_elsewhere(
            self.folder, [r.host for r in here.ranks], wait
        )
        self.ranks = sorted([*here.ranks, *others], key=lambda r: r.rank)
        self._read()
        # A minute where the run has no timeout of its own.
        self.found = diagnose(self.ranks, here.timeout or 60.0)
        if self.records[-1]["event"] in _ENDS:
            # Of a run that is over nobody needs to be seen.
            self.unseen = []

    @property
    def state(self) -> str:
        """The run's state, in a word or two."""
        live = [
            r for r in self.ranks if r.phase not in OVER and r.state != "X"
        ]
        if live:
            return "hangs" if self.found.hangs else "running"
        last = _ENDS.get(self.records[-1]["event"], "not running")
        return "not seen from here" if self.unseen else last

    def figures(self) -> dict[str, Any]:
        return {
            "run": str(self.folder),
            "state": self.state,
            "start": self.last.get("start"),
            "step": self.last.get("step"),
            "goodput": float(self.goodput),
            "parts": self.goodput.spent,
            "ranks": [
                {
                    **asdict(r),
                    "calls": [],
                    "waits": r.call.text if r.call else "",
                }
                for r in self.ranks
            ],
            "unseen": self.unseen,
            "messages": self.records[-_MESSAGES:],
        }

    def lines(self, width: int, height: int = 0) -> list[str]:
        """Return the screen's lines; height 0 means as many as needed."""
        head: list[str] = []
        # A hang is explained above everything else.
        why = (*self.found.lines, "") if self.found.hangs else ()
        for line in (
            *self.notices,
            *self._numbers(),
            str(self.goodput),
            "",
            *why,
        ):
            head += wrap(line, width, subsequent_indent="  ") or [""]
        messages = ["", *self._messages()]
        ranks = list(self._ranks(width))
        # Ranks take what messages and numbers leave.
        room = (
            max(3, height - len(head) - len(messages) - 1)
            if height
            else len(ranks)
        )
        if len(ranks) > room:
            ranks = [
                *ranks[: room - 1],
                f"and {len(ranks) - room + 1} more ranks",
            ]
        return [line[:width].rstrip() for line in (*head, *ranks, *messages)]

    def _numbers(self) -> Iterator[str]:
        start, step = self.last.get("start", {}), self.last.get("step", {})
        at, steps = (
            int(_number(r, k))
            # Before the first step, the step at which it started.
            for r, k in ((step or start, "step"), (start, "steps"))
        )
        layout = start.get("layout") or "one rank"
        yield f"{self.folder.resolve().name}: step {at}/{steps}, {self.state}, {layout}"
        if step:
            each = _number(step, "seconds")
            yield (
                f"loss {_number(step, 'loss'):.4f}  {_number(step, 'tokens_per_second'):,.0f} tokens/s"
                f"  MFU {100 * _number(step, 'mfu'):.1f} %  {binary_text(_number(step, 'memory'))} at most"
            )
            # At the speed of the last line.
            minutes = each * max(0, steps - at) / 60
            yield f"{each:.3g} s a step, {minutes // 60:.0f}:{minutes % 60:02.0f} h left at that"

    def _ranks(self, width: int) -> Iterator[str]:
        hosts = list(dict.fromkeys(r.host for r in self.ranks))
        narrow = width < 64
        if self.ranks:
            wide = "" if narrow else f"  {'process':>9}  {'memory':>9}"
            yield f"{'rank':>5}{wide}  {'step':>6}  {'for':>7}     doing"
        # If not all fit, those that have stood still longest come first.
        many = len(self.ranks) > 16
        for r in sorted(
            self.ranks, key=lambda r: -int(r.still) if many else r.rank
        ):
            waits = f", waits in {r.call.text}" if r.call else ""
            doing = f"{(r.op or r.phase).split(' (')[0]}{waits}"
            memory = binary_text(r.memory) if r.memory else ""
            wide = "" if narrow else f"  {r.pid:>9}  {memory:>9}"
            where = f" on {r.host}" if len(hosts) > 1 else ""
            # Steps are shown from 1, as the log does.
            stood = f"{r.step + 1:>6}  {r.still:>5.1f} s"
            yield f"{r.rank:>5}{wide}  {stood}  {r.state}  {doing}{where}"
        if self.unseen:
            more = (
                f" and {len(self.unseen) - 8} more hosts"
                if len(self.unseen) > 8
                else ""
            )
            yield f"not seen: the ranks on {', '.join(self.unseen[:8])}{more}"

    def _messages(self) -> Iterator[str]:
        """Yield the last log records that are not steps, with their messages."""
        for record in self.records[-_MESSAGES:]:
            at = time.strftime(
                "%d %H:%M:%S", time.localtime(_number(record, "time"))
            )
            words = ("text", "why", "error", "path")
            detail = next(
                (str(record[word]) for word in words if record.get(word)), ""
            )
            if record["event"] == "validation":
                detail = f"loss {_number(record, 'loss'):.4f}"
            elif record["event"] == "straggler":
                seconds = _number(record, "seconds")
                detail = f"rank {record.get('rank')}: {seconds:.3g} s of its own work a step"
            step = f"step {record['step']}  " if "step" in record else ""
            yield f"{at}  {record['event']}  {step}{detail.splitlines()[0] if detail else ''}"


def _number(record: Record, name: str) -> float:
    """Return a number of a record, or 0."""
    value = record.get(name)
    return (
        float(value)
        if isinstance(value, int | float) and abs(value) < 1e15
        else 0.0
    )
