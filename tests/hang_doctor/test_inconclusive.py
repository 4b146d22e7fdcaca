"""`distsim doctor` on what looks like proof and is none: other runs, groups of one name, errors
that were survived, mixed counters.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distsim.hang_doctor import Diagnosis, Evidence, diagnose_hang, read_evidence
from distsim.hang_doctor.model.reconcile import reconcile
from distsim.hang_doctor.readers.flight_recorder import read_flight_recorder
from tests.support.doctor_dumps import dump, entry, write
from tests.support.hung_jobs import hung, lapped, random_job, without_some

Spoilt = Callable[[dict[int, dict[str, Any]], int], dict[int, dict[str, Any]]]
NOON = 1_760_000_000 * 10**9
DAY = 86_400 * 10**9
UNWRITTEN = "18446744073709551615"
#: What torchrun prints of the process that it saw fail first.
SUMMARY = [
    "Root Cause (first observed failure):",
    "[0]:",
    "  time      : 2026-11-23_08:00:00",
    "  host      : a",
    "  rank      : 3 (local_rank: 3)",
    "  exitcode  : 1 (pid: 77)",
    "  error_file: <N/A>",
    "  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html",
]


def diagnosed(folder: Path, dumps: dict[int, dict[str, Any]]) -> Diagnosis:
    return diagnose_hang(read_evidence([str(write(folder, dumps))]))


def diagnose_lines(folder: Path, *lines: str) -> Diagnosis:
    (folder / "job.log").write_text("\n".join(lines) + "\n")
    return diagnose_hang(read_evidence([str(folder)]))


def timed_out(
    rank: int,
    number: int,
    counters: str,
    op: str = "ALLREDUCE",
    group: str = "0(default_pg)",
    numel: str = "8",
) -> list[str]:
    """Log lines as torch 2.13 writes them. ``counters``: last enqueued and last completed."""
    enqueued, completed = counters.split()
    return [
        f"[rank{rank}]:[E1123 08:00:00.1 ProcessGroupNCCL.cpp:688] [Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum={number}, OpType={op}, NumelIn={numel}, NumelOut={numel}, Timeout(ms)=600000) ran for 600083 milliseconds",
        f"[rank{rank}]:[E1123 08:00:00.2 ProcessGroupNCCL.cpp:2277] [PG ID 0 PG GUID {group} Rank {rank}]  failure detected by watchdog "
        f"at work sequence id: {number} PG status: last enqueued work: {enqueued}, last started work: 3 (_ALLGATHER_BASE), "
        f"last completed work: {completed}",
    ]


def signalled(rank: int, count: int, group: str = "0(default_pg)") -> str:
    """The log line of a rank that dumps because another rank timed out."""
    return (
        f"[rank{rank}]:[E1123 08:00:01 ProcessGroupNCCL.cpp:1700] [PG ID 0 PG GUID {group} Rank {rank}] Received a dump signal due to a "
        f"collective timeout from rank 0 and we will try our best to dump the debug info. Last enqueued NCCL work: {count}, last completed "
        f"NCCL work: {count}."
    )


def raised(rank: int, error: str, head: str = "") -> list[str]:
    trace = [
        *([head] if head else []),
        "Traceback (most recent call last):",
        '  File "/job/train.py", line 33, in step',
        "    f(x)",
        error,
    ]
    return [f"[rank{rank}]: {line}" for line in trace]


def waiting_for_2() -> list[str]:
    return [*(line for rank in (0, 1, 3) for line in timed_out(rank, 5, "5 4")), signalled(2, 4)]


@pytest.mark.parametrize("known", ["dump", "log"])
def test_a_call_in_two_files_has_the_sizes_that_one_of_them_contains(
    tmp_path: Path, known: str
) -> None:
    sizes = {"input_sizes": [[7]], "output_sizes": [[28]]}
    unknown = {"input_sizes": [], "output_sizes": []}
    call = entry(5, "all_gather", 3, "started", **(sizes if known == "dump" else unknown))
    write(tmp_path, {0: dump([call])})
    numel = "28" if known == "log" else UNWRITTEN
    log = timed_out(0, 5, "5 4", "ALLGATHER", numel=numel)
    (tmp_path / "job.log").write_text("\n".join(log))

    found = read_evidence([str(tmp_path)])

    assert [one.elements_out for one in found.ranks[0].calls if one.number == 5] == [28]


# --- counters ---


def test_counters_of_torch_2_13_tell_that_the_last_started_work_lies_between_them(
    tmp_path: Path,
) -> None:
    assert diagnose_lines(tmp_path, *waiting_for_2()).culprits == (2,)


@pytest.mark.parametrize(
    ("op", "numel"), [("COALESCED", UNWRITTEN), ("SEND", "8")], ids=["batch", "send"]
)
def test_counters_of_a_group_with_timed_out_messages_blame_no_rank(
    tmp_path: Path, op: str, numel: str
) -> None:
    """They count messages, and each pipeline stage sends a different number of messages."""
    ops = [
        timed_out(rank, number, f"{number} {number - 1}", op, "3(pp)", numel)
        for rank, number in ((0, 41), (1, 60), (3, 41))
    ]
    found = diagnose_lines(
        tmp_path, *(line for lines in ops for line in lines), signalled(2, 30, "3(pp)")
    )

    assert found.culprits == ()
    assert all(cause.kind != "behind" for cause in found.causes)
    assert any("counters mix messages and collectives" in note for note in found.evidence.notes)


def test_a_coalesced_call_of_the_fast_path_has_sizes_and_is_a_collective(tmp_path: Path) -> None:
    lines = [
        line for rank in (0, 1, 3) for line in timed_out(rank, 5, "5 4", "COALESCED", numel="999")
    ]

    assert diagnose_lines(tmp_path, *lines, signalled(2, 4)).culprits == (2,)


def test_nccl_operation_counts_of_a_communicator_with_messages_blame_no_rank(
    tmp_path: Path,
) -> None:
    """The first stage of a pipeline has sent four times, the last received once; then two of three
    come to the same collective.
    """
    lines = []
    for rank, ops in enumerate(
        (["Send"] * 4 + ["AllReduce"], ["Send"] * 4 + ["AllReduce"], ["Recv"])
    ):
        head = f"host:{100 + rank}:{200 + rank} [{rank}] NCCL INFO "
        lines.append(
            f"{head}comm 0x5{rank} rank {rank} nranks 3 cudaDev {rank} nvmlDev {rank} busId 1000 commId 0xabc - Init COMPLETE"
        )
        lines += [
            f"{head}{op}: opCount {n:x} sendbuff 0x1 recvbuff 0x2 count 128 datatype 11 op 0 root 0 comm 0x5{rank} [nranks=3]"
            for n, op in enumerate(ops)
        ]
    found = diagnose_lines(tmp_path, *lines)

    assert found.culprits == ()
    assert any("carries messages" in note for note in found.evidence.notes)
    assert {call.dtype for given in found.evidence.ranks.values() for call in given.calls} == {
        "float8_e5m2"
    }


# --- different groups with the same name ---


def test_logs_of_a_mesh_do_not_reveal_which_ranks_share_a_group(tmp_path: Path) -> None:
    """Ranks 0 and 2 form one group `3`; rank 1 is in another group `3`, where no rank waits."""
    lines = [line for rank in (0, 2) for line in timed_out(rank, 7, "7 6", group="3(mesh_dp)")]
    found = diagnose_lines(tmp_path, *lines, signalled(1, 4, "3(mesh_dp)"))

    assert found.culprits == ()
    assert any("give this name to all groups" in note for note in found.evidence.notes)


def test_dumps_of_a_mesh_distinguish_groups_by_members_and_locate_the_logs(
    tmp_path: Path,
) -> None:
    dp = ("3", "mesh_dp")
    made = {
        rank: [entry(n, "all_reduce", 9, group=dp) for n in range(1, count + 1)]
        for rank, count in {0: 6, 1: 4, 2: 6, 3: 4, 4: 5}.items()
    }
    for rank in (0, 2):
        made[rank].append(entry(7, "all_reduce", 9, "scheduled", group=dp))
    members = {0: [0, 2, 4], 2: [0, 2, 4], 4: [0, 2, 4], 1: [1, 3], 3: [1, 3]}
    write(
        tmp_path,
        {rank: dump(entries, {"3": ("mesh_dp", members[rank])}) for rank, entries in made.items()},
    )
    found = diagnose_lines(
        tmp_path, *timed_out(0, 7, "7 6", group="3(mesh_dp)"), signalled(1, 4, "3(mesh_dp)")
    )

    assert (found.main and found.main.kind, found.culprits) == ("behind", (4,))
    assert found.evidence.disputes == []
    assert 'group 3 "mesh_dp" with rank 0' in (found.main.title if found.main else "")


# --- files of other runs ---


def run(count: int, waits: bool, start: int) -> dict[str, Any]:
    made = [entry(n, "all_reduce", 10, time_created_ns=start + n) for n in range(1, count + 1)]
    return dump(
        [
            *made,
            *(
                [entry(count + 1, "all_reduce", 12, "scheduled", time_created_ns=start + 10**9)]
                if waits
                else []
            ),
        ]
    )


@pytest.mark.parametrize("count", [7, 70], ids=["it ended earlier", "it ran longer"])
def test_an_old_dump_is_ignored(tmp_path: Path, count: int) -> None:
    found = diagnosed(
        tmp_path,
        {
            rank: run(count, False, NOON - DAY) if rank == 2 else run(40, True, NOON)
            for rank in range(4)
        },
    )

    assert (found.main and found.main.kind, found.culprits, found.absent) == (
        "missing_files",
        (),
        (2,),
    )
    assert "rank 2 24 hours before the others" in found.evidence.disputes[0]


def test_files_of_two_runs_without_a_majority_blame_no_rank(tmp_path: Path) -> None:
    dumps = {
        rank: run(40, True, NOON) if rank < 2 else run(30, True, NOON - DAY) for rank in range(4)
    }
    found = diagnosed(tmp_path, dumps)

    assert found.culprits == ()
    assert all(cause.grade != "proved" for cause in found.causes)


def test_clock_differences_below_a_timeout_change_nothing(tmp_path: Path) -> None:
    found = diagnosed(
        tmp_path, {rank: run(40, rank != 2, NOON + 60 * 10**9 * rank) for rank in range(4)}
    )

    assert (found.culprits, found.evidence.disputes) == ((2,), [])


def test_the_last_start_in_torchrun_directories_is_read(tmp_path: Path) -> None:
    for start, lines in enumerate((raised(1, "ValueError: of the first start"), waiting_for_2())):
        folder = tmp_path / "logs" / f"attempt_{start}" / "0"
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text("\n".join(lines))
    found = diagnose_hang(read_evidence([str(tmp_path)]))

    assert found.culprits == (2,)
    assert any("attempt_0, an earlier start" in note for note in found.evidence.notes)


def test_the_last_of_several_starts_in_a_log_is_read(tmp_path: Path) -> None:
    again = "[default] Worker group FAILED. 3/3 attempts left; will restart worker group"
    found = diagnose_lines(
        tmp_path, *raised(1, "ValueError: of the first start"), again, *waiting_for_2()
    )

    assert found.culprits == (2,)


def test_a_dump_triggered_by_messages_of_another_rank_proves_nothing(tmp_path: Path) -> None:
    """The file names were chosen by hand, or contain local ranks of several machines."""
    waits = dump([entry(1, "all_reduce", 9, "scheduled")])
    found = diagnosed(
        tmp_path,
        {0: dump([entry(1, "send 1->0", 9, "scheduled")]), **dict.fromkeys((1, 2, 3), waits)},
    )

    assert found.culprits == ()
    assert all(cause.grade != "proved" for cause in found.causes)
    assert "its messages are of rank 1" in found.evidence.disputes[0]


def test_recreated_groups_count_from_the_start(tmp_path: Path) -> None:
    """After destroy_process_group and init_process_group the name is the same, the numbers begin at
    1, the local number is another.
    """
    before = [entry(n, "all_reduce", 10) for n in range(1, 6)]
    after = [entry(1, "all_reduce", 10), entry(2, "broadcast", 12, "scheduled")]
    dumps = {
        rank: dump([*before, *(e | {"pg_id": 3} for e in (after[:1] if rank == 2 else after))])
        for rank in range(4)
    }
    found = diagnosed(tmp_path, dumps)

    assert (found.main and found.main.kind, found.culprits) == ("behind", (2,))
    assert found.evidence.disputes == []


def test_a_branch_in_a_one_line_loop_is_no_surplus_call(tmp_path: Path) -> None:
    """Its calls agree with the others' before and after without any shift: rank 2 is behind, and
    rank 3 went another way harmlessly.
    """
    loop = {
        rank: [entry(n, "all_reduce", 11 if (rank, n) == (3, 3) else 10) for n in range(1, 9)]
        for rank in range(4)
    }
    waits = entry(9, "all_reduce", 10, "scheduled")
    found = diagnosed(
        tmp_path,
        {rank: dump([*calls, *([waits] if rank != 2 else [])]) for rank, calls in loop.items()},
    )

    assert (found.main and found.main.kind, found.culprits) == ("behind", (2,))


# --- errors ---


def test_a_survived_error_is_not_reported_before_the_rank_that_is_behind(tmp_path: Path) -> None:
    found = diagnose_lines(
        tmp_path, *raised(0, "requests.exceptions.ConnectionError: wandb"), *waiting_for_2()
    )

    assert (found.main and found.main.kind, found.culprits) == ("behind", (2,))
    assert [(c.grade, c.culprits) for c in found.causes if c.kind == "crash"] == [("suspected", ())]


@pytest.mark.parametrize(
    "head",
    [
        "Exception ignored in: <function Loader.__del__ at 0x7f>",
        "Exception in thread Thread-3 (pin):",
        "--- Logging error ---",
    ],
)
def test_an_error_that_ends_no_process_is_no_crash(tmp_path: Path, head: str) -> None:
    found = diagnose_lines(tmp_path, *raised(1, "AttributeError: gone", head))

    assert found.causes == []
    assert any("ends at most a thread" in note for note in found.evidence.notes)


def test_first_failure_of_torchrun_with_status_1_may_be_a_timeout(tmp_path: Path) -> None:
    found = diagnose_lines(tmp_path, *SUMMARY)

    assert (found.main and found.main.grade, found.culprits) == ("suspected", ())


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation",
        "torch.distributed.DistBackendError: remote process exited",
    ],
)
def test_first_failure_of_torchrun_is_excused_by_its_own_traceback(
    tmp_path: Path, error: str
) -> None:
    found = diagnose_lines(tmp_path, *raised(3, error), *SUMMARY)

    assert found.culprits == ()
    assert [cause.kind for cause in found.causes] == ["consequence"]


def test_first_failure_of_torchrun_is_blamed_by_its_own_traceback(tmp_path: Path) -> None:
    found = diagnose_lines(
        tmp_path,
        *raised(1, "RuntimeError: peer is gone"),
        *raised(3, "ValueError: empty batch"),
        *SUMMARY,
    )

    assert found.culprits == (3,)


def test_neither_of_two_unordered_errors_is_called_the_first(tmp_path: Path) -> None:
    found = diagnose_lines(
        tmp_path, *raised(1, "RuntimeError: one"), *raised(3, "ValueError: another")
    )

    assert (found.main and found.main.kind, found.main and found.main.ranks, found.culprits) == (
        "crash",
        (1, 3),
        (),
    )


def test_a_rank_that_failed_because_of_others_is_not_called_behind(tmp_path: Path) -> None:
    lines = [line for rank in (0, 1, 2) for line in timed_out(rank, 5, "5 4")]
    found = diagnose_lines(
        tmp_path,
        *lines,
        *raised(3, "torch.distributed.DistBackendError: NCCL communicator was aborted"),
    )

    assert found.culprits == ()
    assert all(
        3 not in wait.missing for stand in found.standing.ranks.values() for wait in stand.waits
    )


# --- random jobs ---


@pytest.mark.parametrize("first", range(0, 160, 40))
def test_only_the_faulty_rank_of_a_random_job_is_blamed_and_its_hang_is_detected(
    tmp_path: Path, first: int
) -> None:
    """One rank stops, or makes a call too many or too few. A circle names its ranks, of whom the
    faulty one is one.
    """
    for seed in range(first, first + 40):
        job = random_job(seed)
        hangs, dumps = hung(job)
        (tmp_path / str(seed)).mkdir()
        found = diagnosed(tmp_path / str(seed), dumps)

        assert bool(found.causes) == hangs, seed
        assert not found.culprits or job.faulty in found.culprits, seed
        if found.main is not None and found.main.kind != "wait_for_cycle":
            assert found.culprits in ((), (job.faulty,)), seed
        assert not found.evidence.disputes, seed


@pytest.mark.parametrize("spoilt", [without_some, lapped])
def test_only_the_faulty_rank_of_a_random_job_is_blamed_if_records_are_lost(
    tmp_path: Path, spoilt: Spoilt
) -> None:
    for seed in range(300, 360):
        job = random_job(seed)
        (tmp_path / str(seed)).mkdir()
        found = diagnosed(tmp_path / str(seed), spoilt(hung(job)[1], seed))

        assert not found.culprits or job.faulty in found.culprits, seed


def test_for_a_rank_that_stops_the_calls_that_others_wait_for_are_found(tmp_path: Path) -> None:
    """The rank is blamed if it is one against several."""
    named = 0
    for seed in range(160, 260):
        job = random_job(seed)
        if job.fault == "stop":
            (tmp_path / str(seed)).mkdir()
            named += diagnosed(tmp_path / str(seed), hung(job)[1]).culprits == (job.faulty,)

    assert named >= 10


@pytest.mark.parametrize("count", [1000, pytest.param(5000, marks=pytest.mark.slow)])
def test_in_hangs_with_lost_files_no_rank_is_blamed_wrongly_and_no_hang_is_denied(
    count: int,
) -> None:
    """The dumps of some ranks are missing, and in every third job the buffers have wrapped."""
    wrong, denied, hangs, seed = [], [], 0, 0
    while hangs < count:
        job = random_job(seed)
        is_hung, dumps = hung(job)
        seed += 1
        if not is_hung:
            continue
        hangs += 1
        if seed % 3 == 0:
            dumps = lapped(dumps, seed)
        evidence = Evidence()
        for rank, dumped in without_some(dumps, seed).items():
            read_flight_recorder(evidence, dumped, rank, f"fr_rank_{rank}")
        reconcile(evidence)
        found = diagnose_hang(evidence)
        if found.culprits and job.faulty not in found.culprits:
            wrong.append(seed - 1)
        if not found.causes:
            denied.append(seed - 1)

    assert (wrong, denied) == ([], [])
