"""Follow waits to their ends: which ranks are waited for, but wait for no other rank.

Such a rank is *behind*: it has not made a call that others are in. It is blamed only if it is
certain that it is the end of the chain and not in a wait that nothing recorded. Wait-for
cycles are the subject of ``wait_cycles``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from distsim.hang_doctor.analysis.hang_cause import CauseLine, HangCause
from distsim.hang_doctor.analysis.stack_position import (
    DATA_LOADER,
    POSSIBLE_WAITS,
    PROGRAM_END,
    SYNCHRONIZE,
    StackPosition,
)
from distsim.hang_doctor.analysis.wait_state import EvidenceWait, JobWaitState, RankWaitState
from distsim.hang_doctor.model.evidence_records import CauseGrade
from distsim.hang_doctor.model.phrases import (
    call_text,
    may_hide_a_wait,
    ranks_text,
    source_line,
    verb_form,
)

#: How many messages that wait for one rank are shown with their lines.
_MAX_MESSAGE_LINES = 8
#: How many ranks are explained one by one.
_MAX_EXPLAINED_RANKS = 4

#: Rank -> rank that it waits for -> the wait.
WaitEdges = dict[int, dict[int, EvidenceWait]]


# --- the graph of waits ---


def wait_edges(job: JobWaitState, doubtful: bool = True) -> WaitEdges:
    """Which rank waits for which missing rank.

    ``doubtful``: include waits that the records make likely without proving them.
    """
    edges: WaitEdges = {}
    for rank, state in job.ranks.items():
        if state.waits:
            edges[rank] = _edges_of_rank(state, doubtful)
    return edges


def _edges_of_rank(state: RankWaitState, doubtful: bool) -> dict[int, EvidenceWait]:
    edges: dict[int, EvidenceWait] = {}
    # Proved waits come last, so that they replace doubtful ones for the same rank.
    for wait in sorted(state.waits, key=lambda wait: not wait.doubtful):
        if wait.doubtful and not doubtful:
            continue
        for member in wait.missing:
            edges[member] = wait
    return edges


class Verdict(NamedTuple):
    """What a set of waits proves, and about which ranks."""

    grade: CauseGrade
    culprits: tuple[int, ...]


def verdict_of_waits(waits: Iterable[EvidenceWait], culprits: tuple[int, ...]) -> Verdict:
    """Proved about ``culprits``, unless one of the waits is doubtful."""
    if any(wait.doubtful for wait in waits):
        return Verdict("suspected", ())
    return Verdict("proved", culprits)


def same_call(one: EvidenceWait, other: EvidenceWait) -> bool:
    """Whether two ranks wait in the same collective. A message is the same only as itself."""
    if one.call.p2p or other.call.p2p:
        return one is other
    return other.call.is_collective(one.call.group, one.call.number)


# --- ranks at the end of all chains ---


@dataclass(frozen=True)
class _Lag:
    """Ranks that have not made a call, and the waits of the other ranks for them.

    ``wait`` is one of ``waits``, as an example.
    """

    wait: EvidenceWait
    states: list[RankWaitState]
    waits: list[EvidenceWait]

    @property
    def behind(self) -> list[int]:
        return [state.rank for state in self.states]

    @property
    def waiting(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(wait.rank for wait in self.waits))

    @property
    def is_minority(self) -> bool:
        """Whether fewer ranks are behind than wait."""
        return len(self.behind) * 2 < len(self.behind) + len(self.waiting)


def ranks_behind(job: JobWaitState) -> list[HangCause]:
    """The ranks that are waited for and wait for no rank, one cause for each call."""
    awaited = _ends_of_chains(job)
    ranks_by_call: dict[tuple[str, int, int | None], list[int]] = {}
    for rank, wait in awaited.items():
        ranks_by_call.setdefault(_awaited_call_key(wait), []).append(rank)
    causes = [
        _behind_cause(job, _lag(job, ranks, awaited[ranks[0]])) for ranks in ranks_by_call.values()
    ]
    return sorted(causes, key=lambda cause: (not cause.culprits, len(cause.ranks), cause.ranks))


def _ends_of_chains(job: JobWaitState) -> dict[int, EvidenceWait]:
    """Each rank at the end of a chain, with a wait for it, a proved one if possible."""
    graph = wait_edges(job)
    awaited: dict[int, EvidenceWait] = {}
    for rank in sorted(graph):
        for other, wait in graph[rank].items():
            if other in graph or other not in job.ranks:
                continue
            known = awaited.get(other)
            if known is None or known.doubtful:
                awaited[other] = wait
    return awaited


def _awaited_call_key(wait: EvidenceWait) -> tuple[str, int, int | None]:
    """Waits with equal keys are for the same call; messages are grouped by the awaited rank."""
    call = wait.call
    if call.p2p:
        return "", 0, call.peer
    return call.group, call.number, None


def _lag(job: JobWaitState, ranks: list[int], wait: EvidenceWait) -> _Lag:
    waits = [other for other in job.all_waits() if _waits_for_same(other, wait, ranks)]
    return _Lag(wait, [job.ranks[rank] for rank in ranks], waits)


def _waits_for_same(one: EvidenceWait, other: EvidenceWait, ranks: list[int]) -> bool:
    """Whether ``one`` waits for these ranks like ``other``: in the same call, or in a message."""
    if same_call(one, other):
        return True
    if not one.call.p2p or not other.call.p2p:
        return False
    return one.call.peer in ranks and one.call.peer in one.missing


def _behind_cause(job: JobWaitState, lag: _Lag) -> HangCause:
    call = lag.wait.call
    title = _unanswered_title(job, lag) if call.p2p else _behind_title(job, lag)
    culprits = tuple(lag.behind) if _is_to_blame(job, lag) else ()
    # The explanations depend on the ranks to blame before doubtful waits acquit them.
    details = list(_explanations(job, lag, has_culprits=bool(culprits)))
    grade, culprits = verdict_of_waits(lag.waits, culprits)
    return HangCause(
        "behind",
        grade,
        title,
        culprits=culprits,
        ranks=tuple(lag.behind),
        lines=_lines(job, lag),
        details=details,
        group=call.group,
        number=call.number,
    )


def _behind_title(job: JobWaitState, lag: _Lag) -> str:
    call = lag.wait.call
    last_calls = {job.last_call(rank, call.group) for rank in lag.behind}
    last = next(iter(last_calls)) if len(last_calls) == 1 else None
    position = ""
    if last is not None and call.number >= 0:
        position = f" (at call {last})" if last else " (no call made)"
    are = verb_form(lag.behind, "is", "are")
    wait = verb_form(lag.waiting, "waits", "wait")
    them = verb_form(lag.behind, "it", "them")
    return (
        f"{ranks_text(lag.behind)} {are} behind{position}: {ranks_text(lag.waiting)} {wait} for "
        f"{them} in {call_text(job.evidence, call)}"
    )


def _unanswered_title(job: JobWaitState, lag: _Lag) -> str:
    do = verb_form(lag.behind, "does", "do")
    text = call_text(job.evidence, lag.wait.call)
    behind = ranks_text(lag.behind)
    title = f"{behind} {do} not make the matching call: rank {lag.wait.rank} is in {text}"
    others = [rank for rank in lag.waiting if rank != lag.wait.rank]
    if not others:
        return title
    wait = verb_form(others, "waits", "wait")
    them = verb_form(lag.behind, "it", "them")
    return f"{title}, and {ranks_text(others)} also {wait} for a message of {them}"


def _is_to_blame(job: JobWaitState, lag: _Lag) -> bool:
    """Whether the ranks are certainly the end of the chain, and the others do not err instead.

    If as many ranks are behind as wait, those that wait may have made a call too many, unless the
    stacks show what the ranks that are behind do instead.
    """
    if not all(_is_end_of_chain(job, state) for state in lag.states):
        return False
    if lag.is_minority:
        return True
    are_shown_by_stacks = all(_has_user_frame(state) for state in lag.states)
    return are_shown_by_stacks and len(lag.behind) <= len(lag.waiting)


def _has_user_frame(state: RankWaitState) -> bool:
    return state.position is not None and state.position.frame is not None


def _is_end_of_chain(job: JobWaitState, state: RankWaitState) -> bool:
    """Whether a rank is certainly not in a wait that nothing recorded."""
    if state.rank in job.evidence.disputed_ranks:
        return False
    if state.end is not None:
        return not (state.end.follows or state.end.unexplained)
    records = job.evidence.ranks[state.rank]
    if records.records_messages:
        return True
    position = state.position
    if position is not None and position.frame is not None:
        if position.is_local_wait:
            return True
        return not position.may_wait_for_ranks and not may_hide_a_wait(position.frame)
    # A recording without messages (Gloo) does not show a wait in a message.
    return not records.recorded and bool(records.status)


def _lines(job: JobWaitState, lag: _Lag) -> list[CauseLine]:
    lines = [
        CauseLine((state.rank,), activity_text(state), state.reported_frame)
        for state in lag.states
        if state.reported_frame is not None
    ]
    call = lag.wait.call
    if call.p2p:
        lines += [
            CauseLine((wait.rank,), call_text(job.evidence, wait.call), wait.frame)
            for wait in lag.waits[:_MAX_MESSAGE_LINES]
        ]
    else:
        ranks = lag.waiting or (lag.wait.rank,)
        lines.append(CauseLine(ranks, call.op or "waits", lag.wait.frame))
    return lines


def activity_text(state: RankWaitState) -> str:
    """What a rank does that is in no recorded call."""
    if state.end is not None:
        return state.end.text
    if state.position is None:
        return "its last known line"
    return position_text(state.position)


def position_text(position: StackPosition) -> str:
    """What a thread at this position does."""
    if not position.op:
        return "host code"
    if position.op == SYNCHRONIZE:
        return "waits for its device"
    if position.op == DATA_LOADER:
        return "waits for its DataLoader"
    if position.op == PROGRAM_END:
        return "waits at the end of its program"
    if position.op in POSSIBLE_WAITS:
        return f"in {position.op}, which computes or waits for other ranks"
    return f"in {position.op}"


def _explanations(job: JobWaitState, lag: _Lag, has_culprits: bool) -> Iterator[str]:
    """What delays the ranks, as far as it is known."""
    for state in lag.states[:_MAX_EXPLAINED_RANKS]:
        yield _explanation(job, state)
    if not has_culprits and not lag.is_minority:
        yield (
            "as many ranks are behind as are waiting, so either side may be wrong: those behind "
            "may skip a call, or the others make one too many"
        )


def _explanation(job: JobWaitState, state: RankWaitState) -> str:
    rank = state.rank
    is_at_end = state.position is not None and state.position.op == PROGRAM_END
    if is_at_end or (state.end is not None and state.end.clean):
        return (
            f"rank {rank} reached the end of its program: it skips a call, or the others make one "
            "too many"
        )
    if state.position is None:
        return (
            f"the records show that rank {rank} has not made this call, but not why: take its stack"
        )
    text = source_line(state.frame)
    code = f": {text}" if text else ""
    if state.position.op == DATA_LOADER:
        return (
            f"rank {rank} waits for its DataLoader: a worker process hangs, has died or is "
            "slow; `distsim doctor --live PID` shows the workers"
        )
    if state.position.op == SYNCHRONIZE:
        return f"rank {rank} waits for its device{code}; the kernel before it is slow or hangs"
    has_messages = job.evidence.ranks[rank].records_messages
    hides_wait = state.position.may_wait_for_ranks or may_hide_a_wait(state.position.frame)
    if hides_wait and not has_messages:
        return (
            f"rank {rank} runs host code, or is in a wait that neither its stack nor its recording "
            f"shows{code}"
        )
    return (
        f"rank {rank} runs host code outside any communication call, and that code hangs or is "
        f"slow{code}"
    )
