"""Names of operations, whoever wrote them: torch's profiling names, enums, NCCL's functions."""

from __future__ import annotations

import re

P2P_OPS = ("send", "recv")
#: Spelled without underscores, dashes or case -> the family. Calls of one family meet.
_FAMILY = {
    "allreduce": "all_reduce",
    "allreducecoalesced": "all_reduce",
    "allreducesparse": "all_reduce",
    "broadcast": "broadcast",
    "broadcastoop": "broadcast",
    "broadcastcoalesced": "broadcast",
    "reduce": "reduce",
    "reduceoop": "reduce",
    "allgather": "all_gather",
    "allgatherbase": "all_gather",
    "allgathercoalesced": "all_gather",
    "allgatherintotensor": "all_gather",
    "allgatherintotensorcoalesced": "all_gather",
    "allgathersingle": "all_gather",
    "allgatherv": "all_gather_v",
    "allgatherobject": "all_gather",
    "reducescatter": "reduce_scatter",
    "reducescatterbase": "reduce_scatter",
    "reducescattertensor": "reduce_scatter",
    "reducescattercoalesced": "reduce_scatter",
    "reducescattertensorcoalesced": "reduce_scatter",
    "reducescattersingle": "reduce_scatter",
    "reducescatterv": "reduce_scatter_v",
    "gather": "gather",
    "scatter": "scatter",
    "gatherobject": "gather",
    "alltoall": "all_to_all",
    "alltoallbase": "all_to_all",
    "alltoallsingle": "all_to_all",
    "alltoallvsingle": "all_to_all",
    "alltoallv": "all_to_all",
    "barrier": "barrier",
    "allreducebarrier": "barrier",
    "monitoredbarrier": "monitored_barrier",
    "send": "send",
    "isend": "send",
    "recv": "recv",
    "irecv": "recv",
    "recvanysource": "recv",
    "coalesced": "coalesced",
    "batchisendirecv": "batch_isend_irecv",
    "split": "split",
    "newwindow": "new_window",
    "broadcastobjectlist": "broadcast",
    "scatterobjectlist": "scatter",
    "sendobjectlist": "send",
    "recvobjectlist": "recv",
}
#: Operations whose completion needs every member (a leaf of the others may have gone on).
OPS_THAT_NEED_ALL = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "barrier",
    "monitored_barrier",
    "all_gather_v",
    "reduce_scatter_v",
)
#: Element counts that all members of a call must share: of the input or of the output.
OPS_OF_EQUAL_INPUT = ("all_reduce", "broadcast", "reduce", "all_gather", "gather")
OPS_OF_EQUAL_OUTPUT = ("reduce_scatter", "scatter")


def operation_family(name: str) -> str:
    """The family of an operation's name; a name that nobody knows stays as it is."""
    plain = re.sub(r"[^a-z]", "", name.lower())
    return _FAMILY.get(plain, name.lower())


def is_known_operation(name: str) -> bool:
    return re.sub(r"[^a-z]", "", name.lower()) in _FAMILY
