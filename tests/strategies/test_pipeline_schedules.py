"""Pipeline schedules as data: each micro-batch passes every stage once, in order, and the text form
is PyTorch's.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from distsim.scenario.strategies.pipeline.actions import (
    PipelineSchedule,
    compute_actions,
    has_messages,
    parse_action,
    parse_rows,
    schedule_from_rows,
)
from distsim.scenario.strategies.pipeline.builtin_schedules import (
    SCHEDULE_BUILDERS,
    loop_placement,
    micro_batches_per_round,
    v_placement,
)
from distsim.scenario.strategies.pipeline.rank_calls import calls_of_rank
from distsim.scenario.strategies.pipeline.send_recv import with_send_recv

SAMPLES = Path(__file__).resolve().parents[1] / "data" / "pp-schedules"


def layouts():
    for name in SCHEDULE_BUILDERS:
        for p in range(2, 9):
            for m in (1, 2, p, p + 1, 2 * p, 3 * p):
                chunks = (
                    (1,)
                    if name in ("gpipe", "1f1b")
                    else (2,)
                    if name in ("zbv", "dualpipe_v", "dualpipe")
                    else (1, 2, 3)
                )
                least = {"1f1b": p, "dualpipe_v": 2 * p, "dualpipe": 2 * p}.get(name, 1)
                if name == "dualpipe" and (p % 2 or m % 2):
                    continue
                if m >= least and (
                    name not in ("interleaved_1f1b", "zb1p") or micro_batches_per_round(p, m)
                ):
                    yield from ((name, p, m, v) for v in chunks)


def played(schedule: PipelineSchedule) -> list[tuple[int, str, int]]:
    """All computations in an order in which every rank follows its row and no input is missing;
    asserts that there is one.
    """
    rows = [list(compute_actions(row)) for row in schedule.rows]
    done: dict[tuple[int, str, int], int] = {}
    while any(rows):
        before = len(done)
        for row in rows:
            while row:
                stage, kind, m, _ = row[0]
                start, end = schedule.adjacent_stage(stage, -1), schedule.adjacent_stage(stage, 1)
                before_f = start is None or (start, "F", m) in done
                before_b = (stage, "F", m) in done and (
                    end is None or {(end, "B", m), (end, "I", m)} & done.keys()
                )
                if not {"F": before_f, "B": before_b, "I": before_b, "W": (stage, "I", m) in done}[
                    kind
                ]:
                    break
                assert (stage, kind, m) not in done
                done[stage, kind, m] = len(done)
                row.pop(0)
        assert len(done) > before, f"stuck before {[str(row[0]) for row in rows if row]}"
    return list(done)


@pytest.mark.parametrize("name", SCHEDULE_BUILDERS)
def test_every_micro_batch_passes_every_stage_once_forward_in_order_and_backward_in_reverse(name):
    for _, p, m, v in (layout for layout in layouts() if layout[0] == name):
        schedule = SCHEDULE_BUILDERS[name](p, m, v)
        order = {action: k for k, action in enumerate(played(schedule))}

        for stage in range(schedule.stages):
            for batch in range(schedule.micro_batches):
                whole, halves = (
                    (stage, "B", batch) in order,
                    ((stage, "I", batch) in order, (stage, "W", batch) in order),
                )
                assert (stage, "F", batch) in order
                assert halves == (not whole, not whole)
        assert schedule.directions * schedule.micro_batches == m
        assert len(order) == schedule.length * m * 2 + sum(kind == "W" for _, kind, _ in order)
        assert sorted(Counter(schedule.rank_of).values()) == [schedule.stages // p] * p


@pytest.mark.parametrize("name", SCHEDULE_BUILDERS)
def test_every_send_has_its_receive_and_both_sides_have_the_same_order(name):
    for _, p, m, v in (layout for layout in layouts() if layout[0] == name):
        schedule = with_send_recv(SCHEDULE_BUILDERS[name](p, m, v))
        lanes: dict[tuple[int, int], tuple[list[object], list[object]]] = {}
        for rank in range(p):
            for call in calls_of_rank(schedule, rank):
                for message in call.messages if call.what in ("start", "batch") else ():
                    peer = schedule.rank_of[message.peer_stage]
                    lane = lanes.setdefault(
                        (rank, peer) if message.sends else (peer, rank), ([], [])
                    )
                    stage = message.stage if message.sends else message.peer_stage
                    lane[0 if message.sends else 1].append(
                        (message.way, stage, message.micro_batch)
                    )

        assert lanes
        assert all(sent == received for sent, received in lanes.values())


@pytest.mark.parametrize("name", SCHEDULE_BUILDERS)
def test_every_started_message_is_waited_for_once(name):
    for _, p, m, v in (layout for layout in layouts() if layout[0] == name):
        schedule = with_send_recv(SCHEDULE_BUILDERS[name](p, m, v))
        for rank in range(p):
            calls = calls_of_rank(schedule, rank)
            started = Counter(
                message for call in calls if call.what == "start" for message in call.messages
            )
            waited = Counter(
                message for call in calls if call.what == "wait" for message in call.messages
            )

            assert started == waited
            assert set(started.values()) <= {1}


def test_1f1b_holds_at_most_as_many_micro_batches_as_stages_from_the_rank_on():
    def most(schedule: PipelineSchedule, rank: int) -> int:
        open_now, peak = 0, 0
        for action in schedule.rows[rank]:
            open_now += 1 if action.kind == "F" else -1
            peak = max(peak, open_now)
        return peak

    one, all_first = SCHEDULE_BUILDERS["1f1b"](4, 12, 1), SCHEDULE_BUILDERS["gpipe"](4, 12, 1)

    assert [most(one, rank) for rank in range(4)] == [4, 3, 2, 1]
    assert [most(all_first, rank) for rank in range(4)] == [12, 12, 12, 12]


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (6, 14), (8, 20)])
def test_dualpipe_keeps_two_parameter_copies_and_one_activation_more_than_ranks(p, m):
    """The table of github deepseek-ai/DualPipe: parameters 2, activations PP + 1; held until the
    input's gradient is there.
    """
    schedule = SCHEDULE_BUILDERS["dualpipe"](p, m, 2)

    for rank, row in enumerate(schedule.rows):
        held, most = 0, 0
        for action in compute_actions(row):
            held += {"F": 1, "B": -1, "I": -1, "W": 0}[action.kind]
            most = max(most, held)
        assert [stage % p for stage in schedule.stages_of(rank)] == sorted((rank, p - 1 - rank))
        assert most == p + 1


def test_the_first_and_the_last_stage_of_a_v_share_rank_0():
    assert v_placement(3) == (0, 1, 2, 2, 1, 0)
    assert loop_placement(3, 2) == (0, 1, 2, 0, 1, 2)


# --- text ---
def test_a_schedule_parses_back_from_its_own_text():
    for name in sorted(
        {*SCHEDULE_BUILDERS} - {"dualpipe"}
    ):  # the format has one stage of each number
        schedule = with_send_recv(SCHEDULE_BUILDERS[name](3, 6, 2))

        assert parse_rows([",".join(map(str, row)) for row in schedule.rows]) == schedule.rows
        assert schedule_from_rows(schedule.rows).rank_of == schedule.rank_of


def test_the_builder_gives_the_dualpipe_v_file_of_the_pytorch_tests():
    rows = parse_rows(
        (SAMPLES / "pytorch_dualpipev_4rank_10mb.csv").read_text(encoding="utf-8").splitlines()
    )

    assert rows == SCHEDULE_BUILDERS["dualpipe_v"](4, 10, 2).rows


def test_the_builder_gives_the_zero_bubble_file_of_the_pytorch_tests():
    """It uses the older names, B for the input's half."""
    rows = parse_rows(
        (SAMPLES / "pytorch_zb1p_2rank_2stagep_compute.csv")
        .read_text(encoding="utf-8")
        .splitlines()
    )

    assert rows == SCHEDULE_BUILDERS["zb1p"](2, 8, 2).rows


@pytest.mark.parametrize(
    ("file", "ranks", "stages", "batches"),
    [
        ("pytorch_zb1p_2rank_2stagep_comms.csv", 2, 4, 8),
        ("torchtitan_custom_schedule.csv", 2, 4, 8),
    ],
)
def test_third_party_files_are_parsed(file, ranks, stages, batches):
    schedule = schedule_from_rows(
        parse_rows((SAMPLES / file).read_text(encoding="utf-8").splitlines())
    )

    assert (schedule.ranks, schedule.stages, schedule.micro_batches) == (ranks, stages, batches)
    assert has_messages(schedule.rows) == ("comms" in file)
    assert len(played(schedule)) == sum(len(list(compute_actions(row))) for row in schedule.rows)


@pytest.mark.parametrize(
    "text", ["F0", "2X0", "2F", "2SEND_F", "(2F0;2RECV_B0)OVERLAP_F_B", "2F0 2F1", ""]
)
def test_invalid_actions_are_refused(text):
    with pytest.raises(ValueError, match=r"action|micro-batch|overlap"):
        parse_action(text)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["0F0,0B0", "0F0,0B0"], "stage 0 is on rank 0 and on rank 1"),
        (["0F0,0B0", "2F0,2B0"], "stage 1 is missing"),
        (["0B0,0F0", "1F0,1B0"], "0B0 comes before 0F0"),
        (["0F0,0F0,0B0", "1F0,1B0"], "0F0 comes twice"),
        (["0F0,0I0", "1F0,1B0"], "needs either B, or both I and W"),
        (["0F0,0B0,0F1", "1F0,1B0,1F1,1B1"], "micro-batch 1 of stage 0 needs"),
        (["0F0,0F1,0B0,0B1", "1F0,1B0"], "1F1 is missing"),
    ],
)
def test_a_schedule_that_pytorch_would_refuse_is_refused(lines, said):
    with pytest.raises(ValueError, match=said):
        schedule_from_rows(parse_rows(lines))


def test_rows_that_wait_in_a_cycle_get_no_messages():
    schedule = schedule_from_rows(parse_rows(["0F0,0B0,0F1,0B1", "1F0,1F1,1B0,1B1"]))

    with pytest.raises(ValueError, match="the schedule hangs: rank 0 at 0B0, rank 1 at 1F1"):
        with_send_recv(schedule)
