"""From a standstill to findings: the cause, told apart from those who merely wait behind it, with
places and a way out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from distsim.backends import BACKEND_PROFILES
from distsim.checker.detectors.request_leaks import first_lost_message, is_request_lost
from distsim.checker.diagnosis.awaited_call import (
    AwaitedCall,
    AwaitedCallFinder,
    NearMiss,
    TakenMessages,
    near_miss_lines,
)
from distsim.checker.diagnosis.blocked_rows import BlockedRows
from distsim.checker.diagnosis.exit_advice import (
    ExitAdvice,
    advise_exited_ranks,
    exit_words,
    incomplete_new_group,
    open_connection_note,
)
from distsim.checker.diagnosis.hang_advice import (
    UNIQUE_HANDLE_ADVICE,
    WrongGroupCall,
    advise_cycle,
    advise_dropped_request,
    advise_keep_request,
    advise_message,
    advise_new_group,
    advise_one_communicator,
    same_operation,
    with_new_group_rule,
)
from distsim.checker.diagnosis.local_group_advice import advise_local_group
from distsim.checker.diagnosis.wait_for_graph import (
    WaitCycle,
    WaitForGraph,
    build_wait_for_graph,
    need_towards,
)
from distsim.checker.matching.call_index import CallIndex
from distsim.checker.matching.channel_layout import ChannelLayout, build_channel_layout
from distsim.checker.wording import (
    MAX_SHOWN,
    aligned_columns,
    blocked_call_words,
    cycle_words,
    location_text,
    more_like_this,
    place_of_call,
    rank_list,
    unmatched_words,
)
from distsim.findings.final_state import FinalState, WaitDependency
from distsim.findings.finding_types import Finding, SourceLocation
from distsim.operations.registry import OPERATIONS
from distsim.program.model import Program


def diagnose_hang(
    program: Program,
    final_state: FinalState,
    layout: ChannelLayout | None = None,
    taken: TakenMessages | None = None,
) -> tuple[Finding, ...]:
    """The findings DS301 to DS305 of a standstill, causes first; empty when nobody is blocked.

    Works for the one-pass driver's standstill and for the engine's under a profile. ``layout``, if
    at hand, saves building it again. ``taken``: which messages receives from any source have taken
    on the way, where that is known.
    """
    failed = (
        program.startup is not None
        and program.startup.failed
        and all(f.kind != "absent" for f in program.faults)
    )
    if not final_state.blocked or failed:  # nobody has begun: the start-up's own findings say why
        return ()
    return _HangDiagnosis(
        program, final_state, CallIndex(layout or build_channel_layout(program)), taken or {}
    ).findings()


class WaitEdge(NamedTuple):
    """A blocked rank, what it waits for, and whom of those that would have to act one looks at."""

    rank: int
    need: WaitDependency
    awaited: int


class _CycleEdges(NamedTuple):
    """A circle with a turn for each rank of its path; ``lost``: the turn that nothing in the
    program would ever meet, else -1.
    """

    circle: WaitCycle
    turns: list[WaitEdge]
    lost: int


class _HangDiagnosis:
    """One standstill under the lens."""

    def __init__(
        self, program: Program, final_state: FinalState, where: CallIndex, taken: TakenMessages
    ) -> None:
        self.program, self.where = program, where
        self.rows = BlockedRows(program, final_state, where)
        self.blocked, self.ends = self.rows.blocked, self.rows.ends
        self.graph: WaitForGraph = build_wait_for_graph(final_state)
        self.counterparts = AwaitedCallFinder(program, where, taken)
        self._left: dict[tuple[int, int], tuple[int, ...]] = {}
        self._ended: dict[int, bool] = {}

    def findings(self) -> tuple[Finding, ...]:
        found = [self._circle(rings) for rings in self._rings()]
        found += [self._gone(code, ranks) for (code, _, _), ranks in self._gone_groups()]
        if self.graph.victims and found:
            found[0] = self._with_victims(found[0])
        return tuple(found)

    def _with_victims(self, finding: Finding) -> Finding:
        victims = self.graph.victims
        lone = len(victims) == 1
        line = f"  behind them: {rank_list(victims)} wait{'s' if lone else ''} for what {'it' if lone else 'they'} cannot get"
        ranks = tuple(sorted({*finding.ranks, *victims}))
        return replace(finding, message=f"{finding.message}\n{line}", ranks=ranks)

    # --- circles ---
    def _rings(self) -> list[list[_CycleEdges]]:
        """The circles, those whose ranks stand in the same calls together."""
        groups: dict[object, list[_CycleEdges]] = {}
        for circle in self.graph.circles:
            path = circle.path
            pairs = zip(path, (*path[1:], path[0]), strict=True)
            turns = [
                WaitEdge(rank, need_towards(self.blocked[rank], onward), onward)
                for rank, onward in pairs
            ]
            lost = next(
                (
                    k
                    for k, t in enumerate(turns)
                    if not t.need.any and not self.counterparts.has_awaited_call(*t)
                ),
                -1,
            )
            sites = tuple((*self._sites(t), t.need.part) for t in turns)
            groups.setdefault((circle.has_any_source, len(circle.ranks), lost, sites), []).append(
                _CycleEdges(circle, turns, lost)
            )
        return list(groups.values())

    def _sites(self, turn: WaitEdge) -> tuple[tuple[object, ...], ...]:
        """Where the call that the rank stands in is written, and the one whose request it waits
        for; nothing for its end. Files are left out: a program that was built or recorded has one
        for each rank."""
        calls = self.program.code(turn.rank).calls
        sites = (
            self.program.sites[calls[p].site]
            for p in (self.blocked[turn.rank].position, turn.need.position)
            if p < len(calls)
        )
        return tuple((site.line, site.column, site.op) for site in sites)

    def _circle(self, rings: list[_CycleEdges]) -> Finding:
        circle, turns, lost = rings[0]
        core = tuple(sorted(rank for ring in rings for rank in ring.circle.ranks))
        also = more_like_this(len(rings) - 1, "pair" if len(circle.ranks) == 2 else "circle")
        if lost >= 0:
            return self._no_counterpart([turns[lost]], core, also)
        parts = [self.counterparts.of(*turn) for turn in turns[:MAX_SHOWN]]
        for turn, part in zip(turns, parts, strict=False):
            if part is not None and self._given_up(part):
                return self._cancelled(turn, part, core, also)
        lines = [
            self.rows.row(t.rank, t.need, self.rows.meets(p))
            for t, p in zip(turns, parts, strict=False)
        ]
        head = f"{cycle_words(circle.path)} wait for each other"
        if circle.has_any_source:
            head = (
                f"{rank_list(circle.ranks)} wait for each other, one in a receive from any source"
            )
        more = [*more_like_this(len(circle.ranks) - len(lines)), *also]
        known = [p for p in parts if p is not None]
        other, made = self._other_group(known), incomplete_new_group(self.where, turns, parts)
        advice = (
            self._apart(known)
            or self._silenced(turns, parts)
            or (other and other.advice)
            or advise_cycle(turns[:MAX_SHOWN], parts, len(circle.path))
        )
        found = self._finding(
            "DS305" if circle.has_any_source else "DS301",
            [head, *aligned_columns(lines), *more],
            core,
            advice,
            [(t.rank, t.need) for t in turns],
        )
        if made is not None:
            return with_new_group_rule(
                replace(found, help=advise_new_group(made[1], made[0].local_sync)), *made
            )
        return found if other is None else other.lead(found)

    def _given_up(self, part: AwaitedCall) -> bool:
        """The awaited rank posted its part and lost the handle of it, so that it was cancelled."""
        state = self.blocked.get(part.rank)
        if (
            BACKEND_PROFILES[self.program.backend].dropped != "cancels"
            or not part.is_message
            or (state is not None and state.device)
        ):
            return False
        return (
            part.position is not None
            and self.rows.passed(part)
            and is_request_lost(self.program, part.rank, part.position)
        )

    def _cancelled(
        self, turn: WaitEdge, part: AwaitedCall, core: tuple[int, ...], also: list[str]
    ) -> Finding:
        """DS304, where the counterpart was there and is no more."""
        position = part.position or 0
        wants = "send" if OPERATIONS[part.call.op].direction == "send" else "receive"
        handled = self.program.code(part.rank).calls[position].handled
        why = (
            "its handle is bound again before a wait"
            if handled
            else "it keeps no handle of the request"
        )
        head = (
            f"rank {turn.rank} waits to {wants} a message that rank {part.rank} has given up: {why}"
        )
        posted, place = (
            blocked_call_words(self.program, part.rank, position, position, -1),
            self.program.place(part.rank, position),
        )
        rows = [
            self.rows.row(turn.rank, turn.need, ""),
            (f"rank {part.rank}", posted, location_text(place), "posted, never waited for"),
        ]
        advice = UNIQUE_HANDLE_ADVICE if handled else advise_keep_request(part.rank)
        found = self._finding(
            "DS304", [head, *aligned_columns(rows), *also], core, advice, [(turn.rank, turn.need)]
        )
        return replace(found, places=(place, *found.places))

    def _apart(self, parts: list[AwaitedCall]) -> tuple[str, ...]:
        """Both ends are posted, on two communicators (semantics N7), or on a group that has other
        names: what to do about it.
        """
        for part in parts if BACKEND_PROFILES[self.program.backend].device else ():
            if part.is_message and part.position is not None and self.rows.posted(part):
                alone = not self.program.code_call(part.rank, part.position).parts
                if alone == bool(part.batched):
                    return advise_one_communicator(
                        part.call.rank if alone else part.rank,
                        part.rank if alone else part.call.rank,
                    )
        return advise_local_group(self.program, parts)

    def _silenced(
        self, turns: Sequence[WaitEdge], parts: Sequence[AwaitedCall | None]
    ) -> tuple[str, ...]:
        """Both sides are posted, and nothing passes between the two since a request of theirs was
        dropped (semantics G4).
        """
        met = [
            (turn.rank, part)
            for turn, part in zip(turns, parts, strict=False)
            if part is not None and self.rows.posted(part)
        ]
        for mine, part in (
            met if BACKEND_PROFILES[self.program.backend].dropped == "cancels" else ()
        ):
            for rank, other in ((mine, part.rank), (part.rank, mine)):
                end = (
                    self.blocked[rank].position
                    if rank in self.blocked
                    else len(self.program.code(rank).calls)
                )
                position = first_lost_message(self.program, rank, other, part.call.group.id, end)
                if position is not None:
                    return advise_dropped_request(
                        rank, other, location_text(self.program.place(rank, position))
                    )
        return ()

    def _other_group(self, parts: list[AwaitedCall]) -> WrongGroupCall | None:
        """A rank waits on a group where another has no such call, and is awaited on another group
        for the same call.
        """
        for part in parts:
            if (
                not part.is_message
                and part.position is None
                and part.call.op not in ("new_group", "init_process_group")
            ):
                awaited = self._awaits_elsewhere(part)
                if awaited is not None:
                    return WrongGroupCall(
                        part.call, awaited.call, self.rows.place_of_waiting_call(awaited)
                    )
        return None

    def _awaits_elsewhere(self, part: AwaitedCall) -> AwaitedCall | None:
        """What a rank waits for that the rank of a call should have joined on another group: the
        same operation, which it never makes.
        """
        rank, inside = part.call.rank, {}
        for waiting, state in self.blocked.items():
            for need in state.needs:
                if id(need.ranks) not in inside:
                    inside[id(need.ranks)] = rank in need.ranks
                found = (
                    self.counterparts.of(waiting, need, rank)
                    if inside[id(need.ranks)] and not need.any
                    else None
                )
                if (
                    found is not None
                    and found.sequence not in (-1, part.sequence)
                    and found.position is None
                ):
                    other = found.call.group.name != part.call.group.name
                    return found if other and same_operation(found.call, part.call) else None
        return None

    # --- ranks that have left ---
    def _gone_groups(self) -> list[tuple[tuple[str, int, tuple[int, ...]], list[int]]]:
        """Ranks that wait on one who has left, by code of finding, place and (for collectives) who
        has left.
        """
        groups: dict[tuple[str, int, tuple[int, ...]], list[int]] = {}
        for rank in self.graph.waits_on_exited:
            need = self._gone_need(rank)
            code = self._gone_code(rank, need, self._gone_in(rank, need))
            groups.setdefault((code, *self._meeting(rank, need)), []).append(rank)
        return sorted(groups.items(), key=lambda item: (item[0][0] != "DS303", item[1][0]))

    def _meeting(self, rank: int, need: WaitDependency) -> tuple[int, tuple[int, ...]]:
        """What tells groups apart: a message's place, or a collective's sequence and who is missing
        there.
        """
        if need.position >= len(self.program.code(rank).calls) or self.rows.starts(rank, need):
            return -1, need.ranks
        if need.part >= 0 or not self.where.is_join(rank, need.position):
            return self.program.code_call(rank, need.position).site, ()
        return self.where.sequence(rank, self.program.code_call(rank, need.position)), need.ranks

    def _is_message(self, rank: int, need: WaitDependency) -> bool:
        """The need is for a message."""
        call = self.program.code_call(rank, need.position)
        return (call.parts[max(need.part, 0)] if call.parts else call).port >= 0

    def _gone_need(self, rank: int) -> WaitDependency:
        return next(need for need in self.blocked[rank].needs if self._gone_in(rank, need))

    def _gone_in(self, rank: int, need: WaitDependency) -> tuple[int, ...]:
        """Those of a need who have left. Ranks that share both sets share the answer."""
        gone = self.graph.waits_on_exited[rank]
        key = id(gone), id(need.ranks)
        if key not in self._left:
            asked = set(need.ranks)
            self._left[key] = tuple(r for r in gone if r in asked)
        return self._left[key]

    def _gone_code(self, rank: int, need: WaitDependency, gone: tuple[int, ...]) -> str:
        if self.rows.starts(rank, need):
            return "DS303"
        lost = (
            need.position < len(self.program.code(rank).calls)
            and self._is_message(rank, need)
            and (need.any or not self.counterparts.has_awaited_call(rank, need, gone[0]))
        )
        if lost:
            return "DS304"
        if id(gone) not in self._ended:
            self._ended[id(gone)] = all(self.ends[r].status == "ended" for r in gone)
        return "DS302" if self._ended[id(gone)] else "DS303"

    def _gone(self, code: str, ranks: list[int]) -> Finding:
        needs = [self._gone_need(rank) for rank in ranks]
        if code == "DS304":
            turns = [
                WaitEdge(r, n, self._gone_in(r, n)[0]) for r, n in zip(ranks, needs, strict=True)
            ]
            also = (
                []
                if needs[0].any
                else open_connection_note(self.program, [self.ends[turns[0].awaited]])
            )
            return self._no_counterpart(turns, tuple(ranks), also)
        left = {id(found): found for found in map(self._gone_in, ranks, needs)}
        gone = sorted({r for found in left.values() for r in found})
        ends = [self.ends[r] for r in gone]
        status = ends[0].status
        where = " in init_process_group" if self.rows.starts(ranks[0], needs[0]) else ""
        it = "it" if len(gone) == 1 else "them"
        head = (
            f"{rank_list(gone)} {exit_words(self.program, ends)}; {rank_list(ranks)} "
            f"wait{'s' if len(ranks) == 1 else ''} for {it}{where}"
        )
        parts = [
            self.counterparts.of(r, n, self._gone_in(r, n)[0])
            for r, n in zip(ranks[:MAX_SHOWN], needs, strict=False)
        ]
        lines = [
            self.rows.row(r, n, self.rows.lacks(p))
            for r, n, p in zip(ranks, needs, parts, strict=False)
        ]
        lines += [self.rows.end_row(rank) for rank in gone[:MAX_SHOWN]]
        more = [*more_like_this(len(ranks) - len(parts))]
        more += (
            self.program.startup.waits
            if status == "absent" and self.program.startup is not None
            else ()
        )
        more += open_connection_note(self.program, ends)
        if parts[0] is not None and self._given_up(parts[0]):
            return self._cancelled(
                WaitEdge(ranks[0], needs[0], gone[0]),
                parts[0],
                tuple(ranks),
                more_like_this(len(ranks) - 1),
            )
        other = self._other_group([p for p in parts[:1] if p is not None])
        what = (
            ExitAdvice(other.advice)
            if other
            else advise_exited_ranks(self.where, ranks, needs[0].position, parts[0], ends)
        )
        found = self._finding(
            code,
            [head, *aligned_columns(lines), *more],
            tuple(ranks),
            what.lines,
            list(zip(ranks, needs, strict=True)),
        )
        found = replace(found, slips=what.slips)
        if other is None:
            made = incomplete_new_group(
                self.where,
                [WaitEdge(ranks[0], needs[0]._replace(ranks=tuple(gone)), gone[0])],
                parts,
            )
            return found if made is None else with_new_group_rule(found, *made)
        return other.lead(found)

    # --- messages that have no counterpart ---
    def _no_counterpart(
        self, turns: list[WaitEdge], core: tuple[int, ...], also: Sequence[str] = ()
    ) -> Finding:
        rank, need, awaited = turns[0]
        part = self.counterparts.of(rank, need, awaited)
        assert part is not None
        sends = OPERATIONS[part.call.op].direction == "send"
        if need.any:
            head = f"rank {rank} waits to receive a message that nobody sends"
            near: list[NearMiss] = []
        else:
            head = unmatched_words(part.call, rank, awaited)
            if taken := self.counterparts.taken_before(rank, need):
                return self._taken(turns, core, taken, also)
            near = self.counterparts.near(rank, part)
        lines = [self.rows.row(r, n, "") for r, n, _ in turns[:MAX_SHOWN]] + (
            [] if need.any else [self.rows.state_row(awaited)]
        )
        more = [
            *more_like_this(len(turns) - MAX_SHOWN),
            *(f"  {line}" for line in near_miss_lines(near[:3])),
            *also,
        ]
        return self._finding(
            "DS304",
            [head, *aligned_columns(lines), *more],
            core,
            advise_message(part, near, sends),
            [(r, n) for r, n, _ in turns],
        )

    def _taken(
        self,
        turns: list[WaitEdge],
        core: tuple[int, ...],
        positions: list[int],
        also: Sequence[str],
    ) -> Finding:
        """DS304, where a receive from any source has had the message."""
        rank, need, awaited = turns[0]
        head = f"rank {rank} waits for a message of rank {awaited} that its receive from any source has taken"
        spots = [location_text(place_of_call(self.program, rank, p)) for p in positions[:3]]
        rows = [self.rows.row(rank, need, ""), self.rows.state_row(awaited)]
        rows += [
            (
                f"rank {rank}",
                blocked_call_words(self.program, rank, p, p, -1),
                spot,
                f"took rank {awaited}'s message",
            )
            for p, spot in zip(positions, spots, strict=False)
        ]
        advice = (
            "name the source of that receive, or give messages of different meaning different tags",
        )
        return self._finding(
            "DS304",
            [head, *aligned_columns(rows), *also],
            core,
            advice,
            [(r, n) for r, n, _ in turns],
        )

    # --- a finding ---
    def _finding(
        self,
        code: str,
        lines: list[str],
        core: tuple[int, ...],
        help_lines: Iterable[str],
        who: list[tuple[int, WaitDependency]],
    ) -> Finding:
        places: dict[SourceLocation, None] = {}
        for rank, need in who[:MAX_SHOWN]:
            place = self.rows.place(rank, need)
            if place is not None:
                places[place] = None
        return Finding(
            code, "error", "\n".join(lines), core, core, tuple(help_lines), tuple(places)
        )
