"""The ZeRO stage of a layout compared with lower ones: what they need, and why they
were not chosen."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..layout import Layout
from ..layout.numbers import bytes_text
from ..layout.sharding import less_text, sends_less
from ..planner.step import Request
from .request import held, range_text, verdict


@dataclass(frozen=True)
class LowerStage:
    """A layout with a lower ZeRO stage, and the bytes of its fullest rank: least,
    expected, most."""

    layout: Layout
    least: float
    expected: float
    most: float

    def fits(self, memory: float) -> bool:
        """True if it fits with any allocator fragmentation."""
        return verdict(self.least, self.most, memory) == "fits"

    @property
    def bytes_text(self) -> str:
        # Without fragmentation, as on a CPU, the range is one number.
        exact = self.least == self.most
        return (
            bytes_text(self.most)
            if exact
            else range_text(self.least, self.most)
        )


def lower_stages(request: Request, layout: Layout) -> tuple[LowerStage, ...]:
    """Return the lower ZeRO stages that send less than the layout, the one that sends
    least first."""
    found = []
    for other in sends_less(layout):
        choice = held(request, other)
        least, most = choice.range(request.profile)
        found.append(LowerStage(other, least, choice.bytes, most))
    return tuple(found)


def less_sent_text(
    layout: Layout, stages: Sequence[LowerStage], memory: float
) -> str:
    """Describe the lower stage that sends least among those that fit in a device's
    memory, or each of them if memory is unlimited; "" if none fits."""
    fitting = [stage for stage in stages if stage.fits(memory)]
    # Without a limit there is no best one to name: the reader chooses by the
    # bytes.
    if memory < math.inf:
        fitting = fitting[:1]
    return " ".join(
        f"{stage.layout} {less_text(layout, stage.layout)}, and needs {stage.bytes_text}"
        f"{', which fits' if memory < math.inf else ''}."
        for stage in fitting
    )


def sharding_text(request: Request, layout: Layout) -> str:
    """Explain a layout's ZeRO stage compared with the stages that send less; "" without
    ZeRO."""
    if not layout.zero:
        return ""
    reasons = []
    for stage in lower_stages(request, layout):
        needs = f"zero{stage.layout.zero} needs {bytes_text(stage.expected)}"
        # Expected bytes against what a search may take, as the search itself
        # decides.
        fits = stage.expected <= request.room
        reasons.append(f"{needs} and is no faster" if fits else needs)
    if not reasons:
        return f"zero{layout.zero}: weights and gradients are sent once a step"
    room = bytes_text(request.room)
    return f"zero{layout.zero}, as {room} may be used: {', '.join(reasons)}"
