"""Turn the final state of a hang into findings DS301 to DS305.

Key idea: one finding per cause, with places, evidence and a way out. A cause is a wait-for cycle,
or a rank that has exited while others wait for it; ranks that merely wait behind a cause are listed
in the first finding. Causes with equal calls are merged into one finding.

The advice tries the specific mistakes first (a wrong group, a dropped request, two communicators)
and falls back to general rules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from distsim.backends import BACKEND_PROFILES
from distsim.checker.detectors.request_leaks import first_lost_message
from distsim.checker.diagnosis.awaited_call import AwaitedCall, AwaitedCallFinder, TakenMessages
from distsim.checker.diagnosis.blocked_rows import BlockedRows
from distsim.checker.diagnosis.collective_advice import divergence_advice
from distsim.checker.diagnosis.exit_advice import (
    ExitAdvice,
    advise_exited_ranks,
    closed_connection_note,
    exit_words,
    incomplete_new_group,
)
from distsim.checker.diagnosis.first_divergence import divergence_head, divergence_on
from distsim.checker.diagnosis.hang_advice import (
    DroppedRequest,
    EarlyDestroy,
    advise_cycle,
    advise_new_group,
    advise_one_communicator,
    with_new_group_rule,
)
from distsim.checker.diagnosis.local_group_advice import advise_local_group
from distsim.checker.diagnosis.missing_message_findings import MissingMessageFindings
from distsim.checker.diagnosis.wait_for_graph import (
    WaitCycle,
    WaitEdge,
    WaitForGraph,
    build_wait_for_graph,
    need_towards,
)
from distsim.checker.diagnosis.wrong_group import WrongGroupCall, WrongGroupFinder
from distsim.checker.matching.call_index import CallIndex
from distsim.checker.matching.call_mismatch import NO_SEQUENCE
from distsim.checker.matching.channel_layout import ChannelLayout, build_channel_layout
from distsim.checker.wording import (
    MAX_SHOWN,
    aligned_columns,
    cycle_words,
    more_like_this,
    place_of_call,
    rank_list,
)
from distsim.findings.final_state import FAILURES, FinalState, RankEnd, WaitDependency
from distsim.findings.finding_types import Finding, SourceLocation
from distsim.operations.core.resolved_call import ResolvedCall
from distsim.program.model import Program

#: The id of the group of all ranks.
_WORLD = 0
#: Position of no edge in a list of edges.
_NO_EDGE = -1


def diagnose_hang(
    program: Program,
    final_state: FinalState,
    layout: ChannelLayout | None = None,
    taken: TakenMessages | None = None,
) -> tuple[Finding, ...]:
    """The findings on a hang, causes first; empty if no rank is blocked.

    The final state may come from a run under the contract or from the engine under a backend.
    ``layout`` saves building it again. ``taken``: which messages any-source receives have taken, if
    known.
    """
    if not final_state.blocked or _start_up_failed(program):
        return ()
    call_index = CallIndex(layout or build_channel_layout(program))
    return _HangDiagnosis(program, final_state, call_index, taken or {}).findings()


def _start_up_failed(program: Program) -> bool:
    """Whether no rank has begun; the findings of the start-up then say why.

    Absent ranks are different: the others wait for them, which is a hang.
    """
    if program.startup is None or not program.startup.failed:
        return False
    return all(fault.kind != "absent" for fault in program.faults)


def _tensors(call: ResolvedCall) -> set[str]:
    """The tensors of a call, or of all messages of a batch."""
    parts = call.parts or (call,)
    return {
        buffer.label for part in parts for buffer in (*part.inputs, *part.outputs) if buffer.name
    }


class _CycleEdges(NamedTuple):
    """A cycle with an edge for each rank of its path.

    ``unmatched`` is the index of the first edge that no call of the program would ever meet, or
    `_NO_EDGE`.
    """

    cycle: WaitCycle
    edges: list[WaitEdge]
    unmatched: int


class _ExitGroup(NamedTuple):
    """What ranks that wait for exited ranks must share to be in one finding.

    ``meeting`` is a message's site or a collective's sequence; ``exited`` is empty for messages.
    """

    code: str
    meeting: int
    exited: tuple[int, ...]


class _HangDiagnosis:
    """The diagnosis of one hang."""

    def __init__(
        self,
        program: Program,
        final_state: FinalState,
        call_index: CallIndex,
        taken: TakenMessages,
    ) -> None:
        self.program, self.call_index = program, call_index
        self.profile = BACKEND_PROFILES[program.backend]
        self.rows = BlockedRows(program, final_state, call_index)
        self.blocked, self.ends = self.rows.blocked, self.rows.ends
        self.graph: WaitForGraph = build_wait_for_graph(final_state)
        self.finder = AwaitedCallFinder(program, call_index, taken)
        self.messages = MissingMessageFindings(program, self.rows, self.finder)
        self.wrong_groups = WrongGroupFinder(program, self.rows, self.finder)
        # Answers by the identity of tuples of ranks, which thousands of ranks may share.
        self._exited_in: dict[tuple[int, int], tuple[int, ...]] = {}
        self._all_ended: dict[int, bool] = {}

    def findings(self) -> tuple[Finding, ...]:
        exit_groups = self._exit_groups()
        waiting = {rank for _, ranks in exit_groups for rank in ranks}
        victims = set(self.graph.victims)
        explained: set[int] = set()
        found = []
        for cycles in self._cycles_by_calls():
            edges = [edge for each in cycles for edge in each.edges]
            never_met = {edge.rank for edge in edges if self._waits_for_exited(edge, waiting)}
            others = [edge for edge in edges if edge.rank not in never_met]
            if never_met and not any(map(self._is_never_met, others)):
                # The calls that also wait for exited ranks never complete, cycle or not.
                victims.update(edge.rank for edge in others)
                continue
            found.append(self._cycle_finding(cycles))
            explained |= never_met
        for code, ranks in exit_groups:
            if not explained.issuperset(ranks):
                found.append(self._exit_finding(code, ranks))
        if victims and found:
            found[0] = self._with_victims(found[0], tuple(sorted(victims)))
        return tuple(found)

    def _waits_for_exited(self, edge: WaitEdge, waiting: set[int]) -> bool:
        """Whether the call of an edge also waits for a rank that has exited."""
        return edge.rank in waiting and bool(self._exited_of(edge.rank, edge.need))

    def _is_never_met(self, edge: WaitEdge) -> bool:
        """Whether the awaited rank never makes the call, reached or not."""
        awaited = None if edge.need.any else self.finder.of(*edge)
        return awaited is not None and awaited.position is None

    def _with_victims(self, finding: Finding, victims: tuple[int, ...]) -> Finding:
        are = "is" if len(victims) == 1 else "are"
        line = f"  because of this hang, {rank_list(victims)} {are} blocked too"
        ranks = tuple(sorted({*finding.ranks, *victims}))
        return replace(finding, message=f"{finding.message}\n{line}", ranks=ranks)

    # --- cycles ---
    def _cycles_by_calls(self) -> list[list[_CycleEdges]]:
        """The cycles; those whose ranks are blocked in the same calls together."""
        groups: dict[object, list[_CycleEdges]] = defaultdict(list)
        for cycle in self.graph.circles:
            edges = []
            for rank, awaited in zip(cycle.path, (*cycle.path[1:], cycle.path[0]), strict=True):
                need = need_towards(self.blocked[rank], awaited)
                edges.append(WaitEdge(rank, need, awaited))
            unmatched = self._first_unmatched(edges)
            sites = tuple((*self._sites(edge), edge.need.part) for edge in edges)
            key = (cycle.has_any_source, len(cycle.ranks), unmatched, sites)
            groups[key].append(_CycleEdges(cycle, edges, unmatched))
        return list(groups.values())

    def _first_unmatched(self, edges: list[WaitEdge]) -> int:
        """The index of the first edge whose awaited call does not exist: that is the mistake.

        An any-source receive names no call, so nothing can be said of it.
        """
        for index, edge in enumerate(edges):
            if not edge.need.any and not self.finder.has_awaited_call(*edge):
                return index
        return _NO_EDGE

    def _sites(self, edge: WaitEdge) -> tuple[tuple[object, ...], ...]:
        """The places of the call in which a rank is blocked and of the request it waits for.

        The end of a program has no place. Files are omitted, because a built or recorded program
        has a file for each rank.
        """
        calls = self.program.code(edge.rank).calls
        found = []
        for position in (self.blocked[edge.rank].position, edge.need.position):
            if position < len(calls):
                site = self.program.sites[calls[position].site]
                found.append((site.line, site.column, site.op))
        return tuple(found)

    def _cycle_finding(self, cycles: list[_CycleEdges]) -> Finding:
        """One finding on cycles with equal calls."""
        # The cycles differ only in ranks, so the first one is shown for all.
        cycle, edges, unmatched = cycles[0]
        core = tuple(sorted(rank for each in cycles for rank in each.cycle.ranks))
        kind = "pair" if len(cycle.ranks) == 2 else "cycle"
        also = more_like_this(len(cycles) - 1, kind)
        if unmatched != _NO_EDGE:
            return self.messages.no_counterpart([edges[unmatched]], core, also)
        awaited = [self.finder.of(*edge) for edge in edges[:MAX_SHOWN]]
        for edge, part in zip(edges, awaited, strict=False):
            if part is not None and self.messages.is_cancelled(part):
                return self.messages.cancelled(edge, part, core, also)

        rows = [
            self.rows.blocked_row(edge.rank, edge.need, self.rows.awaited_call_words(part))
            for edge, part in zip(edges, awaited, strict=False)
        ]
        more = more_like_this(len(cycle.ranks) - len(rows))
        wrong_group = self.wrong_groups.find([part for part in awaited if part is not None])
        dropped = self._dropped_request(edges, awaited)
        found = self.rows.finding(
            "DS305" if cycle.has_any_source else "DS301",
            [self._cycle_head(cycle, edges), *aligned_columns(rows), *more, *also],
            core,
            self._cycle_advice(edges, awaited, len(cycle.path), wrong_group, dropped),
            [(edge.rank, edge.need) for edge in edges],
        )
        if dropped is not None:
            found = replace(found, slips=(dropped.place,))
        # From here on, causes that lie outside the cycle, the most certain first.
        new_group = incomplete_new_group(self.call_index, edges, awaited)
        if new_group is not None:
            call, missing = new_group
            advice = advise_new_group(missing, call.local_sync)
            return with_new_group_rule(replace(found, help=advice), call, missing)
        destroyed = self._early_destroy([part for part in awaited if part is not None])
        if destroyed is not None:
            return destroyed.with_cause_first(found)
        if wrong_group is not None:
            return wrong_group.with_cause_first(found)
        return self._with_divergence_first(found, awaited)

    def _cycle_head(self, cycle: WaitCycle, edges: list[WaitEdge]) -> str:
        if cycle.has_any_source:
            ranks = rank_list(cycle.ranks)
            return f"{ranks} wait for each other, one of them in a receive from any source"
        common = self.rows.common_call_words([(edge.rank, edge.need) for edge in edges])
        blocked = f": all are blocked{common}" if common else ""
        return f"{cycle_words(cycle.path)} wait for each other in a cycle{blocked}"

    def _cycle_advice(
        self,
        edges: list[WaitEdge],
        awaited: list[AwaitedCall | None],
        length: int,
        wrong_group: WrongGroupCall | None,
        dropped: DroppedRequest | None,
    ) -> tuple[str, ...]:
        """The most specific advice that applies."""
        known = [part for part in awaited if part is not None]
        advice = (
            self._advise_communicators(known)
            or advise_local_group(self.program, known)
            or (() if dropped is None else dropped.advice)
        )
        if advice:
            return advice
        if wrong_group is not None:
            return wrong_group.advice
        return advise_cycle(
            edges[:MAX_SHOWN], awaited, length, one_tensor=self._exchanges_one_tensor(known)
        )

    def _exchanges_one_tensor(self, awaited: list[AwaitedCall]) -> bool:
        """Whether some rank is blocked with a tensor that its awaited call uses, too."""
        blocked_with = {part.call.rank: _tensors(part.call) for part in awaited}
        return any(
            not blocked_with.get(part.rank, set()).isdisjoint(
                _tensors(self.program.call(part.rank, part.position))
            )
            for part in awaited
            if part.position is not None
        )

    def _advise_communicators(self, awaited: list[AwaitedCall]) -> tuple[str, ...]:
        """Both ends of a message are posted, on two communicators (semantics N7)."""
        if not self.profile.device:
            return ()
        for part in awaited:
            if not part.is_message or part.position is None or not self.rows.is_posted(part):
                continue
            counterpart_is_alone = not self.program.code_call(part.rank, part.position).parts
            # NCCL runs a batch on the communicator of its group, and a lone message on that of the
            # pair (N7, N11).
            if counterpart_is_alone == bool(part.batched):
                batched, alone = part.rank, part.call.rank
                if counterpart_is_alone:
                    batched, alone = alone, batched
                return advise_one_communicator(batched, alone)
        return ()

    def _dropped_request(
        self, edges: Sequence[WaitEdge], awaited: Sequence[AwaitedCall | None]
    ) -> DroppedRequest | None:
        """Both sides have posted, but nothing passes since a request was dropped (semantics G4)."""
        if self.profile.dropped != "cancels":
            return None
        for edge, part in zip(edges, awaited, strict=False):
            if part is None or not self.rows.is_posted(part):
                continue
            # Either side may have dropped a request; after that the two exchange no more data.
            for rank, other in ((edge.rank, part.rank), (part.rank, edge.rank)):
                end = len(self.program.code(rank).calls)
                if rank in self.blocked:
                    end = self.blocked[rank].position
                position = first_lost_message(self.program, rank, other, part.call.group.id, end)
                if position is not None:
                    return DroppedRequest(rank, other, self.program.place(rank, position))
        return None

    # --- destroyed groups ---
    def _early_destroy(self, awaited: list[AwaitedCall]) -> EarlyDestroy | None:
        """A rank that destroyed a group, although another rank still waits for it there.

        This excludes the world: ranks destroy it at their end, so the cause is that they ended.
        """
        for part in awaited:
            if part.is_message or part.position is not None or part.call.op == "new_group":
                continue
            for position, call in self.program.calls_of(part.rank):
                if position >= self.ends[part.rank].position:
                    break
                is_destroy = call.op == "destroy_process_group"
                if is_destroy and call.group.id == part.call.group.id != _WORLD:
                    destroy_place = self.program.place(part.rank, position)
                    missing_place = self.rows.place_of_waiting_call(part)
                    return EarlyDestroy(part.rank, part.call, destroy_place, missing_place)
        return None

    # --- ranks that have exited ---
    def _exit_groups(self) -> list[tuple[str, list[int]]]:
        """The ranks that wait for exited ranks, in groups with the code of their finding."""
        groups: dict[_ExitGroup, list[int]] = defaultdict(list)
        for rank in self.graph.waits_on_exited:
            if self._waits_for_invalid_call(rank):
                continue
            groups[self._exit_group(rank)].append(rank)
        # Failures come first, because ranks that ended regularly are often their consequence.
        ordered = sorted(groups.items(), key=lambda item: (item[0].code != "DS303", item[1][0]))
        return [(group.code, ranks) for group, ranks in ordered]

    def _waits_for_invalid_call(self, rank: int) -> bool:
        """Whether a rank only waits for ranks that raised at an invalid call.

        The finding on that call (DS101 to DS112) is the cause, and goes away together with this
        wait.
        """
        exited = self._exited_of(rank, self._need_for_exited(rank))
        return all(self._raised_at_invalid_call(other) for other in exited)

    def _raised_at_invalid_call(self, rank: int) -> bool:
        end, code = self.ends[rank], self.program.code(rank)
        if end.status != "raised" or end.position >= len(code.calls):
            return False
        call, row = code.calls[end.position], self.program.row_of[rank]
        parts = (call, *call.parts)
        return any(part.invalid is not None and bool(part.invalid.rows[row]) for part in parts)

    def _exit_group(self, rank: int) -> _ExitGroup:
        """Messages are in one finding by line, collectives by sequence and exited ranks."""
        need = self._need_for_exited(rank)
        code = self._exit_code(rank, need, self._exited_of(rank, need))
        calls = self.program.code(rank).calls
        if need.position >= len(calls) or self.rows.waits_at_start_up(rank, need):
            return _ExitGroup(code, NO_SEQUENCE, need.ranks)
        call = self.program.code_call(rank, need.position)
        if need.part >= 0 or not self.call_index.is_join(rank, need.position):
            return _ExitGroup(code, call.site, ())
        return _ExitGroup(code, self.call_index.sequence(rank, call), need.ranks)

    def _need_for_exited(self, rank: int) -> WaitDependency:
        """The first of the rank's needs that includes an exited rank; the finding is about it."""
        return next(need for need in self.blocked[rank].needs if self._exited_of(rank, need))

    def _exited_of(self, rank: int, need: WaitDependency) -> tuple[int, ...]:
        """The exited ranks of a need."""
        exited = self.graph.waits_on_exited[rank]
        key = id(exited), id(need.ranks)
        if key not in self._exited_in:
            awaited = set(need.ranks)
            self._exited_in[key] = tuple(other for other in exited if other in awaited)
        return self._exited_in[key]

    def _exit_code(self, rank: int, need: WaitDependency, exited: tuple[int, ...]) -> str:
        """The code of the finding on a rank that waits for exited ranks.

        DS304: for a message that the program of the exited rank does not contain, and for an
        any-source receive without a sender that still runs.
        DS302: for ranks that all reached the end of their programs. DS303: for a rank that failed,
        never started, or may have failed before it could send or receive.
        """
        if self.rows.waits_at_start_up(rank, need):
            return "DS303"
        if self._is_message(rank, need) and (
            need.any or not self.finder.has_awaited_call(rank, need, exited[0])
        ):
            return "DS303" if not need.any and self._may_have_failed_before(exited[0]) else "DS304"
        if id(exited) not in self._all_ended:
            self._all_ended[id(exited)] = all(self.ends[r].status == "ended" for r in exited)
        return "DS302" if self._all_ended[id(exited)] else "DS303"

    def _may_have_failed_before(self, rank: int) -> bool:
        """Whether a rank failed at its last known call, so that it might have made others later.

        The calls of a captured program end at an error; those of a file go on behind it.
        """
        end = self.ends[rank]
        is_last = end.position >= len(self.program.code(rank).calls) - 1
        return is_last and end.status in FAILURES

    def _is_message(self, rank: int, need: WaitDependency) -> bool:
        if need.position >= len(self.program.code(rank).calls):
            return False
        call = self.program.code_call(rank, need.position)
        if call.parts:
            call = call.parts[max(need.part, 0)]
        return call.endpoint >= 0

    def _exit_finding(self, code: str, ranks: list[int]) -> Finding:
        """The finding on ranks that wait for the same exited ranks."""
        needs = [self._need_for_exited(rank) for rank in ranks]
        edges = [
            WaitEdge(rank, need, self._exited_of(rank, need)[0])
            for rank, need in zip(ranks, needs, strict=True)
        ]
        if code == "DS304":
            notes = []
            if not needs[0].any:
                notes = closed_connection_note(self.program, [self.ends[edges[0].awaited]])
            return self.messages.no_counterpart(edges, tuple(ranks), notes)

        exited = self._exited_ranks(edges)
        ends = [self.ends[rank] for rank in exited]
        awaited = [self.finder.of(*edge) for edge in edges[:MAX_SHOWN]]
        first = awaited[0]
        if first is not None and self.messages.is_cancelled(first):
            edge = WaitEdge(ranks[0], needs[0], exited[0])
            also = more_like_this(len(ranks) - 1)
            return self.messages.cancelled(edge, first, tuple(ranks), also)

        wrong_group = self.wrong_groups.find([] if first is None else [first])
        if wrong_group is not None:
            advice = ExitAdvice(wrong_group.advice)
        else:
            position = needs[0].position
            advice = advise_exited_ranks(self.call_index, ranks, position, first, ends)
        found = self.rows.finding(
            code,
            self._exit_lines(edges, awaited, ends),
            tuple(ranks),
            advice.lines,
            [(edge.rank, edge.need) for edge in edges],
        )
        # The line of an error comes first: it is the one to change.
        places = tuple(dict.fromkeys((*self._failure_places(ends), *found.places)))
        found = replace(found, places=places, slips=advice.slips, awaited=tuple(exited))
        if wrong_group is not None:
            return wrong_group.with_cause_first(found)
        destroyed = self._early_destroy([] if first is None else [first])
        if destroyed is not None:
            return destroyed.with_cause_first(found)
        # Only the exited ranks never call new_group; others may still be about to call it.
        need = needs[0]._replace(ranks=tuple(exited))
        edge = WaitEdge(ranks[0], need, exited[0])
        new_group = incomplete_new_group(self.call_index, [edge], awaited)
        if new_group is not None:
            return with_new_group_rule(found, *new_group)
        # A rank that failed would have made its other calls: they are not missing.
        return self._with_divergence_first(found, awaited) if code == "DS302" else found

    def _failure_places(self, ends: Sequence[RankEnd]) -> list[SourceLocation]:
        """Where ranks raised an error or crashed."""
        failed = [end for end in ends if end.status in ("raised", "crashed")]
        places = [place_of_call(self.program, end.rank, end.position) for end in failed]
        return [place for place in places[:MAX_SHOWN] if place is not None and place.line]

    # --- divergent calls ---
    def _with_divergence_first(
        self, finding: Finding, awaited: Sequence[AwaitedCall | None]
    ) -> Finding:
        """Put the call first by which a rank departed from the others, if the wait follows from it.

        The calls behind it are shifted by one; often they agree, until the calls of one rank end.
        """
        for part in awaited:
            if part is None or part.is_message:
                continue
            divergence = divergence_on(self.call_index, part.sequence)
            if divergence is None or not divergence.is_shift or divergence.met is None:
                continue
            if divergence.number > part.number:
                continue
            members = len(self.call_index.layout.sequence_ranks[part.sequence])
            head = divergence_head(self.program, divergence, members)
            advice = divergence_advice(self.program, divergence)
            return replace(
                finding,
                message=f"{head}\n  as a result, {finding.message}",
                help=advice.help_lines,
                places=tuple(dict.fromkeys((*advice.places, *finding.places))),
                slips=advice.places,
            )
        return finding

    def _exited_ranks(self, edges: list[WaitEdge]) -> list[int]:
        """The exited ranks that these ranks wait for; equal tuples are looked at once."""
        tuples = {}
        for edge in edges:
            exited = self._exited_of(edge.rank, edge.need)
            tuples[id(exited)] = exited
        return sorted({rank for exited in tuples.values() for rank in exited})

    def _exit_lines(
        self,
        edges: list[WaitEdge],
        awaited: list[AwaitedCall | None],
        ends: list[RankEnd],
    ) -> list[str]:
        """The text of a finding on exited ranks: a headline, a table, notes."""
        ranks, exited = [edge.rank for edge in edges], [end.rank for end in ends]
        are, wait = ("is", "waits") if len(ranks) == 1 else ("are", "wait")
        where = self.rows.common_call_words([(edge.rank, edge.need) for edge in edges])
        head = (
            f"{rank_list(ranks)} {are} blocked{where} and {wait} for {rank_list(exited)}, "
            f"which {exit_words(self.program, ends)}"
        )
        rows = [
            self.rows.blocked_row(edge.rank, edge.need, self.rows.missing_call_words(part))
            for edge, part in zip(edges, awaited, strict=False)
        ]
        rows += [self.rows.end_row(rank) for rank in exited[:MAX_SHOWN]]
        lines = [head, *aligned_columns(rows), *more_like_this(len(edges) - len(awaited))]
        if ends[0].status == "absent" and self.program.startup is not None:
            lines += self.program.startup.waits
        return [*lines, *closed_connection_note(self.program, ends)]
