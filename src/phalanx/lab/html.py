"""All trials as one HTML page without a script: story, source, values, timelines, messages, claims."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..draw import (
    Axis,
    Bar,
    Bars,
    Html,
    Part,
    Row,
    Series,
    bars,
    chart,
    frame,
    gantt,
    paragraphs,
    table,
    tag,
)
from .record import Figure, Span, Step
from .show import bytes_text, conditions, value_rows, verdict
from .trial import Trial

__all__ = ["page"]

_INTRODUCTION = (
    "Every strategy for training on many ranks, from bare collectives. Each section is one short file"
    " that was just run: its idea, its source, what every rank had before and after each step, a"
    " timeline with the bytes of each rank's tensors, the bytes each rank sent to each other, and a"
    " check against one process.",
    "Hashes are of all bytes of a tensor; the coloured square is the hash, so the same colour is the"
    " same content. Bytes are counted as if everyone sent to the receiver directly; a ring sends as"
    " many. Bars: blue forward, orange backward, yellow update, green other work; messages grey for"
    " send and receive, red for reduce and reduce-scatter, dark blue for other collectives. Point at"
    " a bar to see its name.",
)
_FILL = {"F": "#56b4e9", "B": "#e69f00", "U": "#f0e442", "send": "#b0b0b0", "receive": "#b0b0b0"}
_FILL |= {"reduce": "#d55e00", "reduce_scatter": "#d55e00"}


def page(trials: Sequence[Trial]) -> str:
    """The page's text."""
    rows = [
        (tag("a", t.entry.name, href=f"#{t.entry.name}"), _verdict(t), t.entry.title)
        for t in trials
    ]
    contents = tag("div", table(("experiment", "check", "idea"), rows, left=True), cls="fold")
    words = paragraphs([*(f"{conditions(trial)}." for trial in trials[:1]), *_INTRODUCTION])
    return frame("phalanx lab", words, contents, *map(_section, trials))


def _verdict(trial: Trial) -> Html:
    return tag("span", verdict(trial), cls="good" if trial.holds else "bad")


def _section(trial: Trial) -> Html:
    entry = trial.entry
    parts = [tag("h2", entry.name), tag("p", tag("strong", entry.title))]
    story = filter(None, entry.story.split("\n\n"))
    parts += [tag("pre" if text.startswith("    ") else "p", text) for text in story]
    lines = len(entry.source.splitlines())
    parts.append(_folded(f"source, {lines} lines", tag("pre", entry.source)))
    for number, (title, steps) in enumerate(trial.steps()):
        body = list(_step(trial, title, steps))
        # The first two steps are open; later ones show the same with other numbers.
        open_ = number < 2 or any(step.figures for _, step in steps)
        parts += [tag("h3", title), *body] if open_ else [_folded(title, *body)]
    parts += [tag("p", f"FAIL {c.says} {c.detail}", cls="bad") for c in trial.failed]
    rows = [("ok" if c.holds else "FAIL", c.says, c.detail) for c in trial.claims]
    claims = table(("", "claim", "numbers"), rows, left=True)
    parts.append(_folded(f"check: {verdict(trial)}", tag("div", claims, cls="fold")))
    return tag("section", *parts, id=entry.name)


def _folded(title: str, *body: Html) -> Html:
    return tag("details", tag("summary", title), *body)


def _step(trial: Trial, title: str, steps: Sequence[tuple[int, Step]]) -> Iterator[Html]:
    if rows := value_rows(steps):
        head = ("when", "rank", "value", "shape", "first numbers", "hash")
        yield table(head, [(*row[:-1], _chip(row[-1])) for row in rows], left=True)
    if any(step.spans for _, step in steps):
        yield tag("div", _timeline(trial, title, steps), cls="scroll")
    if any(step.messages for _, step in steps):
        yield _traffic(trial.ranks, steps)
    for _, step in steps:
        yield paragraphs(step.notes)
        yield from map(_figure, step.figures)


def _chip(digest: str) -> Html:
    if not digest:
        return Html("")
    colour = f"background:hsl({int(digest[1:5], 16) % 360} 65% 55%)"
    return Html(tag("span", cls="chip", style=colour) + tag("code", digest[1:]))


def _timeline(trial: Trial, title: str, steps: Sequence[tuple[int, Step]]) -> Html:
    """What each rank did when: a row for computing, one for messages, the bytes of its tensors."""
    start = min(span.start for _, step in steps for span in step.spans)
    end = max(span.end for _, step in steps for span in step.spans)
    memory = {record.rank: _within(record.memory, start, end) for record in trial.records}
    most = max((size for samples in memory.values() for _, size in samples), default=0) or 1
    rows = []
    for rank, step in steps:
        for lane, name in (("compute", f"rank {rank}"), ("messages", "  messages")):
            drawn = [_bar(rank, span, start) for span in step.spans if span.lane == lane]
            rows.append(Row(name, drawn, main=lane == "compute", gap=lane == "compute"))
        peak = max(size for _, size in memory[rank])
        levels = [(1e3 * (time - start), size) for time, size in memory[rank]]
        name = f"  at most {bytes_text(peak)}"
        rows.append(Row(name, main=False, levels=levels, most=most, gap=False))
    return gantt(title, rows, 0.0, 1e3 * (end - start) or 1.0, clock=" ms")


def _within(
    samples: Sequence[tuple[float, int]], start: float, end: float
) -> list[tuple[float, float]]:
    """What a rank's tensors took when a stretch of time began, and every change in it."""
    before = [size for time, size in samples if time < start]
    return [(start, before[-1] if before else 0), *(s for s in samples if start <= s[0] < end)]


def _bar(rank: int, span: Span, start: float) -> Bar:
    name = span.name.split(" on ")[0]
    kind = name if span.lane == "messages" else name.rstrip("0123456789 ")[:1]
    known = span.lane == "messages" or name == kind or name[1:2] in "0123456789 "
    fill = _FILL.get(kind, "#0072b2" if span.lane == "messages" else "#9fd3c7")
    fill = fill if known else "#9fd3c7"
    tip = f"rank {rank}: {span.name}, {1e3 * (span.end - span.start):.3g} ms"
    ink = "#ffffff" if fill == "#0072b2" else "#000000"
    return Bar(1e3 * (span.start - start), 1e3 * (span.end - start), fill, ink, tip, (name,))


def _traffic(ranks: int, steps: Sequence[tuple[int, Step]]) -> Html:
    """A table of senders and receivers: the darker a cell, the more bytes."""
    sums: dict[tuple[int, int], float] = {}
    for rank, step in steps:
        for message in step.messages:
            sums[rank, message.to] = sums.get((rank, message.to), 0.0) + message.bytes
    most = max(sums.values()) or 1.0

    def cell(source: int, to: int) -> Html:
        size = sums.get((source, to), 0.0)
        shade = f"padding:2px 6px;background:rgb(0 114 178 / {0.5 * size / most:.2f})"
        return tag("span", bytes_text(size) if size else "", style=shade if size else "")

    rows = [(f"rank {i}", *(cell(i, j) for j in range(ranks))) for i in range(ranks)]
    head = ("bytes from", *(f"to rank {j}" for j in range(ranks)))
    return table(head, rows)


def _figure(figure: Figure) -> Html:
    data = figure.data
    if figure.kind == "table":
        return Html(tag("h3", figure.title) + table(data["header"], data["rows"], left=True))
    if figure.kind == "curves":
        lines = [Series(name, points) for name, points in data["lines"].items()]
        x = Axis(data["x"], "{:g}".format, base=2)
        picture = chart(figure.title, lines, x, Axis(data["y"], "{:.4g}".format))
    else:
        rows = [
            Bars(
                name, [Part(part, length, words, f"{part}: {words}") for part, length, words in row]
            )
            for name, row in data["rows"].items()
        ]
        picture = bars(figure.title, rows)
    return tag("div", picture, cls="scroll")
