"""MPI as torch uses it (``ProcessGroupMPI.cpp``); blocking follows the MPI library underneath."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from distsim.ops.records import Call
from distsim.profiles.record import Meeting, Mishap, Profile, Workers, by_number, needs_all, option

#: Open MPI's limit of its TCP transport, the smallest of the common ones: below it a send is copied and returns.
EAGER_LIMIT = 4 * 1024

_DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float32", "float64")
_OPS = ("sum", "product", "min", "max")


def credit(nbytes: int, outstanding: int, options: Mapping[str, Any]) -> bool:
    """Eager up to a limit, a rendezvous above (1.3: "treat small sends as buffered, never as safe")."""
    return nbytes <= option(options, "eager_limit", EAGER_LIMIT)


def workers(rank: int, group: int) -> Workers:
    """1.3: collectives go first in first out through one worker thread, and one lock of the process is held meanwhile."""
    return Workers(("worker", rank), 1)


def mismatch(meeting: Meeting) -> Mishap:
    """A message longer than its receive is an error of MPI, which ends the process (MPI_ERR_TRUNCATE under
    MPI_ERRORS_ARE_FATAL); a shorter one leaves the tail. Collectives that differ are erroneous programs: undefined."""
    sizes = meeting.nbytes
    if meeting.is_message:
        return Mishap("crashes", (meeting.calls[1].rank,)) if sizes[1] < sizes[0] else Mishap("wrong-data")
    same = len(set(sizes)) == 1 and set(meeting.fields) <= {"dtype", "numel", "reduce_op"}
    return Mishap("wrong-data") if same else Mishap("undefined")


def refuse(call: Call) -> str | None:
    """1.3: dtypes and ops that are not in the tables of the back end fail as a lookup (``map::at``)."""
    if call.op == "monitored_barrier":
        return "monitored_barrier is only implemented for GLOO backend."
    buffers = call.inputs or call.outputs
    if buffers and buffers[0].dtype not in _DTYPES:
        return "map::at"
    return "map::at" if call.reduce_op is not None and call.reduce_op not in _OPS else None


def new_group(call: Call, options: Mapping[str, Any]) -> Literal["members", "world", "nobody"]:
    """1.3: collective over all ranks (a barrier of the world inside)."""
    return "world"


MPI = Profile(
    name="mpi",
    about="Small sends return at once, large ones wait for their receive. Tags and any-source are true. One worker runs the "
          "collectives of a process. Dropping a message's request ends the process.",
    needs=needs_all, mismatch=mismatch, refuse=refuse, credit=credit, slot=by_number, workers=workers, new_group=new_group,
    dropped="crashes",
)  # fmt: skip
