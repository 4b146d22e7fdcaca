"""The table of operations: every operation's name and its row. Nothing registers itself; what is here is what there is."""

from __future__ import annotations

from distsim.ops import coalesced, exchange, groups, local, p2p, rooted, symmetric
from distsim.ops.base import Op

OPS: dict[str, type[Op]] = {
    "compute": local.Compute,
    "assign": local.Assign,
    "synchronize": local.Synchronize,
    "wait_stream": local.WaitStream,
    "sleep": local.Sleep,
    "send": p2p.Send,
    "recv": p2p.Recv,
    "isend": p2p.Isend,
    "irecv": p2p.Irecv,
    "batch_isend_irecv": p2p.BatchIsendIrecv,
    "wait": local.Wait,
    "broadcast": rooted.Broadcast,
    "all_reduce": symmetric.AllReduce,
    "reduce": rooted.Reduce,
    "all_gather": symmetric.AllGather,
    "all_gather_into_tensor": symmetric.AllGatherIntoTensor,
    "gather": rooted.Gather,
    "scatter": rooted.Scatter,
    "reduce_scatter": symmetric.ReduceScatter,
    "reduce_scatter_tensor": symmetric.ReduceScatterTensor,
    "all_reduce_coalesced": coalesced.AllReduceCoalesced,
    "all_gather_into_tensor_coalesced": coalesced.AllGatherIntoTensorCoalesced,
    "reduce_scatter_tensor_coalesced": coalesced.ReduceScatterTensorCoalesced,
    "all_to_all": exchange.AllToAll,
    "all_to_all_single": exchange.AllToAllSingle,
    "barrier": exchange.Barrier,
    "monitored_barrier": exchange.MonitoredBarrier,
    "new_group": groups.NewGroup,
    "init_process_group": groups.InitProcessGroup,
    "destroy_process_group": groups.DestroyProcessGroup,
    "exit": local.Exit,
    "fail": local.Fail,
}

#: Names that torch has used or will use for the same operation.
ALIASES: dict[str, str] = {alias: name for name, row in OPS.items() for alias in row.aliases}
