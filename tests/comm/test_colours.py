"""Groups of one split never share a communicator over NCCL, at any number of ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from phalanx.comm import CommError
from phalanx.comm import colours as module
from phalanx.comm.colours import colours, rounds
from phalanx.layout import Layout, Mesh

Ranks = tuple[int, ...]
# Two groups of one split of 2,048 ranks that torch 2.11 to 2.13 give the same colour.
ALIKE = [(1478, 1486), (1988, 1996)]


def colour_by_hand(ranks: Ranks) -> int:
    """`genNcclSplitColor` of torch's NCCLUtils.cpp, in Python's whole numbers."""
    hashed = 0
    for rank in ranks:
        hashed ^= (rank + 0x9E3779B9 + (hashed << 6) + (hashed >> 2)) % 2**64
        hashed %= 2**64
    return hashed % (2**31 - 1)


@pytest.mark.parametrize(
    "ranks", [(0,), (0, 1), (7, 1478, 131071), tuple(range(64))]
)
def test_the_colour_is_the_hash_that_torch_computes(ranks: Ranks) -> None:
    assert colours([ranks]) == [colour_by_hand(ranks)]


def assert_safe(groups: Sequence[Ranks], world: int) -> list[list[Ranks]]:
    """Rounds that make every group, hold each rank once, and have no two groups of one colour."""
    made = rounds(groups, world)
    for parts in made:
        assert sorted(rank for ranks in parts for rank in ranks) == list(
            range(world)
        )
        assert len(set(colours(parts))) == len(parts)
    together = [ranks for parts in made for ranks in parts]
    assert set(groups) <= set(together)
    return made


def partition(seed: int, world: int, size: int) -> list[Ranks]:
    """Ranks in a random order, cut into groups of a size; the last may be smaller."""
    order = random.Random(seed).sample(range(world), world)
    return [tuple(sorted(order[i : i + size])) for i in range(0, world, size)]


def test_groups_of_one_colour_are_split_in_two_rounds() -> None:
    assert len(set(colours(ALIKE))) == 1
    made = assert_safe(ALIKE, 2048)
    assert [sum(ranks in ALIKE for ranks in parts) for parts in made] == [1, 1]


def test_groups_of_different_colours_take_one_round() -> None:
    assert rounds([(0, 1), (2, 3)], 5) == [[(0, 1), (2, 3), (4,)]]


@given(st.integers(0, 10**6), st.integers(2, 40), st.integers(1, 6))
# The colour of the last rank is that of the group of all others.
@example(339704, 7, 6)
def test_rounds_are_safe_where_many_colours_are_alike(
    seed: int, world: int, size: int
) -> None:
    split = [ranks for ranks in partition(seed, world, size) if len(ranks) > 1]
    with pytest.MonkeyPatch.context() as patch:
        # so few colours that every split has collisions
        patch.setattr(module, "_MODULUS", 61)
        if any(has_no_round(ranks, world) for ranks in split):
            with pytest.raises(CommError, match="cannot split off a group"):
                rounds(split, world)
        else:
            assert_safe(split, world)


def has_no_round(ranks: Ranks, world: int) -> bool:
    """True if every way to group the idle ranks has a colour twice."""
    idle = [rank for rank in range(world) if rank not in ranks]
    # More idle ranks have many ways, of which one is safe.
    return len(idle) <= 4 and all(
        len(set(colours([ranks, *parts]))) <= len(parts)
        for parts in groupings(idle)
    )


def groupings(ranks: list[int]) -> Iterator[list[Ranks]]:
    """Every way to cut ranks into groups."""
    if not ranks:
        yield []
        return
    first, *rest = ranks
    for parts in groupings(rest):
        yield [(first,), *parts]
        for index, part in enumerate(parts):
            joined = (first, *part)
            yield [*parts[:index], joined, *parts[index + 1 :]]


def splits_of(mesh: Mesh) -> list[list[Ranks]]:
    """The groups along every axis, and the pairs along which stages of a pipeline send."""
    axes = [
        axis for axis in ("dp", "pp", "tp", "cp", "ep") if mesh.of(axis) > 1
    ]
    splits = [mesh.groups([axis]) for axis in axes]
    splits += [mesh.groups([a, b]) for a, b in product(axes, axes) if a < b]
    stages = mesh.groups(["pp"])
    for first in (0, 1):
        pairs = [
            p[i : i + 2] for p in stages for i in range(first, len(p) - 1, 2)
        ]
        splits.append([tuple(pair) for pair in pairs])
    return [
        [tuple(ranks) for ranks in split if len(ranks) > 1] for split in splits
    ]


# As the planner proposes them for large clusters; the first has collisions in its pipeline's pairs.
LARGE = [
    "dp32 pp8 tp8",
    "dp128 pp2 tp8",
    "dp1024 tp2",
    "dp512 cp2 tp2",
    "dp1024 pp16 tp8",
]
SLOW = [
    f"dp{ranks // (pp * tp * cp)} pp{pp} cp{cp} tp{tp}"
    for ranks in (2048, 4096, 8192, 16384, 32768, 65536, 131072)
    for pp, tp, cp in product(
        (1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16), (1, 2, 4, 8, 16)
    )
]


@pytest.mark.parametrize(
    "text", [*LARGE, *(pytest.param(t, marks=pytest.mark.slow) for t in SLOW)]
)
def test_no_split_of_a_large_layout_confuses_two_groups(text: str) -> None:
    mesh = Layout.parse(text).mesh
    for split in splits_of(mesh):
        assert_safe(split, mesh.size)


def test_a_large_layout_has_groups_of_one_colour() -> None:
    """Otherwise the tests above would show nothing."""
    mesh = Layout.parse("dp32 pp8 tp8").mesh
    assert any(
        len(rounds(split, mesh.size)) > 1 for split in splits_of(mesh) if split
    )
