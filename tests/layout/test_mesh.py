"""The grid of devices, on every mesh of up to 64 ranks."""

from itertools import combinations, permutations, product

import pytest

from phalanx.layout import Axis, LayoutError, Mesh
from phalanx.layout.mesh import AXES


def _sizes(room: int, axes: int) -> list[tuple[int, ...]]:
    """All sizes of 2 and more whose product stays within the room."""
    if not axes:
        return [()]
    return [
        (n, *rest)
        for n in range(2, room + 1)
        for rest in _sizes(room // n, axes - 1)
    ]


def meshes(
    room: int, names: tuple[str, ...] = ("dp", "pp", "cp", "tp")
) -> list[Mesh]:
    """Every mesh of at most `room` ranks over every choice and order of axes."""
    found = []
    for count in range(len(names) + 1):
        for order in permutations(names, count):
            for sizes in _sizes(room, count):
                axes = ((n, (1, s) if n == "dp" else (s, 1) if n == "cp" else (s,))
                        for n, s in zip(order, sizes, strict=True))  # fmt: skip
                found.append(Mesh(tuple(Axis(*axis) for axis in axes)))
    return found


EVERY = meshes(64)
# In the usual order all 64 ranks, in every order 16: the arithmetic does not know the names.
USUAL = [
    m
    for m in EVERY
    if [a.name for a in m.axes] == [n for n in AXES if m.of(n) > 1]
]
SMALL = [m for m in EVERY if m.size <= 16]
SPLIT = [
    Mesh.parse(text)
    for text in (
        "dp2x4 tp2",
        "cp4:2x2 dp3",
        "pp2 dp3x2 cp6:2x3",
        "cp8:ulysses",
        "tp2 dp2x2 pp3",
    )
]


def test_the_groups_along_any_axes_are_a_partition_of_the_ranks() -> None:
    for mesh in USUAL + SMALL + SPLIT:
        names = [a.name for a in mesh.axes]
        for axes in (
            c for n in range(len(names) + 1) for c in combinations(names, n)
        ):
            groups = mesh.groups(axes)
            assert sorted(r for g in groups for r in g) == list(
                range(mesh.size)
            )
            width = 1
            for name in axes:
                width *= mesh.of(name)
            assert {len(g) for g in groups} == {width}
            for group in groups:
                assert list(group) == sorted(group)
                assert all(
                    mesh.group(rank, axes) == group
                    for rank in (group[0], group[-1])
                )


def test_a_group_is_the_ranks_whose_other_coordinates_are_the_same() -> None:
    for mesh in [m for m in USUAL if m.size <= 24] + SPLIT:
        places = [mesh.coordinates(r) for r in range(mesh.size)]
        whole = [a.name for a in mesh.axes]
        parts = [name for a in mesh.axes for name in a.part_names]
        for name in {*whole, *parts}:
            inside = [
                p for p in parts if p == name or p.startswith(name + ".")
            ]
            others = [p for p in parts if p not in inside]
            for rank in range(mesh.size):
                same = [
                    r for r in range(mesh.size)
                    if all(places[r][p] == places[rank][p] for p in others)
                ]  # fmt: skip
                assert mesh.group(rank, [name]) == tuple(same), (
                    str(mesh),
                    name,
                    rank,
                )


def test_rank_and_coordinates_undo_each_other_with_the_first_axis_outermost() -> (
    None
):
    for mesh in USUAL + SMALL:
        names = [a.name for a in mesh.axes]
        counted = product(*(range(a.size) for a in mesh.axes))
        for rank, place in enumerate(counted):
            assert tuple(mesh.coordinates(rank)[n] for n in names) == place
            assert mesh.rank(**dict(zip(names, place, strict=True))) == rank


def test_every_mesh_prints_and_parses_back() -> None:
    for mesh in EVERY + SPLIT:
        assert Mesh.parse(str(mesh)) == mesh
    assert len({str(m) for m in EVERY}) == len(EVERY)
    assert str(Mesh.parse("dp2x4 pp1 cp4:2x2 tp1")) == "dp2x4 cp4:2x2"


def test_neighbouring_ranks_differ_in_the_innermost_axis() -> None:
    mesh = Mesh.parse("dp2 pp2 tp2")
    assert mesh.group(0, ["tp"]) == (0, 1)
    assert mesh.group(0, ["pp"]) == (0, 2)
    assert mesh.group(0, ["dp"]) == (0, 4)
    assert mesh.group(5, ["dp", "tp"]) == (0, 1, 4, 5)
    hsdp = Mesh.parse("dp2x4")
    assert hsdp.group(5, ["dp.shard"]) == (4, 5, 6, 7)
    assert hsdp.group(5, ["dp.replicate"]) == (1, 5)


@pytest.mark.parametrize(
    "text, part",
    [
        ("dp2 dp4", "dp occurs 2 times"),
        ("xp2", "'xp2' is not an axis"),
        ("dp0", "1 or more"),
        ("tp2x2", "only dp splits"),
        ("dp4:ring", "only cp"),
        ("cp4:3x2", "3 x 2 is 6, not 4"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused_with_its_word(
    text: str, part: str
) -> None:
    with pytest.raises(LayoutError, match=part):
        Mesh.parse(text)


def test_places_outside_the_mesh_are_refused() -> None:
    mesh = Mesh.parse("dp2 tp2")
    with pytest.raises(LayoutError, match="rank 4 is outside a mesh of 4"):
        mesh.coordinates(4)
    with pytest.raises(LayoutError, match="tp=2 is outside tp2"):
        mesh.rank(tp=2)
    with pytest.raises(LayoutError, match="no axis pp"):
        mesh.rank(pp=1)
    with pytest.raises(LayoutError, match="unknown axis 'zz'"):
        mesh.group(0, ["zz"])
