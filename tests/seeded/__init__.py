"""Seeded faults: bugs planted in the engine on purpose. `make faults` lists the
findings of `verify`."""

from . import (
    ahead,
    delta,
    eight_bits,
    engine,
    late,
    matrices,
    narrow,
    order,
    routed,
    soap,
    steps,
    wide,
)
from .catch import (
    Catch,
    catch,
    refusal_of,
    setting_of,
    trained,
    truth,
    verdict_of,
)
from .fault import FAULTS, HALVES, Fault, swapped

# importing a module registers its faults
LISTED = (
    engine,
    order,
    narrow,
    routed,
    matrices,
    soap,
    ahead,
    delta,
    eight_bits,
    steps,
    late,
    wide,
)

__all__ = [
    "FAULTS",
    "HALVES",
    "LISTED",
    "Catch",
    "Fault",
    "catch",
    "refusal_of",
    "setting_of",
    "swapped",
    "trained",
    "truth",
    "verdict_of",
]
