"""Replicated data parallelism of PyTorch: DistributedDataParallel (buckets, communication hooks,
Join) and nn.DataParallel. Sharded data parallelism is in fsdp, Megatron's in megatron.
"""
