"""What ranks compute between their calls has a price, with numbers or with sizes alone; what is
outside of all calls is told too.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from distsim.hardware.cluster import preset
from distsim.hardware.cost import CostModel
from distsim.operations.core.resolved_call import KernelWork
from distsim.scenario import loads
from distsim.script_capture.compute.kernel_counter import count_kernels, duration_ns
from distsim.script_capture.launch.function_target import function_target
from distsim.script_capture.launch.parent_process import CaptureRunOptions, run_capture
from distsim.script_capture.launch.preload import module_file
from distsim.script_capture.launch.rank_process import ChildOptions
from distsim.script_capture.protocol.blocked_threads import is_supported
from distsim.script_capture.result.evaluation import CaptureResult, evaluate_capture
from distsim.simulation.simulate_scenario import simulate
from distsim.simulation.trace_replay import replay_trace
from distsim.simulation.trace_replay.compact import compact_trace

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
pytestmark = pytest.mark.skipif(not is_supported(), reason="hang detection reads Linux's /proc")


def captured(
    function: Callable[[], object],
    child_options: ChildOptions,
    cluster: str | None = None,
    init: bool = True,
) -> CaptureResult:
    target = function_target(function, "nccl", (), {}, init)
    return evaluate_capture(
        run_capture(
            CaptureRunOptions(
                target,
                2,
                backend="nccl",
                timeout_s=900,
                keep_output=True,
                child_options=child_options,
            )
        ),
        backend="nccl",
        cluster=cluster,
    )


def product_between() -> None:
    x = torch.ones(256, 256)
    dist.all_reduce(x)
    y = x @ x
    dist.all_reduce(y)


def ddp_step() -> None:
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(net.parameters())
    net(torch.ones(8, 64)).sum().backward()
    optimizer.step()


def computes(judged: CaptureResult, rank: int = 0) -> list[int]:
    """Durations of what a rank computes, in order."""
    trace = judged.simulation.run.trace
    return [
        c.finished_ns - c.started_ns for c in trace.rows() if (c.rank, c.op) == (rank, "compute")
    ]


def test_work_between_two_calls_costs_the_roofline_of_its_kernels():
    judged = captured(product_between, ChildOptions(counts=True), "dgx-h100")
    x = torch.ones(256, 256)
    with count_kernels() as counted:
        torch.mm(x, x)

    ops = [c.op for c in judged.simulation.program.codes[1].calls]

    assert ops[1:5] == ["compute", "all_reduce", "compute", "all_reduce"]
    assert computes(judged, 1)[1] == duration_ns(counted.take(), "dgx-h100")
    assert judged.simulation.timeline.ranks[0].compute_ns == sum(computes(judged))

    check_cost_elsewhere(judged)


def check_cost_elsewhere(judged: CaptureResult) -> None:
    """The scenario and the trace of an H100's capture cost on an A100 what its work costs there."""
    scenario = loads(compact_trace(judged.simulation.run.trace).text)
    here = simulate(scenario)
    elsewhere = simulate(scenario, cluster="dgx-a100")
    replayed = replay_trace(judged.simulation.run.trace, cluster="dgx-a100")

    assert here.makespan_ns == judged.simulation.makespan_ns
    assert replayed.makespan_ns == elsewhere.makespan_ns
    for name, simulation in (("dgx-h100", here), ("dgx-a100", elsewhere)):
        cost = CostModel(preset(name), 1, 1)
        calls = judged.simulation.program.codes[0].calls
        work = [c.fields["work"] for c in calls if c.op == "compute"]
        expected = sum(cost.work_ns([KernelWork(*row) for row in rows]) for rows in work)
        assert simulation.timeline.ranks[0].compute_ns == expected
    assert elsewhere.timeline.ranks[0].compute_ns > here.timeline.ranks[0].compute_ns


def test_the_optimizer_computes_after_the_gradients_have_arrived():
    """C++ waits for a backward pass's all_reduce where the pass ends, which is no call of
    Python's.
    """
    ops = [
        c.op
        for c in captured(ddp_step, ChildOptions(counts=True)).simulation.program.codes[0].calls
    ]
    last = len(ops) - 1 - ops[::-1].index("all_reduce")

    assert ops[last:][:4] in (
        ["all_reduce", "compute", "wait", "compute"],
        ["all_reduce", "wait", "compute", "destroy_process_group"],
    )


def test_nothing_is_counted_unless_requested():
    assert computes(captured(product_between, ChildOptions())) == []


def sharded_giant() -> None:
    """160 GB of parameters on each of two ranks, were they real; a norm over all ranks, by a
    functional collective.
    """
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(*(torch.nn.Linear(100_000, 100_000, bias=False) for _ in range(4)))
    for layer in (*model, model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 100_000)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    names: list[object] = [None, None]
    dist.all_gather_object(names, "rank")
    assert names == ["rank", "rank"]


def test_with_sizes_only_a_model_too_large_for_the_machine_runs_and_objects_are_kept():
    judged = captured(sharded_giant, ChildOptions(fakes=True))
    ops = [c.op for c in judged.simulation.program.codes[0].calls]

    assert (judged.outcome, judged.captured.ended) == ("completes", "ended")
    assert (ops.count("reduce_scatter_tensor"), ops.count("all_gather_into_tensor") >= 7) == (
        4,
        True,
    )
    assert ops.count("all_reduce") == 1
    assert max(row.nbytes for row in judged.simulation.timeline.collectives) >= 4 * 10**10


def asks_for_a_number() -> None:
    x = torch.ones(4)
    dist.all_reduce(x)
    assert x.sum().item() == 8


def test_with_sizes_only_the_line_that_needs_a_value_is_named():
    (stand, _) = captured(asks_for_a_number, ChildOptions(fakes=True)).stands

    assert (stand.state, stand.source) == ("raised", "assert x.sum().item() == 8")
    assert "--fake keeps only sizes" in stand.what


def fails_early() -> None:
    raise ImportError("no module of this name")


def test_a_process_that_fails_before_it_is_a_rank_gives_its_line_and_no_verdict():
    judged = captured(fails_early, ChildOptions(), init=False)

    assert (judged.outcome, judged.simulation.verdict, judged.calls) == ("raises", None, 0)
    assert {(s.state, s.source) for s in judged.stands} == {
        ("raised", 'raise ImportError("no module of this name")')
    }


def test_a_module_is_found_by_name_without_importing_it():
    """cuda must be prepared before torch is imported, and a package's own __init__ may import
    it.
    """
    assert module_file("json.tool").endswith("tool.py")
    assert module_file("distsim").endswith("__main__.py")
    assert (module_file("json"), module_file("no.such.module")) == ("", "")
