"""A trial as text for a terminal, as JSON, and as an HTML page without a script."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from ..draw import Bar, Html, Row, bytes_text, frame, gantt, paragraphs, table, tag, text_table
from .record import Interval, LabStep
from .trial import LabTrial

Steps = Sequence[tuple[int, LabStep]]  # (rank, step)


def as_json(trial: LabTrial) -> dict[str, object]:
    """Everything that was recorded, as plain values."""
    return {
        "name": trial.experiment.name,
        "title": trial.experiment.title,
        "ranks": trial.ranks,
        "backend": trial.backend,
        "size": asdict(trial.size),
        "holds": trial.holds,
        "claims": [asdict(claim) for claim in trial.claims],
        "records": [asdict(record) for record in trial.records],
    }


def conditions(trial: LabTrial) -> str:
    """What it was run with, in a line."""
    size = trial.size
    ranks = "1 rank" if trial.ranks == 1 else f"{trial.ranks} ranks on {trial.backend}"
    return (
        f"{ranks}; batch {size.batch}, width {size.width}, {size.layers} layers, {size.steps} steps"
    )


def verdict(trial: LabTrial) -> str:
    """How many claims hold."""
    count = len(trial.claims)
    if trial.holds:
        return f"{count} claims hold"
    return f"{len(trial.failed)} of {count} claims fail"


# ---- text


def lab_text(trial: LabTrial, *, verbose: bool = False) -> str:
    """What every rank had before and after each step, what was sent, and the claims that failed;
    with `verbose` all claims."""
    parts = [f"{trial.experiment.name}: {trial.experiment.title}\n{conditions(trial)}\n"]
    parts += ["".join(_step_text(title, steps)) for title, steps in trial.steps()]
    return "\n".join([*parts, claims_text(trial, verbose=verbose)])


def claims_text(trial: LabTrial, *, verbose: bool = False) -> str:
    """How many claims hold, and those that do not; with `verbose` all."""
    lines = [verdict(trial)]
    for claim in trial.claims if verbose else trial.failed:
        detail = f" ({claim.detail})" if claim.detail else ""
        lines.append(f"  {'ok  ' if claim.holds else 'FAIL'} {claim.says}{detail}")
    return "\n".join(lines) + "\n"


def _step_text(title: str, steps: Steps) -> Iterator[str]:
    yield f"{title}\n"
    yield text_table((), value_rows(steps), left="llllll", indent=2)
    sent = [(f"rank {rank}", *call) for rank, step in steps for call in step.sent.items()]
    if sent:
        rows = [
            (rank, call, ", ".join(f"{bytes_text(size)} to {i}" for i, size in to.items()))
            for rank, call, to in sent
        ]
        yield text_table(("sent", "", ""), rows, left="lll", indent=2)
    for _, step in steps:
        yield from (f"  {sentence}\n" for sentence in step.notes)
        for name, header, cells in step.tables:
            yield f"  {name}\n" + text_table(header, cells, left="l" * len(header), indent=2)


def value_rows(steps: Steps) -> list[tuple[str, ...]]:
    """(when, rank, name, shape, first numbers, hash); what is as in the row above is left out."""
    values = [(when, f"rank {r}", v) for r, step in steps for when, v in step.values]
    order = list(dict.fromkeys(when for when, _, _ in values))
    rows: list[tuple[str, ...]] = []
    last = ("", "")
    for when, rank, value in sorted(values, key=lambda row: order.index(row[0])):
        here = ("" if when == last[0] else when, "" if (when, rank) == last else rank)
        last = (when, rank)
        digest = f"#{value.hash}" if value.hash else ""
        rows.append((*here, value.name, value.shape, value.first, digest))
    return rows


# ---- a page

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
_WORK = {"F": "#56b4e9", "B": "#e69f00", "U": "#f0e442"}
_MESSAGE = {"send": "#b0b0b0", "receive": "#b0b0b0"}
_MESSAGE |= {"reduce": "#d55e00", "reduce_scatter": "#d55e00"}


def lab_page(trials: Sequence[LabTrial]) -> str:
    """All trials: story, source, values, timelines, messages, claims."""
    rows = []
    for t in trials:
        check = tag("span", verdict(t), cls="good" if t.holds else "bad")
        link = tag("a", t.experiment.name, href=f"#{t.experiment.name}")
        rows.append((link, check, t.experiment.title))
    contents = tag("div", table(("experiment", "check", "idea"), rows, left=True), cls="fold")
    words = paragraphs([*(f"{conditions(trial)}." for trial in trials[:1]), *_INTRODUCTION])
    return frame("phalanx lab", words, contents, *map(_section, trials))


def _section(trial: LabTrial) -> Html:
    file = trial.experiment
    parts = [tag("h2", file.name), tag("p", tag("strong", file.title))]
    story = filter(None, file.story.split("\n\n"))
    parts += [tag("pre" if text.startswith("    ") else "p", text) for text in story]
    lines = len(file.source.splitlines())
    parts.append(_folded(f"source, {lines} lines", tag("pre", file.source)))
    for number, (title, steps) in enumerate(trial.steps()):
        body = list(_step_html(trial, title, steps))
        # The first two steps are open; later ones show the same with other numbers.
        open_ = number < 2 or any(step.tables for _, step in steps)
        parts += [tag("h3", title), *body] if open_ else [_folded(title, *body)]
    parts += [tag("p", f"FAIL {c.says} {c.detail}", cls="bad") for c in trial.failed]
    rows = [("ok" if c.holds else "FAIL", c.says, c.detail) for c in trial.claims]
    claims = table(("", "claim", "numbers"), rows, left=True)
    parts.append(_folded(f"check: {verdict(trial)}", tag("div", claims, cls="fold")))
    return tag("section", *parts, id=file.name)


def _folded(title: str, *body: Html) -> Html:
    return tag("details", tag("summary", title), *body)


def _step_html(trial: LabTrial, title: str, steps: Steps) -> Iterator[Html]:
    if rows := value_rows(steps):
        head = ("when", "rank", "value", "shape", "first numbers", "hash")
        yield table(head, [(*row[:-1], _chip(row[-1])) for row in rows], left=True)
    if any(step.spans for _, step in steps):
        yield tag("div", _timeline(trial, title, steps), cls="scroll")
    if any(step.sent for _, step in steps):
        yield _traffic(trial.ranks, steps)
    for _, step in steps:
        yield paragraphs(step.notes)
        for name, header, cells in step.tables:
            yield tag("div", tag("h3", name), table(header, cells, left=True), cls="scroll")


def _chip(digest: str) -> Html:
    if not digest:
        return Html("")
    colour = f"background:hsl({int(digest[1:5], 16) % 360} 65% 55%)"
    return Html(tag("span", cls="chip", style=colour) + tag("code", digest[1:]))


def _timeline(trial: LabTrial, title: str, steps: Steps) -> Html:
    """What each rank did when: a row for computing, one for messages, the bytes of its tensors."""
    start = min(span.start for _, step in steps for span in step.spans)
    end = max(span.end for _, step in steps for span in step.spans)
    levels = {}
    for record in trial.records:
        earlier = [size for time, size in record.memory if time < start]
        now = [(1e3 * (time - start), size) for time, size in record.memory if start <= time < end]
        levels[record.rank] = [(0.0, earlier[-1] if earlier else 0), *now]
    most = max(size for samples in levels.values() for _, size in samples) or 1
    rows = []
    for rank, step in steps:
        for lane, name in (("compute", f"rank {rank}"), ("messages", "  messages")):
            drawn = [_bar(rank, span, start) for span in step.spans if span.lane == lane]
            rows.append(Row(name, drawn, main=lane == "compute", gap=lane == "compute"))
        name = f"  at most {bytes_text(max(size for _, size in levels[rank]))}"
        rows.append(Row(name, main=False, levels=levels[rank], most=most, gap=False))
    return gantt(title, rows, 0.0, 1e3 * (end - start) or 1.0, clock=" ms")


def _bar(rank: int, span: Interval, start: float) -> Bar:
    name = span.name.split(" on ")[0]
    if span.lane == "messages":
        fill = _MESSAGE.get(name, "#0072b2")
    else:  # F3 is forward; a word that begins with F is other work
        fill = _WORK.get(name.rstrip("0123456789"), "#9fd3c7")
    ink = "#ffffff" if fill == "#0072b2" else "#000000"
    tip = f"rank {rank}: {span.name}, {1e3 * (span.end - span.start):.3g} ms"
    return Bar(1e3 * (span.start - start), 1e3 * (span.end - start), fill, ink, tip, (name,))


def _traffic(ranks: int, steps: Steps) -> Html:
    """A table of senders and receivers: the darker a cell, the more bytes."""
    sums: dict[tuple[int, int], float] = {}
    for rank, step in steps:
        for to, size in (item for call in step.sent.values() for item in call.items()):
            sums[rank, to] = sums.get((rank, to), 0.0) + size
    most = max(sums.values()) or 1.0

    def cell(source: int, to: int) -> Html:
        size = sums.get((source, to), 0.0)
        shade = f"padding:2px 6px;background:rgb(0 114 178 / {0.5 * size / most:.2f})"
        return tag("span", bytes_text(size) if size else "", style=shade if size else "")

    rows = [(f"rank {i}", *(cell(i, j) for j in range(ranks))) for i in range(ranks)]
    return table(("bytes from", *(f"to rank {j}" for j in range(ranks))), rows)
