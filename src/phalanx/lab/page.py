"""All trials as one narrated HTML page: one file, no script, no request, everything escaped."""

from __future__ import annotations

import io
import keyword
import tokenize
from collections.abc import Iterator, Sequence
from html import escape

from .conduct import Trial
from .picture import figure, timeline, traffic
from .record import Figure, Moment
from .show import conditions
from .told import Told, steps_of

__all__ = ["page"]

_STYLE = """
:root { --page: #ffffff; --ink: #1f2328; --soft: #59636e; --line: #d0d7de; --idle: #eef1f4;
  --good: #1a7f37; --bad: #cf222e; --held: #b6d7ec; --code: #f6f8fa; --word: #8250df; --said: #0a3069;
  color-scheme: light dark }
@media (prefers-color-scheme: dark) { :root { --page: #0d1117; --ink: #e6edf3; --soft: #9198a1;
  --line: #3d444d; --idle: #1b222c; --good: #3fb950; --bad: #f85149; --held: #1f4a66; --code: #151b23;
  --word: #d2a8ff; --said: #a5d6ff } }
body { margin: 0 auto; max-width: 940px; padding: 24px; background: var(--page); color: var(--ink);
  font: 15px/1.55 ui-sans-serif, system-ui, 'Segoe UI', Helvetica, Arial, sans-serif }
h1 { font-size: 26px; margin: 0 } h2 { font-size: 20px; margin: 56px 0 4px; border-top: 1px solid var(--line);
  padding-top: 20px } h3 { font-size: 15px; margin: 22px 0 6px } h4 { font-size: 14px; margin: 14px 0 4px }
p { margin: 6px 0 } .soft { color: var(--soft) } a { color: inherit }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; margin: 6px 0 }
th, td { text-align: left; padding: 2px 14px 2px 0; border-bottom: 1px solid var(--line);
  vertical-align: top }
th { font-weight: 600 } .scroll { overflow-x: auto } td.num { white-space: nowrap }
code, pre { font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace }
pre { background: var(--code); padding: 10px 12px; overflow-x: auto; border-radius: 6px; margin: 6px 0 }
pre i { font-style: normal; color: var(--soft) } pre b { font-weight: normal; color: var(--word) }
pre s { text-decoration: none; color: var(--said) }
.chip { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 5px }
summary { cursor: pointer; color: var(--soft) } details { margin: 6px 0 }
.good { color: var(--good) } .bad { color: var(--bad); font-weight: 600 }
ul.claims { list-style: none; padding: 0; font-size: 13px; margin: 4px 0 } nav table { width: 100% }
svg { display: block; max-width: 100%; height: auto; margin: 8px 0 }
svg text { fill: var(--ink); font-size: 11px } svg .soft { fill: var(--soft) }
svg .mid { text-anchor: middle }
svg .end { text-anchor: end } svg .idle { fill: var(--idle) } svg .grid { stroke: var(--line) }
svg .held { fill: var(--held) }
"""
_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,"><title>phalanx lab</title><style>"""
_INTRODUCTION = """<p>Every strategy for training on many ranks, from bare collectives. Each section is one
short file that was just run: its idea, its source, what every rank really held before and after, a
timeline with the bytes each rank kept, who sent what to whom, and a check against one process.</p>
<p class="soft">Hashes are of all bytes of a tensor, and the coloured square is the hash: the same colour is
the same content. Bytes are counted as if everyone sent straight to whom it concerns; a ring sends as much.
Bars: blue forward, orange backward, yellow update; messages grey for send and receive, red where
something is summed to a part, dark blue for other collectives. Names are under the mouse.</p>"""


def page(trials: Sequence[Trial]) -> str:
    """The page's text."""
    body = [_HEAD, _STYLE, "</style></head><body>", "<h1>phalanx lab</h1>"]
    if trials:
        body.append(f"<p>{escape(conditions(trials[0]))}.</p>")
    body += [_INTRODUCTION, *_contents(trials)]
    for trial in trials:
        body += _section(trial)
    return "\n".join([*body, "</body></html>\n"])


def _contents(trials: Sequence[Trial]) -> Iterator[str]:
    yield "<nav><table>"
    for trial in trials:
        name = escape(trial.entry.name)
        yield (
            f'<tr><td class="num"><a href="#{name}">{name}</a></td><td>{escape(trial.entry.title)}</td>'
            f'<td class="num">{_verdict(trial)}</td></tr>'
        )
    yield "</table></nav>"


def _verdict(trial: Trial) -> str:
    failed = sum(not claim.holds for claim in trial.claims)
    if failed:
        return f'<span class="bad">{failed} of {len(trial.claims)} fail</span>'
    return f'<span class="good">{len(trial.claims)} hold</span>'


def _section(trial: Trial) -> Iterator[str]:
    entry = trial.entry
    yield f'<section id="{escape(entry.name)}"><h2>{escape(entry.name)}</h2>'
    yield f"<p><strong>{escape(entry.title)}</strong></p>"
    yield from _story(entry.story)
    lines = len(entry.source.splitlines())
    yield f"<details><summary>source, {lines} lines</summary><pre>{_coloured(entry.source)}</pre></details>"
    for number, told in enumerate(steps_of(trial)):
        # The first two steps stand open; later ones tell the same with other numbers.
        shut = number > 1 and not told.figures
        title = escape(told.title)
        yield f"<details><summary>{title}</summary>" if shut else f"<h3>{title}</h3>"
        yield from _step(told, trial.ranks)
        if shut:
            yield "</details>"
    yield from _claims(trial)
    yield "</section>"


def _story(story: str) -> Iterator[str]:
    """Paragraphs; what is indented is shown as it stands."""
    for paragraph in story.split("\n\n"):
        if paragraph.startswith("    "):
            yield f"<pre>{escape(paragraph)}</pre>"
        elif paragraph:
            yield f"<p>{escape(paragraph)}</p>"


def _step(told: Told, ranks: int) -> Iterator[str]:
    if told.moments:
        yield '<div class="scroll"><table><tr><th>when</th><th>rank</th><th>what</th><th>shape</th>'
        yield "<th>first numbers</th><th>hash</th></tr>"
        for when, moments in told.moments:
            yield from _held(when, moments)
        yield "</table></div>"
    yield timeline(told)
    yield traffic(told.messages, ranks)
    for sentence in told.sentences:
        yield f"<p>{escape(sentence)}</p>"
    for each in told.figures:
        yield f"<h4>{escape(each.title)}</h4>"
        yield from _table(each) if each.kind == "table" else [figure(each)]


def _held(when: str, moments: Sequence[tuple[int, Moment]]) -> Iterator[str]:
    """A row for every value; what is the same as in the row above is not said again."""
    last: tuple[str, str] = ("", "")
    for rank, moment in moments:
        for value in moment.values:
            here = (when, str(rank))
            shown = [
                "" if said == before else said for said, before in zip(here, last, strict=True)
            ]
            last = here
            cells = "".join(
                f'<td class="num">{escape(cell)}</td>'
                for cell in (*shown, value.name, value.shape, value.first)
            )
            yield f"<tr>{cells}<td>{_chip(value.hash)}</td></tr>"


def _chip(digest: str) -> str:
    if not digest:
        return ""
    hue = int(digest[:4], 16) % 360
    return f'<span class="chip" style="background:hsl({hue} 65% 55%)"></span><code>{escape(digest)}</code>'


def _table(told: Figure) -> Iterator[str]:
    yield '<div class="scroll"><table><tr>'
    yield "".join(f"<th>{escape(cell)}</th>" for cell in told.data["header"]) + "</tr>"
    for row in told.data["rows"]:
        yield "<tr>" + "".join(f'<td class="num">{escape(cell)}</td>' for cell in row) + "</tr>"
    yield "</table></div>"


def _claims(trial: Trial) -> Iterator[str]:
    failed = [claim for claim in trial.claims if not claim.holds]
    for claim in failed:
        yield f'<p class="bad">FAIL {escape(claim.says)} {escape(claim.detail)}</p>'
    yield f'<details><summary>check: {_verdict(trial)}</summary><ul class="claims">'
    for claim in trial.claims:
        mark = '<span class="good">ok</span>' if claim.holds else '<span class="bad">FAIL</span>'
        yield f'<li>{mark} {escape(claim.says)} <span class="soft">{escape(claim.detail)}</span></li>'
    yield "</ul></details>"


def _coloured(source: str) -> str:
    """Python with comments, strings and keywords marked, every character escaped."""
    lines = source.splitlines(keepends=True)
    out: list[str] = []
    row, column = 1, 0

    def up_to(to_row: int, to_column: int) -> str:
        nonlocal row, column
        text = ""
        while row < to_row:
            text += lines[row - 1][column:]
            row, column = row + 1, 0
        if row <= len(lines):
            text += lines[row - 1][column:to_column]
        column = to_column
        return escape(text)

    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        tag = {tokenize.COMMENT: "i", tokenize.STRING: "s"}.get(token.type)
        if token.type == tokenize.NAME and keyword.iskeyword(token.string):
            tag = "b"
        out.append(up_to(*token.start))
        inside = up_to(*token.end)
        out.append(f"<{tag}>{inside}</{tag}>" if tag and inside else inside)
    return "".join(out)
