"""Properties for which models in transformers' own code are refused, with reasons."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ..layout import LayoutError

ATTENTION_OF_ITS_OWN = (
    "its attention does not go through ALL_ATTENTION_FUNCTIONS"
)
_BY_LENGTH = {"dynamic", "longrope"}


def refuse(reasons: Mapping[str, Any]) -> None:
    if wrong := [reason for reason, holds in reasons.items() if holds]:
        raise LayoutError("; ".join(wrong))


def error_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]


def code_line(error: BaseException) -> str:
    """The line of somebody's code at which an error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).parent)
    # The innermost line that is neither torch's nor ours.
    own = [
        f
        for f in frames
        if "/torch/" not in f.filename and ours not in f.filename
    ]
    at = own[-1] if own else frames[-1]
    return f"{at.filename}:{at.lineno}: {at.line}"


def refuse_attention(
    config: Any, owners: Sequence[Sequence[Any]], heads: set[Any]
) -> None:
    """Refuse blocks whose attention phalanx cannot replace.

    `owners` lists each block's modules with attention, `heads` the head counts with
    which they called it.
    """
    refuse(
        {
            ATTENTION_OF_ITS_OWN: not heads,
            "it has blocks without attention, or with two": heads
            and {*map(len, owners)} != {1},
            "its blocks differ in heads": len(heads) > 1,
            "its windows are not passed to its attention": heads
            and _lacks_windows(config, owners),
        }
    )


def refuse_tables(
    blocks: Sequence[nn.Module],
    path: Sequence[nn.Module],
    modules: Iterable[nn.Module],
) -> None:
    """Refuse weights and buffers that belong to no piece.

    `path` lists the modules down to the blocks, `modules` all of theirs.
    """
    tables = [n for block in blocks for n, _ in block.named_buffers()]
    bare = [n for m in path for n, _ in m.named_parameters(recurse=False)]
    refuse(
        {
            f"its blocks have buffers of their own ({', '.join(tables[:1])})": tables,
            f"it has weights outside of its modules ({', '.join(bare)})": bare,
            "its rope changes with the length of a sequence": _rope_kinds(
                modules
            )
            & _BY_LENGTH,
        }
    )


def _lacks_windows(config: Any, owners: Sequence[Sequence[Any]]) -> bool:
    """True if a configuration has windows or chunks that its attention ignores."""
    types = list(getattr(config, "layer_types", None) or ())
    kinds = [
        "sliding_attention" if m.core.window else "full_attention"
        for found in owners
        for m in found
    ]
    # One entry for each block: what the configuration says against what was passed.
    if types:
        return types != kinds
    size = getattr(config, "sliding_window", None)
    return bool(size) and "sliding_attention" not in kinds


def _rope_kinds(modules: Iterable[nn.Module]) -> set[str]:
    found = set()
    for module in modules:
        # Models with several ropes keep a dict of their kinds.
        kind = getattr(module, "rope_type", "")
        found |= set(kind.values()) if isinstance(kind, dict) else {kind}
    return found
