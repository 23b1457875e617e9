"""Tolerances between two runs that compute the same, by precision or measured."""

from collections.abc import Mapping, Sequence

from .records import UPDATED
from .runs import Names, Parameter, Step
from .sketch import norm_of

# A float64 model that computes some operations in float32, such as norms, a softmax or the loss. Sums
# over tokens in them depend on the layout. Seen: 1.5e-7 in Gemma3, whose norm weights are cast.
MIXED = "float64, in part float32"
_EPS = {
    "float64": 2.0**-52,
    MIXED: 2.0**-23,
    "float32": 2.0**-23,
    "bfloat16": 2.0**-7,
    "float16": 2.0**-10,
}
# Relative differences by which layouts in float64, float32 and 16 bits differ at most in a first step.
# Seen: 7e-15 in float64, 8.3e-6 in float32.
_RELATIVE = {
    "float64": 1e-9,
    MIXED: 2e-6,
    "float32": 1e-3,
    "bfloat16": 0.15,
    "float16": 0.03,
}
# A limit is at least this multiple of what perturbed runs show.
_MARGIN = 8.0
# Rounding of a gradient is also relative to the largest gradient: a key's bias has the gradient zero, and
# what is there is rounding.
_FLOOR = 64.0
_LARGEST_FLOOR = 5e-3
# Only some operations of a mixed model round to float32: a floor as of float32 would hide whole biases.
_MIXED_FLOOR = 1.0


def precision_of(step: Step, parameters: dict[str, Parameter]) -> str:
    """The least precise dtype in which a step computes, by its parameters and its operations."""
    # Autocast computes in 16 bits although weights are stored in 32.
    dtypes = {each.dtype for each in parameters.values()} | {step.autocast}
    stored = dtypes & set(_EPS)
    known = stored | (set(step.operations) & set(_EPS))
    least = max(known, key=lambda dtype: _EPS[dtype], default="float32")
    # A float64 model with float32 in it is less exact than float64 and more
    # than float32.
    if least == "float32" and stored == {"float64"}:
        return MIXED
    return least


def eps_of(dtype: str) -> float:
    return _EPS.get(dtype, _EPS["float32"])


def limit_of_norm(dtype: str) -> float:
    """The relative error of a total norm that is computed from norms in this dtype."""
    return max(64 * eps_of(dtype), 1e-9)


def difference(a: list[float], b: list[float]) -> list[float]:
    return [x - y for x, y in zip(a, b, strict=True)]


def quantity(parameter: Parameter, kind: str) -> list[float] | None:
    """The sketch of a kind; for `UPDATED` that of the update, not of the weight after it."""
    sketch = parameter.sketch(kind)
    if sketch is None or kind != UPDATED:
        return sketch
    before = parameter.sketch("weight")
    return None if before is None else difference(sketch, before)


def limits_by_name(
    norms: Mapping[str, float],
    apart: Sequence[Mapping[str, float]],
    precision: str,
    relative: float,
) -> dict[str, float]:
    """The largest difference of each tensor of a kind that counts as rounding.

    `apart` has the differences between each perturbed run and the reference, from which the limits are
    measured. Without one they are `relative` to a tensor's norm.
    """
    largest = max(norms.values(), default=0.0)
    units = _MIXED_FLOOR if precision == MIXED else _FLOOR
    floor = min(units * eps_of(precision), _LARGEST_FLOOR) * largest
    if apart:
        relative = _measured(norms, apart)
        # Measured runs show the rounding of zero gradients themselves, so a
        # smaller floor is enough.
        floor = eps_of(precision) * largest
    limits = {}
    for name, norm in norms.items():
        # Relative to the tensor, and a floor relative to the largest of all.
        limit = relative * norm + floor
        own = [_MARGIN * run.get(name, 0.0) for run in apart]
        limits[name] = max([limit, *own])
    return limits


def _measured(
    norms: Mapping[str, float], apart: Sequence[Mapping[str, float]]
) -> float:
    """A relative limit for all tensors: the margin times the median of what perturbed runs show.

    A tensor whose own difference happens to be tiny in these few runs gets at least this.
    """
    relative = sorted(
        run.get(name, 0.0) / norm
        for run in apart
        for name, norm in norms.items()
        if norm
    )
    return _MARGIN * relative[len(relative) // 2] if relative else 0.0


def usual_difference(precision: str, *, first: bool) -> float:
    """The relative difference that is usual between layouts, in the first step that is compared or later."""
    # Later steps start from weights that differ by rounding.
    return _RELATIVE[precision] * (1 if first else 10)


def parameter_limits(
    kind: str,
    reference: dict[str, Parameter],
    precision: str,
    perturbed: Sequence[Step],
    names: Names,
    *,
    first: bool,
) -> dict[str, float]:
    """The limits of all parameters, in a kind and a step."""
    sketches = {
        name: quantity(parameter, kind)
        for name, parameter in reference.items()
    }
    norms = {
        name: 0.0 if sketch is None else norm_of(sketch)
        for name, sketch in sketches.items()
    }
    apart = []
    for step in perturbed:
        parameters = step.parameters(names)
        apart.append(
            {
                name: _apart(kind, parameter, parameters.get(name))
                for name, parameter in reference.items()
            }
        )
    # Adam turns the rounding of an element near zero into an update of full size.
    rough = kind == UPDATED and precision == MIXED
    usual = usual_difference("float32" if rough else precision, first=first)
    limits = limits_by_name(norms, apart, precision, usual)
    if kind == UPDATED:
        # An update is the difference of two rounded weights.
        for name, parameter in reference.items():
            weight = norm_of(parameter.sketch("weight") or [0.0])
            limits[name] += 4 * eps_of(parameter.dtype) * weight
    return limits


def _apart(kind: str, a: Parameter, b: Parameter | None) -> float:
    """The norm of the difference of a parameter in two runs."""
    ours = quantity(a, kind)
    theirs = None if b is None else quantity(b, kind)
    if ours is None or theirs is None:
        return 0.0
    return norm_of(difference(ours, theirs))
