"""Who waits for whom at a standstill: the cause in red, those who merely wait behind it in grey."""

from __future__ import annotations

from collections.abc import Sequence

from distsim.check.waitfor import wait_for
from distsim.program.records import Program
from distsim.standstill import Blocked, Standstill
from distsim.units import show_ns
from distsim.views.drawing.palette import GREY, INK, LINE, PALE, RED, RED_FILL, WHITE
from distsim.views.drawing.records import SMALL, Edge, Key, Node, Picture, Text, clipped
from distsim.views.drawing.view import Example, Subject, View, given
from distsim.views.drawing.words import call_text, place_text, wait_text, who

_MOST_RANKS, _MOST_EDGES = 24, 12
_LEFT = {"ended": "has ended", "raised": "raised an error", "killed": "was killed", "absent": "never started"}


def waitfor_picture(program: Program, standstill: Standstill, core: Sequence[int] | None = None) -> Picture:
    """Boxes are ranks, an arrow leads to the rank that is waited for. ``core``: the cause, from
    the graph when left out."""
    name = clipped(program.name, 60)
    if not standstill.blocked:
        nobody = Node("none", (Text("no rank is stuck", bold=True),))
        return Picture(f"{name}: nobody waits", "every rank came to its end", (nobody,))
    cause = set(wait_for(standstill).core if core is None else core) or set(standstill.stuck)
    blocked = sorted(standstill.blocked, key=lambda b: (b.rank not in cause, b.rank))
    drawn = blocked[:_MOST_RANKS]
    shown = {b.rank for b in drawn}
    left = {e.rank: e for e in standstill.ends if e.status != "blocked"}
    nodes = [_stuck(program, b, b.rank in cause) for b in sorted(drawn, key=lambda b: b.rank)]
    edges = [e for b in sorted(drawn, key=lambda b: b.rank) for e in _edges(b, cause, shown | set(left))]
    for rank in sorted(r for r in left if any(e.head == f"rank{r}" for e in edges)):
        end = left[rank]
        said = (Text(f"rank {rank}", bold=True), Text(_LEFT.get(end.status, end.status), colour=RED))
        nodes.append(Node(f"rank{rank}", said, fill=WHITE, border=GREY, dashed=True, width=1.6))
    victims = [b.rank for b in blocked if b.rank not in cause]
    subtitle = f"cause: {who(sorted(cause))}" + (f"; waiting behind it: {who(victims)}" if victims else "")
    hidden = len(blocked) - len(drawn)
    notes = (f"and {hidden} more ranks that wait, not drawn",) if hidden else ()
    return Picture(f"{name}: who waits for whom", subtitle, tuple(nodes), tuple(edges), legend=_legend(edges, nodes), notes=notes)


def _stuck(program: Program, blocked: Blocked, cause: bool) -> Node:
    lines = [Text(f"rank {blocked.rank}", bold=True, size=14, colour=RED if cause else INK)]
    position = blocked.needs[0].position if blocked.device and blocked.needs else blocked.position
    if position < len(program.code(blocked.rank).calls):
        call = program.call(blocked.rank, position)
        waits = wait_text(program, blocked.rank, position) if call.op == "wait" else ""
        lines.append(Text(clipped(f"wait for {waits}" if waits else call_text(call), 48)))
        lines.append(Text(place_text(program, blocked.rank, position), colour=GREY, size=SMALL))
    since = f"since {show_ns(blocked.since_ns)}" if blocked.since_ns else ""
    lines += [Text(t, colour=GREY, size=SMALL) for t in (since, "(on the device)" if blocked.device else "") if t]
    look = (RED_FILL, RED, 2.2) if cause else (PALE, LINE, 1.0)
    return Node(f"rank{blocked.rank}", tuple(lines), fill=look[0], border=look[1], width=look[2])


def _edges(blocked: Blocked, cause: set[int], drawn: set[int]) -> list[Edge]:
    found: dict[tuple[int, bool], Edge] = {}
    for need in blocked.needs:
        for rank in [r for r in need.ranks if r in drawn][:_MOST_EDGES]:
            red = blocked.rank in cause and (rank in cause or rank not in drawn or not need.any)
            colour, width = (RED, 2.6) if red else (GREY, 1.4)
            edge = Edge(f"rank{blocked.rank}", f"rank{rank}", colour=colour, dashed=need.any, width=width)
            found.setdefault((rank, need.any), edge)
    return list(found.values())


def _legend(edges: list[Edge], nodes: list[Node]) -> tuple[Key, ...]:
    keys = [Key(RED, "the cause")]
    keys += [Key(LINE, "waits behind it")] if any(n.fill == PALE for n in nodes) else []
    keys.append(Key(INK, "waits for this rank", "solid"))
    keys += [Key(INK, "any one of these would do", "dashed")] if any(e.dashed for e in edges) else []
    return tuple(keys)


def _drawn(subject: Subject) -> Picture:
    core = None if subject.verdict is None else subject.verdict.core
    return waitfor_picture(given(subject.program, "program"), given(subject.run, "run").standstill, core or None)


VIEW = View(_drawn, uses=("verdict",), examples=(
    Example("ring_of_four", "Everybody sends first: a circle of four."),
    Example("pipeline_wrong_order", "A pipeline whose last stage sends in the wrong order: the cause red, the victim grey."),
))  # fmt: skip
