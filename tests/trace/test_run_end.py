"""Where the ranks of a run that did not come to its end stopped, the likely cause first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from distsim.program.code import SourceLocation
from distsim.trace.model import COLUMN_TYPES, NEVER, TEXT_COLUMNS, Trace
from distsim.trace.run_end import StoppedRank, is_partial, stopped_ranks

PLACE = SourceLocation("a.yaml", 3, 5, "send", None)


def call(rank: int, op: str = "barrier", posted: int = 0, returned: int = 0, **more: Any) -> dict:
    return {"rank": rank, "op": op, "posted_ns": posted, "returned_ns": returned, **more}


def trace_of(*rows: dict, world: int = 2, **header: Any) -> Trace:
    """A partial trace; the rows are those of `call`, in the order of ranks and positions."""
    tables: dict[str, list[Any]] = {name: [] for name in TEXT_COLUMNS}
    columns: dict[str, list[int]] = {name: [] for name in COLUMN_TYPES}
    positions: dict[int, int] = {}
    for row in rows:
        position = positions[row["rank"]] = positions.get(row["rank"], -1) + 1
        values: dict[str, Any] = dict.fromkeys(COLUMN_TYPES, NEVER) | {"position": position}
        values |= dict.fromkeys(TEXT_COLUMNS, "") | {"place": PLACE} | row
        for name, value in values.items():
            if name in TEXT_COLUMNS:
                if value not in tables[name]:
                    tables[name].append(value)
                value = tables[name].index(value)
            columns[name].append(value)
    arrays = {name: np.array(values, dtype=COLUMN_TYPES[name]) for name, values in columns.items()}
    return Trace({"world_size": world, "outcome": "hangs", **header}, tables, arrays)


IN_A_BARRIER = call(0, posted=5, returned=NEVER)
NOT_POSTED = call(1, posted=NEVER, returned=NEVER)


@pytest.mark.parametrize(
    ("header", "partial"),
    [
        ({"outcome": "completes"}, False),
        ({"outcome": "wrong-data"}, False),
        ({"outcome": "undefined"}, False),
        ({"outcome": "hangs"}, True),
        ({"outcome": None, "complete": False}, True),
        ({"outcome": None, "complete": True}, False),
        ({"outcome": None}, False),
        ({"outcome": "completes", "cut": {"calls": 3}}, True),
        ({"outcome": "completes", "reason": "interrupted"}, True),
        ({"outcome": "completes", "reason": "under way"}, True),
        ({"outcome": "completes", "reason": "done"}, False),
    ],
    ids=str,
)
def test_a_run_is_partial_if_it_did_not_end_or_its_file_was_cut(
    header: dict[str, Any], partial: bool
) -> None:
    assert is_partial(trace_of(IN_A_BARRIER, **header)) == partial


def test_a_run_that_came_to_its_end_has_no_stopped_ranks() -> None:
    assert stopped_ranks(trace_of(IN_A_BARRIER, outcome="wrong-data", cut={"calls": 1})) == ()


def test_a_rank_is_inside_the_call_that_has_not_returned_or_after_the_last_that_has() -> None:
    trace = trace_of(
        call(0, posted=5, returned=6), IN_A_BARRIER, call(1, posted=3, returned=4), NOT_POSTED
    )

    assert stopped_ranks(trace) == (
        StoppedRank(1, "blocked", 2, False, 3),
        StoppedRank(0, "blocked", 1, True, 5),
    )


def test_a_rank_that_made_all_its_calls_has_not_stopped_unless_the_recording_says_so() -> None:
    rows = (IN_A_BARRIER, call(1, posted=3, returned=4))

    assert [stop.rank for stop in stopped_ranks(trace_of(*rows))] == [0]
    ended = trace_of(*rows, ends=[[1, "raised", 9]], said={"1": "ValueError: x"})
    assert stopped_ranks(ended)[0] == StoppedRank(1, "raised", 1, False, 9, "ValueError: x")


def test_a_rank_that_went_on_is_inside_the_first_request_that_never_finished() -> None:
    requests = [
        call(0, "isend", 1, 2, handle=0, finished_ns=2),
        call(0, "isend", 3, 4, handle=1),
        call(0, "isend", 5, 6, handle=2),
    ]

    assert stopped_ranks(trace_of(*requests, world=1)) == (StoppedRank(0, "blocked", 1, True, 3),)


def test_parts_of_a_batch_are_no_calls_of_their_own() -> None:
    batch = [
        call(0, "batch_isend_irecv", 1, 2, position=0),
        call(0, "isend", 1, 2, position=0, part=0),
        call(0, "irecv", 1, 2, position=0, part=1),
    ]

    assert stopped_ranks(trace_of(*batch, world=1)) == ()
    more = [*batch, call(0, posted=NEVER, returned=NEVER, position=1)]
    assert stopped_ranks(trace_of(*more, world=1)) == (StoppedRank(0, "blocked", 0, False, 1),)


def test_a_rank_without_calls_has_stopped_only_if_the_recording_says_so() -> None:
    assert stopped_ranks(trace_of(IN_A_BARRIER, world=2))[-1].rank == 0
    absent = trace_of(IN_A_BARRIER, ends=[[1, "absent", 0]])
    assert stopped_ranks(absent)[0] == StoppedRank(1, "absent", -1, False, 0)


def test_calls_missing_from_a_cut_file_may_have_been_made() -> None:
    rows = (IN_A_BARRIER, call(1, posted=3, returned=4), NOT_POSTED)

    assert [stop.rank for stop in stopped_ranks(trace_of(*rows))] == [1, 0]
    assert [stop.rank for stop in stopped_ranks(trace_of(*rows, cut={"calls": 3}))] == [0]


def test_the_likely_cause_is_blamed_dead_at_work_on_its_own_or_the_first_to_stop() -> None:
    rows = (
        call(0, posted=1, returned=NEVER),
        call(1, posted=2, returned=NEVER),
        call(2, "compute", posted=7, returned=NEVER),
        call(3, posted=8, returned=NEVER),
        call(4, posted=9, returned=NEVER),
    )

    def order(**header: Any) -> list[int]:
        return [stop.rank for stop in stopped_ranks(trace_of(*rows, world=5, **header))]

    assert order() == [2, 0, 1, 3, 4]
    dead = {"ends": [[3, "killed", 20], [1, "raised", 4]]}
    assert order(**dead) == [3, 2, 0, 1, 4]
    assert order(**dead, culprits=[4]) == [4, 3, 2, 0, 1]
