"""What gloo supports, and how it runs a collective: with which algorithm, and which member waits
for which.

Tags such as G5 name the rules in docs/explanation/semantics.md; "run" and "read": see
`distsim.backends.gloo`.

The algorithm of a collective decides nearly everything else about it. gloo has four kinds:

* ring (all_reduce, reduce, all_gather, reduce_scatter): every member waits for all members;
* tree (broadcast): a member waits for its ancestors in a binomial tree, and for its children;
* star (gather, scatter): the root waits for all members, and the others for the root;
* all others (all_to_all, barrier) connect any two members, and every member waits for all members.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache

from distsim.backends.gloo_rings import RING_STEPS
from distsim.backends.profile import (
    FLOAT_DTYPES,
    INTEGER_DTYPES,
    BackendSupport,
    WorkerQueue,
    dtypes_by_reduce_op,
)
from distsim.operations.core.backend_bindings import needs_only_root
from distsim.operations.core.operation_base import BackendBinding
from distsim.operations.core.resolved_call import COMPLEX_DTYPES, DTYPE_BYTES, ResolvedCall
from distsim.operations.registry import OPERATIONS

#: Every entry was run on torch 2.13. gloo refuses an average of integers only after it has
#: computed the sum.
SUPPORT = BackendSupport(
    "gloo",
    cpu="yes",
    gpu="yes",
    messages=frozenset(DTYPE_BYTES),
    moved=FLOAT_DTYPES | INTEGER_DTYPES | COMPLEX_DTYPES | {"bool"},
    reduced=dtypes_by_reduce_op(
        numbers=FLOAT_DTYPES | INTEGER_DTYPES | {"bool"},
        means=FLOAT_DTYPES,
        bits=INTEGER_DTYPES | {"bool"},
        complex_=COMPLEX_DTYPES,
    ),
    dtype_text="Invalid scalar type",
    reduce_text={
        "": "Cannot use ReduceOp.{op} with non-integral dtype",
        "avg": "result type Float can't be cast to the desired output type {type}",
    },
)


def refuse(call: ResolvedCall) -> str | None:
    """The error text of a call that gloo rejects, else None.

    Besides unsupported calls, gloo rejects an empty receive from any source, because the buffer has
    no valid offset (run).
    """
    if call.peer is None and OPERATIONS[call.op].direction == "recv" and not call.outputs[0].nbytes:
        return "[enforce fail at gloo/transport/tcp/unbound_buffer.cc] offset < this->size. 0 vs 0"
    return SUPPORT.refuse(call)


def workers(rank: int, group: int) -> WorkerQueue:
    """G7: two worker threads per group run its collectives, first in first out.

    Messages do not use worker threads.
    """
    return WorkerQueue(("workers", rank, group), 2)


def slot(op: str) -> Hashable:
    """G5: different operations at the same number do not match each other, and hang.

    Operations that gloo implements with the same collective share a slot. Calls that name different
    roots do match; `per_rank_needs` decides what happens to them.
    """
    return implementing_collective(op)


@cache
def binding_of(op: str) -> BackendBinding:
    """How gloo implements an operation."""
    return SUPPORT.binding(op) or BackendBinding()


def implementing_collective(op: str) -> str:
    """The collective of gloo that implements an operation, by its name in torch."""
    return binding_of(op).slot or op


# --- kinds of algorithms ---
def is_star(op: str) -> bool:
    """Whether the members exchange data only with the root: gather and scatter."""
    return binding_of(op).needs is needs_only_root


def is_tree(op: str) -> bool:
    """Whether data flow from the root down a binomial tree: broadcast."""
    return binding_of(op).needs is not None and not is_star(op)


def is_ring(op: str) -> bool:
    """G15: whether data pass from neighbour to neighbour; a rank without data skips such a ring.

    Run: all_reduce, reduce, all_gather and reduce_scatter, alone and coalesced, return at once on
    a rank without data. Empty calls of broadcast, gather, scatter and all_to_all, and empty
    messages, do wait.
    """
    return implementing_collective(op) in RING_STEPS


def waits_for_all(op: str) -> bool:
    """Whether every member waits for all members: neither a star nor a tree."""
    return binding_of(op).needs is None


def needs(op: str, n: int, root: int, me: int) -> frozenset[int] | None:
    """G6, 2.5: the members that one member waits for, as group ranks; None for all.

    Operations with `BackendBinding.needs` follow the data flow and are no barriers. In broadcast a
    member needs its ancestors in a binomial tree and its children. In gather and scatter the root
    needs all members, and the others need the root. All other operations synchronise all members.
    """
    needed = binding_of(op).needs
    return None if needed is None else needed(n, root, me)


def group_root(call: ResolvedCall) -> int:
    """The root as a group rank.

    A root outside the group makes a call invalid (DS103), so it never matches others and any number
    will do.
    """
    assert call.root is not None
    return max(call.group.group_rank(call.root), 0)
