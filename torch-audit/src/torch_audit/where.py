"""The first module whose outputs, or their gradients, differ from the reference's.

A parameter's gradient tells which weights are wrong. The sketches of outputs tell where the difference
begins. Outputs are compared in the order in which the reference has computed them: those of the forward,
then their gradients. The gradients may all have one factor, as layouts scale the loss differently.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from .precision import difference, limits_by_name, usual_difference
from .records import MODULE, ROWS_WIDTH, ModuleRecord
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
    elements: dict[tuple[int, str], Counter[int]] = field(default_factory=dict)

    def add(
        self,
        samples: int,
        module: ModuleRecord,
        rank: int,
        numbers: Sums,
        features: int,
    ) -> None:
        """Adds a record; a rank has one for each update of a step, as of two optimizers."""
        key = samples, module.part
        ranks = self.held.setdefault(key, {})
        before = [ranks[rank]] if rank in ranks else []
        ranks[rank] = _total([*before, numbers])
        self.features.add(features)
        self.elements.setdefault(key, Counter())[rank] += module.elements

    @property
    def ranks(self) -> set[int]:
        return {rank for ranks in self.held.values() for rank in ranks}

    @property
    def shape(self) -> tuple[set[int], int]:
        """Features of a row, and elements in all, where copies count once."""
        each = [min(ranks.items())[1] for ranks in self.elements.values()]
        return self.features, sum(each)

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
    """All outputs of a step by their rows, in the order of execution on the lowest rank that has them."""
    with_samples = {rank for rank, _ in step.batches()}
    found: Outputs = {}
    for rank, module, numbers in _modules(step):
        # Stages of a pipeline that are given activations know no tokens.
        if rank in with_samples and module.features:
            key = module.name, module.backward
            output = found.setdefault(key, Output(*key))
            by_rows = numbers[:ROWS_WIDTH]
            samples = _samples_of(step, rank)
            output.add(samples, module, rank, by_rows, module.features)
    return found


def sums_of(step: Step) -> Outputs:
    """All outputs of a step by the sums of their rows, also of later stages and experts."""
    found: Outputs = {}
    for rank, module, numbers in _modules(step):
        key = module.name, module.backward
        output = found.setdefault(key, Output(*key))
        total = numbers[ROWS_WIDTH:]
        samples = _samples_of(step, rank)
        output.add(samples, module, rank, total, module.width)
    return found


def _modules(step: Step) -> Iterator[tuple[int, ModuleRecord, Sums]]:
    for rank, record in sorted(step.ranks.items()):
        numbers = record.sketches.get(MODULE, {})
        for index, module in enumerate(record.modules):
            yield rank, module, numbers[index]


def _samples_of(step: Step, rank: int) -> int:
    """A number of a rank's samples, or of the activations that it is given: equal for copies."""
    rows = [row for batch in step.ranks[rank].batches for row in batch.rows]
    return hash(tuple(sorted(rows)))


@dataclass(frozen=True)
class _Compared:
    """The outputs that two runs and the perturbed ones have alike, in the reference's order."""

    found: Outputs
    expected: Outputs
    perturbed: list[Outputs]


def _comparable(
    ours: Step, theirs: Step, perturbed: Sequence[Step]
) -> _Compared:
    """Outputs by their rows where both runs know them, else by the sum of rows."""
    by_rows = [outputs_of(step) for step in (ours, theirs, *perturbed)]
    by_sum = [sums_of(step) for step in (ours, theirs, *perturbed)]
    chosen: list[Outputs] = [{} for _ in by_rows]
    for key in by_sum[1]:
        if (
            _alike(by_rows, key)
            and by_rows[0][key].ranks == by_sum[0][key].ranks
        ):
            source = by_rows
        elif (
            _alike(by_sum, key)
            and by_sum[0][key].shape == by_sum[1][key].shape
        ):
            source = by_sum
        else:
            continue
        for outputs, kept in zip(source, chosen, strict=True):
            if key in outputs:
                kept[key] = outputs[key]
    found, expected, *others = chosen
    return _Compared(found, expected, others)


def _alike(runs: Sequence[Outputs], key: tuple[str, bool]) -> bool:
    found, expected, *_ = runs
    if key not in found or key not in expected:
        return False
    return found[key].features == expected[key].features


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
    both = _comparable(ours, theirs, perturbed)
    keys = list(both.expected)
    if not keys:
        reason = "no module of both runs has a row for each token"
        return Where(Begins.UNKNOWN, reason=reason)
    relative = usual_difference(precision, first=first)
    search = _Search(both, precision, relative)
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
        self, compared: _Compared, precision: str, relative: float
    ) -> None:
        self.found, self.expected = compared.found, compared.expected
        self.perturbed = compared.perturbed
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
