"""The traffic between ranks: a table of senders and receivers, at any world size.

The darkness of a cell shows the bytes that its sender sent to its receiver.
"""

from __future__ import annotations

from bisect import bisect_left
from math import ceil, log

import numpy as np

from distsim.common.errors import UsageError
from distsim.common.units import show_bytes
from distsim.output.pictures.components.view_interface import (
    GalleryExample,
    PictureInput,
    PictureView,
    require_input,
)
from distsim.output.pictures.drawing.box_diagram import clipped, text_width
from distsim.output.pictures.drawing.palette import GREY, INK, LINE_COLOUR, WHITE
from distsim.output.pictures.drawing.svg import SvgDrawing
from distsim.output.trace_data.selection import (
    WHOLE_RUN,
    RunSelection,
    group_ids_named,
    selected_ranks,
    selection_text,
)
from distsim.output.trace_data.traffic_matrix import (
    MAX_MATRIX_ROWS,
    TrafficMatrix,
    measure_traffic,
    ranks_per_row,
)
from distsim.trace.model import Trace

_TOP, _MAX_LISTED_PAIRS = 132.0, 8
#: From light to dark, evenly in lightness (CIE L* 96 to 22): a single hue, so that print and eyes
#: without colour vision see the same.
_COLOUR_RAMP = (
    "#EFF5FB",
    "#CFE1F0",
    "#A9C9E2",
    "#7FADD0",
    "#5590BB",
    "#35719F",
    "#1D527D",
    "#0B3559",
)


def traffic_svg(trace: Trace, part: RunSelection = WHOLE_RUN, name: str = "") -> str:
    """The table as SVG text; ``part.group`` chooses a group or an axis.

    Raises UsageError if no rank sends anything.
    """
    if part.time is not None or part.steps is not None:
        raise UsageError(
            "the view traffic tells of the whole run",
            "leave --time and --steps out; choose with --ranks and --group",
        )
    groups = None if part.group is None else group_ids_named(part.group, trace)
    ranks = () if part.ranks is None else selected_ranks(part, trace)
    found = measure_traffic(
        trace, 1 if 0 < len(ranks) <= MAX_MATRIX_ROWS else ranks_per_row(trace), groups
    )
    if found.block == 1 and ranks:
        found = found._replace(sent=found.sent[np.ix_(ranks, ranks)], ranks=ranks)
    if not found.sent.any():
        raise UsageError(
            "no rank sends a byte to another",
            "ask for --view groups: it shows who is together with whom",
        )
    return _TrafficDrawing(trace, found, part, name or str(trace.header.get("name") or "run")).svg()


#: Up to so many rows a cell has the size (in px) at the same place below; beyond, the last one.
_CELL_COUNTS = (8, 16, 32)
_CELL_SIZES = (58.0, 30.0, 18.0, 12.0)


class _TrafficDrawing:
    def __init__(self, trace: Trace, found: TrafficMatrix, part: RunSelection, name: str) -> None:
        self.trace, self.found, self.part, self.name = trace, found, part, name
        self.n, self.most = len(found.sent), int(found.sent.max())
        self.least = int(found.sent[found.sent > 0].min())
        self.cell = _CELL_SIZES[bisect_left(_CELL_COUNTS, self.n)]
        self.draw = SvgDrawing()
        self.local = max(int(trace.header.get("local_size") or trace.world_size), 1)

    def svg(self) -> str:
        draw = self.draw
        draw.text(16, 26, f"{clipped(self.name, 60)}: who talks to whom", 17, bold=True)
        lines = [self._about(), self._by()]
        for number, line in enumerate(line for line in lines if line):
            draw.text(16, 46 + 18 * number, line, 12, colour=GREY)
        right = max(text_width(line, 12) for line in lines) + 32
        left = 26 + max(text_width(self._label(i), 11) for i in range(self.n))
        right = max(right, self._legend())
        draw.text(left, _TOP - 22, "to", 12, bold=True)
        draw.text(16, _TOP - 22, "from", 12, bold=True)
        every, side = ceil(26 / self.cell), self.n * self.cell
        for at in (k * self.cell for k in range(self.n + 1)):
            draw.line((left, _TOP + at), (left + side, _TOP + at), "#E3E6EA", 0.8)
            draw.line((left + at, _TOP), (left + at, _TOP + side), "#E3E6EA", 0.8)
        for i, j in zip(*(k.tolist() for k in self.found.sent.nonzero()), strict=True):
            self._cell(i, j, left + j * self.cell, _TOP + i * self.cell)
        for i in range(self.n):
            at = i * self.cell
            if i % max(ceil(12 / self.cell), 1) == 0:
                draw.text(
                    left - 6,
                    _TOP + at + self.cell / 2 + 4,
                    self._label(i),
                    11,
                    anchor="end",
                    colour=GREY,
                )
            if i % every == 0:
                draw.text(
                    left + at + self.cell / 2,
                    _TOP - 6,
                    str(self._number(i)),
                    11,
                    anchor="middle",
                    colour=GREY,
                )
        self._machines(left)
        right = max(right, left + self.n * self.cell + 24)
        right, bottom = self._listed(left + self.n * self.cell + 30, right)
        return draw.document(
            right, max(_TOP + self.n * self.cell + 24, bottom), f"{clipped(self.name, 60)}: traffic"
        )

    def _label(self, i: int) -> str:
        block = self.found.block
        if block == 1:
            return f"rank {self._number(i)}"
        if block == self.local:
            return f"machine {i}"
        last = min((i + 1) * block, self.trace.world_size) - 1
        return f"ranks {i * block}-{last}"

    def _number(self, i: int) -> int:
        """The rank, or the block, of a row."""
        return self.found.ranks[i] if self.found.ranks else i

    def _about(self) -> str:
        block, total = self.found.block, show_bytes(int(self.found.sent.sum()))
        said = [selection_text(self.part, self.trace.world_size), f"{total} in all"]
        said += (
            [
                f"{self.trace.world_size} ranks, {block} to a row; "
                "the diagonal is what stays among them"
            ]
            if block > 1
            else []
        )
        return "; ".join(t for t in said if t)

    def _by(self) -> str:
        by = ", ".join(f"{op} by {name}" for op, name in sorted(self.found.by.items()))
        return clipped(
            f"messages as they were sent; {by}" if by else "messages as they were sent", 150
        )

    def _shade(self, nbytes: int) -> int:
        """Its place on the ramp, which is logarithmic."""
        if self.most == self.least:
            return len(_COLOUR_RAMP) - 3
        share = log(nbytes / self.least) / log(self.most / self.least)
        return min(int(share * len(_COLOUR_RAMP)), len(_COLOUR_RAMP) - 1)

    def _cell(self, i: int, j: int, x: float, y: float) -> None:
        nbytes = int(self.found.sent[i, j])
        shade = self._shade(nbytes)
        self.draw.rect(
            x,
            y,
            self.cell,
            self.cell,
            _COLOUR_RAMP[shade],
            f"{self._label(i)} to {self._label(j)}: {show_bytes(nbytes)}",
            "#E3E6EA",
        )
        word = show_bytes(nbytes)
        if text_width(word, 9) + 2 <= self.cell:
            ink = WHITE if shade >= 4 else INK
            self.draw.text(
                x + self.cell / 2, y + self.cell / 2 + 3, word, 9, anchor="middle", colour=ink
            )

    def _machines(self, left: float) -> None:
        """Frames around what stays within a machine."""
        if self.found.block > 1 or self.found.ranks or not 1 < self.local < self.trace.world_size:
            return
        for first in range(0, self.n, self.local):
            side = min(self.local, self.n - first) * self.cell
            self.draw.outline(
                left + first * self.cell, _TOP + first * self.cell, side, side, INK, 1.6
            )

    def _legend(self) -> float:
        at = 16.0
        words = (
            [("least", self.least), ("most", self.most)]
            if self.most > self.least
            else [("each", self.most)]
        )
        for number, (word, nbytes) in enumerate(words):
            said = f"{word} {show_bytes(nbytes)}"
            if number:
                for shade in _COLOUR_RAMP:
                    self.draw.rect(at, 78, 16, 12, shade, border=LINE_COLOUR)
                    at += 16
                at += 8
            elif len(words) == 1:
                self.draw.rect(
                    at, 78, 16, 12, _COLOUR_RAMP[self._shade(nbytes)], border=LINE_COLOUR
                )
                at += 24
            self.draw.text(at, 88, said, 12)
            at += text_width(said, 12) + 8
        if (
            self.found.block == 1
            and not self.found.ranks
            and 1 < self.local < self.trace.world_size
        ):
            self.draw.outline(at + 8, 78, 16, 12, INK, 1.6)
            self.draw.text(at + 30, 88, "within a machine", 12)
            at += 30 + text_width("within a machine", 12)
        return at + 16

    def _listed(self, x: float, right: float) -> tuple[float, float]:
        """The largest cells in words."""
        sent = self.found.sent
        order = sorted(
            ((int(sent[i, j]), i, j) for i, j in zip(*sent.nonzero(), strict=True)),
            key=lambda c: (-c[0], c[1], c[2]),
        )
        if not order:
            return right, 0.0
        self.draw.text(x, _TOP + 6, "the most", 12, bold=True)
        lines = [
            f"{self._label(i)} to {self._label(j)}: {show_bytes(n)}"
            for n, i, j in order[:_MAX_LISTED_PAIRS]
        ]
        lines += (
            [f"and {len(order) - _MAX_LISTED_PAIRS} more pairs"]
            if len(order) > _MAX_LISTED_PAIRS
            else []
        )
        for number, line in enumerate(lines):
            self.draw.text(x, _TOP + 26 + 18 * number, line, 11)
        return max(
            right, x + max(text_width(line, 11) for line in lines) + 16
        ), _TOP + 40 + 18 * len(lines)


def _draw(subject: PictureInput) -> str:
    if subject.trace is not None:
        return traffic_svg(subject.trace, subject.part)
    run = require_input(subject.run, "run")
    return traffic_svg(run.trace, subject.part, run.program.name)


VIEW = PictureView(
    _draw,
    formats=("svg", "png", "pdf"),
    accepts_trace=True,
    examples=(
        GalleryExample(
            "hybrid",
            "Who sends how many bytes to whom: stages exchange activations, replicas gradients.",
        ),
        GalleryExample(
            "strategies/gpt3_175b",
            "Tensor parallelism stays within a machine, the pipeline goes from machine to machine.",
        ),
    ),
)
