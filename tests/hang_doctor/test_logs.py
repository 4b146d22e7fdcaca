"""`distsim doctor` on logs as users paste them: launcher prefixes, several ranks in one file,
truncated lines and reports of other tools.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distsim.hang_doctor import Diagnosis, diagnose_hang, read_evidence

THREADS = sorted(
    (Path(__file__).resolve().parents[1] / "data" / "doctor" / "threads").glob("*.txt")
)
PG = "[PG ID 0 PG GUID 0(default_pg) Rank {0}]"
CAUGHT = (
    "[E1 ProcessGroupNCCL.cpp:616] [Rank {0}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={1}, OpType=ALLREDUCE, "
    "NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran for 600013 milliseconds before timing out."
)
STATUS = (
    "[E1 ProcessGroupNCCL.cpp:1785] "
    + PG
    + " Timeout at NCCL work: {1}, last enqueued NCCL work: {1}, last completed NCCL work: {2}."
)
BEHIND = (
    "[E1 ProcessGroupNCCL.cpp:1743] "
    + PG
    + (
        " Received a dump signal due to a collective timeout from rank 0 and we will try our "
        "best to dump the debug info. Last enqueued NCCL work: {2}, last completed NCCL work: {2}."
    )
)
PREFIXES = {
    "torch": "[rank{0}]:",
    "mpirun": "[1,{0}]<stderr>:[rank{0}]:",
    "srun": "{0}: [rank{0}]:",
    "torchrun": "[default{0}]:[rank{0}]:",
    "kubectl": "[pod/job-worker-{0}/pytorch] [rank{0}]:",
    "container": "2026-01-02T03:04:05.678901234Z stderr F [rank{0}]:",
    "ray": "(TrainWorker pid=40{0}, ip=10.0.0.1) [rank{0}]:",
    "colours": "\x1b[36m(Worker pid=4)\x1b[0m [rank{0}]:",
    "numbered": "[18{0}] [rank{0}]:",
}


def diagnose_lines(tmp_path: Path, *lines: str, name: str = "job.log") -> Diagnosis:
    (tmp_path / name).write_text("\n".join(lines) + "\n")
    return diagnose_hang(read_evidence([str(tmp_path)]))


def watchdog(prefix: str = "[rank{0}]:", late: int = 2, number: int = 7) -> list[str]:
    """Return log lines of ranks 0 to 3 at call `number`; rank `late` has not reached the call."""
    found = []
    for rank in range(4):
        parts = (BEHIND,) if rank == late else (CAUGHT, STATUS)
        found += [prefix.format(rank) + part.format(rank, number, number - 1) for part in parts]
    return found


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_a_rank_with_lower_own_counters_is_behind_whatever_prefix_the_launcher_adds(
    tmp_path: Path, prefix: str
) -> None:
    found = diagnose_lines(tmp_path, *watchdog(prefix))

    assert found.main is not None
    assert (found.main.kind, found.culprits, found.main.number) == ("behind", (2,), 7)


def test_one_log_per_rank_gives_the_same_answer_as_one_for_all(tmp_path: Path) -> None:
    lines = watchdog()
    for rank in range(4):
        (tmp_path / f"rank_{rank}.log").write_text(
            "\n".join(line for line in lines if line.startswith(f"[rank{rank}]"))
        )

    assert diagnose_hang(read_evidence([str(tmp_path)])).culprits == (2,)


def test_a_line_wrapped_by_a_terminal_is_read_as_one(tmp_path: Path) -> None:
    lines = [
        line if "WorkNCCL" not in line else line.replace("NumelOut", "Numel\nOut")
        for line in watchdog()
    ]

    found = diagnose_lines(tmp_path, *lines)

    assert [c.elements_out for c in found.evidence.ranks[0].calls] == [8]
    assert found.culprits == (2,)


def test_truncated_lines_are_read_or_skipped_and_blame_no_other_rank(tmp_path: Path) -> None:
    text = "\n".join(watchdog())
    wrong = []
    for end in range(0, len(text), 37):
        (tmp_path / "job.log").write_text(text[:end])
        found = diagnose_hang(read_evidence([str(tmp_path)]))
        if not set(found.culprits) <= {2}:
            wrong.append((end, found.culprits))

    assert wrong == []


def test_counters_that_no_rank_wrote_are_unknown(tmp_path: Path) -> None:
    """Torch 2.4 prints a word of memory for a group on which nothing was completed."""
    found = diagnose_lines(tmp_path, "[rank2]:" + STATUS.format(2, 1, 76280750235782912))

    assert found.evidence.ranks[2].status["0"].completed == -1


def test_a_bracketed_rank_is_a_group_rank_and_the_prefix_of_the_launcher_a_global_rank(
    tmp_path: Path,
) -> None:
    line = (
        "[rank6]:[E1 ProcessGroupNCCL.cpp:1785] [PG ID 2 PG GUID 9(tp) Rank 0] Timeout at NCCL work: 5, last enqueued NCCL work: 5, "
        "last completed NCCL work: 4."
    )

    assert list(diagnose_lines(tmp_path, line).evidence.ranks) == [6]


def test_groups_known_only_by_a_local_number_prove_nothing(tmp_path: Path) -> None:
    """`[PG 1 Rank 0]` counts the groups of a process; before 2.4 another process may count another
    way.
    """
    lines = [line.replace("PG ID 0 PG GUID 0(default_pg)", "PG 1") for line in watchdog()]

    found = diagnose_lines(tmp_path, *lines)

    assert found.culprits == ()


def test_half_of_the_ranks_behind_blames_no_rank(tmp_path: Path) -> None:
    found = diagnose_lines(
        tmp_path, "[rank0]:" + STATUS.format(0, 11, 10), "[rank9]:" + BEHIND.format(9, 11, 10)
    )

    assert found.main is not None
    assert found.main.title.startswith("rank 9 is behind")
    assert found.culprits == ()


def test_the_stack_printed_by_the_watchdog_gives_the_line(tmp_path: Path) -> None:
    stack = [
        "Stack trace of the failed collective: ",
        "#0 all_reduce from /env/site-packages/torch/distributed/distributed_c10d.py:4186",
        "#1 step from /job/train.py:88",
    ]
    found = diagnose_lines(tmp_path, *watchdog()[:2], *stack, *watchdog()[2:])

    assert found.main is not None
    assert "/job/train.py:88" in [f.place for _, _, f in found.main.lines if f]


def test_an_independent_error_is_reported_before_ranks_that_lost_the_connection_to_it(
    tmp_path: Path,
) -> None:
    own = [
        "Traceback (most recent call last):",
        '  File "/job/train.py", line 33, in step',
        "    loss = model(batch)",
        "ValueError: empty batch",
    ]
    lost = [
        "Traceback (most recent call last):",
        '  File "/job/train.py", line 40, in step',
        "    dist.all_reduce(x)",
        "RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.1]:4711",
    ]
    lines = [f"[rank{rank}]: {line}" for rank in range(3) for line in (own if rank == 1 else lost)]

    found = diagnose_lines(tmp_path, *lines)

    assert found.main is not None
    assert (found.main.kind, found.culprits) == ("crash", (1,))
    assert [f.line for _, _, f in found.main.lines if f] == [33]


def test_first_failure_of_torchrun_is_the_cause_only_if_it_is_no_consequence(
    tmp_path: Path,
) -> None:
    """SIGABRT is how the watchdog ends a process that waited. SIGSEGV is the process's own fault.
    SIGKILL may come from a user who ends a job that hangs already.
    """

    def summary(code: str) -> list[str]:
        return [
            "Root Cause (first observed failure):",
            "[0]:",
            "  time      : 2026",
            "  host      : a",
            "  rank      : 3 (local_rank: 3)",
            f"  exitcode  : {code} (pid: 77)",
            "  error_file: <N/A>",
            "  traceback : Signal received by PID 77",
        ]

    killed = diagnose_lines(tmp_path, *summary("-9"))
    assert killed.main is not None
    assert (killed.main.grade, killed.main.ranks, killed.culprits) == ("suspected", (3,), ())
    assert list(killed.main.lines) == []  # the log contains no stack of the process
    assert diagnose_lines(tmp_path, *summary("-11")).culprits == (3,)
    assert diagnose_lines(tmp_path, *summary("-6")).culprits == ()


def test_monitored_barrier_names_the_missing_ranks(tmp_path: Path) -> None:
    trace = [
        "Traceback (most recent call last):",
        '  File "/job/train.py", line 7, in main',
        "RuntimeError: [Rank 0]: Ranks 2, 3 failed to pass monitoredBarrier in 1000 ms",
    ]
    found = diagnose_lines(tmp_path, *[f"[rank0]: {line}" for line in trace])

    assert found.culprits == (2, 3)


def test_hexadecimal_counters_of_nccl_are_read_and_distinguished_by_the_shared_id(
    tmp_path: Path,
) -> None:
    lines = []
    for rank in range(3):
        head = f"host:{100 + rank}:{200 + rank} [{rank}] NCCL INFO "
        lines.append(
            f"{head}comm 0x5{rank} rank {rank} nranks 3 cudaDev {rank} nvmlDev {rank} busId 1000 commId 0xabc - Init COMPLETE"
        )
        for number in ("e", "f", "10"):
            op = "AllGather" if (rank, number) == (1, "10") else "AllReduce"
            lines.append(
                f"{head}{op}: opCount {number} sendbuff 0x1 recvbuff 0x2 count 128 datatype 7 op 0 root 0 comm 0x5{rank} "
                "[nranks=3] stream 0x3"
            )
    found = diagnose_lines(
        tmp_path, *lines, f"host:100:1 [0] NCCL INFO {lines[0].split('INFO ')[1]}"
    )

    calls = [(c.number, c.op, c.dtype) for c in found.evidence.ranks[1].calls]
    assert calls == [
        (14, "all_reduce", "float32"),
        (15, "all_reduce", "float32"),
        (16, "all_gather", "float32"),
    ]
    assert found.evidence.groups["comm 0xabc"].members == (0, 1, 2)


def test_ras_json_with_a_missing_comma_names_unresponsive_and_late_ranks(
    tmp_path: Path,
) -> None:
    def rank(number: int, calls: int) -> dict[str, object]:
        return {
            "rank": number,
            "host": "a",
            "pid": number,
            "collective_counts": {"AllReduce": calls, "Broadcast": 1},
        }

    missing = [
        {"rank": 4, "host": "b", "status": {"unresponsive": True, "considered_dead": True}},
        {"rank": 5, "host": "b", "status": {}},
    ]
    data = {
        "nccl_version": "2.28.9",
        "communicators": [
            {
                "hash": "ab",
                "size": 6,
                "ranks": [rank(n, 40 if n == 1 else 41) for n in range(4)],
                "missing_ranks": missing,
            }
        ],
        "ras": {},
    }
    (tmp_path / "ras.json").write_text(json.dumps(data).replace('}}, {"rank": 5', '}} {"rank": 5'))

    found = diagnose_hang(read_evidence([str(tmp_path)]))

    titles = [cause.title for cause in found.causes]
    assert any("rank 4 is considered dead" in title for title in titles)
    assert any(
        "rank 1 on group comm ab: at AllReduce 40 while others are at 41" in title
        for title in titles
    )
    assert found.culprits == ()


@pytest.mark.parametrize("thread", THREADS, ids=lambda p: p.stem)
def test_log_lines_of_a_public_thread_are_read_and_blame_no_rank(thread: Path) -> None:
    """None of these lines proves which rank is the cause; see
    docs/explanation/doctor.md for how each thread ended.
    """
    found = diagnose_hang(read_evidence([str(thread)]))

    assert [file.problem for file in found.evidence.files] == [""]
    assert found.main is not None or found.evidence.notes
    assert found.culprits == ()


TRUNCATED = {
    "2.28.9": "[2026-11-22 23:15:45] vm:1361:1361 [0] bootstrap.cc:209 NCCL WARN Message truncated : received 1024 bytes instead of 512",
    "2.32.3": "[2026-11-22 23:18:27] vm:2195:2195 [0] bootstrap.cc:227 (socketRecv) NCCL WARN Message truncated : received 1024 bytes "
    "instead of 512",
    "raised": "Message truncated : received 1024 bytes instead of 512",
    "sockets": "[2026-11-22 23:15:40] vm:1310:1331 [0] misc/socket.cc:820 NCCL WARN ncclSocketInit: connecting to address  with "
    "family 1 is neither AF_INET(2) nor AF_INET6(10)",
}


@pytest.mark.parametrize("line", TRUNCATED.values(), ids=TRUNCATED)
def test_inconsistent_connection_data_are_reported_as_calls_that_do_not_mirror_each_other(
    tmp_path: Path, line: str
):
    """As NCCL wrote it on an H100, where a batch of both directions met a receive alone, and two
    sends each other.
    """
    raised = [
        "Traceback (most recent call last):",
        '  File "/job/train.py", line 33, in step',
        "    dist.batch_isend_irecv(ops)",
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:5529, internal "
        "error - please report this issue to the NCCL developers, NCCL version 2.28.9",
    ]
    found = diagnose_lines(
        tmp_path,
        *[
            f"[rank1]: {one}"
            for one in (*raised, "ncclInternalError: Internal check failed.", "Last error:", line)
        ],
    )

    assert found.main is not None
    assert (found.main.kind, found.main.grade, found.main.ranks) == (
        "connection",
        "suspected",
        (1,),
    )
    assert "on rank 1" in found.main.title
    assert "batch_isend_irecv on both ranks" in " ".join(found.main.details)
    assert [f.line for _, _, f in found.main.lines if f] == [33]
