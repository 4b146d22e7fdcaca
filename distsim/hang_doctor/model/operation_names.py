"""One name for each family of operations, whatever a tool calls them.

The same collective appears as torch's Python function, as torch's profiling name, as a C++ enum
and as NCCL's function. The family is what calls of different ranks are compared by.
"""

from __future__ import annotations

import re
from functools import lru_cache

P2P_OPS = ("send", "recv")
#: A name in lower-case letters only -> its family. Calls of one family can match each other.
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
#: Operations that no member completes before all members have called them. (In a rooted operation,
#: such as broadcast, some members may return earlier.)
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
#: Operations in which all members must have the same number of elements in the input (output).
OPS_OF_EQUAL_INPUT = ("all_reduce", "broadcast", "reduce", "all_gather", "gather")
OPS_OF_EQUAL_OUTPUT = ("reduce_scatter", "scatter")


@lru_cache(4096)
def operation_family(name: str) -> str:
    """The family of an operation; an unknown name is returned in lower case."""
    return _FAMILY.get(_plain_name(name), name.lower())


def is_known_operation(name: str) -> bool:
    """Whether the name belongs to one of the known families."""
    return _plain_name(name) in _FAMILY


def _plain_name(name: str) -> str:
    return re.sub(r"[^a-z]", "", name.lower())
