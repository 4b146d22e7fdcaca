"""What other people's programs need of the hub: groups that are split, groups with a back end of
their own, torch.compile, and the forward line behind a call of the backward pass."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module

import numpy
import pytest

from distsim import testing
from distsim.findings.finding_types import Finding
from distsim.output.text.finding_list import findings_text
from distsim.script_capture.errors import UnsupportedError
from distsim.script_capture.launch.preload import preload
from distsim.script_capture.patches.unsupported import refuse_torchcomms
from distsim.script_capture.protocol.blocked_threads import is_supported
from distsim.script_capture.rank.call_sites import BACKWARD_PREFIX, source_text
from distsim.script_capture.result.evaluation import CaptureResult
from distsim.simulation.trace_replay.compact import compact_trace

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
pytestmark = pytest.mark.skipif(not is_supported(), reason="hang detection reads Linux's /proc")


def run(function: Callable[[], object], ranks: int, **more: object) -> CaptureResult:
    return testing.run(
        function, ranks, backend="nccl", check=False, init=False, timeout=900, **more
    )  # type: ignore[arg-type]


def splits() -> None:
    dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
    rank = dist.get_rank()
    half = dist.split_group(split_ranks=[[1, 0], [2, 3]])
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=half)
    assert x.item() == (1 if rank < 2 else 5)
    alone = dist.split_group(half, [[1]])
    assert (alone is None) == (rank in (0, 2))
    assert alone is None or dist.get_process_group_ranks(alone) == [rank]


def one_rank_does_not_split() -> None:
    dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
    if dist.get_rank() != 1:
        dist.split_group(split_ranks=[[0, 1]])
    else:
        dist.recv(torch.ones(1), 0)


def splits_without_a_device() -> None:
    dist.init_process_group("nccl")
    dist.split_group(split_ranks=[[0, 1]])


def test_a_group_is_split_where_torch_splits_it_and_an_absent_rank_is_named(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)

    judged, stuck, refused = (
        run(splits, 4),
        run(one_rank_does_not_split, 2),
        run(splits_without_a_device, 2),
    )

    assert (judged.outcome, judged.captured.ended) == ("completes", "ended"), judged.stands
    assert stuck.outcome == "hangs"
    assert {s.source for s in stuck.stands} == {
        "dist.split_group(split_ranks=[[0, 1]])",
        "dist.recv(torch.ones(1), 0)",
    }
    assert refused.stands[0].source == "dist.split_group(split_ranks=[[0, 1]])"
    assert "No device associated" in refused.stands[0].what


def makes_a_group_alone(*backend: str, device: str | None = None) -> None:
    dist.init_process_group(*backend, device_id=torch.device(device) if device else None)
    assert dist.get_backend() == "nccl"
    if dist.get_rank() == 0:
        dist.new_group([0])
    dist.all_reduce(torch.ones(1))


def test_a_device_given_at_startup_makes_all_ranks_create_groups_eagerly():
    """As `init: eager` of a scenario, which the capture becomes: torch then splits groups off that
    of the world, by all its ranks.
    """
    lazy, eager = (
        run(makes_a_group_alone, 2, args=("nccl",)),
        run(makes_a_group_alone, 2, kwargs={"device": "cuda:0"}),
    )

    assert (lazy.outcome, eager.outcome) == ("completes", "hangs")
    assert lazy.simulation.verdict.verdict == eager.simulation.verdict.verdict == "deadlock"
    assert "options: {init: eager}" in compact_trace(eager.simulation.run.trace).text


def calls_remotely() -> None:
    torch.distributed.rpc.init_rpc("worker", rank=0, world_size=1)


def test_remote_calls_are_refused_by_name_with_the_line():
    (stand,) = run(calls_remotely, 1).stands

    assert stand.source.startswith("torch.distributed.rpc.init_rpc(")
    assert "does not support torch.distributed.rpc" in stand.what


def hands_addresses_to_a_kernel() -> None:
    from torch.distributed import _symmetric_memory

    dist.init_process_group("gloo")
    tensor = _symmetric_memory.empty(4, device="cpu")
    handle = _symmetric_memory.rendezvous(tensor, dist.group.WORLD)
    handle.signal_pad_ptrs.append(0)


def calls_a_kernel_of_nvshmem() -> None:
    dist.init_process_group("gloo")
    torch.ops.symm_mem.nvshmem_put(torch.ones(4), 1)


def makes_a_group_by_hand() -> None:
    dist.ProcessGroupGloo(dist.HashStore(), 0, 1)


UNSEEN = {
    hands_addresses_to_a_kernel: (
        "handle.signal_pad_ptrs",
        "does not support SymmetricMemory.signal_pad_ptrs",
    ),
    calls_a_kernel_of_nvshmem: (
        "torch.ops.symm_mem.nvshmem_put",
        "does not support this operator of symmetric memory",
    ),
    makes_a_group_by_hand: (
        "dist.ProcessGroupGloo(",
        "does not support a ProcessGroupGloo created directly",
    ),
}


@pytest.mark.parametrize("function", UNSEEN)
def test_transports_that_bypass_process_groups_are_refused_by_name_at_their_line(function):
    judged = run(function, 2)

    source, words = UNSEEN[function]
    assert judged.outcome == "raises"
    assert all(s.source.startswith(source) and words in s.what for s in judged.stands), (
        judged.stands
    )


def receives_from_anybody() -> None:
    dist.init_process_group("nccl")
    if dist.get_rank() == 0:
        dist.recv(torch.ones(1))
    else:
        dist.send(torch.ones(1), 0)


def test_a_receive_without_a_source_is_reported_to_raise_on_nccl_though_the_run_continues():
    judged = run(receives_from_anybody, 2)

    assert judged.captured.ended == "ended"
    assert (judged.outcome, judged.simulation.verdict.verdict) == ("raises", "ok")
    assert "DS701" in {f.code for f in judged.simulation.findings}


def shortens_its_time_out() -> None:
    dist.init_process_group("nccl")
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=9))


def test_a_timeout_can_be_changed_as_torchtitan_does_after_its_first_step(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    judged = run(shortens_its_time_out, 2)

    assert judged.outcome == "completes", judged.stands


def barrier_of_a_gloo_group() -> None:
    dist.init_process_group("nccl")
    group = dist.new_group(backend="gloo")
    dist.monitored_barrier(group)


def test_a_group_with_its_own_backend_follows_the_rules_of_that_backend():
    """Lightning's and litgpt's barrier, in a group of gloo beside nccl's world."""
    judged = run(barrier_of_a_gloo_group, 2)

    assert judged.outcome == "completes"
    assert not [f for f in judged.simulation.findings if f.severity == "error"]


class Summed(torch.autograd.Function):
    """The input's gradient is summed over ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


def backward_calls() -> None:
    dist.init_process_group("nccl")
    x = torch.ones(4, requires_grad=True)
    first = Summed.apply(x)
    second = Summed.apply(first * 2)
    loss = second.sum()
    loss.backward()
    net = torch.nn.parallel.DistributedDataParallel(Layers())
    net(torch.ones(2, 4)).sum().backward()


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        x = self.one(x)
        return self.two(x)


def behind(judged: CaptureResult) -> list[tuple[str, str]]:
    """The source text of each all_reduce, and of the forward line that it is for."""
    member = judged.captured.ranks[0]
    events = sorted(
        (e for e in member.events if e.call is not None and e.call.op == "all_reduce"),
        key=lambda e: e.number,
    )
    found = []
    for file, line, _, via in (member.sites[e.site] for e in events):
        made = (
            via.rpartition(BACKWARD_PREFIX)[2].rpartition(" ")[0] if BACKWARD_PREFIX in via else ""
        )
        name, _, number = made.rpartition(":")
        found.append((source_text(file, line), source_text(name, int(number)) if number else ""))
    return found


def test_a_call_of_a_backward_pass_names_its_forward_line():
    """The gradients of DDP's one bucket are all there when that of the layer that came first is."""
    found = behind(run(backward_calls, 2))

    assert found[:2] == [
        ("dist.all_reduce(grad)", "second = Summed.apply(first * 2)"),
        ("dist.all_reduce(grad)", "first = Summed.apply(x)"),
    ]
    assert ("net(torch.ones(2, 4)).sum().backward()", "x = self.one(x)") in found


def multiplies_first() -> None:
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    for factor in (0.25, torch.tensor([0.25])):
        op, x = dist._make_nccl_premul_sum(factor), torch.full((4,), 4.0 * (rank + 1))
        dist.all_reduce(x, op=op)
        part = torch.empty(2)
        dist.reduce_scatter_tensor(part, torch.arange(4.0), op=op)
        assert (x.tolist(), part.tolist()) == ([3.0] * 4, [rank * 1.0, rank + 0.5])


def multiplies_first_on_gloo() -> None:
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(2), op=dist._make_nccl_premul_sum(0.5))


def test_only_nccl_supports_a_premultiplied_sum():
    """FSDP2 divides gradients so."""
    refused = run(multiplies_first_on_gloo, 2)

    assert run(multiplies_first, 2).outcome == "completes"
    assert {s.what for s in refused.stands} == {
        "RuntimeError: Cannot use ReduceOp.PREMUL_SUM with Gloo"
    }


def compiles() -> None:
    dist.init_process_group("nccl")

    @torch.compile(backend="eager")
    def step(x):
        x = x * 2
        dist.broadcast(x, 0)
        return x + 1

    assert step(torch.full((2,), float(dist.get_rank() + 1))).tolist() == [3.0, 3.0]


def test_a_compiled_function_may_call_what_dynamo_does_not_trace():
    """It leaves the hub's Python alone, as it can't look into torch's own groups, which are C++."""
    judged = run(compiles, 2)

    assert judged.outcome == "completes", judged.stands


def test_modules_imported_before_the_ranks_fork_see_the_arguments_of_the_script(
    tmp_path, monkeypatch
):
    """torchtitan's parser takes sys.argv as a default, when it is imported."""
    (tmp_path / "reads_words.py").write_text(
        "import sys\ndef parse(words=sys.argv[1:]):\n    return words\n"
    )
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "train.py").write_text("import reads_words\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.argv)

    preload(str(tmp_path / "own" / "train.py"), ("--steps", "3"))

    assert sys.modules["reads_words"].parse() == ["--steps", "3"]
    assert sys.argv == before


def test_a_torch_without_a_replaced_function_is_named_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
):
    """A rank that can't be prepared does not leave without a word."""
    monkeypatch.delattr("torch.distributed.distributed_c10d._get_default_timeout")

    judged = testing.run(torch.manual_seed, 2, args=[0], check=False, init=False, timeout=20)

    said = judged.simulation.findings[0].message
    assert judged.outcome == "raises"
    assert f"does not support torch {torch.__version__}: use torch 2.13, and report" in said
    assert "has no attribute" in said


def ranks_from_numpy() -> None:
    dist.init_process_group("nccl")
    ranks = numpy.arange(4).reshape(2, 2)
    group = [dist.new_group(row) for row in ranks][dist.get_rank() // 2]
    x = torch.ones(1)
    dist.all_reduce(x, group=group)
    dist.broadcast(x, ranks[dist.get_rank() // 2][1], group=group)
    if dist.get_rank() in ranks[0]:
        (dist.send if dist.get_rank() else dist.recv)(x, ranks[0][1 - dist.get_rank()])


def test_ranks_may_be_numpy_integers():
    judged = run(ranks_from_numpy, 4)

    assert judged.outcome == "completes"
    assert [list(group.ranks) for group in judged.simulation.program.groups[1:]] == [[0, 1], [2, 3]]


def test_a_file_with_the_name_of_the_script_in_another_directory_keeps_its_path():
    finding = Finding(
        "DS302", "error", "waits\n  rank 0  /lib/muon.py:208\n  rank 1  muon.py:10", (0,), (0, 1)
    )

    assert [line.split()[-1] for line in findings_text([finding], "muon.py").splitlines()[1:3]] == [
        "/lib/muon.py:208",
        "10",
    ]


def test_torchcomms_can_be_imported_but_not_used(tmp_path, monkeypatch) -> None:
    """torch imports it too, if it is installed."""
    (tmp_path / "torchcomms.py").write_text("def new_comm(*args): ...", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, "torchcomms", raising=False)

    refuse_torchcomms()
    torchcomms = import_module("torchcomms")
    monkeypatch.delitem(sys.modules, "torchcomms")

    with pytest.raises(UnsupportedError, match="does not support torchcomms"):
        torchcomms.new_comm("nccl")


def starts_torchrun(script: str) -> None:
    import_module("torch.distributed.run").main(["--nproc-per-node=2", script])


@pytest.mark.parametrize("nproc", [2, 0])
def test_a_program_that_calls_torchrun_itself_is_captured(tmp_path, nproc: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.ones(1)) if dist.get_rank() else dist.barrier()\n",
        encoding="utf-8",
    )

    judged = run(starts_torchrun, nproc, args=(str(script),))

    assert {(s.rank, s.state, s.place.line) for s in judged.stands} == {
        (0, "waits", 3),
        (1, "waits", 3),
    }
