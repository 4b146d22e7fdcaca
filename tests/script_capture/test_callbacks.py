"""Waits inside callbacks of futures, and calls that are coalesced by hand."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.distributed_c10d import _coalescing_manager

from distsim import testing
from distsim.script_capture.protocol.blocked_threads import is_supported
from distsim.script_capture.rank.call_sites import source_text
from distsim.script_capture.result.evaluation import CaptureResult

pytestmark = pytest.mark.skipif(not is_supported(), reason="hang detection reads Linux's /proc")


def places(judged: CaptureResult, code: str) -> set[tuple[int | None, str]]:
    """Rank and source text at the places of a finding."""
    return {
        (p.rank, source_text(p.file, p.line))
        for f in judged.simulation.findings
        if f.code == code
        for p in f.places
    }


# --- callbacks ---
def compresses_with_power_sgd() -> None:
    """The hook waits for one reduction in the callback of another."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    model.register_comm_hook(
        powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook
    )
    for _ in range(4):
        model(torch.ones(2, 4)).sum().backward()


def waits_in_a_callback() -> None:
    first, second = torch.ones(4), torch.ones(3)

    def then(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        dist.all_reduce(second)
        dist.all_reduce(second, async_op=True).wait()
        return dist.all_reduce(future.value()[0], async_op=True).get_future().wait()[0]

    made = dist.all_reduce(first, async_op=True).get_future().then(then)
    assert made.wait().tolist() == [4.0] * 4
    assert second.tolist() == [4.0] * 3
    dist.barrier()


def one_rank_alone_calls_in_its_callback() -> None:
    def then(future: torch.futures.Future[list[torch.Tensor]]) -> None:
        if dist.get_rank() == 1:
            dist.all_reduce(torch.ones(3), async_op=True).get_future().wait()

    dist.all_reduce(torch.ones(4), async_op=True).get_future().then(then).wait()


def waits_for_a_future_before_a_backward_pass() -> None:
    future = dist.all_reduce(torch.ones(2), async_op=True).get_future()
    torch.ones(2, requires_grad=True).sum().backward()
    future.wait()


@pytest.mark.slow
def test_only_futures_awaited_in_cpp_are_events_of_a_backward_pass():
    """The script reports its own waits, so a future of the script needs no event."""

    def kinds(judged: CaptureResult) -> set[str]:
        return {event.kind for event in judged.captured.ranks[0].events}

    of_script = testing.run(waits_for_a_future_before_a_backward_pass, 2, timeout=20)
    of_reducer = testing.run(compresses_with_power_sgd, 2, timeout=20)

    assert (of_script.outcome, of_reducer.outcome) == ("completes", "completes")
    assert {"wait"} == kinds(of_script) & {"wait", "future", "backward"}
    assert {"future", "backward"} <= kinds(of_reducer)


@pytest.mark.parametrize("program", [compresses_with_power_sgd, waits_in_a_callback])
def test_a_callback_may_wait_for_future_calls_of_other_ranks(program):
    """Gloo has a second thread for it, and nccl's futures are done when they are launched."""
    judged = testing.run(program, 2, timeout=20)

    assert judged.outcome == "completes"


def test_a_callback_that_waits_for_an_ended_rank_is_not_taken_for_work_in_progress():
    judged = testing.run(one_rank_alone_calls_in_its_callback, 2, check=False, timeout=20)

    assert (judged.outcome, judged.captured.ended) == ("raises", "stalled")
    line = "dist.all_reduce(torch.ones(3), async_op=True).get_future().wait()"
    assert [(s.rank, s.source) for s in judged.stands if s.state == "waits"] == [(1, line)]
    assert places(judged, "DS302") == {(1, line)}


# --- coalesced calls ---
def coalesces_what_has_a_root() -> None:
    """Each call of the block waits for itself, which means nothing before the block ends."""
    a, b = torch.full((2,), float(dist.get_rank())), torch.full((3,), float(dist.get_rank()))
    with _coalescing_manager(device=torch.device("cuda")):
        dist.broadcast(a, 1)
        dist.broadcast(b, 0, async_op=True).wait()
    assert (a.tolist(), b.tolist()) == ([1.0] * 2, [0.0] * 3)


def coalesces_messages_with_a_broadcast() -> None:
    """In another order on each rank: within one launch of nccl they have none."""
    rank, got, given = dist.get_rank(), torch.zeros(2), torch.full((2,), 7.0 + dist.get_rank())
    root = torch.full((3,), float(rank))
    with _coalescing_manager(device=torch.device("cuda"), async_ops=True) as block:
        if rank:
            dist.broadcast(root, 0)
        asked = dist.irecv(got, 1 - rank)
        assert asked is not None
        assert asked.is_completed()
        dist.isend(given, 1 - rank)
        if not rank:
            dist.broadcast(root, 0)
    block.wait()
    assert (got.tolist(), root.tolist()) == ([8.0 - rank] * 2, [0.0] * 3)


def coalesces_sums() -> None:
    parts = [torch.ones(2), torch.ones(3)]
    with _coalescing_manager(device=torch.device("cuda")):
        for part in parts:
            dist.all_reduce(part)
    assert parts[1].tolist() == [2.0] * 3


@pytest.mark.parametrize(
    ("program", "ops"),
    [
        (coalesces_what_has_a_root, ["broadcast", "broadcast"]),
        (coalesces_messages_with_a_broadcast, ["batch_isend_irecv", "broadcast"]),
        (coalesces_sums, ["all_reduce_coalesced"]),
    ],
)
def test_calls_coalesced_under_nccl_are_recorded_individually(program, ops):
    judged = testing.run(program, 2, backend="nccl", timeout=20)

    rows = [
        call.op
        for call in judged.simulation.program.codes[0].calls
        if call.op not in ("wait", "compute")
    ]
    assert [op for op in rows if not op.endswith("process_group")] == ops
    assert judged.outcome == "completes"


def coalesces_under_gloo() -> None:
    with _coalescing_manager(device=torch.device("cpu")):
        pass


def test_gloo_does_not_coalesce_by_device_as_in_torch():
    judged = testing.run(coalesces_under_gloo, 2, check=False, timeout=20)

    reason = "RuntimeError: Backend gloo does not implement startCoalescing"
    assert [(rank.state, rank.what) for rank in judged.stands] == [("raised", reason)] * 2
