"""Checks every predicted step and size, and refuses impossible ones.

A price that is missing, infinite or in the wrong unit does not stop a simulation. It
results in a step of a thousand years, or 120 % of the devices' peak. That is a mistake
of ours, never an answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

from ..layout import Shape
from ..layout.numbers import flops_text, seconds_text
from ..program.flops import step_flops
from .case import Case
from .hardware import Hardware, PredictionError

LONGEST_STEP = 86_400.0  # seconds; nobody trains with steps of more than a day
# a step slower than so many times the peak allows has a wrong price, not a large batch
_SLOWEST = 1000.0
_ROUNDING = 1e-9
_OURS = "This is a bug in phalanx, not in your request: please report it with this line."


def refuse_impossible(
    case: Case,
    hardware: Hardware,
    parts: Mapping[str, float],
    memory: Mapping[str, float],
) -> None:
    """Raise if a time or size is negative or not finite, or a step beats the peak.

    No step is shorter than the model's products at the peak of the devices. Without
    `parts`, only memory is checked.
    """
    refuse_no_numbers(case, hardware, "time of a step", parts)
    refuse_no_numbers(case, hardware, "memory", memory)
    if not parts:
        return
    step, least = sum(parts.values()), shortest_step(case, hardware)
    if step <= 0:
        raise _impossible(case, hardware, f"a step takes {step:g} s")
    # A shape that was not timed may run faster than a measured peak.
    if not hardware.measured and step < least * (1 - _ROUNDING):
        what = (
            f"a step takes {seconds_text(step)}, an MFU of {least / step:.1%}"
        )
        raise _impossible(
            case, hardware, f"{what}: {_at_peak(case, hardware, least)}"
        )


def refuse_no_numbers(
    case: Case, hardware: Hardware, what: str, values: Mapping[str, float]
) -> None:
    """Raise if a value is infinite, NaN or below 0."""
    # Rounding may leave a difference of large values slightly below 0.
    least = -_ROUNDING * max(1.0, abs(sum(values.values())))
    wrong = {
        name: x
        for name, x in values.items()
        if not (math.isfinite(x) and x >= least)
    }
    if wrong:
        listed = ", ".join(
            f"{name} {value:g}" for name, value in wrong.items()
        )
        raise _impossible(case, hardware, f"the {what} is {listed}")


def refuse_too_long(
    case: Case, hardware: Hardware, parts: Mapping[str, float]
) -> None:
    """Raise if a step takes more than a day."""
    step, least = sum(parts.values()), shortest_step(case, hardware)
    if step <= LONGEST_STEP:
        return
    longest = max(parts, key=parts.__getitem__)
    what = (
        f"a step takes {seconds_text(step)}, longer than a day; {parts[longest] / step:.1%} of it is"
        f" {longest!r}; {_at_peak(case, hardware, least)}"
    )
    # Far above the peak's time a price is wrong; otherwise the request itself
    # is too large.
    if step > _SLOWEST * least:
        raise _impossible(case, hardware, what)
    way_out = "Plan for fewer tokens per step or more devices."
    raise PredictionError(f"{_where(case, hardware)}: {what}. {way_out}")


def shortest_step(case: Case, hardware: Hardware) -> float:
    """Seconds of a step at the peak of the fastest format in use; 0 without a peak."""
    peak = peak_of(case, hardware)
    # A step of one sequence, scaled by the number of sequences.
    flops = (
        _flops_of_sequence(case.shape, case.sequence)
        * case.tokens
        / case.sequence
    )
    return flops / (peak * case.layout.ranks) if peak else 0.0


@lru_cache(maxsize=64)  # asked again for every layout of a model
def _flops_of_sequence(shape: Shape, sequence: int) -> float:
    return step_flops(shape, 1, sequence).model


def peak_of(case: Case, hardware: Hardware) -> float:
    """A device's peak FLOP/s in the fastest number format in use; 0 if it is unknown."""
    layout = case.layout
    formats = {layout.precision, layout.fastest_format, case.dtype}
    return max(hardware.peak.get(name, 0.0) for name in formats)


def _at_peak(case: Case, hardware: Hardware, least: float) -> str:
    devices = f"{case.layout.ranks:,} x {flops_text(peak_of(case, hardware))}"
    return f"the model's products alone take {seconds_text(least)} at the peak of {devices}"


def _where(case: Case, hardware: Hardware) -> str:
    name = f" on {hardware.name}" if hardware.name else ""
    return f"{str(case.layout) or 'one rank'}{name}"


def _impossible(case: Case, hardware: Hardware, what: str) -> PredictionError:
    where = _where(case, hardware)
    return PredictionError(
        f"The prediction for {where} is impossible: {what}. {_OURS}"
    )
