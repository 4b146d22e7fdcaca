"""A captured FSDP2 program overlaps communication with compute, so its step takes as long as that of
the same model written as a scenario.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from distsim.scenario import load, loads
from distsim.simulation.simulate_scenario import simulate
from distsim.simulation.training_metrics import makespan_range

pytest.importorskip("torch")

#: Eight layers of Llama 3 8B, one step with AdamW.
SCRIPT = """
import torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

WIDTH, HEADS, KV_HEADS, HIDDEN, WORDS, LENGTH = 4096, 32, 8, 14336, 128256, 8192


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, KV_HEADS * 128, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (
            f(y).view(1, LENGTH, -1, 128).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(1, LENGTH, WIDTH))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
with torch.device("cuda"):
    model = nn.Sequential(
        nn.Embedding(WORDS, WIDTH),
        *[Block() for _ in range(8)],
        nn.RMSNorm(WIDTH),
        nn.Linear(WIDTH, WORDS, bias=False),
    )
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model[1:9]:
    fully_shard(layer, mp_policy=policy)
fully_shard(model, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
tokens = torch.zeros(1, LENGTH, dtype=torch.long, device="cuda")
F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()).backward()
optimizer.step()
dist.destroy_process_group()
"""
SCENARIO = """
world: 8
backend: nccl
cluster: dgx-h100
mesh: {dp: 8}
program:
  - transformer: {model: {preset: llama3-8b, layers: 8}, sequence: 8192, zero: 3}
"""


@pytest.mark.slow
def test_a_captured_fsdp2_step_takes_as_long_as_the_strategy_predicts(tmp_path: Path) -> None:
    script, captured = tmp_path / "llama.py", tmp_path / "llama.yaml"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "distsim", "capture", "--fake", "--nproc", "8"]
    command += ["--cluster", "dgx-h100", "-o", str(captured), "--", "python", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert re.search("verdict ok", done.stdout), done.stdout + done.stderr

    by_capture = simulate(load(captured))
    by_strategy = simulate(loads(SCENARIO))
    cost, program, timeline = by_strategy.cost, by_strategy.program, by_strategy.timeline
    expected = makespan_range(cost, program, timeline)

    assert expected is not None
    assert expected[0] < by_capture.makespan_ns < expected[1]
    # Without overlap, communication is exposed for about half of the step.
    exposed_ns = by_capture.timeline.ranks[0].exposed_comm_ns
    assert exposed_ns < 0.1 * by_capture.makespan_ns
