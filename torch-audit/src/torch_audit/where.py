"""The first module whose outputs, or their gradients, differ from the reference's.

A parameter's gradient tells which weights are wrong. The sketches of outputs tell where the difference
begins. Outputs are compared in the order in which the reference has computed them: those of the forward,
then their gradients. The gradients may all have one factor, as layouts scale the loss differently.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from .precision import difference, limits_by_name, usual_difference
from .records import MODULE, MODULE_WIDTH
from .runs import Step
from .sketch import norm_of

Sums = list[float]


class Begins(StrEnum):
    """The part of a step in which a difference begins."""

    OUTPUT = "output"
    LOSS = "loss"
    BACKWARD = "backward"
    AFTER = "after the backward of all modules"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Where:
    """The place in a step at which a wrong gradient begins."""

    begins: Begins
    module: str = ""  # the first whose output, or gradient of it, differs
    before: str = ""  # the last one before it that is equal
    relative: float = 0.0  # the difference over the size
    factor: float = 1.0  # of the gradients of all outputs
    compared: int = 0  # outputs
    ranks: list[int] = field(default_factory=list)
    reason: str = ""  # if nothing can be said


@dataclass
class Output:
    """A module's outputs in a step, or the gradients of them, put together from all ranks."""

    name: str
    backward: bool
    # By samples and by part of the output: the ranks that have them.
    held: dict[tuple[int, str], dict[int, Sums]] = field(default_factory=dict)
    features: set[int] = field(default_factory=set)

    def add(self, samples: int, part: str, rank: int, numbers: Sums) -> None:
        ranks = self.held.setdefault((samples, part), {})
        earlier = ranks.get(rank, [0.0] * MODULE_WIDTH)
        ranks[rank] = [a + b for a, b in zip(earlier, numbers, strict=True)]

    def of_copies(self) -> Sums:
        """The sum over all samples and shards, where ranks with equal ones have copies."""
        return _total([min(ranks.items())[1] for ranks in self.held.values()])

    def of_summands(self) -> Sums:
        """The sum if ranks with equal samples hold summands; a plain tensor does not say so."""
        each = []
        for (_, part), ranks in self.held.items():
            chosen = list(ranks.values())
            each += chosen[:1] if part else chosen
        return _total(each)

    def deviating(self, limit: float) -> dict[int, float]:
        """Ranks whose copy differs from the one that counts, and by how much."""
        wrong = {}
        for ranks in self.held.values():
            first = min(ranks.items())[1]
            for rank, numbers in ranks.items():
                by = norm_of(difference(numbers, first))
                # `not <=` so that NaN counts as different.
                if not by <= limit:
                    wrong[rank] = by
        return wrong


def _total(each: Sequence[Sums]) -> Sums:
    return [sum(numbers) for numbers in zip(*each, strict=True)]


Outputs = dict[tuple[str, bool], Output]


def outputs_of(step: Step) -> Outputs:
    """All outputs of a step, in the order of execution on the lowest rank that has them."""
    samples = _samples_by_rank(step)
    found: Outputs = {}
    for rank, record in sorted(step.ranks.items()):
        # Stages of a pipeline that are given activations know no tokens.
        if rank not in samples:
            continue
        numbers = record.sketches.get(MODULE, {})
        for index, module in enumerate(record.modules):
            key = module.name, module.backward
            output = found.setdefault(key, Output(*key))
            output.add(samples[rank], module.part, rank, numbers[index])
            output.features.add(module.features)
    return found


def _samples_by_rank(step: Step) -> dict[int, int]:
    """A number of each rank's samples, equal for ranks that have the same ones."""
    rows: dict[int, list[int]] = {}
    for rank, batch in step.batches():
        rows.setdefault(rank, []).extend(batch.rows)
    return {rank: hash(tuple(sorted(own))) for rank, own in rows.items()}


def samples_in_all(step: Step) -> Counter[int]:
    """The samples of a step, where ranks that have the same ones count once."""
    rows: dict[int, list[int]] = {}
    for rank, batch in step.batches():
        rows.setdefault(rank, []).extend(batch.rows)
    distinct = {tuple(sorted(own)) for own in rows.values()}
    return Counter(row for own in distinct for row in own)


def same_samples(ours: Step, theirs: Step) -> bool:
    """True if two steps see the same samples equally often, also in parts of sequences."""
    a, b = samples_in_all(ours), samples_in_all(theirs)
    # Hashes of rows are sums over positions, modulo 2^64, so parts add up to
    # the whole.
    apart = sum(x * n for x, n in a.items()) - sum(x * n for x, n in b.items())
    return a == b or apart % (1 << 64) == 0


def where(
    ours: Step,
    theirs: Step,
    perturbed: Sequence[Step],
    precision: str,
    *,
    first: bool,
) -> Where:
    """The place at which a difference of gradients begins; `theirs` is the reference's step."""
    if not same_samples(ours, theirs):
        reason = "a run gives some samples to its modules more often"
        return Where(Begins.UNKNOWN, reason=reason)
    found, expected = outputs_of(ours), outputs_of(theirs)
    keys = [
        key
        for key, output in expected.items()
        if key in found and found[key].features == output.features
    ]
    if not keys:
        reason = "no module of both runs has a row for each token"
        return Where(Begins.UNKNOWN, reason=reason)
    relative = usual_difference(precision, first=first)
    search = _Search(found, expected, perturbed, precision, relative)
    forward = [key for key in keys if not key[1]]
    backward = [key for key in keys if key[1]]
    return (
        search.first(forward, Begins.OUTPUT)
        or search.first(backward, Begins.BACKWARD)
        or Where(Begins.AFTER, factor=search.factor, compared=len(keys))
    )


class _Search:
    """The search for the first output that differs."""

    def __init__(
        self,
        found: Outputs,
        expected: Outputs,
        perturbed: Sequence[Step],
        precision: str,
        relative: float,
    ) -> None:
        self.found, self.expected = found, expected
        self.perturbed = [outputs_of(step) for step in perturbed]
        self.precision = precision
        self.relative = relative  # usual for the precision
        self.factor = 1.0

    def first(
        self, keys: Sequence[tuple[str, bool]], begins: Begins
    ) -> Where | None:
        """The first of these outputs that differs, or None."""
        whole = {key: _whole(self.expected[key]) for key in keys}
        limits = self._limits(whole)
        before = ""
        for key in keys:
            limit = limits[key[0]]
            # The gradient of the last output has the factor of all of them.
            if begins == Begins.BACKWARD and not before:
                self.factor = _fitted(self.found[key], whole[key])
            target = [self.factor * x for x in whole[key]]
            largest = max(1.0, abs(self.factor)) * limit
            apart, ranks = _apart(self.found[key], target, largest)
            if not apart <= largest:
                size = norm_of(target)
                at_loss = begins == Begins.BACKWARD and not before
                return Where(
                    Begins.LOSS if at_loss else begins,
                    key[0],
                    before,
                    apart / size if size else float("inf"),
                    self.factor,
                    len(keys),
                    ranks,
                )
            before = key[0]
        return None

    def _limits(
        self, whole: Mapping[tuple[str, bool], Sums]
    ) -> dict[str, float]:
        norms = {name: norm_of(sums) for (name, _), sums in whole.items()}
        apart = []
        for run in self.perturbed:
            own = {}
            for key, sums in whole.items():
                if key in run:
                    moved = difference(_whole(run[key]), sums)
                    own[key[0]] = norm_of(moved)
            apart.append(own)
        return limits_by_name(norms, apart, self.precision, self.relative)


def _whole(output: Output) -> Sums:
    """The sum over all ranks of a run that is taken to be right."""
    copies = output.of_copies()
    # Copies that differ by more than rounding are summands.
    rounding = 1e-2 * norm_of(copies)
    return output.of_summands() if output.deviating(rounding) else copies


def _apart(
    output: Output, target: Sums, limit: float
) -> tuple[float, list[int]]:
    """The difference of an output from what is expected, and the ranks whose copies deviate."""
    deviating = output.deviating(limit)
    by_copies = norm_of(difference(output.of_copies(), target))
    if not deviating:
        return by_copies, []
    by_sum = norm_of(difference(output.of_summands(), target))
    if by_sum <= limit:
        return by_sum, []
    # The first copy may be right, and another one wrong.
    return max(by_copies, *deviating.values()), sorted(deviating)


def _fitted(output: Output, expected: Sums) -> float:
    """The factor by which an output is closest to the expected one."""
    square = sum(x * x for x in expected)
    if not square:
        return 1.0
    found = _whole(output)
    return sum(x * y for x, y in zip(found, expected, strict=True)) / square
