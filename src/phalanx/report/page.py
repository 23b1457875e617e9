"""A run as one HTML page or as pictures, from metrics.jsonl and the files beside it.

The files are treated as data: text is escaped, and numbers are checked.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from ..drawing.chart import ChartAxis, Series, chart
from ..drawing.chrome import chrome
from ..drawing.markup import WIDE, Html, paragraphs, table, tag
from ..drawing.mesh import MeshPicture, mesh_svg
from ..drawing.page import figure, frame, timeline
from ..drawing.parts import breakdown_svg, memory_svg
from ..drawing.picture import Picture
from ..drawing.svg import svg
from ..layout import Layout
from ..layout.files import read_text
from ..layout.goodput import Goodput
from ..layout.journal import read_journal
from ..layout.numbers import binary_text
from ..layout.url import redacted
from .compared import Compared
from .faults import faults_svg, was_killed

MOST_RANKS = 4096  # maximum ranks in the picture of a mesh
Draw = Callable[[float], Html]  # argument: the width in pixels

Record = dict[str, Any]


class ReportError(ValueError):
    """Raised for a folder that cannot be reported on."""


def number(record: Mapping[str, Any], name: str) -> float:
    value = record.get(name)
    # Non-finite numbers are written as text; pictures omit them.
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # an integer of hundreds of digits
        return math.nan


def records_of(folder: Path) -> list[Record]:
    """Return the records of a run; raise if the folder is not one of a run."""
    records = read_journal(folder / "metrics.jsonl")
    if not any(record["event"] == "start" for record in records):
        raise ReportError(
            f"{folder} is not the folder of a run: it has no start in metrics.jsonl."
            " Name the folder that `phalanx train` wrote, its `out`."
        )
    return records


def stretches(records: Iterable[Record]) -> list[tuple[Record, list[Record]]]:
    """Return each start of a run with its steps."""
    found: list[tuple[Record, list[Record]]] = []
    for record in records:
        if record["event"] == "start":
            found.append((record, []))
        elif record["event"] == "step" and found:
            found[-1][1].append(record)
    return found


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
        """The steps of each start: those that count, and those that a later start
        repeated."""
        segments, end = list[tuple[list[Record], list[Record]]](), math.inf
        # From the last start backwards: steps beyond a later start's beginning
        # were repeated.
        for start, steps in reversed(stretches(self.records)):
            # `not >` keeps records without a number.
            kept = [r for r in steps if not number(r, "step") > end]
            segments.append(
                (kept, [r for r in steps if number(r, "step") > end])
            )
            end = min(end, number(start, "step"))  # NaN compares as false
        return segments[::-1]

    @cached_property
    def steps(self) -> list[Record]:
        """The steps that count."""
        return [record for kept, _ in self.segments for record in kept]


@dataclass(frozen=True)
class Section:
    """A part of the page: text, and a picture with its file name."""

    title: str
    words: Html = Html("")
    name: str = ""
    draw: Draw | None = None

    @property
    def html(self) -> Html:
        return Html(self.words + (figure(self.draw) if self.draw else ""))


@dataclass(frozen=True)
class RunReport:
    """A run's page and its pictures. `step` is the measured step over the predicted
    one."""

    name: str
    summary: Html
    sections: tuple[Section, ...]
    step: Picture | None

    def html(self) -> str:
        shown = [(s.title, s.html) for s in self.sections]
        body = [
            text
            for title, part in shown
            if part
            for text in (tag("h2", title), part)
        ]
        return frame(f"run {self.name}", self.summary, *body)

    def pictures(self) -> dict[str, str]:
        """Return each picture as SVG, and the step as a trace for Perfetto, by file
        name."""
        drawn = {
            f"{s.name}.svg": str(s.draw(WIDE)) for s in self.sections if s.draw
        }
        if self.step:
            drawn |= {
                "step.svg": svg(self.step, 1500),
                "trace.json": chrome(self.step),
            }
            drawn |= (
                {"memory.svg": memory_svg(self.step)}
                if self.step.timeline.memory
                else {}
            )
        return drawn


def report(folder: Path, more: "Extras | None" = None) -> "RunReport":
    """Return the report of a run's folder. `more` adds a step, a comparison and further
    sections."""
    journal, more = _Journal(records_of(folder)), more or Extras()
    step, faults = more.step, partial(faults_svg, journal.records)
    measured = (
        timeline(step)
        if step
        else paragraphs([more.no_step or "Not measured yet."])
    )
    every = more.every or step
    parts = partial(breakdown_svg, every) if every else None
    # the watcher's messages, as shown on the screen
    hangs = Html(
        "".join(
            tag("pre", str(record.get("text", "")))
            for record in journal.of("hang")
        )
    )
    sections = (
        _loss(journal),
        _curve(
            journal,
            "Step time",
            "ms",
            _lines(journal, "seconds", 1e3, "ms a step"),
        ),
        _efficiency(journal),
        Section("What the model writes", _written(journal)),
        Section(
            "Where the time of the run went",
            name="faults",
            draw=faults if faults(WIDE) else None,
        ),
        Section("One step, predicted and measured", measured),
        Section("What happened in that step", paragraphs(more.happened)),
        Section(
            "Where the time of that step goes", name="breakdown", draw=parts
        ),
        Section(
            "Predicted against measured",
            more.compared.html() if more.compared else Html(""),
        ),
        _memory(journal),
        _mesh(journal.starts[-1]),
        *more.sections,
        Section("The run hung", hangs),
        Section("What happened in the run", _events(journal)),
        Section("Configuration", _configuration(folder)),
        Section("Versions", _versions(journal)),
    )
    return RunReport(folder.resolve().name, _summary(journal), sections, step)


@dataclass(frozen=True)
class Extras:
    """Additions to a run's own records: its step, a plan's comparison, further
    sections."""

    step: Picture | None = None
    no_step: str = ""  # the reason why there is none
    happened: tuple[str, ...] = ()  # the step in sentences
    every: Picture | None = None  # the step of all ranks, if they are few
    compared: Compared | None = None
    sections: tuple[Section, ...] = ()


def _points(
    records: Sequence[Record], name: str, scale: float = 1.0
) -> tuple[tuple[float, float], ...]:
    points = ((number(r, "step"), number(r, name) * scale) for r in records)
    return tuple(
        (x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)
    )


def _marks(journal: _Journal) -> list[tuple[float, str]]:
    named = (
        (f"{'restart' if n else 'start'}: ", s)
        for n, s in enumerate(journal.starts)
    )
    marks = [
        (number(start, "step"), word + _layout(start)) for word, start in named
    ]
    return [(step, words) for step, words in marks if math.isfinite(step)]


def _layout(start: Record) -> str:
    return str(start.get("layout") or "one rank")


def _summary(journal: _Journal) -> Html:
    last, steps = journal.starts[-1], journal.steps
    model = last.get("model")
    name = model.get("name", "") if isinstance(model, dict) else ""
    parameters = number(last, "parameters")
    words = {"end": "ended", "stop": "stopped, can be resumed"}
    # The journal's last record tells how the run ended.
    ended = words.get(journal.records[-1]["event"], "not ended")
    at = number(steps[-1], "step") if steps else number(last, "step")
    ranks = _counted(last.get("ranks"), "rank")
    lines = [
        f"{name}, {parameters:,.0f} parameters, on {last.get('data')}; step {at:.0f} of"
        f" {last.get('steps')}, {ended}",
        f"{_counted(len(journal.starts), 'start')}; the last as {_layout(last)} on {ranks}",
    ]
    if steps:
        # The median, because a step with a save or a validation takes longer.
        rate = statistics.median(number(s, "tokens_per_second") for s in steps)
        lines.append(
            f"loss {number(steps[-1], 'loss'):.4f}; {rate:,.0f} tokens/s (median)"
        )
        lines.append(str(Goodput(journal.records)))
    if checked := journal.of("validation"):
        bits = number(checked[-1], "bits_per_byte")
        more = f", {bits:.4f} bits per byte" if math.isfinite(bits) else ""
        lines.append(
            f"validation loss {number(checked[-1], 'loss'):.4f} nats per token{more}"
        )
    return paragraphs(lines)


def _counted(count: object, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _lines(
    journal: _Journal, name: str, scale: float, words: str
) -> list[Series]:
    """Return a line for each start; repeated steps are faint, from where the later
    start began."""
    series = []
    for kept, again in journal.segments:
        series.append(Series(words, _points(kept, name, scale), dots=False))
        if again:
            # Joined to the last step that counts.
            lost = _points([*kept[-1:], *again], name, scale)
            series.append(Series(words, lost, dots=False, faint=True))
    return series


def _curve(
    journal: _Journal,
    title: str,
    unit: str,
    series: list[Series],
    note: str = "",
    zero: bool = True,
) -> Section:
    name = title.lower()
    if not any(each.points for each in series):
        return Section(
            title, paragraphs([f"{name}: nothing has been recorded yet."])
        )
    x, y = (
        ChartAxis("step", "{:.0f}".format, base=0),
        ChartAxis(unit, base=0, zero=zero),
    )
    draw = partial(chart, name, series, x, y, (), _marks(journal))
    return Section(
        title, paragraphs([note] if note else []), name.replace(" ", "-"), draw
    )


def _loss(journal: _Journal) -> Section:
    series = _lines(journal, "loss", 1.0, "training")
    series.append(
        # Single points: validations are rare.
        Series(
            "validation",
            _points(journal.of("validation"), "loss"),
            joined=False,
        )
    )
    dashed = "Dashed lines: starts of the run, with their layouts."
    note = f"{dashed} Faint: repeated steps."
    return _curve(journal, "Loss", "nats per token", series, note, zero=False)


def _written(journal: _Journal) -> Html:
    """Return the texts that the model wrote, by step; empty without any."""
    samples = journal.of("sample")
    rows = [(str(s.get("step")), _text_of(s)) for s in samples if "step" in s]
    return table(("step", "text"), rows) if rows else Html("")


def _text_of(sample: Record) -> str:
    return f"{sample.get('prompt', '')}{sample.get('text', '')}"


def _efficiency(journal: _Journal) -> Section:
    last = journal.starts[-1]
    model, full = (
        _inside(last, "flops", "model"),
        _inside(last, "flops", "full"),
    )
    note = (
        f"Relative to a peak of {number(last, 'peak_flops') / 1e12:.4g} TFLOP/s over all ranks"
        f" ({last.get('peak_from')}). MFU counts what the model needs, with causal attention; HFU"
        " also counts recomputation. With full attention MFU would be higher by"
        f" {100 * (full / model - 1) if model else math.nan:.1f} %."
    )
    lines = _lines(journal, "mfu", 100, "MFU") + _lines(
        journal, "hfu", 100, "HFU"
    )
    return _curve(journal, "Efficiency", "%", lines, note)


def _memory(journal: _Journal) -> Section:
    measured = journal.of("memory")
    ranks = measured[-1].get("ranks") if measured else None
    if not isinstance(ranks, list):
        return Section("Memory", paragraphs(["Not measured yet."]))
    kinds = ("weights", "optimizer", "gathered and gradients")
    head = [
        "rank",
        *(
            words
            for kind in kinds
            for words in (f"{kind}, predicted", "measured")
        ),
    ]
    rows = [
        [
            rank,
            *(
                _size(_inside(one, how, k))
                for k in kinds
                for how in ("promised", "measured")
            ),
        ]
        for rank, one in enumerate(ranks)
    ]
    most = max((number(s, "memory") for s in journal.steps), default=math.nan)
    idle = max(
        (_inside(one, "idle", "buffers") for one in ranks), default=math.nan
    )
    note = (
        "The largest number of bytes of each kind: what the checked program predicts, and what was"
        " measured. Activations are not included."
    )
    if math.isfinite(idle):
        note += f" Nor are idle buffers kept for reuse: at most {_size(idle)} on a rank."
    note += (
        f" The peak memory of one rank, including its process: {_size(most)}."
    )
    return Section("Memory", Html(paragraphs([note]) + table(head, rows)))


def _size(count: float) -> str:
    return binary_text(count) if math.isfinite(count) else "-"


def _inside(one: Any, how: str, kind: str) -> float:
    inner = one.get(how) if isinstance(one, dict) else None
    return number(inner, kind) if isinstance(inner, dict) else math.nan


def _mesh(start: Record) -> Section:
    try:
        picture = MeshPicture(Layout.parse(str(start.get("layout", ""))))
    except ValueError as error:
        return Section("Mesh", paragraphs([str(error)]))
    if picture.mesh.size > MOST_RANKS:
        return Section(
            "Mesh", paragraphs([f"{picture.title}: too many for a picture."])
        )
    return Section("Mesh", name="mesh", draw=partial(mesh_svg, picture))


def _events(journal: _Journal) -> Html:
    begun = number(journal.starts[0], "time")
    rows = []
    before: Record = {}
    for record in journal.records:
        if was_killed(before, record):
            rows.append(_event(before, begun, "killed", "the process ended"))
        event = str(record["event"])
        if event not in ("step", "memory", "hang", "sample"):
            rows.append(_event(record, begun, event, _details(record)))
        before = record
    return tag(
        "div",
        table(("after", "event", "step", "details"), rows, left=True),
        cls="fold",
    )


def _event(
    record: Record, begun: float, event: str, details: str
) -> tuple[object, ...]:
    after = f"{number(record, 'time') - begun:.1f} s"
    return after, event, record.get("step", ""), details


# The values of an event that are shown, with the words around them; {s} is the plural.
_DETAILS = {
    "layout": "{}",
    "ranks": "{} rank{s}",
    "why": "{}",
    "text": "{}",
    "path": "in {}",
    "error": "error: {}",
    "loss": "loss {}",
    "bits_per_byte": "{} bits per byte",
    "graphs": "{} graph{s}",
}


def _details(record: Record) -> str:
    parts = []
    for name, words in _DETAILS.items():
        value = record.get(name)
        if value not in (None, ""):
            text = f"{value:.4f}" if isinstance(value, float) else str(value)
            parts.append(words.format(text, s="" if value == 1 else "s"))
    return ", ".join(parts)


def _configuration(folder: Path) -> Html:
    path = folder / "run.toml"
    try:
        text = (
            read_text(path, "run file", ReportError) if path.is_file() else ""
        )
        return tag("pre", redacted(text))
    except ReportError as error:
        return paragraphs([str(error)])


def _versions(journal: _Journal) -> Html:
    rows = []
    for n, start in enumerate(journal.starts, 1):
        versions = start.get("versions")
        words = versions.items() if isinstance(versions, dict) else ()
        rows.append(
            (
                f"start {n}",
                ", ".join(f"{name} {value}" for name, value in words),
            )
        )
    return tag("div", table(("", "versions"), rows, left=True), cls="fold")
