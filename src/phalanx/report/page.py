"""A run as one HTML page that needs nothing else: what metrics.jsonl and its neighbours tell.

Whatever stands in those files is data: every text is escaped, every number is read as one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from ..draw import MeshPicture, Picture, mesh_svg, svg
from ..layout import Layout
from ..layout.journal import read_journal
from ..program import Timeline
from .chart import Chart, Series, chart
from .compared import Compared

__all__ = ["ReportError", "report"]

Record = dict[str, Any]


class ReportError(ValueError):
    """A folder of which no report can be made."""


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" 
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
:root {{ --page: #ffffff; --ink: #1f2328; --soft: #59636e; --line: #d0d7de; --idle: #eef1f4;
  color-scheme: light dark }}
@media (prefers-color-scheme: dark) {{
  :root {{ --page: #0d1117; --ink: #e6edf3; --soft: #9198a1; --line: #3d444d; --idle: #1b222c }} }}
body {{ margin: 0 auto; max-width: 1100px; padding: 20px 24px 60px; background: var(--page);
  color: var(--ink);
  font: 14px/1.5 ui-sans-serif, system-ui, 'Segoe UI', Helvetica, Arial, sans-serif }}
h1 {{ font-size: 20px; margin: 0 0 4px }} h2 {{ font-size: 16px; margin: 30px 0 6px }}
p {{ margin: 2px 0; color: var(--soft) }}
.wide {{ overflow-x: auto }}
.chart {{ width: 100%; height: auto }}
.chart text {{ fill: var(--ink); font-size: 11px }} .chart .soft {{ fill: var(--soft) }}
.chart .end {{ text-anchor: end }} .chart .mid {{ text-anchor: middle }}
.chart .grid {{ stroke: var(--line) }} .chart .mark {{ stroke: var(--soft); stroke-dasharray: 4 3 }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
th, td {{ padding: 3px 18px 3px 0; border-bottom: 1px solid var(--line); text-align: right;
  vertical-align: top }}
th {{ font-weight: 600 }} td:first-child, th:first-child, .left td, .left th {{ text-align: left }}
pre {{ background: var(--idle); padding: 12px; border-radius: 8px; overflow-x: auto; font-size: 12px }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


@dataclass(frozen=True)
class _Told:
    """The records of a run by what they tell."""

    records: list[Record]

    def of(self, event: str) -> list[Record]:
        return [r for r in self.records if r["event"] == event]

    @property
    def starts(self) -> list[Record]:
        return self.of("start")

    def segments(self) -> list[list[Record]]:
        """The steps of each start."""
        found: list[list[Record]] = []
        for record in self.records:
            if record["event"] == "start":
                found.append([])
            elif record["event"] == "step" and found:
                found[-1].append(record)
        return found

    def steps(self) -> list[Record]:
        """The steps that count: those done again after a restart only as they were last done."""
        kept: list[Record] = []
        for record in self.records:
            if record["event"] == "start":
                kept = [k for k in kept if _number(k, "step") <= _number(record, "step")]
            elif record["event"] == "step":
                kept.append(record)
        return kept


def report(folder: Path, compared: Compared | None = None) -> str:
    """The page of a run's folder; with a comparison, also what a plan says of its step."""
    records = read_journal(folder / "metrics.jsonl")
    told = _Told(records)
    if not told.starts:
        raise ReportError(
            f"{folder} holds no run: metrics.jsonl with a start is missing."
            " Name the folder that `phalanx train` wrote, its `out`."
        )
    body = [
        _summary(told),
        "<h2>Loss</h2>", _loss(told),
        "<h2>Step time</h2>", _curve(told, "step time", "ms", [("seconds", 1e3, "ms a step")]),
        "<h2>Efficiency</h2>", _efficiency(told),
        "<h2>Memory</h2>", _memory(told),
        "<h2>One step, as measured</h2>", _timeline(folder),
        *(("<h2>Predicted against measured</h2>", compared.html()) if compared else ()),
        "<h2>Mesh</h2>", _mesh(told.starts[-1]),
        "<h2>What happened</h2>", _events(told),
        "<h2>Configuration</h2>", _configuration(folder),
        "<h2>Versions</h2>", _versions(told),
    ]  # fmt: skip
    title = escape(f"run {folder.resolve().name}")
    return _PAGE.format(title=title, body="\n".join(body))


def _number(record: Record, name: str) -> float:
    value = record.get(name)
    # What was not finite is told as text; a picture leaves it out.
    return float(value) if isinstance(value, int | float) else math.nan


def _points(
    records: Sequence[Record], name: str, scale: float = 1.0
) -> tuple[tuple[float, float], ...]:
    found = ((_number(r, "step"), _number(r, name) * scale) for r in records)
    return tuple((x, y) for x, y in found if math.isfinite(x) and math.isfinite(y))


def _marks(told: _Told) -> list[tuple[float, str]]:
    return [
        (
            _number(start, "step"),
            f"{'restart' if n else 'start'}: {start.get('layout') or 'one rank'}",
        )
        for n, start in enumerate(told.starts)
        if math.isfinite(_number(start, "step"))
    ]


def _summary(told: _Told) -> str:
    last, steps = told.starts[-1], told.steps()
    model = last.get("model")
    name = model.get("name", "") if isinstance(model, dict) else ""
    parameters = _number(last, "parameters")
    ended = "ended" if told.of("end") and told.records[-1]["event"] == "end" else "not ended"
    if told.records[-1]["event"] == "stop":
        ended = "stopped, to be gone on with"
    at = _number(steps[-1], "step") if steps else _number(last, "step")
    lines = [
        f"{name}, {parameters:,.0f} parameters, on {last.get('data')}; step {at:.0f} of"
        f" {last.get('steps')}, {ended}",
        f"{len(told.starts)} starts; the last as {last.get('layout') or 'one rank'} on"
        f" {last.get('ranks')} ranks",
    ]
    if steps:
        rate = statistics.median(_number(s, "tokens_per_second") for s in steps)
        lines.append(
            f"loss {_number(steps[-1], 'loss'):.4f}; {rate:,.0f} tokens/s in the middle;"
            f" goodput {100 * _number(steps[-1], 'goodput'):.0f} %: time in steps that count, of all time"
        )
    if checked := told.of("validation"):
        bits = _number(checked[-1], "bits_per_byte")
        more = f", {bits:.4f} bits per byte" if math.isfinite(bits) else ""
        lines.append(f"validation loss {_number(checked[-1], 'loss'):.4f} nats per token{more}")
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def _lines(told: _Told, name: str, scale: float, words: str, colour: int) -> list[Series]:
    """A line for each start; what a later one did again was in vain, and is faint."""
    begins = [_number(start, "step") for start in told.starts]
    series = []
    for n, segment in enumerate(told.segments()):
        again = min([b for b in begins[n + 1 :] if math.isfinite(b)], default=math.inf)
        kept = [r for r in segment if _number(r, "step") <= again]
        lost = [r for r in segment if _number(r, "step") >= again]
        series.append(Series(words, _points(kept, name, scale), colour))
        if len(lost) > 1:
            series.append(Series(f"{words}, lost", _points(lost, name, scale), colour, faint=True))
    return series


def _loss(told: _Told) -> str:
    series = _lines(told, "loss", 1.0, "loss", 0)
    series.append(Series("validation", _points(told.of("validation"), "loss"), 1, dots=True))
    said = "Nats per token: of each step over all ranks (blue), of the held-out part (red)."
    drawn = chart(Chart("loss", "nats per token", series, _marks(told)))
    return f"<p>{said} Dashed: where the run was started, and as what.</p>{drawn}"


def _curve(told: _Told, title: str, unit: str, of: Sequence[tuple[str, float, str]]) -> str:
    series = [
        line
        for colour, (name, scale, words) in enumerate(of)
        for line in _lines(told, name, scale, words, colour)
    ]
    return chart(Chart(title, unit, series, _marks(told), from_zero=True))


def _efficiency(told: _Told) -> str:
    last = told.starts[-1]
    said = (
        f"Of a peak of {_number(last, 'peak_flops') / 1e12:.4g} TFLOP/s over all ranks"
        f" ({last.get('peak_from')}). MFU (blue) counts what the model needs, attention causal; HFU"
        " (red) also what is computed again. With attention counted in full MFU would be higher by"
        f" {_more(last):.1f} %."
    )
    drawn = _curve(told, "MFU and HFU", "%", [("mfu", 100, "MFU"), ("hfu", 100, "HFU")])
    return f"<p>{escape(said)}</p>{drawn}"


def _more(start: Record) -> float:
    flops = start.get("flops")
    if not isinstance(flops, dict) or not _number(flops, "model"):
        return math.nan
    return 100 * (_number(flops, "full") / _number(flops, "model") - 1)


def _memory(told: _Told) -> str:
    found = told.of("memory")
    ranks = found[-1].get("ranks") if found else None
    if not isinstance(ranks, list):
        return "<p>Not measured yet.</p>"
    kinds = ("weights", "optimizer", "gathered and gradients")
    head = "".join(f"<th>{k}, promised</th><th>measured</th>" for k in kinds)
    rows = []
    for rank, one in enumerate(ranks):
        cells = "".join(
            f"<td>{_bytes(_inside(one, how, kind))}</td>"
            for kind in kinds
            for how in ("promised", "measured")
        )
        rows.append(f"<tr><td>{rank}</td>{cells}</tr>")
    said = (
        "Bytes by kind: the most that the checked program promises, and what was held."
        " Activations are not among them."
    )
    most = max((_number(s, "memory") for s in told.steps()), default=math.nan)
    return (
        f"<p>{said} The most that a rank held of everything, its process among it: {_bytes(most)}.</p>"
        "<div class=wide><table>"
        f"<tr><th>rank</th>{head}</tr>{''.join(rows)}</table></div>"
    )


def _inside(one: Any, how: str, kind: str) -> float:
    inner = one.get(how) if isinstance(one, dict) else None
    return _number(inner, kind) if isinstance(inner, dict) else math.nan


def _bytes(amount: float) -> str:
    if not math.isfinite(amount):
        return "-"
    for size, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if amount >= size:
            return f"{amount / size:.2f} {name}"
    return f"{amount:.0f} B"


def _timeline(folder: Path) -> str:
    path = folder / "timeline.json"
    if not path.is_file():
        return "<p>Not measured yet.</p>"
    try:
        seconds = Timeline.from_json(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        return f"<p>{escape(f'{path.name} cannot be read: {error}')}</p>"
    spans = tuple(s._replace(start=1e3 * s.start, end=1e3 * s.end) for s in seconds.spans)
    drawn = svg(Picture("a measured step", Timeline(spans), clock=" ms"))
    return f"<div class=wide>{drawn}</div>"


def _mesh(start: Record) -> str:
    try:
        picture = MeshPicture(Layout.parse(str(start.get("layout", ""))))
    except ValueError as error:
        return f"<p>{escape(str(error))}</p>"
    return f"<div class=wide>{mesh_svg(picture)}</div>"


def _events(told: _Told) -> str:
    begun = _number(told.starts[0], "time")
    rows = []
    for record in told.records:
        if record["event"] in ("step", "memory"):
            continue
        after = f"{_number(record, 'time') - begun:.1f} s"
        cells = (after, str(record["event"]), str(record.get("step", "")), " ".join(_words(record)))
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "<tr><th>after</th><th>what</th><th>step</th><th></th></tr>"
    return f'<div class=wide><table class="left">{head}{"".join(rows)}</table></div>'


def _words(record: Record) -> Iterator[str]:
    for name in ("layout", "ranks", "why", "text", "path", "error", "loss", "bits_per_byte"):
        value = record.get(name)
        if value not in (None, ""):
            yield f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}"


def _configuration(folder: Path) -> str:
    path = folder / "run.toml"
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return f"<pre>{escape(text)}</pre>"


def _versions(told: _Told) -> str:
    rows = []
    for number, start in enumerate(told.starts):
        versions = start.get("versions")
        said = versions.items() if isinstance(versions, dict) else ()
        text = ", ".join(f"{name} {value}" for name, value in said)
        rows.append(f"<tr><td>start {number + 1}</td><td>{escape(text)}</td></tr>")
    return f'<table class="left">{"".join(rows)}</table>'
