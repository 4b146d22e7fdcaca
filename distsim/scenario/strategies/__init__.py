"""Training strategies: entries of a program that expand into plain operations.

``STRATEGIES`` maps the name of an entry to its class. Each strategy is a package or module below;
the base modules next to this file import none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module

from distsim.scenario.strategies.base import Strategy


class _StrategyRegistry(Mapping[str, type[Strategy]]):
    """Name of an entry -> its class.

    A module is imported when its class is first requested, because most scenario files have no
    strategy.
    """

    def __init__(self, locations: dict[str, str]) -> None:
        self._locations = locations

    def __getitem__(self, name: str) -> type[Strategy]:
        module_name, _, class_name = self._locations[name].partition(" ")
        module = import_module(f"distsim.scenario.strategies.{module_name}")
        strategy: type[Strategy] = getattr(module, class_name)
        return strategy

    def __contains__(self, name: object) -> bool:
        return name in self._locations

    def __iter__(self) -> Iterator[str]:
        return iter(self._locations)

    def __len__(self) -> int:
        return len(self._locations)


#: Every strategy, in the order in which they are listed: name -> its module and its class.
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
