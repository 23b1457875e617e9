"""A part of a long list of alike cases for `make test`; `make slow` has the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(count: int, cases: Iterable[Any]) -> list[Any]:
    """The cases, of which all but each `count`-th are slow."""
    return [
        case
        if number % count == 0
        else pytest.param(case, marks=pytest.mark.slow)
        for number, case in enumerate(cases)
    ]
