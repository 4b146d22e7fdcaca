"""NCCL as torch uses it. The tags (N1 …) are the rules of the evidence; they were read in sources, not run.

Which communicator and stream a call uses, and what the host waits for, is `distsim.rules.device`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from distsim.ops.records import Call
from distsim.profiles.record import Meeting, Mishap, Profile, by_number, needs_all, no_workers, option

#: NCCL_BUFFSIZE, the default of 2.30 (``init.cc``): 8 slots of 512 KiB per channel (N10).
BUFFSIZE = 4 * 1024 * 1024


def credit(nbytes: int, outstanding: int, options: Mapping[str, Any]) -> bool:
    """N10: a send runs ahead of its receive while the channel's slots hold it. Luck, never the contract."""
    return outstanding + nbytes <= option(options, "buffsize", BUFFSIZE)


def mismatch(meeting: Meeting) -> Mishap:
    """N4: undefined. What is known: equal bytes of another dtype and other reduce ops go through, another root hangs (2.2).

    N5: a message that meets the receive of another tag arrives where it was not meant to."""
    fields = set(meeting.fields)
    if fields == {"root"}:
        return Mishap("hangs", hangs=True)
    same_size = len(set(meeting.nbytes)) == 1
    return Mishap("wrong-data") if same_size and fields <= {"dtype", "numel", "reduce_op", "tag"} else Mishap("undefined")


def refuse(call: Call) -> str | None:
    """N6 and 2.6: what the back end rejects, in its own words."""
    if call.op in ("recv", "irecv") and call.peer is None:
        return "ProcessGroupNCCL does not support recvAnysource"
    if call.op == "monitored_barrier":
        return "monitored_barrier is only implemented for GLOO backend."
    buffers = call.inputs or call.outputs
    dtype = buffers[0].dtype if buffers else ""
    if dtype in ("int16", "uint16"):
        return "Unconvertible NCCL type Short"
    if call.reduce_op in ("band", "bor", "bxor"):
        return f"Cannot use ReduceOp.{call.reduce_op.upper()} with NCCL"
    if call.reduce_op == "avg" and dtype == "bool":
        return "Cannot use ReduceOp.AVG with boolean inputs"
    return None


def new_group(call: Call, options: Mapping[str, Any]) -> Literal["members", "world", "nobody"]:
    """2.3: lazily made communicators meet at first use; eager ones are split off the parent by all its ranks."""
    return "world" if options.get("init") == "eager" else "nobody"


NCCL = Profile(
    name="nccl",
    about="A call returns when it is enqueued (N1). Operations of one communicator run in issue order (N3) and meet by it alone: "
          "no kinds, no tags (N4, N5), no any-source (N6). A batch is one unit (N11). First use of a communicator waits for its "
          "members (N8). Small sends may run ahead into buffers (N10).",
    needs=needs_all, mismatch=mismatch, refuse=refuse, credit=credit, slot=by_number, workers=no_workers, new_group=new_group,
    device=True, tags=False, any_source=False, timeout_ns=10 * 60 * 10**9,
)  # fmt: skip
