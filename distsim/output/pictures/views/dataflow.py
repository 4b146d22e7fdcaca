"""The data flow of a run: ranks as columns, time downwards, calls as boxes, messages as arrows,
collectives as bands.

Rows show the order of calls, not their durations; the timeline view has those. A large run is
reduced to some ranks and rows (`distsim.output.pictures.components.dataflow_selection`), and notes
count the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distsim.checker.diagnosis.wait_for_graph import build_wait_for_graph
from distsim.common.units import show_bytes, show_ns
from distsim.operations.one_sided import tag_text
from distsim.operations.registry import OPERATIONS
from distsim.output.pictures.components.call_labels import (
    detail_text,
    group_text,
    operation_text,
    ranks_in_words,
    wait_text,
)
from distsim.output.pictures.components.dataflow_calls import rank_calls
from distsim.output.pictures.components.dataflow_rows import DrawnCall, assign_rows, link_partners
from distsim.output.pictures.components.dataflow_selection import select_ranks_and_rows
from distsim.output.pictures.components.view_interface import (
    GalleryExample,
    PictureInput,
    PictureView,
    require_input,
)
from distsim.output.pictures.drawing.box_diagram import SMALL_SIZE, LegendKey, TextLine, clipped
from distsim.output.pictures.drawing.palette import (
    GREY,
    INK,
    LINE_COLOUR,
    MESSAGE_COLOUR,
    PALE_FILL,
    PASS_FILLS,
    RED,
    RED_FILL,
    WHITE,
    lightened,
)
from distsim.output.pictures.drawing.sequence_diagram import (
    LifelinePoint,
    SequenceArrow,
    SequenceBand,
    SequenceBox,
    SequenceDiagram,
    SequenceParticipant,
)
from distsim.output.text_layout import rank_list
from distsim.output.trace_data.activity import has_passes, pass_letter
from distsim.output.trace_data.selection import WHOLE_RUN, RunSelection
from distsim.program.model import Program

if TYPE_CHECKING:
    from distsim.engine.run_record import SimulatedRun
    from distsim.values import BufferValues

#: Limits of a legible picture. A note counts the rest. For a run that hangs, the last calls are
#: drawn.
MAX_RANKS, MAX_ROWS = 12, 40
_MAX_VALUES, _MAX_VALUE_WIDTH = 6, 40
#: With more calls than this, values at single calls are not computed.
_MAX_CALLS_WITH_VALUES = 5_000
_EXIT_TEXT = {
    "raised": "raised an error",
    "crashed": "crashed",
    "killed": "was killed",
    "absent": "never started",
    "ended": "ended",
}


def dataflow_diagram(
    program: Program,
    run: SimulatedRun,
    values: BufferValues | None = None,
    most_ranks: int = MAX_RANKS,
    most_rows: int = MAX_ROWS,
    part: RunSelection = WHOLE_RUN,
) -> SequenceDiagram:
    """The data flow of a run, or of a ``part`` of it. ``most_ranks`` and ``most_rows`` bound what
    is drawn. Raises UsageError.
    """
    return _DataflowBuilder(program, run, values, (most_ranks, most_rows), part).diagram()


class _DataflowBuilder:
    """Builds one diagram. ``events[i]`` are the drawn calls of column i, in order."""

    def __init__(
        self,
        program: Program,
        run: SimulatedRun,
        values: BufferValues | None,
        most: tuple[int, int],
        part: RunSelection,
    ) -> None:
        self.program = program
        self.run = run
        self.values = values
        most_ranks, most_rows = most
        final_state = run.final_state
        self.hangs = bool(final_state.blocked)
        failed = [end.rank for end in final_state.ends if end.status not in ("ended", "blocked")]
        stuck = sorted(build_wait_for_graph(final_state).core) if self.hangs else []
        preferred = [*failed, *stuck][:most_ranks]
        self.chosen = select_ranks_and_rows(run.trace, part, most_ranks, most_rows, preferred)
        self.ranks = self.chosen.ranks
        self.column = {rank: i for i, rank in enumerate(self.ranks)}

        calls_of_rank: list[list[DrawnCall]] = []
        counts: list[int] = []
        for column, rank in enumerate(self.ranks):
            limits = (most_rows, self.hangs)
            calls, count = rank_calls(program, run, rank, column, self.chosen.rows, limits)
            calls_of_rank.append(calls)
            counts.append(count)
        link_partners([call for calls in calls_of_rank for call in calls])
        assign_rows(calls_of_rank)
        self.events = calls_of_rank
        if not self.hangs:
            self.events = [
                [call for call in calls if call.row < most_rows] for calls in calls_of_rank
            ]
        drawn = [sum(1 + call.joined for call in calls) for calls in self.events]
        self.hidden = [count - shown for count, shown in zip(counts, drawn, strict=True)]
        self.shown = {call for calls in self.events for call in calls}
        self.items: list[SequenceBox] = []
        self.bands: list[SequenceBand] = []
        self.arrows: list[SequenceArrow] = []

    def diagram(self) -> SequenceDiagram:
        for column in self.events:
            for event in column:
                self._draw(event)
        self._ends()
        self._waiting()
        self._final_values()
        columns = tuple(
            SequenceParticipant(self._header(rank), f"rank {rank}", PALE_FILL)
            for rank in self.ranks
        )
        result = f"{self.run.outcome}, {show_ns(self.run.makespan_ns)}; {self.program.backend}"
        subtitle = f"{result}; time runs downwards, not to scale"
        title = f"{clipped(self.program.name, 60)}: data flow"
        drawn = (tuple(self.items), tuple(self.bands), tuple(self.arrows))
        return SequenceDiagram(title, subtitle, columns, *drawn, self._legend(), self._notes())

    def _header(self, rank: int) -> tuple[TextLine, ...]:
        """The rank, and where in the mesh it is."""
        where, below = [], self.program.world_size
        for axis, size in self.program.mesh.items():
            below //= size
            where.append(f"{clipped(axis, 16)} {rank // below % size}")
        more = self.chosen.represented_ranks.get(rank, ())
        said = [", ".join(where)] if where else []
        said += [f"same calls on {len(more)} more: {rank_list(more, 2)}"] if more else []
        return (
            TextLine(f"rank {rank}", bold=True, size=14),
            *(TextLine(line, colour=GREY, size=SMALL_SIZE) for line in said),
        )

    # --- calls ---
    def _draw(self, event: DrawnCall) -> None:
        if event.kind == "collective":
            met = [event, *event.partners]
            if event is min(met, key=lambda e: e.column) or event.row != met[1].row:
                self._band([e for e in met if e.row == event.row])
            return
        fill = RED_FILL if event.red else _fill(event)
        title = operation_text(event.call) if not event.joined else _joined_title(event)
        lines = [TextLine(title, bold=True, colour=RED if event.red else INK)]
        if event.kind == "wait":
            detail = wait_text(self.program, event.rank, event.position)
        elif event.joined:
            detail = f"{event.joined + 1} computes, {show_ns(event.joined_ns)}"
        else:
            detail = detail_text(event.call)
        value = self._value(event, "in" if event.sends else "out")
        details = filter(None, (detail, _unmatched_text(event), value))
        lines += [TextLine(text, size=11) for text in details]
        arrow = self._arrow(event) if event.receives else None
        in_arrow = event.kind == "p2p" and bool(event.partners) and event.partners[0] in self.shown
        border = RED if event.red else LINE_COLOUR
        self.items.append(
            SequenceBox(
                event.id, event.column, event.row, tuple(lines), fill, border, in_arrow=in_arrow
            )
        )
        if arrow is not None:
            self.arrows.append(arrow)

    def _value(self, event: DrawnCall, side: str) -> str:
        if self.values is None or event.part >= 0:
            return ""
        text = self.values.at_call.get((event.rank, event.position, side), "")
        return f"= {clipped(text, _MAX_VALUE_WIDTH)}" if _is_known(text) else ""

    def _arrow(self, event: DrawnCall) -> SequenceArrow | None:
        """The message into a receive, or into its wait where the receive was posted above the
        send.
        """
        if not event.partners or event.partners[0] not in self.shown:
            return None
        sender, head = event.partners[0], event
        if event.row < sender.row:
            head = self._first_wait_below(event, sender.row) or event
        words = f"{sender.call.op} {detail_text(sender.call)}".strip()
        return SequenceArrow(
            sender.id,
            head.id,
            _message_text(event),
            RED if event.differs else MESSAGE_COLOUR,
            words=words,
        )

    def _first_wait_below(self, receive: DrawnCall, row: int) -> DrawnCall | None:
        """The first wait for this receive that is drawn in the row or below it."""
        for call in self.events[receive.column]:
            if receive in call.requests and call.row >= row:
                return call
        return None

    def _band(self, party: list[DrawnCall]) -> None:
        """A collective. What its ranks do not have in common, they have in lines of their own."""
        event = party[0]
        red = any(e.red for e in party)
        heads, abouts = {operation_text(e.call) for e in party}, {_event_details(e) for e in party}
        title = [TextLine(_collective_title(heads, event), bold=True, colour=RED if red else INK)]
        if len(abouts) == 1 and _event_details(event):
            title.append(TextLine(_event_details(event), size=11))
        if event.call.root is not None:
            title.append(
                TextLine(
                    f"{OPERATIONS[event.call.op].root_field} = rank {event.call.root}", size=11
                )
            )
        cells: dict[int, tuple[TextLine, ...]] = {}
        for e in party:
            own: list[str] = []
            if len(heads) > 1:
                own.append(operation_text(e.call))
            if len(abouts) > 1:
                own.append(_event_details(e))
            cells[e.column] = tuple(TextLine(text, size=11) for text in (*own, *self._change(e)))
        fill = RED_FILL if red else lightened(OPERATIONS[event.call.op].colour)
        columns = tuple(sorted(e.column for e in party))
        look = (fill, RED if red else GREY, event.call.is_async)
        self.bands.append(SequenceBand(event.id, columns, event.row, tuple(title), cells, *look))

    def _change(self, event: DrawnCall) -> tuple[str, ...]:
        """What the call took and what it gave: ``1 → 6``, on two lines where it is long."""
        if self.values is None:
            return ()
        texts = [
            self.values.at_call.get((event.rank, event.position, side), "")
            for side in ("in", "out")
        ]
        if not all(_is_known(text) for text in texts):
            return ()
        given, got = (clipped(text, _MAX_VALUE_WIDTH) for text in texts)
        return (
            (f"{given} → {got}",)
            if len(given) + len(got) <= _MAX_VALUE_WIDTH
            else (given, f"→ {got}")
        )

    # --- the ends ---
    def _ends(self) -> None:
        """A box under the last call of a rank that left early, or has more calls than are drawn."""
        ends = {end.rank: end for end in self.run.final_state.ends}
        # The end of a process may be why another rank raised.
        has_failures = any(end.status not in ("ended", "blocked") for end in ends.values())
        awaited: set[int] = set()
        for blocked in self.run.final_state.blocked:
            for need in blocked.needs:
                awaited.update(need.ranks)
        for rank, events in zip(self.ranks, self.events, strict=True):
            row = events[-1].row + 1 if events else 0
            status = ends[rank].status if rank in ends else "ended"
            hidden = self.hidden[self.column[rank]]
            if hidden and not self.hangs:
                said = (TextLine(f"and {hidden} more", colour=GREY),)
                self.items.append(
                    SequenceBox(
                        f"more_r{rank}",
                        self.column[rank],
                        row,
                        said,
                        WHITE,
                        LINE_COLOUR,
                        dashed=True,
                    )
                )
            elif status != "blocked" and (status != "ended" or rank in awaited or has_failures):
                said = (
                    TextLine(
                        _EXIT_TEXT.get(status, status),
                        bold=True,
                        colour=RED if status != "ended" else GREY,
                    ),
                )
                self.items.append(
                    SequenceBox(
                        f"end_r{rank}", self.column[rank], row, said, WHITE, GREY, dashed=True
                    )
                )

    def _waiting(self) -> None:
        """At the bottom a row for each rank that is stuck, with dashed red arrows to those it waits
        for.
        """
        row = self._bottom()
        for blocked in self.run.final_state.blocked:
            if blocked.rank not in self.ranks:
                continue
            awaited: set[int] = set()
            for need in blocked.needs:
                awaited.update(need.ranks)
            needed = sorted(awaited - {blocked.rank})
            any_of = "any of " if any(need.any for need in blocked.needs) else ""
            text = f"waits for {any_of}{ranks_in_words(needed, 3)}" if needed else "waits"
            said = (TextLine(text, bold=True, colour=RED, size=11),)
            name = f"stuck_r{blocked.rank}"
            self.items.append(
                SequenceBox(
                    name,
                    self.column[blocked.rank],
                    row,
                    said,
                    WHITE,
                    RED,
                    dashed=True,
                    in_arrow=bool(needed),
                )
            )
            seen = [r for r in needed if r in self.ranks]
            self.arrows += [
                SequenceArrow(
                    name,
                    LifelinePoint(self.column[r], row),
                    "",
                    RED,
                    dashed=True,
                    words=said[0].text,
                )
                for r in seen
            ]
            row += 1

    def _bottom(self) -> int:
        return max([i.row for i in self.items] + [b.row for b in self.bands], default=-1) + 1

    def _final_values(self) -> None:
        if self.values is None:
            return
        row = self._bottom()
        for rank in self.ranks:
            texts = []
            for (owner, label), text in self.values.final.items():
                if owner == rank and _is_known(text):
                    texts.append(f"{clipped(label, 20)} = {clipped(text, _MAX_VALUE_WIDTH)}")
            if len(texts) > _MAX_VALUES:
                texts[_MAX_VALUES:] = [f"and {len(texts) - _MAX_VALUES} more"]
            if texts:
                lines = (
                    TextLine("final values", bold=True, colour=GREY, size=11),
                    *(TextLine(t, size=11) for t in texts),
                )
                self.items.append(
                    SequenceBox(f"final_r{rank}", self.column[rank], row, lines, WHITE, GREY)
                )

    # --- around the picture ---
    def _legend(self) -> tuple[LegendKey, ...]:
        # Calls in column order: the legend names operations in the order in which they appear.
        calls = [call for column in self.events for call in column]
        ops_by_colour: dict[str, dict[str, None]] = {}
        for call in calls:
            if not call.red:
                ops_by_colour.setdefault(_fill(call), {})[call.call.op] = None
        keys = [
            LegendKey(colour, ", ".join(list(ops)[:3])) for colour, ops in ops_by_colour.items()
        ]
        if not all(arrow.dashed for arrow in self.arrows):
            keys.append(LegendKey(MESSAGE_COLOUR, "message", "solid"))
        if any(call.red for call in calls):
            keys.append(LegendKey(RED, "blocked or mismatched call", "dashed"))
        return tuple(keys)

    def _notes(self) -> tuple[str, ...]:
        notes = list(self.chosen.notes)
        if any(self.hidden):
            which = "last" if self.hangs else "first"
            side = "before" if self.hangs else "after"
            hint = (
                "; --view schedule draws all passes of a pipeline"
                if has_passes(self.run.trace)
                else "; select with --steps or --time"
            )
            notes.append(
                f"only the {which} calls are drawn; "
                f"{sum(self.hidden)} calls {side} them are not{hint}"
            )
        return tuple(notes)


def _event_details(event: DrawnCall) -> str:
    """``grad (4 MiB)``."""
    size = f"({show_bytes(event.nbytes)})" if event.nbytes else ""
    return f"{detail_text(event.call)} {size}".strip()


def _fill(event: DrawnCall) -> str:
    """The background of a call's box."""
    if event.kind == "wait":
        return PALE_FILL
    letter = pass_letter(event.call.name or "") if event.call.op == "compute" else ""
    if letter:
        return PASS_FILLS[letter]
    return lightened(OPERATIONS[event.call.op].colour)


def _joined_title(event: DrawnCall) -> str:
    """``forward`` for a forward pass of several computes; else the name of one of them."""
    name = event.call.name or event.call.op
    return {"F": "forward", "B": "backward"}.get(pass_letter(name), name)


def _collective_title(heads: set[str], event: DrawnCall) -> str:
    where = group_text(event.call)
    head = operation_text(event.call) if len(heads) == 1 else "mismatch"
    return f"{head}   {where}" if where else head


def _is_known(text: str) -> bool:
    return bool(text) and "?" not in text


def _message_text(event: DrawnCall) -> str:
    """Bytes, and what is not the default: ``16 KiB, tag 3, stage``."""
    return ", ".join(p for p in (show_bytes(event.nbytes), _tag_and_group(event)) if p)


def _tag_and_group(event: DrawnCall) -> str:
    parts = (tag_text(event.call.tag), group_text(event.call).partition("[")[0])
    return ", ".join(p for p in parts if p)


def _unmatched_text(event: DrawnCall) -> str:
    """The tag and group of an unmatched message, which has no arrow to show them."""
    return _tag_and_group(event) if event.kind == "p2p" and event.match < 0 else ""


def _draw(subject: PictureInput) -> SequenceDiagram:
    """With the values at every call too, where the program is small enough for a picture that shows
    them.
    """
    program, run, values = (
        require_input(subject.program, "program"),
        require_input(subject.run, "run"),
        subject.values,
    )
    if values is not None and not values.at_call and program.call_count <= _MAX_CALLS_WITH_VALUES:
        from distsim.values import compute_values

        values = compute_values(program, run.trace, at_calls=True)
    return dataflow_diagram(program, run, values, part=subject.part)


VIEW = PictureView(
    _draw,
    uses=("values",),
    examples=(
        GalleryExample(
            "hybrid",
            "Two pipeline stages, two replicas: activations go right, gradients come back, "
            "and weight gradients are averaged.",
        ),
        GalleryExample("head_to_head_sends", "Two blocking sends that wait for each other."),
        GalleryExample(
            "any_source_ring",
            "A ring with isend and receives from any source, with the values of each message.",
        ),
        GalleryExample(
            "ddp_by_hand", "Three gradient buckets: each is reduced while the next one is computed."
        ),
    ),
)
