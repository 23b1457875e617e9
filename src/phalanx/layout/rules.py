"""The table that names the dims of each parameter, and the map from dims to mesh axes.

A line reads `layers.*.attn.w[kv].weight : kv embed`. Each model has its own table; all
share the map. A parameter without a line is an error. A dim shared by several matrices
is written with their number or their lengths: `layers.*.mlp.gate_up.weight : features/2
embed`.
"""

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise, product

from .mesh import LayoutError

# MLPs of a block among which tokens are routed, stacked in one weight.
ROUTED = "experts"
# One map from names to axes. A name that is not in it is whole on every rank ("-" is
# such a name).
AXIS_OF: dict[str, str] = dict.fromkeys(
    ("vocab", "heads", "kv", "groups", "ffn"), "tp"
) | {ROUTED: "ep"}
# The rank dim of an adapter beside a sharded weight: whole, but ranks do
# different work with it.
ADAPTER = "adapter"
# The vectors from which latent attention expands heads: whole, but ranks of tp expanded
# other heads.
LATENT = "latent"
# A bias added to partial results of tp ranks: each adds its share, and has seen all
# tokens.
PARTIAL = "partial"
# The features of a token. A weight between two of these is a matrix, which an optimizer
# of whole matrices updates as one. Lookups, the output projection, a router and dims named "-"
# are no matrices.
FEATURES = ("embed", "heads", "kv", "groups", "ffn", LATENT, "features")
DIMS = (
    "head",
    "position",
    ADAPTER,
    PARTIAL,
    "-",
    *dict.fromkeys((*FEATURES, *AXIS_OF)),
)
_DIM = re.compile("([a-z-]+)(?:/([0-9]{1,4}|[0-9]{1,9}(?:,[0-9]{1,9})+))?")
# All ranks ask the same of every weight, so answers are cached.
_fits = lru_cache(1 << 16)(fnmatch.fnmatchcase)


@dataclass(frozen=True)
class Cut:
    """One rank's part of a dim: `start` to `stop`, with `length` including padding.

    `copies` ranks of the axis hold the same part and do different work with it.
    """

    start: int
    stop: int
    length: int
    copies: int = 1

    def at(self, size: int, index: int) -> slice:
        """The slice of part `index` in a dim of `size` that is sharded in the same way."""
        # The start is clipped as well: a part beyond the end is empty.
        start = min(index // self.copies * self.length, size)
        return slice(start, min(start + self.length, size))

    @classmethod
    def of(cls, size: int, parts: int, index: int, unit: int = 1) -> "Cut":
        """Part `index` of `parts` of a dim of `size`, in whole units (a head is one).

        If there are fewer units than parts, neighbouring parts hold the same unit. A
        size that does not divide is padded at its end.
        """
        # Units, such as heads, are never divided; the last one may be shorter.
        units = -(-size // unit)
        # More parts than units: `parts // units` neighbours hold a copy of one
        # unit.
        if units < parts and parts % units == 0 and unit > 1:
            first = index * units // parts
            return cls(first * unit, (first + 1) * unit, unit, parts // units)
        # Whole units for each part, rounded up; the last parts may be empty.
        each = -(-units // parts) * unit
        return cls(
            min(index * each, size), min((index + 1) * each, size), each
        )


@dataclass(frozen=True)
class Rules:
    """An ordered table of (pattern, dims); the first matching pattern counts."""

    lines: tuple[tuple[str, tuple[str, ...]], ...]

    @classmethod
    def parse(cls, text: str) -> "Rules":
        lines = []
        for number, line in enumerate(text.splitlines(), 1):
            # A comment in the table.
            line = line.split("#")[0].strip()
            if not line:
                continue
            pattern, colon, dims = line.partition(":")
            if not colon or not pattern.strip():
                raise LayoutError(
                    f"rule line {number}: {line!r}. Write 'pattern : dim dim'."
                )
            for dim in dims.split():
                match = _DIM.fullmatch(dim)
                if not match or match[1] not in DIMS:
                    what = f"rule line {number}: {line!r} names dim {dim!r}"
                    raise LayoutError(f"{what}. Dims are {', '.join(DIMS)}.")
            lines.append((pattern.strip(), tuple(dims.split())))
        return cls(tuple(lines))

    def __str__(self) -> str:
        return "\n".join(
            f"{pattern} : {' '.join(dims)}" for pattern, dims in self.lines
        )

    def dims(self, name: str, rank: int | None = None) -> tuple[str, ...]:
        """The names of a parameter's dims. `rank` is their number, if known."""
        return tuple(
            dim.partition("/")[0] for dim in self._written(name, rank)
        )

    def matrices(
        self, name: str, shape: Sequence[int]
    ) -> tuple[tuple[slice, slice], ...]:
        """The slices of the matrices in a weight's last two dims, or in those of each routed MLP.

        Empty for a lookup table, a router or a vector.
        """
        written = self._written(name, len(shape))
        dims = self.dims(name)
        if (
            len(dims) < 2
            or dims[:-2] not in ((), (ROUTED,))
            or not {*dims[-2:]} <= {*FEATURES}
        ):
            return ()
        parts = [
            _parts(name, dim, size)
            for dim, size in zip(written, shape, strict=True)
        ]
        return tuple(product(parts[-2], parts[-1]))

    def _written(self, name: str, rank: int | None) -> tuple[str, ...]:
        for pattern, dims in self.lines:
            if _fits(name, pattern):
                # A rule for another number of dims would be applied to the
                # wrong ones.
                if rank is not None and rank != len(dims):
                    rule = f"its rule {pattern!r} names {len(dims)}: {' '.join(dims)}"
                    raise LayoutError(f"{name} has {rank} dims, {rule}.")
                return dims
        raise LayoutError(
            f"no rule names the parameter {name}. Add a line such as '{name} : embed',"
            " or use '-' for a dim that is never sharded."
        )


def _parts(name: str, dim: str, size: int) -> list[slice]:
    """The runs of a dim that belong to one matrix each."""
    match = _DIM.fullmatch(dim)
    lengths = (
        [int(n) for n in match[2].split(",")] if match and match[2] else [1]
    )
    # "features/3" -> three equal runs; "features/64,16,16" -> these lengths.
    if len(lengths) == 1:
        lengths = [size // lengths[0]] * lengths[0] if lengths[0] else []
    if sum(lengths) != size:
        what = f"its rule says {dim!r} of a dim of {size}, whose lengths do not add up to it"
        raise LayoutError(f"{name}: {what}.")
    return [slice(a, b) for a, b in pairwise(accumulate(lengths, initial=0))]
