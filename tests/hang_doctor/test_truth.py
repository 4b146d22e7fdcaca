"""`distsim doctor` says no more than the files show: killed jobs, finished calls, file names, and
hangs whose cause is not in the files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distsim.hang_doctor import Diagnosis, diagnose_hang, read_evidence
from distsim.hang_doctor.readers.file_names import rank_of_file_name
from tests.hang_doctor.test_command import run
from tests.support.doctor_dumps import dump, entry, write
from tests.support.torchrun_summary import failure, summary

STACK_HEAD = (
    'Process 1: python train.py\nPython v3.11.7 (python3.11)\n\nThread 1 (idle): "MainThread"'
)
DATA_LOADER = [
    "wait (multiprocessing/connection.py:947)",
    "Queue.get (multiprocessing/queues.py:113)",
    "_MultiProcessingDataLoaderIter._try_get_data (torch/utils/data/dataloader.py:1291)",
    "_MultiProcessingDataLoaderIter._next_data (torch/utils/data/dataloader.py:1505)",
    "_BaseDataLoaderIter.__next__ (torch/utils/data/dataloader.py:725)",
    "train (train.py:75)",
]
BACKWARD = [
    "_engine_run_backward (torch/autograd/graph.py:979)",
    "backward (torch/autograd/__init__.py:395)",
    "Tensor.backward (torch/_tensor.py:623)",
    "train (train.py:76)",
]


def stack(*frames: str) -> str:
    return "\n".join([STACK_HEAD, *(f"    {frame}" for frame in frames)]) + "\n"


def stacks(folder: Path, by_rank: dict[int, list[str]]) -> None:
    for rank, frames in by_rank.items():
        (folder / f"pyspy_rank{rank}.txt").write_text(stack(*frames))


def diagnosed(folder: Path) -> Diagnosis:
    return diagnose_hang(read_evidence([str(folder)]))


# --- jobs that were killed ---


def test_a_signal_that_ended_all_ranks_within_seconds_is_not_the_cause(tmp_path: Path) -> None:
    stacks(tmp_path, {0: BACKWARD, 1: DATA_LOADER, 2: BACKWARD})
    ends = [failure(rank, "-9", f"15:57:5{rank}") for rank in range(3)]
    (tmp_path / "torchrun.log").write_text(summary(*ends))

    found = diagnosed(tmp_path)

    assert found.main is not None
    assert (found.main.grade, found.main.ranks, found.culprits) == ("suspected", (1,), ())
    assert "rank 1 waits for its DataLoader" in found.main.title
    assert found.causes[-1].kind == "killed_from_outside"
    assert "SIGKILL ended ranks 0-2 within seconds" in found.causes[-1].title


def test_a_signal_that_ended_one_rank_of_a_job_with_stacks_came_after_the_stacks(
    tmp_path: Path,
) -> None:
    stacks(tmp_path, {0: BACKWARD, 1: DATA_LOADER, 2: BACKWARD})
    (tmp_path / "torchrun.log").write_text(summary(failure(0, "-9", "15:57:52")))

    found = diagnosed(tmp_path)

    assert found.main is not None
    assert (found.main.ranks, found.culprits) == ((1,), ())


WATCHDOG = (
    "[rank0]:[E1123 08:10:00.1 ProcessGroupNCCL.cpp:688] [Rank 0] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, "
    "Timeout(ms)=600000) ran for 600083 milliseconds before timing out.\n"
)


@pytest.mark.parametrize(
    ("time", "culprits"), [("07:59:30", (2,)), ("08:05:00", ())], ids=["before", "during the wait"]
)
def test_a_killed_rank_is_the_cause_only_if_it_died_before_the_others_began_to_wait(
    tmp_path: Path, time: str, culprits: tuple[int, ...]
) -> None:
    """Rank 0 waited from 07:59:59 to 08:10:00."""
    text = WATCHDOG + summary(failure(2, "-9", time), failure(0, "-15", "08:10:05"))
    (tmp_path / "job.log").write_text(text)

    assert diagnosed(tmp_path).culprits == culprits


def test_a_rank_that_torchrun_ended_later_is_a_consequence(tmp_path: Path) -> None:
    text = summary(failure(1, "-11", "08:00:00"), failure(0, "-15", "08:00:00"))
    (tmp_path / "job.log").write_text(text)

    assert diagnosed(tmp_path).culprits == (1,)


# --- calls that are over ---


def test_calls_are_compared_although_no_rank_waits_any_more(tmp_path: Path) -> None:
    """Gloo's calls are retired after their timeout; then no state shows a wait."""

    def gloo(number: int, op: str, line: int) -> dict[str, Any]:
        return entry(number, op, line, "scheduled", profiling_name=f"gloo:{op}", retired=True)

    usual = [gloo(1, "all_reduce", 10), gloo(2, "all_reduce", 12)]
    other = [gloo(1, "all_reduce", 10), gloo(2, "broadcast", 15)]
    found = diagnosed(
        write(tmp_path, {0: dump(usual), 1: dump(usual), 2: dump(usual), 3: dump(other)})
    )

    assert found.main is not None
    assert (found.main.kind, found.main.number, found.culprits) == ("mismatch", 2, (3,))


# --- waiting frames ---

WAITING = {
    "a message between pipeline stages": [
        "_wait_batch_p2p (torch/distributed/pipelining/schedules.py:683)",
        "train (train.py:9)",
    ],
    "an FSDP all_gather or reduce_scatter": [
        "wait_for_unshard (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py:300)",
        "train (train.py:9)",
    ],
    "a DeepSpeed collective": [
        "fetch_sub_module (deepspeed/runtime/zero/partitioned_param_coordinator.py:310)",
        "train (train.py:9)",
    ],
    "all_reduce": ["all_reduce (deepspeed/comm/comm.py:512)", "train (train.py:9)"],
    "Megatron's gradient or parameter synchronisation": [
        "finish_grad_sync (megatron/core/distributed/param_and_grad_buffer.py:400)",
        "train (train.py:9)",
    ],
    "backward": BACKWARD,
}


@pytest.mark.parametrize("position", WAITING)
def test_ranks_in_a_waiting_frame_are_blocked_and_the_status_is_1(
    tmp_path: Path, position: str
) -> None:
    stacks(tmp_path, dict.fromkeys(range(4), WAITING[position]))

    result = run(tmp_path)

    assert result.exit_code == 1
    assert f"ranks 0-3 are in {position} at train.py" in " ".join(result.output.split())


@pytest.mark.parametrize(
    "frames",
    [
        ["synchronize (torch/cuda/__init__.py:1040)", "train (train.py:9)"],
        DATA_LOADER,
        ["preprocess (data.py:30)", "train (train.py:9)"],
    ],
    ids=["device", "DataLoader", "host code"],
)
def test_a_hang_whose_cause_is_not_in_the_stacks_is_called_unknown(
    tmp_path: Path, frames: list[str]
) -> None:
    stacks(tmp_path, dict.fromkeys(range(3), frames))
    found = diagnosed(tmp_path)

    assert found.main is not None
    assert (found.main.kind, found.main.grade) == ("undecided", "unknown")
    assert run(tmp_path).exit_code == 1


def test_a_rank_in_backward_is_not_blamed_for_host_code(tmp_path: Path) -> None:
    """On Gloo the gradients are reduced inside backward, where a stack shows no call."""
    gloo = {"profiling_name": "gloo:all_reduce"}
    done = entry(1, "all_reduce", 10, "scheduled", retired=True, **gloo)
    waits = entry(2, "all_reduce", 12, "scheduled", **gloo)
    write(tmp_path, {0: dump([done, waits]), 1: dump([done, waits]), 2: dump([done])})
    stacks(tmp_path, {2: BACKWARD})

    assert diagnosed(tmp_path).culprits == ()


# --- file names ---


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("nccl_trace_rank_3", 3),
        ("pyspy_rank12.txt", 12),
        ("2026-11-23_rank4.log", 4),
        ("out/1/rank.7/stderr", 7),
        ("logs/attempt_0/2/stderr.log", 2),
        ("5.out", 5),
        ("stack.3.txt", 3),
        ("date_in_name_2026-11-23.log", None),
        ("nccl.host.12345", None),
        ("slurm-4711_2.out", None),
        ("node_rank_1.log", None),
        ("local_rank3.log", None),
        ("job-worker-3.log", None),
    ],
)
def test_a_rank_is_taken_from_a_name_only_by_a_pattern_that_tools_use(
    name: str, rank: int | None
) -> None:
    assert rank_of_file_name(name) == rank


def test_torch_appends_the_rank_to_the_name_of_a_dump() -> None:
    assert rank_of_file_name("traces/run_12", is_dump=True) == 12
    assert rank_of_file_name("traces/run_12") is None


def test_the_report_says_which_rank_comes_from_which_name(tmp_path: Path) -> None:
    stacks(tmp_path, {1: BACKWARD})

    assert "ranks taken from file names: pyspy_rank1.txt → rank 1" in run(tmp_path).output


def test_an_error_without_a_rank_is_reported_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "job_2026-11-23.log").write_text(
        'Traceback (most recent call last):\n  File "train.py", line 20, in <module>\n'
        "    dist.all_reduce(x)\nRuntimeError: [unbound_buffer.cc:81] Timed out waiting 1800000ms "
        "for recv operation to complete\n"
    )
    result = run(tmp_path)

    assert result.exit_code == 1
    assert "a process of unknown rank gave up waiting" in " ".join(result.output.split())
    assert "train.py:20" in result.output


# --- what to collect next ---


def advice(folder: Path) -> str:
    return " | ".join(diagnosed(folder).collect)


def test_advice_asks_for_no_stack_of_a_job_that_has_ended(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(WATCHDOG)

    assert "while the job hangs" not in advice(tmp_path)
    assert "when it hangs again" in advice(tmp_path)


def test_advice_on_gloo_asks_for_no_dump_that_torch_never_writes(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(
        "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [1.1.1.1]:9\n"
    )

    assert "TORCH_NCCL_DUMP_ON_TIMEOUT" not in advice(tmp_path)
    assert "Gloo writes no dump by itself" in advice(tmp_path)


def test_advice_on_a_data_loader_is_to_look_at_its_workers(tmp_path: Path) -> None:
    stacks(tmp_path, {0: BACKWARD, 1: DATA_LOADER})

    assert "--live PID` on the node of rank 1" in advice(tmp_path)


def test_advice_asks_for_no_newer_torch_if_the_log_names_its_groups(tmp_path: Path) -> None:
    line = (
        "[rank0]:[E1123 08:10:00.2 ProcessGroupNCCL.cpp:2277] [PG ID 0 PG GUID 0(default_pg) Rank "
        "0]  failure detected by watchdog at work sequence id: 5 PG status: last enqueued work: 5, "
        "last completed work: 4\n"
    )
    (tmp_path / "job.log").write_text(WATCHDOG + line)

    assert "newer" not in advice(tmp_path)


def test_no_advice_is_given_twice(tmp_path: Path) -> None:
    stacks(tmp_path, {0: BACKWARD, 1: DATA_LOADER})
    (tmp_path / "job.log").write_text(WATCHDOG)
    found = diagnosed(tmp_path).collect

    assert len(found) == len({text.partition(":")[0] for text in found})
