"""The numbers of each family of sources without it: fitted on all other families, siblings held out
together; and then calibrated on five of its own rows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from phalanx.planner.calibrate import LongestPath, fit, spread_over
from phalanx.planner.profile import SoftwareProfile, profile
from phalanx.planner.published import PublishedRun
from phalanx.planner.score import HeldOut, held_out
from phalanx.program.program import uncollected

__all__ = ["START", "hold_out", "shared", "some", "unfitted"]

Each = Callable[..., Iterable[LongestPath]]
_ROWS = 8  # of a profile on a device that a fit takes
_PHYSICS = 0.1  # of mean log error: what twice the traffic has to save
# Where every fit to many families begins: no run has been seen by it.
START = SoftwareProfile(speed=0.8, traffic=1.0, host=2.0)
_FIVE = 5  # rows of its own that a family is calibrated with


def shared(
    runs: Sequence[PublishedRun],
    met: dict[int, list[LongestPath]],
    base: SoftwareProfile,
    each: Each = map,
    physics: float = _PHYSICS,
) -> SoftwareProfile:
    """One set of numbers for runs of many profiles; every family counts one, however many rows. Few kinds
    of software tell speed from traffic, and few runs are so small that starting operations is seen: without
    those others take up what they leave."""
    sizes = Counter(run.row.family for run in runs)
    weights = [1 / sizes[run.row.family] for run in runs]
    return fit(
        base,
        runs,
        weights=weights,
        moves=80,
        met=met,
        each=each,
        physics=physics,
    )


@uncollected()
def hold_out(
    published: Sequence[PublishedRun],
    families: Sequence[str],
    each: Each = map,
) -> dict[str, HeldOut]:
    """For each family the numbers of `default` as they are without it, and then with five rows."""
    met: dict[int, list[LongestPath]] = {}
    known = some(published)
    # meets the paths of all runs, which have no number of a fit
    shared(known, met, START, each)
    found = {}
    for family in families:
        others = [run for run in known if run.row.family != family]
        own = [run for run in published if run.row.family == family]
        if not others:
            continue
        without = shared(others, met, START)
        found[family] = held_out(without, own, _FIVE)
    return found


def unfitted(
    published: Sequence[PublishedRun], families: Sequence[str]
) -> dict[str, HeldOut]:
    """The numbers of `default` as they stand, and then with five rows of each family."""
    start = profile("default")
    return {
        family: held_out(
            start,
            [run for run in published if run.row.family == family],
            _FIVE,
        )
        for family in families
    }


def some(published: Sequence[PublishedRun]) -> list[PublishedRun]:
    """Some rows of every profile on every device: more tell a fit little that is new."""
    kinds: dict[Any, list[PublishedRun]] = defaultdict(list)
    for run in published:
        if run.counts and run.row.case is not None:
            kinds[
                run.row.family,
                run.row.profile.name,
                run.row.device,
                run.row.case.dtype,
            ].append(run)
    return [
        run for those in kinds.values() for run in spread_over(those, _ROWS)
    ]
