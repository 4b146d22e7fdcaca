"""Plain SVG, for pictures whose places carry meaning, as on a time axis. The same picture gives the same bytes."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from distsim.units import show_ns
from distsim.views.drawing.palette import GREY, INK, LINE, WHITE
from distsim.views.drawing.records import plain_text, text_width

Point = tuple[float, float]

FONT = "Helvetica, Arial, 'DejaVu Sans', sans-serif"


def number(value: float) -> str:
    """At most two decimals, no trailing zeros, no minus zero."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


class Svg:
    """A drawing under construction. Lengths are pixels, x to the right, y downwards; every text is escaped."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, fill: str, tip: str = "", border: str = "") -> None:
        edge = f' stroke="{border}" stroke-width="0.8"' if border else ""
        head = f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}" fill="{fill}"{edge}'
        self._parts.append(f"{head}><title>{_safe(tip)}</title></rect>" if tip else f"{head}/>")

    def line(self, a: Point, b: Point, colour: str, width: float = 1.0, dash: str = "", arrow: bool = False) -> None:
        ends = f'x1="{number(a[0])}" y1="{number(a[1])}" x2="{number(b[0])}" y2="{number(b[1])}"'
        more = (f' stroke-dasharray="{dash}"' if dash else "") + (' marker-end="url(#arrow)"' if arrow else "")
        self._parts.append(f'<line {ends} stroke="{colour}" stroke-width="{number(width)}"{more}/>')

    def text(
        self, x: float, y: float, text: str, size: int = 12, bold: bool = False, anchor: str = "start", colour: str = INK
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        place = f'x="{number(x)}" y="{number(y)}" font-size="{size}"{weight} text-anchor="{anchor}" fill="{colour}"'
        self._parts.append(f"<text {place}>{_safe(text)}</text>")

    def document(self, width: float, height: float, title: str) -> str:
        size = f'width="{number(width)}" height="{number(height)}" viewBox="0 0 {number(width)} {number(height)}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}" role="img">'
        back = f'<rect width="100%" height="100%" fill="{WHITE}"/>'
        return "\n".join([head, f"<title>{_safe(title)}</title>", _DEFINITIONS, back, *self._parts, "</svg>"]) + "\n"


class TimeChart(Svg):
    """Time to the right: nanoseconds from 0 to ``end_ns`` over ``width`` pixels, beside names on the left."""

    def __init__(self, left: float, width: float, top: float, end_ns: int) -> None:
        super().__init__()
        self.left, self.width, self.top, self.end_ns = left, width, top, end_ns

    def x(self, ns: int) -> float:
        return self.left + self.width * min(max(ns, 0), self.end_ns) / self.end_ns

    def axis(self, ticks: Iterable[int], bottom: float) -> None:
        for ns in ticks:
            self.line((self.x(ns), self.top - 8), (self.x(ns), bottom), "#DDE1E6")
            self.text(self.x(ns), bottom + 18, show_ns(ns) if ns else "0", 11, anchor="middle", colour=GREY)

    def legend(self, keys: Iterable[tuple[str, str]]) -> float:
        """Fills and what they mean, side by side; returns where the next would stand."""
        at = 16.0
        for fill, word in keys:
            self.rect(at, 58, 22, 12, fill, border=LINE)
            self.text(at + 28, 68, word, 12)
            at += 28 + text_width(word, 12) + 16
        return at

    def page(self, bottom: float, title: str) -> str:
        """The document: so wide that 32 pixels are left beside the chart."""
        return self.document(self.left + self.width + 32, bottom + 40, title)


#: Arrow heads, and stripes for time spent waiting (a colour alone would not tell it apart in print).
_DEFINITIONS = (
    '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0.8 8 4 0 7.2z" fill="#22577A"/></marker>'
    '<pattern id="waiting" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" fill="#FBF6CF"/><rect width="2.5" height="6" fill="#E0CF4A"/></pattern></defs>'
)


def _safe(text: str) -> str:
    return escape(plain_text(text))
