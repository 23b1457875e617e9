"""Likely causes of a gradient that is a multiple of the reference's."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from .runs import Run

_CLOSE = 2e-3


class HasFactor(Protocol):
    """A parameter that differs, of which the factor is known or None."""

    @property
    def factor(self) -> float | None: ...


def likely_causes(
    reference: Run, run: Run, different: Sequence[HasFactor]
) -> list[str]:
    """A sentence for each factor that the sizes of the two runs explain."""
    # Rounded first, so that a thousand parameters with one factor give one
    # cause.
    factors = {round(x.factor, 3) for x in different if x.factor is not None}
    causes = []
    for factor in sorted(factors):
        for value, cause in _known(reference, run):
            # A factor of 1 explains nothing, as the parameters differ.
            if value != 1 and abs(factor - value) <= _CLOSE * abs(value):
                causes.append(f"{factor:g} = {cause}")
    return list(dict.fromkeys(causes))


def _known(reference: Run, run: Run) -> Iterator[tuple[float, str]]:
    yield 0.0, "no gradient, or one of zeros"
    yield -1.0, "the sign is turned"
    sizes: dict[str, int] = {
        f"size of the mesh dimension {n}": s for n, s in run.meshes.items()
    }
    sizes["number of ranks"] = run.world
    sizes["backward passes of a step"] = run.backwards
    # The same count on both sides would be reported twice.
    if reference.backwards != run.backwards:
        sizes["backward passes of the reference's step"] = reference.backwards
    for name, size in sizes.items():
        # A sum over one rank is no mistake.
        if size < 2:
            continue
        yield (
            float(size),
            f"{name} ({size}): a sum in place of a mean, or summed twice",
        )
        yield (
            1 / size,
            f"1 / {name} (1/{size}): divided twice, or a mean in place of a sum",
        )
        yield float(size * size), f"the square of the {name} ({size})"
    passes, ranks = run.backwards, run.world
    if passes > 1 and ranks > 1:
        yield (
            float(passes * ranks),
            f"backward passes times ranks ({passes} x {ranks})",
        )
        yield (
            1 / (passes * ranks),
            f"1 / (backward passes times ranks, {passes} x {ranks})",
        )
    yield from _tokens(run)


def _tokens(run: Run) -> Iterator[tuple[float, str]]:
    """Ratios of the counts of tokens and labels between batches."""
    for what in ("tokens", "labels"):
        counts = [getattr(batch, what) for _, batch in run.first.batches()]
        # Equal batches weigh the same in a mean of means and in a mean over
        # all tokens.
        if not counts or not all(counts) or len(set(counts)) < 2:
            continue
        mean = sum(counts) / len(counts)
        for count in sorted(set(counts)):
            text = (
                f"{what} of a batch over the mean of all ({count} / {mean:g})"
            )
            # A mean of means weighs a batch by its own count instead of the
            # common one.
            yield count / mean, text
            yield mean / count, f"the inverse of {text}"
