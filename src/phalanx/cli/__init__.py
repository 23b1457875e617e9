"""The command line: one file for each verb, imported when the verb is used."""

from .main import main

__all__ = ["main"]
