"""What of a layout a piece can feel: how its own weights and tokens are cut, and in what it computes.

Copies, stages, ZeRO and whole-piece recomputation change when a piece runs, never what it does.
"""

from __future__ import annotations

from ..layout import Layout, Mesh
from ..layout.choices import ACCUM, ZB_H1

__all__ = ["cut_of"]


def cut_of(layout: Layout) -> Layout:
    """The layout reduced to its tp and cp, seq, selective recomputation, precision, and whether its
    backward comes as two operations (written as zb-h1)."""
    axes = (a for a in layout.mesh.axes if a.name in ("tp", "cp"))
    return Layout(
        mesh=Mesh(tuple(sorted(axes, key=lambda a: a.name))),
        seq=layout.seq,
        schedule=ZB_H1 if layout.splits_backward else ACCUM,
        microbatches=1,
        recompute="selective" if layout.recompute == "selective" else "none",
        precision=layout.precision,
    )
