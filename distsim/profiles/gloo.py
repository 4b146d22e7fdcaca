"""Gloo as torch 2.13 uses it. The tags (G1 …) are the rules of the evidence gathered on it, case by case."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Literal

from distsim.ops.records import Buffer, Call
from distsim.profiles.record import Meeting, Mishap, Profile, Workers, never

#: reduce_scatter is an all_reduce underneath and shares its slot (observed: "all_reduce vs reduce_scatter … completes silently").
_SLOTS = {"reduce_scatter": "all_reduce", "reduce_scatter_tensor": "all_reduce", "all_gather_into_tensor": "all_gather",
          "all_to_all_single": "all_to_all"}  # fmt: skip
_NO_SCALAR = ("int16", "float8_e4m3fn", "float8_e5m2")
_COMPLEX = ("complex64", "complex128")
_INTEGRAL = ("int64", "int32", "int16", "int8", "uint8", "bool")
_MAKES_ALL_MOVE = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "all_gather", "all_gather_into_tensor")


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
    dtype, or another reduce op, go through unseen."""
    sizes = meeting.nbytes
    if meeting.is_message:
        return Mishap("crashes", (meeting.calls[1].rank,)) if sizes[1] < sizes[0] else Mishap("wrong-data")
    if len(set(sizes)) == 1:
        return Mishap("wrong-data")
    ops = {call.op for call in meeting.calls}
    if ops <= {"broadcast"}:
        root = next((i for i, call in enumerate(meeting.calls) if call.rank == call.root), None)
        return _smaller_than(meeting, sizes[root]) if root is not None else Mishap("wrong-data")
    if ops <= set(_MAKES_ALL_MOVE):
        return _smaller_than(meeting, max(sizes))
    if ops <= {"gather", "scatter"}:
        receivers = [i for i, call in enumerate(meeting.calls) if (call.rank == call.root) == (call.op == "gather")]
        crash = _smaller(meeting, receivers, max(sizes))
        return Mishap("crashes", crash) if crash else Mishap("wrong-data")
    return Mishap("wrong-data")


def _smaller(meeting: Meeting, among: list[int], nbytes: int) -> tuple[int, ...]:
    return tuple(meeting.calls[i].rank for i in among if meeting.nbytes[i] < nbytes)


def _smaller_than(meeting: Meeting, nbytes: int) -> Mishap:
    """The ranks with a smaller buffer abort; without any, the larger ones keep stale tails."""
    crash = _smaller(meeting, list(range(len(meeting.calls))), nbytes)
    return Mishap("crashes", crash) if crash else Mishap("wrong-data")


def refuse(call: Call) -> str | None:
    """2.6: what Gloo rejects, in its own words. Messages take every dtype."""
    buffers: tuple[Buffer, ...] = call.inputs or call.outputs
    if call.op in ("send", "recv", "isend", "irecv") or not buffers:
        return None
    dtype = buffers[0].dtype
    if dtype in _NO_SCALAR:
        return "Invalid scalar type"
    if dtype in _COMPLEX and call.op == "gather":
        return "Invalid scalar type"
    return _refuse_reduction(dtype, call.reduce_op) if call.reduce_op else None


def _refuse_reduction(dtype: str, reduce_op: str) -> str | None:
    if dtype in _COMPLEX:
        known = reduce_op in ("sum", "avg")
        return None if known else f"all_reduce does not support RedOpType.{reduce_op.upper()} on complex tensors"
    if reduce_op in ("band", "bor", "bxor") and dtype not in _INTEGRAL:
        return f"Cannot use ReduceOp.{reduce_op.upper()} with non-integral dtype"
    if reduce_op == "avg" and dtype in _INTEGRAL:
        name = {"int64": "Long", "int32": "Int", "int8": "Char", "uint8": "Byte", "bool": "Bool"}[dtype]
        return f"result type Float can't be cast to the desired output type {name}"
    return None


def new_group(call: Call, options: Mapping[str, Any]) -> Literal["members", "world", "nobody"]:
    """2.3: the members connect to each other; who is none passes through."""
    return "members"


GLOO = Profile(
    name="gloo",
    about="Every send is a rendezvous at every size (G1). Tags and any-source are true (G2). Collectives meet by kind and number "
          "on the group (G5) and run on two worker threads per group (G7). A dropped request is cancelled (G4).",
    needs=needs, mismatch=mismatch, refuse=refuse, credit=never, slot=slot, workers=workers, new_group=new_group,
    dropped="cancels", peer_death="raises", specific_first=True,
)  # fmt: skip
