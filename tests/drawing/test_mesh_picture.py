"""A mesh as a picture: every rank once, every group whole, the parts of a weight tile it."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as xml

import pytest

from phalanx.drawing import MeshPicture, mesh_svg, mesh_text
from phalanx.layout import LayoutError

MESHES = [
    "",
    "dp2",
    "pp3",
    "dp2 tp4",
    "dp2 pp2 tp2",
    "dp2x2 pp2 cp4:2x2 tp2 zero3",
    "dp8 pp2 cp2 tp4",
]


def test_eight_ranks_look_like_this() -> None:
    assert mesh_text(
        MeshPicture.parse("dp2 pp2 tp2 zero3", "kv=1024/128 embed=64")
    ) == (
        "mesh dp2 pp2 tp2 zero3: 8 ranks\n"
        "\n"
        "dp=0               dp=1\n"
        "       tp0  tp1           tp0  tp1\n"
        "pp0      0    1    pp0      4    5\n"
        "pp1      2    3    pp1      6    7\n"
        "\n"
        "groups\n"
        "  dp  {0 4} {1 5} {2 6} {3 7}\n"
        "  pp  {0 2} {1 3} {4 6} {5 7}\n"
        "  tp  {0 1} {2 3} {4 5} {6 7}\n"
        "\n"
        "rank  dp  pp  tp        kv  embed   flat shard\n"
        "   0   0   0   0     0:512   0:64      0:16384\n"
        "   1   0   0   1  512:1024   0:64      0:16384\n"
        "   2   0   1   0     0:512   0:64      0:16384\n"
        "   3   0   1   1  512:1024   0:64      0:16384\n"
        "   4   1   0   0     0:512   0:64  16384:32768\n"
        "   5   1   0   1  512:1024   0:64  16384:32768\n"
        "   6   1   1   0     0:512   0:64  16384:32768\n"
        "   7   1   1   1  512:1024   0:64  16384:32768\n"
        "\n"
        "weight kv=1024 x embed=64: each rank computes with 512 x 64.\n"
        "kv=1024 is cut over tp into 2 parts of 512.\n"
        "zero3 keeps it as flat shards of 16384 numbers over dp.\n"
    )


@pytest.mark.parametrize("layout", MESHES)
def test_every_rank_sits_in_one_place_and_in_one_group_of_each_axis(
    layout: str,
) -> None:
    picture = MeshPicture.parse(layout)
    everyone = list(range(picture.mesh.size))
    assert (
        sorted(
            rank for _, grid in picture.panels for row in grid for rank in row
        )
        == everyone
    )
    drawn = mesh_text(picture, width=10_000)
    for axis in picture.axes:
        line = re.search(rf"^  {re.escape(axis)} +(\{{.*)$", drawn, re.M)
        assert line
        if len(picture.mesh.groups([axis])) <= 64:
            assert sorted(map(int, re.findall(r"\d+", line[1]))) == everyone


@pytest.mark.parametrize("layout", MESHES)
@pytest.mark.parametrize("width", [66, 80])
def test_no_line_is_wider_than_asked(layout: str, width: int) -> None:
    drawn = mesh_text(
        MeshPicture.parse(layout, "heads=64 embed=64"), width=width
    )
    assert max(map(len, drawn.splitlines())) <= width


@pytest.mark.parametrize(
    "layout", [m for m in MESHES if "zero3" in m] + ["dp3 tp2 zero3"]
)
def test_the_parts_of_all_ranks_are_the_weight(layout: str) -> None:
    picture = MeshPicture.parse(layout, "heads=20/5 embed=3")
    held: dict[tuple[int, int], int] = {}
    for rank in range(picture.mesh.size):
        (heads, embed), shard = picture.part(rank)
        cells = list(
            itertools.product(
                range(heads.start, heads.stop), range(embed.start, embed.stop)
            )
        )
        assert shard is not None
        for cell in cells[shard.start : shard.stop]:
            held[cell] = held.get(cell, 0) + 1
    copies = picture.mesh.of("dp.replicate") * picture.mesh.of("pp")
    assert held == dict.fromkeys(
        itertools.product(range(20), range(3)), copies
    )


@pytest.mark.parametrize("layout", MESHES)
def test_the_svg_shows_each_rank_once_and_then_once_for_each_axis(
    layout: str,
) -> None:
    picture = MeshPicture.parse(layout, "ffn=64 embed=8")
    drawn = xml.fromstring(mesh_svg(picture))
    squares = [
        e
        for e in drawn.iter("{http://www.w3.org/2000/svg}rect")
        if e.get("class") == "op"
    ]
    assert len(squares) == picture.mesh.size * (1 + len(picture.axes))


@pytest.mark.parametrize(
    "weight",
    [
        "heads",
        "heads=",
        "heads=x",
        "heads=0",
        "heads=8/0",
        "hats=8",
        "heads=-8",
        "heads=8/x",
    ],
)
def test_a_dim_that_is_none_is_refused_by_name(weight: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(repr(weight))):
        MeshPicture.parse("dp2 tp2", weight)
