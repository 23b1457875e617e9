"""A run as one HTML page: what metrics.jsonl and the files beside it contain.

Everything in those files is data: text is escaped, and numbers are checked to be numbers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..draw import (
    ChartAxis,
    Html,
    MeshPicture,
    Picture,
    Series,
    chart,
    frame,
    mesh_svg,
    paragraphs,
    table,
    tag,
    timeline,
)
from ..layout import Layout
from ..layout.files import read_text
from ..layout.goodput import Goodput
from ..layout.journal import read_journal
from ..layout.numbers import binary_text
from ..program import Timeline
from .compared import Compared

TIMELINE = 1 << 26  # bytes of a measured step
MOST_RANKS = 4096  # ranks of a mesh

Record = dict[str, Any]


class ReportError(ValueError):
    """A folder of which no report can be made."""


@dataclass(frozen=True)
class _Journal:
    """The records of a run, by event."""

    records: list[Record]

    def of(self, event: str) -> list[Record]:
        return [r for r in self.records if r["event"] == event]

    @cached_property
    def starts(self) -> list[Record]:
        return self.of("start")

    @cached_property
    def segments(self) -> list[tuple[list[Record], list[Record]]]:
        """The steps of each start: those that count, and those that a later start did again."""
        steps: list[list[Record]] = []
        for record in self.records:
            if record["event"] == "start":
                steps.append([])
            elif record["event"] == "step" and steps:
                steps[-1].append(record)
        begins = [_number(start, "step") for start in self.starts]
        again = [
            min(filter(math.isfinite, begins[n:]), default=math.inf)
            for n in range(1, len(begins) + 1)
        ]
        return [
            (
                [r for r in segment if not _number(r, "step") > end],
                [r for r in segment if _number(r, "step") > end],
            )
            for segment, end in zip(steps, again, strict=True)
        ]

    @cached_property
    def steps(self) -> list[Record]:
        """The steps that count."""
        return [record for kept, _ in self.segments for record in kept]


def report(folder: Path, compared: Compared | None = None) -> str:
    """The page of a run's folder; with a comparison, also what a plan says of its step."""
    records = read_journal(folder / "metrics.jsonl")
    journal = _Journal(records)
    if not journal.starts:
        raise ReportError(
            f"{folder} holds no run: metrics.jsonl with a start is missing."
            " Name the folder that `phalanx train` wrote, its `out`."
        )
    parts = {
        "Loss": _loss(journal),
        "Step time": _curve(journal, "step time", "ms", [("seconds", 1e3, "ms a step")]),
        "Efficiency": _efficiency(journal),
        "Memory": _memory(journal),
        "One step, as measured": _timeline(folder),
        "Predicted against measured": compared.html() if compared else "",
        "Mesh": _mesh(journal.starts[-1]),
        "The run hung": _hangs(journal),
        "What happened": _events(journal),
        "Configuration": _configuration(folder),
        "Versions": _versions(journal),
    }
    body = [text for title, part in parts.items() if part for text in (tag("h2", title), part)]
    return frame(f"run {folder.resolve().name}", _summary(journal), *body)


def _number(record: Record, name: str) -> float:
    value = record.get(name)
    # What was not finite is written as text; a picture leaves it out.
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # a whole number of hundreds of digits
        return math.nan


def _points(
    records: Sequence[Record], name: str, scale: float = 1.0
) -> tuple[tuple[float, float], ...]:
    points = ((_number(r, "step"), _number(r, name) * scale) for r in records)
    return tuple((x, y) for x, y in points if math.isfinite(x) and math.isfinite(y))


def _marks(journal: _Journal) -> list[tuple[float, str]]:
    words = [f"{'restart' if n else 'start'}: {_layout(s)}" for n, s in enumerate(journal.starts)]
    marks = ((_number(s, "step"), text) for s, text in zip(journal.starts, words, strict=True))
    return [(step, text) for step, text in marks if math.isfinite(step)]


def _layout(start: Record) -> str:
    return str(start.get("layout") or "one rank")


def _summary(journal: _Journal) -> Html:
    last, steps = journal.starts[-1], journal.steps
    model = last.get("model")
    name = model.get("name", "") if isinstance(model, dict) else ""
    parameters = _number(last, "parameters")
    ended = "ended" if journal.of("end") and journal.records[-1]["event"] == "end" else "not ended"
    if journal.records[-1]["event"] == "stop":
        ended = "stopped, can be resumed"
    at = _number(steps[-1], "step") if steps else _number(last, "step")
    lines = [
        f"{name}, {parameters:,.0f} parameters, on {last.get('data')}; step {at:.0f} of"
        f" {last.get('steps')}, {ended}",
        f"{len(journal.starts)} starts; the last as {_layout(last)} on {last.get('ranks')} ranks",
    ]
    if steps:
        rate = statistics.median(_number(s, "tokens_per_second") for s in steps)
        lines.append(f"loss {_number(steps[-1], 'loss'):.4f}; {rate:,.0f} tokens/s (median)")
        lines.append(str(Goodput(journal.records)))
    if checked := journal.of("validation"):
        bits = _number(checked[-1], "bits_per_byte")
        more = f", {bits:.4f} bits per byte" if math.isfinite(bits) else ""
        lines.append(f"validation loss {_number(checked[-1], 'loss'):.4f} nats per token{more}")
    return paragraphs(lines)


def _lines(journal: _Journal, name: str, scale: float, words: str) -> list[Series]:
    """A line for each start; steps that a later start did again are faint, from where it began."""
    series = []
    for kept, again in journal.segments:
        series.append(Series(words, _points(kept, name, scale), dots=False))
        if again:
            lost = _points([*kept[-1:], *again], name, scale)
            series.append(Series(words, lost, dots=False, faint=True))
    return series


def _drawn(
    journal: _Journal, title: str, unit: str, series: Sequence[Series], *, zero: bool = True
) -> Html:
    if not any(each.points for each in series):
        return paragraphs([f"{title}: nothing was recorded yet."])
    x, y = ChartAxis("step", "{:.0f}".format, base=0), ChartAxis(unit, base=0, zero=zero)
    return tag("div", chart(title, series, x, y, marks=_marks(journal)), cls="scroll")


def _loss(journal: _Journal) -> Html:
    series = _lines(journal, "loss", 1.0, "training")
    series.append(Series("validation", _points(journal.of("validation"), "loss"), joined=False))
    note = (
        "Dashed: where the run was started, and in which layout. Faint: steps that were repeated."
    )
    return Html(paragraphs([note]) + _drawn(journal, "loss", "nats per token", series, zero=False))


def _curve(journal: _Journal, title: str, unit: str, of: Sequence[tuple[str, float, str]]) -> Html:
    series = [line for name, scale, words in of for line in _lines(journal, name, scale, words)]
    return _drawn(journal, title, unit, series)


def _efficiency(journal: _Journal) -> Html:
    last = journal.starts[-1]
    note = (
        f"Of a peak of {_number(last, 'peak_flops') / 1e12:.4g} TFLOP/s over all ranks"
        f" ({last.get('peak_from')}). MFU counts what the model needs, with causal attention; HFU"
        " also counts recomputation. With full attention MFU would be higher by"
        f" {_more(last):.1f} %."
    )
    drawn = _curve(journal, "MFU and HFU", "%", [("mfu", 100, "MFU"), ("hfu", 100, "HFU")])
    return Html(paragraphs([note]) + drawn)


def _more(start: Record) -> float:
    flops = start.get("flops")
    if not isinstance(flops, dict) or not _number(flops, "model"):
        return math.nan
    return 100 * (_number(flops, "full") / _number(flops, "model") - 1)


def _memory(journal: _Journal) -> Html:
    measured = journal.of("memory")
    ranks = measured[-1].get("ranks") if measured else None
    if not isinstance(ranks, list):
        return paragraphs(["Not measured yet."])
    kinds = ("weights", "optimizer", "gathered and gradients")
    head = ["rank", *(words for kind in kinds for words in (f"{kind}, predicted", "measured"))]
    rows = [
        [rank, *(_size(_inside(one, how, k)) for k in kinds for how in ("promised", "measured"))]
        for rank, one in enumerate(ranks)
    ]
    most = max((_number(s, "memory") for s in journal.steps), default=math.nan)
    note = (
        "The largest number of bytes of each kind: what the checked program predicts, and what was"
        " measured. Activations are not included. The most that one rank used for everything,"
        f" its process included: {_size(most)}."
    )
    return Html(paragraphs([note]) + table(head, rows))


def _size(count: float) -> str:
    return binary_text(count) if math.isfinite(count) else "-"


def _inside(one: Any, how: str, kind: str) -> float:
    inner = one.get(how) if isinstance(one, dict) else None
    return _number(inner, kind) if isinstance(inner, dict) else math.nan


def _timeline(folder: Path) -> Html:
    path = folder / "timeline.json"
    if not path.is_file():
        return paragraphs(["Not measured yet."])
    try:
        seconds = Timeline.from_json(read_text(path, "timeline", ReportError, TIMELINE))
    except ValueError as error:
        return paragraphs([f"{path.name} cannot be read: {error}"])
    spans = tuple(s._replace(start=1e3 * s.start, end=1e3 * s.end) for s in seconds.spans)
    return timeline(Picture("a measured step", Timeline(spans), clock=" ms"))


def _mesh(start: Record) -> Html:
    try:
        picture = MeshPicture(Layout.parse(str(start.get("layout", ""))))
    except ValueError as error:
        return paragraphs([str(error)])
    if picture.mesh.size > MOST_RANKS:
        return paragraphs([f"{picture.title}, too many for a picture."])
    return tag("div", mesh_svg(picture), cls="scroll")


def _hangs(journal: _Journal) -> Html:
    """What the watcher said each time, as it was on the screen."""
    return Html("".join(tag("pre", str(record.get("text", ""))) for record in journal.of("hang")))


def _events(journal: _Journal) -> Html:
    begun = _number(journal.starts[0], "time")
    rows = [
        (f"{_number(r, 'time') - begun:.1f} s", r["event"], r.get("step", ""), " ".join(_words(r)))
        for r in journal.records
        if r["event"] not in ("step", "memory", "hang")
    ]
    return tag("div", table(("after", "event", "step", "details"), rows, left=True), cls="fold")


def _words(record: Record) -> Iterator[str]:
    names = "layout ranks why text path error loss bits_per_byte graphs"
    for name in names.split():
        value = record.get(name)
        if value not in (None, ""):
            yield f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}"


def _configuration(folder: Path) -> Html:
    path = folder / "run.toml"
    try:
        text = read_text(path, "run file", ReportError) if path.is_file() else ""
    except ReportError as error:
        return paragraphs([str(error)])
    return tag("pre", text)


def _versions(journal: _Journal) -> Html:
    rows = []
    for number, start in enumerate(journal.starts, 1):
        versions = start.get("versions")
        words = versions.items() if isinstance(versions, dict) else ()
        rows.append((f"start {number}", ", ".join(f"{name} {value}" for name, value in words)))
    return tag("div", table(("", "versions"), rows, left=True), cls="fold")
