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
            "the view traffic shows the whole run only",
            "remove --time and --steps; select with --ranks and --group",
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
            "no rank sends data to another",
            "use --view groups, which shows the ranks of each group",
        )
    return _TrafficDrawing(trace, found, part, name or str(trace.header.get("name") or "run")).svg()


#: Up to this many rows, a cell has the size (in px) at the same index; with more, the last one.
_CELL_COUNTS = (8, 16, 32)
_CELL_SIZES = (58.0, 30.0, 18.0, 12.0)
#: The height of a row label, and the width of a column label, in pixels.
_ROW_LABEL_HEIGHT, _COLUMN_LABEL_WIDTH = 12, 26
_GRID_COLOUR = "#E3E6EA"


class _TrafficDrawing:
    """One picture: the matrix, and next to it a list of its largest cells."""

    def __init__(self, trace: Trace, found: TrafficMatrix, part: RunSelection, name: str) -> None:
        self.trace = trace
        self.found = found
        self.part = part
        self.name = clipped(name, 60)
        self.row_count = len(found.sent)
        self.most = int(found.sent.max())
        self.least = int(found.sent[found.sent > 0].min())
        self.cell_size = _CELL_SIZES[bisect_left(_CELL_COUNTS, self.row_count)]
        self.side = self.row_count * self.cell_size
        self.drawing = SvgDrawing()
        self.ranks_per_node = max(int(trace.header.get("local_size") or trace.world_size), 1)
        has_whole_nodes = found.block == 1 and not found.ranks
        self.shows_nodes = has_whole_nodes and 1 < self.ranks_per_node < trace.world_size

    def svg(self) -> str:
        drawing = self.drawing
        drawing.text(16, 26, f"{self.name}: bytes from rank to rank", 17, bold=True)
        lines = [self._about(), self._algorithms()]
        for number, line in enumerate(line for line in lines if line):
            drawing.text(16, 46 + 18 * number, line, 12, colour=GREY)
        legend_width = self._legend()
        left = 26 + max(text_width(self._label(row), 11) for row in range(self.row_count))
        drawing.text(left, _TOP - 22, "to", 12, bold=True)
        drawing.text(16, _TOP - 22, "from", 12, bold=True)
        self._grid(left)
        senders, receivers = self.found.sent.nonzero()
        for sender, receiver in zip(senders.tolist(), receivers.tolist(), strict=True):
            self._cell(sender, receiver, left)
        self._labels(left)
        self._nodes(left)
        list_width, list_bottom = self._largest_cells(left + self.side + 30)
        right = max(
            max(text_width(line, 12) for line in lines) + 32,
            legend_width,
            left + self.side + 24,
            list_width,
        )
        bottom = max(_TOP + self.side + 24, list_bottom)
        return drawing.document(right, bottom, f"{self.name}: traffic")

    # --- texts ---
    def _label(self, row: int) -> str:
        block = self.found.block
        if block == 1:
            return f"rank {self._number(row)}"
        if block == self.ranks_per_node:
            return f"node {row}"
        last = min((row + 1) * block, self.trace.world_size) - 1
        return f"ranks {row * block}-{last}"

    def _number(self, row: int) -> int:
        """The rank, or the block, of a row."""
        return self.found.ranks[row] if self.found.ranks else row

    def _about(self) -> str:
        block, total = self.found.block, show_bytes(int(self.found.sent.sum()))
        facts = [selection_text(self.part, self.trace.world_size), f"{total} in total"]
        if block > 1:
            facts.append(
                f"{self.trace.world_size} ranks, {block} per row; "
                "the diagonal is the traffic within a row's ranks"
            )
        return "; ".join(fact for fact in facts if fact)

    def _algorithms(self) -> str:
        algorithms = [f"{op} by {name}" for op, name in sorted(self.found.by.items())]
        text = "messages as sent"
        return clipped(f"{text}; {', '.join(algorithms)}" if algorithms else text, 150)

    # --- the matrix ---
    def _grid(self, left: float) -> None:
        for number in range(self.row_count + 1):
            offset = number * self.cell_size
            x, y = left + offset, _TOP + offset
            self.drawing.line((left, y), (left + self.side, y), _GRID_COLOUR, 0.8)
            self.drawing.line((x, _TOP), (x, _TOP + self.side), _GRID_COLOUR, 0.8)

    def _cell(self, sender: int, receiver: int, left: float) -> None:
        size, nbytes = self.cell_size, int(self.found.sent[sender, receiver])
        x, y = left + receiver * size, _TOP + sender * size
        shade, text = self._shade(nbytes), show_bytes(nbytes)
        tip = f"{self._label(sender)} to {self._label(receiver)}: {text}"
        self.drawing.rect(x, y, size, size, _COLOUR_RAMP[shade], tip, _GRID_COLOUR)
        if text_width(text, 9) + 2 <= size:
            ink = WHITE if shade >= len(_COLOUR_RAMP) // 2 else INK
            centre_x, centre_y = x + size / 2, y + size / 2
            self.drawing.text(centre_x, centre_y + 3, text, 9, anchor="middle", colour=ink)

    def _shade(self, nbytes: int) -> int:
        """The index on the colour ramp, which is logarithmic."""
        if self.most == self.least:
            return len(_COLOUR_RAMP) - 3
        share = log(nbytes / self.least) / log(self.most / self.least)
        return min(int(share * len(_COLOUR_RAMP)), len(_COLOUR_RAMP) - 1)

    def _labels(self, left: float) -> None:
        """Names of rows and columns; only of every n-th if they would overlap."""
        row_step = max(ceil(_ROW_LABEL_HEIGHT / self.cell_size), 1)
        column_step = ceil(_COLUMN_LABEL_WIDTH / self.cell_size)
        for number in range(self.row_count):
            centre = (number + 0.5) * self.cell_size
            if number % row_step == 0:
                label = self._label(number)
                self.drawing.text(left - 6, _TOP + centre + 4, label, 11, anchor="end", colour=GREY)
            if number % column_step == 0:
                label = str(self._number(number))
                self.drawing.text(left + centre, _TOP - 6, label, 11, anchor="middle", colour=GREY)

    def _nodes(self, left: float) -> None:
        """Frames around the traffic within a node."""
        if not self.shows_nodes:
            return
        for first in range(0, self.row_count, self.ranks_per_node):
            offset = first * self.cell_size
            side = min(self.ranks_per_node, self.row_count - first) * self.cell_size
            self.drawing.outline(left + offset, _TOP + offset, side, side, INK, 1.6)

    # --- around the matrix ---
    def _legend(self) -> float:
        """The colour ramp with its smallest and largest value; returns its right edge."""
        if self.most > self.least:
            x = self._legend_text(16.0, f"least {show_bytes(self.least)}")
            for colour in _COLOUR_RAMP:
                self.drawing.rect(x, 78, 16, 12, colour, border=LINE_COLOUR)
                x += 16
            x = self._legend_text(x + 8, f"most {show_bytes(self.most)}")
        else:
            colour = _COLOUR_RAMP[self._shade(self.most)]
            self.drawing.rect(16.0, 78, 16, 12, colour, border=LINE_COLOUR)
            x = self._legend_text(40.0, f"every pair {show_bytes(self.most)}")
        if self.shows_nodes:
            self.drawing.outline(x + 8, 78, 16, 12, INK, 1.6)
            x = self._legend_text(x + 30, "within a node") - 8
        return x + 16

    def _legend_text(self, x: float, text: str) -> float:
        self.drawing.text(x, 88, text, 12)
        return x + text_width(text, 12) + 8

    def _largest_cells(self, x: float) -> tuple[float, float]:
        """List the largest cells in words; returns the right edge and the bottom of the list."""
        sent = self.found.sent
        senders, receivers = sent.nonzero()
        pairs = zip(senders.tolist(), receivers.tolist(), strict=True)
        cells = sorted((-int(sent[pair]), *pair) for pair in pairs)
        self.drawing.text(x, _TOP + 6, "largest", 12, bold=True)
        lines = [
            f"{self._label(sender)} to {self._label(receiver)}: {show_bytes(-negated_nbytes)}"
            for negated_nbytes, sender, receiver in cells[:_MAX_LISTED_PAIRS]
        ]
        if len(cells) > _MAX_LISTED_PAIRS:
            lines.append(f"and {len(cells) - _MAX_LISTED_PAIRS} more pairs")
        for number, line in enumerate(lines):
            self.drawing.text(x, _TOP + 26 + 18 * number, line, 11)
        right = x + max(text_width(line, 11) for line in lines) + 16
        return right, _TOP + 40 + 18 * len(lines)


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
            "Bytes from rank to rank: stages exchange activations, replicas exchange gradients.",
        ),
        GalleryExample(
            "strategies/gpt3_175b",
            "Tensor parallelism stays within a node; the pipeline crosses nodes.",
        ),
    ),
)
