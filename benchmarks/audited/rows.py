"""The rows of docs/audited.md: how the command prints them, and how they stand on the page."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "audited.md"
LIBRARIES = (
    "torch", "transformers", "accelerate", "lightning", "trl", "deepspeed", "megatron-core",
)  # fmt: skip
RESULTS = ("equal", "refuted", "refused", "not comparable")
_BEGIN = "<!-- `make audited` writes from here -->"
_END = "<!-- to here -->"
_HEAD = """| library | model | layout | corner | result | seen |
|---|---|---|---|---|---|
"""
_ROW = re.compile(rf"\| ({'|'.join(LIBRARIES)}) [\d.]+ \|")


@dataclass(frozen=True)
class Row:
    """One comparison: what was audited, and the result."""

    library: str  # with its version
    model: str
    layout: str
    corner: str
    result: str
    seen: str

    @property
    def cell(self) -> str:
        """What was audited, whatever the version and the result."""
        library = self.library.split()[0]
        return f"{library} | {self.model} | {self.layout} | {self.corner}"

    def text(self) -> str:
        # A cell of Markdown holds no line break and no bar.
        words = [word.replace("|", "/") for word in astuple(self)]
        return f"| {' | '.join(words)} |"


def rows_of(text: str) -> list[Row]:
    """The rows in a page, or in what the command printed."""
    lines = [line for line in text.splitlines() if _ROW.match(line)]
    return [Row(*map(str.strip, line.strip("|").split("|"))) for line in lines]


def summary(rows: Sequence[Row]) -> str:
    counts = Counter(row.result for row in rows)
    told = [f"{counts[x]} {x}" for x in RESULTS if counts[x]]
    return f"{len(rows)} cells: {', '.join(told)}."


def with_row(page: str, row: Row, order: Sequence[str], made: str) -> str:
    """The page with a row in the place of that of the same cell; other rows stay if their cells do."""
    rows = {each.cell: each for each in rows_of(page)}
    rows[row.cell] = row
    listed = [rows[cell] for cell in order if cell in rows]
    lines = "\n".join(each.text() for each in listed)
    table = f"{made}\n\n{summary(listed)}\n\n{_HEAD}{lines}"
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n\n{table}\n\n{_END}{after}"
