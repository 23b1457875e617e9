"""The numbers of a profile fitted on runs: what physics leaves open, and nothing more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

import numpy as np

from .estimate import Estimates
from .hardware import Numbers
from .profile import FITTED, Profile

__all__ = ["fit"]


class Measured(Protocol):
    """Runs with their measured seconds a step (0: none), and what a profile predicts for them."""

    measured: Numbers

    def under(self, profile: Profile) -> Estimates: ...


G = TypeVar("G", bound=Measured)

_CLIP = 0.4  # a run that is further off than this (in log time) is pathological and pulls no more
_PRIOR = 0.05  # how much a number is held where the runs do not tell it
_AT_REST = Profile()  # a number that nothing tells stays where a new profile has it


def fit(
    base: Profile,
    groups: Sequence[G],
    *,
    names: Sequence[str] = tuple(FITTED),
    use: Callable[[G], Numbers] | None = None,
    most: int = 160,
    clip: float = _CLIP,
) -> Profile:
    """The profile whose numbers come nearest to the measured steps: mean absolute log error.

    `use` cached_costs the rows of a group; left out, every measured row counts one. `most` is how many
    moves the search makes, twice; `clip` is how far off a run still pulls.
    """
    low = np.array([FITTED[n][0] for n in names])
    span = np.array([FITTED[n][1] for n in names]) - low
    rest = (np.array([getattr(_AT_REST, n) for n in names]) - low) / span
    known = [(g, use(g) if use else (g.measured > 0).astype(float)) for g in groups]
    known = [(g, w) for g, w in known if w.sum() > 0]
    if not known:
        return base

    def at(x: Numbers) -> Profile:
        numbers = low + span * np.clip(x, 0.0, 1.0)
        said = {n: round(float(v), 3) for n, v in zip(names, numbers, strict=True)}
        return replace(base, **said)  # type: ignore[arg-type]

    def loss(x: Numbers) -> float:
        profile, total, count = at(x), 0.0, 0.0
        for group, weight in known:
            some = weight > 0
            off = np.abs(np.log(group.under(profile).step[some] / group.measured[some]))
            total += float(np.sum(weight[some] * np.minimum(off, clip)))
            count += float(weight[some].sum())
        outside = np.sum(np.maximum(x - 1, 0) + np.maximum(-x, 0))
        return total / count + float(outside) + _PRIOR * float(np.mean((x - rest) ** 2))

    best = _simplex(loss, np.clip(rest, 0.05, 0.95), 0.2, most)
    return at(_simplex(loss, np.clip(best, 0.02, 0.98), 0.1, most))


def _simplex(
    f: Callable[[Numbers], float], start: Numbers, step: float, most: int = 160
) -> Numbers:
    """The lowest point that Nelder and Mead's walk (1965) finds from a start."""
    points = [start]
    for k in range(len(start)):
        moved = start.copy()
        moved[k] += step if moved[k] + step <= 1 else -step
        points.append(moved)
    values = [f(x) for x in points]
    for _ in range(most):
        order = np.argsort(values)
        points, values = [points[i] for i in order], [values[i] for i in order]
        if values[-1] - values[0] < 1e-5:
            break
        centre = np.mean(points[:-1], axis=0)
        _walk(f, points, values, centre)
    return points[int(np.argmin(values))]


def _walk(
    f: Callable[[Numbers], float], points: list[Numbers], values: list[float], centre: Numbers
) -> None:
    """One move of the worst point: mirrored, further, nearer; or all of them towards the best."""
    worst = points[-1]
    mirrored = centre + (centre - worst)
    value = f(mirrored)
    if value < values[0]:
        further = centre + 2 * (centre - worst)
        ahead = f(further)
        points[-1], values[-1] = (further, ahead) if ahead < value else (mirrored, value)
    elif value < values[-2]:
        points[-1], values[-1] = mirrored, value
    else:
        nearer = centre + 0.5 * ((mirrored if value < values[-1] else worst) - centre)
        inside = f(nearer)
        if inside < min(value, values[-1]):
            points[-1], values[-1] = nearer, inside
        else:
            for i in range(1, len(points)):
                points[i] = points[0] + 0.5 * (points[i] - points[0])
                values[i] = f(points[i])
