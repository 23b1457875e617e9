"""Timelines, meshes, charts and tables as text, SVG, HTML and a Chrome trace."""

from collections.abc import Callable

from ..layout.numbers import bytes_text
from .chart import (
    Bars,
    ChartAxis,
    MatrixCell,
    Series,
    bars,
    chart,
    matrix_svg,
    panels,
)
from .chrome import chrome
from .markup import (
    COLOURS,
    WIDE,
    Html,
    KeyEntry,
    paragraphs,
    table,
    tag,
    text_table,
)
from .mesh import MeshPicture, mesh_svg, mesh_text
from .page import figure, frame, page, timeline
from .parts import breakdown_svg, memory_svg
from .picture import Picture, recorded_picture
from .shards import Slice, shards_svg
from .svg import Area, Bar, Row, gantt, svg
from .text import text

FORMATS: dict[str, Callable[[Picture], str]] = {
    ".svg": svg,
    ".html": page,
    ".json": chrome,
}

__all__ = [
    "COLOURS", "FORMATS", "WIDE", "Area", "Bar", "Bars", "ChartAxis", "Html", "KeyEntry", "MatrixCell",
    "MeshPicture", "Picture", "Row", "Series", "Slice", "bars", "breakdown_svg", "bytes_text", "chart",
    "chrome", "figure", "frame", "gantt", "matrix_svg", "memory_svg", "mesh_svg", "mesh_text", "page",
    "panels", "paragraphs", "recorded_picture", "shards_svg", "svg", "table", "tag", "text",
    "text_table", "timeline",
]  # fmt: skip
