"""The blocking rules of NCCL, as torch uses it.

Tags such as N1 name the rules in docs/explanation/semantics.md, which were read in sources. "Run"
marks those that were also run, on ranks that shared an H100 (`benchmarks/nccl_truth.py`).

This module does not decide which communicator and stream a call uses, nor what the host waits for:
see `distsim.semantics.form.device_compiler`.
"""

from __future__ import annotations

from distsim.backends.profile import (
    ALL_PAIRS,
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
from distsim.operations.core.resolved_call import COMPLEX_DTYPES, DTYPE_BYTES, ResolvedCall
from distsim.operations.registry import OPERATIONS

#: The smallest number of channels between two ranks (``topo.cc``, `ncclTopoGetNchannels`; over
#: NVLink there are more).
MIN_CHANNELS_PER_PEER = 2
#: N10: the bytes that a send can buffer. Each channel of a pair buffers NCCL_BUFFSIZE, by default
#: 4 MiB (``init.cc``: 8 slots of 512 KiB). Run on an H100: a send of 8 MiB completes without its
#: receive, a send of 10 MiB does not (NCCL 2.32.3, ranks on one GPU). Sockets buffer more: there
#: the sizes were 10 and 16 MiB.
SEND_BUFFER = BufferOption(
    "buffsize",
    MIN_CHANNELS_PER_PEER * 4 * 1024 * 1024,
    (
        "Bytes that an nccl send may run ahead of its receive: NCCL_BUFFSIZE on both channels of "
        "a pair."
    ),
    "8 MiB",
)
#: Read. bool travels as uint8, so its sum is a maximum. Reductions of float8 require NCCL >= 2.24
#: and compute capability >= 9.0.
SUPPORT = BackendSupport(
    "nccl",
    cpu="no",
    gpu="yes",
    any_source="ProcessGroupNCCL does not support recvAnysource",
    messages=frozenset(DTYPE_BYTES) - {"int16"},
    moved=frozenset(DTYPE_BYTES) - {"int16"},
    reduced=dtypes_by_reduce_op(
        numbers=FLOAT_DTYPES | FLOAT8_DTYPES | INTEGER_DTYPES | {"bool"},
        means=FLOAT_DTYPES | FLOAT8_DTYPES | INTEGER_DTYPES,
        bits=frozenset(),
        complex_=COMPLEX_DTYPES,
    ),
    dtype_text="Input tensor data type is not supported for NCCL process group: {type}",
    reduce_text={
        "": "Cannot use ReduceOp.{op} with NCCL",
        "avg": "Cannot use ReduceOp.AVG with boolean inputs",
    },
)


#: N9: collectives that torch implements with grouped sends and receives (``nccl.cpp``: `gather`,
#: `scatter`, `all2all…`; run on H100, NCCL 2.28.9 and 2.32.3).
SENT_AS_MESSAGES = {
    "all_to_all": ALL_PAIRS,
    "all_to_all_single": ALL_PAIRS,
    "gather": TO_ROOT,
    "scatter": FROM_ROOT,
}


def credit(nbytes: int, outstanding: int, options: BackendOptions) -> bool:
    """N10: a send may complete before its receive while the slots of its channels hold it.

    Programs must not rely on it: the contract promises no buffering.
    """
    return outstanding + nbytes <= SEND_BUFFER.limit(options)


def mismatch(meeting: MismatchedCalls) -> MismatchOutcome:
    """N4: the consequence of calls that match although they differ is undefined in general.

    Known cases: another dtype of the same size, or another reduce op, is executed unnoticed;
    another root hangs (2.2). N5: NCCL ignores tags, so a message that matches the receive of
    another tag arrives in the wrong buffer.
    """
    fields = set(meeting.fields)
    if fields == {"root"}:
        return MismatchOutcome("hangs", hangs=True)
    has_coalesced = any(OPERATIONS[call.op].coalesces is not None for call in meeting.calls)
    if "numel" in fields and has_coalesced:
        # Each part is an operation of its own, so equal total sizes do not imply equal parts.
        return MismatchOutcome("undefined")
    same_size = len(set(meeting.nbytes)) == 1
    if same_size and fields <= {"dtype", "numel", "reduce_op", "tag"}:
        return MismatchOutcome("wrong-data")
    return MismatchOutcome("undefined")


def new_group(call: ResolvedCall, options: BackendOptions) -> NewGroupParticipants:
    """2.3: the ranks that synchronise in new_group.

    Lazy communicators are created at their first use. An eager communicator is split off its
    parent, which requires all ranks of the parent.
    """
    return "world" if options.get("init") == "eager" else "nobody"


def invalid(call: ResolvedCall, code: str, options: BackendOptions) -> InvalidCallReaction:
    """The reaction to calls that the contract forbids.

    * A partner outside the world (DS101; 2.1, inferred): it never joins the communicator of the
      pair (lazy initialisation), so the host waits in the store. Under eager initialisation it is
      an invalid argument.
    * A message to the own rank (DS102) is valid in a batch that also contains its receive.
    * A second wait (DS105) only lets the stream wait again.
    """
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
    about=(
        "A call returns when it is enqueued (N1). Operations of one communicator run and match in "
        "issue order (N3): kinds and tags are ignored (N4, N5), and any-source receives are not "
        "supported (N6). A batch is one unit (N11). The first use of a communicator waits for its "
        "members (N8); the first use of a connection waits for both ends (N9). Small sends may be "
        "buffered (N10)."
    ),
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
    publishes_communicator_id=True,
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
