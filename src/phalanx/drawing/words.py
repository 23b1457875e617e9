"""Numbers, axis ticks and wrapped lines for all pictures."""

import math
from textwrap import wrap


def number(x: float) -> str:
    """A number with four significant digits: 33, 0.125, 1.047."""
    return f"{x:.4g}" if abs(x) < 1e4 else f"{x:,.0f}"


def ticks(start: float, end: float, least: float) -> list[float]:
    """Round values from start to end, at least `least` apart."""
    # The power of ten below the distance, then 1, 2, 5 or 10 times that.
    power: float = 10.0 ** math.floor(math.log10(least))
    step = next(
        m * power for m in (1, 2, 5, 10) if m * power >= least * (1 - 1e-9)
    )
    # Multiples of the step inside the range, ends included.
    first, last = math.ceil(start / step - 1e-9), math.floor(end / step + 1e-9)
    return [tick * step for tick in range(first, last + 1)]


def wrapped(line: str, width: int = 80) -> list[str]:
    """The words of a line in lines of at most `width`; a longer word is split."""
    if len(line) <= width:
        return [line]
    return wrap(line, width, break_on_hyphens=False) or [""]
