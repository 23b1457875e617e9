"""A trial as text for a terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from .catalogue import NAMES, entry
from .conduct import Trial
from .record import Figure, Message
from .told import Told, bytes_said, steps_of

__all__ = ["as_json", "listing", "text"]


def listing() -> str:
    """All experiments, a line each."""
    width = max(map(len, NAMES))
    return "".join(f"{name:{width}}  {entry(name).title}\n" for name in NAMES)


def text(trial: Trial) -> str:
    """What every rank held before and after each step, what was sent, and the check."""
    return "\n".join(_lines(trial)) + "\n"


def as_json(trial: Trial) -> dict[str, object]:
    """Everything that was written down, as plain values."""
    return {
        "name": trial.entry.name,
        "title": trial.entry.title,
        "ranks": trial.ranks,
        "wire": trial.wire,
        "size": asdict(trial.size),
        "holds": trial.holds,
        "claims": [asdict(claim) for claim in trial.claims],
        "records": [asdict(record) for record in trial.records],
    }


def conditions(trial: Trial) -> str:
    """What it was run with, in a line."""
    size = trial.size
    ranks = "1 rank" if trial.ranks == 1 else f"{trial.ranks} ranks on {trial.wire}"
    return (
        f"{ranks}; batch {size.batch}, width {size.width}, {size.layers} layers, {size.steps} steps"
    )


def _lines(trial: Trial) -> Iterator[str]:
    yield f"{trial.entry.name}: {trial.entry.title}"
    yield conditions(trial)
    for told in steps_of(trial):
        yield ""
        yield from _step(told)
    failed = [claim for claim in trial.claims if not claim.holds]
    yield ""
    yield f"check: {len(trial.claims) - len(failed)} of {len(trial.claims)} claims hold"
    for claim in trial.claims:
        detail = f" ({claim.detail})" if claim.detail else ""
        yield f"  {'ok  ' if claim.holds else 'FAIL'} {claim.says}{detail}"


def _step(told: Told) -> Iterator[str]:
    yield told.title
    rows: list[list[str]] = []
    for when, moments in told.moments:
        for rank, moment in moments:
            for i, value in enumerate(moment.values):
                first = [when if rank == moments[0][0] and not i else "", f"rank {rank}"]
                hash_said = f"#{value.hash}" if value.hash else ""
                if i:
                    first[1] = ""
                rows.append([*first, value.name, value.shape, value.first, hash_said])
    yield from _columns(rows)
    yield from _sent(told.messages)
    for sentence in told.sentences:
        yield f"  {sentence}"
    for figure in told.figures:
        yield from _figure(figure)


def _sent(messages: Sequence[Message]) -> Iterator[str]:
    """Who sent what to whom, calls of one kind together."""
    sums: dict[tuple[int, str, str], dict[int, float]] = {}
    for message in messages:
        to = sums.setdefault((message.source, message.kind, message.wire), {})
        to[message.to] = to.get(message.to, 0.0) + message.bytes
    rows = [
        [
            f"rank {source}",
            f"{kind} on {wire}",
            ", ".join(f"{bytes_said(b)} to {r}" for r, b in to.items()),
        ]
        for (source, kind, wire), to in sums.items()
    ]
    yield from _columns([["sent" if not i else "", *row] for i, row in enumerate(rows)])


def _figure(figure: Figure) -> Iterator[str]:
    yield f"  {figure.title}"
    data = figure.data
    if figure.kind == "table":
        yield from _columns([data["header"], *data["rows"]])
    elif figure.kind == "curves":
        names = [f"{x:g}" for x, _ in next(iter(data["lines"].values()))]
        rows = [[name, *(f"{y:.4g}" for _, y in line)] for name, line in data["lines"].items()]
        yield from _columns([[data["x"], *names], *rows])
    elif figure.kind == "segments":
        for name, parts in data["bars"].items():
            yield f"    {name}: " + ", ".join(f"{length} {part}" for part, length in parts)
    else:
        for axis, groups in data["axes"].items():
            yield f"    {axis}: " + "  ".join(" ".join(map(str, group)) for group in groups)


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows with their cells under each other."""
    widths: list[int] = []
    for row in rows:
        for i, cell in enumerate(row):
            widths[i:] = [max(len(cell), widths[i] if i < len(widths) else 0), *widths[i + 1 :]]
    for row in rows:
        yield (
            "  " + "  ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=False))
        ).rstrip()
