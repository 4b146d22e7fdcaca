"""Replicated data parallelism of PyTorch: DistributedDataParallel and nn.DataParallel.

DistributedDataParallel comes with its buckets, communication hooks and the context manager Join.
Sharded data parallelism is in `distsim.scenario.strategies.fsdp`, Megatron's in
`distsim.scenario.strategies.megatron`.
"""
