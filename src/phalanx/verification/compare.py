"""Compares two traces of the same training, value by value."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from .reference import Trace, TracedStep

EXACT = 1e-10  # largest allowed relative error in float64
# in narrower precisions: multiple of the change caused by a unit in the last place
FACTOR = 2.0
# experts with scores this close may be ranked differently by another layout
TIE = 1e-9
# Gradients smaller than this share of the gradient norm are compared on that scale:
# some true gradients are zero (a key's bias without rotation), and their values are
# only rounding.
FLOOR = 1e-6

Key = tuple[int, str, str]  # step, what, name
Bounds = Mapping[Key, float]


@dataclass(frozen=True)
class Difference:
    """One quantity of one step: its error, the element where it is largest, and the
    allowed error."""

    step: int
    # start, routing, output, loss, gradient, norm, loss scale, logged loss, weight, update, validation loss
    what: str
    name: str  # the parameter or the piece; "" for a scalar
    element: tuple[int, ...]
    got: float
    want: float
    error: float
    allowed: float = EXACT
    hint: str = ""
    # two ranks whose copies differ: `got` and `want` are their values
    ranks: tuple[int, ...] = ()

    @property
    def agrees(self) -> bool:
        return self.error <= self.allowed

    @property
    def key(self) -> Key:
        return self.step, self.what, self.name

    def __str__(self) -> str:
        if self.ranks:
            (a, b), x, y = self.ranks, self.want, self.got
            of = f" of {self.name}{list(self.element)}" if self.name else ""
            rule = (
                "copies must be equal bit by bit"
                if self.name
                else "all ranks must agree on it"
            )
            return (
                f"step {self.step}: the {self.what}{of} is {x:.17g} on rank {a} and {y:.17g} on"
                f" rank {b}; {rule}"
            )
        where = f" of {self.name}{list(self.element)}" if self.name else ""
        hint = f" ({self.hint})" if self.hint else ""
        return (
            f"step {self.step}: the {self.what}{where} is {self.got:.9g}, one process has"
            f" {self.want:.9g}{hint}; relative error {self.error:.2e}, allowed {self.allowed:.1e}"
        )


@dataclass(frozen=True)
class _Measure:
    """A comparison's error measure and its bounds."""

    got: Trace
    want: Trace
    rate: Callable[[int], float]
    bounds: Bounds | None
    least: float = FLOOR

    def number(
        self, step: int, what: str, got: float, want: float
    ) -> Iterator[Difference]:
        """Compare a scalar that is equal on all ranks."""
        # 1e-30 only keeps zero from dividing.
        error = abs(got - want) / max(abs(want), 1e-30)
        if not math.isfinite(got) and not math.isfinite(want):
            error = 0.0  # a step that float16 skips
        hint = _hint(got / want) if want else ""
        yield self._bounded(
            Difference(
                step, what, "", (), got, want, _or_infinite(error), hint=hint
            )
        )
        yield from self._mismatches(step, what, "")

    def tensors(
        self,
        step: int,
        what: str,
        got: Mapping[str, Tensor],
        want: Mapping[str, Tensor],
        floor: float = 0.0,
    ) -> Iterator[Difference]:
        # By the reference's names: what the layout has beyond them is not
        # looked for.
        for name, whole in want.items():
            # Relative to the tensor's own size, but at least to the floor.
            scale = max(self._size(whole), floor, 1e-300)
            yield self._bounded(
                self._tensor(step, what, name, got.get(name), whole, scale)
            )
            yield from self._mismatches(
                # Copies of weights are compared, not of their updates.
                step,
                "weight" if what == "update" else what,
                name,
            )

    def _mismatches(
        self, step: int, what: str, name: str
    ) -> Iterator[Difference]:
        """Yield values that differ between ranks that must have equal copies."""
        # differences after the last step are among the last step's mismatches
        last = len(self.got.steps) - 1
        for apart in self.got.steps[min(step, last)].mismatches:
            if (apart.what, apart.name) == (what, name):
                (a, b), element = apart.values, apart.element
                yield Difference(
                    step,
                    what,
                    name,
                    element,
                    b,
                    a,
                    math.inf,
                    0.0,
                    ranks=apart.ranks,
                )

    def routes(
        self, step: int, name: str, got: TracedStep, want: TracedStep
    ) -> Iterator[Difference]:
        """Yield the first token for which a piece chooses other experts.

        In a narrow precision rounding decides the choice, so it is not compared.
        """
        if name not in want.routes or self.bounds is not None:
            return
        whole = want.routes[name]
        # -1 where no rank has the piece, so that it differs from every expert.
        known = got.routes.get(name, torch.full_like(whole, -1))
        for apart in (known != whole).nonzero()[:1]:
            element = tuple(int(i) for i in apart)
            # The gap between the last expert chosen and the next, in the
            # reference.
            gap = float(want.gaps[name][element[:-1]])
            hint = (
                f"scores {gap:.1e} apart: rounding decides; take another seed"
                * (gap < TIE)
            )
            a, b = float(known[element]), float(whole[element])
            yield Difference(
                step, "routing", name, element, a, b, math.inf, 0.0, hint
            )

    def floor(self, step: TracedStep) -> float:
        """Return the scale on which zero gradients are compared."""
        # The norm has no counts of experts' tokens, which are a million times as
        # large as a gradient.
        return self.least * step.norm

    def _size(self, x: Tensor) -> float:
        """Return the size of a tensor: the largest value in float64, the 2-norm in
        narrower precisions.

        The norm keeps single badly rounded values from deciding.
        """
        x = x.double()
        if not bool(x.isfinite().all()):
            return math.inf
        return float(x.abs().max() if self.bounds is None else x.norm())

    def _tensor(
        self,
        step: int,
        what: str,
        name: str,
        got: Tensor | None,
        want: Tensor,
        scale: float,
    ) -> Difference:
        """Return the size of the difference relative to `scale`, and the element where
        it is largest."""
        if got is None or got.shape != want.shape:
            why = "no rank has it"
            return Difference(
                step, what, name, (), math.nan, math.nan, math.inf, hint=why
            )
        apart = (got.double() - want.double()).abs().nan_to_num(nan=math.inf)
        apart[~got.isfinite() & ~want.isfinite()] = (
            0.0  # in a step that float16 skips
        )
        at = int(apart.argmax())
        element = tuple(
            int(i) for i in np.unravel_index(at, tuple(want.shape))
        )
        a, b = float(got.reshape(-1)[at]), float(want.reshape(-1)[at])
        error = _or_infinite(self._size(apart) / scale)
        # The element of the largest difference, for the report; the error is
        # of the whole tensor.
        return Difference(
            step,
            what,
            name,
            element,
            a,
            b,
            error,
            hint=_hint(a / b) if b else "",
        )

    def _bounded(self, x: Difference) -> Difference:
        if x.what in ("start", "loss scale"):
            # not computed in any dtype, so it must be bit-equal
            return replace(x, allowed=0.0)
        return (
            x
            if self.bounds is None
            else replace(x, allowed=self.bounds[x.key])
        )


def compare(
    got: Trace,
    want: Trace,
    rate: Callable[[int], float],
    bounds: Bounds | None = None,
    floor: float = FLOOR,
) -> list[Difference]:
    """Return every quantity with its error, in the order in which training computes
    them.

    Without bounds the allowed relative error is 1e-10. Weights are compared at least on
    the scale of the learning rate, since Adam moves a weight by about that much in a
    step. With bounds, the distances of weights from their start are compared. `floor`
    is the share of the gradient norm on whose scale smaller gradients are compared.
    """
    measure = _Measure(got, want, rate, bounds, floor)
    # A wrong start explains every later difference, so it comes first.
    differences = list(measure.tensors(0, "start", got.start, want.start))
    for number in range(len(want.steps)):
        differences += _step(measure, number)
    if want.validation is not None:
        loss = math.nan if got.validation is None else got.validation
        differences += measure.number(
            len(want.steps), "validation loss", loss, want.validation
        )
    return differences


def bounds_of(
    want: Trace,
    nudged: Iterable[Trace],
    rate: Callable[[int], float],
    compute: torch.dtype,
) -> Bounds:
    """Return the bounds of each quantity: a multiple of its change under perturbations
    of one unit in the last place.

    `nudged` are trainings like `want` with such perturbations. A value close to zero,
    or unchanged by them by chance, may be off by one rounding.
    """
    eps, single = torch.finfo(compute).eps, torch.finfo(torch.float32).eps
    least = eps / 16 + 4 * single
    free = dict.fromkeys(
        (d.key for d in compare(want, want, rate, _Anything())), 0.0
    )
    # The largest change over all perturbations, by quantity.
    for trace in nudged:
        for change in compare(trace, want, rate, _Anything()):
            free[change.key] = max(free[change.key], change.error)
    # Gradients' roundings may cancel in a step's norm by chance, so norms have the
    # largest change of all steps.
    norms = [key for key in free if key[1] == "norm"]
    largest = max((free[key] for key in norms), default=0.0)
    free |= dict.fromkeys(norms, largest)
    bounds = {key: FACTOR * error + least for key, error in free.items()}
    for key, rounding in _roundings_of_updates(want):
        bounds[key] += rounding
    return bounds


def bounds_in_places(
    want: Trace,
    rate: Callable[[int], float],
    compute: torch.dtype,
    places: float,
) -> Bounds:
    """Return bounds of `places` units in the last place of the compute dtype, for every
    quantity."""
    most = places * torch.finfo(compute).eps
    bounds = dict.fromkeys(
        (d.key for d in compare(want, want, rate, _Anything())), most
    )
    for key, rounding in _roundings_of_updates(want):
        bounds[key] += rounding
    return bounds


def _roundings_of_updates(want: Trace) -> Iterator[tuple[Key, float]]:
    """Yield the rounding errors of weights relative to their updates.

    Weights are stored in float32, whose rounding is large beside a small update.
    """
    # eps * |w| / |w - start|: the rounding of w on the scale of its update.
    single = torch.finfo(torch.float32).eps
    for number, step in enumerate(want.steps):
        for name, moved in _moved(step.weights, want.start).items():
            size = float(moved.norm())
            if size > 0:
                rounding = (
                    single * float(step.weights[name].double().norm()) / size
                )
                yield (number, "update", name), rounding


class _Anything(dict[Key, float]):
    """Bounds without limits."""

    def __missing__(self, key: Key) -> float:
        return math.inf


def _step(measure: _Measure, number: int) -> Iterator[Difference]:
    """Compare a step in the order in which a fault would appear.

    The order is forward, loss, backward from the last weight to the first, norm,
    update. The first difference is then the closest to its cause.
    """
    got, want = measure.got.steps[number], measure.want.steps[number]
    for (
        name,
        output,
    ) in want.outputs.items():  # which piece after piece have made
        yield from measure.routes(number, name, got, want)
        yield from measure.tensors(
            number, "output", got.outputs, {name: output}
        )
    yield from measure.number(number, "loss", got.loss, want.loss)
    # Not in a step that float16 skips: its gradients are infinite.
    if math.isfinite(want.norm):
        floor = measure.floor(want)
        yield from measure.tensors(
            number, "gradient", got.gradients, _reversed(want.gradients), floor
        )
    yield from measure.number(number, "norm", got.norm, want.norm)
    yield from measure.number(number, "loss scale", got.scale, want.scale)
    yield from measure.number(number, "logged loss", got.logged, want.logged)
    if measure.bounds is None:
        # A weight may be as small as its update, so errors count on the scale
        # of the rate.
        yield from measure.tensors(
            number,
            "weight",
            got.weights,
            _reversed(want.weights),
            measure.rate(number),
        )
    else:
        start = measure.want.start
        yield from measure.tensors(
            number,
            "update",
            _moved(got.weights, start),
            _moved(_reversed(want.weights), start),
        )


def _reversed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return dict(reversed(list(tensors.items())))


def _moved(
    weights: Mapping[str, Tensor], start: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    return {
        name: x.double() - start[name].double() for name, x in weights.items()
    }


def _or_infinite(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _hint(ratio: float) -> str:
    """Explain a wrong factor: an integer or its inverse suggests an axis summed once
    too often, or not at all."""
    if math.isnan(ratio):
        return "not a number: no rank has it, or it was used before its wait or after its end"
    for k in range(2, 17):
        if abs(ratio - k) < 1e-3:
            return f"{k} times as much: summed over an axis of {k} once too often?"
        if abs(ratio * k - 1) < 1e-3:
            return f"1/{k} of it: not summed over an axis of {k}, or divided by it?"
    return ""
