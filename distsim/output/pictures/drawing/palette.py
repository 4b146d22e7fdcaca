"""Colours. Those that tell things apart are of the palette of Okabe and Ito, which colour-blind
people can read (https://jfly.uni-koeln.de/color/), lightened where dark text stands on them.
"""

from __future__ import annotations

INK = "#1B1F24"
GREY = "#57606A"
LINE_COLOUR = "#8C959F"
PALE_FILL = "#F0F2F5"
#: Passes of a pipeline (`distsim.output.trace_data.activity.pass_letter`). CIE L* 83, 66, 66, 89:
#: they differ in print, too.
PASS_FILLS = {"F": "#B4D3EA", "B": "#6DAE8E", "I": "#6DAE8E", "W": "#F3DFA2"}
WHITE = "#FFFFFF"

RED = "#C0392B"
RED_FILL = "#F9D6D0"
BLUE = "#0072B2"

#: One fill per rank, group or colour class, dark text on top.
FILLS = ("#9CCBEB", "#F7C25C", "#8ED3B7", "#E0AACB", "#F3EC94", "#F2A583", "#C9C2E8", "#CFD6DD")
#: The same hues, dark enough for a line on white.
STROKES = ("#0072B2", "#B87700", "#00795A", "#A8548A", "#8A7D00", "#C2500A", "#5B4BA8", "#57606A")

#: Arrows of messages.
MESSAGE_COLOUR = "#22577A"


def fill_colour(index: int) -> str:
    """The fill of the i-th rank or group; after eight they repeat."""
    return FILLS[index % len(FILLS)]


def stroke_colour(index: int) -> str:
    """The line colour that goes with `fill`."""
    return STROKES[index % len(STROKES)]


def lightened(colour: str, share: float = 0.45) -> str:
    """A hex colour mixed with white, light enough for dark text."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(p * share + 255 * (1 - share)):02X}" for p in parts)
