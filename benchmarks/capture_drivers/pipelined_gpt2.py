"""GPT-2 of transformers, cut into two stages of torch.distributed.pipelining, with 1F1B."""

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

CHUNKS, BATCH, LENGTH, WORDS = 4, 8, 16, 64
torch.distributed.init_process_group("nccl")
rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
torch.manual_seed(0)
config = GPT2Config(n_embd=32, n_head=2, n_layer=4, vocab_size=WORDS, attn_implementation="eager")


class Part(nn.Module):
    """The layers of one stage."""

    def __init__(self):
        super().__init__()
        layers = range(rank * 2, rank * 2 + 2)
        self.embedding = nn.Embedding(WORDS, 32) if rank == 0 else nn.Identity()
        self.blocks = nn.ModuleList(GPT2Block(config, layer_idx=k) for k in layers)
        self.head = nn.Linear(32, WORDS) if rank == ranks - 1 else nn.Identity()

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            out = block(x)
            x = out[0] if isinstance(out, tuple) else out
        return self.head(x)


def loss_of(found, wanted):
    return nn.functional.cross_entropy(found.flatten(0, 1), wanted.flatten())


part = Part().to(device)
optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)
stage = PipelineStage(part, rank, ranks, device)
schedule = Schedule1F1B(stage, CHUNKS, loss_fn=loss_of)
for step in range(2):
    words = torch.randint(0, WORDS, (BATCH, LENGTH), device=device)
    optimizer.zero_grad()
    losses = []
    if rank == 0:
        schedule.step(words)
    else:
        schedule.step(target=words, losses=losses)
    optimizer.step()
    norm = torch.stack([p.grad.norm() for p in part.parameters()]).norm()
    torch.distributed.all_reduce(norm)
    print("step", step, "norm", norm.item())
torch.distributed.destroy_process_group()
