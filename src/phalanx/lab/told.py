"""What a trial tells, in the order of telling: steps of all ranks put together by their titles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .conduct import Trial
from .record import Figure, Message, Moment, Span

__all__ = ["Told", "bytes_said", "steps_of"]


@dataclass(frozen=True)
class Told:
    """One step: what every rank held, did, sent and kept in memory, and what was said of it."""

    title: str
    moments: tuple[tuple[str, tuple[tuple[int, Moment], ...]], ...]  # by when: (rank, moment)
    spans: tuple[tuple[int, Span], ...]
    messages: tuple[Message, ...]
    memory: tuple[tuple[int, tuple[tuple[float, int], ...]], ...]
    sentences: tuple[str, ...]
    figures: tuple[Figure, ...]


def steps_of(trial: Trial) -> Iterator[Told]:
    """Every step by its title, in the order in which some rank first came to it."""
    begun: dict[str, float] = {}
    for record in trial.records:
        for title, time in record.steps:
            begun[title] = min(time, begun.get(title, time))
    for title in sorted(begun, key=lambda each: begun[each]):
        yield _told(trial, title)


def _told(trial: Trial, title: str) -> Told:
    moments: dict[str, list[tuple[int, Moment]]] = {}
    spans: list[tuple[int, Span]] = []
    messages: list[Message] = []
    memory = []
    sentences: list[str] = []
    figures: list[Figure] = []
    for record in trial.records:
        here = {i for i, (name, _) in enumerate(record.steps) if name == title}
        for moment in record.moments:
            if moment.step in here:
                moments.setdefault(moment.when, []).append((record.rank, moment))
        spans += [(record.rank, span) for span in record.spans if span.step in here]
        messages += [message for message in record.messages if message.step in here]
        sentences += [said for step, said in record.sentences if step in here]
        figures += [figure for figure in record.figures if figure.step in here]
        times = [time for _, time in record.steps]
        for i in sorted(here):
            end = times[i + 1] if i + 1 < len(times) else float("inf")
            memory.append((record.rank, _within(record.memory, times[i], end)))
    return Told(
        title,
        tuple((when, tuple(rows)) for when, rows in moments.items()),
        tuple(spans),
        tuple(messages),
        tuple(memory),
        tuple(sentences),
        tuple(figures),
    )


def _within(
    samples: Sequence[tuple[float, int]], start: float, end: float
) -> tuple[tuple[float, int], ...]:
    """The samples of a stretch of time, and what was held when it began."""
    held = [size for time, size in samples if time < start]
    inside = [(time, size) for time, size in samples if start <= time < end]
    return ((start, held[-1] if held else 0), *inside)


def bytes_said(size: float) -> str:
    """Bytes for people, in thousands: 512 B, 8.4 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    raise AssertionError
