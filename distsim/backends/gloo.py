"""The blocking rules of Gloo, as torch 2.13 uses it.

Tags such as G1 name the rules in docs/explanation/semantics.md. They were found by running torch on
CPUs, case by case; "run" marks such a fact, "read" one from the sources of gloo. Identifiers such
as `p2p.out_of_range.*` are cases of those runs.

This module has the profile, and the rules that look at a single call. The rules of collectives are
in `distsim.backends.gloo_collectives`; those of mismatched calls in `gloo_mismatches`,
`gloo_irregular` and `gloo_rings`; those of dead members in `gloo_contacts`.
"""

from __future__ import annotations

from collections.abc import Sequence

from distsim.backends.gloo_collectives import SUPPORT, is_ring, needs, refuse, slot, workers
from distsim.backends.gloo_contacts import contact, has_traffic
from distsim.backends.gloo_irregular import per_rank_needs
from distsim.backends.gloo_mismatches import mismatch, neighbours
from distsim.backends.profile import (
    BackendOptions,
    BackendProfile,
    InvalidCallReaction,
    NewGroupParticipants,
    never_buffered,
    torch_frontend_reaction,
)
from distsim.operations.core.resolved_call import ResolvedCall
from distsim.operations.registry import OPERATIONS


def new_group(call: ResolvedCall, options: BackendOptions) -> NewGroupParticipants:
    """2.3: the members find each other in the store by the name of the group, and connect.

    Ranks that are not members pass through. The name of the group is each rank's own count of
    new_group calls, so calls in different orders make names collide
    (`distsim.semantics.form.group_creation`). With use_local_synchronization the name is a hash of
    the members (`group.members_only_local_sync`).
    """
    return "members" if call.local_sync else "named"


def invalid(call: ResolvedCall, code: str, options: BackendOptions) -> InvalidCallReaction:
    """The reaction of gloo to calls that the contract forbids.

    * A partner outside the world (DS101): gloo looks for the pair in the store until the timeout
      and 1 s more (`p2p.out_of_range.*`); it may also die of SIGSEGV, because the pair is looked up
      outside the memory for the world. In other groups torch's own lookup of ``src`` and ``dst``
      raises. It does not check ``group_src`` and ``group_dst``, so such a call also hangs (run
      for 5 s: ``group_dst=2`` and ``group_src=2`` in a group of two; send, recv, isend, irecv).
      The program has the calling rank in place of such a group rank.
    * A second wait (DS105) on the request of a message hangs
      (`p2p.irecv_not_waited_poll_is_completed`). On the request of a collective it returns, but
      ``call`` does not show which request is meant: the compiler turns "hangs" into "goes on" if
      only collectives are waited for again (`distsim.semantics.form.invalid_calls`).
    * A destroyed group (DS108) still executes collectives without a root if it was destroyed alone
      (run: all_reduce, barrier and all_gather complete if both members call them). torch refuses
      messages on it, and collectives with a root (run: broadcast). If a member does not join, its
      process closes the connection and torch raises ValueError
      (`distsim.semantics.form.invalid_calls`).
    * An all_to_all whose input does not divide evenly is executed: wrong data (2.2, "not refused on
      Gloo").
    """
    if code == "DS101" and (call.group.id == 0 or call.peer == call.rank):
        return "hangs"
    if code == "DS105":
        return "hangs"
    if code == "DS108" and _is_rootless_call_of_member_on_subgroup(call):
        return "goes on"
    if SUPPORT.overlooks(call, code):
        return "goes on"
    if code != "DS104" and _is_unevenly_divided(call):
        return "goes on"
    return torch_frontend_reaction(call, code, options)


def _is_rootless_call_of_member_on_subgroup(call: ResolvedCall) -> bool:
    operation = OPERATIONS[call.op]
    is_rootless = operation.kind == "collective" and operation.root_field is None
    if not call.group.id or not is_rootless:
        return False
    return call.group.group_rank(call.rank) >= 0


def _is_unevenly_divided(call: ResolvedCall) -> bool:
    """Whether an all_to_all without splits has an input that the ranks cannot share evenly."""
    if not OPERATIONS[call.op].pairwise or len(call.inputs) != 1:
        return False
    if call.input_splits is not None or call.output_splits is not None:
        return False
    return call.inputs[0].numel % call.group.size != 0


def alternative_outcomes(
    outcome: str, fields: Sequence[tuple[str, ...]], outside: bool
) -> frozenset[str]:
    """Further outcomes that gloo may show in place of the predicted one.

    Values whose bits mean the same in both dtypes, such as zeros, arrive unharmed. A partner
    outside the world may end the process instead of blocking it, because the pair is looked up
    outside the memory for the world (`p2p.out_of_range.*`: SIGSEGV for rank 7 of 2).
    """
    if outcome == "hangs" and outside:
        return frozenset({"crashes"})
    if outcome == "wrong-data" and all(differing == ("dtype",) for differing in fields):
        return frozenset({"completes"})
    return frozenset()


GLOO = BackendProfile(
    name="gloo",
    about=(
        "Every send waits for its receive, at every size (G1). Tags and any-source receives work "
        "(G2). Collectives match by kind and number on the group (G5) and run on two worker "
        "threads per group (G7). A dropped request is cancelled (G4)."
    ),
    needs=needs,
    mismatch=mismatch,
    refuse=refuse,
    credit=never_buffered,
    slot=slot,
    workers=workers,
    new_group=new_group,
    invalid=invalid,
    dropped="cancels",
    peer_death="raises",
    # The destructor of ProcessGroupGloo joins the worker threads (run and read).
    joins_collectives_at_exit=True,
    specific_first=True,
    timed_out="raises",
    store_grace_ns=10**9,
    support=SUPPORT,
    listed=1,
    alternative_outcomes=alternative_outcomes,
    per_rank_needs=per_rank_needs,
    neighbours=neighbours,
    skips_empty=is_ring,
    has_traffic=has_traffic,
    contact=contact,
)


def monitored_barrier_error(
    rank: int, missing: Sequence[int], all_of_them: bool, limit_ns: int
) -> str:
    """The error that a rank raises for the members missing in a ``monitored_barrier``.

    ``rank`` is the rank that checks the arrivals (ProcessGroupGloo.cpp).
    """
    who = f"Ranks {', '.join(map(str, missing))}" if all_of_them else f"Rank {missing[0]}"
    return f"[Rank {rank}]: {who} failed to pass monitoredBarrier in {limit_ns // 10**6} ms"
