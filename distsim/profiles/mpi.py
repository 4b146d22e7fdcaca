"""MPI as torch uses it (``ProcessGroupMPI.cpp``); blocking follows the MPI library underneath."""

from __future__ import annotations

from distsim.ops.records import Call
from distsim.profiles.record import (
    COMPLEX,
    BufferOption,
    Meeting,
    Mishap,
    Options,
    Parties,
    Profile,
    Reaction,
    Support,
    Workers,
    by_number,
    needs_all,
    no_neighbours,
    reduced_by,
    torch_layer,
)

#: Open MPI's limit of its TCP transport, the smallest of the common ones: below it a send is copied and returns.
BUFFER = BufferOption("eager_limit", 4 * 1024)
_NUMBERS = frozenset({"float64", "float32", "int64", "int32", "int16", "int8", "uint8"})
#: Read. What is not in its tables fails as a lookup. torch hands it complex tensors as real ones, but not in all operations.
SUPPORT = Support(
    "mpi",
    cpu="yes",
    gpu="built",
    messages=_NUMBERS | COMPLEX,
    moved=_NUMBERS | COMPLEX,
    reduced=reduced_by(_NUMBERS, frozenset(), frozenset(), COMPLEX),
    dtype_text="map::at",
    reduce_text={"": "map::at"},
)


def credit(nbytes: int, outstanding: int, options: Options) -> bool:
    """Eager up to a limit, a rendezvous above (1.3: "treat small sends as buffered, never as safe")."""
    return nbytes <= BUFFER.limit(options)


def workers(rank: int, group: int) -> Workers:
    """1.3: collectives go first in first out through one worker thread, and one lock of the process is held meanwhile."""
    return Workers(("worker", rank), 1)


def mismatch(meeting: Meeting) -> Mishap:
    """A message longer than its receive is an error of MPI, which ends the process (MPI_ERR_TRUNCATE under
    MPI_ERRORS_ARE_FATAL); a shorter one leaves the tail. Collectives that differ are erroneous programs: undefined.

    new_group is MPI_Comm_create on the world: since MPI 2.2 its ranks may name different groups in one call if these are disjoint."""
    if set(meeting.fields) == {"ranks"} and _apart([call.ranks for call in meeting.calls]):
        return Mishap("completes")
    sizes = meeting.nbytes
    if meeting.is_message:
        return Mishap("crashes", (meeting.calls[1].rank,)) if sizes[1] < sizes[0] else Mishap("wrong-data")
    same = len(set(sizes)) == 1 and set(meeting.fields) <= {"dtype", "numel", "reduce_op"}
    return Mishap("wrong-data") if same else Mishap("undefined")


def _apart(groups: list[tuple[int, ...]]) -> bool:
    different = {tuple(sorted(ranks)) for ranks in groups}
    return sum(map(len, different)) == len(set().union(*different))


def new_group(call: Call, options: Options) -> Parties:
    """1.3: collective over all ranks (a barrier of the world inside)."""
    return "world"


def invalid(call: Call, code: str, options: Options) -> Reaction:
    """MPI sends a message to the own rank as any other; only torch's blocking `send` forbids it (`_check_not_self_rank`). A request
    that was waited for is null, and MPI_Wait on it returns at once."""
    if (code == "DS102" and call.op != "send") or code == "DS105":
        return "goes on"
    return torch_layer(call, code, options)


MPI = Profile(
    name="mpi",
    about="Small sends return at once, large ones wait for their receive. Tags and any-source are true. One worker runs the "
          "collectives of a process, and one lock is held through every blocking call. Dropping a message's request ends the process.",
    needs=needs_all, mismatch=mismatch, refuse=SUPPORT.refuse, credit=credit, slot=by_number, workers=workers, new_group=new_group,
    invalid=invalid, dropped="crashes", lock=True, support=SUPPORT, buffer_option=BUFFER, listed=5, built_in=False,
    neighbours=no_neighbours,
    local_groups="ValueError: MPI backend doesn't support use_local_synchronization=True",
)  # fmt: skip
