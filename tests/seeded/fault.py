"""List of seeded faults: bugs planted in the engine on purpose, to see `verify` name
them.

Each replaces one function or method of the engine by a wrong one, modelled on bugs that
have occurred. They apply to ranks that are threads of this process.
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
    """A fault, its layout and model, and words that the first difference must
    contain."""

    name: str
    shape: str
    layout: Layout
    patch: Patch
    names: str
    packed: bool = False
    dropout: float = 0.0
    dtypes: tuple[str, ...] = ("float64",)  # dtypes in which the fault shows
    optimizer: str = "adamw"
    z_loss: float = 0.0


FAULTS: list[Fault] = []


@contextmanager
def swapped(owner: Any, name: str, new: Any) -> Iterator[None]:
    """Replace `owner.name` by `new` temporarily; enter before the ranks start, leave
    after they end.

    If each rank swapped the same name, they would restore one another's replacement and
    leave it in place.
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
    """Return a decorator that adds a patch to the list. The layout is written without a
    precision."""

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
def counted_by(
    count: Callable[[Mapping[str, Tensor]], Tensor],
) -> Iterator[None]:
    """Count the loss's divisor with this function temporarily."""
    right = BY_TARGETS.count
    # A value shared by all executors.
    object.__setattr__(BY_TARGETS, "count", count)
    try:
        yield
    finally:
        object.__setattr__(BY_TARGETS, "count", right)
