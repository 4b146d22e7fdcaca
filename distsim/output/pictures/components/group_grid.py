"""Draws nodes and their GPUs as grids that show the groups of a program, at any world size.

There is a panel for each axis or declared family of groups. A panel shows which ranks share a
group, and how many bytes the ranks of a group exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log2, sqrt
from typing import NamedTuple

import numpy as np

from distsim.common.units import show_bytes
from distsim.operations.core.resolved_call import RankGroup
from distsim.output.pictures.components.call_labels import ranks_in_words
from distsim.output.pictures.drawing.box_diagram import clipped, text_width
from distsim.output.pictures.drawing.palette import FILLS, GREY, INK, LINE_COLOUR, WHITE
from distsim.output.pictures.drawing.svg import SvgDrawing
from distsim.output.pictures.drawing.svg import number_text as written
from distsim.program.model import Program
from distsim.trace.model import Trace

#: The largest number of panels, and the approximate width of the page in pixels.
MAX_PANELS, _PAGE_WIDTH = 8, 1580.0
_HEADER_HEIGHT, _MARGIN, _PANEL_GAP = 96.0, 16.0, 34.0


class _CellSize(NamedTuple):
    """Of a cell, in pixels, with the size of the number in it (0: none)."""

    cell: float
    text: int


def group_grid_svg(
    program: Program, families: dict[str, list[RankGroup]], trace: Trace | None = None
) -> str:
    """The grids as SVG text. ``trace``: a run; its bytes are shown."""
    return _GroupGrid(program, families, trace).svg()


class _GroupGrid:
    """One picture: a panel for each family of groups, each with a grid of all nodes."""

    def __init__(
        self, program: Program, families: dict[str, list[RankGroup]], trace: Trace | None
    ) -> None:
        self.program, self.trace, self.draw = program, trace, SvgDrawing()
        self.families = dict(list(families.items())[:MAX_PANELS])
        self.left_out = len(families) - len(self.families)
        world, local = program.world_size, min(program.local_size, program.world_size)
        self.size = (
            _CellSize(30.0, 11)
            if world <= 64
            else _CellSize(22.0, 9)
            if world <= 512
            else _CellSize(10.0, 0)
        )
        self.across = local if local <= 8 else ceil(sqrt(local)) if local <= 64 else 16
        self.down = ceil(local / self.across)
        wide = self.across * self.size.cell + 12
        per_row = max(
            min(
                int((_PAGE_WIDTH - _MARGIN) / wide),
                ceil(sqrt(program.nodes * self.down / self.across * 2.4)),
            ),
            1,
        )
        self.per_row = program.nodes if per_row >= program.nodes else 2 ** int(log2(per_row))
        self.node_size = (wide, self.down * self.size.cell + (20 if self.size.text else 6))

    def svg(self) -> str:
        program = self.program
        title = f"{clipped(program.name, 60)}: nodes, GPUs and groups"
        self.draw.text(_MARGIN, 26, title, 17, bold=True)
        mesh = " × ".join(f"{clipped(axis, 24)} {size}" for axis, size in program.mesh.items())
        about = f"{program.world_size} ranks on {program.nodes} node{'s' * (program.nodes > 1)}"
        about += f", mesh {mesh} (outermost first)" if mesh else ""
        self.draw.text(_MARGIN, 46, about, 12, colour=GREY)
        hint = (
            "Each frame is a node and each cell a GPU (hover over it for its rank). "
            "Adjacent cells of one colour form a group; dark lines separate groups."
        )
        self.draw.text(_MARGIN, 66, hint, 12, colour=GREY)
        self.draw.outline(_MARGIN + 1, 77, 12, 12, INK, 2.4)
        self.draw.text(_MARGIN + 20, 88, "the group of rank 0 (or the first group)", 12)
        y, right = _HEADER_HEIGHT + 12, text_width(hint, 12) + 40
        panels = list(self.families.items()) or [("", [])]
        wide = self.node_size[0] * self.per_row
        titles = [self._titles(name, groups) for name, groups in panels]
        title_widths = [_title_width(lines) for lines in titles]
        step = max(wide, *title_widths) + 36
        columns = max(int((max(_PAGE_WIDTH, step) - _MARGIN) / step), 1)
        rows = ceil(program.nodes / self.per_row)
        high = rows * self.node_size[1] + 44 + _PANEL_GAP
        for number, ((_, groups), lines) in enumerate(zip(panels, titles, strict=True)):
            x, top = _MARGIN + number % columns * step, y + number // columns * high
            for i, line in enumerate(lines):
                self.draw.text(
                    x,
                    top + 12 + 17 * i,
                    line,
                    11 if i else 13,
                    bold=not i,
                    colour=GREY if i else INK,
                )
            self._panel(groups, x, top + 40)
            right = max(right, x + step)
        bottom = y + ceil(len(panels) / columns) * high
        if self.left_out:
            self.draw.text(
                _MARGIN,
                bottom,
                f"{self.left_out} more families of groups are not drawn; select one with --group",
                11,
                colour=GREY,
            )
            bottom += 20
        return self.draw.document(right, bottom, title)

    def _titles(self, name: str, groups: Sequence[RankGroup]) -> tuple[str, str]:
        """The number of groups, and the bytes that their ranks exchange."""
        if not groups:
            return "no groups besides the default group", ""
        sizes = sorted({g.size for g in groups})
        of = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        local = all(self.program.node(g.ranks[0]) == self.program.node(g.ranks[-1]) for g in groups)
        spread = "within a node" if local else "across nodes"
        title = (
            f"{clipped(name, 24)}: {len(groups)} group{'s' * (len(groups) > 1)} of {of}, {spread}"
        )
        return title, self._bytes(groups) or ranks_in_words(groups[0].ranks, 3)

    def _bytes(self, groups: Sequence[RankGroup]) -> str:
        """``16 MiB per rank: all_reduce 12 MiB, send 4 MiB``."""
        trace = self.trace
        if trace is None:
            return ""
        mine = (
            np.isin(trace["group"], [g.id for g in groups])
            & (trace["match"] >= 0)
            & (trace["nbytes"] > 0)
        )
        sums: dict[str, int] = {}
        for op in np.unique(trace["op"][mine]).tolist():
            sums[trace.text("op", op)] = int(trace["nbytes"][mine & (trace["op"] == op)].sum())
        members = len({r for g in groups for r in g.ranks})
        if not sums:
            return "no traffic in this run"
        first = sorted(sums.items(), key=lambda pair: (-pair[1], pair[0]))[:3]
        parts = ", ".join(f"{op} {show_bytes(total // members)}" for op, total in first)
        return f"{show_bytes(sum(sums.values()) // members)} per rank: {parts}"

    def _place(self, rank: int) -> tuple[int, int]:
        """Column and row of a rank's cell in the grid of all cells."""
        node, local = divmod(rank, self.program.local_size)
        return (
            node % self.per_row * self.across + local % self.across,
            node // self.per_row * self.down + local // self.across,
        )

    def _panel(self, groups: Sequence[RankGroup], x: float, y: float) -> None:
        cell, text = self.size
        of: dict[int, int] = {}
        for place, group in enumerate(groups):
            for rank in group.ranks:
                of.setdefault(rank, place)
        colours, lines = self._colours(groups, of), list[str]()
        for node in range(self.program.nodes):
            left, top = (
                x + node % self.per_row * self.node_size[0],
                y + node // self.per_row * self.node_size[1],
            )
            self.draw.rect(
                left,
                top,
                self.node_size[0] - 4,
                self.node_size[1] - 4,
                "#F5F7FA",
                f"node {node}",
                LINE_COLOUR,
            )
            if text:
                self.draw.text(left + 5, top + 11, f"node {node}", 9, colour=GREY)
            first = node * self.program.local_size
            for rank in range(first, min(first + self.program.local_size, self.program.world_size)):
                local = rank - first
                at = (
                    left + 4 + local % self.across * cell,
                    top + (15 if text else 2) + local // self.across * cell,
                )
                self._cell(rank, at, groups, of.get(rank, -1), colours)
                lines += self._parted(rank, local, at, of)
        if lines:
            self.draw.path("".join(lines), "", "", INK, 2.0 if text else 1.0)

    def _parted(
        self, rank: int, local: int, at: tuple[float, float], of: dict[int, int]
    ) -> list[str]:
        """Lines to the left of a cell and over it, where the cell there is of another group: for
        print, and eyes without colours.
        """
        side, (x, y) = written(self.size[0] - 1), at
        mine, found = of.get(rank, -1), []
        if local % self.across and of.get(rank - 1, -1) != mine:
            found.append(f"M{written(x - 0.5)} {written(y)}v{side}")
        if local >= self.across and of.get(rank - self.across, -1) != mine:
            found.append(f"M{written(x)} {written(y - 0.5)}h{side}")
        return found

    def _cell(
        self,
        rank: int,
        at: tuple[float, float],
        groups: Sequence[RankGroup],
        number: int,
        colours: Sequence[str],
    ) -> None:
        cell, text = self.size
        group = groups[number] if number >= 0 else None
        said = (
            f"{clipped(group.name, 40)}, group rank {group.group_rank(rank)} of {group.size}"
            if group
            else "in none of these groups"
        )
        fill = colours[number] if group else WHITE
        self.draw.rect(
            *at, cell - 1, cell - 1, fill, f"rank {rank}: {said}", "" if group else LINE_COLOUR
        )
        if number == 0:
            self.draw.outline(at[0] + 1, at[1] + 1, cell - 3, cell - 3, INK, 2.0 if text else 1.5)
        if text and text_width(str(rank), text) + 4 <= cell:
            self.draw.text(
                at[0] + (cell - 1) / 2,
                at[1] + cell / 2 + text * 0.35,
                str(rank),
                text,
                anchor="middle",
            )

    def _colours(self, groups: Sequence[RankGroup], of: dict[int, int]) -> list[str]:
        """A fill for each group, so that two whose cells touch have different ones; the least used
        of those that are left.
        """
        grid = {self._place(rank): number for rank, number in of.items()}
        neighbours: dict[int, set[int]] = {}
        for (x, y), number in grid.items():
            for other in (grid.get((x + 1, y)), grid.get((x, y + 1))):
                if other is not None and other != number:
                    neighbours.setdefault(number, set()).add(other)
                    neighbours.setdefault(other, set()).add(number)
        chosen: list[int] = []
        used = [0] * len(FILLS)
        for number in range(len(groups)):
            taken = {chosen[o] for o in neighbours.get(number, ()) if o < number}
            free = [i for i in range(len(FILLS)) if i not in taken]
            pick = min(free or range(len(FILLS)), key=lambda i: (used[i], i))
            used[pick] += 1
            chosen.append(pick)
        return [FILLS[i] for i in chosen]


def _title_width(lines: Sequence[str]) -> float:
    """The first line of a title is larger and bold."""
    first, *rest = lines
    return max([text_width(first, 13, True), *(text_width(line, 11) for line in rest)])
