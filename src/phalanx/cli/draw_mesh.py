"""`phalanx draw mesh`: which rank sits where, its groups, and how a weight is cut over them."""

from __future__ import annotations

from ..draw import MeshPicture, mesh_svg, mesh_text
from .outputs import try_file
from .usage import Parser, UsageError, print_json, say, screen, write

__all__ = ["run"]

MOST = 4096  # ranks of a picture

_EPILOG = """\
  phalanx draw mesh "dp2 pp2 tp2"
  phalanx draw mesh "dp2 tp4 zero3" --weight "kv=1024/128 embed=4096"

A dim of a weight is heads, kv, ffn or vocab, which tp cuts, or embed, head, position, which it does
not. With zero3 each rank keeps a flat shard of what tp leaves it."""


def run(argv: list[str]) -> int:
    """Draw the mesh of a layout."""
    parser = Parser("phalanx draw mesh", "Who sits where, and with whom each rank talks.", _EPILOG)
    parser.add_argument("layout", nargs="+", metavar="LAYOUT", help='as "dp2 pp2 tp2"')
    parser.add_argument("--weight", default="", metavar="DIMS", help='as "heads=4096 embed=4096"')
    parser.add_argument("--width", type=int, metavar="N", help="columns of the text")
    parser.add_argument("--out", metavar="FILE.svg", help="write the picture as SVG")
    parser.add_argument("--json", action="store_true", help="ranks, groups and parts as JSON")
    args = parser.read(argv)
    try_file(args.out, formats=(".svg",))
    picture = MeshPicture.parse(" ".join(args.layout), args.weight)
    if picture.mesh.size > MOST:
        raise UsageError(
            f"{picture.mesh.size} ranks are too many for a picture; draw {MOST} or fewer."
        )
    if args.out:
        write(args.out, {".svg": mesh_svg}, picture)
    if args.json:
        print_json(_figures(picture))
    elif args.out:
        say(f"{picture.title}\nwrote {args.out}")
    else:
        say(mesh_text(picture, width=screen(args.width)[0]), end="")
    return 0


def _figures(picture: MeshPicture) -> dict[str, object]:
    ranks = []
    for rank in range(picture.mesh.size):
        one: dict[str, object] = {"rank": rank, "coordinates": picture.mesh.coordinates(rank)}
        if picture.weight:
            part = picture.part(rank)
            one["part"] = {
                name: [cut.start, cut.stop]
                for (name, _, _), cut in zip(picture.weight, part.cuts, strict=True)
            }
            one["shard"] = [part.shard.start, part.shard.stop] if part.shard else None
        ranks.append(one)
    groups = {axis: [list(g) for g in picture.mesh.groups([axis])] for axis in picture.axes}
    return {"layout": str(picture.layout), "ranks": ranks, "groups": groups}
