"""The blocking rules of MPI, as torch uses it (``ProcessGroupMPI.cpp``).

Blocking follows the MPI library below torch. The rules were read in sources and in the MPI
standard, not run.
"""

from __future__ import annotations

from distsim.backends.profile import (
    BackendOptions,
    BackendProfile,
    BackendSupport,
    BufferOption,
    InvalidCallReaction,
    MismatchedCalls,
    MismatchOutcome,
    NewGroupParticipants,
    WorkerQueue,
    dtypes_by_reduce_op,
    matched_by_number,
    needs_all,
    no_neighbours,
    torch_frontend_reaction,
)
from distsim.operations.core.resolved_call import COMPLEX_DTYPES, ResolvedCall

#: The eager limit: a send of at most this size is copied and returns. The default is that of Open
#: MPI's TCP transport, the smallest of the common limits.
EAGER_LIMIT = BufferOption(
    "eager_limit", 4 * 1024, "Size up to which an MPI send is buffered.", "4 KiB"
)
_MPI_DTYPES = frozenset({"float64", "float32", "int64", "int32", "int16", "int8", "uint8"})
#: Read. A dtype that is not in torch's tables for MPI fails as a C++ lookup (``map::at``). torch
#: passes complex tensors as real ones, but not in all operations.
SUPPORT = BackendSupport(
    "mpi",
    cpu="yes",
    gpu="built",
    messages=_MPI_DTYPES | COMPLEX_DTYPES,
    moved=_MPI_DTYPES | COMPLEX_DTYPES,
    reduced=dtypes_by_reduce_op(
        numbers=_MPI_DTYPES, means=frozenset(), bits=frozenset(), complex_=COMPLEX_DTYPES
    ),
    dtype_text="map::at",
    reduce_text={"": "map::at"},
)


def credit(nbytes: int, outstanding: int, options: BackendOptions) -> bool:
    """Small sends are eager; larger ones are a rendezvous.

    1.3: "treat small sends as buffered, never as safe".
    """
    return nbytes <= EAGER_LIMIT.limit(options)


def workers(rank: int, group: int) -> WorkerQueue:
    """1.3: one worker thread runs the collectives of a process, first in first out.

    It holds the lock of the process meanwhile.
    """
    return WorkerQueue(("worker", rank), 1)


def mismatch(meeting: MismatchedCalls) -> MismatchOutcome:
    """The consequence of calls that match although they differ.

    A message longer than its receive is an MPI error, which ends the process (MPI_ERR_TRUNCATE
    under MPI_ERRORS_ARE_FATAL). A shorter one leaves the rest of the buffer unchanged. A program
    with different collectives is erroneous: undefined.

    new_group is MPI_Comm_create on the world. Since MPI 2.2 its ranks may name different groups in
    one call if these are disjoint.
    """
    if set(meeting.fields) == {"ranks"} and _are_disjoint([call.ranks for call in meeting.calls]):
        return MismatchOutcome("completes")
    sizes = meeting.nbytes
    if meeting.is_message:
        if sizes[1] < sizes[0]:
            return MismatchOutcome("crashes", (meeting.calls[1].rank,))
        return MismatchOutcome("wrong-data")
    same_size = len(set(sizes)) == 1
    if same_size and set(meeting.fields) <= {"dtype", "numel", "reduce_op"}:
        return MismatchOutcome("wrong-data")
    return MismatchOutcome("undefined")


def _are_disjoint(groups: list[tuple[int, ...]]) -> bool:
    different = {tuple(sorted(ranks)) for ranks in groups}
    return sum(map(len, different)) == len(set().union(*different))


def new_group(call: ResolvedCall, options: BackendOptions) -> NewGroupParticipants:
    """1.3: collective over all ranks, because it contains a barrier of the world."""
    return "world"


def invalid(call: ResolvedCall, code: str, options: BackendOptions) -> InvalidCallReaction:
    """The reaction to calls that the contract forbids.

    A message to the own rank (DS102) is valid in MPI; only torch's blocking `send` forbids it
    (`_check_not_self_rank`). A request that was already waited for (DS105) is null, and MPI_Wait on
    a null request returns at once.
    """
    if (code == "DS102" and call.op != "send") or code == "DS105":
        return "goes on"
    return torch_frontend_reaction(call, code, options)


MPI = BackendProfile(
    name="mpi",
    about=(
        "Small sends return at once; large sends wait for their receive. Tags and any-source "
        "receives work. One worker runs the collectives of a process. A lock is held during every "
        "blocking call. Dropping the request of a message ends the process."
    ),
    needs=needs_all,
    mismatch=mismatch,
    refuse=SUPPORT.refuse,
    credit=credit,
    slot=matched_by_number,
    workers=workers,
    new_group=new_group,
    invalid=invalid,
    dropped="crashes",
    # `ProcessGroupMPI::destroy`, which the destructor calls, waits until its queue of collectives
    # is empty, and joins the worker thread (read: ProcessGroupMPI.cpp, torch 2.13).
    joins_collectives_at_exit=True,
    lock=True,
    support=SUPPORT,
    buffer_option=EAGER_LIMIT,
    listed=5,
    built_in=False,
    neighbours=no_neighbours,
    local_groups="ValueError: MPI backend doesn't support use_local_synchronization=True",
)
