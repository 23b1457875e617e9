"""A trial as text for a terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from ..draw import text_table
from .claims import Claim
from .record import Figure, Message, Step
from .trial import Trial

__all__ = ["as_json", "bytes_text", "claims_text", "conditions", "text", "verdict"]


def as_json(trial: Trial) -> dict[str, object]:
    """Everything that was recorded, as plain values."""
    return {
        "name": trial.entry.name,
        "title": trial.entry.title,
        "ranks": trial.ranks,
        "backend": trial.backend,
        "size": asdict(trial.size),
        "holds": trial.holds,
        "claims": [asdict(claim) for claim in trial.claims],
        "records": [asdict(record) for record in trial.records],
    }


def conditions(trial: Trial) -> str:
    """What it was run with, in a line."""
    size = trial.size
    ranks = "1 rank" if trial.ranks == 1 else f"{trial.ranks} ranks on {trial.backend}"
    return (
        f"{ranks}; batch {size.batch}, width {size.width}, {size.layers} layers, {size.steps} steps"
    )


def verdict(trial: Trial) -> str:
    """How many claims hold."""
    count = len(trial.claims)
    if trial.holds:
        return f"{count} claims hold"
    return f"{len(trial.failed)} of {count} claims fail"


def text(trial: Trial, *, verbose: bool = False) -> str:
    """What every rank had before and after each step, what was sent, and the claims that failed;
    with `verbose` all claims."""
    parts = [f"{trial.entry.name}: {trial.entry.title}\n{conditions(trial)}\n"]
    parts += ["".join(_step(title, steps)) for title, steps in trial.steps()]
    return "\n".join([*parts, claims_text(trial, verbose=verbose)])


def claims_text(trial: Trial, *, verbose: bool = False) -> str:
    """How many claims hold, and those that do not; with `verbose` all."""
    shown = trial.claims if verbose else trial.failed
    lines = [verdict(trial), *(f"  {'ok  ' if c.holds else 'FAIL'} {_claim(c)}" for c in shown)]
    return "\n".join(lines) + "\n"


def _claim(claim: Claim) -> str:
    return f"{claim.says} ({claim.detail})" if claim.detail else claim.says


def _step(title: str, steps: Sequence[tuple[int, Step]]) -> Iterator[str]:
    yield f"{title}\n"
    yield text_table((), value_rows(steps), left="llllll", indent=2)
    rows = [(f"rank {rank}", *row) for rank, step in steps for row in sent(step.messages)]
    if rows:
        yield text_table(
            (), [("sent", *rows[0]), *(("", *r) for r in rows[1:])], left="llll", indent=2
        )
    for _, step in steps:
        yield from (f"  {sentence}\n" for sentence in step.notes)
        for figure in step.figures:
            yield f"  {figure.title}\n{_figure(figure)}"


def value_rows(steps: Sequence[tuple[int, Step]]) -> list[tuple[str, ...]]:
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


def sent(messages: Sequence[Message]) -> Iterator[tuple[str, str]]:
    """(call, bytes to each rank), calls of one kind together."""
    sums: dict[str, dict[int, float]] = {}
    for message in messages:
        to = sums.setdefault(f"{message.kind} on {message.group}", {})
        to[message.to] = to.get(message.to, 0.0) + message.bytes
    for call, to in sums.items():
        yield call, ", ".join(f"{bytes_text(size)} to {rank}" for rank, size in to.items())


def _figure(figure: Figure) -> str:
    data = figure.data
    if figure.kind == "table":
        return text_table(data["header"], data["rows"], left="l" * len(data["header"]), indent=2)
    if figure.kind == "curves":
        names = [f"{x:g}" for x, _ in next(iter(data["lines"].values()))]
        rows = [[name, *(f"{y:.4g}" for _, y in line)] for name, line in data["lines"].items()]
        return text_table([data["x"], *names], rows, indent=2)
    lines = []
    for name, parts in data["rows"].items():
        groups: dict[str, list[str]] = {}
        for group, _, words in parts:
            groups.setdefault(group, []).append(words)
        lines.append(f"    {name}: " + "  ".join(" ".join(words) for words in groups.values()))
    return "\n".join(lines) + "\n"


def bytes_text(size: float) -> str:
    """Bytes for people, in thousands: 512 B, 8.4 MB."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
