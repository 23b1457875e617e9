"""The table of mixers, the layers between tokens in a block, and their keys in a shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from .attention import ATTENTION, LATENT_ATTENTION
from .codec import Mistake, key
from .delta import DELTA, DeltaKeys
from .mixer_row import MixerRow

if TYPE_CHECKING:
    from .shape import Shape

MIXERS = {row.name: row for row in (ATTENTION, DELTA)}
USUAL = ATTENTION.name
_NAMES = " or ".join(MIXERS)
# Names of linears that may carry adapters.
MIXER_LINEARS = tuple(
    name
    for row in (ATTENTION, LATENT_ATTENTION, *MIXERS.values())
    for name in row.linears
)


@dataclass(frozen=True, kw_only=True)
class MixerChoice:
    """The key that names the mixers of blocks."""

    mixers: tuple[str, ...] = key(
        (),
        f"{_NAMES} for each block, repeated over the blocks; empty: {USUAL}",
    )


# The fields of the last class come first.
@dataclass(frozen=True, kw_only=True)
class MixerKeys(DeltaKeys, MixerChoice):
    """The keys of a shape about mixers, other than attention's."""


def mixer_of_block(shape: Shape, number: int) -> MixerRow:
    """The row of the block of this number, counted from 0."""
    names = shape.mixers or (USUAL,)
    # An unknown name is a mistake, which `mixer_mistakes` reports.
    row = MIXERS.get(names[number % len(names)], ATTENTION)
    return LATENT_ATTENTION if row is ATTENTION and shape.kv_latent else row


def rows_in(shape: Shape) -> tuple[MixerRow, ...]:
    """The rows of the mixers that a shape's blocks have."""
    if shape.kind != "decoder":
        return ()
    count = max(1, min(len(shape.mixers), shape.layers))
    rows = (mixer_of_block(shape, number) for number in range(count))
    # In the table's order, in which the reasons against a layout are listed.
    names = list(MIXERS)
    return tuple(
        sorted(
            {row.name: row for row in rows}.values(),
            key=lambda row: names.index(row.name),
        )
    )


def unusual_mixers(names: Sequence[str]) -> tuple[str, ...]:
    """The names of mixers that are not attention, each once."""
    return tuple(name for name in MIXERS if name != USUAL and name in names)


def fill_sizes(shape: Shape) -> None:
    """Put values that follow from others in place of 0."""
    for row in MIXERS.values():
        row.fill(shape)


def mixer_mistakes(shape: Shape) -> Iterator[Mistake]:
    """Conflicts between sizes that are valid alone."""
    for name in shape.mixers:
        if name not in MIXERS:
            what = f"mixers names {name[:40]!r}"
            yield Mistake("mixers", what, f"Write {_NAMES}")
    if len(shape.mixers) > shape.layers:
        what = (
            f"mixers has {len(shape.mixers)} words for {shape.layers} blocks"
        )
        yield Mistake("mixers", what, "Write at most one for each block")
    if shape.mixers and shape.kind != "decoder":
        yield Mistake("mixers", "mixers in an MLP", "Leave them out")
    for row in MIXERS.values():
        yield from row.mistakes(shape)


def shrunk_sizes(shape: Shape, layers: int, head: int) -> Mapping[str, Any]:
    """The sizes of a small form with heads of `head` features."""
    sizes: dict[str, Any] = {"mixers": shape.mixers[:layers]}
    for row in rows_in(shape):
        sizes |= row.shrunk(shape, head)
    return sizes


def absent_sizes(names: Sequence[str]) -> Mapping[str, Any]:
    """The default sizes of all mixers that are not in `names`."""
    return {
        each.name: each.default
        for row in MIXERS.values()
        if row.name not in names and row.own_keys is not None
        for each in fields(row.own_keys)
    }
