"""Two steps of a Llama of 8 thousand million parameters (Llama 3's 8B: its layers, widths and
vocabulary) under FSDP2, for `--fake`.
"""

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

WIDTH, HEADS, KEYS, INNER, LAYERS, WORDS, LENGTH = 4096, 32, 8, 14336, 32, 128256, 8192


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.asked, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.key, self.value = (
            nn.Linear(WIDTH, WIDTH * KEYS // HEADS, bias=False) for _ in range(2)
        )
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x):
        y = self.norms[0](x)
        q, k, v = (
            part(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.asked, self.key, self.value)
        )
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


torch.distributed.init_process_group("nccl")
torch.cuda.set_device(torch.distributed.get_rank() % torch.cuda.device_count())
with torch.device("cuda"):
    model = nn.Sequential(
        nn.Embedding(WORDS, WIDTH),
        *(Block() for _ in range(LAYERS)),
        nn.RMSNorm(WIDTH),
        nn.Linear(WIDTH, WORDS, bias=False),
    )
count = sum(p.numel() for p in model.parameters())
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for part in (*model[1 : LAYERS + 1], model):
    fully_shard(part, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in range(2):
    words = torch.zeros(1, LENGTH, dtype=torch.long, device="cuda")
    loss = nn.functional.cross_entropy(model(words).flatten(0, 1).float(), words.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if torch.distributed.get_rank() == 0:
    print(f"{count / 1e9:.2f}e9 parameters")
torch.distributed.destroy_process_group()
