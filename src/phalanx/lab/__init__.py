"""Every strategy from bare collectives: one short file each, to read, to run, and to test against.

What needs torch is imported when it is asked for: experiments are listed, and mistakes refused,
without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .catalogue import NAMES, LabError, Size, experiment, listing

if TYPE_CHECKING:
    from .show import as_json, claims_text, lab_page, lab_text
    from .trial import LabTrial, conduct

__all__ = [
    "NAMES", "LabError", "Size", "LabTrial", "as_json", "claims_text", "conduct", "experiment",
    "lab_page", "lab_text", "listing",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "trial" if name in ("LabTrial", "conduct") else "show"
    return getattr(importlib.import_module(f".{module}", __name__), name)
