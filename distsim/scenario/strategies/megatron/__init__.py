"""Data parallelism of Megatron-Core (DistributedDataParallel with its distributed optimizer).
Megatron's tensor and pipeline calls are options of training_step and pipeline.
"""
