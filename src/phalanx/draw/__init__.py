"""Floor 2: timelines and meshes as text, SVG, a page and a Chrome trace. No torch."""

from .picture import Picture
from .text import text

__all__ = ["Picture", "text"]
