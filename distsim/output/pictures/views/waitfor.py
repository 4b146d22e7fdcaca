"""Who waits for whom at a standstill: the cause in red, those who merely wait behind it in grey,
circles as circles.

Up to `MAX_SINGLE_BOXES` ranks each have a box. Of more, those on a circle have one, and all others
that stand in the same call and wait for the same share one: a thousand ranks fold to the circle and
"1 016 ranks wait behind it".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import cos, pi, sin
from typing import NamedTuple

from distsim.checker.diagnosis.wait_for_graph import WaitCycle, build_wait_for_graph
from distsim.common.units import show_ns
from distsim.findings.final_state import BlockedRank, FinalState
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

#: So many stuck ranks have a box each; of more, alike ones share one. Circles are drawn whole up to
#: so many ranks.
MAX_SINGLE_BOXES, MAX_CYCLE_BOXES = 12, 12
_MAX_CYCLES, _MAX_BOXES, _MAX_EDGES = 3, 24, 12
_EXIT_TEXT = {
    "ended": "has ended",
    "raised": "raised an error",
    "crashed": "crashed",
    "killed": "was killed",
    "absent": "never started",
}


class _WaitBox(NamedTuple):
    """Ranks that share a box. ``cause``: they are of the core; ``skipped``: they only fill a circle
    that is too long to draw.
    """

    ranks: tuple[int, ...]
    cause: bool
    skipped: bool = False

    @property
    def id(self) -> str:
        return f"rank{self.ranks[0]}"


def waitfor_picture(
    program: Program,
    final_state: FinalState,
    core: Sequence[int] | None = None,
    part: RunSelection = WHOLE_RUN,
) -> BoxDiagram:
    """Boxes are ranks, an arrow leads to the rank that is waited for. ``core``: the cause, from the
    graph when left out.

    ``part``: only these ranks, and those whom they wait for.
    """
    name = clipped(program.name, 60)
    if not final_state.blocked:
        nobody = DiagramNode("none", (TextLine("no rank is stuck", bold=True),))
        return BoxDiagram(f"{name}: nobody waits", "every rank came to its end", (nobody,))
    return _WaitForDrawing(program, final_state, core, part).picture(name)


class _WaitForDrawing:
    def __init__(
        self,
        program: Program,
        final_state: FinalState,
        core: Sequence[int] | None,
        part: RunSelection,
    ) -> None:
        self.program, graph = program, build_wait_for_graph(final_state)
        self.cause = set(graph.core if core is None else core) or set(final_state.stuck)
        self.left = {e.rank: e for e in final_state.ends if e.status != "blocked"}
        self.blocked = {b.rank: b for b in final_state.blocked}
        self.shown = self._shown(part)
        self.circles = tuple(
            c for c in graph.circles if set(c.path) <= self.cause & set(self.shown)
        )
        self.notes: list[str] = []
        self.boxes = self._boxes()
        self.box_of = {rank: box for box in self.boxes for rank in box.ranks}

    def _shown(self, part: RunSelection) -> dict[int, BlockedRank]:
        if part.ranks is None:
            return self.blocked
        named = [r for r in part.ranks if r in self.blocked]
        return {
            r: b
            for r, b in self.blocked.items()
            if r in named or any(r in n.ranks for o in named for n in self.blocked[o].needs)
        }

    # --- boxes ---
    def _boxes(self) -> list[_WaitBox]:
        if len(self.shown) <= MAX_SINGLE_BOXES:
            return [_WaitBox((rank,), rank in self.cause) for rank in sorted(self.shown)]
        drawn = self.circles[:_MAX_CYCLES]
        if len(self.circles) > len(drawn):
            many = len(self.circles) - len(drawn)
            self.notes.append(
                f"and {many} more circle{'s' * (many > 1)} like {'these' if len(drawn) > 1 else 'this'}, not drawn"
            )
        boxes = [box for circle in drawn for box in self._on_circle(circle)]
        taken = {rank for circle in self.circles for rank in circle.ranks}
        alike: dict[tuple[object, ...], list[int]] = {}
        for rank in sorted(self.shown):
            if rank not in taken or (not drawn and not self.circles):
                alike.setdefault(self._likeness(rank), []).append(rank)
        folded = sorted(
            (_WaitBox(tuple(r), r[0] in self.cause) for r in alike.values()),
            key=lambda b: (not b.cause, b.ranks[0]),
        )
        if len(folded) > _MAX_BOXES:
            rest = sum(len(box.ranks) for box in folded[_MAX_BOXES:])
            self.notes.append(
                f"and {rest} more ranks that wait, not drawn: choose them with --ranks"
            )
        return boxes + folded[:_MAX_BOXES]

    def _on_circle(self, circle: WaitCycle) -> list[_WaitBox]:
        path = circle.path
        if len(path) <= MAX_CYCLE_BOXES:
            return [_WaitBox((rank,), True) for rank in path]
        half = MAX_CYCLE_BOXES // 2
        between = _WaitBox(path[half : 1 - half], True, True)
        return [
            *(_WaitBox((r,), True) for r in path[:half]),
            between,
            *(_WaitBox((r,), True) for r in path[1 - half :]),
        ]

    def _likeness(self, rank: int) -> tuple[object, ...]:
        """What ranks share that go as one: the call, its place, and whom of the cause they wait
        for.
        """
        state = self.blocked[rank]
        position = _blocked_position(state)
        awaited = frozenset(
            r
            for need in state.needs
            for r in need.ranks
            if (r in self.cause or r in self.left) and r != rank
        )
        ended = position >= len(self.program.code(rank).calls)
        op = "" if ended else self.program.code_call(rank, position).op
        return (
            rank in self.cause,
            op,
            place_text(self.program, rank, position),
            awaited,
            state.device,
        )

    def _node(self, box: _WaitBox, at: tuple[float, float] | None) -> DiagramNode:
        red = box.cause
        state, many = self.blocked[box.ranks[0]], len(box.ranks)
        ink = RED if red else INK
        if box.skipped:
            said = (
                TextLine(f"… {many} more of the circle …", bold=True, colour=ink),
                TextLine(ranks_in_words(box.ranks, 2), colour=GREY, size=SMALL_SIZE),
            )
            return DiagramNode(box.id, said, fill=WHITE, border=RED, dashed=True, width=1.6, at=at)
        if many == 1:
            lines = [TextLine(f"rank {box.ranks[0]}", bold=True, size=14, colour=ink)]
        else:
            said_by = "are the cause" if red else "wait behind it"
            lines = [
                TextLine(f"{many} ranks {said_by}", bold=True, size=14, colour=ink),
                TextLine(ranks_in_words(box.ranks, 3), colour=GREY, size=SMALL_SIZE),
            ]
        position = _blocked_position(state)
        if position < len(self.program.code(box.ranks[0]).calls):
            call = self.program.call(box.ranks[0], position)
            waits = wait_text(self.program, box.ranks[0], position) if call.op == "wait" else ""
            lines.append(TextLine(clipped(f"wait for {waits}" if waits else call_text(call), 48)))
            lines.append(
                TextLine(
                    place_text(self.program, box.ranks[0], position), colour=GREY, size=SMALL_SIZE
                )
            )
        since = f"since {show_ns(state.since_ns)}" if state.since_ns and many == 1 else ""
        lines += [
            TextLine(t, colour=GREY, size=SMALL_SIZE)
            for t in (since, "(on the device)" if state.device else "")
            if t
        ]
        look = (RED_FILL, RED, 2.2) if red else (PALE_FILL, LINE_COLOUR, 1.0)
        return DiagramNode(box.id, tuple(lines), fill=look[0], border=look[1], width=look[2], at=at)

    # --- arrows ---
    def _edges(self) -> list[DiagramEdge]:
        found: dict[tuple[str, str, bool], DiagramEdge] = {}
        for box in self.boxes:
            for rank in (box.ranks[-1],) if box.skipped else box.ranks:
                for edge in self._of(box, self.blocked[rank]):
                    found.setdefault((edge.tail, edge.head, edge.dashed), edge)
        return list(found.values())

    def _of(self, box: _WaitBox, state: BlockedRank) -> Iterable[DiagramEdge]:
        for need in state.needs:
            red = box.cause and (not need.any or any(r in self.cause for r in need.ranks))
            drawn = [r for r in need.ranks if r in self.box_of or r in self.left]
            if not need.any:  # of many that are awaited those count that are the reason
                drawn = [r for r in drawn if r in self.cause or r in self.left] or drawn
            heads = dict.fromkeys(
                self.box_of[r].id if r in self.box_of else f"rank{r}" for r in drawn
            )
            for head in [h for h in heads if h != box.id][:_MAX_EDGES]:
                yield DiagramEdge(
                    box.id,
                    head,
                    colour=RED if red else GREY,
                    dashed=need.any,
                    width=2.6 if red else 1.4,
                )

    # --- the picture ---
    def picture(self, name: str) -> BoxDiagram:
        edges = self._edges()
        places = self._round(edges)
        nodes = [self._node(box, places.get(box.id)) for box in self.boxes]
        gone = sorted({int(e.head[4:]) for e in edges} & set(self.left))
        nodes += [self._gone(rank) for rank in gone]
        victims = [rank for rank in self.blocked if rank not in self.cause]
        behind = "waiting behind it" if len(self.cause) == 1 else "waiting behind them"
        subtitle = f"cause: {ranks_in_words(sorted(self.cause))}" + (
            f"; {behind}: {ranks_in_words(victims)}" if victims else ""
        )
        if len(self.shown) < len(self.blocked):
            self.notes.append(
                f"{len(self.blocked) - len(self.shown)} more ranks wait and were not chosen"
            )
        engine = "neato" if places else "dot"
        return BoxDiagram(
            f"{name}: who waits for whom",
            subtitle,
            tuple(nodes),
            tuple(edges),
            legend=_legend_keys(edges, nodes),
            notes=tuple(self.notes),
            engine=engine,
        )  # type: ignore[arg-type]

    def _gone(self, rank: int) -> DiagramNode:
        end = self.left[rank]
        said = (
            TextLine(f"rank {rank}", bold=True),
            TextLine(_EXIT_TEXT.get(end.status, end.status), colour=RED),
        )
        return DiagramNode(f"rank{rank}", said, fill=WHITE, border=GREY, dashed=True, width=1.6)

    def _round(self, edges: Sequence[DiagramEdge]) -> dict[str, tuple[float, float]]:
        """The places of a picture with one circle: its ranks around it, clockwise, the others
        outside near whom they wait for.

        Empty where there is no such circle, or where somebody waits for a rank that has left.
        """
        if len(self.circles) != 1 or any(
            int(e.head[4:]) in self.left for e in edges if e.head not in {b.id for b in self.boxes}
        ):
            return {}
        ring = [
            box for box in self._on_circle(self.circles[0]) if len(self.shown) > MAX_SINGLE_BOXES
        ] or [_WaitBox((rank,), True) for rank in self.circles[0].path]
        if len(ring) < 3 or {r for box in ring for r in box.ranks} != {
            r for b in self.boxes if b.cause for r in b.ranks
        }:
            return {}
        widths = {box.id: self._width(box) for box in self.boxes}
        wide = max(widths.values())
        for scale in (0.8, 1.0, 1.25, 1.6, 2.0, 2.5, 3.0):
            places = self._placed(ring, edges, wide, scale)
            if len(places) == len(self.boxes) and not _boxes_overlap(places, widths):
                return places
        return {}

    def _placed(
        self, ring: Sequence[_WaitBox], edges: Sequence[DiagramEdge], wide: float, scale: float
    ) -> dict[str, tuple[float, float]]:
        """The circle, in its middle who waits for most of it, the others outside."""
        across, down = max(wide * 0.95, 110.0) * scale, max(15.0 * len(ring), 92.0) * scale
        angle = {box.id: 2 * pi * i / len(ring) for i, box in enumerate(ring)}
        places = {name: _polar_position(turn, across, down) for name, turn in angle.items()}
        heads = Counter(e.tail for e in edges if e.tail not in places)
        middle = next((name for name, many in heads.most_common(1) if many >= 3), None)
        if middle is not None:
            places[middle] = (0.0, 0.0)
        beside: Counter[str] = Counter()
        for _ in self.boxes:
            for edge in edges:
                if edge.tail not in places and edge.head in angle:
                    beside[edge.head] += 1
                    turn = (beside[edge.head] // 2) * (1 if beside[edge.head] % 2 else -1)
                    angle[edge.tail] = angle[edge.head] + 0.5 * turn
                    x, y = places[edge.head]
                    places[edge.tail] = _polar_position(
                        angle[edge.tail], abs(x) + wide + 40, abs(y) + 110
                    )
        return places

    def _width(self, box: _WaitBox) -> float:
        return max(text_width(t.text, t.size, t.bold) for t in self._node(box, None).lines) + 24


def _polar_position(angle: float, across: float, down: float) -> tuple[float, float]:
    """From the top, clockwise."""
    return sin(angle) * across, -cos(angle) * down


def _boxes_overlap(places: dict[str, tuple[float, float]], widths: dict[str, float]) -> bool:
    """Do two boxes touch?"""
    boxes = [(*at, widths[name]) for name, at in places.items()]
    return any(
        abs(a[0] - b[0]) < (a[2] + b[2]) / 2 + 16 and abs(a[1] - b[1]) < 84
        for i, a in enumerate(boxes)
        for b in boxes[:i]
    )


def _blocked_position(state: BlockedRank) -> int:
    """The call that is not over: of a host that ran ahead, the device's."""
    return state.needs[0].position if state.device and state.needs else state.position


def _legend_keys(edges: list[DiagramEdge], nodes: list[DiagramNode]) -> tuple[LegendKey, ...]:
    """What occurs, in the colours and strokes in which it does."""
    keys = [LegendKey(RED_FILL, "the cause")]
    keys += (
        [LegendKey(PALE_FILL, "waits behind it")] if any(n.fill == PALE_FILL for n in nodes) else []
    )
    kinds = {(e.colour, e.dashed) for e in edges}
    for colour, whose in ((RED, "the cause, waiting"), (GREY, "behind it, waiting")):
        for dashed, words in ((False, "for this rank"), (True, "for any one of these")):
            keys += (
                [LegendKey(colour, f"{whose} {words}", "dashed" if dashed else "solid")]
                if (colour, dashed) in kinds
                else []
            )
    return tuple(keys)


def _draw(subject: PictureInput) -> BoxDiagram:
    core = None if subject.verdict is None else subject.verdict.core
    program, run = require_input(subject.program, "program"), require_input(subject.run, "run")
    return waitfor_picture(program, run.final_state, core or None, subject.part)


VIEW = PictureView(
    _draw,
    uses=("verdict",),
    examples=(
        GalleryExample("ring_of_four", "Everybody sends first: a circle of four."),
        GalleryExample(
            "pipeline_wrong_order",
            "A pipeline whose last stage sends in the wrong order: the cause red, the victim grey.",
        ),
    ),
)
