"""The range in which four of five measured steps lie around a predicted one, and what makes it wide.

Each cause of uncertainty that applies to a case widens the range: by how much was fitted on published
runs that no other number of the planner had seen (`intervals.toml`). Causes are independent, so that
their widths add up in squares. Below and above the prediction have widths of their own.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean

from ..layout import Shape
from .hardware import Hardware, Roofline
from .price import Case
from .profile import SoftwareProfile

LEVEL = 0.8  # of measured steps that lie in the range
_QUANTILE = 1.2816  # of the normal distribution, at the upper end of such a range
_MESSAGES = ("tensor", "data", "pipe")  # the parts of a step that wait for messages
_DEVICES = 8.0  # so many devices add nothing to the range
BASE, SOFTWARE, DEVICE, ATTENTION, MATMUL = "base", "software", "device", "attention", "matmul"
NARROW, EXPERTS, SCALE, TENSOR = "narrow", "experts", "scale", "tensor"
MESSAGES, OFFLOAD, MACHINE, OWN = "messages", "offload", "machine", "own"
CAUSES = (
    *(BASE, SOFTWARE, DEVICE, ATTENTION, MATMUL, NARROW, EXPERTS, SCALE, TENSOR, MESSAGES, OFFLOAD),
    MACHINE,
)


@dataclass(frozen=True)
class Cause:
    """One cause of uncertainty, with its widths as logarithms: below and above the prediction."""

    name: str
    text: str
    below: float
    above: float

    @property
    def width(self) -> float:
        return self.below + self.above


@dataclass(frozen=True)
class Interval:
    """The range of a step: factors of the prediction, and its causes, the widest first."""

    low: float
    high: float
    causes: tuple[Cause, ...]

    def around(self, step: float) -> tuple[float, float]:
        """Seconds between which four of five measured steps lie."""
        return step * self.low, step * self.high

    @property
    def cause(self) -> str:
        """The largest cause of uncertainty, in words."""
        return self.causes[0].text


@dataclass(frozen=True)
class Widths:
    """What `intervals.toml` has: widths of every cause, and the devices whose runs the planner's numbers
    were fitted on."""

    devices: tuple[str, ...]
    below: Mapping[str, float]
    above: Mapping[str, float]


@cache
def widths() -> Widths:
    """The fitted widths."""
    path = Path(__file__).parent / "intervals.toml"
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    return Widths(tuple(table["devices"]), table["below"], table["above"])


def amounts(
    case: Case, hardware: Hardware, profile: SoftwareProfile, parts: Mapping[str, float]
) -> dict[str, float]:
    """How strongly each cause applies to a prediction; 0: not at all. A width is multiplied by it."""
    layout, rates = case.layout, hardware.rates
    attention = attention_part(case.shape, case.sequence)
    dtype = case.dtype or ("fp8" if layout.matmul else layout.precision)
    step = sum(parts.values())
    found = {
        BASE: 1.0,
        MACHINE: float(hardware.measured),
        SOFTWARE: 0.0 if profile.known else 1.0,
        NARROW: float(dtype in ("fp8", "fp4")),
        EXPERTS: float(case.shape.experts > 0),
        SCALE: max(0.0, math.log2(layout.ranks / _DEVICES)),
        TENSOR: max(0.0, math.log2(layout.tp / hardware.node)),
        MESSAGES: sum(parts.get(name, 0.0) for name in _MESSAGES) / step if step else 0.0,
        OFFLOAD: float(bool(layout.offload)),
    }
    if isinstance(rates, Roofline):
        device = rates.device
        unmeasured = profile.fused_attention and not rates.attention_measured(profile.attention)
        found[DEVICE] = float(device.name not in widths().devices)
        found[ATTENTION] = attention * unmeasured
        found[MATMUL] = (1 - attention) * (dtype not in device.reached_tflops)
    return found


def attention_part(shape: Shape, sequence: int) -> float:
    """Part of the model's FLOPs that is attention, causal and without windows."""
    pairs = sequence * shape.heads * shape.head_dim * shape.layers
    return pairs / (pairs + shape.active) if pairs else 0.0


def interval(
    case: Case, hardware: Hardware, profile: SoftwareProfile, parts: Mapping[str, float]
) -> Interval:
    """The range of a predicted step, from the causes that apply to it. Where a profile was calibrated, its
    own runs say how far off it is, and other causes count by how much they go beyond those runs."""
    fitted, known = widths(), dict(zip(profile.own_causes, profile.own_amounts, strict=True))
    texts, found = _texts(case, hardware, profile, parts), list[Cause]()
    if profile.own_runs:
        text = f"{profile.own_runs} runs of your own, each predicted without it, are off by as much"
        found.append(Cause(OWN, text, profile.own_below, profile.own_above))
    for name, amount in amounts(case, hardware, profile, parts).items():
        beyond = max(0.0, amount - known.get(name, 0.0))
        if beyond:
            below, above = beyond * fitted.below[name], beyond * fitted.above[name]
            found.append(Cause(name, texts[name], below, above))
    below = math.hypot(*(cause.below for cause in found))
    above = math.hypot(*(cause.above for cause in found))
    widest = sorted(found, key=lambda cause: -cause.width)
    return Interval(math.exp(-below), math.exp(above), tuple(widest))


def _texts(
    case: Case, hardware: Hardware, profile: SoftwareProfile, parts: Mapping[str, float]
) -> dict[str, str]:
    """Every cause in words, as they complete "The largest uncertainty: ..."."""
    layout, step = case.layout, sum(parts.values())
    waits = sum(parts.get(name, 0.0) for name in _MESSAGES) / step if step else 0.0
    format_ = case.dtype or layout.matmul or layout.precision
    title = hardware.rates.device.title if isinstance(hardware.rates, Roofline) else hardware.name
    return {
        BASE: "the usual scatter of published runs on software and devices that are known",
        SOFTWARE: f"the kernels and the overlap of the software are not known, but those of"
        f" {profile.name!r} assumed",
        DEVICE: f"the planner's numbers were fitted on no run on {title}",
        ATTENTION: f"the speed of {profile.attention} attention on {title} is estimated, not measured",
        MATMUL: f"the speed of {format_} matmuls on {title} is estimated, not measured",
        NARROW: f"matmuls in {format_} gain less in some models than in others",
        EXPERTS: "few runs with experts were published, and tokens are taken as evenly spread",
        SCALE: f"slow ranks and a shared network among {layout.ranks:,} devices are not simulated",
        TENSOR: f"tp{layout.tp} sends every block's messages between servers of {hardware.node}",
        MESSAGES: f"{waits:.0%} of the step waits for messages, whose speed differs between clusters",
        OFFLOAD: "moving data to the host differs between servers",
        MACHINE: f"matmuls and messages of {hardware.name} were measured one by one, not in a step",
    }


def with_own_range(
    profile: SoftwareProfile,
    off: Sequence[float],
    runs: Sequence[tuple[Interval, Mapping[str, float]]],
) -> SoftwareProfile:
    """A calibrated profile with the range that its own runs show.

    `off` is the logarithm of measured over predicted time of each run, calibrated without it; `runs` are
    the range of each run before it was calibrated, and the amounts of the causes that applied to it. The
    range before counts as one run more, which keeps that of two or three lucky runs from being narrow.
    """
    count = len(off)
    if count < 2:
        return profile
    squares = math.fsum(x * x for x in off)
    degrees = count + 1  # of freedom: a mean is not taken off
    beyond = _student(degrees) * math.sqrt(1 + 1 / count)

    def reach(before: float) -> float:
        return beyond * math.sqrt(((before / _QUANTILE) ** 2 + squares) / degrees)

    below = reach(fmean(-math.log(each.low) for each, _ in runs))
    above = reach(fmean(math.log(each.high) for each, _ in runs))
    most = {name: max(found.get(name, 0.0) for _, found in runs) for name in CAUSES}
    covered = {name: round(amount, 4) for name, amount in most.items() if amount}
    return replace(
        profile,
        own_runs=count,
        own_below=round(below, 4),
        own_above=round(above, 4),
        own_causes=tuple(covered),
        own_amounts=tuple(covered.values()),
    )


def _student(degrees: int) -> float:
    """The 90 % quantile of Student's distribution, to 1 % with 3 degrees of freedom or more."""
    z, n = _QUANTILE, degrees
    # Abramowitz and Stegun, 26.7.5.
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n * n)
