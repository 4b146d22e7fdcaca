"""torch.distributed calls that consist of several operations: object collectives, the coalescing
manager, the symmetric-memory barrier, distributed checkpoints. No training strategies.
"""
