"""`distsim doctor` on dumps of NCCL: every class of fault, told from the records alone, by what is
equal in all processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distsim.hang_doctor import Diagnosis, diagnose_hang, read_evidence
from distsim.hang_doctor.model.evidence_records import EvidenceCall
from tests.support.doctor_dumps import dump, entry, write

PAIR = ("1", "tp")
OTHER = ("2", "dp")


def diagnosed(folder: Path, dumps: dict[int, dict[str, Any]], as_json: bool = False) -> Diagnosis:
    return diagnose_hang(read_evidence([str(write(folder, dumps, as_json))]))


def lines(found: Diagnosis) -> set[int]:
    assert found.main is not None
    return {frame.line for _, _, frame in found.main.lines if frame is not None}


@pytest.mark.parametrize("as_json", [False, True], ids=["pickle", "json"])
def test_a_rank_whose_record_ends_one_call_earlier_is_behind(tmp_path: Path, as_json: bool) -> None:
    done = [entry(1, "all_reduce", 10)]
    waiting = [*done, entry(2, "all_reduce", 12, "started")]

    found = diagnosed(
        tmp_path, {0: dump(waiting), 1: dump(waiting), 2: dump(done), 3: dump(waiting)}, as_json
    )

    assert (found.main and found.main.kind, found.culprits) == ("behind", (2,))
    assert 12 in lines(found)
    assert found.common == ["that ranks 0-3 all finished: all_reduce (default group, call 1)"]


def test_a_rank_without_a_file_is_never_blamed(tmp_path: Path) -> None:
    waiting = [entry(1, "all_reduce"), entry(2, "all_reduce", state="started")]

    found = diagnosed(tmp_path, {0: dump(waiting), 1: dump(waiting), 3: dump(waiting)})

    assert found.main is not None
    assert found.main.kind == "missing_files"
    assert "no file was given for rank 2" in found.main.title
    assert (found.culprits, found.absent) == ((), (2,))
    assert any("rank 2" in text for text in found.collect)


def test_if_all_members_are_in_one_matching_call_the_communication_hangs(tmp_path: Path) -> None:
    waiting = [entry(1, "all_reduce", state="started")]

    found = diagnosed(tmp_path, {rank: dump(waiting) for rank in range(4)})

    assert found.main is not None
    assert found.main.kind == "communication"
    assert found.culprits == ()


@pytest.mark.parametrize(
    ("what", "odd"),
    [("kind", {"op": "broadcast"}), ("size", {"size": 16}), ("dtype", {"dtype": "Double"})],
    ids=["kind", "size", "dtype"],
)
def test_the_rank_whose_call_differs_is_named_with_both_lines(
    tmp_path: Path, what: str, odd: dict[str, Any]
) -> None:
    def given(line: int, op: str = "all_reduce", **more: Any) -> dict[str, Any]:
        return dump([entry(1, "all_reduce", 10), entry(2, op, line, "started", **more)])

    found = diagnosed(tmp_path, {0: given(12), 1: given(12), 2: given(20, **odd), 3: given(12)})

    assert found.main is not None
    assert found.main.kind == "mismatch"
    assert found.culprits == (2,)
    assert lines(found) == {12, 20}


def test_doctor_blames_neither_of_two_ranks_that_differ(tmp_path: Path) -> None:
    groups = {"0": ("default_pg", [0, 1])}

    found = diagnosed(
        tmp_path,
        {
            0: dump([entry(1, "all_reduce", 10, "started")], groups),
            1: dump([entry(1, "broadcast", 20, "started")], groups),
        },
    )

    assert found.main is not None
    assert found.main.kind == "mismatch"
    assert (found.culprits, found.main.grade, lines(found)) == ((), "proved", {10, 20})


def test_a_surplus_call_among_equal_calls_is_found_by_its_line(
    tmp_path: Path,
) -> None:
    usual = [entry(n, "all_reduce", line) for n, line in enumerate((10, 12, 10, 12), 1)]
    more = [entry(n, "all_reduce", line) for n, line in enumerate((10, 15, 12, 10), 1)] + [
        entry(5, "all_reduce", 12, "started")
    ]

    found = diagnosed(tmp_path, {0: dump(usual), 1: dump(more), 2: dump(usual), 3: dump(usual)})

    assert found.main is not None
    assert found.main.kind == "diverged"
    assert (found.culprits, found.main.number) == ((1,), 2)
    assert 15 in lines(found)


def test_different_lines_with_equal_calls_are_no_fault(tmp_path: Path) -> None:
    def calls(line: int) -> list[dict[str, Any]]:
        return [entry(1, "all_reduce", 10), entry(2, "broadcast", line), entry(3, "all_reduce", 30)]

    late = [*calls(21), entry(4, "all_reduce", 31, "started")]
    found = diagnosed(
        tmp_path,
        {
            0: dump([*calls(20), entry(4, "all_reduce", 31, "started")]),
            1: dump(late),
            2: dump(late),
            3: dump(calls(21)),
        },
    )

    assert found.main is not None
    assert found.main.kind == "behind"
    assert found.culprits == (3,)


def test_groups_entered_in_different_orders_are_a_cycle_whatever_their_local_numbers(
    tmp_path: Path,
) -> None:
    """Local numbers (pg_id) differ between the ranks; the names do not."""
    groups = {"0": ("default_pg", [0, 1]), "1": ("tp", [0, 1]), "2": ("dp", [0, 1])}
    a = dump(
        [
            entry(1, "all_reduce", 10, "started", PAIR),
            entry(1, "all_reduce", 11, "scheduled", OTHER),
        ],
        groups,
    )
    b = dump(
        [
            entry(1, "all_reduce", 21, "started", OTHER, pg_id=1),
            entry(1, "all_reduce", 20, "scheduled", PAIR, pg_id=2),
        ],
        groups,
    )

    found = diagnosed(tmp_path, {0: a, 1: b})

    assert found.main is not None
    assert found.main.kind == "wait_for_cycle"
    assert lines(found) == {10, 21}
    assert "different orders" in found.main.title


def test_messages_are_matched_by_peer_and_order(tmp_path: Path) -> None:
    """Both send first, unbatched: the sends are on the device, the receives queue behind them."""
    groups = {"0": ("default_pg", [0, 1])}
    a = dump([entry(1, "send 0->1", 10, "started"), entry(2, "recv 0<-1", 11, "scheduled")], groups)
    b = dump([entry(1, "send 1->0", 20, "started"), entry(2, "recv 1<-0", 21, "scheduled")], groups)

    found = diagnosed(tmp_path, {0: a, 1: b})

    assert found.main is not None
    assert found.main.kind == "wait_for_cycle"
    assert lines(found) == {10, 20}


def test_an_unanswered_message_names_the_peer_and_its_position(tmp_path: Path) -> None:
    a = dump([entry(1, "all_reduce", 9), entry(1, "recv 0<-2", 10, "started")])
    rest = dump([entry(1, "all_reduce", 9)])

    found = diagnosed(tmp_path, {0: a, 1: rest, 2: rest, 3: rest})

    assert found.main is not None
    assert found.main.title.startswith("rank 2 does not make the matching call")


def test_a_send_and_a_receive_of_different_sizes_are_reported(tmp_path: Path) -> None:
    groups = {"0": ("default_pg", [0, 1])}
    a = dump([entry(1, "send 0->1", 10, "started", size=8)], groups)
    b = dump([entry(1, "recv 1<-0", 20, "started", size=16)], groups)

    found = diagnosed(tmp_path, {0: a, 1: b})

    assert found.main is not None
    assert found.main.title.startswith(
        "a send of rank 0 does not match its receive on rank 1: 8 Float are sent, 16"
    )


def test_ranks_of_messages_in_a_group_are_group_ranks(tmp_path: Path) -> None:
    groups = {"0": ("default_pg", [0, 1, 2, 3]), "1": ("tp", [1, 3])}
    found = diagnosed(
        tmp_path,
        {
            1: dump([entry(1, "send 0->1", 10, "started", PAIR)], groups),
            3: dump([entry(1, "all_reduce")], groups),
        },
    )

    assert [w.call.peer for s in found.standing.ranks.values() for w in s.waits] == [3]


def test_as_many_ranks_behind_as_waiting_blames_no_rank(tmp_path: Path) -> None:
    done = [entry(1, "all_reduce")]
    waiting = [*done, entry(2, "all_reduce", state="started")]

    found = diagnosed(tmp_path, {0: dump(waiting), 1: dump(done), 2: dump(done), 3: dump(done)})

    assert found.main is not None
    assert found.main.kind == "behind"
    assert found.culprits == ()
    assert any("one too many" in text for text in found.main.details)


def test_a_full_ring_buffer_without_records_of_a_group_proves_nothing_about_it(
    tmp_path: Path,
) -> None:
    groups = {"0": ("default_pg", [0, 1]), "1": ("tp", [0, 1])}
    waits = dump([entry(7, "all_reduce", state="started", group=PAIR)], groups)
    lapped = dump([entry(900, "all_reduce", record_id=4000)], groups)

    found = diagnosed(tmp_path, {0: waits, 1: lapped})

    assert found.culprits == ()
    assert found.main is not None
    assert found.main.kind == "missing_files"


def test_two_contradicting_files_are_reported_and_blame_no_rank(
    tmp_path: Path,
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    write(
        tmp_path / "a",
        {
            0: dump([entry(1, "all_reduce", state="started")]),
            1: dump([entry(1, "all_reduce", state="started")]),
        },
    )
    write(tmp_path / "b", {0: dump([entry(1, "broadcast", state="started")])})

    found = diagnose_hang(read_evidence([str(tmp_path)]))

    assert len(found.evidence.disputes) == 1
    assert "it is unknown which file is right" in found.evidence.disputes[0]
    assert found.culprits == ()


@pytest.mark.parametrize("version", ["2.0", "2.1", "2.4", "2.10", "3.1"])
def test_old_and_future_versions_are_read(tmp_path: Path, version: str) -> None:
    """Before 2.2 there was `seq_id` alone; unknown keys and unknown back ends do not matter."""
    old = entry(
        1,
        "all_reduce",
        state="started",
        profiling_name="mccl:all_reduce",
        seq_id=1,
        something_new={"a": 1},
    )
    if version in ("2.0", "2.1"):
        del old["collective_seq_id"]

    found = diagnosed(tmp_path, {rank: dump([dict(old)], version=version) for rank in range(4)})

    assert found.main is not None
    assert found.main.kind == "communication"


def test_a_device_that_waits_in_one_group_is_not_blamed_for_its_queued_call(
    tmp_path: Path,
) -> None:
    """Rank 1 has enqueued the world's call; its device stands in the pair's, in which rank 2 is
    not: rank 2 is the end of the chain.
    """
    groups = {"0": ("default_pg", [0, 1, 2]), "1": ("tp", [1, 2])}
    found = diagnosed(
        tmp_path,
        {
            0: dump([entry(1, "all_reduce", 10, "started")], groups),
            1: dump(
                [
                    entry(1, "all_reduce", 20, "started", PAIR),
                    entry(1, "all_reduce", 21, "scheduled"),
                ],
                groups,
            ),
            2: dump([], {**groups}),
        },
    )

    assert found.main is not None
    assert found.main.kind == "behind"
    assert found.main.ranks == (2,)


class Counted(list[EvidenceCall]):
    """Calls of a rank that count how many of them were looked at."""

    looked = 0

    def __iter__(self) -> Iterator[EvidenceCall]:
        Counted.looked += len(self)
        return super().__iter__()


def looked_at(folder: Path, ranks: int) -> float:
    """How often the diagnosis looks at each call, on average."""
    members = {"0": ("default_pg", list(range(ranks)))}
    done = [entry(n, "all_reduce", 10 + n % 7, record_id=n - 1) for n in range(1, 11)]
    waiting = [*done, entry(11, "all_reduce", 9, "scheduled", record_id=10)]
    folder.mkdir()
    write(folder, {rank: dump(done if rank == 3 else waiting, members) for rank in range(ranks)})
    evidence = read_evidence([str(folder)])
    for given in evidence.ranks.values():
        given.calls = Counted(given.calls)
    Counted.looked = 0
    assert diagnose_hang(evidence).culprits == (3,)
    return Counted.looked / (11 * ranks)


def test_the_diagnosis_reads_each_call_equally_often_for_any_number_of_ranks(
    tmp_path: Path,
) -> None:
    """So a thousand ranks take a hundred times as long as ten, not ten thousand times."""
    assert looked_at(tmp_path / "many", 60) <= looked_at(tmp_path / "few", 10) + 0.5


def test_calls_with_equal_stacks_share_them(tmp_path: Path) -> None:
    """A ring holds 2000 calls of a rank, each with twenty frames, of a handful of lines."""
    found = diagnosed(
        tmp_path,
        {rank: dump([entry(n, "all_reduce", 10) for n in range(1, 5)]) for rank in range(4)},
    )

    assert (
        len({id(call.frames) for given in found.evidence.ranks.values() for call in given.calls})
        == 1
    )


@pytest.mark.parametrize(
    "off",
    [{"pg_config": {}, "pg_status": {}}, {"pg_status": {"0": {"last_enqueued_collective": 7}}}],
    ids=["switched off", "asked for no calls"],
)
def test_an_empty_dump_of_a_disabled_recorder_blames_no_rank(
    tmp_path: Path, off: dict[str, Any]
) -> None:
    waiting = dump([entry(1, "all_reduce"), entry(2, "all_reduce", state="scheduled")])
    found = diagnosed(tmp_path, {0: waiting, 1: waiting, 2: dump([]) | off, 3: waiting})

    assert found.culprits == ()
    assert any("the recorder was off" in file.problem for file in found.evidence.files)


def test_a_cause_on_a_rank_with_disputed_files_is_only_suspected(tmp_path: Path) -> None:
    """The cause stays in the report, but it proves nothing and blames no rank."""
    done = [entry(1, "all_reduce", 10)]
    waiting = [*done, entry(2, "all_reduce", 12, "started")]
    write(tmp_path, {0: dump(waiting), 1: dump(waiting), 2: dump(done), 3: dump(waiting)})
    evidence = read_evidence([str(tmp_path)])
    evidence.disputed_ranks.add(2)

    (cause,) = diagnose_hang(evidence).causes

    assert (cause.kind, cause.grade, cause.culprits) == ("behind", "suspected", ())
