"""Top floor: the command line. A verb's module is imported when that verb is used."""

from .main import main

__all__ = ["main"]
