"""The wait-for graph of a hang: the cause in red, ranks that wait for it in grey.

Up to `MAX_SINGLE_BOXES` blocked ranks have a box each. With more, the ranks of a cycle keep their
boxes, and all other ranks that are blocked in the same call and wait for the same ranks share one.
A thousand ranks become the cycle and one box "1 016 ranks wait for the cause".

The graph itself comes from `distsim.checker.diagnosis.wait_for_graph`; this module only draws it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations
from math import cos, pi, sin
from typing import NamedTuple

from distsim.checker.diagnosis.wait_for_graph import WaitCycle, build_wait_for_graph
from distsim.common.units import show_ns
from distsim.findings.final_state import BlockedRank, FinalState, WaitDependency
from distsim.output.pictures.components.call_labels import (
    call_text,
    place_text,
    ranks_in_words,
    wait_text,
)
from distsim.output.pictures.components.view_interface import (
    GalleryExample,
    PictureInput,
    PictureView,
    require_input,
)
from distsim.output.pictures.drawing.box_diagram import (
    SMALL_SIZE,
    BoxDiagram,
    DiagramEdge,
    DiagramNode,
    LegendKey,
    TextLine,
    clipped,
    text_width,
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
from distsim.output.trace_data.selection import WHOLE_RUN, RunSelection
from distsim.program.model import Program

#: Up to this many blocked ranks have a box each; with more, equal ones share a box.
MAX_SINGLE_BOXES = 12
#: Cycles of up to this many ranks are drawn whole.
MAX_CYCLE_BOXES = 12
_MAX_CYCLES = 3
_MAX_BOXES = 24
#: Arrows that leave one box.
_MAX_EDGES = 12
#: Sizes of the ring that are tried until no two boxes overlap.
_RING_SCALES = (0.8, 1.0, 1.25, 1.6, 2.0, 2.5, 3.0)
_EXIT_TEXT = {
    "ended": "has ended",
    "raised": "raised an error",
    "crashed": "crashed",
    "killed": "was killed",
    "absent": "never started",
}


class _WaitBox(NamedTuple):
    """Ranks that share a box.

    ``cause``: they belong to the cause of the hang. ``skipped``: they stand for the middle of a
    cycle that is too long to draw.
    """

    ranks: tuple[int, ...]
    cause: bool
    skipped: bool = False

    @property
    def id(self) -> str:
        return f"rank{self.ranks[0]}"


def wait_for_diagram(
    program: Program,
    final_state: FinalState,
    core: Sequence[int] | None = None,
    part: RunSelection = WHOLE_RUN,
) -> BoxDiagram:
    """Draw blocked ranks as boxes; an arrow leads to the rank that is awaited.

    ``core``: the ranks that cause the hang; None takes those of the graph. ``part``: only these
    ranks and the ranks they wait for.
    """
    name = clipped(program.name, 60)
    if not final_state.blocked:
        only_box = DiagramNode("none", (TextLine("no rank is blocked", bold=True),))
        return BoxDiagram(f"{name}: no rank is blocked", "every rank finished", (only_box,))
    return _WaitForDrawing(program, final_state, core, part).picture(name)


class _WaitForDrawing:
    """One picture. ``cause``: ranks that cause the hang; ``shown``: blocked ranks to draw."""

    def __init__(
        self,
        program: Program,
        final_state: FinalState,
        core: Sequence[int] | None,
        part: RunSelection,
    ) -> None:
        self.program = program
        graph = build_wait_for_graph(final_state)
        self.cause = set(graph.core if core is None else core) or set(final_state.stuck)
        self.exited = {end.rank: end for end in final_state.ends if end.status != "blocked"}
        self.blocked = {blocked.rank: blocked for blocked in final_state.blocked}
        self.shown = self._select_ranks(part)
        drawable = self.cause & set(self.shown)
        self.cycles = tuple(cycle for cycle in graph.circles if set(cycle.path) <= drawable)
        self.notes: list[str] = []
        self.boxes = self._boxes()
        self.box_of = {rank: box for box in self.boxes for rank in box.ranks}

    def _select_ranks(self, part: RunSelection) -> dict[int, BlockedRank]:
        """The blocked ranks that were selected, and the blocked ranks they wait for."""
        if part.ranks is None:
            return self.blocked
        selected = {rank for rank in part.ranks if rank in self.blocked}
        awaited: set[int] = set()
        for rank in selected:
            for need in self.blocked[rank].needs:
                awaited.update(need.ranks)
        shown = selected | awaited
        return {rank: state for rank, state in self.blocked.items() if rank in shown}

    # --- boxes ---
    def _boxes(self) -> list[_WaitBox]:
        if len(self.shown) <= MAX_SINGLE_BOXES:
            return [_WaitBox((rank,), rank in self.cause) for rank in sorted(self.shown)]
        drawn_cycles = self.cycles[:_MAX_CYCLES]
        self._note_cycles_not_drawn(len(self.cycles) - len(drawn_cycles))
        boxes: list[_WaitBox] = []
        for cycle in drawn_cycles:
            boxes += _boxes_of_cycle(cycle)
        shared = self._shared_boxes()
        if len(shared) > _MAX_BOXES:
            rest = sum(len(box.ranks) for box in shared[_MAX_BOXES:])
            self.notes.append(f"{rest} more blocked ranks are not drawn; select them with --ranks")
        return boxes + shared[:_MAX_BOXES]

    def _note_cycles_not_drawn(self, count: int) -> None:
        if count > 0:
            cycles = "cycles like this are" if count > 1 else "cycle like this is"
            self.notes.append(f"{count} more {cycles} not drawn")

    def _shared_boxes(self) -> list[_WaitBox]:
        """Boxes of the ranks on no cycle: one for all ranks that wait in the same way."""
        on_cycles = {rank for cycle in self.cycles for rank in cycle.ranks}
        ranks_by_wait: dict[tuple[object, ...], list[int]] = {}
        for rank in sorted(self.shown):
            if rank not in on_cycles:
                ranks_by_wait.setdefault(self._kind_of_wait(rank), []).append(rank)
        boxes = [_WaitBox(tuple(ranks), ranks[0] in self.cause) for ranks in ranks_by_wait.values()]
        return sorted(boxes, key=lambda box: (not box.cause, box.ranks[0]))

    def _kind_of_wait(self, rank: int) -> tuple[object, ...]:
        """Equal for ranks that may share a box: same call, same line, same awaited ranks.

        Only awaited ranks that explain the hang count: those of the cause, and exited ones.
        """
        state = self.blocked[rank]
        position = _blocked_position(state)
        awaited: set[int] = set()
        for need in state.needs:
            awaited.update(need.ranks)
        reasons = awaited & (self.cause | self.exited.keys()) - {rank}
        has_ended = position >= len(self.program.code(rank).calls)
        op = "" if has_ended else self.program.code_call(rank, position).op
        place = place_text(self.program, rank, position)
        return (rank in self.cause, op, place, frozenset(reasons), state.device)

    def _node(self, box: _WaitBox, at: tuple[float, float] | None) -> DiagramNode:
        if box.skipped:
            return _skipped_node(box, at)
        lines = _box_title(box)
        state = self.blocked[box.ranks[0]]
        lines += self._call_lines(box.ranks[0], _blocked_position(state))
        if state.since_ns and len(box.ranks) == 1:
            lines.append(_small_line(f"since {show_ns(state.since_ns)}"))
        if state.device:
            lines.append(_small_line("(blocked on its device)"))
        if box.cause:
            fill, border, width = RED_FILL, RED, 2.2
        else:
            fill, border, width = PALE_FILL, LINE_COLOUR, 1.0
        return DiagramNode(box.id, tuple(lines), fill=fill, border=border, width=width, at=at)

    def _call_lines(self, rank: int, position: int) -> list[TextLine]:
        """The call that blocks the rank, and where it is written; empty after the last call."""
        if position >= len(self.program.code(rank).calls):
            return []
        call = self.program.call(rank, position)
        awaited = wait_text(self.program, rank, position) if call.op == "wait" else ""
        text = f"wait for {awaited}" if awaited else call_text(call)
        return [
            TextLine(clipped(text, 48)),
            _small_line(place_text(self.program, rank, position)),
        ]

    # --- arrows ---
    def _edges(self) -> list[DiagramEdge]:
        found: dict[tuple[str, str, bool], DiagramEdge] = {}
        for box in self.boxes:
            # Only the last rank of a skipped stretch waits for a rank outside it.
            ranks = box.ranks[-1:] if box.skipped else box.ranks
            for rank in ranks:
                for edge in self._edges_from(box, self.blocked[rank]):
                    found.setdefault((edge.tail, edge.head, edge.dashed), edge)
        return list(found.values())

    def _edges_from(self, box: _WaitBox, state: BlockedRank) -> Iterable[DiagramEdge]:
        for need in state.needs:
            is_reason = not need.any or not self.cause.isdisjoint(need.ranks)
            red = box.cause and is_reason
            heads = dict.fromkeys(map(self._box_id, self._awaited_to_draw(need)))
            heads.pop(box.id, None)
            for head in list(heads)[:_MAX_EDGES]:
                yield DiagramEdge(
                    box.id,
                    head,
                    colour=RED if red else GREY,
                    dashed=need.any,
                    width=2.6 if red else 1.4,
                )

    def _awaited_to_draw(self, need: WaitDependency) -> list[int]:
        """The awaited ranks that get an arrow: if all are needed, only those of the cause."""
        drawn = [rank for rank in need.ranks if rank in self.box_of or rank in self.exited]
        if need.any:
            return drawn
        reasons = [rank for rank in drawn if rank in self.cause or rank in self.exited]
        return reasons or drawn

    def _box_id(self, rank: int) -> str:
        return self.box_of[rank].id if rank in self.box_of else f"rank{rank}"

    # --- the picture ---
    def picture(self, name: str) -> BoxDiagram:
        edges = self._edges()
        places = self._ring_places(edges)
        nodes = [self._node(box, places.get(box.id)) for box in self.boxes]
        heads = {_rank_of_id(edge.head) for edge in edges}
        nodes += [self._exited_node(rank) for rank in sorted(heads & set(self.exited))]
        not_selected = len(self.blocked) - len(self.shown)
        if not_selected:
            self.notes.append(f"{not_selected} more blocked ranks were not selected")
        return BoxDiagram(
            f"{name}: wait-for graph",
            self._subtitle(),
            tuple(nodes),
            tuple(edges),
            legend=_legend_keys(edges, nodes),
            notes=tuple(self.notes),
            engine="neato" if places else "dot",
        )

    def _subtitle(self) -> str:
        cause = f"cause: {ranks_in_words(sorted(self.cause))}"
        victims = [rank for rank in self.blocked if rank not in self.cause]
        if not victims:
            return cause
        behind = "blocked by it" if len(self.cause) == 1 else "blocked by them"
        return f"{cause}; {behind}: {ranks_in_words(victims)}"

    def _exited_node(self, rank: int) -> DiagramNode:
        end = self.exited[rank]
        lines = (
            TextLine(f"rank {rank}", bold=True),
            TextLine(_EXIT_TEXT.get(end.status, end.status), colour=RED),
        )
        return DiagramNode(f"rank{rank}", lines, fill=WHITE, border=GREY, dashed=True, width=1.6)

    # --- one cycle as a ring ---
    def _ring_places(self, edges: Sequence[DiagramEdge]) -> dict[str, tuple[float, float]]:
        """Positions if the picture is one cycle: its ranks on a ring, the others around it.

        Empty if the layout engine has to place the boxes: no or several cycles, a rank that waits
        for an exited rank, or boxes that overlap at every size of the ring.
        """
        if len(self.cycles) != 1 or self._some_wait_for_exited(edges):
            return {}
        ring = self._ring_boxes(self.cycles[0])
        causes = [box for box in self.boxes if box.cause]
        if len(ring) < 3 or _ranks_of(ring) != _ranks_of(causes):
            return {}
        widths = {box.id: self._width(box) for box in self.boxes}
        widest = max(widths.values())
        for scale in _RING_SCALES:
            places = self._place_around_ring(ring, edges, widest, scale)
            if len(places) == len(self.boxes) and not _boxes_overlap(places, widths):
                return places
        return {}

    def _some_wait_for_exited(self, edges: Sequence[DiagramEdge]) -> bool:
        boxes = {box.id for box in self.boxes}
        heads = {edge.head for edge in edges} - boxes
        return any(_rank_of_id(head) in self.exited for head in heads)

    def _ring_boxes(self, cycle: WaitCycle) -> list[_WaitBox]:
        if len(self.shown) > MAX_SINGLE_BOXES:
            return _boxes_of_cycle(cycle)
        return [_WaitBox((rank,), True) for rank in cycle.path]

    def _place_around_ring(
        self, ring: Sequence[_WaitBox], edges: Sequence[DiagramEdge], widest: float, scale: float
    ) -> dict[str, tuple[float, float]]:
        """The ring; in its middle the box that waits for most of it; all others outside."""
        across = max(widest * 0.95, 110.0) * scale
        down = max(15.0 * len(ring), 92.0) * scale
        angles = {box.id: 2 * pi * i / len(ring) for i, box in enumerate(ring)}
        places = {name: _polar_position(angle, across, down) for name, angle in angles.items()}

        arrows = Counter(edge.tail for edge in edges if edge.tail not in places)
        for name, count in arrows.most_common(1):
            if count >= 3:
                places[name] = (0.0, 0.0)

        # A box outside is placed once the box it waits for is; each pass may place more of them.
        neighbours: Counter[str] = Counter()
        for _ in self.boxes:
            for edge in edges:
                if edge.tail in places or edge.head not in angles:
                    continue
                neighbours[edge.head] += 1
                count = neighbours[edge.head]
                steps = (count // 2) * (1 if count % 2 else -1)  # 0, -1, +1, -2, …
                angles[edge.tail] = angles[edge.head] + 0.5 * steps
                x, y = places[edge.head]
                places[edge.tail] = _polar_position(
                    angles[edge.tail], abs(x) + widest + 40, abs(y) + 110
                )
        return places

    def _width(self, box: _WaitBox) -> float:
        lines = self._node(box, None).lines
        return max(text_width(line.text, line.size, line.bold) for line in lines) + 24


def _boxes_of_cycle(cycle: WaitCycle) -> list[_WaitBox]:
    """A box for each rank of a cycle; of a long cycle one box stands for its middle."""
    path = cycle.path
    if len(path) <= MAX_CYCLE_BOXES:
        return [_WaitBox((rank,), True) for rank in path]
    half = MAX_CYCLE_BOXES // 2
    first = [_WaitBox((rank,), True) for rank in path[:half]]
    middle = _WaitBox(path[half : 1 - half], True, skipped=True)
    last = [_WaitBox((rank,), True) for rank in path[1 - half :]]
    return [*first, middle, *last]


def _box_title(box: _WaitBox) -> list[TextLine]:
    ink = RED if box.cause else INK
    if len(box.ranks) == 1:
        return [TextLine(f"rank {box.ranks[0]}", bold=True, size=14, colour=ink)]
    role = "cause the hang" if box.cause else "wait for the cause"
    return [
        TextLine(f"{len(box.ranks)} ranks {role}", bold=True, size=14, colour=ink),
        _small_line(ranks_in_words(box.ranks, 3)),
    ]


def _skipped_node(box: _WaitBox, at: tuple[float, float] | None) -> DiagramNode:
    ink = RED if box.cause else INK
    lines = (
        TextLine(f"… {len(box.ranks)} more ranks of the cycle …", bold=True, colour=ink),
        _small_line(ranks_in_words(box.ranks, 2)),
    )
    return DiagramNode(box.id, lines, fill=WHITE, border=RED, dashed=True, width=1.6, at=at)


def _small_line(text: str) -> TextLine:
    return TextLine(text, colour=GREY, size=SMALL_SIZE)


def _rank_of_id(name: str) -> int:
    """The first rank of a box, from its id."""
    return int(name.removeprefix("rank"))


def _ranks_of(boxes: Iterable[_WaitBox]) -> set[int]:
    return {rank for box in boxes for rank in box.ranks}


def _polar_position(angle: float, across: float, down: float) -> tuple[float, float]:
    """A point of an ellipse, clockwise from the top."""
    return sin(angle) * across, -cos(angle) * down


def _boxes_overlap(places: dict[str, tuple[float, float]], widths: dict[str, float]) -> bool:
    for (one, (x, y)), (other, (other_x, other_y)) in combinations(places.items(), 2):
        room = (widths[one] + widths[other]) / 2 + 16
        if abs(x - other_x) < room and abs(y - other_y) < 84:
            return True
    return False


def _blocked_position(state: BlockedRank) -> int:
    """The call that has not completed. A host may run ahead of its device: then the device's."""
    return state.needs[0].position if state.device and state.needs else state.position


def _legend_keys(edges: list[DiagramEdge], nodes: list[DiagramNode]) -> tuple[LegendKey, ...]:
    """Only the colours and strokes that occur in the picture."""
    keys = [LegendKey(RED_FILL, "rank of the cause")]
    if any(node.fill == PALE_FILL for node in nodes):
        keys.append(LegendKey(PALE_FILL, "blocked by the cause"))
    strokes = {(edge.colour, edge.dashed) for edge in edges}
    for colour, whose in ((RED, "cause"), (GREY, "blocked")):
        if (colour, False) in strokes:
            keys.append(LegendKey(colour, f"waits for this rank ({whose})", "solid"))
        if (colour, True) in strokes:
            keys.append(LegendKey(colour, f"waits for any of these ranks ({whose})", "dashed"))
    return tuple(keys)


def _draw(subject: PictureInput) -> BoxDiagram:
    core = None if subject.verdict is None else subject.verdict.core
    program = require_input(subject.program, "program")
    run = require_input(subject.run, "run")
    return wait_for_diagram(program, run.final_state, core or None, subject.part)


VIEW = PictureView(
    _draw,
    uses=("verdict",),
    examples=(
        GalleryExample(
            "ring_of_four", "Every rank sends before it receives: a wait-for cycle of four ranks."
        ),
        GalleryExample(
            "pipeline_wrong_order",
            "A pipeline whose last stage sends in the wrong order. The cause is red; "
            "the rank that it blocks is grey.",
        ),
    ),
)
