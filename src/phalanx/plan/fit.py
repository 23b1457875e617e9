"""The numbers of a profile fitted on runs: what physics leaves open, and nothing more.

A step is the length of the longest path through its program, and a path is a count of operations.
The fit moves the profile under the paths that it has met so far, simulates all runs anew, and adds
the paths that have become the longest, until none does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from .profile import FITTED, SoftwareProfile

# Seconds of the operations on one path through a run's program, under a profile.
Path = Callable[[SoftwareProfile], float]
_CLIP = 0.4  # a run that is further off than this (in log time) is pathological and pulls no more
_HELD = 0.5  # how much one run less moves a number than many do: the weight of where it starts
_ROUNDS = 3  # of simulating all runs


class TimedRun(Protocol):
    """A run with its measured seconds a step, and the longest path of its program."""

    @property
    def measured(self) -> float: ...

    def longest(self, profile: SoftwareProfile) -> Path: ...


def longest_of(run: TimedRun, profile: SoftwareProfile) -> Path:
    """The longest path of a run's program under a profile."""
    return run.longest(profile)


def fit(
    base: SoftwareProfile,
    runs: Sequence[TimedRun],
    *,
    weights: Sequence[float] = (),
    moves: int = 80,
    clip: float = _CLIP,
    met: dict[int, list[Path]] | None = None,
    each: Callable[..., Iterable[Path]] = map,
    physics: float = 0.0,
) -> SoftwareProfile:
    """The profile whose numbers come nearest to the measured steps: mean absolute log error.

    Numbers are held where `base` has them, the more the fewer runs there are. `weights` are of the
    runs, one each if left out; `moves` is how many the search makes in a round; `clip` is how far off
    a run still pulls; `met`, the paths of each run that earlier fits met: with it nothing is
    simulated where paths are known; `each` maps simulating over runs. `physics` is how much `traffic` is
    held at 1: software of many kinds moves what it was costed with.
    """
    known = [
        (run, weight)
        for run, weight in zip(runs, weights or [1.0] * len(runs), strict=True)
        if weight > 0 and run.measured > 0
    ]
    if not known:
        return base
    low = [span[0] for span in FITTED.values()]
    wide = [span[1] - span[0] for span in FITTED.values()]
    rest = [(getattr(base, n) - a) / b for n, a, b in zip(FITTED, low, wide, strict=True)]

    def at(x: Sequence[float]) -> SoftwareProfile:
        numbers = {
            name: round(a + b * min(max(each, 0.0), 1.0), 3)
            for name, a, b, each in zip(FITTED, low, wide, x, strict=True)
        }
        return replace(base, **numbers)  # type: ignore[arg-type]

    met = {} if met is None else met
    paths = [met.setdefault(id(run), []) for run, _ in known]
    held = _HELD / len(known)

    def loss(x: Sequence[float]) -> float:
        profile, total, count = at(x), 0.0, 0.0
        for (run, weight), those in zip(known, paths, strict=True):
            step = max(path(profile) for path in those)
            total += weight * min(abs(math.log(step / run.measured)), clip)
            count += weight
        outside = sum(max(each - 1, 0.0) + max(-each, 0.0) for each in x)
        apart = math.fsum((a - b) * (a - b) for a, b in zip(x, rest, strict=True))
        bytes_ = physics * (profile.traffic - 1) ** 2
        return total / count + outside + held * apart + bytes_

    best = [min(max(each, 0.05), 0.95) for each in rest]
    simulated = not all(paths)
    for number in range(_ROUNDS if simulated else 1):
        if simulated:
            all_runs, here = [run for run, _ in known], [at(best)] * len(known)
            for path, those in zip(each(longest_of, all_runs, here), paths, strict=True):
                those.append(path)
        best = _simplex(loss, best, 0.2 if not number else 0.1, moves)
    return at(best)


def _simplex(
    f: Callable[[Sequence[float]], float], start: list[float], step: float, moves: int
) -> list[float]:
    """The lowest point that Nelder and Mead's walk (1965) finds from a start."""
    points = [start]
    for k in range(len(start)):
        moved = list(start)
        moved[k] += step if moved[k] + step <= 1 else -step
        points.append(moved)
    known = sorted((f(x), x) for x in points)
    for _ in range(moves):
        if known[-1][0] - known[0][0] < 1e-5:
            break
        worst = known[-1][1]
        others = [x for _, x in known[:-1]]
        centre = [sum(each) / len(others) for each in zip(*others, strict=True)]

        def towards(part: float, c: list[float] = centre, w: list[float] = worst) -> list[float]:
            return [a + part * (a - b) for a, b in zip(c, w, strict=True)]

        mirrored = towards(1.0)
        value = f(mirrored)
        if value < known[0][0]:
            further = towards(2.0)
            new = min((f(further), further), (value, mirrored))
        elif value < known[-2][0]:
            new = value, mirrored
        else:
            nearer = towards(0.5 if value < known[-1][0] else -0.5)
            new = f(nearer), nearer
            if new[0] >= min(value, known[-1][0]):  # all of them towards the best
                first = known[0][1]
                known = [known[0]] + [
                    (f(x), x)
                    for x in (
                        [a + 0.5 * (b - a) for a, b in zip(first, other, strict=True)]
                        for _, other in known[1:]
                    )
                ]
                known.sort()
                continue
        known = sorted([*known[:-1], new])
    return known[0][1]
