"""Accounts for a run's time by its metrics.jsonl: useful steps, and everything else.

A record has the seconds that its process spent in each phase since the previous record
(`spent`, from a monotonic clock), and its time of writing on the calendar and on the
clock of this boot. The time between two processes is measured on the boot clock if the
machine was not restarted in between, otherwise on the calendar. If the calendar was set
back, that interval is ignored.
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
# Phases of a rank that belong to a part. All others are "other".
_PART_OF = {
    "in a step": "steps",
    "first step": "steps",
    "loading data": "steps",
    "reading a checkpoint": "starting",
    "comparing copies": "validating",
    "sampling": "validating",
}


class Goodput:
    """The share of useful step time since the first start, and the parts of the rest.

    steps: including loading their data. lost steps: those repeated after a restart.
    starting: from a process's start to its first step. down: between two processes,
    including the first one's work after its last record, and the time of a hang. other:
    logging, and everything else between steps.
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.spent = dict.fromkeys(PARTS, 0.0)
        self.unusable = 0
        self._last: Record = {}
        # (last step, number of steps, seconds per step)
        self._kept: list[tuple[int, int, float]] = []
        self._open = 0.0  # seconds of steps without a record yet
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        """Add the next record. An unusable one is skipped and counted in `unusable`."""
        # Read every number before anything is added: a broken record must
        # change nothing.
        try:
            _number(record, "time")
            numbers = record["event"] in ("start", "step")
            at = _number(record, "step") if numbers else 0.0
            count = (
                max(1, int(_number(record, "steps")))
                if record["event"] == "step"
                else 0
            )
            # Seconds from the start of the process to its first record.
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
        # Before the first record, the process's own clock is all there is.
        passed = _between(self._last, record) if self._last else up
        # What is not starting up was time without a process.
        if begins:
            up = min(passed, max(0.0, up))
            self.spent["starting"] += up
            self.spent["down"] += passed - up
        elif record["event"] == "hang":
            # Until a hang is found, time passes without work.
            self.spent["down"] += passed
        else:
            for part, seconds in spent.items():
                self.spent[part] += seconds
            # Seconds of steps, kept until a record tells which steps they
            # were.
            self._open += spent.get("steps", 0.0)
            # Time that no phase claims.
            self.spent["other"] += max(0.0, passed - sum(spent.values()))
        if record["event"] == "start":
            self._lose(at)
        elif count:
            self._kept.append((int(at), count, self._open / count))
            self._open = 0.0
        # A watcher's records have no start of a process: keep that of the
        # ranks.
        self._last = {"began": self._last.get("began"), **record}

    def _lose(self, at: float) -> None:
        """Mark a restart at this step: later steps will be repeated."""
        lost, kept = self._open, []
        for end, count, each in self._kept:
            # A record covers steps `end - count + 1` to `end`; those after
            # `at` are repeated.
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
        shown = {
            part: s / total
            for part, s in self.spent.items()
            if s >= 5e-4 * total
        }
        shares = ", ".join(
            f"{part} {100 * share:.3g} %" for part, share in shown.items()
        )
        return f"goodput {100 * float(self):.3g} % of {total:,.0f} s: {shares}"


def _spent(record: Record, steps: int) -> dict[str, float]:
    """The seconds of each part since the previous record."""
    table = record.get("spent")
    if not isinstance(table, dict):
        # Each phase belongs to one part, and unknown ones to "other".
        # From an earlier version, which recorded only the time of steps.
        return {"steps": steps * _number(record, "seconds")} if steps else {}
    spent: dict[str, float] = {}
    for phase in table:
        part = _PART_OF.get(phase, phase if phase in PARTS else "other")
        spent[part] = spent.get(part, 0.0) + _number(table, phase)
    return spent


def _begins(last: Record, record: Record) -> bool:
    """True if a record is the first of its process."""
    # A process is identified by its boot and its start on that boot's clock.
    if (
        not last or "began" not in record
    ):  # from a watcher, or an earlier version
        return not last or (record["event"] == "start" and not last["began"])
    return (record.get("boot"), record["began"]) != (
        last.get("boot"),
        last.get("began"),
    )


def _between(last: Record, record: Record) -> float:
    """The seconds from one record to the next, as far as they are known."""
    same = record.get("boot") and record.get("boot") == last.get("boot")
    # Clocks of different boots cannot be compared: use the calendar.
    for key in ("clock", "time") if same else ("time",):
        with suppress(ValueError):
            return max(0.0, _number(record, key) - _number(last, key))
    return 0.0


def _number(record: Record, key: str) -> float:
    """A number of a record that is at least 0; raises ValueError if there is none."""
    value = record.get(key)
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not 0 <= value < 1e15
    ):
        raise ValueError(key)
    return float(value)
