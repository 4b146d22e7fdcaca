"""Plain SVG, for pictures in which positions have a meaning, such as charts over time. The same
picture gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from distsim.common.units import show_ns
from distsim.output.pictures.drawing.box_diagram import plain_text, text_width
from distsim.output.pictures.drawing.palette import GREY, INK, LINE_COLOUR, WHITE

Point = tuple[float, float]

#: The extra `pictures` installs the font of the last name, for systems without fonts.
SVG_FONT = "Helvetica, Arial, 'DejaVu Sans', 'DejaVu Sans Mono', sans-serif"


def number_text(value: float) -> str:
    """At most two decimals, no trailing zeros, no minus zero."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


class SvgDrawing:
    """A drawing under construction. Lengths are pixels, x to the right, y downwards; every text is
    escaped.
    """

    def __init__(self) -> None:
        self._parts: list[str] = []

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        tip: str = "",
        border: str = "",
    ) -> None:
        """Without ``fill``, only the border and the tip under the pointer are drawn."""
        look = f'fill="{fill}"' if fill else 'fill="#fff" fill-opacity="0"'
        look += f' stroke="{border}" stroke-width="0.8"' if border else ""
        head = f"<rect {_box_attributes(x, y, width, height)} {look}"
        self._parts.append(
            f"{head}><title>{_escaped_text(tip)}</title></rect>" if tip else f"{head}/>"
        )

    def outline(
        self, x: float, y: float, width: float, height: float, colour: str, stroke: float = 2.0
    ) -> None:
        """A frame that hides nothing inside it."""
        place = _box_attributes(x, y, width, height)
        self._parts.append(
            f'<rect {place} fill="none" stroke="{colour}" stroke-width="{number_text(stroke)}"/>'
        )

    def path(
        self,
        steps: str,
        fill: str,
        tip: str = "",
        stroke: str = "",
        width: float = 1.0,
        dash: str = "",
    ) -> None:
        """A path in SVG's own letters; ``stroke``: a line of that colour."""
        line = f' stroke="{stroke}" stroke-width="{number_text(width)}"' if stroke else ""
        line += f' stroke-dasharray="{dash}"' if dash else ""
        head = f'<path d="{steps}" fill="{fill or "none"}"{line}'
        self._parts.append(
            f"{head}><title>{_escaped_text(tip)}</title></path>" if tip else f"{head}/>"
        )

    def circle(
        self, x: float, y: float, radius: float, fill: str, tip: str = "", border: str = ""
    ) -> None:
        """A circle around a point, with an optional tip and border."""
        line = f' stroke="{border}"' if border else ""
        place = f'cx="{number_text(x)}" cy="{number_text(y)}" r="{number_text(radius)}"'
        head = f'<circle {place} fill="{fill}"{line}'
        self._parts.append(
            f"{head}><title>{_escaped_text(tip)}</title></circle>" if tip else f"{head}/>"
        )

    def line(
        self,
        a: Point,
        b: Point,
        colour: str,
        width: float = 1.0,
        dash: str = "",
        arrow: bool = False,
    ) -> None:
        """A straight line; ``dash`` is an SVG dash pattern, and ``arrow`` adds a head at ``b``."""
        start = f'x1="{number_text(a[0])}" y1="{number_text(a[1])}"'
        end = f'x2="{number_text(b[0])}" y2="{number_text(b[1])}"'
        ends = f"{start} {end}"
        more = (f' stroke-dasharray="{dash}"' if dash else "") + (
            ' marker-end="url(#arrow)"' if arrow else ""
        )
        self._parts.append(
            f'<line {ends} stroke="{colour}" stroke-width="{number_text(width)}"{more}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: int = 12,
        bold: bool = False,
        anchor: str = "start",
        colour: str = INK,
    ) -> None:
        """A line of text; ``x`` and ``y`` are the anchor on its baseline."""
        weight = ' font-weight="bold"' if bold else ""
        place = f'x="{number_text(x)}" y="{number_text(y)}"'
        look = f'font-size="{size}"{weight} text-anchor="{anchor}" fill="{colour}"'
        self._parts.append(f"<text {place} {look}>{_escaped_text(text)}</text>")

    def heading(self, title: str, facts: Iterable[str]) -> None:
        """The title of a page, and below it the facts that are not empty."""
        self.text(16, 26, title, 17, bold=True)
        self.text(16, 46, "; ".join(fact for fact in facts if fact), 12, colour=GREY)

    def line_key(
        self,
        at: Point,
        colour: str,
        words: str,
        width: float = 1.6,
        dash: str = "",
        arrow: bool = False,
        length: float = 22,
    ) -> float:
        """A key of the legend that is a line; returns where the next key begins."""
        x, y = at
        self.line((x, y + 6), (x + length, y + 6), colour, width, dash=dash, arrow=arrow)
        self.text(x + length + 6, y + 10, words, 12)
        return x + length + 6 + text_width(words, 12) + 16

    def document(self, width: float, height: float, title: str) -> str:
        """The whole drawing as SVG text."""
        across, down = number_text(width), number_text(height)
        size = f'width="{across}" height="{down}" viewBox="0 0 {across} {down}"'
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{SVG_FONT}" role="img">'
        )
        back = f'<rect width="100%" height="100%" fill="{WHITE}"/>'
        return (
            "\n".join(
                [
                    head,
                    f"<title>{_escaped_text(title)}</title>",
                    _DEFINITIONS,
                    back,
                    *self._parts,
                    "</svg>",
                ]
            )
            + "\n"
        )


class TimeChart(SvgDrawing):
    """Time to the right: nanoseconds from ``start_ns`` to ``end_ns`` over ``width`` pixels, to the
    right of the names.

    Several may draw into one document: ``on`` is the drawing that they share.
    """

    def __init__(
        self,
        left: float,
        width: float,
        top: float,
        end_ns: int,
        start_ns: int = 0,
        on: SvgDrawing | None = None,
    ) -> None:
        super().__init__()
        self.left, self.width, self.top, self.start_ns, self.end_ns = (
            left,
            width,
            top,
            start_ns,
            max(end_ns, start_ns + 1),
        )
        if on is not None:
            self._parts = on._parts

    def x(self, ns: float) -> float:
        """The x coordinate of an instant; instants outside the chart are moved to its edge."""
        return self.left + self.width * (
            min(max(ns, self.start_ns), self.end_ns) - self.start_ns
        ) / (self.end_ns - self.start_ns)

    def axis(self, ticks: Iterable[int], bottom: float, since_ns: int = 0) -> None:
        """Lines at the instants, labelled with their times since ``since_ns``.

        A label that would touch the one before it is omitted.
        """
        free = self.left - 30
        for ns in ticks:
            x, word = self.x(ns), show_ns(ns - since_ns) if ns > since_ns else "0"
            self.line((x, self.top - 8), (x, bottom), "#DDE1E6")
            half = text_width(word, 11) / 2
            if x - half > free:
                self.text(x, bottom + 18, word, 11, anchor="middle", colour=GREY)
                free = x + half + 4

    def legend(
        self, keys: Iterable[tuple[str, str]], y: float = 58, right: float = 0.0
    ) -> tuple[float, float]:
        """Fills and their meanings, in as many lines as they need; returns the place of the next
        key.
        """
        at, right = 16.0, right or self.left + self.width
        for fill, word in keys:
            wide = 28 + text_width(word, 12) + 16
            if at > 16 and at + wide > right:
                at, y = 16.0, y + 20
            self.rect(at, y, 22, 12, fill, border=LINE_COLOUR)
            self.text(at + 28, y + 10, word, 12)
            at += wide
        return at, y

    def page(self, bottom: float, title: str, right: float = 32) -> str:
        """The document: with some free pixels to the right of the chart."""
        return self.document(self.left + self.width + right, bottom + 40, title)


def round_ticks(length: int) -> list[int]:
    """Round times, five to ten of them, from 0."""
    step, grow = 1, 0
    while length / step > 10:
        step = step * 5 // 2 if grow % 3 == 1 else step * 2  # 1, 2, 5, 10, 20, …
        grow += 1
    return list(range(0, max(length, 0) + 1, step))


#: Striped fills, which are distinct in print and for colour-blind readers as well: for waiting, and
#: for communication that is overlapped with compute.
WAITING_FILL, HIDDEN_FILL = "url(#waiting)", "url(#hidden)"

#: Arrow heads, and the stripes that fill waits and hidden transfers.
_DEFINITIONS = (
    '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" '
    'markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0.8 8 4 0 7.2z" fill="#22577A"/></marker>'
    '<pattern id="waiting" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)">'
    '<rect width="6" height="6" fill="#FBF3C4"/>'
    '<rect width="2.2" height="6" fill="#D3B52C"/></pattern>'
    '<pattern id="hidden" width="4" height="4" patternUnits="userSpaceOnUse">'
    '<rect width="4" height="4" fill="#BFE5D6"/>'
    '<rect width="4" height="1.4" fill="#2E8B6F"/></pattern></defs>'
)


def _box_attributes(x: float, y: float, width: float, height: float) -> str:
    place = f'x="{number_text(x)}" y="{number_text(y)}"'
    return f'{place} width="{number_text(width)}" height="{number_text(height)}"'


def _escaped_text(text: str) -> str:
    return escape(plain_text(text))
