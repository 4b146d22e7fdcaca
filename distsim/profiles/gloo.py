"""Gloo as torch 2.13 uses it. The tags (G1 …) are the rules of the evidence gathered on it, case by case."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

from distsim.ops.records import Call
from distsim.ops.table import OPS
from distsim.profiles.record import Meeting, Mishap, Parties, Profile, Reaction, Workers, never, torch_layer
from distsim.profiles.support import GLOO_SUPPORT

#: reduce_scatter is an all_reduce underneath and shares its slot (observed: "all_reduce vs reduce_scatter … completes silently").
_SLOTS = {"reduce_scatter": "all_reduce", "reduce_scatter_tensor": "all_reduce", "all_gather_into_tensor": "all_gather",
          "all_to_all_single": "all_to_all", "all_reduce_coalesced": "all_reduce", "reduce_scatter_tensor_coalesced": "all_reduce",
          "all_gather_into_tensor_coalesced": "all_gather"}  # fmt: skip
_SUMS = ("all_reduce", "reduce_scatter", "reduce_scatter_tensor", "all_reduce_coalesced", "reduce_scatter_tensor_coalesced")


def slot(op: str, root: int | None) -> Hashable:
    """G5: kinds have slots of their own, so another kind at the same number hangs. Another root never meets either
    (observed: "other root … hang"; with gather and scatter those who share their root go on)."""
    return _SLOTS.get(op, op), root


def parent(v: int) -> int:
    """The parent in the binomial tree of broadcast: v without its highest set bit (2.5; v counts from the root)."""
    return v & ~(1 << (v.bit_length() - 1)) if v else 0


def needs(op: str, n: int, root: int, me: int) -> frozenset[int] | None:
    """G6, 2.5: data flow, not a barrier. broadcast: the parent and the own children in a binomial tree on rank - root; gather and
    scatter: the root all, the others the root; everything else synchronises fully."""
    if op in ("gather", "scatter") and me != root:
        return frozenset((root,))
    if op != "broadcast":
        return None
    v = (me - root) % n
    near = {parent(v)} | {v | bit for bit in _bits_above(v, n)}
    return frozenset((w + root) % n for w in near if w != v)


def _bits_above(v: int, n: int) -> list[int]:
    """The bits that make a child of v in a binomial tree over n."""
    bits = (1 << k for k in range(v.bit_length(), n.bit_length()))
    return [bit for bit in bits if v | bit < n]


def workers(rank: int, group: int) -> Workers:
    """G7: two worker threads per group, first in first out. Messages have none."""
    return Workers(("workers", rank, group), 2)


def mismatch(meeting: Meeting) -> Mishap:
    """G14 and 2.2. A buffer too small for what comes aborts its process; a larger one keeps its tail; equal bytes of another
    dtype, or another reduce op, go through unseen.

    all_reduce meets reduce_scatter of the same input: one is the other underneath, and both end right
    (`coll.kind.all_reduce_vs_reduce_scatter`). Parts of an all_to_all are judged one by one, as messages."""
    sizes = meeting.nbytes
    if meeting.is_message:
        return Mishap("crashes", (meeting.calls[1].rank,)) if sizes[1] < sizes[0] else Mishap("wrong-data")
    ops = {call.op for call in meeting.calls}
    if ops <= {"all_to_all", "all_to_all_single"} and "splits" in meeting.fields:
        return _uneven_parts(meeting)
    if "reduce_scatter_tensor_coalesced" in ops and ops <= set(_SUMS):
        return _one_by_one(meeting)
    if len(ops) > 1 and ops <= set(_SUMS):
        sizes = tuple(call.input_nbytes for call in meeting.calls)
        if len(set(sizes)) == 1 and set(meeting.fields) <= {"op", "numel"}:
            return Mishap("completes")
        meeting = meeting._replace(nbytes=sizes)
    if len(set(sizes)) == 1:
        return Mishap("wrong-data")
    if ops <= {"gather", "scatter"}:
        receivers = [i for i, call in enumerate(meeting.calls) if (call.rank == call.root) == (call.op == "gather")]
        crash = tuple(meeting.calls[i].rank for i in receivers if sizes[i] < max(sizes))
    else:
        crash = _overrun(meeting, parent if ops == {"broadcast"} else None)
    return Mishap("crashes", crash) if crash else Mishap("wrong-data")


def _overrun(meeting: Meeting, source: Callable[[int], int] | None) -> tuple[int, ...]:
    """The ranks that are sent more than they have room for, of those who have come. ``source``: who sends to whom, counted from the
    root; without one a ring, in which every rank receives from the next (`coll.size.all_reduce_n3`: of 4, 4, 8 only rank 1 aborts)."""
    n = meeting.calls[0].group.size
    sizes = {call.group_rank: nbytes for call, nbytes in zip(meeting.calls, meeting.nbytes, strict=True)}
    crash = []
    for call in meeting.calls:
        me, root = call.group_rank, call.group.group_rank(call.root) if call.root is not None else 0
        sender = (me + 1) % n if source is None else (source((me - root) % n) + root) % n
        if sizes.get(sender, 0) > sizes[me]:
            crash.append(call.rank)
    return tuple(crash)


def _uneven_parts(meeting: Meeting) -> Mishap:
    """As with messages: a part larger than the room for it aborts its receiver, a smaller one leaves the tail (G14)."""
    calls = sorted(meeting.calls, key=lambda call: call.group_rank)
    row: Any = OPS[calls[0].op]
    sent, room = [row.sent(call) for call in calls], [row.received(call) for call in calls]
    crash = tuple(b.rank for j, b in enumerate(calls) if any(sent[i][j] > room[j][i] for i in range(len(calls))))
    return Mishap("crashes", crash) if crash else Mishap("wrong-data")


def _one_by_one(meeting: Meeting) -> Mishap:
    """A coalesced reduce_scatter is an all_reduce for each part, one after the other, and meets others so (run: the parts [2, 3] and
    [3, 2] abort both of two ranks; two plain calls of 2 and 3 end right). The rest of a longer list waits for ever."""
    sizes = [
        [call.input_nbytes] if call.op == "all_reduce_coalesced" else [p.input_nbytes for p in OPS[call.op].separate(call)]
        for call in meeting.calls
    ]
    crash = {rank for part in zip(*sizes, strict=False) for rank in _overrun(meeting._replace(nbytes=part), None)}
    if crash:
        return Mishap("crashes", tuple(sorted(crash)))
    if len({len(parts) for parts in sizes}) > 1:
        return Mishap("hangs", hangs=True)
    return Mishap("completes" if set(meeting.fields) <= {"op", "numel"} else "wrong-data")


def new_group(call: Call, options: Mapping[str, Any]) -> Parties:
    """2.3: the members connect to each other, and find each other in the store by the group's name; who is none passes through. The
    name is the rank's own count of new_group calls, so different orders make names collide (`distsim.semantics.creation`). With
    use_local_synchronization it is a hash of the members (`group.members_only_local_sync`)."""
    return "members" if call.local_sync else "named"


def invalid(call: Call, code: str, options: Mapping[str, Any]) -> Reaction:
    """What gloo does with calls that no program may make.

    A partner outside the world: the pair is sought in the store, until the timeout and 1 s (`p2p.out_of_range.*`; memory that is not
    the world's may also end it by SIGSEGV). In other groups torch's own lookup refuses it. The second wait on a message's request
    hangs (`p2p.irecv_not_waited_poll_is_completed`), on a collective's it returns. all_to_all whose parts do not come out even is
    taken: wrong data (2.2, "not refused on Gloo")."""
    if code == "DS101" and call.group.id == 0:
        return "hangs"
    if code == "DS105":
        return "hangs"
    if GLOO_SUPPORT.overlooks(call, code):
        return "goes on"
    if call.op in ("all_to_all", "all_to_all_single") and call.input_splits is None is call.output_splits:
        uneven = call.inputs and len(call.inputs) == 1 and call.inputs[0].numel % call.group.size != 0
        return "goes on" if uneven and code != "DS104" else torch_layer(call, code, options)
    return torch_layer(call, code, options)


GLOO = Profile(
    name="gloo",
    about="Every send is a rendezvous at every size (G1). Tags and any-source are true (G2). Collectives meet by kind and number "
          "on the group (G5) and run on two worker threads per group (G7). A dropped request is cancelled (G4).",
    needs=needs, mismatch=mismatch, refuse=GLOO_SUPPORT.refuse, credit=never, slot=slot, workers=workers, new_group=new_group,
    invalid=invalid, dropped="cancels", peer_death="raises", specific_first=True, timed_out="raises", store_grace_ns=10**9,
)  # fmt: skip
