"""Tests that layouts with impossible values, or too large for a model, are refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

from ..layout import Layout, LayoutError, Shape, legal

# A prime that is larger than the sizes of any small model.
_LARGE = 509
# Values that no field of this type may have.
_WRONG: dict[type, tuple[object, ...]] = {
    int: (-1, 1 << 40),
    str: ("unknown",),
}
# Words that no text of a layout may have.
_WORDS = ("unknown", "zero4", "dp0", "tp", "accum:0", "prefetch:-1", "fp12")


def refusal_faults(layout: Layout, shape: Shape) -> Iterator[str]:
    """Describe wrong layouts that are not refused, each one change away from a right one."""
    for field in fields(Layout):
        value = getattr(layout, field.name)
        if isinstance(value, bool):
            continue
        for wrong in _WRONG.get(type(value), ()):
            # Weights may be gathered any number of units ahead.
            if field.name == "prefetch" and wrong != -1:
                continue
            if not _refused(layout, field.name, wrong):
                yield f"a layout with {field.name} = {wrong!r} is not refused"
    for word in _WORDS:
        text = f"{layout} {word}"
        if not _unread(text):
            yield f"the layout {text!r} is not refused"
    for name in ("dp", "pp", "cp", "tp", "ep"):
        large = Layout.parse(f"{name}{_LARGE}")
        if not legal(large, shape):
            yield f"{large} is not refused for {shape.name}"


def _refused(layout: Layout, name: str, wrong: object) -> bool:
    try:
        replace(layout, **{name: wrong})  # type: ignore[arg-type]
    except LayoutError:
        return True
    return False


def _unread(text: str) -> bool:
    try:
        Layout.parse(text)
    except LayoutError:
        return True
    return False
