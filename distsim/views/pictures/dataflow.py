"""Which data go where: ranks as columns, time downwards, calls as boxes, messages as arrows, collectives as bands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from distsim.check.waitfor import wait_for
from distsim.ops.one_sided import tag_text
from distsim.ops.table import OPS
from distsim.program.records import Program
from distsim.units import show_bytes, show_ns
from distsim.views.columns import choose
from distsim.views.drawing.palette import GREY, INK, LINE, MESSAGE, PALE, RED, RED_FILL, WHITE, tint
from distsim.views.drawing.records import SMALL, Key, Text, clipped
from distsim.views.drawing.rows import Event, assign_rows, join
from distsim.views.drawing.sequence import Anchor, Arrow, Band, Item, Participant, SequenceDiagram
from distsim.views.drawing.view import Example, Subject, View, given
from distsim.views.drawing.words import detail_text, group_text, head_text, wait_text, who
from distsim.views.part import WHOLE, Part
from distsim.views.pictures.schedule import has_passes
from distsim.views.tables import ranks_text

if TYPE_CHECKING:
    from distsim.engine.record import Run
    from distsim.values import Values

#: What is drawn at most; a picture with more is no picture. The rest is counted in a note. A run that hangs shows its last calls.
MOST_RANKS, MOST_ROWS = 12, 40
_MOST_VALUES, _WIDEST_VALUE = 6, 40
#: Beyond this the values at single calls are left out.
_MOST_CALLS_WITH_VALUES = 5_000
_LEFT = {"raised": "raised an error", "crashed": "crashed", "killed": "was killed", "absent": "never started", "ended": "ended"}


def dataflow_diagram(
    program: Program, run: Run, values: Values | None = None, most_ranks: int = MOST_RANKS, most_rows: int = MOST_ROWS,
    part: Part = WHOLE,
) -> SequenceDiagram:  # fmt: skip
    """The data flow of a run, or of a ``part`` of it. ``most_ranks`` and ``most_rows`` bound what is drawn. Raises UsageError."""
    return _Dataflow(program, run, values, (most_ranks, most_rows), part).diagram()


class _Dataflow:
    def __init__(self, program: Program, run: Run, values: Values | None, most: tuple[int, int], part: Part) -> None:
        self.program, self.run, self.values = program, run, values
        most_ranks, most_rows = most
        self.hangs = bool(run.standstill.blocked)
        gone = [end.rank for end in run.standstill.ends if end.status not in ("ended", "blocked")]
        stuck = sorted(wait_for(run.standstill).core) if self.hangs else []
        self.chosen = choose(run.trace, part, most_ranks, most_rows, [*gone, *stuck][:most_ranks])
        self.ranks = self.chosen.ranks
        self.column = {rank: i for i, rank in enumerate(self.ranks)}
        columns = [_events(program, run, rank, i, self.chosen.rows, (most_rows, self.hangs)) for i, rank in enumerate(self.ranks)]
        join([event for events, _ in columns for event in events])
        assign_rows([events for events, _ in columns])
        self.events = [events if self.hangs else [e for e in events if e.row < most_rows] for events, _ in columns]
        self.hidden = [count - len(shown) for (_, count), shown in zip(columns, self.events, strict=True)]
        self.shown = {event for column in self.events for event in column}
        self.items: list[Item] = []
        self.bands: list[Band] = []
        self.arrows: list[Arrow] = []

    def diagram(self) -> SequenceDiagram:
        for column in self.events:
            for event in column:
                self._draw(event)
        self._ends()
        self._waiting()
        self._final_values()
        columns = tuple(Participant(self._header(rank), f"rank {rank}", PALE) for rank in self.ranks)
        subtitle = f"{self.run.outcome}, {show_ns(self.run.makespan_ns)}; {self.program.backend}; time runs down, not to scale"
        title = f"{clipped(self.program.name, 60)}: who sends what to whom"
        drawn = (tuple(self.items), tuple(self.bands), tuple(self.arrows))
        return SequenceDiagram(title, subtitle, columns, *drawn, self._legend(), self._notes())

    def _header(self, rank: int) -> tuple[Text, ...]:
        """The rank, and where in the mesh it is."""
        where, below = [], self.program.world_size
        for axis, size in self.program.mesh.items():
            below //= size
            where.append(f"{clipped(axis, 16)} {rank // below % size}")
        more = self.chosen.stand_for.get(rank, ())
        said = [", ".join(where)] if where else []
        said += [f"and {len(more)} alike: {ranks_text(more, 2)}"] if more else []
        return (Text(f"rank {rank}", bold=True, size=14), *(Text(line, colour=GREY, size=SMALL) for line in said))

    # --- calls ---
    def _draw(self, event: Event) -> None:
        if event.kind == "collective":
            met = [event, *event.partners]
            if event is min(met, key=lambda e: e.column) or event.row != met[1].row:
                self._band([e for e in met if e.row == event.row])
            return
        fill = RED_FILL if event.red else PALE if event.kind == "wait" else tint(OPS[event.call.op].colour)
        lines = [Text(head_text(event.call), bold=True, colour=RED if event.red else INK)]
        detail = wait_text(self.program, event.rank, event.position) if event.kind == "wait" else detail_text(event.call)
        lines += [Text(detail, size=11)] if detail else []
        alone = _apart(event)
        lines += [Text(alone, size=11)] if alone else []
        side = "in" if event.sends else "out"
        lines += [Text(v, size=11) for v in [self._value(event, side)] if v]
        arrow = self._arrow(event) if event.receives else None
        in_arrow = event.kind == "p2p" and bool(event.partners) and event.partners[0] in self.shown
        border = RED if event.red else LINE
        self.items.append(Item(event.id, event.column, event.row, tuple(lines), fill, border, in_arrow=in_arrow))
        if arrow is not None:
            self.arrows.append(arrow)

    def _value(self, event: Event, side: str) -> str:
        if self.values is None or event.part >= 0:
            return ""
        text = self.values.at_call.get((event.rank, event.position, side), "")
        return f"= {clipped(text, _WIDEST_VALUE)}" if _known(text) else ""

    def _arrow(self, event: Event) -> Arrow | None:
        """The message into a receive, or into its wait where the receive was posted above the send."""
        if not event.partners or event.partners[0] not in self.shown:
            return None
        sender, head = event.partners[0], event
        if event.row < sender.row:
            waits = [e for e in self.events[event.column] if event in e.requests and e.row >= sender.row]
            head = waits[0] if waits else event
        words = f"{sender.call.op} {detail_text(sender.call)}".strip()
        return Arrow(sender.id, head.id, _message_text(event), RED if event.differs else MESSAGE, words=words)

    def _band(self, party: list[Event]) -> None:
        """A collective. What its ranks do not have in common, they have in lines of their own."""
        event = party[0]
        red = any(e.red for e in party)
        heads, abouts = {head_text(e.call) for e in party}, {_about(e) for e in party}
        title = [Text(_joint(heads, event), bold=True, colour=RED if red else INK)]
        if len(abouts) == 1 and _about(event):
            title.append(Text(_about(event), size=11))
        if event.call.root is not None:
            title.append(Text(f"{OPS[event.call.op].root_field} = rank {event.call.root}", size=11))
        cells: dict[int, tuple[Text, ...]] = {}
        for e in party:
            own = [head_text(e.call)] if len(heads) > 1 else []
            own += [_about(e)] if len(abouts) > 1 else []
            cells[e.column] = tuple(Text(text, size=11) for text in (*own, *self._change(e)))
        fill = RED_FILL if red else tint(OPS[event.call.op].colour)
        columns = tuple(sorted(e.column for e in party))
        look = (fill, RED if red else GREY, event.call.is_async)
        self.bands.append(Band(event.id, columns, event.row, tuple(title), cells, *look))

    def _change(self, event: Event) -> tuple[str, ...]:
        """What the call took and what it gave: ``1 → 6``, on two lines where it is long."""
        if self.values is None:
            return ()
        texts = [self.values.at_call.get((event.rank, event.position, side), "") for side in ("in", "out")]
        if not all(_known(text) for text in texts):
            return ()
        given, got = (clipped(text, _WIDEST_VALUE) for text in texts)
        return (f"{given} → {got}",) if len(given) + len(got) <= _WIDEST_VALUE else (given, f"→ {got}")

    # --- the ends ---
    def _ends(self) -> None:
        """A box under the last call of a rank that left early, or has more calls than are drawn."""
        ends = {end.rank: end for end in self.run.standstill.ends}
        awaited = {rank for b in self.run.standstill.blocked for need in b.needs for rank in need.ranks}
        for rank, events in zip(self.ranks, self.events, strict=True):
            row = events[-1].row + 1 if events else 0
            status = ends[rank].status if rank in ends else "ended"
            hidden = self.hidden[self.column[rank]]
            if hidden and not self.hangs:
                said = (Text(f"and {hidden} more", colour=GREY),)
                self.items.append(Item(f"more_r{rank}", self.column[rank], row, said, WHITE, LINE, dashed=True))
            elif status != "blocked" and (status != "ended" or rank in awaited):
                said = (Text(_LEFT.get(status, status), bold=True, colour=RED if status != "ended" else GREY),)
                self.items.append(Item(f"end_r{rank}", self.column[rank], row, said, WHITE, GREY, dashed=True))

    def _waiting(self) -> None:
        """At the bottom a row for each rank that is stuck, with dashed red arrows to those it waits for."""
        row = self._bottom()
        for blocked in self.run.standstill.blocked:
            if blocked.rank not in self.ranks:
                continue
            needed = sorted({r for need in blocked.needs for r in need.ranks if r != blocked.rank})
            any_of = "any of " if any(need.any for need in blocked.needs) else ""
            said = (Text(f"waits for {any_of}{who(needed, 3)}" if needed else "waits", bold=True, colour=RED, size=11),)
            name = f"stuck_r{blocked.rank}"
            self.items.append(Item(name, self.column[blocked.rank], row, said, WHITE, RED, dashed=True, in_arrow=bool(needed)))
            seen = [r for r in needed if r in self.ranks]
            self.arrows += [Arrow(name, Anchor(self.column[r], row), "", RED, dashed=True, words=said[0].text) for r in seen]
            row += 1

    def _bottom(self) -> int:
        return max([i.row for i in self.items] + [b.row for b in self.bands], default=-1) + 1

    def _final_values(self) -> None:
        if self.values is None:
            return
        row = self._bottom()
        for rank in self.ranks:
            mine = [(label, text) for (r, label), text in self.values.final.items() if r == rank and _known(text)]
            texts = [f"{clipped(label, 20)} = {clipped(text, _WIDEST_VALUE)}" for label, text in mine[:_MOST_VALUES]]
            texts += [f"and {len(mine) - _MOST_VALUES} more"] if len(mine) > _MOST_VALUES else []
            if texts:
                lines = (Text("in the end", bold=True, colour=GREY, size=11), *(Text(t, size=11) for t in texts))
                self.items.append(Item(f"final_r{rank}", self.column[rank], row, lines, WHITE, GREY))

    # --- around the picture ---
    def _legend(self) -> tuple[Key, ...]:
        ops: dict[str, list[str]] = {}
        for event in (e for column in self.events for e in column if not e.red):
            names = ops.setdefault(PALE if event.kind == "wait" else tint(OPS[event.call.op].colour), [])
            names += [event.call.op] if event.call.op not in names else []
        keys = [Key(colour, ", ".join(names[:3])) for colour, names in ops.items()]
        keys += [Key(MESSAGE, "message", "solid")] if any(not a.dashed for a in self.arrows) else []
        keys += (
            [Key(RED, "waits in vain, or does not fit", "dashed")] if any(e.red for column in self.events for e in column) else []
        )
        return tuple(keys)

    def _notes(self) -> tuple[str, ...]:
        notes = list(self.chosen.notes)
        if any(self.hidden):
            which = "last" if self.hangs else "first"
            side = "before" if self.hangs else "after"
            hint = (
                "; --view schedule draws a pipeline as a grid"
                if has_passes(self.run.trace)
                else "; choose with --steps or --time"
            )
            notes.append(f"only the {which} calls are drawn; {sum(self.hidden)} {side} them are not{hint}")
        return tuple(notes)


def _about(event: Event) -> str:
    """``grad (4 MiB)``."""
    return " ".join(t for t in (detail_text(event.call), f"({show_bytes(event.nbytes)})" if event.nbytes else "") if t)


def _joint(heads: set[str], event: Event) -> str:
    where = group_text(event.call)
    head = head_text(event.call) if len(heads) == 1 else "met, but do not fit"
    return f"{head}   {where}" if where else head


def _known(text: str) -> bool:
    return bool(text) and "?" not in text


def _message_text(event: Event) -> str:
    """Bytes, and what is not the default: ``16 KiB, tag 3, stage``."""
    return ", ".join(p for p in (show_bytes(event.nbytes), _address(event)) if p)


def _address(event: Event) -> str:
    parts = (tag_text(event.call.tag), group_text(event.call).partition("[")[0])
    return ", ".join(p for p in parts if p)


def _apart(event: Event) -> str:
    """What a message that met nobody is looking for, where no arrow tells."""
    return _address(event) if event.kind == "p2p" and event.match < 0 else ""


def _events(
    program: Program, run: Run, rank: int, column: int, chosen: NDArray[np.bool_], bound: tuple[int, bool]
) -> tuple[list[Event], int]:
    """The first (or last) of the chosen calls that a rank made, and how many there are. A batch counts as its parts."""
    trace, (most, last) = run.trace, bound
    batches = trace.ops(*(name for name, row in OPS.items() if row.kind == "batch")) & (trace["part"] < 0)
    rows = np.flatnonzero((trace["rank"] == rank) & chosen & ~batches).tolist()
    differs = {row for met, _ in run.mismatches for row in met}
    found: list[Event] = []
    for row in rows[-most:] if last else rows[:most]:
        position, part = int(trace["position"][row]), int(trace["part"][row])
        call = program.call(rank, position)
        call = call.parts[part] if part >= 0 else call
        kind = OPS[call.op].kind
        done = int(trace["returned_ns" if kind == "wait" else "finished_ns"][row]) >= 0
        facts = (int(trace["match"][row]), done, int(trace["nbytes"][row]), row in differs)
        found.append(Event(column, rank, position, part, call, kind, *facts, code=program.code_of[rank]))
    _bind(program, rank, found)
    return found, len(rows)


def _bind(program: Program, rank: int, events: Sequence[Event]) -> None:
    """Give each wait the requests that it ends."""
    by_position: dict[int, list[Event]] = {}
    for event in events:
        by_position.setdefault(event.position, []).append(event)
    for event in events:
        if event.kind == "wait":
            backs = program.code_call(rank, event.position).waits
            event.requests = [e for back in backs for e in by_position.get(event.position - back, ())]


def _drawn(subject: Subject) -> SequenceDiagram:
    """With the values at every call too, where the program is small enough for a picture that shows them."""
    program, run, values = given(subject.program, "program"), given(subject.run, "run"), subject.values
    if values is not None and not values.at_call and program.call_count <= _MOST_CALLS_WITH_VALUES:
        from distsim.values import compute_values

        values = compute_values(program, run.trace, at_calls=True)
    return dataflow_diagram(program, run, values, part=subject.part)


VIEW = View(_drawn, uses=("values",), examples=(
    Example("hybrid", "A model cut in two, two replicas of it: activations go right, gradients come back, weight gradients are averaged."),
    Example("head_to_head_sends", "Two sends that wait for each other."),
    Example("any_source_ring", "A ring with isend and receives from any source, with the values that travel."),
    Example("ddp_by_hand", "Three gradient buckets, each reduced while the next is computed."),
))  # fmt: skip
