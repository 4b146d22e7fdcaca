"""Capture does not report "ok" for programs that fail or that it did not check."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command_json import checked_json

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]

MARKED_TESTS = """
import pytest, torch, torch.distributed as dist

@pytest.mark.ranks(2)
def test_all_skip(): pytest.skip("not here")

@pytest.mark.ranks(2)
def test_one_skips():
    if dist.get_rank() == 0:
        pytest.skip("not here")

@pytest.mark.ranks(2)
async def test_async(): assert dist.get_world_size() == 3, "the body ran"

@pytest.mark.ranks(2, cuda=True, backend="nccl")
def test_gpu():
    x = torch.ones(2, device="cuda")
    dist.all_reduce(x)
    assert x.sum() == 4 and torch.cuda.device_count() == 2

@pytest.mark.ranks(2, fake=True)
def test_fake():
    x = torch.ones(1 << 32)
    dist.all_reduce(x)
"""


def test_marked_tests_skip_run_coroutines_and_find_gpus(tmp_path: Path) -> None:
    (tmp_path / "test_marked.py").write_text(MARKED_TESTS, encoding="utf-8")

    done = run_python("-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", cwd=tmp_path)

    passed = set(re.findall(r"^PASSED test_marked.py::(\w+)", done.stdout, re.M))
    failed = set(re.findall(r"^FAILED test_marked.py::(\w+)", done.stdout, re.M))
    assert passed == {"test_gpu", "test_fake"}, done.stdout
    assert failed == {"test_one_skips", "test_async"}
    assert "the body ran" in done.stdout
    assert "1 skipped" in done.stdout


GPU_SCRIPT = """
import torch, torch.distributed as dist, torch.nn.functional as F
dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
torch.manual_seed(0)
q, k, v = (torch.randn(1, heads, 32, 8) for heads in (8, 2, 2))
gpu = [x.cuda().requires_grad_() for x in (q, k, v)]
cpu = [x.clone().requires_grad_() for x in (q, k, v)]
for x in (gpu, cpu):
    F.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True).square().sum().backward()
for x, y in zip(gpu, cpu):
    torch.testing.assert_close(x.grad.cpu(), y.grad)
print("starts")
done = torch.ones(1, device="cuda")
dist.all_reduce(done)
big = [torch.empty(1, heads, 8192, 128, device="cuda", dtype=torch.bfloat16) for heads in (32, 8, 8)]
if "--fake" in __import__("sys").argv:
    F.scaled_dot_product_attention(*big, is_causal=True, enable_gqa=True)
    dist.all_reduce(done)
else:
    graph, total = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph):
        total += 1
        dist.all_reduce(total)
    assert total.item() == 0
    for _ in range(3):
        graph.replay()
    assert total.item() == 14
dist.all_reduce(torch.ones(1))
"""


def test_a_cpu_tensor_on_an_nccl_group_raises_as_in_torch(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(GPU_SCRIPT, encoding="utf-8")

    scenario = tmp_path / "captured.yaml"
    words = ("--nproc", "2", "--format", "json", "-o", str(scenario))
    done = run_python("-m", "distsim", "capture", *words, "--", "python", str(script))

    result = checked_json("capture", done.stdout)
    assert (done.returncode, result["outcome"]) == (1, "raises"), done.stderr
    assert done.stderr.count("starts") == 2  # so that a program can read the report
    item = next(n for n, line in enumerate(GPU_SCRIPT.splitlines(), 1) if "item() == 14" in line)
    assert f"- synchronize: current  # train.py:{item}\n" in scenario.read_text(encoding="utf-8")
    assert result["captured"]["devices"].startswith("one emulated GPU per rank")
    texts = {rank["what"] for rank in result["captured"]["ranks"]}
    assert texts == {"RuntimeError: No backend type associated with device type cpu"}
    assert {finding["code"] for finding in result["findings"]} == {"DS704", "DS802"}


def test_grouped_query_attention_costs_what_flash_attention_costs(tmp_path: Path) -> None:
    """Full attention of 32 heads over 8192 tokens is 1.1 TFLOP, causal 0.55 TFLOP: about 1 ms."""
    script = tmp_path / "train.py"
    text = GPU_SCRIPT.replace("for x in (gpu, cpu):", "for x in ():").replace(
        "for x, y in zip(gpu, cpu):", "for x, y in ():"
    )
    script.write_text(text.replace("dist.all_reduce(torch.ones(1))", ""), encoding="utf-8")
    words = ("--fake", "--cluster", "dgx-h100", "--nproc", "2", "--format", "json")

    done = run_python("-m", "distsim", "capture", *words, "--", "python", str(script), "--fake")

    result = checked_json("capture", done.stdout)
    assert result["outcome"] == "completes", done.stderr
    assert 0.5e6 < result["makespan_ns"] < 2e6


def run_python(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
