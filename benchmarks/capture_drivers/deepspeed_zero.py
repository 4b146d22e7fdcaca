"""A small model under DeepSpeed's ZeRO: ``deepspeed_zero.py 1|2|3``."""

import sys

import deepspeed
import torch

config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": int(sys.argv[1])},
    "bf16": {"enabled": True},
}
net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
deepspeed.init_distributed()
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
torch.manual_seed(torch.distributed.get_rank())
for _ in range(3):
    x = torch.randn(4, 32, device=engine.device, dtype=torch.bfloat16)
    loss = engine(x).float().square().mean()
    engine.backward(loss)
    engine.step()
print("loss", loss.item())
torch.distributed.destroy_process_group()
