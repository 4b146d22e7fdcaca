"""What the rows share when they judge a resolved call: membership, roots, buffers that fit.

Each function returns why the call may not be made, as a clause without a full stop, or None.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from distsim.ops.records import Buffer, Call, Group

_FLOATING = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_COMPLEX = ("complex64", "complex128")


def first(reasons: Iterable[str | None]) -> str | None:
    """The first reason there is."""
    return next((reason for reason in reasons if reason), None)


def described(group: Group) -> str:
    ranks = ", ".join(map(str, group.ranks[:8])) + (", …" if group.size > 8 else "")
    return f"the group {group.name} (ranks {ranks})"


def stranger(call: Call) -> str | None:
    """The caller is no member of the group."""
    return None if call.rank in call.group.ranks else f"rank {call.rank} is not in {described(call.group)}"


def foreign_root(call: Call, word: str) -> str | None:
    """The root is no member of the group."""
    if call.root is None or call.root in call.group.ranks:
        return None
    return f"{word} is rank {call.root}, which is not in {described(call.group)}"


def no_peer(call: Call, peer: int | None) -> str | None:
    """The other side of a message, or of a one-sided operation, is the caller or no member."""
    if peer == call.rank:
        return f"rank {peer} names itself as the other side"
    if peer is not None and peer not in call.group.ranks:
        return f"rank {peer} is not in {described(call.group)}"
    return None


def unlike_dtypes(buffers: Sequence[Buffer]) -> str | None:
    """The buffers of one call differ in dtype."""
    for other in buffers[1:]:
        if other.dtype != buffers[0].dtype:
            return f"{_name(buffers[0])} is {buffers[0].dtype}, but {_name(other)} is {other.dtype}"
    return None


def mixed_parts(buffers: Sequence[Buffer]) -> str | None:
    """The parts of a coalesced launch differ in dtype (torch: `_ensure_all_tensors_same_dtype` in all_reduce_coalesced)."""
    reason = unlike_dtypes(buffers)
    return f"the parts of one launch have one dtype: {reason}" if reason else None


def shared_part(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> str | None:
    """Two parts of a coalesced launch write one tensor, or one writes what another reads."""
    for k, got in enumerate(outputs):
        others = [*outputs[:k], *inputs[:k], *inputs[k + 1 :]]
        if got.name and any((o.name, o.index) == (got.name, got.index) for o in others):
            return f"{got.label} stands in two parts of one launch; parts run side by side, so each needs a tensor of its own"
    return None


def reduce_refusal(dtype: str, reduce_op: str) -> str | None:
    """Why no back end reduces this dtype with this op. What only some refuse is their profile's business.

    Source: ProcessGroupGloo ("Cannot use ReduceOp.BAND with non-integral dtype", "does not support RedOpType.PRODUCT on complex
    tensors"), ProcessGroupNCCL (bitwise ops never; complex only where the parts may be reduced on their own; bool AVG never).
    """
    if reduce_op in ("band", "bor", "bxor") and dtype in (*_FLOATING, *_COMPLEX):
        return f"reduce op {reduce_op} works on integers, not on {dtype}"
    if reduce_op in ("product", "min", "max") and dtype in _COMPLEX:
        return f"reduce op {reduce_op} has no meaning on {dtype}"
    if reduce_op == "avg" and dtype == "bool":
        return "reduce op avg has no meaning on bool"
    return None


def unreducible(call: Call) -> str | None:
    buffers = call.inputs or call.outputs
    return reduce_refusal(buffers[0].dtype, call.reduce_op) if buffers and call.reduce_op else None


def part_sizes(buffers: Sequence[Buffer], n: int, splits: Sequence[int] | None = None) -> tuple[int, ...]:
    """Elements of each part. One buffer is cut along its first axis, by ``splits`` or evenly; a list has a buffer per part."""
    if len(buffers) != 1:
        return tuple(b.numel for b in buffers)
    if splits is None:
        return (buffers[0].numel // n,) * n
    rows = buffers[0].shape[0] if buffers[0].shape else 1
    return tuple(rows_of_part * (buffers[0].numel // rows if rows else 0) for rows_of_part in splits)


def not_a_list_of(buffers: Sequence[Buffer], n: int, word: str) -> str | None:
    """A list argument of torch needs n tensors: n names, or one tensor whose first axis has the group's size."""
    if not buffers or (len(buffers) == n and n > 1):
        return None
    if len(buffers) > 1:
        return f"{word} names {len(buffers)} tensors, but the group has {n} ranks"
    shape = buffers[0].shape
    if n == 1 or (shape and shape[0] == n):
        return None
    named = f"{word} {_name(buffers[0])}" if buffers[0].name else word
    return f"{named} has the shape {list(shape)}, but its first axis must be the group's size, {n}"


def misfit(word: str, found: int, wanted: int, why: str) -> str | None:
    """An element count that is not what it must be."""
    return None if found == wanted else f"{word} has {found} elements, but {why} {wanted}"


def _name(buffer: Buffer) -> str:
    return buffer.label or f"a fresh {list(buffer.shape)}"
