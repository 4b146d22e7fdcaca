"""NCCL as torch uses it. The tags (N1 …) are the rules of the evidence, read in sources. What of
them was run, on ranks that shared an H100: `benchmarks/nccl_truth.py`, docs/semantics.md.

Which communicator and stream a call uses, and what the host waits for, is
`distsim.semantics.form.device_compiler`.
"""

from __future__ import annotations

from distsim.backends.profile import (
    ALL_PAIRS,
    COMPLEX_DTYPES,
    FLOAT8_DTYPES,
    FLOAT_DTYPES,
    FROM_ROOT,
    INTEGER_DTYPES,
    TO_ROOT,
    BackendOptions,
    BackendProfile,
    BackendSupport,
    BufferOption,
    InvalidCallReaction,
    MismatchedCalls,
    MismatchOutcome,
    NewGroupParticipants,
    dtypes_by_reduce_op,
    matched_by_number,
    needs_all,
    no_neighbours,
    no_workers,
    torch_frontend_reaction,
)
from distsim.operations.core.resolved_call import DTYPE_BYTES, ResolvedCall
from distsim.operations.registry import OPERATIONS

#: Channels that a pair of ranks has at least (``topo.cc``, `ncclTopoGetNchannels`; over NVLink it
#: has more).
MIN_CHANNELS_PER_PEER = 2
#: N10: NCCL_BUFFSIZE on each channel of a pair, by default 4 MiB (``init.cc``: 8 slots of 512 KiB).
#: Run on an H100: a send of 8 MiB completes without its receive, one of 10 MiB does not (NCCL
#: 2.32.3, ranks on one GPU; over sockets, which hold more, 10 and 16 MiB).
SEND_BUFFER = BufferOption("buffsize", MIN_CHANNELS_PER_PEER * 4 * 1024 * 1024)
#: Read. bool travels as uint8, so its sum is a maximum. float8 is reduced with NCCL >= 2.24 on
#: compute capability >= 9.0.
SUPPORT = BackendSupport(
    "nccl",
    cpu="no",
    gpu="yes",
    any_source="ProcessGroupNCCL does not support recvAnysource",
    messages=frozenset(DTYPE_BYTES) - {"int16"},
    moved=frozenset(DTYPE_BYTES) - {"int16"},
    reduced=dtypes_by_reduce_op(
        FLOAT_DTYPES | FLOAT8_DTYPES | INTEGER_DTYPES | {"bool"},
        FLOAT_DTYPES | FLOAT8_DTYPES | INTEGER_DTYPES,
        frozenset(),
        COMPLEX_DTYPES,
    ),
    dtype_text="Input tensor data type is not supported for NCCL process group: {type}",
    reduce_text={
        "": "Cannot use ReduceOp.{op} with NCCL",
        "avg": "Cannot use ReduceOp.AVG with boolean inputs",
    },
)


#: N9: grouped sends and receives (torch, ``nccl.cpp``: `gather`, `scatter`, `all2all…`; run on
#: H100, NCCL 2.28.9 and 2.32.3).
SENT_AS_MESSAGES = {
    "all_to_all": ALL_PAIRS,
    "all_to_all_single": ALL_PAIRS,
    "gather": TO_ROOT,
    "scatter": FROM_ROOT,
}


def credit(nbytes: int, outstanding: int, options: BackendOptions) -> bool:
    """N10: a send runs ahead of its receive while the channel's slots hold it. Luck, never the
    contract.
    """
    return outstanding + nbytes <= SEND_BUFFER.limit(options)


def mismatch(meeting: MismatchedCalls) -> MismatchOutcome:
    """N4: undefined. What is known: equal bytes of another dtype and other reduce ops go through,
    another root hangs (2.2).

    N5: a message that meets the receive of another tag arrives where it was not meant to."""
    fields = set(meeting.fields)
    if fields == {"root"}:
        return MismatchOutcome("hangs", hangs=True)
    if "numel" in fields and any(
        OPERATIONS[call.op].coalesces is not None for call in meeting.calls
    ):
        return MismatchOutcome(
            "undefined"
        )  # the parts are operations of their own, and equal bytes in all say nothing of them
    same_size = len(set(meeting.nbytes)) == 1
    return (
        MismatchOutcome("wrong-data")
        if same_size and fields <= {"dtype", "numel", "reduce_op", "tag"}
        else MismatchOutcome("undefined")
    )


def new_group(call: ResolvedCall, options: BackendOptions) -> NewGroupParticipants:
    """2.3: lazily made communicators meet at first use; eager ones are split off the parent by all
    its ranks.
    """
    return "world" if options.get("init") == "eager" else "nobody"


def invalid(call: ResolvedCall, code: str, options: BackendOptions) -> InvalidCallReaction:
    """2.1, inferred: a partner outside the world never comes to the pair's communicator (lazy
    init), so the host waits in the store; under eager init it is an invalid argument. A batch may
    hold a message to the own rank and its receive. A second wait is a second stream join."""
    is_batch = call.op == "batch_isend_irecv"
    is_lazy_world = call.group.id == 0 and options.get("init") != "eager"
    if code == "DS101" and is_lazy_world and not is_batch:
        return "hangs"
    if code == "DS105":
        return "goes on"
    if code == "DS102" and is_batch and _matches_own_messages(call):
        return "goes on"
    if SUPPORT.overlooks(call, code):
        return "goes on"
    return torch_frontend_reaction(call, code, options)


def _matches_own_messages(call: ResolvedCall) -> bool:
    own = [part.op for part in call.parts if part.peer == part.rank]
    return own.count("isend") == own.count("irecv")


NCCL = BackendProfile(
    name="nccl",
    about="A call returns when it is enqueued (N1). Operations of one communicator run in issue "
    "order (N3) and meet by it alone: "
    "no kinds, no tags (N4, N5), no any-source (N6). A batch is one unit (N11). First use of "
    "a communicator waits for its "
    "members (N8), first use of a connection for those who share it (N9). Small sends may "
    "run ahead into buffers (N10).",
    needs=needs_all,
    mismatch=mismatch,
    refuse=SUPPORT.refuse,
    credit=credit,
    slot=matched_by_number,
    workers=no_workers,
    new_group=new_group,
    invalid=invalid,
    by_messages=SENT_AS_MESSAGES,
    timed_out="crashes",
    device=True,
    tags=False,
    any_source=False,
    timeout_ns=10 * 60 * 10**9,
    support=SUPPORT,
    buffer_option=SEND_BUFFER,
    cluster="dgx-a100",
    listed=2,
    neighbours=no_neighbours,
)
