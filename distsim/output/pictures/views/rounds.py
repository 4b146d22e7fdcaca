"""One operation round by round, as a strip of frames: which rank holds what, and who sends which
chunk to whom.

A frame is a table: a row for each rank, a column for each chunk. A letter is a rank's contribution,
a number how many are summed; an arrow is a transfer of the round that led to the frame, and its end
has a frame. The rounds are those of the algorithm (`distsim.operations.core.algorithms`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from distsim.common.errors import UsageError
from distsim.operations.core.algorithms import (
    ChunkContents,
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
from distsim.output.pictures.views.op import named_operation, shown_ranks

RankChunks = list[dict[int, ChunkContents]]

_LETTERS = "abcdefgh"
_ROW_HEIGHT, _PAGE_WIDTH, _GAP = 22.0, 1240.0, 34.0
#: Fills of sums by how complete they are, and of the complete one: lightness 90 to 40 (CIE L*).
_PARTIAL_FILLS, _COMPLETE_FILL = ("#D5EBDD", "#B2DAC1", "#8CC7A3"), "#1E6B4A"
_ARROW_COLOUR = "#7A2E00"


def rounds_svg(row: type[Operation], members: Sequence[int], algorithm: str = "") -> str:
    """The strip as SVG text, for a group of these (global) ranks, at most eight. Raises UsageError
    where the row has no such algorithm.
    """
    if not row.algorithms or row.kind == "p2p":
        raise UsageError(
            f"{row.op} {'is one message: it ' if row.kind == 'p2p' else ''}has no rounds",
            f"`--view op --op {row.op}` draws what it does; "
            "all_reduce, all_gather, broadcast and the other collectives have rounds",
        )
    name = algorithm or next(iter(row.algorithms))
    if name not in row.algorithms:
        raise UsageError(
            f"{row.op} has no algorithm {algorithm}", f"there is {', '.join(row.algorithms)}"
        )
    return _RoundsDrawing(row, name, tuple(members)).svg()


class _RoundsDrawing:
    def __init__(self, row: type[Operation], name: str, members: tuple[int, ...]) -> None:
        self.row, self.name, self.members, self.n = row, name, members, len(members)
        self.algorithm: CollectiveAlgorithm = row.algorithms[name]
        self.rounds: list[Round] = self.algorithm.rounds(self.n, 0)
        givers = range(self.n) if row.gives != "root" else (0,)
        held: RankChunks = initial_chunks(self.algorithm.chunking, self.n, givers)
        self.frames: list[RankChunks] = [held]
        for one in self.rounds:
            held = apply_rounds([one], held)
            self.frames.append(held)
        chunks: set[int] = set()
        for frame in self.frames:
            chunks.update(*frame)
        count = max(chunks, default=0) + 1
        self.chunks = count
        self.cell = 32.0 if count <= 8 else 22.0 if count <= 16 else 10.0
        self.sums = row.reduces or self.algorithm.chunking == "token"
        self.draw = SvgDrawing()

    def svg(self) -> str:
        n, draw = self.n, self.draw
        said = f"{len(self.rounds)} round{'s' * (len(self.rounds) != 1)}"
        said += (
            f" = 2(n − 1) with n = {n}"
            if self._passes() == 2
            else f" = n − 1 with n = {n}"
            if self._passes() == 1
            else ""
        )
        title = f"{self.row.op} by {self.name}, among {n} ranks: {said}"
        draw.text(16, 26, title, 17, bold=True)
        draw.text(16, 46, self._about(), 12, colour=GREY)
        right = max(
            self._legend(), text_width(title, 17, True) + 32, text_width(self._about(), 12) + 32
        )
        side = max(text_width(self._rank(r), 11) for r in range(n)) + 10
        wide, high = self.chunks * self.cell + side + _GAP, n * _ROW_HEIGHT + 46
        per_row = max(min(int((_PAGE_WIDTH - 16) // wide), len(self.frames)), 1)
        for place, frame in enumerate(self.frames):
            x, y = 16 + side + place % per_row * wide, 122 + place // per_row * high
            self._frame(place, frame, x, y)
        right = max(right, 16 + per_row * wide)
        return draw.document(right, 112 + ceil(len(self.frames) / per_row) * high, title)

    def _passes(self) -> int:
        return self.algorithm.ring_passes(self.n)

    def _about(self) -> str:
        what = {
            "whole": "the buffer is one chunk",
            "split": f"the buffer is cut into {self.n} chunks",
            "origin": "chunk c is what rank c gives",
            "target": "chunk c is what is meant for rank c",
            "pair": "a chunk for each pair of ranks: from a to each, from b to each, …",
            "token": "no data: a chunk is the word that a rank has come",
        }[self.algorithm.chunking]
        others = [name for name in self.row.algorithms if name != self.name]
        more = f"; also by {', '.join(others)} (--algorithm)" if others else ""
        root = f"; rank {self.members[0]} is the root" if self.row.root_field else ""
        return clipped(f"a row for each rank, a column for each chunk; {what}{root}{more}", 150)

    def _rank(self, rank: int) -> str:
        return f"rank {self.members[rank]}"

    def _legend(self) -> float:
        draw, at = self.draw, 16.0
        keys = [("a", fill_colour(0), INK, f"what rank {self.members[0]} gives")]
        if self.sums:
            some = "ab" if self.n > 2 else ""
            keys += (
                [(some, _PARTIAL_FILLS[0], INK, "some combined; from four on their number")]
                if some
                else []
            )
            keys += [("all", _COMPLETE_FILL, WHITE, "all combined")]
        for word, colour, ink, said in keys:
            draw.rect(at, 60, 26, 18, colour, border=LINE_COLOUR)
            draw.text(at + 13, 73, word, 11, anchor="middle", colour=ink)
            draw.text(at + 32, 73, said, 12)
            at += 32 + text_width(said, 12) + 18
        draw.path(f"M{number_text(at)} 76q10 -16 22 -4", "", "", _ARROW_COLOUR, 1.8)
        draw.text(at + 30, 73, "sent in this round, to where the dot is", 12)
        return at + 30 + text_width("sent in this round, to where the dot is", 12) + 16

    def _frame(self, place: int, held: RankChunks, x: float, y: float) -> None:
        """The state after so many rounds, and what moved in the last of them."""
        moved = self.rounds[place - 1] if place else []
        self.draw.text(x, y - 8, f"round {place}" if place else "before", 12, bold=True)
        for rank in range(self.n):
            top = y + rank * _ROW_HEIGHT
            self.draw.text(x - 6, top + 15, self._rank(rank), 11, anchor="end", colour=GREY)
            for chunk in range(self.chunks):
                self._cell(held[rank].get(chunk), x + chunk * self.cell, top)
        for one in moved:
            at = x + one.chunk * self.cell
            y1, y2 = (y + (r + 0.5) * _ROW_HEIGHT for r in (one.src, one.dst))
            self.draw.outline(
                at + 1,
                y + one.dst * _ROW_HEIGHT + 1,
                self.cell - 2,
                _ROW_HEIGHT - 2,
                _ARROW_COLOUR,
                1.8,
            )
            self._arc(
                at + self.cell - 5,
                y1,
                y2,
                f"rank {self.members[one.src]} to rank {self.members[one.dst]}, chunk {one.chunk}",
            )

    def _arc(self, x: float, y1: float, y2: float, tip: str) -> None:
        """From row to row along the right side of a column, where no letter is written."""
        down = 1 if y2 > y1 else -1
        bend = min(4 + abs(y2 - y1) / 12, 9.0)
        start = f"{number_text(x)} {number_text(y1 + 3 * down)}"
        control = f"{number_text(x + bend)} {number_text((y1 + y2) / 2)}"
        end = f"{number_text(x)} {number_text(y2 - 2 * down)}"
        steps = f"M{start}Q{control} {end}"
        self.draw.path(steps, "", "", WHITE, 3.2)
        self.draw.path(steps, "", tip, _ARROW_COLOUR, 1.5)
        self.draw.circle(x, y2 - 2 * down, 3.0, _ARROW_COLOUR, "", WHITE)

    def _cell(self, what: ChunkContents | None, x: float, y: float) -> None:
        givers = sorted({rank for rank, _ in what or ()})
        word = "".join(_LETTERS[r] for r in givers) if len(givers) <= 3 else str(len(givers))
        colour, ink = WHITE if not givers else fill_colour(givers[0]), INK
        if len(givers) > 1:
            whole = len(givers) == self.n
            word = "all" if whole else word
            colour = (
                _COMPLETE_FILL
                if whole
                else _PARTIAL_FILLS[min((len(givers) - 2) * 3 // max(self.n - 2, 1), 2)]
            )
            ink = WHITE if whole else INK
        tip = (
            f"{len(givers)} of {self.n}: of {', '.join(self._rank(r) for r in givers)}"
            if givers
            else "nothing"
        )
        self.draw.rect(
            x, y, self.cell, _ROW_HEIGHT, colour if givers else PALE_FILL, tip, LINE_COLOUR
        )
        size = 11 if self.cell >= 30 else 9
        if word and self.cell > 10:
            self.draw.text(x + (self.cell - 7) / 2, y + 15, word, size, anchor="middle", colour=ink)


def _draw(subject: PictureInput) -> str:
    return rounds_svg(
        named_operation(subject, "rounds"), shown_ranks(subject, "rounds"), subject.algorithm
    )


VIEW = PictureView(
    _draw,
    of="operation",
    formats=("svg", "png", "pdf"),
    examples=(
        GalleryExample(
            "all_reduce",
            "A ring: a sum grows on its way round, then goes round once more; 2(n − 1) rounds.",
        ),
        GalleryExample("broadcast", "A tree: in each round twice as many ranks have it."),
        GalleryExample("all_to_all", "Every pair of ranks has a chunk of its own."),
    ),
)
