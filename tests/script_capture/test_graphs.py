"""A CUDA graph makes its calls, and computes, at each replay; recording it changes nothing.

`test_true_answers` replays a small graph in a run that it makes anyway.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

SCRIPT = """
import torch, torch.nn as nn, torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)

# A backward pass, an asynchronous call and a functional one.
w = torch.ones(4, 4, device="cuda", requires_grad=True)
x, count = torch.ones(2, 4, device="cuda"), torch.zeros(1, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    assert torch.cuda.is_current_stream_capturing()
    out = x @ w
    out.sum().backward()
    work = dist.all_reduce(w.grad, async_op=True)
    count += 1
    work.wait()
    summed = funcol.all_reduce(out * 1, "sum", dist.group.WORLD) + 1
assert count.item() == 0
for step in range(3):
    x.fill_(step + rank)
    graph.replay()
    assert torch.all(w.grad == 2 * (2 * step + 1)) and torch.all(summed == 4 * (2 * step + 1) + 1)
assert count.item() == 3

# make_graphed_callables
layer = nn.Linear(4, 4).cuda()
graphed = torch.cuda.make_graphed_callables(layer, (torch.randn(2, 4, device="cuda"),))
for value in (1.0, 2.0):
    batch = torch.full((2, 4), value, device="cuda")
    torch.testing.assert_close(graphed(batch), batch @ layer.weight.T + layer.bias)
graphed(batch).sum().backward()
assert torch.all(layer.bias.grad == 2)

# A whole step of DDP, and a batch of messages.
torch.manual_seed(0)
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    model = DDP(nn.Linear(8, 2).cuda(), device_ids=[rank])
    for _ in range(11):
        model(torch.zeros(1, 8, device="cuda")).sum().backward()
torch.cuda.current_stream().wait_stream(side)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
optimizer.zero_grad(set_to_none=True)
data, token = torch.zeros(4, 8, device="cuda"), torch.zeros(1, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    model(data).square().sum().backward()
    optimizer.step()
    peer = 1 - rank
    messages = [dist.P2POp(dist.isend, token + 1, peer), dist.P2POp(dist.irecv, token, peer)]
    for request in dist.batch_isend_irecv(messages):
        request.wait()
for step in range(2):
    data.copy_(torch.randn(4, 8) + rank)
    graph.replay()
weights = [torch.empty(2, 8, device="cuda") for _ in range(2)]
dist.all_gather(weights, model.module.weight.detach())
assert torch.equal(*weights) and token.item() == 2

# CUDA refuses to wait for the device while a graph is recorded.
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        token.item()
except RuntimeError as error:
    assert "not permitted when stream is capturing" in str(error)
else:
    raise AssertionError
dist.barrier()
if rank == 1:
    graph.replay()
dist.barrier()
"""


@pytest.mark.slow
def test_graphs_compute_and_communicate_at_each_replay(tmp_path: Path) -> None:
    """The last replay is on one rank only, and is what is reported."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "distsim", "capture", "--nproc", "2", "--format", "json"]

    done = subprocess.run(
        [*command, "--", "python", str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    result = json.loads(done.stdout)
    first = result["findings"][0]
    assert first["code"] == "DS201", done.stderr
    lines = {SCRIPT.splitlines()[place["line"] - 1].strip() for place in first["places"]}
    assert {"graph.replay()", "dist.barrier()"} <= lines, first
