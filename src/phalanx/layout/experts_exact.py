"""The reasons why `exact` does not cover some ways to share experts over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .layout import Layout


def unordered_senders(layout: Layout) -> list[str]:
    """Explain why `exact` cannot tell an expert's tokens apart by sender, or return []."""
    if layout.experts:
        words = f"experts:{','.join(layout.experts)}"
        return [
            f"exact does not cover {words} yet: an expert's tokens of one sequence come"
            " from several ranks. Use ep"
        ]
    dp, ep = layout.dp, layout.ep
    names = [axis.name for axis in layout.mesh.axes]
    if dp > 1 and ep > 1 and names.index("ep") < names.index("dp"):
        return [
            "exact with ep before dp: the microbatches of an expert's rank are no subtree."
            " Write dp before ep"
        ]
    if dp > 1 and ep & (ep - 1):
        return [
            f"exact does not cover dp{dp} with ep{ep}: the microbatches of an expert's"
            " rank are no subtree. Use a power of two for ep, or ep alone"
        ]
    return []
