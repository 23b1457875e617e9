"""Accounts for a run's time, from the records of its metrics.jsonl: useful steps, and everything
else.

A record has the seconds that its process spent on each phase since the previous record (`spent`, by
a monotonic clock), and the time of writing by the calendar and by the clock of this boot. The time
between two processes is measured by the boot clock if the machine was not restarted in between,
else by the calendar; if the calendar was set back, that interval is ignored.
"""

from collections.abc import Iterable
from contextlib import suppress

from .journal import Record

PARTS = (
    "steps",
    "lost steps",
    "starting",
    "compiling",
    "saving",
    "validating",
    "down",
    "other",
)
# Phases of a rank that are parts, or parts of them; all else is other.
_PART_OF = {
    "in a step": "steps",
    "first step": "steps",
    "loading data": "steps",
    "reading a checkpoint": "starting",
    "comparing copies": "validating",
    "sampling": "validating",
}


class Goodput:
    """Time in steps that count over all time since the first start, and the parts of the rest.
    steps: with their data. lost steps: those that a later start did again. starting: from where a
    process begins until its first step. down: between two processes, with what the first did after
    its last record, and what a hang took. other: logging, and what else stands between steps."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.spent = dict.fromkeys(PARTS, 0.0)
        self.unusable = 0
        self._last: Record = {}
        # the last step, how many, seconds of each
        self._kept: list[tuple[int, int, float]] = []
        self._open = 0.0  # seconds of steps of which no record has come yet
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        """The next record; one that is not usable is passed over, and `unusable` counts it."""
        try:
            _number(record, "time")
            numbers = record["event"] in ("start", "step")
            at = _number(record, "step") if numbers else 0.0
            count = (
                max(1, int(_number(record, "steps")))
                if record["event"] == "step"
                else 0
            )
            spent = _spent(record, count)
            begins = _begins(self._last, record)
            up = (
                _number(record, "clock") - _number(record, "began")
                if "began" in record
                else 0.0
            )
        except ValueError:
            self.unusable += 1
            return
        passed = _between(self._last, record) if self._last else up
        if begins:
            up = min(passed, max(0.0, up))
            self.spent["starting"] += up
            self.spent["down"] += passed - up
        elif record["event"] == "hang":
            self.spent["down"] += passed
        else:
            for part, seconds in spent.items():
                self.spent[part] += seconds
            self._open += spent.get("steps", 0.0)
            self.spent["other"] += max(0.0, passed - sum(spent.values()))
        if record["event"] == "start":
            self._lose(at)
        elif count:
            self._kept.append((int(at), count, self._open / count))
            self._open = 0.0
        self._last = {"began": self._last.get("began"), **record}

    def _lose(self, at: float) -> None:
        """A start goes on at this step: what was done beyond it is done again."""
        lost, kept = self._open, []
        for end, count, each in self._kept:
            again = int(min(count, max(0.0, end - at)))
            lost += again * each
            if count > again:
                kept.append((end - again, count - again, each))
        self.spent["steps"] -= lost
        self.spent["lost steps"] += lost
        self._kept, self._open = kept, 0.0

    @property
    def total(self) -> float:
        return sum(self.spent.values())

    def __float__(self) -> float:
        return min(1.0, max(0.0, self.spent["steps"] / max(1e-9, self.total)))

    def __str__(self) -> str:
        total = max(1e-9, self.total)
        shown = {part: s / total for part, s in self.spent.items() if s >= 5e-4 * total}
        shares = ", ".join(
            f"{part} {100 * share:.3g} %" for part, share in shown.items()
        )
        return f"goodput {100 * float(self):.3g} % of {total:,.0f} s: {shares}"


def _spent(record: Record, steps: int) -> dict[str, float]:
    """Seconds of each part since the record before."""
    table = record.get("spent")
    if not isinstance(table, dict):
        # Of an earlier version, which told only what a step took.
        return {"steps": steps * _number(record, "seconds")} if steps else {}
    spent: dict[str, float] = {}
    for phase in table:
        part = _PART_OF.get(phase, phase if phase in PARTS else "other")
        spent[part] = spent.get(part, 0.0) + _number(table, phase)
    return spent


def _begins(last: Record, record: Record) -> bool:
    """True if a record is the first of its process."""
    if not last or "began" not in record:  # of a watcher, or of an earlier version
        return not last or (record["event"] == "start" and not last["began"])
    return (record.get("boot"), record["began"]) != (
        last.get("boot"),
        last.get("began"),
    )


def _between(last: Record, record: Record) -> float:
    """Seconds from one record to the next, as far as they are known."""
    same = record.get("boot") and record.get("boot") == last.get("boot")
    for key in ("clock", "time") if same else ("time",):
        with suppress(ValueError):
            return max(0.0, _number(record, key) - _number(last, key))
    return 0.0


def _number(record: Record, key: str) -> float:
    """A number of a record, from 0; ValueError when there is none."""
    value = record.get(key)
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not 0 <= value < 1e15
    ):
        raise ValueError(key)
    return float(value)
