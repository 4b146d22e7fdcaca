"""The algorithm of a collective, round by round: the chunks that each rank holds, and the transfers
of each round.

There is a table for the start and for each round: a row per rank, a column per chunk. A letter is
the contribution of a rank, a number counts combined contributions. An arrow is a transfer of the
round; its receiving cell is framed. The rounds come from `distsim.operations.core.algorithms`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from distsim.common.errors import UsageError
from distsim.common.message_text import did_you_mean
from distsim.operations.core.algorithms import (
    ChunkContents,
    ChunkTransfer,
    CollectiveAlgorithm,
    Round,
    apply_rounds,
    initial_chunks,
)
from distsim.operations.core.operation_base import Operation
from distsim.output.pictures.components.view_interface import (
    GalleryExample,
    PictureInput,
    PictureView,
)
from distsim.output.pictures.drawing.box_diagram import clipped, text_width
from distsim.output.pictures.drawing.palette import (
    GREY,
    INK,
    LINE_COLOUR,
    PALE_FILL,
    WHITE,
    fill_colour,
)
from distsim.output.pictures.drawing.svg import SvgDrawing, number_text
from distsim.output.pictures.views.operation import named_operation, shown_ranks

RankChunks = list[dict[int, ChunkContents]]

_LETTERS = "abcdefgh"
#: Narrower cells have no letters. In pixels.
_MIN_LETTERED_CELL = 10
_ROW_HEIGHT, _PAGE_WIDTH, _GAP = 22.0, 1240.0, 34.0
#: Fills of sums by how complete they are, and of the complete one: lightness 90 to 40 (CIE L*).
_PARTIAL_FILLS, _COMPLETE_FILL = ("#D5EBDD", "#B2DAC1", "#8CC7A3"), "#1E6B4A"
_ARROW_COLOUR = "#7A2E00"


def algorithm_svg(row: type[Operation], members: Sequence[int], algorithm: str = "") -> str:
    """Draw an algorithm of an operation as SVG text, for a group of at most eight (global) ranks.

    Raises UsageError if the operation has no such algorithm.
    """
    if not row.algorithms or row.kind == "p2p":
        raise UsageError(
            f"{row.op} has no algorithm with rounds",
            f"`--view operation --op {row.op}` draws what it does; "
            "all_reduce, all_gather, broadcast and the other collectives have algorithms",
        )
    name = algorithm or next(iter(row.algorithms))
    if name not in row.algorithms:
        raise UsageError(
            f"{row.op} has no algorithm `{algorithm}`{did_you_mean(algorithm, row.algorithms)}",
            f"known: {', '.join(row.algorithms)}",
        )
    return _AlgorithmDrawing(row, name, tuple(members)).svg()


class _AlgorithmDrawing:
    """One picture. ``frames[i]`` is what each rank holds after i rounds."""

    def __init__(self, row: type[Operation], name: str, members: tuple[int, ...]) -> None:
        self.row = row
        self.name = name
        self.members = members
        self.size = len(members)
        self.algorithm: CollectiveAlgorithm = row.algorithms[name]
        self.rounds: list[Round] = self.algorithm.rounds(self.size, 0)
        givers = range(self.size) if row.gives != "root" else (0,)
        held: RankChunks = initial_chunks(self.algorithm.chunking, self.size, givers)
        self.frames: list[RankChunks] = [held]
        for one_round in self.rounds:
            held = apply_rounds([one_round], held)
            self.frames.append(held)
        chunks: set[int] = set()
        for frame in self.frames:
            chunks.update(*frame)
        self.chunk_count = max(chunks, default=0) + 1
        self.cell_width = _cell_width(self.chunk_count)
        self.combines = row.reduces or self.algorithm.chunking == "token"
        self.drawing = SvgDrawing()

    def svg(self) -> str:
        title, about = self._title(), self._about()
        self.drawing.heading(title, [about])
        legend_width = self._legend()
        names_width = max(text_width(self._rank(rank), 11) for rank in range(self.size)) + 10
        frame_width = self.chunk_count * self.cell_width + names_width + _GAP
        frame_height = self.size * _ROW_HEIGHT + 46
        fitting = int((_PAGE_WIDTH - 16) // frame_width)
        per_row = max(min(fitting, len(self.frames)), 1)
        for number, frame in enumerate(self.frames):
            row, column = divmod(number, per_row)
            x = 16 + names_width + column * frame_width
            self._frame(number, frame, x, 122 + row * frame_height)
        right = max(
            legend_width,
            text_width(title, 17, True) + 32,
            text_width(about, 12) + 32,
            16 + per_row * frame_width,
        )
        bottom = 112 + ceil(len(self.frames) / per_row) * frame_height
        return self.drawing.document(right, bottom, title)

    def _title(self) -> str:
        count = len(self.rounds)
        formula = {1: "n − 1", 2: "2(n − 1)"}.get(self.algorithm.ring_passes(self.size))
        reason = f" = {formula} with n = {self.size}" if formula else ""
        rounds = f"{count} round{'s' * (count != 1)}{reason}"
        return f"{self.row.op} by {self.name}, among {self.size} ranks: {rounds}"

    def _about(self) -> str:
        chunks = {
            "whole": "the buffer is one chunk",
            "split": f"the buffer is cut into {self.size} chunks",
            "origin": "chunk c comes from rank c",
            "target": "chunk c goes to rank c",
            "pair": "one chunk for each pair of ranks: from a to each, from b to each, …",
            "token": "no data: a chunk is the notice that a rank has arrived",
        }[self.algorithm.chunking]
        others = [name for name in self.row.algorithms if name != self.name]
        alternatives = f"; other algorithms (--algorithm): {', '.join(others)}" if others else ""
        root = f"; rank {self.members[0]} is the root" if self.row.root_field else ""
        text = f"one row per rank, one column per chunk; {chunks}{root}{alternatives}"
        return clipped(text, 150)

    def _rank(self, rank: int) -> str:
        """The name of a group rank: its global number."""
        return f"rank {self.members[rank]}"

    def _legend(self) -> float:
        """Draw the legend; returns its right edge."""
        drawing, x = self.drawing, 16.0
        keys = [("a", fill_colour(0), INK, f"data of rank {self.members[0]}")]
        if self.combines and self.size > 2:
            words = "several combined (from four ranks on: their number)"
            keys.append(("ab", _PARTIAL_FILLS[0], INK, words))
        if self.combines:
            keys.append(("all", _COMPLETE_FILL, WHITE, "all combined"))
        for letters, fill, ink, words in keys:
            drawing.rect(x, 60, 26, 18, fill, border=LINE_COLOUR)
            drawing.text(x + 13, 73, letters, 11, anchor="middle", colour=ink)
            drawing.text(x + 32, 73, words, 12)
            x += 32 + text_width(words, 12) + 18
        words = "transfer of this round (the dot marks the receiver)"
        drawing.path(f"M{number_text(x)} 76q10 -16 22 -4", "", "", _ARROW_COLOUR, 1.8)
        drawing.text(x + 30, 73, words, 12)
        return x + 30 + text_width(words, 12) + 16

    def _frame(self, number: int, held: RankChunks, x: float, y: float) -> None:
        """The state after ``number`` rounds, and the transfers of the last of them."""
        drawing = self.drawing
        drawing.text(x, y - 8, f"round {number}" if number else "before", 12, bold=True)
        for rank in range(self.size):
            top = y + rank * _ROW_HEIGHT
            drawing.text(x - 6, top + 15, self._rank(rank), 11, anchor="end", colour=GREY)
            for chunk in range(self.chunk_count):
                self._cell(held[rank].get(chunk), x + chunk * self.cell_width, top)
        for transfer in self.rounds[number - 1] if number else ():
            self._transfer(transfer, x + transfer.chunk * self.cell_width, y)

    def _transfer(self, transfer: ChunkTransfer, x: float, y: float) -> None:
        """Frame the cell that receives a chunk, and draw an arc to it. ``x``: of the column."""
        src, dst = transfer.src, transfer.dst
        width, height = self.cell_width - 2, _ROW_HEIGHT - 2
        top = y + dst * _ROW_HEIGHT + 1
        self.drawing.outline(x + 1, top, width, height, _ARROW_COLOUR, 1.8)
        tip = f"{self._rank(src)} to {self._rank(dst)}, chunk {transfer.chunk}"
        src_y, dst_y = (y + (rank + 0.5) * _ROW_HEIGHT for rank in (src, dst))
        # The arc runs along the right side of the column, where no letter is written.
        self._arc(x + self.cell_width - 5, src_y, dst_y, tip)

    def _arc(self, x: float, y1: float, y2: float, tip: str) -> None:
        direction = 1 if y2 > y1 else -1
        bend = min(4 + abs(y2 - y1) / 12, 9.0)
        start = f"{number_text(x)} {number_text(y1 + 3 * direction)}"
        control = f"{number_text(x + bend)} {number_text((y1 + y2) / 2)}"
        end = f"{number_text(x)} {number_text(y2 - 2 * direction)}"
        steps = f"M{start}Q{control} {end}"
        # A white line below the coloured one separates arcs that cross.
        self.drawing.path(steps, "", "", WHITE, 3.2)
        self.drawing.path(steps, "", tip, _ARROW_COLOUR, 1.5)
        self.drawing.circle(x, y2 - 2 * direction, 3.0, _ARROW_COLOUR, "", WHITE)

    def _cell(self, contents: ChunkContents | None, x: float, y: float) -> None:
        """A chunk on one rank: the letters of the ranks whose data it combines."""
        givers = sorted({rank for rank, _ in contents or ()})
        word, fill, ink = self._cell_look(givers)
        tip = "nothing"
        if givers:
            names = ", ".join(self._rank(rank) for rank in givers)
            tip = f"data of {len(givers)} of {self.size} ranks: {names}"
        self.drawing.rect(x, y, self.cell_width, _ROW_HEIGHT, fill, tip, LINE_COLOUR)
        if word and self.cell_width > _MIN_LETTERED_CELL:
            size = 11 if self.cell_width >= 30 else 9
            centre = x + (self.cell_width - 7) / 2
            self.drawing.text(centre, y + 15, word, size, anchor="middle", colour=ink)

    def _cell_look(self, givers: Sequence[int]) -> tuple[str, str, str]:
        """The word, the fill and the text colour of a cell."""
        if not givers:
            return "", PALE_FILL, INK
        if len(givers) == 1:
            return _LETTERS[givers[0]], fill_colour(givers[0]), INK
        if len(givers) == self.size:
            return "all", _COMPLETE_FILL, WHITE
        word = "".join(_LETTERS[rank] for rank in givers) if len(givers) <= 3 else str(len(givers))
        share = (len(givers) - 2) * len(_PARTIAL_FILLS) // max(self.size - 2, 1)
        return word, _PARTIAL_FILLS[min(share, len(_PARTIAL_FILLS) - 1)], INK


def _cell_width(chunk_count: int) -> float:
    """In pixels: narrower if there are many chunks."""
    if chunk_count <= 8:
        return 32.0
    return 22.0 if chunk_count <= 16 else 10.0


def _draw(subject: PictureInput) -> str:
    return algorithm_svg(
        named_operation(subject, "algorithm"),
        shown_ranks(subject, "algorithm"),
        subject.algorithm,
    )


VIEW = PictureView(
    _draw,
    of="operation",
    formats=("svg", "png", "pdf"),
    examples=(
        GalleryExample(
            "all_reduce",
            "A ring: partial sums travel around it once, then the results; 2(n − 1) rounds.",
        ),
        GalleryExample(
            "broadcast", "A tree: the number of ranks that hold the data doubles in each round."
        ),
        GalleryExample("all_to_all", "Every pair of ranks has a chunk of its own."),
    ),
)
