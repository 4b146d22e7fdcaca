"""Training strategies: entries of a program that expand into plain operations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module

from distsim.scenario.strategies.base import Strategy


class _StrategyRegistry(Mapping[str, type[Strategy]]):
    """Name of the entry -> the class of its fields, whose module is loaded when it is asked for:
    most files name no strategy.
    """

    def __init__(self, where: dict[str, str]) -> None:
        self._where = where

    def __getitem__(self, name: str) -> type[Strategy]:
        module, _, row = self._where[name].partition(" ")
        found: type[Strategy] = getattr(import_module(f"distsim.scenario.strategies.{module}"), row)
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


#: Every strategy, in the order in which they are listed: name -> its module here and its class.
STRATEGIES = _StrategyRegistry(
    {
        "data_parallel": "ddp.data_parallel DataParallel",
        "ddp": "ddp.strategy Ddp",
        "fsdp": "fsdp.strategy Fsdp",
        "deepspeed": "deepspeed.strategy DeepSpeed",
        "megatron_ddp": "megatron.ddp MegatronDdp",
        "pipeline": "pipeline.strategy Pipeline",
        "tensor_parallel": "intra_layer.tensor_parallel TensorParallel",
        "context_parallel": "intra_layer.context_parallel ContextParallel",
        "ulysses": "intra_layer.ulysses Ulysses",
        "expert_parallel": "intra_layer.expert_parallel ExpertParallel",
        "hybrid": "training_step.hybrid Hybrid",
        "transformer": "training_step.transformer Transformer",
        "local_sgd": "torchft.local_sgd LocalSgd",
        "diloco": "torchft.local_sgd DiLoCo",
        "fault_tolerant": "torchft.quorum FaultTolerant",
        "inference": "serving.inference Inference",
        "kv_transfer": "serving.kv_transfer KvTransfer",
        "weight_sync": "serving.weight_sync WeightSync",
        "dcp_save": "composite_calls.distributed_checkpoint DcpSave",
        "dcp_async_save": "composite_calls.distributed_checkpoint DcpAsyncSave",
        "dcp_load": "composite_calls.distributed_checkpoint DcpLoad",
        "broadcast_object_list": "composite_calls.object_collectives BroadcastObjectList",
        "all_gather_object": "composite_calls.object_collectives AllGatherObject",
        "gather_object": "composite_calls.object_collectives GatherObject",
        "scatter_object_list": "composite_calls.object_collectives ScatterObjectList",
        "symm_mem_barrier": "composite_calls.symmetric_memory SymmMemBarrier",
        "coalescing_manager": "composite_calls.coalescing_manager CoalescingManager",
    }
)
