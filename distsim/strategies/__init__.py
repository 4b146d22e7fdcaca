"""Training strategies: entries of a program that expand into plain operations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module

from distsim.strategies.base import Strategy


class _Strategies(Mapping[str, type[Strategy]]):
    """Name of the entry -> the class of its fields, whose module is loaded when it is asked for: most files name no strategy."""

    def __init__(self, where: dict[str, str]) -> None:
        self._where = where

    def __getitem__(self, name: str) -> type[Strategy]:
        module, _, row = self._where[name].partition(" ")
        found: type[Strategy] = getattr(import_module(f"distsim.strategies.{module}"), row)
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


#: Every strategy, in the order in which they are listed: name -> its module here and its class.
STRATEGIES = _Strategies(
    {
        "data_parallel": "data_parallel DataParallel",
        "ddp": "ddp Ddp",
        "fsdp": "fsdp Fsdp",
        "deepspeed": "deepspeed DeepSpeed",
        "megatron_ddp": "megatron_ddp MegatronDdp",
        "pipeline": "pipeline Pipeline",
        "tensor_parallel": "tensor_parallel TensorParallel",
        "context_parallel": "context_parallel ContextParallel",
        "ulysses": "ulysses Ulysses",
        "expert_parallel": "expert_parallel ExpertParallel",
        "hybrid": "hybrid Hybrid",
        "transformer": "train Transformer",
        "local_sgd": "averaging LocalSgd",
        "diloco": "averaging DiLoCo",
        "fault_tolerant": "elastic FaultTolerant",
        "inference": "inference Inference",
        "kv_transfer": "kv_transfer KvTransfer",
        "weight_sync": "weight_sync WeightSync",
        "dcp_save": "checkpoint DcpSave",
        "dcp_async_save": "checkpoint DcpAsyncSave",
        "dcp_load": "checkpoint DcpLoad",
        "broadcast_object_list": "objects BroadcastObjectList",
        "all_gather_object": "objects AllGatherObject",
        "gather_object": "objects GatherObject",
        "scatter_object_list": "objects ScatterObjectList",
        "symm_mem_barrier": "symmetric_memory SymmMemBarrier",
        "coalescing_manager": "coalescing CoalescingManager",
    }
)
