"""Every strategy from bare collectives: one short file each, to read, to run, and to test against.

What needs torch is imported when it is asked for: experiments are listed, and mistakes refused,
without it. So no file here may have the name of something below.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .catalogue import NAMES, Entry, entry, listing
from .claims import Claim, LabError, Size

if TYPE_CHECKING:
    from .html import page
    from .show import as_json, claims_text, text
    from .trial import Trial, conduct

__all__ = [
    "NAMES",
    "Claim",
    "Entry",
    "LabError",
    "Size",
    "Trial",
    "as_json",
    "claims_text",
    "conduct",
    "entry",
    "listing",
    "page",
    "text",
]

_WITH_TORCH = {
    "Trial": "trial", "conduct": "trial", "page": "html",
    "as_json": "show", "claims_text": "show", "text": "show",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_WITH_TORCH[name]}", __name__), name)
