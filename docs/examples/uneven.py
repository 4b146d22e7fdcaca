"""Rank 0 has one batch more than the others, so no rank joins its last all_reduce."""

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
batches = 4 if dist.get_rank() == 0 else 3
weight = torch.ones(4)
for _ in range(batches):
    grad = weight * (dist.get_rank() + 1)
    dist.all_reduce(grad)
    weight -= 0.1 * grad
dist.destroy_process_group()
