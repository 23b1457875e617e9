"""A run over wall time: the use of each second, the run's processes, and their
failures."""

from collections.abc import Iterable, Sequence
from typing import Any

from ..drawing import COLOURS, Area, Bar, Html, KeyEntry, Row, gantt
from ..layout.goodput import PARTS, Goodput
from ..layout.journal import Record
from ..layout.numbers import seconds_text

BINS = 240
_FILLS = dict(zip(PARTS, COLOURS, strict=False))
_ODD = {
    "hang": "#d55e00",
    "killed": "#d55e00",
    "straggler": "#e69f00",
    "skip": "#cc79a7",
}
_ODD |= {"not kept": "#cc79a7", "stop": "#56b4e9", "checkpoint": "#2fb98f"}


class Spent(Goodput):
    """Goodput with times.

    `parts` are (start, end, seconds of each part) since the run began. `records` are
    the start and end of each usable record's time, without the downtime before it.
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.parts: list[tuple[float, float, dict[str, float]]] = []
        self.records: list[tuple[float, float, Record]] = []
        super().__init__(records)

    def add(self, record: Record) -> None:
        before, begun, unusable = dict(self.spent), self.total, self.unusable
        super().add(record)
        if self.unusable > unusable:
            return
        # What this record has added to each part.
        more = {part: self.spent[part] - before[part] for part in PARTS}
        # A restart moves steps to "lost steps": they were counted as steps
        # before.
        again = max(0.0, more.pop("lost steps"))
        more["steps"] += again
        # First the time without a process, then that of the record.
        up = begun + more["down"]
        self.parts.append(
            (begun, up, {"down": more.pop("down"), "steps": 0.0})
        )
        self.parts.append((up, self.total, more))
        self.records.append((up, self.total, record))
        # The repeated steps are the most recent ones before this start.
        for *_, parts in reversed(self.parts):
            moved = min(again, parts["steps"])
            parts["steps"] -= moved
            parts["lost steps"] = parts.get("lost steps", 0.0) + moved
            again -= moved
            if again <= 0:
                break

    def over_time(self) -> dict[str, list[float]]:
        """Return the seconds of each part in each of `BINS` equal intervals of the
        run."""
        width = self.total / BINS or 1.0
        bins = {part: [0.0] * BINS for part in PARTS}
        for start, end, parts in self.parts:
            first, last = int(start / width), min(int(end / width), BINS - 1)
            for n in range(min(first, BINS - 1), last + 1):
                inside = min(end, (n + 1) * width) - max(start, n * width)
                # A part is spread evenly over its own interval.
                share = inside / (end - start) if end > start else 1.0
                for part, seconds in parts.items():
                    bins[part][n] += share * seconds
        return bins


def faults_svg(records: Sequence[Record], width: float) -> Html:
    """Draw the chart; empty if no time has passed."""
    spent = Spent(records)
    if spent.total <= 0:
        return Html("")
    each, total = spent.total / BINS, spent.total
    areas = []
    for part, seconds in spent.over_time().items():
        # Parts below 0.05 % cannot be seen.
        if spent.spent[part] >= 5e-4 * total:
            levels = [(n * each, s / each) for n, s in enumerate(seconds)]
            tip = f"{part}: {seconds_text(spent.spent[part])}, {spent.spent[part] / total:.1%}"
            areas.append(Area(part, levels, _FILLS[part], tip))
    rows = [
        Row("time", areas=areas, tall=56),
        Row("processes", _lives(spent), tall=20),
    ]
    wide = total / max(width, 1) * 5  # five pixels
    marks: dict[str, list[Bar]] = {kind: [] for kind in _ODD}
    for at, kind, words in _odd(spent):
        bar = Bar(
            max(0.0, at - wide), max(wide, at), _ODD[kind], "#000000", words
        )
        marks[kind].append(bar)
    rows += [
        Row(f"{kind} ({len(of)})", of, main=False)
        for kind, of in marks.items()
        if of
    ]
    return gantt(
        "where the time of the run went",
        rows,
        0.0,
        total,
        clock=" s",
        notes=[str(spent)],
        colours=[KeyEntry(_FILLS[area.name], area.name) for area in areas],
        width=width,
    )


def _lives(spent: Spent) -> list[Bar]:
    """Return a bar for each process of rank 0, from the start of its first record to
    the end of its last."""
    lives: list[list[tuple[float, float, Record]]] = []
    last: Any = object()
    for start, end, record in spent.records:
        # A process is known by its boot and the time of its start.
        process = record.get("boot"), record.get("began")
        if (
            record["event"] == "hang"
        ):  # written by the watcher of the hanging process
            continue
        # Records of earlier versions have neither: a start begins a process
        # there.
        if process != last or (
            process == (None, None) and record["event"] == "start"
        ):
            lives.append([])
        last = process
        lives[-1].append((start, end, record))
    found = []
    for number, life in enumerate(lives, 1):
        layouts = [
            str(r.get("layout") or "one rank")
            for *_, r in life
            if r["event"] == "start"
        ]
        layout, start, end = (
            layouts[0] if layouts else "",
            life[0][0],
            life[-1][1],
        )
        words = f"process {number}: {layout}, {seconds_text(start)} to {seconds_text(end)}"
        found.append(
            Bar(
                start, end, COLOURS[7], "#000000", words, (layout, str(number))
            )
        )
    return found


def was_killed(before: Record, record: Record) -> bool:
    """True if `record` is a process's first and the process of `before` was killed."""
    if not before or record["event"] == "hang":
        return False
    begins = record.get("began") != before.get("began")
    # Records of earlier versions have no time of the process.
    begins = begins or ("began" not in record and record["event"] == "start")
    # Otherwise it ended by itself, or its watcher ended it.
    return begins and before["event"] not in ("end", "stop", "hang")


def _odd(spent: Spent) -> list[tuple[float, str, str]]:
    """List (time, kind, text) of all events other than steps. A process without an end
    was killed."""
    found = []
    before: Record = {}
    at = 0.0
    for _, end, record in spent.records:
        event = str(record["event"])
        if was_killed(before, record):
            step = f" after step {before['step']}" if "step" in before else ""
            found.append((at, "killed", f"killed{step}, {seconds_text(at)}"))
        if event in _ODD and not record.get("error"):
            step = f" at step {record['step']}" if "step" in record else ""
            why = str(record.get("why") or record.get("text") or "").split(
                "\n"
            )[0]
            words = f"{event}{step}, {seconds_text(end)}" + f": {why}" * bool(
                why
            )
            found.append((end, event, words))
        before, at = record, end
    return found
