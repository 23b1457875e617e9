"""What a plan counts for the operations of a run's step: the run's own layout, costed, priced and
simulated as `phalanx plan --explain` does it."""

from __future__ import annotations

from ..plan.hardware import Hardware
from ..plan.profile import SoftwareProfile
from ..plan.step import CostFunction, Pricer, Request
from .compared import Compared, compare
from .step import Step


def predicted(
    step: Step, hardware: Hardware, profile: SoftwareProfile, piece_costs: CostFunction
) -> Compared:
    """A run's step beside what a plan counts for it: the same operations, simulated."""
    layout, shape = step.layout, step.shape
    request = Request(
        shape, hardware, profile, piece_costs, step.sequence, shape.batch, layout.precision,
        model=step.own,
    )  # fmt: skip
    pricer = Pricer(request)
    costs, timeline = pricer.costs(layout), step.recorded.timeline
    return Compared(
        layout=str(layout) or "one rank",
        hardware=hardware.name,
        profile=profile.name,
        step=step.number,
        rows=compare(timeline, costs.pieces),
        predicted=pricer.choose(layout).step,
        measured=timeline.makespan,
        costs=costs,
        usual=step.usual,
        launched=not hardware.cores,
    )
