"""Elements of HTML and SVG that escape their content, and tables for HTML and text.

Every page and picture of phalanx is made of these; no other file writes a tag.
"""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from .words import wrapped

# Okabe and Ito (2008): distinguishable with colour blindness, and black text is legible
# on each.
_COLOURS = (
    "#56b4e9 #e69f00 #2fb98f #cc79a7 #d55e00 #8fa8c8 #b08900 #b0b0b0 #a58bc9"
)
COLOURS = tuple(_COLOURS.split())
LETTER = 6.3  # the width of an average character at 11 px
# width of a picture on a page, and on a screen of 400 pixels
WIDE, PHONE = 860.0, 352.0

# The colours of the page; those of operations are the same on light and dark pages.
_STYLE = Path(__file__).with_name("picture.css").read_text(encoding="utf-8")


class Html(str):
    """Text that is markup already. Any other text is escaped where it is used."""

    __slots__ = ()


def escaped(text: str) -> str:
    """The text as markup.

    Half of a surrogate pair, which no file can hold, becomes a question mark.
    """
    return escape(text).encode(errors="replace").decode()


def tag(name: str, *children: object, **attributes: object) -> Html:
    """One element; `cls` is its class, and empty attributes are omitted."""
    shown = ""
    for key, value in attributes.items():
        if value is not None and value != "":
            # `cls` for `class`, and `stroke_width` for `stroke-width`.
            named = "class" if key == "cls" else key.replace("_", "-")
            shown += f' {named}="{escaped(_plain(value))}"'
    inside = "".join(
        c if isinstance(c, Html) else escaped(str(c)) for c in children
    )
    return Html(f"<{name}{shown}>{inside}</{name}>")


def _plain(value: object) -> str:
    return (
        # Two digits after the point are a hundredth of a pixel.
        f"{value:.2f}".rstrip("0").rstrip(".")
        if isinstance(value, float)
        else str(value)
    )


def paragraphs(lines: Iterable[str]) -> Html:
    """Each line as a paragraph."""
    return Html("".join(tag("p", line) for line in lines))


def table(
    head: Sequence[object],
    rows: Iterable[Sequence[object]],
    *,
    left: bool = False,
    caption: str = "",
) -> Html:
    """An HTML table that scrolls if it is too wide.

    The first column is aligned left, or all of them with `left`.
    """
    title = tag("caption", caption) if caption else Html("")
    top = tag(
        "thead",
        tag(
            "tr",
            *(tag("th" if c else "td", c, scope=c and "col") for c in head),
        ),
    )
    body = Html(
        "".join(tag("tr", *(tag("td", cell) for cell in row)) for row in rows)
    )
    return tag(
        "div",
        tag("table", title, top, tag("tbody", body), cls="left" * left),
        cls="scroll",
    )


def text_table(
    head: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    left: str = "",
    indent: int = 0,
) -> str:
    """A table for a terminal.

    `left` has an l for each left-aligned column and an r for the others, as in `lrrl`.
    By default only the first is aligned left.
    """
    from rich.console import Console  # only printing a table imports rich
    from rich.table import Table

    grid = Table(
        box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=bool(head)
    )
    cells = [[str(cell) for cell in row] for row in rows]
    # Rows may have more cells than the head.
    for i in range(max(map(len, [head, *cells]))):
        leans = (
            "left" if (left or "l").ljust(i + 1, "r")[i] == "l" else "right"
        )
        title = head[i] if i < len(head) else ""
        grid.add_column(title, justify=leans, no_wrap=True)  # type: ignore[arg-type]
    for row in cells:
        grid.add_row(*row)
    # Far wider than any table, so that rich wraps nothing.
    console = Console(
        width=10_000,
        color_system=None,
        markup=False,
        highlight=False,
        emoji=False,
    )
    with console.capture() as printed:
        console.print(grid)
    return "".join(
        " " * indent + row.rstrip() + "\n"
        for row in printed.get().splitlines()
    )


# SVG


def box(
    x: float,
    y: float,
    width: float,
    height: float,
    *,
    tip: str = "",
    **attributes: object,
) -> Html:
    """A rectangle; `tip` is its tooltip."""
    inside = [tag("title", tip)] if tip else []
    return tag(
        "rect", *inside, x=x, y=y, width=width, height=height, **attributes
    )


def label(
    x: float, y: float, words: object, cls: str = "", ink: str = ""
) -> Html:
    """A line of text, by default in the page's text colour."""
    return tag("text", words, x=x, y=y, cls=cls, style=ink and f"fill:{ink}")


def line(
    x1: float,
    y1: float,
    x2: float,
    y2: float,
    cls: str = "grid",
    tip: str = "",
) -> Html:
    inside = [tag("title", tip)] if tip else []
    return tag("line", *inside, x1=x1, y1=y1, x2=x2, y2=y2, cls=cls)


# Stripes by which fills of one colour differ.
PLAIN = ""
# Pixels between two upright stripes, and between two flat ones; 0: no such stripes.
_APART = {
    PLAIN: (0, 0),
    "upright": (4, 0),
    "flat": (0, 4),
    "crossed": (4, 4),
    "sparse upright": (8, 0),
    "sparse flat": (0, 8),
    "sparse crossed": (8, 8),
}
TEXTURES = tuple(_APART)


def stripes(
    x: float,
    y: float,
    width: float,
    height: float,
    texture: str,
    ink: str,
) -> Html:
    """The stripes of a rectangle; "" if it is plain or too small for a stripe.

    They are lines of a path: a page must not use `url(#...)`, which patterns need.
    """
    across, down = _APART[texture]
    parts = list[str]()
    for left in _stripes_within(width, across):
        parts.append(f"M{x + left:.1f} {y:.1f}v{height:.1f}")
    for top in _stripes_within(height, down):
        parts.append(f"M{x:.1f} {y + top:.1f}h{width:.1f}")
    if not parts:
        return Html("")
    return tag("path", d="".join(parts), cls="stripes", stroke=ink)


def _stripes_within(length: float, apart: int) -> Iterator[int]:
    """The places of stripes along a side; none if `apart` is 0."""
    count = int(length / apart) if apart else 0
    for n in range(1, count + 1):
        yield n * apart - 1


class KeyEntry(NamedTuple):
    """The meaning of a colour, and the letter on it.

    Without a colour, the entry is an empty box with a dashed outline.
    """

    fill: str
    words: str
    letter: str = ""
    ink: str = ""
    texture: str = PLAIN


def key(
    entries: Iterable[KeyEntry], y: float, width: float
) -> tuple[list[Html], float]:
    """A legend of colours in as many lines as needed, and the y coordinate of its end."""
    x, out = 20.0, list[Html]()
    for fill, words, letter, ink, texture in entries:
        need = 28 + LETTER * len(words)
        # The next entry would leave the page: begin a new line.
        if x + need > width - 20 and x > 20:
            x, y = 20.0, y + 22
        look = "" if fill else "empty"
        out.append(box(x, y - 12, 16, 16, rx=2, fill=fill, cls=look))
        out.append(stripes(x, y - 12, 16, 16, texture, ink))
        if letter:
            if texture:
                out.append(box(x + 3, y - 10, 10, 12, fill=fill))
            out.append(label(x + 8, y, letter, "cell", ink))
        out.append(label(x + 21, y, words))
        x += need + 10
    return out, y


def document(
    title: str,
    width: float,
    height: float,
    parts: Iterable[Html],
    notes: Iterable[str] = (),
) -> Html:
    """A whole SVG document on a card, with its title on top and its notes below."""
    body = list(parts)
    for note in notes:
        # Text of SVG does not wrap by itself.
        for words in wrapped(note, int((width - 40) / LETTER)):
            body.append(label(20, height, words, "soft"))
            height += 20
    card = box(0.5, 0.5, width - 1, height - 1, cls="page", rx=8)
    inside = [
        tag("title", title),
        tag("style", Html(_STYLE)),
        card,
        *_heading(title, width),
        *body,
    ]
    size = {"viewBox": f"0 0 {width:.0f} {height:.0f}"}
    size |= {"width": f"{round(width)}", "height": f"{round(height)}"}
    lines = Html("\n" + "\n".join(inside) + "\n")
    return Html(
        tag(
            "svg",
            lines,
            xmlns="http://www.w3.org/2000/svg",
            **size,
            role="img",
        )
        + "\n"
    )


def _heading(title: str, width: float) -> list[Html]:
    """The title in one line, or in two smaller lines if it is wider than the card."""
    room = width - 40
    # A letter of 15 pixels takes 8.2 on average, one of 12 pixels 6.7.
    if len(title) * 8.2 <= room:
        return [label(20, 30, title, "title")]
    lines = wrapped(title, int(room / 6.7))
    if len(lines) > 2:
        lines = [lines[0], f"{lines[1]} ..."]
    return [
        label(20, 19 + 16 * n, words, "title long")
        for n, words in enumerate(lines)
    ]
