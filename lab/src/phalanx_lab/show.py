"""A trial as text for a terminal, as JSON, and as an HTML page without scripts."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from inspect import getsource
from textwrap import dedent, fill, indent

from phalanx.drawing import (
    Bar,
    Html,
    Row,
    bytes_text,
    frame,
    gantt,
    paragraphs,
    table,
    tag,
    text_table,
)
from phalanx.drawing.svg import Area
from rank_watch.diagnosis import span as ranks_text

from .catalogue import INTRODUCTION, PAPERS
from .lab import Lab
from .mlp import gradients_of
from .record import Interval, LabStep
from .trial import LabTrial, Titled

Steps = Sequence[tuple[int, LabStep]]  # (rank, step)


def as_json(trial: LabTrial) -> dict[str, object]:
    """Return everything that was recorded, as plain values."""
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
    """Describe the conditions of a run in one line."""
    size = trial.size
    ranks = (
        "1 rank"
        if trial.ranks == 1
        else f"{trial.ranks} ranks on {trial.backend}"
    )
    return f"{ranks}; batch {size.batch}, width {size.width}, {size.layers} layers, {size.steps} steps"


def verdict(trial: LabTrial) -> str:
    """Count the claims that hold."""
    count = len(trial.claims)
    if trial.holds:
        return f"{count} claims hold"
    return f"{len(trial.failed)} of {count} claims fail"


def lab_text(trial: LabTrial, *, verbose: bool = False) -> str:
    """Return a trial as text: prose, code, values before and after each step, messages,
    and failed claims.

    With `verbose`, all claims, and steps that repeat others with different values.
    """
    file = trial.experiment
    parts = [
        f"{file.name}: {file.title}\n{conditions(trial)}\n",
        *map(_prose, _split(file.story)),
    ]
    for cell, recorded in trial.blocks():
        parts += map(_prose, _split(cell.prose))
        parts.append(
            indent(_trimmed(cell.lines), "    | ", lambda line: True) + "\n"
        )
        left = 0
        for title, steps, again in _marked(recorded):
            alike = again and not verbose
            left += alike
            parts += [
                "" if alike else "".join(_step_text(title, steps)),
                "".join(_results(steps)),
            ]
        if left:
            more = "1 more step is" if left == 1 else f"{left} more steps are"
            parts.append(f"{more} alike, with other numbers; -v shows them.\n")
    if file.script:
        parts.append(
            f"As a script for torchrun: phalanx lab {file.name} --script\n"
        )
    return "\n".join(
        [*filter(None, parts), claims_text(trial, verbose=verbose)]
    )


def _split(prose: str) -> list[str]:
    return [text for text in prose.split("\n\n") if text.strip()]


def _prose(text: str) -> str:
    """Wrap a paragraph to 80 characters; a table keeps its lines."""
    return text + "\n" if text.startswith("    ") else fill(text, 80) + "\n"


def _trimmed(code: Sequence[str]) -> str:
    """Strip empty lines around code, and common indentation."""
    return dedent("\n".join(code)).strip("\n")


def _marked(steps: Sequence[Titled]) -> Iterator[tuple[str, Steps, bool]]:
    """Yield steps, and True for those that repeat an earlier one with different
    values."""
    seen = set[str]()
    for title, of_ranks in steps:
        plain = re.sub(r"\d+", "", title)
        yield title, of_ranks, plain in seen
        seen.add(plain)


def claims_text(trial: LabTrial, *, verbose: bool = False) -> str:
    """Return the number of claims that hold, and the claims that fail; all claims if
    `verbose`."""
    lines = [verdict(trial)]
    for claim in trial.claims if verbose else trial.failed:
        detail = f" ({claim.detail})" if claim.detail else ""
        lines.append(
            f"  {'ok  ' if claim.holds else 'FAIL'} {claim.says}{detail}"
        )
    return "\n".join(lines) + "\n"


def _step_text(title: str, steps: Steps) -> Iterator[str]:
    yield f"{title}\n"
    yield text_table((), value_rows(steps), left="llllll", indent=2)
    rows = [
        ("" if number else "sent", *row)
        for number, row in enumerate(sent_rows(steps))
    ]
    yield text_table((), rows, left="llll", indent=2) if rows else ""


def sent_rows(steps: Steps) -> list[tuple[str, str, str]]:
    """Return rows of (ranks, call, bytes to whom); ranks that send alike share them."""
    ranks = [rank for rank, _ in steps]
    alike: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for rank, step in steps:
        calls = [
            (call, _receivers(to, {*ranks} - {rank}))
            for call, to in step.sent.items()
        ]
        if calls:
            alike.setdefault(tuple(calls), []).append(rank)
    rows = []
    for same, senders in alike.items():
        names = ranks_text(senders)
        for call, words in same:
            rows.append((names, call, words))
            names = ""
    return rows


def _receivers(to: Mapping[int, float], others: set[int]) -> str:
    """The bytes sent to each receiver, in short if all other ranks get the same."""
    sizes = set(to.values())
    if len(others) > 1 and {*to} == others and len(sizes) == 1:
        return f"{bytes_text(sizes.pop())} to each other rank"
    return ", ".join(f"{bytes_text(size)} to {i}" for i, size in to.items())


def _results(steps: Steps) -> Iterator[str]:
    """Yield the results in words and tables."""
    for _, step in steps:
        yield from (f"  {sentence}\n" for sentence in step.notes)
        for name, header, cells in step.tables:
            yield f"  {name}\n" + text_table(
                header, cells, left="l" * len(header), indent=2
            )


def value_rows(steps: Steps) -> list[tuple[str, ...]]:
    """Return rows of (when, ranks, name, shape, first values, hash), leaving out
    repeated cells.

    Equal values of several ranks share a row: `ranks 0-3`.
    """
    held: dict[str, dict[int, list[tuple[str, ...]]]] = {}
    for rank, step in steps:
        for when, value in step.values:
            digest = f"#{value.hash}" if value.hash else ""
            cells: tuple[str, ...]
            cells = (value.name, value.shape, value.first, digest)
            held.setdefault(when, {}).setdefault(rank, []).append(cells)
    rows: list[tuple[str, ...]] = []
    for when, of_ranks in held.items():
        first = True
        for ranks, values in _alike(of_ranks):
            names = ranks_text(ranks)
            for cells in values:
                rows.append((when if first else "", names, *cells))
                first, names = False, ""
    return rows


def _alike(
    of_ranks: Mapping[int, list[tuple[str, ...]]],
) -> Iterator[tuple[list[int], list[tuple[str, ...]]]]:
    """Yield the values that all ranks share, then the rest for each group of ranks."""
    shared = set.intersection(*map(set, of_ranks.values()))
    if shared:
        values = next(iter(of_ranks.values()))
        yield [*of_ranks], [cells for cells in values if cells in shared]
    alike: dict[tuple[tuple[str, ...], ...], list[int]] = {}
    for rank, values in of_ranks.items():
        rest = tuple(cells for cells in values if cells not in shared)
        if rest:
            alike.setdefault(rest, []).append(rank)
    for rest, ranks in alike.items():
        yield ranks, [*rest]


# ---- the page

_WORK = {"F": "#56b4e9", "B": "#e69f00", "U": "#f0e442"}
_MESSAGE = dict.fromkeys(("send", "receive"), "#b0b0b0")
_MESSAGE |= dict.fromkeys(("reduce", "reduce_scatter"), "#d55e00")


def lab_page(trials: Sequence[LabTrial]) -> str:
    """Render all trials as a lecture: prose, code, values, timelines and messages, then
    all strategies."""
    rows: list[tuple[object, ...]] = []
    for t in trials:
        check = tag("span", verdict(t), cls="good" if t.holds else "bad")
        rows.append((_chapter(t.experiment.name), check, t.experiment.title))
    names = [trial.experiment.name for trial in trials]
    shown = dict[tuple[str, str], str]()
    if strategies := [t for t in trials if t.experiment.chapter.when]:
        title = "All strategies: memory, bytes, and when to use them."
        rows.append((_chapter("strategies"), "", title))
        names.append("strategies")
    contents = table(("chapter", "check", "idea"), rows, left=True)
    words = paragraphs(
        [*(f"{conditions(trial)}." for trial in trials[:1]), *INTRODUCTION]
    )
    # The pass through all layers that most chapters modify, and the training around it.
    sources = [
        _code(getsource(each).split("\n"))
        for each in (gradients_of, Lab.train)
    ]
    model = _folded(
        "the model that most chapters train, and its training", *sources
    )
    sections = [
        _section(trial, _ways(names, trial.experiment.name), shown)
        for trial in trials
    ]
    if strategies:
        sections.append(_summary(strategies, _ways(names, "strategies")))
    listed = tag("div", contents, cls="wrap", id="contents")
    return frame("phalanx lab", words, listed, model, *sections)


def _chapter(name: str) -> Html:
    return tag("a", name, href=f"#{name}")


def _ways(names: Sequence[str], name: str) -> Html:
    """Return links to the contents, the previous chapter and the next one."""
    at = names.index(name)
    before, after = names[at - 1 : at], names[at + 1 : at + 2]
    near = [("back", before), ("on", after)]
    links = [
        tag("span", f" · {words}: ", _chapter(to))
        for words, others in near
        for to in others
    ]
    return tag("p", _chapter("contents"), *links)


def _section(
    trial: LabTrial, ways: Html, shown: dict[tuple[str, str], str]
) -> Html:
    """Render a chapter. `shown` records in which chapter each function was shown
    first."""
    file = trial.experiment
    parts = [tag("h2", file.name), ways, tag("p", tag("strong", file.title))]
    parts += map(_paragraph, _split(file.story))
    for cell, recorded in trial.blocks():
        if cell.part.strip():
            first = shown.setdefault((file.module, cell.part), file.name)
            if first != file.name:
                parts.append(
                    tag(
                        "p",
                        tag("code", cell.part),
                        " is that of ",
                        _chapter(first),
                        ".",
                    )
                )
                continue
        parts += map(_paragraph, _split(cell.prose))
        parts.append(_code(cell.lines))
        for title, steps, again in _marked(recorded):
            body = list(
                _step_html(
                    trial, title, steps, first=title == trial.steps()[0][0]
                )
            )
            parts += (
                [_folded(title, *body)] if again else [tag("h3", title), *body]
            )
            for _, step in steps:
                parts.append(paragraphs(step.notes))
                for name, header, cells in step.tables:
                    shown_table = table(header, cells, left=True)
                    parts.append(
                        tag("div", tag("h3", name), shown_table, cls="scroll")
                    )
    parts += [
        tag("p", f"FAIL {c.says} {c.detail}", cls="bad") for c in trial.failed
    ]
    rows = [
        ("ok" if c.holds else "FAIL", c.says, c.detail) for c in trial.claims
    ]
    if file.script:
        script = _code(file.script.splitlines())
        parts.append(_folded("the same as a script for torchrun", script))
    claims = table(("", "claim", "numbers"), rows, left=True)
    parts.append(_folded(verdict(trial), tag("div", claims, cls="fold")))
    papers = [
        tag("a", paper, href=PAPERS[paper]) for paper in file.chapter.papers
    ]
    engine = [
        tag("code", f"src/phalanx/{path}") for path in file.chapter.engine
    ]
    reading = [("Papers: ", papers)] * bool(papers) + [
        ("In phalanx itself: ", engine)
    ]
    for words, sources in reading:
        parts.append(tag("p", words, Html(", ".join(sources)), "."))
    return tag("section", *parts, id=file.name)


_SYNTAX = re.compile(
    r"(?P<i>#.*)|(?P<s>[rf]*\"[^\"\n]*\")"
    r"|\b(?P<b>def|class|return|for|in|if|else|elif|while|with|as|not|and|or|is|lambda|None|True"
    r"|False|nonlocal|break|continue|import|from|assert|yield)\b"
)


def _code(code: Sequence[str]) -> Html:
    """Render lines of code with coloured comments, strings and keywords."""
    text, parts, at = _trimmed(code), list[object](), 0
    for found in _SYNTAX.finditer(text):
        parts.append(text[at : found.start()])
        parts.append(tag(str(found.lastgroup), found[0]))
        at = found.end()
    return tag("pre", *parts, text[at:])


def _paragraph(text: str) -> Html:
    if text.startswith("    "):
        return tag("pre", text)
    return tag(
        "p",
        *(
            tag("code", x) if i % 2 else x
            for i, x in enumerate(text.split("`"))
        ),
    )


def _summary(trials: Sequence[LabTrial], ways: Html) -> Html:
    """Render a table of all strategies: memory and messages of a rank, and when to use
    them."""
    ranks = trials[0].ranks
    legend = (
        f"W, G, O and A are the bytes of all weights, gradients, optimizer state and activations; n ranks."
        f" Measured: the most that one of {ranks} ranks sent in the first step, in the chapter's run."
    )
    rows = []
    for trial in trials:
        chapter = trial.experiment.chapter
        sent = [
            sum(size for to in step.sent.values() for size in to.values())
            for title, steps in trial.steps()
            if title.startswith("step 0") and "overlapped" not in title
            for _, step in steps
        ]
        measured = bytes_text(max(sent)) if any(sent) else ""
        name = _chapter(trial.experiment.name)
        rows.append(
            (name, chapter.memory, chapter.sends, measured, chapter.when)
        )
    head = (
        "strategy",
        "memory of a rank",
        "bytes that a rank sends in a step",
        "measured",
        "when",
    )
    body = table(head, rows, left=True)
    wrap = tag("div", body, cls="wrap")
    return tag(
        "section",
        tag("h2", "strategies"),
        ways,
        tag("p", legend),
        wrap,
        id="strategies",
    )


def _folded(title: str, *body: Html) -> Html:
    return tag("details", tag("summary", title), *body)


def _step_html(
    trial: LabTrial, title: str, steps: Steps, *, first: bool
) -> Iterator[Html]:
    if rows := value_rows(steps):
        head = ("when", "ranks", "value", "shape", "first numbers", "hash")
        yield table(
            head, [(*row, _hash(digest)) for *row, digest in rows], left=True
        )
    if any(step.spans for _, step in steps):
        pictures = [tag("div", _timeline(trial, title, steps), cls="scroll")]
        if any(step.sent for _, step in steps):
            pictures.append(_traffic(trial.ranks, steps))
        name = "timeline, and bytes from rank to rank"
        yield tag(
            "details",
            tag("summary", name),
            *pictures,
            open="open" if first else "",
        )


def _hash(digest: str) -> Html:
    """Render a hash with a square in its colour."""
    colour = f"background:hsl({int(digest[1:5] or '0', 16) % 360} 65% 55%)"
    return Html(
        digest
        and tag("span", cls="chip", style=colour) + tag("code", digest[1:])
    )


def _timeline(trial: LabTrial, title: str, steps: Steps) -> Html:
    """Draw the timeline of each rank: a row for compute, a row for messages, the bytes
    of its tensors."""
    spans = [span for _, step in steps for span in step.spans]
    start, end = (
        min(span.start for span in spans),
        max(span.end for span in spans),
    )
    levels = {}
    for record in trial.records:
        earlier = [size for time, size in record.memory if time < start]
        now = [
            (1e3 * (time - start), size)
            for time, size in record.memory
            if start <= time < end
        ]
        levels[record.rank] = [(0.0, earlier[-1] if earlier else 0), *now]
    most, rows = (
        max(size for samples in levels.values() for _, size in samples) or 1,
        list[Row](),
    )
    for rank, step in steps:
        for lane, name in (
            ("compute", f"rank {rank}"),
            ("messages", "  messages"),
        ):
            drawn = [
                _bar(rank, span, start)
                for span in step.spans
                if span.lane == lane
            ]
            rows.append(Row(name, drawn, main=lane == "compute"))
        name = f"  at most {bytes_text(max(size for _, size in levels[rank]))}"
        areas = [Area("", levels[rank])]
        rows.append(Row(name, main=False, areas=areas, most=most))
    return gantt(title, rows, 0.0, 1e3 * (end - start) or 1.0, clock=" ms")


def _bar(rank: int, span: Interval, start: float) -> Bar:
    name = span.name.split(" on ")[0]
    # F3 is a forward; a word that merely starts with F is other work
    work = _WORK.get(name.rstrip("0123456789"), "#9fd3c7")
    fill = work if span.lane == "compute" else _MESSAGE.get(name, "#0072b2")
    ink = "#ffffff" if fill == "#0072b2" else "#000000"
    tip = f"rank {rank}: {span.name}, {1e3 * (span.end - span.start):.3g} ms"
    return Bar(
        1e3 * (span.start - start),
        1e3 * (span.end - start),
        fill,
        ink,
        tip,
        (name,),
    )


def _traffic(ranks: int, steps: Steps) -> Html:
    """Render a table of senders and receivers: the darker a cell, the more bytes."""
    sums: dict[tuple[int, int], float] = {}
    for rank, step in steps:
        for to, size in (
            item for call in step.sent.values() for item in call.items()
        ):
            sums[rank, to] = sums.get((rank, to), 0.0) + size
    most = max(sums.values()) or 1.0

    def cell(source: int, to: int) -> Html:
        size = sums.get((source, to), 0.0)
        shade = f"padding:2px 6px;background:rgb(0 114 178 / {0.5 * size / most:.2f})"
        return tag(
            "span",
            bytes_text(size) if size else "",
            style=shade if size else "",
        )

    rows = [
        (f"rank {i}", *(cell(i, j) for j in range(ranks)))
        for i in range(ranks)
    ]
    return table(("bytes from", *(f"to rank {j}" for j in range(ranks))), rows)
