"""The mesh as machines and ranks: every rank with its numbers in each group."""

from __future__ import annotations

from itertools import pairwise

from distsim.errors import UsageError
from distsim.names import near
from distsim.ops.records import Group
from distsim.program.records import Program
from distsim.views.drawing.palette import INK, LINE, PALE, WHITE, fill
from distsim.views.drawing.records import Cell, Cluster, Edge, Key, Node, Picture, clipped
from distsim.views.drawing.view import Example, Subject, View, given
from distsim.views.drawing.words import who

#: More ranks than this are drawn as cells, not as boxes.
MOST_BOXES = 16
_MOST_MACHINES, _MOST_PER_MACHINE, _PER_ROW, _MOST_KEYS = 6, 16, 8, 16


def groups_picture(program: Program) -> Picture:
    """Machines as frames, ranks as boxes; ranks of one group have one colour in that group's line."""
    families = _families(program)
    colours = {group.id: fill(i) for i, group in enumerate(g for family in families.values() for g in family)}
    machines = [_ranks_on(program, m) for m in range(min(program.nodes, _MOST_MACHINES))]
    nodes, clusters, edges, rows = [], [], [], []
    above = None
    for machine, ranks in enumerate(machines):
        nodes += [_rank(program, rank, families, colours) for rank in ranks]
        names = [f"rank{rank}" for rank in ranks]
        clusters.append(Cluster(f"machine{machine}", f"machine {machine}   NODE_RANK {machine}", tuple(names)))
        for i in range(0, len(names), _PER_ROW):
            row = names[i : i + _PER_ROW]
            rows.append(tuple(row))
            edges += [Edge(a, b, shown=False) for a, b in pairwise(row)]
            edges += [Edge(above, row[0], shown=False)] if above else []
            above = row[0]
    mesh = " × ".join(f"{clipped(axis, 24)} {size}" for axis, size in program.mesh.items())
    return Picture(
        f"{clipped(program.name, 60)}: machines, ranks and groups",
        f"{program.world_size} ranks on {program.nodes} machine{'s' if program.nodes > 1 else ''}"
        + (f", mesh {mesh} (outermost first)" if mesh else "") + "; in the group world, group rank = RANK",
        tuple(nodes), tuple(edges), tuple(clusters), tuple(rows), _legend(families, colours), _notes(program, families),
    )  # fmt: skip


def _families(program: Program) -> dict[str, list[Group]]:
    """Groups of one declaration or axis: ``stage[replica=0]`` and ``stage[replica=1]`` are both of ``stage``."""
    found: dict[str, list[Group]] = {}
    for group in program.groups[1:]:
        found.setdefault(group.name.partition("[")[0], []).append(group)
    return found


def _ranks_on(program: Program, machine: int) -> range:
    first = machine * program.local_size
    return range(first, min(first + min(program.local_size, _MOST_PER_MACHINE), program.world_size))


def _rank(program: Program, rank: int, families: dict[str, list[Group]], colours: dict[int, str]) -> Node:
    table: list[tuple[Cell, ...]] = [(Cell(f"RANK {rank}", PALE, bold=True, size=14, span=2, border=False),)]
    table += [_line("NODE_RANK", program.node(rank)), _line("LOCAL_RANK", rank % program.local_size)]
    for family, groups in families.items():
        mine = [g for g in groups if rank in g.ranks]
        table += [_line(clipped(family, 18), f"{g.group_rank(rank)} of {g.size}", colours[g.id]) for g in mine]
        if not mine:
            table.append((Cell(clipped(family, 18), WHITE, border=False, left=True), Cell("–", WHITE, border=False)))
    return Node(f"rank{rank}", (), tuple(table), border=LINE)


def _line(name: str, value: object, colour: str = WHITE) -> tuple[Cell, Cell]:
    return (Cell(name, colour, border=False, left=True), Cell(str(value), colour, bold=True, colour=INK, border=False))


def _legend(families: dict[str, list[Group]], colours: dict[int, str]) -> tuple[Key, ...]:
    groups = [g for family in families.values() for g in family]
    return tuple(Key(colours[g.id], f"{clipped(g.name, 40)}: {who(g.ranks, 4)}") for g in groups[:_MOST_KEYS])


def _notes(program: Program, families: dict[str, list[Group]]) -> tuple[str, ...]:
    notes = []
    if families:
        notes.append("“1 of 2” is the group rank and the group's size; ranks with one colour in a line are one group")
    if program.nodes > _MOST_MACHINES:
        notes.append(f"and {program.nodes - _MOST_MACHINES} more machines, not drawn")
    if program.local_size > _MOST_PER_MACHINE:
        notes.append(f"and {program.local_size - _MOST_PER_MACHINE} more ranks on each machine, not drawn")
    hidden = sum(len(f) for f in families.values()) - _MOST_KEYS
    if hidden > 0:
        notes.append(f"and {hidden} more groups, not in the legend")
    return tuple(notes)


def _drawn(subject: Subject) -> Picture:
    return groups_picture(given(subject.program, "program"))


def _large(subject: Subject) -> str | None:
    """A grid where boxes would be too many, or where one family of groups was asked for."""
    from distsim.views.meshgrid import mesh_svg

    program, chosen = given(subject.program, "program"), subject.part.group
    if program.world_size <= MOST_BOXES and chosen is None:
        return None
    families = _families(program)
    if chosen is not None:
        family = chosen.partition("[")[0]
        if family not in families:
            raise UsageError(f"there is no group {chosen}{near(chosen, families)}", f"there is {', '.join(families) or 'none'}")
        families = {family: [g for g in families[family] if chosen in (family, g.name)]}
    return mesh_svg(program, families, subject.run.trace if subject.run is not None else None)


VIEW = View(_drawn, large=_large, examples=(
    Example("hybrid", "The mesh behind it: each rank is in a group of its replica and in one of its stage."),
    Example("strategies/gpt3_175b", "Eight machines of eight GPUs as grids: who is in a group with whom, and how much they exchange."),
    Example("two_machines", "Two machines of four GPUs: RANK, LOCAL_RANK, NODE_RANK and the group ranks."),
))  # fmt: skip
