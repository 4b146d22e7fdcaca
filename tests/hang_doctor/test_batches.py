"""`distsim doctor` on batches: operations that NCCL's group records without a state, and the one
entry after them that has it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distsim.hang_doctor import Diagnosis, diagnose_hang, read_evidence
from distsim.hang_doctor.minimal_scenario import minimal_scenario_text
from distsim.scenario import loads
from distsim.simulation.simulate_scenario import simulate
from tests.support.doctor_dumps import batch, dump, entry, write

THREE = {"0": ("default_pg", [0, 1, 2])}
TWO = {"0": ("default_pg", [0, 1])}


def diagnosed(folder: Path, dumps: dict[int, dict[str, Any]]) -> Diagnosis:
    return diagnose_hang(read_evidence([str(write(folder, dumps))]))


def hop(rank: int, last: int) -> list[str]:
    """What a stage of a pipeline does at once: receive from the one before, send to the next."""
    return [
        *([f"recv {rank}<-{rank - 1}"] if rank else []),
        *([f"send {rank}->{rank + 1}"] if rank < last else []),
    ]


def hops(rank: int, last: int = 3, count: int = 3) -> list[dict[str, Any]]:
    """Batches that are done. Their operations stay `scheduled` for ever, as torch leaves them."""
    return [e for number in range(1, count + 1) for e in batch(hop(rank, last), (0, number), 20)]


def test_no_rank_waits_for_messages_of_completed_batches(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, {rank: dump(hops(rank)) for rank in range(4)})

    assert found.causes == []
    assert all(not stand.waits for stand in found.standing.ranks.values())


def test_after_batches_a_rank_missing_from_a_collective_is_behind(tmp_path: Path) -> None:
    """The counters of a status are those of the last work: 3 for a message, 1 for the collective.
    They compare nothing.
    """
    waits = entry(1, "all_reduce", 30, "scheduled", p2p_seq_id=3)
    found = diagnosed(
        tmp_path, {rank: dump([*hops(rank), *([waits] if rank != 2 else [])]) for rank in range(4)}
    )

    assert (found.main and found.main.kind, found.culprits) == ("behind", (2,))
    assert not any(given.status for given in found.evidence.ranks.values())


def test_a_stage_that_skips_a_batch_is_blamed_by_both_neighbours(
    tmp_path: Path,
) -> None:
    found = diagnosed(
        tmp_path,
        {
            rank: dump(
                [*hops(rank), *(batch(hop(rank, 3), (0, 4), 21, "scheduled") if rank != 1 else [])]
            )
            for rank in range(4)
        },
    )

    assert found.main is not None
    assert (found.main.kind, found.culprits) == ("behind", (1,))
    assert (
        "rank 0 is in send to rank 1, and rank 2 also waits for a message of it" in found.main.title
    )
    assert [what for _, what, _ in found.main.lines] == ["send to rank 1", "recv from rank 1"]


def test_doctor_blames_no_rank_if_one_waits_for_one(tmp_path: Path) -> None:
    """Either sends too much, or the other receives too little."""
    found = diagnosed(
        tmp_path, {0: dump(batch(["send 0->1"], (0, 1), 5, "scheduled"), TWO), 1: dump([], TWO)}
    )

    assert found.main is not None
    assert (found.main.kind, found.culprits) == ("behind", ())


def test_if_every_message_is_matched_the_communication_hangs(tmp_path: Path) -> None:
    found = diagnosed(
        tmp_path,
        {r: dump([*hops(r), *batch(hop(r, 3), (0, 4), 21, "scheduled")]) for r in range(4)},
    )

    assert found.main is not None
    assert (found.main.kind, found.main.grade, found.culprits) == ("communication", "proved", ())
    assert "and 2 more such pairs" in found.main.title


def test_a_batch_that_meets_a_single_message_is_reported(tmp_path: Path) -> None:
    alone = entry(1, "recv 1<-0", 6, "scheduled")
    found = diagnosed(
        tmp_path,
        {0: dump(batch(["send 0->1"], (0, 1), 5, "scheduled"), TWO), 1: dump([alone], TWO)},
    )

    assert found.main is not None
    assert (found.main.kind, found.main.grade, found.culprits) == ("connection", "suspected", ())


def test_single_messages_of_two_ranks_are_ordered_without_timing(
    tmp_path: Path,
) -> None:
    """Torch says `started` only under TORCH_NCCL_ENABLE_TIMING; both send first, and the receives
    queue behind the sends.
    """
    both = {
        rank: dump(
            [
                entry(1, f"send {rank}->{1 - rank}", 5, "scheduled"),
                entry(2, f"recv {rank}<-{1 - rank}", 6, "scheduled"),
            ],
            TWO,
        )
        for rank in range(2)
    }
    found = diagnosed(tmp_path, both)

    assert found.main is not None
    assert found.main.kind == "wait_for_cycle"
    assert set(found.main.ranks) == {0, 1}


def test_a_collective_behind_a_hanging_batch_is_not_the_common_call(tmp_path: Path) -> None:
    """Rank 1 has enqueued the collective, and its device is still at a receive that rank 0 never
    sent.
    """
    found = diagnosed(
        tmp_path,
        {
            0: dump([entry(1, "all_reduce", 9, "scheduled")], TWO),
            1: dump(
                [
                    *batch(["recv 1<-0"], (0, 1), 5, "scheduled"),
                    entry(1, "all_reduce", 9, "scheduled", p2p_seq_id=1),
                ],
                TWO,
            ),
        },
    )

    assert found.main is not None
    assert (found.main.kind, set(found.main.ranks)) == ("wait_for_cycle", {0, 1})
    assert "messages and collectives in different orders" in found.main.title


def test_a_message_finished_on_one_side_does_not_shift_the_others(tmp_path: Path) -> None:
    """NCCL ends a small send before its receive: the second send of rank 0 meets the second
    receive, which is not there.
    """
    found = diagnosed(
        tmp_path,
        {
            0: dump(
                [entry(1, "send 0->1", 5), entry(2, "send 0->1", 6, "scheduled", size=99)], TWO
            ),
            1: dump([entry(1, "recv 1<-0", 5, "scheduled")], TWO),
        },
    )

    assert found.main is not None
    assert (found.main.kind, found.culprits) == (
        "communication",
        (),
    )  # of the first; what the second needs can't come before


def test_collectives_of_a_batch_are_one_call_with_the_state_of_the_batch(tmp_path: Path) -> None:
    first = batch(["all_reduce", "reduce_scatter_tensor"], (1, 0), 5)
    found = diagnosed(
        tmp_path,
        {
            r: dump(
                [*first, *(batch(["all_reduce"] * 2, (2, 0), 6, "scheduled") if r != 3 else [])]
            )
            for r in range(4)
        },
    )

    assert (found.main and found.main.kind, found.culprits) == ("behind", (3,))
    assert found.evidence.disputes == []
    assert found.common == [
        "that ranks 0-3 all finished: all_reduce + reduce_scatter_tensor (default group, call 1)"
    ]


def test_a_rank_with_different_sizes_in_a_batch_of_collectives_is_named_with_its_sizes(
    tmp_path: Path,
) -> None:
    found = diagnosed(
        tmp_path,
        {
            r: dump(batch(["all_reduce"] * 2, (1, 0), 6, "scheduled", size=9 if r == 3 else 8))
            for r in range(4)
        },
    )

    assert (found.main and found.main.kind, found.culprits) == ("mismatch", (3,))


@pytest.mark.parametrize("missing", [(), (2,)], ids=["all there", "one behind"])
def test_before_torch_2_6_message_batches_used_sequence_numbers_of_collectives(
    tmp_path: Path, missing: tuple[int, ...]
) -> None:
    """The middle stage makes two batches, its neighbours one: its second collective has number 4,
    theirs 3, and they meet.
    """
    first = entry(1, "all_reduce", 3)
    batches = {0: [["send 0->1"]], 1: [["recv 1<-0"], ["send 1->2"]], 2: [["recv 2<-1"]]}
    dumps = {}
    for rank, ops in batches.items():
        made = [e for number, op in enumerate(ops) for e in batch(op, (2 + number, 0), 4)]
        last = [] if rank in missing else [entry(2 + len(ops), "all_reduce", 9, "scheduled")]
        dumps[rank] = dump([first, *made, *last], THREE, "2.4")
    found = diagnosed(tmp_path, dumps)

    assert found.main is not None
    assert (found.main.kind, found.culprits) == (
        ("behind", missing) if missing else ("communication", ())
    )
    assert "call 2)" in found.main.title


def test_doctor_blames_no_rank_by_number_if_such_batches_are_partly_lost(tmp_path: Path) -> None:
    lapped = [
        e | {"record_id": 4000}
        for e in [*batch(["send 0->1"], (90, 0), 4), *batch(["send 0->1"], (91, 0), 4)]
    ]
    waits = entry(92, "all_reduce", 9, "scheduled", record_id=4004)
    found = diagnosed(
        tmp_path,
        {
            0: dump([*lapped, waits], THREE, "2.4"),
            1: dump([*lapped, waits], THREE, "2.4"),
            2: dump([entry(50, "all_reduce", 8, record_id=3000)], THREE, "2.4"),
        },
    )

    assert found.culprits == ()
    assert any("batches of messages share the numbers" in note for note in found.evidence.notes)


def test_the_end_of_a_batch_with_lost_messages_is_no_collective(tmp_path: Path) -> None:
    """The ring dropped the messages and kept the entry after them, which has the number of an older
    collective.
    """
    end = batch(["send 0->1"], (7, 3), 4)[-1] | {"record_id": 4000}
    made = [end, entry(8, "all_reduce", 9, "scheduled", p2p_seq_id=3, record_id=4001)]
    found = diagnosed(tmp_path, {rank: dump(made, TWO) for rank in range(2)})

    assert found.main is not None
    assert found.main.kind == "communication"
    assert [call.number for call in found.evidence.ranks[0].calls] == [8]


@pytest.mark.parametrize(
    "last", [["all_reduce"] * 2, ["all_reduce", "all_gather"]], ids=["alike", "of two kinds"]
)
def test_the_minimal_scenario_of_a_batch_hangs_under_the_backend_of_the_job(
    tmp_path: Path, last: list[str]
) -> None:
    first = batch(["all_reduce"], (1, 0), 5)
    found = diagnosed(
        tmp_path,
        {r: dump([*first, *(batch(last, (2, 0), 6, "scheduled") if r else [])]) for r in range(4)},
    )
    scenario = loads(minimal_scenario_text(found))

    assert scenario.backend == "nccl"
    assert simulate(scenario).outcome == "hangs"
