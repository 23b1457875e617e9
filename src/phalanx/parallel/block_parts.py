"""Blocks whose parts are pieces of their own, where a layout keeps them apart."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from ..layout import Layout, LayoutError
from ..models import ExpertBlock, ExpertProducts, ExpertsPart
from .model import Model


def cut_blocks(model: Model, layout: Layout) -> Model:
    """Split each block with experts into three pieces, if the layout keeps these apart.

    Otherwise blocks stay whole and also output the terms of their routers' losses.
    """
    pieces: list[tuple[str, nn.Module]] = []
    for name, piece in model.pieces:
        if type(piece) is ExpertBlock:
            parts = (
                piece.parts() if layout.parts_apart else (piece.with_losses(),)
            )
            pieces += [(name, part) for part in parts]
            continue
        if layout.parts_apart and not isinstance(piece, ExpertsPart):
            _refuse_hidden_experts(name, piece, layout)
        pieces.append((name, piece))
    changed = tuple(pieces) != tuple(model.pieces)
    return replace(model, pieces=tuple(pieces)) if changed else model


def _refuse_hidden_experts(
    name: str, piece: nn.Module, layout: Layout
) -> None:
    if any(isinstance(module, ExpertProducts) for module in piece.modules()):
        raise LayoutError(
            f"{layout}: {name} has experts and is a {type(piece).__name__}, which does not show where"
            " tokens leave it. Make it an ExpertBlock, or use dp in place of ep and no compile."
        )
