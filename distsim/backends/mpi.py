"""MPI as torch uses it (``ProcessGroupMPI.cpp``); blocking follows the MPI library underneath."""

from __future__ import annotations

from distsim.backends.profile import (
    COMPLEX_DTYPES,
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
from distsim.operations.core.resolved_call import ResolvedCall

#: Open MPI's limit of its TCP transport, the smallest of the common ones: below it a send is copied
#: and returns.
EAGER_LIMIT = BufferOption("eager_limit", 4 * 1024)
_MPI_DTYPES = frozenset({"float64", "float32", "int64", "int32", "int16", "int8", "uint8"})
#: Read. What is not in its tables fails as a lookup. torch hands it complex tensors as real ones,
#: but not in all operations.
SUPPORT = BackendSupport(
    "mpi",
    cpu="yes",
    gpu="built",
    messages=_MPI_DTYPES | COMPLEX_DTYPES,
    moved=_MPI_DTYPES | COMPLEX_DTYPES,
    reduced=dtypes_by_reduce_op(_MPI_DTYPES, frozenset(), frozenset(), COMPLEX_DTYPES),
    dtype_text="map::at",
    reduce_text={"": "map::at"},
)


def credit(nbytes: int, outstanding: int, options: BackendOptions) -> bool:
    """Eager up to a limit, a rendezvous above (1.3: "treat small sends as buffered, never as
    safe").
    """
    return nbytes <= EAGER_LIMIT.limit(options)


def workers(rank: int, group: int) -> WorkerQueue:
    """1.3: collectives go first in first out through one worker thread, and one lock of the process
    is held meanwhile.
    """
    return WorkerQueue(("worker", rank), 1)


def mismatch(meeting: MismatchedCalls) -> MismatchOutcome:
    """A message longer than its receive is an error of MPI, which ends the process
    (MPI_ERR_TRUNCATE under MPI_ERRORS_ARE_FATAL); a shorter one leaves the tail. Collectives that
    differ are erroneous programs: undefined.

    new_group is MPI_Comm_create on the world: since MPI 2.2 its ranks may name different groups in
    one call if these are disjoint."""
    if set(meeting.fields) == {"ranks"} and _are_disjoint([call.ranks for call in meeting.calls]):
        return MismatchOutcome("completes")
    sizes = meeting.nbytes
    if meeting.is_message:
        return (
            MismatchOutcome("crashes", (meeting.calls[1].rank,))
            if sizes[1] < sizes[0]
            else MismatchOutcome("wrong-data")
        )
    same = len(set(sizes)) == 1 and set(meeting.fields) <= {"dtype", "numel", "reduce_op"}
    return MismatchOutcome("wrong-data") if same else MismatchOutcome("undefined")


def _are_disjoint(groups: list[tuple[int, ...]]) -> bool:
    different = {tuple(sorted(ranks)) for ranks in groups}
    return sum(map(len, different)) == len(set().union(*different))


def new_group(call: ResolvedCall, options: BackendOptions) -> NewGroupParticipants:
    """1.3: collective over all ranks (a barrier of the world inside)."""
    return "world"


def invalid(call: ResolvedCall, code: str, options: BackendOptions) -> InvalidCallReaction:
    """MPI sends a message to the own rank as any other; only torch's blocking `send` forbids it
    (`_check_not_self_rank`). A request that was waited for is null, and MPI_Wait on it returns at
    once."""
    if (code == "DS102" and call.op != "send") or code == "DS105":
        return "goes on"
    return torch_frontend_reaction(call, code, options)


MPI = BackendProfile(
    name="mpi",
    about="Small sends return at once, large ones wait for their receive. Tags and any-source are "
    "true. One worker runs the "
    "collectives of a process, and one lock is held through every blocking call. Dropping a "
    "message's request ends the process.",
    needs=needs_all,
    mismatch=mismatch,
    refuse=SUPPORT.refuse,
    credit=credit,
    slot=matched_by_number,
    workers=workers,
    new_group=new_group,
    invalid=invalid,
    dropped="crashes",
    lock=True,
    support=SUPPORT,
    buffer_option=EAGER_LIMIT,
    listed=5,
    built_in=False,
    neighbours=no_neighbours,
    local_groups="ValueError: MPI backend doesn't support use_local_synchronization=True",
)
