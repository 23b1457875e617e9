"""The range in which four of five measured steps lie around a predicted one, and what makes it wide.

Each cause of uncertainty that applies to a case widens the range: by how much was fitted on published
runs that no other number of the planner had seen (`intervals.toml`). Causes are independent, so that
their widths add up in squares. Below and above the prediction have widths of their own.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..layout import Shape
from ..layout.numbers import seconds_text
from .hardware import Hardware, Roofline
from .price import Case
from .profile import SoftwareProfile

LEVEL = 0.8  # of measured steps that lie in the range
_MESSAGES = ("tensor", "data", "pipe")  # the parts of a step that wait for messages
_DEVICES = 8.0  # so many devices add nothing to the range
BASE, SOFTWARE, DEVICE, ATTENTION, MATMUL = "base", "software", "device", "attention", "matmul"
NARROW, EXPERTS, SCALE, TENSOR = "narrow", "experts", "scale", "tensor"
MESSAGES, OFFLOAD = "messages", "offload"
CAUSES = (
    *(BASE, SOFTWARE, DEVICE, ATTENTION, MATMUL, NARROW, EXPERTS, SCALE, TENSOR, MESSAGES, OFFLOAD),
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
        return self.causes[0].text if self.causes else ""

    def plain(self) -> dict[str, object]:
        """The range as JSON has it."""
        return {
            "level": LEVEL,
            "low": self.low,
            "high": self.high,
            "causes": [
                {"cause": x.name, "text": x.text, "below": x.below, "above": x.above}
                for x in self.causes
            ],
        }


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
