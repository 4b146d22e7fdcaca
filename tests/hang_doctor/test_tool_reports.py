"""`distsim doctor` on the words of other programs: analyzers, launchers, schedulers, the kernel.

The lines have the formats that the docstrings of the readers cite.
"""

from __future__ import annotations

import html
import json
import time
from html import escape
from pathlib import Path

import pytest

from distsim.hang_doctor import Diagnosis, diagnose_hang, read_evidence
from tests.hang_doctor.test_logs import diagnose_lines
from tests.support.doctor_dumps import dump, entry
from tests.support.torchrun_summary import failure, summary

OOM = "[77.1] Memory cgroup out of memory: Killed process 102 (python) total-vm:2623712kB, anon-rss"
LINES = {
    "Ray": (
        [
            "`ray.train.report` has not been called by all 4 workers in the group.",
            "The workers have been waiting for 60.10 s for the following ranks to join the "
            "`ray.train.report` call: [1, 2, 3].",
        ],
        "Ray reports: ranks 1-3 did not call ray.train.report",
    ),
    "Ray in two lines": (
        [
            "The workers have been waiting for 60.10 s for the following ranks",
            "to join the `report` call: [2].",
        ],
        "Ray reports: rank 2 did not call report",
    ),
    "NCCL": (
        [
            "init.cc:1247 NCCL WARN Mismatched collective detected, please check your collective "
            "calls at and around rank 39. You can use NCCL_DEBUG=INFO"
        ],
        "NCCL's log reports: rank 39 got a collective that does not match",
    ),
    "InfiniBand": (
        [
            "a:1:2 [0] transport/net_ib.cc:1038 NCCL WARN NET/IB : req 0/1 tag 0 peer "
            "10.0.0.6<58683> collective mismatch error, local size 496640 remote size 65536"
        ],
        "two ranks transfer different sizes: 496640 bytes here, 65536",
    ),
    "SLURM's limit": (
        [
            "slurmstepd: error: *** STEP 494583.0 ON node7 CANCELLED AT 2024-04-20T09:09:37 DUE TO "
            "TIME LIMIT ***"
        ],
        "SLURM reports: the job was cancelled (time limit)",
    ),
    "SLURM's memory": (
        ["srun: error: node7: task 3: Out Of Memory"],
        "task 3 on node7 was killed for lack of memory",
    ),
    "the kernel": ([OOM], "the kernel reports: process 102 (python) was killed: out of memory"),
    "a disk": (
        ["[9.1] INFO: task python:4711 blocked for more than 120 seconds."],
        "process 4711 (python) has waited for the disk",
    ),
    "a GPU": (
        ["NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus."],
        "the GPU at 0000:3b:00 reports error Xid 79",
    ),
    "torch's store": (
        [
            "torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. "
            "1/3 clients joined."
        ],
        "only 1 of 3 processes joined in 1801 s",
    ),
    "torchrun": (
        [
            "WARNING: torch.distributed.elastic.agent.server.api:Received 15 death signal, shutting "
            "down workers"
        ],
        "it received signal 15: the job was ended from outside",
    ),
}


def titles(found: Diagnosis) -> str:
    return " | ".join(cause.title for cause in found.causes)


@pytest.mark.parametrize("case", LINES)
def test_a_report_of_another_program_is_repeated_in_its_name(tmp_path: Path, case: str) -> None:
    lines, expected = LINES[case]
    found = diagnose_lines(tmp_path, *lines)

    assert expected in titles(found)
    assert found.culprits == ()


def test_the_findings_of_torchs_analyzer_are_read(tmp_path: Path) -> None:
    found = diagnose_lines(
        tmp_path,
        "Not all ranks joining collective, sequence number: 12",
        "internal record id: 11",
        "group info: 0:default_pg",
        "collective: nccl:all_reduce",
        "missing ranks: {3, 5}",
        "collective state: scheduled",
        "Collective sequence number: 39 has errors",
        "group info: 1:tp",
        "collective: nccl:all_gather",
        "error msg: Culprit rank 22; Error type: SIZE_OR_SYNTAX_MISMATCH, Expected input sizes: "
        "'[[1025]]' does not match, Culprit rank 110; Error type: SIZE_OR_SYNTAX_MISMATCH",
    )

    assert "ranks 3 and 5 did not join all_reduce (call 12 of group 0:default_pg)" in titles(found)
    assert "ranks 22 and 110 differ from the other ranks in all_gather (call 39" in titles(found)


def test_a_rank_that_ran_out_of_memory_is_the_cause_although_the_signal_is_sigkill(
    tmp_path: Path,
) -> None:
    """The process number in the kernel's line is that of rank 2 in torchrun's summary."""
    text = summary(failure(2, "-9", "08:00:00", pid=102), failure(0, "-15", "08:00:00"))

    assert diagnose_lines(tmp_path, *text.splitlines()).culprits == ()
    assert diagnose_lines(tmp_path, *text.splitlines(), OOM).culprits == (2,)


# --- the size of a group ---


def gathering(rank: int, elements_in: int, elements_out: int, op: str = "ALLGATHER") -> list[str]:
    return [
        f"[rank{rank}]:[E1 ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog caught collective "
        f"operation timeout: WorkNCCL(SeqNum=493, OpType={op}, NumelIn={elements_in}, "
        f"NumelOut={elements_out}, Timeout(ms)=60000) ran for 60041 milliseconds",
        f"[rank{rank}]:[E1 ProcessGroupNCCL.cpp:2268] [PG ID 0 PG GUID 0(default_pg) Rank {rank}]  "
        "failure detected by watchdog at work sequence id: 493 PG status: last enqueued work: 493, "
        "last completed work: 492",
    ]


@pytest.mark.parametrize(
    ("op", "elements_in", "elements_out"),
    [("ALLGATHER", 7, 28), ("_ALLGATHER_BASE", 7, 28), ("REDUCE_SCATTER", 28, 7)],
)
def test_the_missing_members_follow_from_the_element_counts(
    tmp_path: Path, op: str, elements_in: int, elements_out: int
) -> None:
    lines = [line for rank in (1, 2, 3) for line in gathering(rank, elements_in, elements_out, op)]
    found = diagnose_lines(tmp_path, *lines)

    assert found.absent == (0,)
    assert found.main is not None
    assert (found.main.kind, found.culprits) == ("missing_files", ())


def test_element_counts_of_an_all_reduce_show_no_size(tmp_path: Path) -> None:
    assert diagnose_lines(tmp_path, *gathering(1, 8, 8, "ALLREDUCE")).absent == ()


def test_unwritten_element_counts_show_no_size(tmp_path: Path) -> None:
    assert diagnose_lines(tmp_path, *gathering(1, 1, (1 << 64) - 1)).absent == ()


# --- files of other tools ---


def inspector(rank: int, number: int) -> str:
    record = {
        "header": {"id": "0x7f", "rank": rank, "n_ranks": 3, "nnodes": 1},
        "metadata": {"inspector_output_format_version": "v4.0", "hostname": "a", "pid": 1},
        "coll_perf": {"coll": "AllReduce", "coll_sn": number, "coll_msg_size_bytes": 8},
    }
    return json.dumps(record)


def test_nccl_inspector_shows_which_rank_finished_fewer_calls(tmp_path: Path) -> None:
    for rank, last in enumerate((41, 40, 41)):
        lines = [inspector(rank, number) for number in range(1, last + 1)]
        (tmp_path / f"a-pid{rank}.log").write_text("\n".join([*lines, '{"header": {"ra']))
    found = diagnose_hang(read_evidence([str(tmp_path)]))

    assert "NCCL Inspector reports: rank 1 finished AllReduce" in titles(found)
    assert found.culprits == ()


def test_a_page_of_torchs_debug_server_has_the_dumps_of_all_ranks(tmp_path: Path) -> None:
    done = [entry(1, "all_reduce", 10)]
    waits = [*done, entry(2, "all_reduce", 12, "started")]
    parts = [
        f"<h2>Rank {rank}: http://h{rank}:4711</h2>\n<pre>{html.escape(json.dumps(dump(calls)))}</pre>"
        for rank, calls in enumerate((waits, done, waits, waits))
    ]
    (tmp_path / "fr_trace_json.html").write_text(f"<!doctype html><html>{''.join(parts)}</html>")

    assert diagnose_hang(read_evidence([str(tmp_path)])).culprits == (1,)


def test_the_stacks_that_the_debug_server_writes_belong_to_their_ranks(tmp_path: Path) -> None:
    stack = 'Thread 0x7f (most recent call first):\n  File "train.py", line {0} in step\n'
    parts = [f"=== Rank {rank}: http://h:47{rank} ===\n{stack.format(rank + 5)}" for rank in (0, 1)]
    (tmp_path / "stacks_20260101.txt").write_text("\n".join(parts))
    found = diagnose_hang(read_evidence([str(tmp_path)]))

    assert [found.standing.ranks[rank].frame.line for rank in (0, 1)] == [5, 6]  # type: ignore[union-attr]


def test_calls_of_torchcomms_are_numbered_by_group(tmp_path: Path) -> None:
    """Its counter runs over all groups. Rank 2 is in no small group, so its numbers are smaller."""
    world, small = ("0", "world"), ("1", "small")
    groups = {"0": ("world", [0, 1, 2]), "1": ("small", [0, 1])}

    def call(number: int, group: tuple[str, str], state: str = "completed") -> dict[str, object]:
        return entry(number, "all_reduce", 9, state, group, p2p_seq_id=0)

    both = [call(1, small), call(2, world), call(3, small), call(4, world, "started")]
    for rank in (0, 1):
        (tmp_path / f"rank_{rank}").write_text(json.dumps(dump(both, groups)))
    alone = [call(1, world), call(2, world, "started")]
    (tmp_path / "rank_2").write_text(json.dumps(dump(alone, {"0": groups["0"]})))
    found = diagnose_hang(read_evidence([str(tmp_path)]))

    assert found.main is not None
    assert (found.main.kind, found.culprits) == ("communication", ())


def test_an_error_of_gloo_without_a_traceback_is_read(tmp_path: Path) -> None:
    error = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"

    assert "gave up waiting for another rank" in titles(diagnose_lines(tmp_path, error))


@pytest.mark.parametrize(
    "line",
    [
        "for the following ranks to join the `" + "x" * 90_000,
        "Collective " * 9_000 + "sequence number: ",
        "srun: error: " + "a" * 90_000 + ": task ",
        "RuntimeError: [" + "gloo/" * 18_000,
        "Memory cgroup out of memory: Killed process 1 (" + "y" * 90_000,
        "store based barrier on rank: 1, " + "world_size=1 " * 7_000,
    ],
)
def test_a_long_line_takes_no_longer_than_its_length(tmp_path: Path, line: str) -> None:
    started = time.process_time()
    diagnose_lines(tmp_path, *[line] * 5)

    assert time.process_time() - started < 1.5


def debug_server_tables(third_call: str, as_html: bool) -> str:
    """Tables of torch's debug server as ``tabulate`` prints them. ``third_call``: its last cells."""
    expected = "{0, 1, 2, 3}"
    groups = [["id", "desc", "size"], ["07327", "default_pg", "4"]]
    members = [["group_id", "global_rank"], *([["07327", str(rank)] for rank in range(4)])]
    calls = [["id", "group_id", "pass_check", "collective_seq_id", "p2p_seq_id", "record_id"]]
    for number, state, end in ((2, "completed", ""), (3, "scheduled", third_call)):
        identity = ["1", "0", "True", str(number), "0", "1", "0:default_pg", "nccl:all_reduce"]
        calls.append([*identity, "[[8]]", "[[8], [4]]", expected, state, "[{'line': 3}]", end])
    titles = ("Groups", "Memberships", "Collectives", "NCCL Calls")
    parts = []
    for title, rows in zip(titles, (groups, members, calls, [["id"]]), strict=True):
        if as_html:
            cells = [f"<tr><td>{'</td><td>'.join(map(escape, row))}</td></tr>" for row in rows]
            parts += [f"<h2>{title}</h2><table>", *cells, "</table>"]
        else:
            parts += [f"--- {title} ---", *("    ".join(row) for row in rows)]
    return "\n".join(parts)


OTHER_CALL = "{3: Collective(id=2, group_id='0', collective_name='nccl:broadcast', input_sizes=[])}"


@pytest.mark.parametrize("as_html", [False, True], ids=["text", "page"])
@pytest.mark.parametrize(
    ("cells", "finding"),
    [
        ("{3}", "rank 3 did not join all_reduce (call 3 of group 0:default_pg)"),
        (
            OTHER_CALL,
            "rank 3 differs from the other ranks, which call all_reduce (call 3 of group "
            "0:default_pg), and calls broadcast",
        ),
    ],
)
def test_tables_of_torchs_debug_server_name_missing_and_differing_ranks(
    tmp_path: Path, cells: str, finding: str, as_html: bool
) -> None:
    found = diagnose_lines(tmp_path, debug_server_tables(cells, as_html))

    assert finding in titles(found)
    assert found.culprits == ()
    assert found.absent == ()


def test_tables_of_torchs_debug_server_without_a_finding_are_noted(tmp_path: Path) -> None:
    found = diagnose_lines(tmp_path, debug_server_tables("", as_html=False))

    assert found.causes == []
    assert "the tables show no rank that has not joined a call" in found.evidence.notes[0]
