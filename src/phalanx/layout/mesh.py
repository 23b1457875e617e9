"""The grid of devices: named axes, the rank at each coordinate, and the groups.

A mesh is written outermost axis first: in `"dp2 pp2 tp2"` neighbouring ranks differ in
`tp`. Two axes have an inner grid of their own: `dp2x4` is 2 replicas of 4 shards,
`cp4:2x2` a ring of 2 with Ulysses of 2 inside. Their parts are named `dp.replicate`,
`dp.shard`, `cp.ring` and `cp.ulysses`.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product

AXES = ("dp", "pp", "cp", "tp", "ep")
_PARTS = {"dp": ("dp.replicate", "dp.shard"), "cp": ("cp.ring", "cp.ulysses")}
RANKS = 1 << 18  # the most in a mesh
_SIZE = "([0-9]{1,7})"
_WORD = re.compile(
    f"(dp|pp|cp|tp|ep){_SIZE}(?:x{_SIZE})?(?::(ring|ulysses|{_SIZE}x{_SIZE}))?"
)


class LayoutError(ValueError):
    """Raised for an impossible layout, with the place, the numbers and a way out."""


@dataclass(frozen=True)
class Axis:
    """One direction of the grid; `parts` are its inner sizes, outermost first."""

    name: str
    parts: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.name not in AXES:
            raise LayoutError(
                f"unknown axis {self.name!r}. Axes are {', '.join(AXES)}."
            )
        if len(self.parts) != len(self.part_names) or min(self.parts) < 1:
            raise LayoutError(
                f"axis {self.name} has sizes {self.parts}; each must be 1 or more."
            )

    @property
    def size(self) -> int:
        return math.prod(self.parts)

    @property
    def part_names(self) -> tuple[str, ...]:
        return _PARTS.get(self.name) or (self.name,)

    @classmethod
    def parse(cls, word: str) -> "Axis":
        match = _WORD.fullmatch(word)
        if not match:
            raise LayoutError(
                f"{word[:60]!r} is not an axis. Write dp4, dp2x4, pp2, tp8 or cp4:ulysses, with sizes"
                " of up to seven digits."
            )
        # "dp2x4" has size and inner; "cp4:2x2" has a part after the colon.
        name, size, inner = match[1], int(match[2]), match[3]
        if (inner and name != "dp") or (match[4] and name != "cp"):
            raise LayoutError(
                f"{word!r}: only dp splits as dp2x4, and only cp as cp4:2x2."
            )
        if name == "dp":
            # "dp8" is one replica of 8 shards; ZeRO decides whether they are
            # sharded.
            return cls("dp", (size, int(inner)) if inner else (1, size))
        if name == "cp":
            # A ring is the default of cp.
            known = {"ring": (size, 1), "ulysses": (1, size), None: (size, 1)}
            ring, ulysses = known.get(match[4]) or (
                int(match[5]),
                int(match[6]),
            )
            if ring * ulysses != size:
                raise LayoutError(
                    f"{word!r}: {ring} x {ulysses} is {ring * ulysses}, not {size}."
                )
            return cls("cp", (ring, ulysses))
        return cls(name, (size,))

    def __str__(self) -> str:
        first, last = self.parts[0], self.parts[-1]
        if self.name == "dp" and first > 1:
            return f"dp{first}x{last}"
        if self.name == "cp" and last > 1:
            return (
                f"cp{self.size}:ulysses"
                if first == 1
                else f"cp{self.size}:{first}x{last}"
            )
        return f"{self.name}{self.size}"


@dataclass(frozen=True)
class Mesh:
    """Axes, outermost first; axes of size 1 are dropped without effect."""

    axes: tuple[Axis, ...] = ()

    def __post_init__(self) -> None:
        names = [a.name for a in self.axes]
        for name in names:
            if names.count(name) > 1:
                raise LayoutError(
                    f"axis {name} occurs {names.count(name)} times; write it once."
                )
        # An axis of size 1 groups no ranks, so "dp1 tp2" equals "tp2".
        object.__setattr__(
            self, "axes", tuple(a for a in self.axes if a.size > 1)
        )
        if self.size > RANKS:
            what = f"the mesh {self} has {self.size:,} ranks"
            raise LayoutError(f"{what}. Write a mesh of at most {RANKS:,}.")

    @classmethod
    def parse(cls, text: str) -> "Mesh":
        return cls(tuple(Axis.parse(word) for word in text.split()))

    def __str__(self) -> str:
        return " ".join(map(str, self.axes))

    @property
    def size(self) -> int:
        return math.prod(a.size for a in self.axes)

    def of(self, name: str) -> int:
        """The size of an axis (`"dp"`) or a part (`"dp.shard"`), 1 if it is absent."""
        for axis in self.axes:
            if axis.name == name:
                return axis.size
            if name in axis.part_names:
                return axis.parts[axis.part_names.index(name)]
        if name.split(".")[0] not in AXES:
            raise LayoutError(
                f"unknown axis {name!r}. Axes are {', '.join(AXES)}."
            )
        return 1

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinates of a rank along every axis and every part of one."""
        if not 0 <= rank < self.size:
            raise LayoutError(
                f"rank {rank} is outside a mesh of {self.size} ranks ({self})."
            )
        at: dict[str, int] = {}
        # From the innermost axis, whose coordinate changes fastest with the
        # rank.
        for axis in reversed(self.axes):
            rank, at[axis.name] = divmod(rank, axis.size)
            # The coordinate along an axis is made up of those along its parts.
            inner = at[axis.name]
            for name, size in reversed(
                list(zip(axis.part_names, axis.parts, strict=True))
            ):
                inner, at[name] = divmod(inner, size)
        return at

    def rank(self, **coordinates: int) -> int:
        """The rank at these axis coordinates. An axis that is not given is at 0."""
        rank = 0
        for axis in self.axes:
            at = coordinates.pop(axis.name, 0)
            if not 0 <= at < axis.size:
                raise LayoutError(f"{axis.name}={at} is outside {axis}.")
            # Horner's rule, the inverse of `coordinates`.
            rank = rank * axis.size + at
        # Coordinates along axes that the mesh lacks have to be 0.
        if any(coordinates.values()):
            raise LayoutError(
                f"mesh {str(self)!r} has no axis {', '.join(coordinates)}."
            )
        return rank

    def part(
        self, axes: Iterable[str], at: Mapping[str, int]
    ) -> tuple[int, int]:
        """The number of parts made by these axes, and the index at a coordinate."""
        # Mixed radix over the chosen axes, outermost first.
        chosen, parts, index = set(axes), 1, 0
        for axis in self.axes:
            for name in dict.fromkeys((axis.name, *axis.part_names)):
                if name in chosen:
                    size = self.of(name)
                    parts, index = parts * size, index * size + at.get(name, 0)
        return parts, index

    def groups(self, axes: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """All groups of ranks that differ only along these axes."""
        inside, outside = self._strides(axes)
        # The same steps lead from the first rank of each group to its others.
        steps = [sum(w) for w in _walks(inside)]
        return tuple(
            tuple(sum(w) + step for step in steps) for w in _walks(outside)
        )

    def group(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """The ranks that differ from this one only along these axes, including itself."""
        inside, _ = self._strides(axes)
        # Subtract this rank's own steps along the axes: the group's first
        # rank.
        first = rank - sum(
            rank // stride % size * stride for stride, size in inside
        )
        return tuple(first + sum(w) for w in _walks(inside))

    def _strides(
        self, axes: Iterable[str]
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The (stride, size) of the parts along these axes, and of the others."""
        wanted = set(axes)
        # Refuses a name that is no axis.
        for name in wanted:
            self.of(name)
        inside: list[tuple[int, int]] = []
        outside: list[tuple[int, int]] = []
        stride = self.size
        for axis in self.axes:
            for name, size in zip(axis.part_names, axis.parts, strict=True):
                # The stride of a part is the number of ranks inside it.
                stride //= size
                chosen = name in wanted or axis.name in wanted
                (inside if chosen else outside).append((stride, size))
        return inside, outside


def _walks(parts: list[tuple[int, int]]) -> Iterable[tuple[int, ...]]:
    return product(
        *(range(0, stride * size, stride) for stride, size in parts)
    )
