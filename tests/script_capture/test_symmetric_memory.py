"""Ranks read and write the symmetric memory of others; barriers, signals and collectives are calls."""

from __future__ import annotations

import pytest

from distsim import testing
from distsim.script_capture.protocol.blocked_threads import is_supported

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
pytestmark = pytest.mark.skipif(not is_supported(), reason="hangs are detected from Linux's /proc")


def shares_memory() -> None:
    from torch.distributed import _symmetric_memory as symm_mem

    rank, size, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    tensor = symm_mem.empty(4, 8, device="cpu").fill_(rank)
    handle = symm_mem.rendezvous(tensor, world)
    handle.barrier()
    following, before = (rank + 1) % size, (rank - 1) % size
    assert torch.all(handle.get_buffer(following, (4, 8), tensor.dtype) == following)
    handle.barrier()
    handle.get_buffer(following, (8,), tensor.dtype, 8).fill_(7)
    handle.put_signal(following)
    handle.wait_signal(before)
    assert torch.all(tensor[1] == 7)
    assert torch.all(tensor[0] == rank)
    handle.barrier(channel=1)

    tensor.fill_(rank + 1)
    name = world.group_name
    total = torch.ops.symm_mem.one_shot_all_reduce(tensor, "sum", name)
    assert torch.all(total == size * (size + 1) / 2)
    assert torch.equal(torch.ops.symm_mem.multimem_all_reduce_(tensor, "sum", name), total)
    with pytest.raises(RuntimeError, match="must be allocated"):
        torch.ops.symm_mem.two_shot_all_reduce_(torch.ones(2), "sum", name)

    shard, weight = torch.full((2, 4), rank + 1.0), torch.ones(4, 3)
    gathered, (product,) = torch.ops.symm_mem.fused_all_gather_matmul(shard, [weight], 0, name)
    assert gathered.shape == (2 * size, 4)
    assert product[-1, 0] == 4 * size
    rows = torch.ones(2 * size, 4)
    scattered = torch.ops.symm_mem.fused_matmul_reduce_scatter(rows, weight, "sum", 0, name)
    assert torch.all(scattered == 4 * size)


def test_memory_is_shared_and_calls_are_recorded() -> None:
    judged = testing.run(shares_memory, 3, backend="nccl")

    ops = {call.op for code in judged.simulation.program.codes for call in code.calls}
    assert {"barrier", "put_signal", "wait_signal", "all_reduce"} <= ops


def waits_for_a_signal_on_another_channel() -> None:
    from torch.distributed import _symmetric_memory as symm_mem

    handle = symm_mem.rendezvous(symm_mem.empty(4, device="cpu"), dist.group.WORLD)
    if dist.get_rank() == 0:
        handle.put_signal(1, channel=1)
    else:
        handle.wait_signal(0, channel=2)


def test_a_signal_that_never_arrives_is_reported_with_its_channel() -> None:
    judged = testing.run(waits_for_a_signal_on_another_channel, 2, backend="nccl", check=False)

    (first, *_) = judged.simulation.findings
    assert judged.outcome != "completes"
    assert "wait_signal" in first.message
    assert "channel" in first.message
