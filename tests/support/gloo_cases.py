"""The calls that tests/operations/test_on_gloo.py makes for real: for every row, what each rank
holds before and after.

What a rank holds afterwards comes from the row's effect
(`distsim.operations.core.collective_results.apply_effect`); nothing here knows torch. All numbers
are small integers, so that no order of additions rounds differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from distsim.operations.core.collective_results import Array, apply_effect, numpy_dtype
from distsim.operations.core.resolved_call import RankGroup, ResolvedCall, TensorBuffer
from distsim.operations.registry import OPERATIONS

Memory = dict[TensorBuffer, Array]
Sizes = Callable[[int, int], int]  # (giver, part) -> elements, in group ranks

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "uint8", "int32", "int64")
ARITHMETIC, BITWISE = ("sum", "product", "min", "max"), ("band", "bor", "bxor")
#: What gloo reduces (torch 2.13); avg on integers it refuses.
REDUCTIONS = [(dtype, op) for dtype in FLOATS for op in (*ARITHMETIC, "avg")] + [
    (dtype, op) for dtype in (*INTEGERS, "bool") for op in (*ARITHMETIC, *BITWISE)
]
MOVED = ("float32", "bfloat16", "int64", "uint8", "bool")
#: gloo carries messages of any dtype.
SENT = (*MOVED, "int16", "float8_e4m3fn", "complex64")


@dataclass(frozen=True)
class Case:
    """One operation on all its ranks. Keys are global ranks; a rank that is not in ``calls`` takes
    no part.
    """

    name: str
    op: str
    calls: dict[int, list[ResolvedCall]]
    before: dict[int, Memory] = field(default_factory=dict)
    after: dict[int, Memory] = field(default_factory=dict)


def numbers(dtype: str, shape: tuple[int, ...], *seed: int) -> Array:
    """Small integers, 1 to 4, other ones for every seed; booleans true or false."""
    drawn = np.random.default_rng([17, *seed]).integers(1, 5, size=shape)
    return (drawn > 2) if dtype == "bool" else drawn.astype(numpy_dtype(dtype))


def cases(world: RankGroup, sub: RankGroup) -> list[Case]:
    """Every row but those that start and end the world, which the ranks call by themselves."""
    return [
        *_reductions(world),
        *_moves(world),
        *_variants(world, sub),
        *_messages(world),
        *_barriers(world, sub),
    ]


# --- collectives ---


def _roots(op: str, group: RankGroup) -> tuple[int | None, ...]:
    return group.ranks if OPERATIONS[op].root_field else (None,)


def _reductions(world: RankGroup) -> Iterator[Case]:
    for op, row in OPERATIONS.items():
        for dtype, reduce_op in REDUCTIONS if row.reduces and row.torch_name else ():
            yield (coalesced if row.coalesces else collective)(
                op, dtype, world, reduce_op=reduce_op, root=_roots(op, world)[-1]
            )


def _moves(world: RankGroup) -> Iterator[Case]:
    for op, row in OPERATIONS.items():
        if row.kind != "collective" or row.torch_name is None:
            continue
        if row.gives != "none" and not row.reduces:
            for dtype in MOVED:
                yield (coalesced if row.coalesces else collective)(
                    op, dtype, world, root=_roots(op, world)[0]
                )


def _variants(world: RankGroup, sub: RankGroup) -> Iterator[Case]:
    """Every root, a sub-group, async, lists of names, uneven parts (not of all_to_all and
    all_gather: gloo refuses them).
    """
    for op, row in OPERATIONS.items():
        if row.kind != "collective" or row.gives == "none" or row.torch_name is None:
            continue
        if row.coalesces:
            yield coalesced(op, "float32", world, is_async=True)
            yield coalesced(op, "float32", sub)
            yield coalesced(op, "float32", world, sizes=(5,))
            yield coalesced(op, "float32", world, sizes=(1, 0, 64, 7))
            continue
        for root in _roots(op, world):
            yield collective(op, "float32", world, root=root, is_async=True)
        for root in _roots(op, sub):
            yield collective(op, "float32", sub, root=root)
        if row.input_parts == "n" or row.output_parts == "n":
            yield collective(op, "float32", world, root=_roots(op, world)[-1], listed=True)
    yield collective("all_to_all_single", "float32", world, sizes=lambda i, j: (i + 2 * j) % 3)
    yield collective("reduce_scatter", "float32", world, listed=True, sizes=lambda i, j: 1 + j)


def collective(
    op: str,
    dtype: str,
    group: RankGroup,
    *,
    root: int | None = None,
    reduce_op: str | None = None,
    is_async: bool = False,
    listed: bool = False,
    sizes: Sizes | None = None,
) -> Case:
    """One collective. ``listed``: lists are lists of names; else they are the rows of one
    tensor.
    """
    row, n = OPERATIONS[op], group.size
    reduce_op = reduce_op or ("sum" if row.reduces else None)
    at = 0 if root is None else group.ranks.index(root)
    count = n if row.input_parts == "n" else 1
    given = [
        [numbers(dtype, ((sizes or _three)(i, j),), i, j) for j in range(count)] for i in range(n)
    ]
    got = apply_effect(row, n, at, reduce_op, given)
    words = [
        w
        for w in (op, dtype, reduce_op, f"root{root}" if root is not None else None, group.name)
        if w
    ]
    words += [
        word for word, said in (("async", is_async), ("listed", listed), ("uneven", sizes)) if said
    ]
    case = Case("-".join(words), op, {}, {}, {})
    for i, rank in enumerate(group.ranks):
        gives = row.gives == "all" or i == at
        call = ResolvedCall(
            op=op, rank=rank, group=group, root=root, reduce_op=reduce_op, is_async=is_async
        )
        _place(
            case, call, given[i] if gives else [], got[i], listed=listed, uneven=sizes is not None
        )
    return case


def coalesced(
    op: str,
    dtype: str,
    group: RankGroup,
    *,
    reduce_op: str | None = None,
    is_async: bool = False,
    sizes: tuple[int, ...] = (3, 2, 4),
    root: None = None,
) -> Case:
    """One launch of as many parts as there are sizes (of a rank's share)."""
    member = OPERATIONS[op].coalesces
    assert member is not None
    words = (
        op,
        dtype,
        reduce_op,
        group.name,
        "async" * is_async,
        "" if sizes == (3, 2, 4) else "x".join(map(str, sizes)),
    )
    case = Case("-".join(filter(None, words)), op, {}, {}, {})
    parts = [
        collective(member.op, dtype, group, reduce_op=reduce_op, sizes=lambda i, j, size=size: size)
        for size in sizes
    ]
    for rank in group.ranks:
        pieces = [(k, part.calls[rank][0], part) for k, part in enumerate(parts)]

        def named(buffer: TensorBuffer, k: int) -> TensorBuffer:
            return replace(buffer, name=f"{buffer.name}{k}")

        for side in ("before", "after"):
            found = {
                named(b, k): array
                for k, _, part in pieces
                for b, array in getattr(part, side)[rank].items()
            }
            getattr(case, side)[rank] = found
        call = replace(pieces[0][1], op=op, is_async=is_async)
        inputs, outputs = (
            tuple(named(getattr(c, side)[0], k) for k, c, _ in pieces)
            for side in ("inputs", "outputs")
        )
        case.calls[rank] = [replace(call, inputs=inputs, outputs=outputs)]
    return case


def _three(giver: int, part: int) -> int:
    return 3


def _place(
    case: Case,
    call: ResolvedCall,
    given: list[Array],
    got: list[Array] | None,
    *,
    listed: bool,
    uneven: bool,
) -> None:
    """Give one rank its buffers and write down what they hold before and after."""
    row, rank = OPERATIONS[call.op], call.rank
    if "tensor" in row.model_fields:
        mine = given[0] if given else np.zeros_like((got or [])[0])
        buffer = TensorBuffer("x", 0, mine.shape, _torch_name(mine))
        case.before[rank], case.after[rank] = (
            {buffer: mine},
            {buffer: mine if got is None else got[0]},
        )
        case.calls[rank] = [replace(call, inputs=(buffer,), outputs=(buffer,))]
        return
    inputs = _memory("in", given, row.op, "input", listed=listed)
    outputs = _memory("out", got or [], row.op, "output", listed=listed)
    if uneven and call.op == "all_to_all_single":
        call = replace(
            call, input_splits=tuple(map(len, given)), output_splits=tuple(map(len, got or []))
        )
    case.before[rank] = inputs | {buffer: np.zeros_like(array) for buffer, array in outputs.items()}
    case.after[rank] = inputs | outputs
    case.calls[rank] = [replace(call, inputs=tuple(inputs), outputs=tuple(outputs))]


def _memory(name: str, parts: list[Array], op: str, side: str, *, listed: bool) -> Memory:
    """The parts as a list of buffers, as the rows of one, or one after the other in one."""
    if not parts:
        return {}
    is_list = len(parts) > 1 and op in _LISTS[side]
    if is_list and listed:
        return {
            TensorBuffer(f"{name}{j}", 0, part.shape, _torch_name(part)): part
            for j, part in enumerate(parts)
        }
    whole = np.stack(parts) if is_list else np.concatenate(parts)
    return {TensorBuffer(name, 0, whole.shape, _torch_name(whole)): whole}


#: Which arguments are lists in torch.
_LISTS = {
    "input": ("scatter", "reduce_scatter", "all_to_all"),
    "output": ("all_gather", "gather", "all_to_all"),
}


def _torch_name(array: Array) -> str:
    return str(array.dtype)


# --- messages and barriers ---


def _messages(world: RankGroup) -> Iterator[Case]:
    for dtype in SENT:
        yield _blocking(f"send-{dtype}", "send", dtype, world, any_source=False)
    yield _blocking("recv-any_source", "recv", "float32", world, any_source=True)
    yield _ring("isend-ring", "isend", world)
    yield _ring("batch_isend_irecv-ring", "batch_isend_irecv", world)


def _message(
    op: str, rank: int, peer: int | None, world: RankGroup, buffer: TensorBuffer, tag: int
) -> ResolvedCall:
    return ResolvedCall(
        op=op, rank=rank, group=world, peer=peer, tag=tag, inputs=(buffer,), outputs=(buffer,)
    )


def _blocking(name: str, op: str, dtype: str, world: RankGroup, *, any_source: bool) -> Case:
    """The last rank sends, rank 0 receives."""
    sent, last = numbers(dtype, (2, 3), 1), world.ranks[-1]
    got = apply_effect(OPERATIONS["send"], 2, 0, None, [[sent], []])[1]
    buffer = TensorBuffer("x", 0, sent.shape, dtype)
    receive = _message("recv", 0, None if any_source else last, world, buffer, 7)
    calls = {last: [_message("send", last, 0, world, buffer, 7)], 0: [receive]}
    before = {last: {buffer: sent}, 0: {buffer: np.zeros_like(sent)}}
    return Case(name, op, calls, before, {last: {buffer: sent}, 0: {buffer: (got or [])[0]}})


def _ring(name: str, op: str, world: RankGroup) -> Case:
    """Two messages to the right neighbour, received in the other order: tags tell them apart."""
    case, n = Case(name, op, {}, {}, {}), world.size
    sent = {(r, tag): numbers("float32", (4,), r, tag) for r in world.ranks for tag in (1, 2)}
    for r in world.ranks:
        left, right = (r - 1) % n, (r + 1) % n
        mine = {tag: TensorBuffer(f"mine{tag}", 0, (4,), "float32") for tag in (1, 2)}
        theirs = {tag: TensorBuffer(f"theirs{tag}", 0, (4,), "float32") for tag in (1, 2)}
        calls = [_message("isend", r, right, world, mine[tag], tag) for tag in (1, 2)]
        calls += [_message("irecv", r, left, world, theirs[tag], tag) for tag in (2, 1)]
        batch = ResolvedCall(op=op, rank=r, group=world, parts=tuple(calls), is_async=True)
        case.calls[r] = [batch] if op == "batch_isend_irecv" else calls
        case.before[r] = {mine[t]: sent[r, t] for t in (1, 2)} | {
            theirs[t]: np.zeros(4, "float32") for t in (1, 2)
        }
        case.after[r] = {mine[t]: sent[r, t] for t in (1, 2)} | {
            theirs[t]: sent[left, t] for t in (1, 2)
        }
    return case


def _barriers(world: RankGroup, sub: RankGroup) -> Iterator[Case]:
    for group in (world, sub):
        for op in ("barrier", "monitored_barrier"):
            timeout_ns = 10 * 10**9 if op == "monitored_barrier" else None
            call = ResolvedCall(op=op, rank=-1, group=group, timeout_ns=timeout_ns)
            yield Case(f"{op}-{group.name}", op, {r: [replace(call, rank=r)] for r in group.ranks})
    call = ResolvedCall(op="barrier", rank=-1, group=world, is_async=True)
    yield Case("barrier-async", "barrier", {r: [replace(call, rank=r)] for r in world.ranks})
