"""A recorded run: the files of all ranks, and each parameter put together from its shards."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from .records import (
    CLIPPED,
    GRADIENT,
    SUFFIX,
    WEIGHT,
    WIDTH,
    BatchRecord,
    ParameterRecord,
    RecordError,
    StepRecord,
    read,
)
from .sketch import PRIME

# Gradients may be summands on some mesh dimensions; weights never are.
_GRADIENTS = (GRADIENT, CLIPPED)


@dataclass(frozen=True)
class Held:
    """The part of a parameter that one rank holds."""

    rank: int
    record: ParameterRecord
    # By kind: a sum of squares and a sketch.
    numbers: Mapping[str, list[float]]

    def key(self, kind: str) -> tuple[int, str]:
        """Equal for copies of the same elements."""
        record = self.record
        if kind not in _GRADIENTS:
            return record.cover, ""
        # 0: the rank has the same elements of both.
        return record.gradient_cover or record.cover, record.summand


@dataclass
class Parameter:
    """A parameter of a step, with what each rank holds of it."""

    name: str
    held: list[Held] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.held[0].record.shape)

    @property
    def dtype(self) -> str:
        return self.held[0].record.dtype

    @property
    def stepped(self) -> bool:
        return any(each.record.stepped for each in self.held)

    @property
    def rate(self) -> float:
        return max(each.record.rate for each in self.held)

    @property
    def ranks(self) -> list[int]:
        return [each.rank for each in self.held]

    def copies(self, kind: str) -> list[list[Held]]:
        """The ranks that hold the same elements, for each set of elements that has this kind."""
        groups: dict[tuple[int, str], list[Held]] = {}
        for each in self.held:
            # Cover 0: the rank holds no element.
            if kind in each.numbers and each.key(kind)[0]:
                groups.setdefault(each.key(kind), []).append(each)
        return list(groups.values())

    def whole(self, kind: str) -> list[float] | None:
        """The sum of squares and the sketch of the whole tensor, or None if no rank has it.

        The sum of squares of summands is not that of their sum; the sketch is right for them, too.
        """
        groups = self.copies(kind)
        if not groups:
            return None
        total = [0.0] * WIDTH
        # Copies count once; disjoint shards add up, as sketches are linear.
        for copies in groups:
            for at, number in enumerate(copies[0].numbers[kind]):
                total[at] += number
        return total

    def sketch(self, kind: str) -> list[float] | None:
        total = self.whole(kind)
        return None if total is None else total[1:]

    @cached_property
    def tiled(self) -> bool:
        """True if the shards of all ranks have each element of the whole tensor exactly once."""
        # A set: copies of the same shard have the same cover.
        covers = {each.record.cover for each in self.held if each.record.count}
        # Missing or doubled elements change the sum of hashes.
        return sum(covers) % PRIME == self.held[0].record.whole

    @property
    def summed(self) -> bool:
        """True if gradients of different ranks are summands that are still to be added."""
        return any(each.record.summand for each in self.held)


class Names:
    """The names of parameters, where all names of a tied parameter become one."""

    def __init__(self) -> None:
        self._parent: dict[str, str] = {}

    def join(self, names: Iterable[str]) -> None:
        first, *others = names
        for other in others:
            self._parent[self.of(other)] = self.of(first)

    def of(self, name: str) -> str:
        # Follows joined names to the one that stands for all of them.
        while name in self._parent and self._parent[name] != name:
            name = self._parent[name]
        return name


@dataclass(frozen=True)
class Step:
    """One step of all ranks."""

    ranks: Mapping[int, StepRecord]

    def joined(self, names: Names) -> None:
        for record in self.ranks.values():
            for parameter in record.parameters:
                names.join(parameter.names)

    def join_tied(self, names: Names) -> None:
        """Joins names of the same tensor: matrices that have the same weights and the same gradient.

        Stages of a pipeline hold a tied weight under two names, and nothing in one stage tells so.
        """
        tied: dict[tuple[object, ...], list[str]] = {}
        for name, parameter in self.parameters(names).items():
            weight, gradient = (
                parameter.sketch(WEIGHT),
                parameter.sketch(GRADIENT),
            )
            if (
                len(parameter.shape) > 1
                and weight
                and gradient
                and any(gradient)
            ):
                # 32 numbers that are equal to the bit are no coincidence.
                key = (parameter.shape, *weight, *gradient)
                tied.setdefault(key, []).append(name)
        for same in tied.values():
            names.join(same)

    def parameters(self, names: Names) -> dict[str, Parameter]:
        """All parameters by name, in the order in which the ranks list them."""
        found: dict[str, Parameter] = {}
        # Sorted: the order of parameters is that of the lowest rank.
        for rank, record in sorted(self.ranks.items()):
            for index, listed in enumerate(record.parameters):
                name = names.of(listed.names[0])
                numbers = {
                    kind: rows[index]
                    for kind, rows in record.sketches.items()
                    if index in rows
                }
                parameter = found.setdefault(name, Parameter(name))
                parameter.held.append(Held(rank, listed, numbers))
        return found

    def batches(self) -> Iterator[tuple[int, BatchRecord]]:
        """The batches of samples; calls with activations are left out where others have tokens."""
        all_batches = [
            (r, b) for r, x in self.ranks.items() for b in x.batches
        ]
        # Later stages of a pipeline are given activations.
        tokens = [(rank, batch) for rank, batch in all_batches if batch.whole]
        yield from tokens or all_batches

    @property
    def perturbed(self) -> int:
        return max(record.perturbed for record in self.ranks.values())

    @property
    def operations(self) -> dict[str, int]:
        """Operations of a backward pass on all ranks, by floating dtype."""
        counts: Counter[str] = Counter()
        for record in self.ranks.values():
            counts.update(record.operations)
        return dict(counts)

    @property
    def autocast(self) -> str:
        return max(record.autocast for record in self.ranks.values())


@dataclass(frozen=True)
class Run:
    """All recorded steps of a folder."""

    folder: Path
    steps: Mapping[int, Step]

    @property
    def first(self) -> Step:
        return self.steps[min(self.steps)]

    @property
    def world(self) -> int:
        return len(self.first.ranks)

    @property
    def meshes(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for record in self.first.ranks.values():
            sizes |= record.meshes
        return sizes

    @property
    def backwards(self) -> int:
        """The most backward passes that a rank makes in a step."""
        return max(len(record.losses) for record in self.first.ranks.values())

    @property
    def versions(self) -> dict[str, str]:
        return next(iter(self.first.ranks.values())).versions


def load(folder: Path) -> Run:
    """The steps that all ranks of a run have recorded."""
    paths = sorted(folder.glob(f"rank*{SUFFIX}")) if folder.is_dir() else []
    if not paths:
        raise RecordError(
            f"{folder} holds no recorded run. Either no optimizer made a step there, or the program"
            " was not started by `audit run`, or its processes do not inherit the environment."
        )
    steps: dict[int, dict[int, StepRecord]] = {}
    for path in paths:
        record = read(path)
        if record.refused:
            raise RecordError(
                f"rank {record.rank} of {folder}: {record.refused}"
            )
        steps.setdefault(record.step, {})[record.rank] = record
    worlds = {
        record.world for step in steps.values() for record in step.values()
    }
    if len(worlds) > 1:
        raise RecordError(
            f"{folder} holds files of several runs. Record into a new folder."
        )
    complete = {
        number: Step(ranks)
        for number, ranks in sorted(steps.items())
        # The last step may lack ranks, if the program was stopped.
        if len(ranks) == max(worlds)
    }
    if not complete:
        missing = set(range(max(worlds))) - set(steps[min(steps)])
        raise RecordError(
            f"{folder} has no step of all {max(worlds)} ranks: rank"
            f" {', '.join(map(str, sorted(missing)))} recorded none."
        )
    return Run(folder, complete)
