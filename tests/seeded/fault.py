"""The list of seeded faults: mistakes put into the engine on purpose, to see `verify` name them.

Each replaces one function or method of the engine by one that is wrong in a way people have been
wrong in. They act on ranks that are threads of this process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from phalanx.layout import Layout
from phalanx.parallel.own_loss import BY_TARGETS

Patch = Callable[[], AbstractContextManager[None]]
HALVES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Fault:
    """A fault, where it shows, and the words that the first difference must contain."""

    name: str
    shape: str
    layout: Layout
    patch: Patch
    names: str
    packed: bool = False
    dropout: float = 0.0
    dtypes: tuple[str, ...] = ("float64",)  # in which it is a mistake that shows
    optimizer: str = "adamw"
    z_loss: float = 0.0


FAULTS: list[Fault] = []


@contextmanager
def swapped(owner: Any, name: str, new: Any) -> Iterator[None]:
    """`owner.name` is `new` for a while; entered before the ranks start, left after they ended.

    Ranks that each swapped the same name would restore one another's replacement, and leave it for
    good.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            f"swap {name} before the ranks start: other threads see it, too"
        )
    old = owner.__dict__[name]
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, old)


def fault(
    name: str,
    shape: str,
    layout: str,
    names: str,
    *,
    packed: bool = False,
    dropout: float = 0.0,
    dtypes: tuple[str, ...] = ("float64",),
    optimizer: str = "adamw",
    z_loss: float = 0.0,
) -> Callable[[Patch], Patch]:
    """Enter a patch into the list. The layout is in words without a precision."""

    def enter(patch: Patch) -> Patch:
        where = Layout.parse(layout)
        FAULTS.append(
            Fault(
                name,
                shape,
                where,
                patch,
                names,
                packed,
                dropout,
                dtypes,
                optimizer,
                z_loss,
            )
        )
        return patch

    return enter


@contextmanager
def counted_by(count: Callable[[Mapping[str, Tensor]], Tensor]) -> Iterator[None]:
    """A rank counts what its loss is divided by with this function for a while."""
    right = BY_TARGETS.count
    object.__setattr__(BY_TARGETS, "count", count)  # a value that all executors have
    try:
        yield
    finally:
        object.__setattr__(BY_TARGETS, "count", right)
