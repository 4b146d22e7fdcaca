"""The picture of `distsim doctor`: which rank waits for which.

Boxes are ranks, and an arrow leads to a rank that is awaited. The ranks of the main cause are red;
ranks without any evidence are dashed. Large jobs are cut: the ranks of the cause are drawn first.
"""

from __future__ import annotations

from itertools import chain

from distsim.hang_doctor.analysis.diagnosis import Diagnosis
from distsim.hang_doctor.analysis.hang_cause import HangCause
from distsim.hang_doctor.analysis.wait_chains import wait_edges
from distsim.hang_doctor.analysis.wait_state import RankWaitState
from distsim.hang_doctor.model.phrases import call_text, short_file
from distsim.output.pictures.drawing.box_diagram import (
    SMALL_SIZE,
    BoxDiagram,
    DiagramEdge,
    DiagramNode,
    LegendKey,
    TextLine,
    clipped,
)
from distsim.output.pictures.drawing.palette import (
    GREY,
    INK,
    LINE_COLOUR,
    PALE_FILL,
    RED,
    RED_FILL,
    WHITE,
)

_MAX_RANKS = 24
_MAX_RANKS_NOT_GIVEN = 8
_MAX_EDGES = 200
_MAX_EDGES_TO_NOT_GIVEN = 60
_TITLE_CHARACTERS = 110
_NODE_CHARACTERS = 48
_THICK, _MEDIUM, _THIN = 2.2, 1.2, 1.0
_GRADE_TEXT = {
    "proved": "cause proved by the records",
    "suspected": "suspected cause, not proved",
    "unknown": "cause unknown",
}


def doctor_picture(diagnosis: Diagnosis) -> BoxDiagram:
    """The wait-for graph of a diagnosis."""
    main = diagnosis.main
    cause_ranks = _ranks_of_cause(main)
    statuses = _ranks_to_draw(diagnosis, cause_ranks)
    # Sorted by importance first to choose the ranks, then by number to draw them.
    by_importance = sorted(statuses, key=lambda rank: (rank not in cause_ranks, rank))
    drawn = sorted(by_importance[:_MAX_RANKS])
    waits = chain.from_iterable(statuses[rank].waits for rank in drawn)
    all_not_given = {rank for wait in waits for rank in wait.silent}
    not_given = sorted(all_not_given)[:_MAX_RANKS_NOT_GIVEN]

    nodes = [_rank_node(diagnosis, rank, rank in cause_ranks) for rank in drawn]
    nodes += [_not_given_node(rank) for rank in not_given]
    if not nodes:
        nodes = [DiagramNode("none", (TextLine("the records name no rank", bold=True),))]
    edges = _wait_for_edges(diagnosis, drawn, cause_ranks)
    edges += _edges_to_not_given(statuses, drawn, not_given)
    legend = (
        LegendKey(RED, "rank of the main cause"),
        LegendKey(INK, "waits for this rank", "solid"),
        LegendKey(INK, "waits for a rank without records", "dashed"),
    )
    hidden = len(statuses) - len(drawn)
    return BoxDiagram(
        clipped(main.title if main else "no rank is blocked", _TITLE_CHARACTERS),
        _GRADE_TEXT[main.grade] if main else "",
        tuple(nodes),
        tuple(edges),
        legend=legend,
        notes=(f"and {hidden} more ranks are not drawn",) if hidden else (),
    )


def _ranks_of_cause(cause: HangCause | None) -> set[int]:
    if cause is None:
        return set()
    return set(cause.culprits or cause.ranks)


def _ranks_to_draw(diagnosis: Diagnosis, cause_ranks: set[int]) -> dict[int, RankWaitState]:
    """Ranks with something to show: they wait, are awaited, have ended, or have a stack."""
    statuses = diagnosis.standing.ranks
    waits = chain.from_iterable(status.waits for status in statuses.values())
    awaited = chain.from_iterable(wait.missing for wait in waits)
    mentioned = cause_ranks.union(awaited)

    def is_shown(rank: int, status: RankWaitState) -> bool:
        return bool(status.waits or status.end or status.frame) or rank in mentioned

    return {rank: status for rank, status in statuses.items() if is_shown(rank, status)}


def _wait_for_edges(
    diagnosis: Diagnosis, drawn: list[int], cause_ranks: set[int]
) -> list[DiagramEdge]:
    graph = wait_edges(diagnosis.standing)
    edges = []
    for rank in drawn:
        for awaited in sorted(graph.get(rank, {})):
            if awaited not in drawn:
                continue
            of_cause = rank in cause_ranks or awaited in cause_ranks
            colour, width = (RED, _THICK) if of_cause else (GREY, _MEDIUM)
            edges.append(DiagramEdge(f"rank{rank}", f"rank{awaited}", colour=colour, width=width))
    return edges[:_MAX_EDGES]


def _edges_to_not_given(
    statuses: dict[int, RankWaitState], drawn: list[int], not_given: list[int]
) -> list[DiagramEdge]:
    edges = []
    for rank in drawn:
        for wait in statuses[rank].waits:
            edges += [
                DiagramEdge(f"rank{rank}", f"rank{awaited}", colour=GREY, dashed=True)
                for awaited in wait.silent
                if awaited in not_given
            ]
    return edges[:_MAX_EDGES_TO_NOT_GIVEN]


def _rank_node(diagnosis: Diagnosis, rank: int, of_cause: bool) -> DiagramNode:
    status = diagnosis.standing.ranks[rank]
    if status.waits:
        activity = call_text(diagnosis.evidence, status.waits[0].call)
    elif status.end:
        activity = status.end.text
    else:
        activity = "outside any recorded call"
    lines = [
        TextLine(f"rank {rank}", bold=True, size=14, colour=RED if of_cause else INK),
        TextLine(clipped(activity, _NODE_CHARACTERS)),
    ]
    if status.frame is not None:
        place = f"{short_file(status.frame.file)}:{status.frame.line}"
        lines.append(TextLine(clipped(place, _NODE_CHARACTERS), colour=GREY, size=SMALL_SIZE))
    if of_cause:
        fill, border, width = RED_FILL, RED, _THICK
    else:
        fill, border, width = PALE_FILL, LINE_COLOUR, _THIN
    return DiagramNode(f"rank{rank}", tuple(lines), fill=fill, border=border, width=width)


def _not_given_node(rank: int) -> DiagramNode:
    """A rank that others wait for, and that no file says anything about."""
    lines = (TextLine(f"rank {rank}", bold=True), TextLine("no records", colour=GREY))
    return DiagramNode(f"rank{rank}", lines, fill=WHITE, border=GREY, dashed=True)
