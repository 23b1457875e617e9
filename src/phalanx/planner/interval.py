"""The expected range of a step around its prediction, and the causes that make it wide.

Each cause of uncertainty that applies to a case widens the range. The widths were
fitted on published runs that no other number of the planner had seen
(`intervals.toml`). Causes are independent, so their widths add in squares. The widths
below and above the prediction differ.
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
from .case import Case
from .hardware import NARROW as NARROW_FORMATS
from .hardware import Hardware, Roofline
from .profile import SoftwareProfile

# The share of steps in the range that a calibration derives from its own runs.
OWN_LEVEL = 0.8
_QUANTILE = (
    1.2816  # of the normal distribution, at the upper end of such a range
)
# Parts of a step that wait for messages.
_MESSAGES = (
    "tensor",
    "data",
    "pipe",
)
_DEVICES = 8.0  # up to this many devices do not widen the range
BASE, SOFTWARE, DEVICE, ATTENTION, MATMUL = (
    "base",
    "software",
    "device",
    "attention",
    "matmul",
)
NARROW, ROUTED, SCALE, TENSOR = "narrow", "experts", "scale", "tensor"
MESSAGES, OFFLOAD, MACHINE, OWN = "messages", "offload", "machine", "own"
CAUSES = (
    *(
        BASE,
        SOFTWARE,
        DEVICE,
        ATTENTION,
        MATMUL,
        NARROW,
        ROUTED,
        SCALE,
        TENSOR,
        MESSAGES,
        OFFLOAD,
    ),
    MACHINE,
)


@dataclass(frozen=True)
class Cause:
    """A cause of uncertainty: logarithms of its widths below and above a prediction."""

    name: str
    text: str
    below: float
    above: float

    @property
    def width(self) -> float:
        return self.below + self.above


@dataclass(frozen=True)
class StepRange:
    """The range of a step: factors of the prediction, and its causes, the widest first.

    `level` is the share of published runs that fell in such a range while their whole
    family was left out of the fit. With `own_runs` the range comes from that many runs
    of the user, and `level` from Student's distribution.
    """

    low: float
    high: float
    causes: tuple[Cause, ...]
    level: float
    own_runs: int = 0

    def around(self, step: float) -> tuple[float, float]:
        """The lower and upper end of the range, in seconds."""
        return step * self.low, step * self.high

    @property
    def cause(self) -> str:
        """The largest cause of uncertainty, in words."""
        return self.causes[0].text


@dataclass(frozen=True)
class Widths:
    """The contents of `intervals.toml`.

    The widths of every cause, the devices on whose runs the planner's numbers were
    fitted, and the shares of runs in their range with their family left out.
    """

    devices: tuple[str, ...]
    covered: Mapping[str, float]
    below: Mapping[str, float]
    above: Mapping[str, float]


@cache
def widths() -> Widths:
    """The fitted widths."""
    path = Path(__file__).parent / "intervals.toml"
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    return Widths(
        tuple(table["devices"]),
        table["covered"],
        table["below"],
        table["above"],
    )


def amounts(
    case: Case,
    hardware: Hardware,
    profile: SoftwareProfile,
    parts: Mapping[str, float],
) -> dict[str, float]:
    """The strength of each cause in a prediction, a factor on its width; 0: none."""
    layout, rates = case.layout, hardware.rates
    attention = attention_part(case.shape, case.sequence)
    dtype = case.dtype or layout.fastest_format
    step = sum(parts.values())
    found = {
        BASE: 1.0,
        MACHINE: float(hardware.measured),
        SOFTWARE: 0.0 if profile.known else 1.0,
        NARROW: float(dtype in NARROW_FORMATS),
        ROUTED: float(case.shape.routed.count > 0),
        # In doublings: of the number of devices, and of tp beyond one server.
        SCALE: max(0.0, math.log2(layout.ranks / _DEVICES)),
        TENSOR: max(0.0, math.log2(layout.tp / hardware.node)),
        MESSAGES: sum(parts.get(name, 0.0) for name in _MESSAGES) / step
        if step
        else 0.0,
        OFFLOAD: float(bool(layout.offload)),
    }
    if isinstance(rates, Roofline):
        device = rates.device
        unmeasured = profile.fused_attention and not rates.attention_measured(
            profile.attention
        )
        found[DEVICE] = float(device.name not in widths().devices)
        # Weighted by the share of FLOPs that each of the two has.
        found[ATTENTION] = attention * unmeasured
        found[MATMUL] = (1 - attention) * (dtype not in device.reached_tflops)
    return found


def attention_part(shape: Shape, sequence: int) -> float:
    """The share of attention, causal and without windows, in the model's FLOPs."""
    # Causal attention costs as many FLOPs (6) for each of these as a matmul
    # does for each parameter.
    blocks = range(1, 1 + shape.layers)
    mixers = (shape.mixer(piece) for piece in blocks)
    attending = sum(mixer is not None and mixer.pairs for mixer in mixers)
    pairs = sequence * shape.heads * shape.head_dim * attending
    return pairs / (pairs + shape.active) if pairs else 0.0


def interval(
    case: Case,
    hardware: Hardware,
    profile: SoftwareProfile,
    parts: Mapping[str, float],
) -> StepRange:
    """The range of a predicted step, from the causes that apply to it.

    The runs of a calibrated profile show its error, so other causes count only as far
    as they exceed those of these runs.
    """
    fitted, known = (
        widths(),
        dict(zip(profile.own_causes, profile.own_amounts, strict=True)),
    )
    texts, found = _texts(case, hardware, profile, parts), list[Cause]()
    if profile.own_runs:
        text = f"the errors of your own {profile.own_runs} runs, each predicted from the others"
        found.append(Cause(OWN, text, profile.own_below, profile.own_above))
    for name, amount in amounts(case, hardware, profile, parts).items():
        # A calibrated profile's own errors include causes as strong as those
        # of its runs.
        beyond = max(0.0, amount - known.get(name, 0.0))
        if beyond:
            below, above = (
                beyond * fitted.below[name],
                beyond * fitted.above[name],
            )
            found.append(Cause(name, texts[name], below, above))
    # Independent causes: logarithms of widths add in squares.
    below = math.hypot(*(cause.below for cause in found))
    above = math.hypot(*(cause.above for cause in found))
    widest = sorted(found, key=lambda cause: -cause.width)
    software = (
        SOFTWARE if any(cause.name == SOFTWARE for cause in found) else BASE
    )
    level = OWN_LEVEL if profile.own_runs else fitted.covered[software]
    return StepRange(
        math.exp(-below),
        math.exp(above),
        tuple(widest),
        level,
        profile.own_runs,
    )


def _texts(
    case: Case,
    hardware: Hardware,
    profile: SoftwareProfile,
    parts: Mapping[str, float],
) -> dict[str, str]:
    """Every cause in words, completing "Largest uncertainty: ..."."""
    layout, step = case.layout, sum(parts.values())
    waits = (
        sum(parts.get(name, 0.0) for name in _MESSAGES) / step if step else 0.0
    )
    format_ = case.dtype or layout.matmul or layout.precision
    title = (
        hardware.rates.device.title
        if isinstance(hardware.rates, Roofline)
        else hardware.name
    )
    return {
        BASE: "the usual scatter of published runs on known software and devices",
        SOFTWARE: f"no run of the software {profile.name!r} was fitted: its kernels and overlap are assumed",
        DEVICE: f"no run on {title} was fitted",
        ATTENTION: f"the speed of {profile.attention} attention on {title} is estimated, not measured",
        MATMUL: f"the speed of {format_} matmuls on {title} is estimated, not measured",
        NARROW: f"matmuls in {format_} gain less in some models than in others",
        ROUTED: "few runs with experts are published, and tokens are assumed to spread evenly",
        SCALE: f"slow ranks and a shared network among {layout.ranks:,} devices are not simulated",
        TENSOR: f"tp{layout.tp} sends every block's messages between servers of {hardware.node}",
        MESSAGES: f"{waits:.0%} of the step waits for messages, whose speed differs between clusters",
        OFFLOAD: "moving data to the host differs between servers",
        MACHINE: f"matmuls and messages of {hardware.name} were measured one by one, not in a step",
    }


def with_own_range(
    profile: SoftwareProfile,
    off: Sequence[float],
    runs: Sequence[tuple[StepRange, Mapping[str, float]]],
) -> SoftwareProfile:
    """A calibrated profile with the range that its own runs show.

    `off` is the logarithm of measured over predicted time of each run, calibrated
    without it. `runs` holds the range of each run before calibration, and the strengths
    of the causes that applied to it. The range before calibration counts as one more
    run, so two or three lucky runs do not make it narrow.
    """
    count = len(off)
    if count < 2:
        return profile
    squares = math.fsum(x * x for x in off)
    degrees = count + 1  # of freedom: no mean is subtracted
    # Student's prediction interval for one more run has the factor sqrt(1 + 1
    # / n).
    beyond = _student(degrees) * math.sqrt(1 + 1 / count)

    def reach(before: float) -> float:
        return beyond * math.sqrt(
            # A normal quantile turned into a standard deviation counts as one
            # more observed error.
            ((before / _QUANTILE) ** 2 + squares) / degrees
        )

    below = reach(fmean(-math.log(each.low) for each, _ in runs))
    above = reach(fmean(math.log(each.high) for each, _ in runs))
    most = {
        name: max(found.get(name, 0.0) for _, found in runs) for name in CAUSES
    }
    # Rounded up, so that a run like these has no cause that exceeds them.
    covered = {
        name: math.ceil(1e4 * amount) / 1e4
        for name, amount in most.items()
        if amount
    }
    return replace(
        profile,
        own_runs=count,
        own_below=round(below, 4),
        own_above=round(above, 4),
        own_causes=tuple(covered),
        own_amounts=tuple(covered.values()),
    )


def _student(degrees: int) -> float:
    """The 90 % quantile of Student's distribution, to 1 % for 3 or more."""
    z, n = _QUANTILE, degrees
    # Abramowitz and Stegun, 26.7.5.
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n * n)
    )
