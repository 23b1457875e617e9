"""Blocks whose parts are pieces of their own, where a layout keeps them apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from ..layout import Layout, LayoutError
from ..models.mlps import SPLIT
from ..models.routed import ReceivingPart, RoutedProducts
from .model import Model


def cut_blocks(model: Model, layout: Layout) -> Model:
    """Split each block that routes tokens into three pieces, if the layout keeps these apart.

    Otherwise blocks stay whole and also output the terms of their losses.
    """
    pieces: list[tuple[str, nn.Module]] = []
    for name, piece in model.pieces:
        if type(piece) in SPLIT:
            block: Any = piece
            parts = (
                block.parts() if layout.parts_apart else (block.with_losses(),)
            )
            pieces += [(name, part) for part in parts]
            continue
        if layout.parts_apart and not isinstance(piece, ReceivingPart):
            _refuse_hidden(name, piece, layout)
        pieces.append((name, piece))
    changed = tuple(pieces) != tuple(model.pieces)
    return replace(model, pieces=tuple(pieces)) if changed else model


def _refuse_hidden(name: str, piece: nn.Module, layout: Layout) -> None:
    if any(isinstance(module, RoutedProducts) for module in piece.modules()):
        names = " or ".join(kind.__name__ for kind in SPLIT)
        raise LayoutError(
            f"{layout}: {name} routes tokens and is a {type(piece).__name__}, which does not show where"
            f" tokens leave it. Make it an {names}, or use dp in place of ep and no compile."
        )
