"""A measured step beside a plan's prediction, by kind of operation: one value for
terminal and page.

Predicted times are passed in (`step.py` asks the planner); nothing is priced here.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median

from ..drawing import Html, paragraphs, table, text_table
from ..drawing.words import wrapped
from ..program import KINDS, Costs, Op, Span, Timeline, ops

# Predicted seconds of one operation by kind and piece. A kind that is missing has no
# price.
Prices = Mapping[tuple[str, int], float]

HEAD = ("operation", "a rank", "predicted", "measured", "ratio", "share")
# Kinds that start where they stand in the list and are waited for where they are
# needed.
_BESIDE = {
    k
    for k, row in KINDS.items()
    if row.lane != ops.COMPUTE and row.on != ops.STEP
}


@dataclass(frozen=True)
class OpRow:
    """All operations of one kind in a step. Seconds are medians over the same
    operations."""

    kind: str
    words: str
    count: float  # on one rank, on average
    predicted: float | None  # None: not priced by a plan
    measured: float
    # share of the step, averaged over ranks; includes what runs beside compute
    share: float

    @property
    def ratio(self) -> float | None:
        return self.measured / self.predicted if self.predicted else None

    def cells(self) -> tuple[str, ...]:
        """Return the row's printed cells, in the order of HEAD."""
        return (
            f"{self.kind}  {self.words}",
            f"{self.count:.4g}",
            _ms(self.predicted),
            _ms(self.measured),
            "-" if self.ratio is None else f"{self.ratio:.2f}",
            f"{100 * self.share:.1f} %",
        )


@dataclass(frozen=True)
class Compared:
    """One step of a run in one layout, compared with its prediction for some hardware
    and profile."""

    layout: str
    hardware: str
    profile: str
    step: int
    rows: tuple[OpRow, ...]
    predicted: float  # seconds of the whole step
    measured: float  # seconds of the step that the rows describe
    usual: float | None = (
        None  # median of the run's steps, if there are enough
    )
    # A device works asynchronously to its host, so spans end when an operation is
    # launched.
    launched: bool = False
    costs: Costs | None = None  # planned costs of each operation

    @property
    def summary(self) -> str:
        usual = (
            ""
            if self.usual is None
            else f"; the run's steps took {_ms(self.usual)} (median)"
        )
        return (
            f"A step should take {_ms(self.predicted)}; step {self.step} took {_ms(self.measured)},"
            f" {self.measured / self.predicted:.2f} times that{usual}."
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Explanations of the columns, as far as these rows need them."""
        notes = [
            "Times are medians of one operation; ratio is measured / predicted; share is of the"
            " measured step."
        ]
        if self.launched:
            notes.append(
                "On a GPU an operation is timed until it is launched, not until it has finished: compare"
                " whole steps."
            )
        if any(row.kind in _BESIDE for row in self.rows):
            notes.append(
                "Gathers, sums and messages last until they are needed, beside the compute that"
                " they overlap: shares may add up to more than 100 %."
            )
        if any(row.predicted is None for row in self.rows):
            notes.append("-: not priced by a plan.")
        return tuple(notes)

    def figures(self) -> dict[str, object]:
        """Return the value as a JSON table."""
        own = {
            name: value
            for name, value in vars(self).items()
            if name != "costs"
        }
        return own | {
            "rows": [asdict(r) | {"ratio": r.ratio} for r in self.rows]
        }

    def text(self) -> str:
        """Return the table for a terminal of 80 columns."""
        shown = text_table(HEAD, [row.cells() for row in self.rows]).rstrip(
            "\n"
        )
        before, after = (
            (f"Predicted against measured: {self.where}", self.summary),
            self.notes,
        )
        above, below = (
            [line for words in each for line in wrapped(words)]
            for each in (before, after)
        )
        return "\n".join([*above, "", shown, "", *below])

    @property
    def where(self) -> str:
        return f"{self.layout} on {self.hardware}, profile {self.profile}"

    def html(self) -> Html:
        """Return the table for the page."""
        words = paragraphs([f"{self.where}. {self.summary}", *self.notes])
        return Html(words + table(HEAD, [row.cells() for row in self.rows]))


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.4g} ms"


def compare(timeline: Timeline, prices: Prices) -> tuple[OpRow, ...]:
    """Return a row for each kind of operation that ran, in the order of KINDS."""
    spans: dict[str, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        spans[span.op.kind].append(span)
    # Seconds of the measured step.
    ranks, whole = len(timeline.ranks), timeline.makespan
    rows = []
    for kind in (k for k in KINDS if k in spans):
        seconds = [span.end - span.start for span in spans[kind]]
        # The median would be meaningless if only some operations of a kind have a
        # price.
        priced = [_price(span.op, prices) for span in spans[kind]]
        known = [price for price in priced if price is not None]
        rows.append(
            OpRow(
                kind,
                KINDS[kind].name,
                len(seconds) / ranks,
                median(known) if len(known) == len(priced) else None,
                median(seconds),
                sum(seconds) / ranks / whole if whole else 0.0,
            )
        )
    return tuple(rows)


def _price(op: Op, prices: Prices) -> float | None:
    # A plan may price the halves of a backward, where the step ran it whole.
    halves = [
        (kind, op.piece) for kind in (ops.INPUT_GRADIENT, ops.WEIGHT_GRADIENT)
    ]
    if (
        op.kind == ops.BACKWARD
        and (op.kind, op.piece) not in prices
        and prices.keys() >= {*halves}
    ):
        return sum(prices[half] for half in halves)
    return prices.get((op.kind, op.piece))
