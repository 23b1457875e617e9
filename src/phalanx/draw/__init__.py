"""Floor 2: timelines and meshes as text, SVG, a page and a Chrome trace. No torch."""

from .chrome import chrome
from .mesh import MeshPicture, mesh_svg, mesh_text
from .page import page
from .picture import Picture
from .svg import svg
from .text import text

__all__ = ["MeshPicture", "Picture", "chrome", "mesh_svg", "mesh_text", "page", "svg", "text"]
