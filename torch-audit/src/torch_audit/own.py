"""The verdict on two runs in the dtype in which a program trains, beside the one in float64."""

from dataclasses import dataclass
from typing import Any

from .compare import EQUAL, NOT_COMPARABLE, Verdict, compare
from .precision import parameter_limits
from .records import GRADIENT
from .runs import Names, Run
from .sketch import norm_of


@dataclass(frozen=True)
class Repeated:
    """The verdict of runs in their own dtype, on a run that differs in float64."""

    verdict: Verdict
    # Parameters whose difference in float64 is smaller than the tolerance of the own dtype.
    hidden: list[str]

    def figures(self) -> dict[str, Any]:
        """The same as JSON."""
        return {
            "result": self.verdict.result,
            "precision": self.verdict.precision,
            "hidden": self.hidden,
        }

    @property
    def only_in_float64(self) -> bool:
        """True if the difference would have been seen in the own dtype, and is not there."""
        return self.verdict.result == EQUAL and not self.hidden


def judged(
    exact: Verdict, one: Run, run: Run, perturbed: list[Run]
) -> Repeated:
    """The verdict in the own dtype, with the float64 differences that it could not have shown."""
    verdict = compare(one, run, perturbed)
    # Without a float64 difference in a gradient nothing can be hidden.
    if verdict.result == NOT_COMPARABLE or not exact.different:
        return Repeated(verdict, [])
    names = Names()
    for each in (one, *perturbed):
        each.first.joined(names)
    parameters = one.first.parameters(names)
    precision = verdict.precision
    steps = [each.first for each in perturbed]
    limits = parameter_limits(
        GRADIENT, parameters, precision, steps, names, first=True
    )
    hidden = []
    for different in exact.different:
        name = names.of(different.name)
        parameter = parameters.get(name)
        if parameter is None:
            continue
        size = norm_of(parameter.sketch(GRADIENT) or [0.0])
        # Too small for the own dtype to tell from rounding.
        if different.relative * size <= limits[name]:
            hidden.append(different.name)
    # One difference that would have shown is enough to clear the run.
    everything = len(hidden) == len(exact.different)
    return Repeated(verdict, hidden if everything else [])
