"""What the hub refuses: a wait that outlasts its time-out, a rank that has no place in the world."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from distsim.capture.members import Member, Question
from distsim.profiles.gloo import barrier_missed
from distsim.profiles.record import Profile


def limit_of(question: Question, profile: Profile) -> int | None:
    """A wait's own time-out in ns; else that of its group, where the script gave one and the back end then raises."""
    if question.limit_ns is not None or question.call is None:
        return question.limit_ns
    return question.call.team.timeout_ns if profile.timed_out == "raises" else None


def limited(members: Iterable[Member], profile: Profile) -> Iterator[tuple[int, Member, int]]:
    """Waits that have a time-out, in ns: whose, and under which number."""
    for member in members:
        for number, question in member.waiting.items():
            limit = limit_of(question, profile)
            if limit is not None:
                yield limit, member, number


def no_place(rank: int, world: int, known: int, taken: bool) -> str:
    """Why a process can't be this rank of this world; "" where it can. ``known``: the world's size, 0 before anybody said it."""
    if known not in (0, world):
        return f"rank {rank} says that the world has {world} ranks, others said {known}"
    if not 0 <= rank < world:
        return f"rank {rank} is outside a world of {world}"
    if not taken:
        return ""
    return f"two processes say that they are rank {rank}; one that a rank starts can't make a world of its own here"


def too_late(question: Question, rank: int, limit_ns: int) -> str:
    """What gloo says of a wait that outlasts its time-out (ProcessGroupGloo.cpp, unbound_buffer.cc)."""
    call, ms = question.call, limit_ns // 10**6
    if question.keys is not None:
        return f"wait timeout after {ms}ms, keys: {', '.join(question.keys)}"
    if call is None or call.op != "monitored_barrier" or call.gathering is None:
        return f"[distsim] Timed out waiting {ms}ms for {call.op if call is not None else 'operation'} to complete"
    ranks = call.team.ranks
    there = {k for k, other in call.gathering.there.items() if other.op == call.op}  # elsewhere is not here
    if rank == ranks[0] and not ms:
        return f"Rank {rank} timed out in monitoredBarrier after 0 ms."
    if rank == ranks[0]:
        missing = [r for k, r in enumerate(ranks) if k not in there]
        return barrier_missed(rank, missing, bool(call.side.extra.get("wait_all_ranks")), limit_ns)
    if 0 not in there:
        return f"Rank {rank} timed out in monitoredBarrier after {ms} ms."
    return (
        f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank"
        f" {ranks[0]}. Please check rank {ranks[0]} logs for faulty rank."
    )
