"""Texts between ranks, so that all of them decide alike: bytes over a wire, and JSON in them.

Never objects: what a rank says is text, and the one who hears it parses it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm import Group

__all__ = ["agree", "hear", "tell"]

LONGEST = 4000  # bytes of what one rank complains of


def tell(wire: Group, text: str, root: int = 0) -> str:
    """The root's text, on every rank."""
    said = _packed(text if wire.rank == root else "")
    size = torch.tensor([said.numel()], device=wire.device)
    wire.broadcast(size, root)
    whole = said if wire.rank == root else torch.empty(int(size), dtype=torch.uint8)
    whole = whole.to(wire.device)
    wire.broadcast(whole, root)
    return _text(whole)


def hear(wire: Group, text: str, root: int = 0) -> list[str]:
    """What every rank says, on the root; nothing elsewhere."""
    said = _packed(text).to(wire.device)
    sizes = _sizes(wire, said)
    longest = int(sizes.max())
    padded = torch.zeros(longest, dtype=torch.uint8, device=wire.device)
    padded[: said.numel()] = said
    outs = [torch.empty_like(padded) for _ in range(wire.size)] if wire.rank == root else None
    wire.gather(outs, padded, root)
    return [_text(out[: int(n)]) for out, n in zip(outs or [], sizes, strict=False)]


def agree(wire: Group, complaint: str) -> list[str]:
    """What every rank complains of, the same list on all; empty when nobody does."""
    said = _packed(complaint)[:LONGEST].to(wire.device)
    sizes = _sizes(wire, said)
    longest = int(sizes.max())
    if not longest:
        return []
    padded = torch.zeros(longest, dtype=torch.uint8, device=wire.device)
    padded[: said.numel()] = said
    whole = torch.empty(longest * wire.size, dtype=torch.uint8, device=wire.device)
    wire.all_gather(whole, padded)
    rows = whole.view(wire.size, longest)
    return [f"rank {rank}: {_text(rows[rank, : int(n)])}" for rank, n in enumerate(sizes) if int(n)]


def _sizes(wire: Group, said: Tensor) -> Tensor:
    sizes = torch.empty(wire.size, dtype=torch.int64, device=wire.device)
    wire.all_gather(sizes, torch.tensor([said.numel()], device=wire.device))
    return sizes.cpu()


def _packed(text: str) -> Tensor:
    raw = bytearray(text.encode())
    return torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)


def _text(packed: Tensor) -> str:
    # A complaint that was cut may end inside a character.
    return bytes(packed.cpu().numpy()).decode(errors="replace")
