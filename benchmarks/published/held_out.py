"""The numbers of each family of sources without it: fitted on all other families, siblings held out
together; and then calibrated on five of its own rows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from phalanx.plan.calibrate import LongestPath, calibrated, fit, spread_over
from phalanx.plan.profile import SoftwareProfile, profile
from phalanx.plan.published import PublishedRun
from phalanx.plan.score import HeldOut
from phalanx.program.program import uncollected

__all__ = ["hold_out", "shared", "some"]

Each = Callable[..., Iterable[LongestPath]]
_ROWS = 8  # of a profile on a device that a fit takes
_PHYSICS = 0.1  # of mean log error: what twice the traffic has to save
_FIVE = 5  # rows of its own that a family is calibrated with
_LEAST = 3  # of one software, to calibrate it by these alone


def shared(
    runs: Sequence[PublishedRun],
    met: dict[int, list[LongestPath]],
    base: SoftwareProfile,
    each: Each = map,
    physics: float = _PHYSICS,
) -> SoftwareProfile:
    """One set of numbers for runs of many profiles; every family counts one, however many rows. Few kinds
    of software tell speed from traffic, and without those others take up what they leave."""
    sizes = Counter(run.row.family for run in runs)
    weights = [1 / sizes[run.row.family] for run in runs]
    return fit(base, runs, weights=weights, moves=30, met=met, each=each, physics=physics)


@uncollected()
def hold_out(
    published: Sequence[PublishedRun], families: Sequence[str], each: Each = map
) -> dict[str, HeldOut]:
    """For each family the numbers of `default` as they are without it, and then with five rows."""
    met: dict[int, list[LongestPath]] = {}
    known = some(published)
    base = shared(known, met, profile("default"), each)
    found = {}
    for family in families:
        others = [run for run in known if run.row.family != family]
        own = [run for run in published if run.row.family == family and run.counts]
        if not others:
            continue
        without = shared(others, met, base)
        five = spread_over(own, _FIVE)
        all_ = calibrated(without, five)
        after = {run.row.profile.name: all_ for run in published if run.row.family == family}
        for name in after:  # each software by its own runs, where it has enough of them
            mine = [run for run in five if run.row.profile.name == name]
            if _LEAST <= len(mine) < len(five):
                after[name] = calibrated(without, mine)
        found[family] = HeldOut(without, after, tuple(run.row for run in five))
    return found


def some(published: Sequence[PublishedRun]) -> list[PublishedRun]:
    """Some rows of every profile on every device: more tell a fit little that is new."""
    kinds: dict[Any, list[PublishedRun]] = defaultdict(list)
    for run in published:
        if run.counts and run.row.case is not None:
            kinds[run.row.family, run.row.profile.name, run.row.device, run.row.case.dtype].append(
                run
            )
    return [run for those in kinds.values() for run in spread_over(those, _ROWS)]
