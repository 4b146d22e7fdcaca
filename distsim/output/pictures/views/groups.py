"""The mesh as nodes and ranks: every rank with its numbers in each group."""

from __future__ import annotations

from itertools import pairwise

from distsim.common.errors import UsageError
from distsim.common.message_text import did_you_mean
from distsim.operations.core.resolved_call import RankGroup
from distsim.output.pictures.components.call_labels import ranks_in_words
from distsim.output.pictures.components.view_interface import (
    GalleryExample,
    PictureInput,
    PictureView,
    require_input,
)
from distsim.output.pictures.drawing.box_diagram import (
    BoxDiagram,
    DiagramEdge,
    DiagramFrame,
    DiagramNode,
    LegendKey,
    TableCell,
    clipped,
)
from distsim.output.pictures.drawing.palette import INK, LINE_COLOUR, PALE_FILL, WHITE, fill_colour
from distsim.program.model import Program

#: More ranks than this are drawn as cells, not as boxes.
MAX_BOXES = 16
_MAX_NODES, _MAX_RANKS_PER_NODE, _BOXES_PER_ROW, _MAX_LEGEND_KEYS = 6, 16, 8, 16


def groups_picture(program: Program) -> BoxDiagram:
    """Nodes as frames and ranks as boxes. In a group's row, ranks of one group have one colour."""
    families = _group_families(program)
    groups = [group for family in families.values() for group in family]
    colours = {group.id: fill_colour(i) for i, group in enumerate(groups)}
    ranks_of_nodes = [_ranks_on(program, m) for m in range(min(program.nodes, _MAX_NODES))]
    nodes, clusters, edges, rows = [], [], [], []
    above = None
    for node_number, ranks in enumerate(ranks_of_nodes):
        nodes += [_rank_node(program, rank, families, colours) for rank in ranks]
        names = [f"rank{rank}" for rank in ranks]
        clusters.append(
            DiagramFrame(
                f"node_number{node_number}",
                f"node {node_number}   NODE_RANK {node_number}",
                tuple(names),
            )
        )
        for i in range(0, len(names), _BOXES_PER_ROW):
            row = names[i : i + _BOXES_PER_ROW]
            rows.append(tuple(row))
            edges += [DiagramEdge(a, b, shown=False) for a, b in pairwise(row)]
            edges += [DiagramEdge(above, row[0], shown=False)] if above else []
            above = row[0]
    mesh = " × ".join(f"{clipped(axis, 24)} {size}" for axis, size in program.mesh.items())
    return BoxDiagram(
        f"{clipped(program.name, 60)}: nodes, ranks and groups",
        f"{program.world_size} ranks on {program.nodes} node{'s' if program.nodes > 1 else ''}"
        + (f", mesh {mesh} (outermost first)" if mesh else "")
        + "; in the default group, the group rank is RANK",
        tuple(nodes),
        tuple(edges),
        tuple(clusters),
        tuple(rows),
        _legend_keys(families, colours),
        _picture_notes(program, families),
    )


def _group_families(program: Program) -> dict[str, list[RankGroup]]:
    """Groups of one declaration or axis: ``stage[replica=0]`` and ``stage[replica=1]`` are both of
    ``stage``.
    """
    found: dict[str, list[RankGroup]] = {}
    for group in program.groups[1:]:
        found.setdefault(group.name.partition("[")[0], []).append(group)
    return found


def _ranks_on(program: Program, node_number: int) -> range:
    first = node_number * program.local_size
    return range(
        first, min(first + min(program.local_size, _MAX_RANKS_PER_NODE), program.world_size)
    )


def _rank_node(
    program: Program, rank: int, families: dict[str, list[RankGroup]], colours: dict[int, str]
) -> DiagramNode:
    table: list[tuple[TableCell, ...]] = [
        (TableCell(f"RANK {rank}", PALE_FILL, bold=True, size=14, span=2, border=False),)
    ]
    table += [
        _table_row("NODE_RANK", program.node(rank)),
        _table_row("LOCAL_RANK", rank % program.local_size),
    ]
    for family, groups in families.items():
        mine = [g for g in groups if rank in g.ranks]
        table += [
            _table_row(clipped(family, 18), f"{g.group_rank(rank)} of {g.size}", colours[g.id])
            for g in mine
        ]
        if not mine:
            table.append(
                (
                    TableCell(clipped(family, 18), WHITE, border=False, left=True),
                    TableCell("–", WHITE, border=False),
                )
            )
    return DiagramNode(f"rank{rank}", (), tuple(table), border=LINE_COLOUR)


def _table_row(name: str, value: object, colour: str = WHITE) -> tuple[TableCell, TableCell]:
    return (
        TableCell(name, colour, border=False, left=True),
        TableCell(str(value), colour, bold=True, colour=INK, border=False),
    )


def _legend_keys(
    families: dict[str, list[RankGroup]], colours: dict[int, str]
) -> tuple[LegendKey, ...]:
    groups = [g for family in families.values() for g in family]
    return tuple(
        LegendKey(colours[g.id], f"{clipped(g.name, 40)}: {ranks_in_words(g.ranks, 4)}")
        for g in groups[:_MAX_LEGEND_KEYS]
    )


def _picture_notes(program: Program, families: dict[str, list[RankGroup]]) -> tuple[str, ...]:
    notes = []
    if families:
        notes.append(
            "“1 of 2” means group rank 1 in a group of 2 ranks; "
            "in each row, ranks of one colour form one group"
        )
    if program.nodes > _MAX_NODES:
        notes.append(f"{program.nodes - _MAX_NODES} more nodes are not drawn")
    if program.local_size > _MAX_RANKS_PER_NODE:
        hidden_ranks = program.local_size - _MAX_RANKS_PER_NODE
        notes.append(f"{hidden_ranks} more ranks on each node are not drawn")
    hidden = sum(len(f) for f in families.values()) - _MAX_LEGEND_KEYS
    if hidden > 0:
        notes.append(f"{hidden} more groups are not in the legend")
    return tuple(notes)


def _draw(subject: PictureInput) -> BoxDiagram:
    return groups_picture(require_input(subject.program, "program"))


def _draw_large(subject: PictureInput) -> str | None:
    """A grid where boxes would be too many, or where one family of groups was asked for."""
    from distsim.output.pictures.components.group_grid import group_grid_svg

    program, chosen = require_input(subject.program, "program"), subject.part.group
    if program.world_size <= MAX_BOXES and chosen is None:
        return None
    families = _group_families(program)
    if chosen is not None:
        family = chosen.partition("[")[0]
        if family not in families:
            raise UsageError(
                f"no group `{chosen}`{did_you_mean(chosen, families)}",
                f"known: {', '.join(families) or 'none'}",
            )
        families = {family: [g for g in families[family] if chosen in (family, g.name)]}
    return group_grid_svg(program, families, subject.run.trace if subject.run is not None else None)


VIEW = PictureView(
    _draw,
    large=_draw_large,
    examples=(
        GalleryExample(
            "hybrid",
            "The mesh: each rank is in the group of its replica and in the group of its stage.",
        ),
        GalleryExample(
            "strategies/gpt3_175b",
            "Eight nodes of eight GPUs as grids: the ranks of each group, "
            "and how much they exchange.",
        ),
        GalleryExample(
            "two_machines",
            "Two nodes of four GPUs: RANK, LOCAL_RANK, NODE_RANK and the group ranks.",
        ),
    ),
)
