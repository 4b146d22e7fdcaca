"""GPUs, without any: the choice of devices, what is refused there, and times of a device that a
stand-in for torch.cuda tells.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import Cli
from tests.support.real_runs import ROOT, scenario, written

pytest.importorskip("torch")

from distsim.common.errors import EnvironmentFault, UsageError
from distsim.findings.final_state import FinalState
from distsim.operations.core.resolved_call import KernelWork
from distsim.program.lower import lower
from distsim.real import run as real
from distsim.real.launch import external_launchers, session_setup
from distsim.real.results.merge_tables import RankTimeTable, merge_rank_tables
from distsim.real.results.postmortem import postmortem
from distsim.real.shared import device_selection
from distsim.real.shared.device_selection import (
    RankDevices,
    backend_variables,
    check_device_support,
    choose_devices,
    default_variables,
)
from distsim.real.shared.job import WorkerJob
from distsim.real.shared.progress_file import (
    CallTimeTable,
    ProgressField,
    ProgressFile,
    read_call_times,
)
from distsim.real.worker.compute_load import ComputeLoad, simulated_compute_times
from distsim.real.worker.runner import RankRunner
from distsim.simulation.simulate_scenario import simulate
from tests.support.fake_cuda import FakeCuda, FakeNccl

# --- which device ---


def test_only_nccl_uses_gpus_unless_requested_otherwise():
    assert choose_devices("auto", "nccl", 4, 4) == RankDevices("cuda", 4, False)
    assert choose_devices("auto", "gloo", 4, 4).kind == "cpu"
    assert choose_devices("cuda", "gloo", 1, 2) == RankDevices("cuda", 1, True)
    with pytest.raises(UsageError, match="nccl supports only GPUs"):
        choose_devices("cpu", "nccl", 4, 4)
    with pytest.raises(EnvironmentFault, match="torch finds none"):
        choose_devices("cuda", "gloo", 0, 2)


def test_ranks_use_gpus_in_turn():
    assert [RankDevices("cuda", 2, True).gpu_of(rank) for rank in range(4)] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("version", "asked"), [((2, 30, 7), True), ((2, 30), True), ((2, 27, 5), False), ((), False)]
)
def test_ranks_that_share_a_gpu_request_it_from_nccl_2_30_or_pose_as_separate_hosts(
    version: tuple[int, ...], asked: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(device_selection, "nccl_version", lambda: version)
    devices = choose_devices("auto", "nccl", 1, 2)
    assert devices == RankDevices("cuda", 1, shared=True, separate_hosts=not asked)
    said = [backend_variables("nccl", devices, {}, "/where", rank) for rank in (0, 1)]
    hosts = {one.get("NCCL_HOSTID") for one in said}
    assert ("NCCL_MULTI_RANK_GPU_ENABLE" in said[0]) is asked
    assert len(hosts) == (1 if asked else 2)


def test_a_task_of_srun_with_one_gpu_owns_it_and_a_task_of_torchrun_does_not(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(device_selection, "nccl_version", lambda: (2, 30, 7))
    assert not choose_devices("auto", "nccl", 1, 4, "srun").shared
    assert choose_devices("auto", "nccl", 1, 4, "torchrun").shared


def test_gloo_has_collectives_but_no_messages_for_cuda_tensors():
    on_gpu = RankDevices("cuda", 1)
    check_device_support(lower(scenario("all_reduce")), "gloo", on_gpu)
    check_device_support(lower(scenario("send_one")), "gloo", RankDevices("cpu"))
    check_device_support(lower(scenario("send_one")), "nccl", on_gpu)
    with pytest.raises(UsageError, match="gloo has no recv, send for CUDA tensors"):
        check_device_support(lower(scenario("send_one")), "gloo", on_gpu)


def test_environment_variables_reveal_nccl_hangs_and_let_ranks_share_a_gpu():
    plain = backend_variables("nccl", RankDevices("cuda", 2), {}, "/where")
    assert plain["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert plain["TORCH_FR_DUMP_TEMP_FILE"] == "/where/fr-"
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in plain
    assert plain["TORCH_NCCL_BLOCKING_WAIT"] == "0"
    assert "NCCL_MAX_CTAS" in default_variables("nccl", RankDevices("cuda", 1, True))
    assert default_variables("gloo", RankDevices("cpu")) == {}

    options = {"blocking_wait": True, "launch_order_implicit": True, "buffsize": 8192}
    told = backend_variables("nccl", RankDevices("cuda", 1, True), options, "/where")
    assert (
        told["NCCL_MULTI_RANK_GPU_ENABLE"]
        == told["TORCH_NCCL_BLOCKING_WAIT"]
        == told["NCCL_LAUNCH_ORDER_IMPLICIT"]
        == "1"
    )
    assert told["NCCL_BUFFSIZE"] == "4096"  # on each of two channels
    assert (
        backend_variables("gloo", RankDevices("cpu"), options, "/where")
        == backend_variables("gloo", RankDevices("cuda", 1), options, "/where")
        == {}
    )


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that seems to have a GPU and an NCCL."""
    monkeypatch.setattr(device_selection, "visible_gpus", lambda: 1)
    monkeypatch.setattr(device_selection, "nccl_version", lambda: (2, 30, 7))
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)


def test_gpu_ranks_are_forked_if_this_process_has_not_initialised_cuda(
    one_gpu: None, monkeypatch: pytest.MonkeyPatch
):
    import torch

    launcher = partial(
        session_setup.start_method, scenario("all_reduce"), devices=RankDevices("cuda", 1)
    )
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: 1, raising=False)
    assert (
        launcher(real.RealRunOptions()) == launcher(real.RealRunOptions(launcher="fork")) == "fork"
    )
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert launcher(real.RealRunOptions()) == "spawn"


def test_forked_ranks_are_refused_if_they_could_not_use_cuda(
    one_gpu: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(device_selection, "cuda_survives_fork", lambda: False)
    for wish in (
        real.RealRunOptions(backend="nccl", launcher="fork"),
        real.RealRunOptions(backend="gloo", device="cuda", launcher="fork"),
    ):
        with pytest.raises(UsageError, match="CUDA context"):
            real.run_scenario(scenario("all_reduce"), wish)


def test_messages_on_gloo_with_cuda_tensors_are_refused_before_anything_starts(one_gpu: None):
    with pytest.raises(UsageError, match="isend"):
        real.run_scenario(
            scenario("isend_irecv_wait"), real.RealRunOptions(backend="gloo", device="cuda")
        )


def test_gpus_hidden_by_the_file_do_not_count(one_gpu: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device_selection, "visible_gpus", lambda: 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    one = written("world: 2\nlaunch: {visible_devices: [3, 5]}\nprogram: [barrier: {}]\n")
    simulation = simulate(one, backend="nccl")
    assert session_setup.rank_devices(
        simulation, real.RealRunOptions(backend="nccl"), "nccl", None
    ) == RankDevices("cuda", 2, False)
    job = job_of(simulation.program, devices=RankDevices("cuda", 2), visible=(3, 5))
    assert job.device_variables()["CUDA_VISIBLE_DEVICES"] == "3,5"


def test_a_process_of_srun_uses_its_visible_gpu(one_gpu: None):
    started = external_launchers.ExternalRank("srun", 3, 4, 3, "127.0.0.1", 29500, False)
    simulation = simulate(scenario("all_gather"), backend="nccl")
    found = session_setup.rank_devices(
        simulation, real.RealRunOptions(backend="nccl"), "nccl", started
    )
    assert (found.gpu_of(3), found.shared) == (0, False)


def test_the_plan_has_devices_for_gloo_on_gpus(cli: Cli):
    text = cli("run", "scenarios/all_reduce.yaml", "--backend", "gloo", "--device", "cuda").stdout
    assert "cuda:1" in text
    assert "CUDA_VISIBLE_DEVICES=0,1" in text
    assert "--device cuda" in text


def test_flops_that_would_take_too_long_here_take_the_time_of_the_cluster():
    heavy = simulate(
        written(
            "world: 1\ncluster: dgx-a100\nprogram: [compute: {flops: 1000 TFLOP, dtype: bfloat16}]\n"
        )
    )
    light = simulate(written("world: 1\ncluster: dgx-a100\nprogram: [compute: {flops: 1 GFLOP}]\n"))

    assert simulated_compute_times(light, [0], "cpu") == {}
    assert simulated_compute_times(heavy, [0], "cpu") == {
        (KernelWork(flops=1e15, nbytes=0.0, kernels=1, dtype="bfloat16"),): heavy.makespan_ns
    }
    assert simulated_compute_times(heavy, [0], "cuda") == {}


def test_flops_use_the_largest_fitting_squares_on_a_gpu_and_small_ones_on_the_host(
    tmp_path: Path,
):
    done: list[tuple[int, bool]] = []

    class Counted(ComputeLoad):
        def _multiply(self, dtype: str | None, side: int, on_gpu: bool) -> None:
            done.append((side, on_gpu))

    load = Counted(ProgressFile(tmp_path / "board", create=True), True, 1.0, "cpu", FakeCuda())
    program = lower(
        written(
            "world: 1\nbackend: nccl\nprogram: [compute: {flops: 21 GFLOP}, compute: {flops: 1 MFLOP, on: host}]\n"
        )
    )
    for _, call in program.calls_of(0):
        load.compute(call)

    on_gpu = [side for side, gpu in done if gpu]
    assert on_gpu == sorted(on_gpu, reverse=True)
    assert (on_gpu[0], done[-1]) == (2048, (256, False))
    assert 21e9 <= sum(2 * side**3 for side in on_gpu) <= 21e9 + 2 * 256**3


# --- times of a device ---


def job_of(program: Any, folder: Path = Path("/nowhere"), **more: Any) -> WorkerJob:
    settings = {
        "devices": RankDevices("cuda", 1),
        "local_ranks": tuple(range(program.world_size)),
        **more,
    }
    return WorkerJob(
        program, "nccl", str(folder), "127.0.0.1", 29500, "env://", True, 10**12, **settings
    )


class Ran:
    """Rank 0 of a program on the stand-ins; its times by column, of the host's clock."""

    def __init__(
        self, text: str, folder: Path, takes_ns: int, lost: tuple[str, ...] = (), **clock: Any
    ) -> None:
        self.cuda = FakeCuda(**clock)
        self.program = lower(written(text))
        self.board = ProgressFile(folder / "board-0", create=True)
        self.job = job_of(self.program, folder)
        self.runner = RankRunner(self.job, 0, self.board, "cpu", self.cuda)
        self.runner.dist = self.nccl = FakeNccl(self.cuda, takes_ns, lost)
        self.path = folder / "times-0"
        self.table = CallTimeTable(self.path, self.program.code(0).offsets[-1])
        self.runner.prepare()
        for stream in self.cuda.streams:
            stream.done.clear()
        self.runner.ready(self.table)

    def run(self) -> Ran:
        self.runner.run()
        return self

    def times(self, column: str) -> list[int]:
        return list(read_call_times(self.path.read_bytes())[column])

    @property
    def error_ns(self) -> int:
        return self.board.words[ProgressField.CLOCK_ERROR_NS]

    def is_near(self, measured_ns: int, device_ns: int, slack_ns: int = 0) -> bool:
        """A measured time is the true one but for the error that the run states; or earlier by what
        the host took to give the work out.
        """
        return (
            -self.error_ns - slack_ns <= measured_ns - self.cuda.host_ns(device_ns) <= self.error_ns
        )


IN_A_ROW = """
world: 2
backend: nccl
tensors: {x: {shape: [4]}}
program:
  - compute: {time: 20 ms}
  - all_reduce: {tensor: x}
  - compute: {time: 10 ms}
  - all_reduce: {tensor: x, async: true, as: h}
  - compute: {time: 30 ms}
  - wait: h
  - all_reduce: {tensor: x, async: true, as: never}
"""


def test_times_are_those_of_the_device_within_the_stated_error_even_if_the_host_ran_ahead(
    tmp_path: Path,
):
    ran = Ran(IN_A_ROW, tmp_path, takes_ns=5_000_000).run()
    finished, launched, returned = (
        ran.times("finished"),
        ran.times("launched"),
        ran.times("returned"),
    )
    (first, reduced, second, third), (asynchronous, last) = (
        ran.cuda.default.done,
        ran.nccl.comm.done,
    )

    for row, (begin, end) in {
        0: first,
        1: reduced,
        2: second,
        3: asynchronous,
        4: third,
        6: last,
    }.items():
        assert ran.is_near(finished[row], end), row
        assert ran.is_near(
            launched[row], begin, slack_ns=returned[row] - ran.times("posted")[row]
        ), row
    assert returned[1] < finished[0]  # the host had enqueued it all before the first was done
    assert 0 < ran.error_ns < 1_000_000


def test_a_drifting_clock_with_another_origin_is_converted_to_that_of_the_host(tmp_path: Path):
    ran = Ran(IN_A_ROW, tmp_path, takes_ns=1_000_000, offset_ns=-(10**13), drift=-0.02).run()

    for row, (_, end) in zip((0, 1, 2, 4), ran.cuda.default.done, strict=True):
        assert ran.is_near(ran.times("finished")[row], end)


STREAMS = """
world: 2
backend: nccl
tensors: {x: {shape: [4]}}
program:
  - compute: {time: 20 ms, on: side}
  - compute: {time: 10 ms}
  - wait_stream: side
  - compute: {time: 5 ms}
"""


def test_named_streams_run_concurrently_and_join_where_one_waits(tmp_path: Path):
    ran = Ran(STREAMS, tmp_path, takes_ns=1).run()
    launched, finished = ran.times("launched"), ran.times("finished")
    side = ran.cuda.streams[-1]

    assert ran.is_near(finished[0], side.done[0][1])
    assert finished[1] < finished[0] <= launched[3] + 2 * ran.error_ns
    assert finished[3] - launched[3] == pytest.approx(5e6, rel=1e-2)


def test_compute_keeps_the_device_busy_for_the_stated_time_at_any_clock_rate(tmp_path: Path):
    for rate in (0.7, 1.98):
        folder = tmp_path / str(rate)
        folder.mkdir()
        ran = Ran(STREAMS, folder, takes_ns=1, cycles_per_ns=rate).run()
        assert [end - begin for begin, end in ran.cuda.default.done] == pytest.approx(
            [10e6, 5e6], rel=1e-2
        )


LOST = """
world: 2
backend: nccl
tensors: {x: {shape: [4]}}
program:
  - {all_reduce: {tensor: x}}
  - {send: {tensor: x, dst: 1}, ranks: 0}
  - {recv: {tensor: x, src: 1}, ranks: 0}
  - {compute: {time: 1 ms}}
"""


def test_a_blocked_device_is_shown_with_its_current_call_and_earlier_times_are_kept(
    tmp_path: Path,
):
    ran = Ran(LOST, tmp_path, takes_ns=1_000_000, lost=("recv",))
    ran.cuda.patience_s = 0.5
    with pytest.raises(TimeoutError):
        ran.run()
    seen = ran.board.snapshot(0)
    finished = ran.times("finished")

    assert (seen.position, seen.device) == (
        4,
        2,
    )  # the host is past its last call, the device at the receive
    assert min(finished[:2]) > 0
    assert finished[2:] == [-1, -1]

    simulation = simulate(written(LOST), backend="nccl")
    left = postmortem(
        simulation,
        {0: seen, 1: seen._replace(rank=1, phase=9, device=-1, position=2)},
        {0: None, 1: 0},
        0,
        {},
    )
    blocked = left.final_state.blocked[0]
    assert (blocked.rank, blocked.position, blocked.device) == (0, 4, True)
    assert [need.position for need in blocked.needs] == [2]
    assert "its device is in recv" in left.final_state.ends[0].message


def test_a_working_device_shows_progress_and_an_idle_one_does_not(tmp_path: Path):
    ran = Ran(
        "world: 1\nbackend: nccl\nprogram: [compute: {time: 100 ms}]\n", tmp_path, takes_ns=1
    ).run()
    worked = ran.board.words[ProgressField.PROGRESS]
    assert worked > 5
    lost = Ran(LOST, tmp_path, takes_ns=1, lost=("send",))
    lost.cuda.patience_s = 0.1
    with pytest.raises(TimeoutError):
        lost.run()
    assert (
        lost.board.words[ProgressField.PROGRESS] <= worked + 9
    )  # posts and the end's step, nothing while it stands


def test_an_eager_initialisation_names_the_gpu_and_a_lazy_one_does_not(tmp_path: Path):
    for init, named in (("eager", {"device_id": 0}), ("lazy", {})):
        (tmp_path / init).mkdir()
        text = f"world: 1\nbackend: nccl\noptions: {{init: {init}}}\nprogram: [compute: {{time: 1 us}}]\n"
        ran = Ran(text, tmp_path / init, takes_ns=1)
        ran.runner.groups.dist = ran.nccl
        ran.runner.groups.start()
        (_, given), *_ = ran.nccl.calls
        assert {key: value for key, value in given.items() if key == "device_id"} == named


def test_a_transfer_starts_when_the_last_device_reaches_it(tmp_path: Path):
    program = lower(
        written(
            "world: 2\nbackend: nccl\ntensors: {x: {shape: [4]}}\nprogram: [all_reduce: {tensor: x}]\n"
        )
    )
    tables = {}
    for rank, (posted, launched, done) in enumerate(((100, 900, 2000), (120, 1500, 2010))):
        table = CallTimeTable(tmp_path / f"{rank}", 1)
        table.cells[0], table.cells[1], table.cells[2], table.cells[5] = (
            posted,
            posted + 5,
            done,
            launched,
        )
        tables[rank] = RankTimeTable((tmp_path / f"{rank}").read_bytes(), 100)
    header = {"backend": "nccl", "cluster": "", "times": "device"}
    trace = merge_rank_tables(program, tables, FinalState((), ()), "completes", header)

    assert trace["started_ns"].tolist() == [1400, 1400]
    assert trace["finished_ns"].tolist() == [1900, 1910]
    assert trace["posted_ns"].tolist() == [0, 20]


# --- benchmarks/nccl_truth.py ---


@pytest.mark.slow
def test_the_nccl_comparison_is_rehearsed_under_gloo():
    """Each question is simulated and run; ranks that came to their end run the next one, a hang
    ends them.
    """
    command = [
        sys.executable,
        "benchmarks/nccl_truth.py",
        "rules",
        "N8|N5",
        "--backend",
        "gloo",
        "--slots",
        "1",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert "simulated completes, found completes" in done.stdout
    assert "simulated hangs, found hangs" in done.stdout
    assert "3 of 3 as simulated" in done.stdout
