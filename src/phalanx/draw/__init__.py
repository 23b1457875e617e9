"""Floor 2: timelines, meshes, charts and tables as text, SVG, a page and a Chrome trace. No torch."""

from collections.abc import Callable

from ..layout.numbers import bytes_text
from .chart import Bars, ChartAxis, Series, bars, chart
from .chrome import chrome
from .markup import Html, paragraphs, table, tag, text_table
from .mesh import MeshPicture, mesh_svg, mesh_text
from .page import frame, page, timeline
from .picture import Picture
from .svg import Bar, Row, gantt, svg
from .text import text

FORMATS: dict[str, Callable[[Picture], str]] = {".svg": svg, ".html": page, ".json": chrome}

__all__ = [
    "FORMATS", "Bar", "Bars", "ChartAxis", "Html", "MeshPicture", "Picture", "Row", "Series", "bars",
    "bytes_text", "chart", "chrome", "frame", "gantt", "mesh_svg", "mesh_text", "page", "paragraphs",
    "svg", "table", "tag", "text", "text_table", "timeline",
]  # fmt: skip
