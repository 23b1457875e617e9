"""Compares a recorded run with a reference, and names the first quantity of the first step that differs."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .causes import likely_causes
from .checks import clip_norms, parameters_apart
from .precision import (
    MIXED,
    difference,
    eps_of,
    limit_of_norm,
    parameter_limits,
    precision_of,
    quantity,
)
from .records import CLIPPED, GRADIENT, UPDATED, WEIGHT
from .runs import Names, Parameter, Run, Step
from .sketch import norm_of
from .where import Where, same_samples, where

EQUAL, REFUTED, NOT_COMPARABLE = "equal", "refuted", "not comparable"
EXIT = {EQUAL: 0, REFUTED: 1, NOT_COMPARABLE: 2}
_SHOWN = {
    WEIGHT: "weights before the step",
    GRADIENT: "gradient",
    CLIPPED: "clipped gradient",
    UPDATED: "update",
}


@dataclass(frozen=True)
class Different:
    """A parameter that differs from the reference."""

    name: str
    relative: float  # the norm of the difference over that of the reference
    limit: float  # the relative difference that would count as rounding
    # C where the run has c times the reference, but for rounding.
    factor: float | None
    ranks: list[int]


@dataclass
class Verdict:
    """The result of a comparison."""

    result: str
    step: int = 0
    quantity: str = ""  # the first that differs
    text: str = ""
    different: list[Different] = field(default_factory=list)
    parameters: int = 0  # compared in each step
    steps: int = 0
    worst: float = 0.0  # the largest relative difference of a gradient that counts as rounding
    worst_name: str = ""
    precision: str = ""
    measured: int = 0  # perturbed runs behind the limits
    equal_before: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)
    where: Where | None = None  # a wrong gradient begins


@dataclass(frozen=True)
class _Pair:
    """One step of both runs."""

    number: int
    ours: dict[str, Parameter]
    theirs: dict[str, Parameter]
    our_step: Step
    their_step: Step
    perturbed: list[Step]  # of the reference
    first: bool  # of the steps that are compared


def compare(
    reference: Run, run: Run, perturbed: list[Run] | None = None
) -> Verdict:
    """The verdict on a run, in the order in which a step computes."""
    perturbed = perturbed or []
    names = Names()
    # Joined over all runs: a tie that one run knows holds in the others, too.
    for recorded in (reference, run, *perturbed):
        recorded.first.joined(names)
    # Only steps that all runs have recorded.
    numbers = sorted(set(reference.steps) & set(run.steps))
    for recorded in perturbed:
        numbers = [number for number in numbers if number in recorded.steps]
    verdict = Verdict(EQUAL, steps=len(numbers), measured=len(perturbed))
    expected = set(reference.first.parameters(names))
    if any(set(x.first.parameters(names)) != expected for x in perturbed):
        verdict.result, verdict.quantity = NOT_COMPARABLE, "perturbed runs"
        verdict.text = "a perturbed run is not one of the reference: its parameters have other names"
        return verdict
    if not numbers:
        verdict.result, verdict.quantity = NOT_COMPARABLE, "steps"
        verdict.text = _no_common_step(reference, run, perturbed)
        return verdict
    before = numbers[0]
    moved: set[str] = set()
    for number in numbers:
        left_out = _left_out(reference, run, range(before, number))
        if left_out:
            verdict.result, verdict.quantity = NOT_COMPARABLE, "steps"
            verdict.step, verdict.text = number, left_out
            break
        before = number
        pair = _Pair(
            number,
            run.steps[number].parameters(names),
            reference.steps[number].parameters(names),
            run.steps[number],
            reference.steps[number],
            [each.steps[number] for each in perturbed],
            first=number == numbers[0],
        )
        verdict.parameters = len(pair.theirs)
        verdict.precision = _precision_of(pair)
        comparison = _Comparison(pair, verdict, names, moved)
        comparison.conduct()
        moved |= comparison.moved_by_rounding()
        if verdict.result != EQUAL:
            verdict.step = number
            verdict.causes = likely_causes(reference, run, verdict.different)
            if verdict.quantity == _SHOWN[GRADIENT]:
                verdict.where = where(
                    pair.our_step,
                    pair.their_step,
                    pair.perturbed,
                    verdict.precision,
                    first=pair.first,
                )
            # Later steps differ because of this one.
            break
    return verdict


def _no_common_step(reference: Run, run: Run, perturbed: Sequence[Run]) -> str:
    runs = {"the reference": reference, "the run": run}
    for seed, recorded in enumerate(perturbed, start=1):
        runs[f"perturbed run {seed}"] = recorded
    ranges = [
        f"{name} has {_range(recorded.steps)}"
        for name, recorded in runs.items()
    ]
    return f"no step is recorded in all runs: {', '.join(ranges)}"


def _left_out(reference: Run, run: Run, between: range) -> str:
    """A sentence on a step that one run has skipped, and the other has not; "" if there is none."""
    for number in between:
        if (number in reference.steps) != (number in run.steps):
            name = "reference" if number in reference.steps else "run"
            return f"only the {name} has recorded step {number}"
    return ""


def _range(numbers: Iterable[int]) -> str:
    first, *others = sorted(numbers)
    return f"steps {first} to {others[-1]}" if others else f"step {first}"


def _precision_of(pair: _Pair) -> str:
    """The precision of a step of both runs: that of the less precise one."""
    ours = precision_of(pair.our_step, pair.ours)
    theirs = precision_of(pair.their_step, pair.theirs)
    # A float32 run cannot be compared more exactly than float32 computes.
    return max(theirs, ours, key=eps_of)


class _Comparison:
    """The comparison of one step; it stops at the first quantity that differs."""

    def __init__(
        self, pair: _Pair, verdict: Verdict, names: Names, moved: set[str]
    ) -> None:
        self.pair, self.verdict, self.names = pair, verdict, names
        # Parameters that rounding alone has moved in earlier steps.
        self.moved = moved
        self.passed: list[str] = []

    def conduct(self) -> None:
        self._operations()
        # First whether the runs are comparable, then quantities in the order
        # in which a step makes them.
        stages = [self._names, self._samples, self._places, self._weights]
        stages += [
            self._loss,
            self._gradient,
            self._norm,
            self._clipped,
            self._update,
        ]
        for stage in stages:
            stage()
            if self.verdict.result != EQUAL:
                self.verdict.equal_before = self.passed
                return

    def _stop(self, result: str, quantity: str, text: str) -> None:
        self.verdict.result = result
        self.verdict.quantity, self.verdict.text = quantity, text

    # ---- whether there is something to compare

    def _operations(self) -> None:
        """A note if the run computes in a dtype in which the reference does not."""
        ours = self.pair.our_step.operations
        theirs = self.pair.their_step.operations
        if not theirs:
            return
        for dtype in sorted(set(ours) - set(theirs)):
            total = sum(ours.values())
            self._note(
                f"{ours[dtype]} of {total} operations of the run's backward are in {dtype}, and none"
                " of the reference's"
            )

    def _names(self) -> None:
        ours, theirs = set(self.pair.ours), set(self.pair.theirs)
        if ours == theirs:
            return
        if not ours & theirs:
            text = f"no parameter has the same name: {_some(ours)} against {_some(theirs)}"
            self._stop(NOT_COMPARABLE, "names", text)
            return
        parts = []
        if theirs - ours:
            parts.append(f"only the reference has {_some(theirs - ours)}")
        if ours - theirs:
            parts.append(f"only the run has {_some(ours - theirs)}")
        self._stop(NOT_COMPARABLE, "names", "; ".join(parts))

    def _samples(self) -> None:
        ours = Counter(
            x for _, batch in self.pair.our_step.batches() for x in batch.rows
        )
        theirs = Counter(
            x
            for _, batch in self.pair.their_step.batches()
            for x in batch.rows
        )
        if not ours or not theirs:
            note = "samples are not compared: a run has recorded none"
            self._note(note)
            return
        if set(ours) == set(theirs):
            # Some layouts give each sample to several ranks, but all equally
            # often.
            ratios = {ours[row] / theirs[row] for row in ours}
            if len(ratios) == 1:
                self.passed.append(f"{sum(theirs.values())} samples")
                return
            # A pipeline computes a batch once more to learn its shapes, so gradients decide.
            self._note(
                "some samples are given to the model more often than the others"
            )
            self.passed.append(f"{len(theirs)} samples")
            return
        if same_samples(self.pair.our_step, self.pair.their_step):
            self.passed.append(
                f"{sum(theirs.values())} samples, in parts of sequences"
            )
            return
        common = len(set(ours) & set(theirs))
        text = (
            f"the runs do not see the same samples: {common} of the reference's {len(theirs)} are"
            f" among the {len(ours)} of the run"
        )
        self._stop(NOT_COMPARABLE, "samples", text)

    def _places(self) -> None:
        apart = parameters_apart(self.pair.ours)
        # Later steps differ by rounding anyway, so only the start decides.
        if apart and self.pair.first:
            text = (
                f"{len(apart)} parameters are different tensors on different ranks ({_some(set(apart))}):"
                " shards that nobody declares, or copies that do not start alike"
            )
            self._stop(NOT_COMPARABLE, "weights", text)
            return
        shapes = [
            f"{name} {list(ours.shape)} against {list(self.pair.theirs[name].shape)}"
            for name, ours in self.pair.ours.items()
            if ours.shape != self.pair.theirs[name].shape
        ]
        if shapes:
            self._stop(NOT_COMPARABLE, "shapes", "; ".join(shapes[:3]))
            return
        holes = [
            name for name, each in self.pair.ours.items() if not each.tiled
        ]
        if holes:
            text = f"the shards of {_some(set(holes))} do not make up the whole parameter"
            self._stop(REFUTED, "shards", text)

    # ---- quantities

    def _weights(self) -> None:
        different = self._differing(WEIGHT)
        if not different:
            self.passed.append(_SHOWN[WEIGHT])
            return
        # After the first step equal starts are known, so other weights are a
        # fault.
        if not self.pair.first:
            self._refute(WEIGHT, different)
            return
        self.verdict.different = different
        values = [
            each for each in self.pair.theirs.values() if len(each.shape) > 1
        ]
        matrices = [
            x for x in different if len(self.pair.theirs[x.name].shape) > 1
        ]
        # Most matrices differ: another seed or checkpoint. A few: something
        # has changed them.
        if len(matrices) * 2 > len(values):
            text = "the runs do not start from the same weights"
            self._stop(NOT_COMPARABLE, "initial weights", text)
        else:
            self._refute(WEIGHT, different)

    def _loss(self) -> None:
        """Losses differ in how libraries normalise them, so they are reported, and refute nothing."""
        theirs = [
            x
            for rank in self.pair.their_step.ranks.values()
            for x in rank.losses
        ]
        by_rank = [
            r.losses for r in self.pair.our_step.ranks.values() if r.losses
        ]
        if not theirs or not by_rank:
            return
        # Libraries sum or average over passes and ranks: all combinations are
        # tried.
        expected = [sum(theirs), sum(theirs) / len(theirs)]
        sums = [sum(losses) for losses in by_rank]
        # Backward passes of a rank in the step.
        passes = len(by_rank[0])
        found = [
            sum(sums),
            sum(sums) / len(sums),
            sum(sums) / len(sums) / passes,
        ]
        # 100 times: the loss adds the rounding of a whole forward.
        limit = 100 * limit_of_norm(self.verdict.precision)
        if any(abs(a - b) <= limit * abs(a) for a in expected for b in found):
            self.passed.append("loss")
        else:
            self._note(
                f"step {self.pair.number}: losses are {expected[1]:.6g} a backward in the reference and"
                f" {found[2]:.6g} in the run; libraries scale them differently"
            )

    def _gradient(self) -> None:
        self._quantity(GRADIENT)

    def _norm(self) -> None:
        ours, theirs = (
            clip_norms(self.pair.our_step),
            clip_norms(self.pair.their_step),
        )
        if len(ours) != len(theirs):
            self._note(
                f"the reference clips {len(theirs)} times in a step, the run {len(ours)} times"
            )
            return
        limit = 10 * limit_of_norm(self.verdict.precision)
        # Beyond the first step, and below float64, the gradients themselves
        # are rounded.
        if not self.pair.first or self.verdict.precision != "float64":
            limit = max(limit, self._loosest(GRADIENT))
        for a, b in zip(theirs, ours, strict=True):
            expected = next(iter(a.values()))
            wrong = {
                rank: norm
                for rank, norm in b.items()
                if abs(norm - expected) > limit * expected
            }
            if wrong:
                norm = next(iter(wrong.values()))
                text = (
                    f"the clip used the norm {norm:.6g} on {_ranks(list(wrong))}; the reference has"
                    f" {expected:.6g} (run = {norm / expected:.4f} x reference)"
                )
                self._stop(REFUTED, "norm", text)
                return
        if theirs:
            self.passed.append("norm")

    def _loosest(self, kind: str) -> float:
        limits = self._limits(kind)
        sizes = {
            name: norm_of(quantity(self.pair.theirs[name], kind) or [0.0])
            for name in limits
        }
        largest = max(sizes.values(), default=0.0)
        # The loosest limit, relative to the largest parameter.
        return max(limits.values(), default=0.0) / largest if largest else 0.0

    def _clipped(self) -> None:
        # Only if all parameters that the reference clips are clipped here,
        # too.
        if all(x.sketch(CLIPPED) is not None for x in self._trained(CLIPPED)):
            self._quantity(CLIPPED)

    def vanishing(self) -> set[str]:
        """Parameters whose gradient is nothing but rounding, such as the bias of keys.

        Adam turns the rounding of a vanishing gradient into an update of full size.
        """
        noise = self._limits(GRADIENT)
        return {
            name
            for name, each in self.pair.theirs.items()
            # 4 times the limit: below it the gradient is noise.
            if norm_of(each.sketch(GRADIENT) or [0.0]) < 4 * noise[name]
        }

    def moved_by_rounding(self) -> set[str]:
        """Parameters with a vanishing gradient that is not exactly zero."""
        return {
            name
            for name in self.vanishing()
            if any(self.pair.theirs[name].sketch(GRADIENT) or [])
        }

    def _trained(self, kind: str) -> list[Parameter]:
        return [
            self.pair.ours[name]
            for name, each in self.pair.theirs.items()
            if each.sketch(kind) is not None
        ]

    def _update(self) -> None:
        # In 16 bits updates are mostly rounding; perturbed runs then give the
        # limits.
        exact = self.verdict.precision in ("float64", MIXED, "float32")
        if exact or self.pair.perturbed:
            self._quantity(UPDATED)

    def _quantity(self, kind: str) -> None:
        different = self._differing(kind)
        if different:
            self._refute(kind, different)
        elif any(
            x.sketch(kind) is not None for x in self.pair.theirs.values()
        ):
            self.passed.append(_SHOWN[kind])

    def _refute(self, kind: str, different: list[Different]) -> None:
        self.verdict.different = different
        shown = _SHOWN[kind]
        text = f"{len(different)} of {len(self.pair.theirs)} parameters differ in the {shown}"
        self._stop(REFUTED, shown, text)

    def _limits(self, kind: str) -> dict[str, float]:
        return parameter_limits(
            kind,
            self.pair.theirs,
            self.verdict.precision,
            self.pair.perturbed,
            self.names,
            first=self.pair.first,
        )

    def _differing(self, kind: str) -> list[Different]:
        limits = self._limits(kind)
        skipped: set[str] = set()
        if kind == UPDATED:
            skipped = self.vanishing()
        elif kind == WEIGHT:
            skipped = self.moved
        different = []
        for name, theirs in self.pair.theirs.items():
            ours = self.pair.ours[name]
            expected, found = quantity(theirs, kind), quantity(ours, kind)
            if expected is None and found is None:
                # Neither run has this quantity.
                continue
            if expected is None or found is None:
                if (
                    kind == GRADIENT
                    and norm_of(expected or found or [0.0]) == 0
                ):
                    continue  # no gradient is a gradient of zeros
                factor = 0.0 if found is None else None
                different.append(Different(name, 1.0, 0.0, factor, ours.ranks))
                continue
            if name in skipped:
                continue
            found_difference = _compared(ours, theirs, kind, limits[name])
            if found_difference is not None:
                different.append(found_difference)
            # The worst of those within the limits, for the report; tiny ones
            # say nothing.
            elif kind == GRADIENT and norm_of(expected) > 4 * limits[name]:
                relative = norm_of(difference(found, expected)) / norm_of(
                    expected
                )
                if relative > self.verdict.worst:
                    self.verdict.worst, self.verdict.worst_name = (
                        relative,
                        name,
                    )
        return different

    def _note(self, text: str) -> None:
        if text not in self.verdict.notes:
            self.verdict.notes.append(text)


def _compared(
    ours: Parameter, theirs: Parameter, kind: str, limit: float
) -> Different | None:
    """The difference of a parameter, or None if it is within the limit on all ranks."""
    expected, found = quantity(theirs, kind), quantity(ours, kind)
    assert expected is not None
    assert found is not None
    apart = difference(found, expected)
    # Every rank's copy is compared, not only the first.
    worst, largest = found, norm_of(apart)
    wrong: set[int] = set()
    for copies in ours.copies(kind):
        base = _numbers(copies[0].numbers, kind)
        for each in copies:
            # The whole with this rank's copy in the place of the first one.
            moved = difference(_numbers(each.numbers, kind), base)
            by = norm_of([x + y for x, y in zip(apart, moved, strict=True)])
            # `not <=` so that NaN counts as wrong.
            if not by <= limit:
                wrong.add(each.rank)
            if not by <= largest:
                largest = by
                worst = [x + y for x, y in zip(found, moved, strict=True)]
    if largest <= limit:
        return None
    size = norm_of(expected)
    relative = largest / size if size else float("inf")
    factor = _factor(expected, worst, limit)
    within = limit / size if size else 0.0
    return Different(ours.name, relative, within, factor, sorted(wrong))


def _numbers(
    numbers: "dict[str, list[float]] | object", kind: str
) -> list[float]:
    assert isinstance(numbers, dict)
    sketch: list[float] = numbers[kind][1:]
    if kind != UPDATED:
        return sketch
    return difference(sketch, numbers[WEIGHT][1:])


def _factor(
    expected: list[float], found: list[float], limit: float
) -> float | None:
    """c where the run has c times the reference and the rest is rounding; None if there is no such c."""
    square = sum(x * x for x in expected)
    if not square:
        return None
    # Least squares: c = <reference, run> / <reference, reference>.
    c = sum(x * y for x, y in zip(expected, found, strict=True)) / square
    rest = norm_of([y - c * x for x, y in zip(expected, found, strict=True)])
    # What c does not explain must be rounding.
    return c if rest <= max(1.0, abs(c)) * limit else None


def _some(names: set[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(listed[:3]) + more


def _ranks(ranks: list[int]) -> str:
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {', '.join(map(str, ranks))}"
