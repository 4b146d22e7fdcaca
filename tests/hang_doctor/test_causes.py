"""`distsim doctor`: the causes reported for several faults, and the notes added to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from distsim.hang_doctor import diagnose_hang, read_evidence
from distsim.hang_doctor.model.evidence import Evidence
from distsim.output.text.diagnosis import doctor_text
from tests.hang_doctor.test_logs import diagnose_lines, watchdog
from tests.hang_doctor.test_nccl_dumps import diagnosed
from tests.support.doctor_dumps import dump, entry


def folder(path: Path) -> Path:
    path.mkdir()
    return path


def raised(rank: int, error: str, line: int) -> list[str]:
    """A traceback in a rank's log."""
    text = [
        "Traceback (most recent call last):",
        f'  File "/job/train.py", line {line}, in step',
        "    loss = model(batch)",
        error,
    ]
    return [f"[rank{rank}]: {one}" for one in text]


@pytest.mark.parametrize("other", ["ValueError: empty batch", "KeyError: 'x'"])
def test_equal_failures_are_one_cause_that_blames_all_ranks_that_failed(
    tmp_path: Path, other: str
) -> None:
    """No order is known between them, so nobody is accused where they differ; each has the line and
    the class of its error.
    """
    found = diagnose_lines(
        tmp_path, *raised(1, "ValueError: empty batch", 33), *raised(3, other, 20)
    )
    alike = other.startswith("ValueError")
    told = [
        (cause.kind, cause.culprits, [(ranks, what, f.line) for ranks, what, f in cause.lines if f])
        for cause in found.causes
    ]
    first, second = ((1,), "ValueError", 33), ((3,), other.partition(":")[0], 20)

    if alike:
        assert told == [("crash", (1, 3), [first, second])]
        assert (
            found.causes[0].title
            == "ranks 1 and 3 raised ValueError: empty batch before the others hung"
        )
    else:
        assert told == [("crash", (), [first, second])]


# --- mismatched calls ---
def test_size_differences_in_completed_calls_are_ignored(tmp_path: Path) -> None:
    """The report blames the rank that has not reached the next call and omits the completed call.
    If that call has not completed, its size difference is reported.
    """
    same, other = (
        entry(1, "all_gather", 10, "completed", input_sizes=[[8]]),
        entry(1, "all_gather", 10, "completed", input_sizes=[[4]]),
    )
    late = entry(2, "all_reduce", 20, "started")
    found = diagnosed(tmp_path, {0: dump([same, late]), 1: dump([other, late]), 2: dump([same])})

    assert [(cause.kind, cause.culprits) for cause in found.causes] == [("behind", (2,))]


def test_divergence_of_two_ranks_is_reported_once_and_blames_neither(tmp_path: Path) -> None:
    """One makes a call that the other skips; two lists of calls do not show which is wrong."""
    usual = [entry(n, "all_reduce", line) for n, line in enumerate((10, 12, 10, 12), 1)]
    more = [entry(n, "all_reduce", line) for n, line in enumerate((10, 15, 12, 10), 1)] + [
        entry(5, "all_reduce", 12, "started")
    ]
    groups = {"0": ("default_pg", [0, 1])}
    found = diagnosed(tmp_path, {0: dump(usual, groups), 1: dump(more, groups)})

    assert [
        (cause.kind, cause.culprits, cause.ranks)
        for cause in found.causes
        if cause.kind == "diverged"
    ] == [("diverged", (), (0, 1))]
    assert found.culprits == ()


def test_a_call_skipped_by_one_rank_is_reported_with_its_line_and_its_callers(
    tmp_path: Path,
) -> None:
    usual = [entry(n, "all_reduce", line) for n, line in enumerate((10, 15, 12, 10), 1)] + [
        entry(5, "all_reduce", 12, "started")
    ]
    less = [entry(n, "all_reduce", line) for n, line in enumerate((10, 12, 10, 12), 1)]
    found = diagnosed(tmp_path, {0: dump(usual), 1: dump(less), 2: dump(usual), 3: dump(usual)})

    assert found.main is not None
    assert (found.main.kind, found.culprits, found.main.number) == ("diverged", (1,), 2)
    assert found.main.title.startswith(
        "rank 1 skips a call that the others make: all_reduce at /job/train.py:15"
    )
    assert [(ranks, frame.line) for ranks, _, frame in found.main.lines if frame][:1] == [
        ((0, 2, 3), 15)
    ]


# --- notes in addition to the cause ---
def test_the_last_call_finished_by_all_is_that_of_the_slowest(tmp_path: Path) -> None:
    """Only ranks with records count. If one of them has finished no call, there is none."""
    done = [entry(1, "all_reduce", 10), entry(2, "broadcast", 20)]
    late = [entry(1, "all_reduce", 10), entry(2, "broadcast", 20, "started")]
    found = diagnosed(
        folder(tmp_path / "a"),
        {0: dump([*done, entry(3, "all_reduce", 30, "started")]), 1: dump(late), 2: dump(late)},
    )
    fresh = diagnosed(
        folder(tmp_path / "b"),
        {rank: dump([entry(1, "all_reduce", 10, "started")]) for rank in range(3)},
    )

    assert len(found.common) == len(fresh.common) == 1
    assert found.common[0].startswith("that ranks 0-2 all finished: all_reduce")
    assert fresh.common == ["that ranks 0-2 all finished: none on the default group"]


def test_groups_named_by_guid_in_log_lines_are_not_requested_again(tmp_path: Path) -> None:
    """Lines with only local group numbers prove nothing, so the report asks for newer lines."""
    words = "use torch 2.5 or newer"
    named = diagnose_lines(folder(tmp_path / "named"), *watchdog())
    local = diagnose_lines(
        folder(tmp_path / "local"),
        *(line.replace(" PG GUID 0(default_pg)", "") for line in watchdog()),
    )

    assert not any(line.startswith(words) for line in named.collect)
    assert any(line.startswith(words) for line in local.collect)


def test_members_named_in_a_later_file_belong_to_the_group() -> None:
    """Files without members change nothing; files that contradict each other are reported."""
    evidence = Evidence()
    keys = {evidence.add_group("7", members=members) for members in (None, (0, 1), None, (1, 0))}

    assert keys == {"7"}
    assert (evidence.groups["7"].members, evidence.groups["7"].sure, evidence.disputes) == (
        (0, 1),
        True,
        [],
    )
    evidence.add_group("7", members=(0, 2))
    assert (evidence.groups["7"].members, evidence.groups["7"].sure, len(evidence.disputes)) == (
        (0, 1),
        False,
        1,
    )


def test_a_finding_that_two_files_repeat_is_one_cause(tmp_path: Path) -> None:
    finding = [
        "Not all ranks joining collective, sequence number: 12",
        "group info: 0:default_pg",
        "collective: nccl:all_reduce",
        "missing ranks: {3}",
        "",
    ]
    for name in ("a.log", "b.log"):
        (tmp_path / name).write_text("\n".join(finding))

    found = diagnose_hang(read_evidence([str(tmp_path)]))

    assert len(found.evidence.tool_reports) == 2
    assert [cause.ranks for cause in found.causes] == [(3,)]


def test_the_last_call_that_matched_is_the_one_before_calls_are_shifted(tmp_path: Path) -> None:
    """Rank 1 repeats line 20. Its call 2 and that of rank 0 are both an all_reduce."""
    lines_of = {0: [20, 21, 22], 1: [20, 20, 21]}
    calls = {
        rank: [
            entry(number, "all_reduce", line, "completed" if number < 3 else "started")
            for number, line in enumerate(lines, 1)
        ]
        for rank, lines in lines_of.items()
    }
    groups = {"0": ("default_pg", [0, 1])}

    found = diagnosed(tmp_path, {rank: dump(of_rank, groups) for rank, of_rank in calls.items()})

    assert found.main is not None
    assert (found.main.kind, found.main.number) == ("diverged", 2)
    assert found.common == ["that matched on ranks 0 and 1: all_reduce (default group, call 1)"]


STACK = """Process {pid}: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread {pid} (idle): "MainThread"
{frames}
"""
IN_ALL_REDUCE = (
    "    all_reduce (torch/distributed/distributed_c10d.py:3252)\n    train (train.py:30)"
)


@pytest.mark.parametrize(
    ("frames", "title"),
    [
        (
            "    _shutdown (threading.py:1590)",
            "ranks 0 and 1 are in all_reduce, rank 2 waits at the end of its program",
        ),
        (
            "",
            "ranks 0 and 1 are in all_reduce at train.py:30; no file shows the line of rank 2",
        ),
    ],
    ids=["end of the program", "no stack"],
)
def test_stacks_of_ranks_in_a_call_name_the_rank_that_is_not(
    tmp_path: Path, frames: str, title: str
) -> None:
    for rank in range(2):
        text = STACK.format(pid=10 + rank, frames=IN_ALL_REDUCE)
        (tmp_path / f"pyspy_rank_{rank}.txt").write_text(text)
    if frames:
        (tmp_path / "pyspy_rank_2.txt").write_text(STACK.format(pid=12, frames=frames))
    evidence = read_evidence([str(tmp_path)])
    evidence.records_of(2, "job.log")

    found = diagnose_hang(evidence)

    assert found.main is not None
    assert found.main.title == title


def test_a_rank_that_leads_to_a_wait_for_cycle_is_not_part_of_another_one(tmp_path: Path) -> None:
    """Rank 1 omits a send to rank 2, so ranks 2 and 3 never arrive at the all_reduce."""
    arrived = dump([entry(1, "all_reduce", 30, "started")])
    dumps = {0: arrived, 1: arrived}
    dumps[2] = dump([entry(1, "recv 2<-1", 20, "started")])
    dumps[3] = dump([entry(1, "recv 3<-2", 20, "started")])

    found = diagnosed(tmp_path, dumps)

    cycles = [cause for cause in found.causes if cause.kind == "wait_for_cycle"]
    assert [cause.ranks for cause in cycles] == [(1, 2)]
    assert "or one of them omits a message" in cycles[0].title


def test_a_rank_with_a_stack_but_no_dump_is_not_called_a_rank_without_files(
    tmp_path: Path,
) -> None:
    text = STACK.format(pid=9, frames="    train (train.py:84)")
    (tmp_path / "pyspy_rank_3.txt").write_text(text)

    found = diagnosed(
        tmp_path, {rank: dump([entry(1, "all_reduce", 30, "started")]) for rank in range(3)}
    )

    report = doctor_text(found, width=200)
    assert "no file was given" not in report
    assert "no files given" not in report
    assert "waiting for rank 3 (calls not recorded)" in report


def test_ranks_behind_a_mismatch_are_its_consequence_and_no_cause(tmp_path: Path) -> None:
    """Call 2 differs on rank 3. Rank 2 has not made it yet, which is no second cause."""
    done = [entry(1, "all_reduce", 10)]
    waiting = dump([*done, entry(2, "all_reduce", 11, "started")])
    differs = dump([*done, entry(2, "broadcast", 12, "started")])

    found = diagnosed(tmp_path, {0: waiting, 1: waiting, 2: dump(done), 3: differs})

    assert [cause.kind for cause in found.causes] == ["mismatch"]


def test_two_separate_wait_for_cycles_are_two_causes(tmp_path: Path) -> None:
    pairs = {0: 1, 1: 0, 2: 3, 3: 2}
    dumps = {
        rank: dump([entry(1, f"recv {rank}<-{peer}", 20, "started")])
        for rank, peer in pairs.items()
    }

    found = diagnosed(tmp_path, dumps)

    assert [cause.ranks for cause in found.causes] == [(0, 1), (2, 3)]


def test_stacks_of_one_rank_at_different_lines_are_of_different_moments(tmp_path: Path) -> None:
    in_host_code = "    train (train.py:40)"
    moments = {"rank_0_early.txt": IN_ALL_REDUCE, "rank_0_late.txt": in_host_code}
    for name, frames in {**moments, "rank_1.txt": IN_ALL_REDUCE}.items():
        (tmp_path / name).write_text(STACK.format(pid=9, frames=frames))

    found = diagnose_hang(read_evidence([str(tmp_path)]))

    assert found.main is not None
    assert any("the stacks of rank 0 differ" in detail for detail in found.main.details)


def test_a_scenario_is_to_be_checked_not_to_be_recorded(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("name: a\nworld: 2\nprogram:\n- barrier: {}\n")

    found = diagnose_hang(read_evidence([str(tmp_path / "a.yaml")]))

    assert found.collect == ["to find out whether a scenario hangs, run `distsim check FILE`"]
