"""Training strategies: entries of a program that expand into plain operations."""

from __future__ import annotations

from distsim.strategies.base import Strategy
from distsim.strategies.coalescing import CoalescingManager
from distsim.strategies.context_parallel import ContextParallel
from distsim.strategies.data_parallel import DataParallel
from distsim.strategies.ddp import Ddp
from distsim.strategies.expert_parallel import ExpertParallel
from distsim.strategies.fsdp import Fsdp
from distsim.strategies.hybrid import Hybrid
from distsim.strategies.objects import AllGatherObject, BroadcastObjectList, GatherObject, ScatterObjectList
from distsim.strategies.pipeline import Pipeline
from distsim.strategies.tensor_parallel import TensorParallel
from distsim.strategies.train import Transformer

#: The classes of strategies' fields, in the order in which they are listed.
_ROWS: tuple[type[Strategy], ...] = (
    DataParallel, Ddp, Fsdp, Pipeline, TensorParallel, ContextParallel, ExpertParallel, Hybrid, Transformer,
    BroadcastObjectList, AllGatherObject, GatherObject, ScatterObjectList, CoalescingManager,
)  # fmt: skip

#: Name of the entry -> the class of its fields. An entry whose key is here is expanded when the scenario is read.
STRATEGIES: dict[str, type[Strategy]] = {row.name: row for row in _ROWS}
