"""Every strategy from bare collectives: one short file each, to read, to run, and to test against."""

from .catalogue import NAMES, Entry, entry
from .claims import Claim, LabError, Size
from .conduct import Trial, conduct
from .page import page
from .show import as_json, claims_text, listing, text

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
