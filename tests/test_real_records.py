"""Boards, tables of times, and what is made of them, without any process."""

from __future__ import annotations

import socket

import pytest
from real_runs import scenario

from distsim.errors import EnvironmentFault
from distsim.program.build import build_program
from distsim.real.board import COLUMNS, WIDTH, Board, Bulletin, CallTimes, Phase, Seen, Word, read_times, seen
from distsim.real.job import pack, unpack
from distsim.real.merge import RankTimes, merged
from distsim.real.posted_calls import Request, Wait, waits
from distsim.real.postmortem import postmortem
from distsim.real.rendezvous import check_file, listen
from distsim.simulation import Simulation, simulate
from distsim.standstill import Need, Standstill
from distsim.trace import NEVER

NOTHING = Standstill((), ())


def board(rank: int, phase: Phase, position: int, message: str = "", since_ns: int = 10) -> Seen:
    return Seen(rank, 1, phase, position, 1, since_ns, 0, 0, 0, message)


def test_a_board_says_what_was_last_written_on_it(tmp_path):
    mine = Board(tmp_path / "b", create=True)
    theirs = Board(tmp_path / "b")
    mine.words[Word.PID] = 77
    mine.step(Phase.IN_CALL, 3, 123)
    mine.say("lost — ü")

    assert theirs.see(2)[:6] == (2, 77, Phase.IN_CALL, 3, 1, 123)
    assert theirs.see(2).message == "lost — ü"
    assert seen(theirs.raw(), 2) == mine.see(2)


def test_a_repetition_starts_when_the_bulletin_says_so(tmp_path):
    bulletin, reader = Bulletin(tmp_path / "b", create=True), Bulletin(tmp_path / "b")
    assert reader.started_ns(0) == 0
    bulletin.go(0, 55)
    assert (reader.started_ns(0), reader.started_ns(1), reader.stopped) == (55, 0, False)
    bulletin.stop()
    assert reader.stopped


def test_a_table_of_times_is_readable_from_its_file_and_where_it_was_cut(tmp_path):
    times = CallTimes(tmp_path / "s", 3)
    times.cells[1 * WIDTH] = 5
    data = (tmp_path / "s").read_bytes()

    assert list(read_times(data)["posted"]) == [-1, 5, -1]
    assert list(read_times(data[:-3])["posted"]) == [-1, 5]
    assert set(read_times(data)) == set(COLUMNS)


def test_records_that_travel_come_out_as_they_went_in():
    record = {"a": b"", "b c": b"\x00\xff" * 100, "ü": b"x"}
    assert unpack(pack(record)) == record


def test_a_port_that_is_taken_is_replaced_or_named():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        door, port = listen("127.0.0.1", taken, may_move=True)
        door.close()
        assert port != taken
        with pytest.raises(EnvironmentFault, match=str(taken)):
            listen("127.0.0.1", taken, may_move=False)


def test_a_stale_file_is_named(tmp_path):
    stale = tmp_path / "stale"
    check_file(stale.as_uri())
    stale.write_bytes(b"old")
    with pytest.raises(EnvironmentFault, match="stale"):
        check_file(stale.as_uri())


def simulated(name: str) -> Simulation:
    return simulate(scenario(name), backend="gloo")


def test_boards_of_a_circle_are_diagnosed_as_the_checker_does():
    left = postmortem(simulated("head_to_head_sends"), {r: board(r, Phase.IN_CALL, 0) for r in (0, 1)}, {}, 1, {})

    assert [f.code for f in left.findings] == ["DS301"]
    assert left.culprits == (0, 1)
    assert left.standstill.stuck == (0, 1)


def test_a_rank_that_was_killed_is_the_culprit_not_the_one_whose_connection_closed_first():
    boards = {
        0: board(0, Phase.RAISED, 0, "RuntimeError: Connection closed by peer", 5),
        1: board(1, Phase.IN_CALL, 0, since_ns=9),
    }
    left = postmortem(simulated("head_to_head_sends"), boards, {0: 1, 1: -9}, 1, {})

    assert left.culprits == (1,)
    assert [end.status for end in left.standstill.ends] == ["raised", "killed"]


def test_a_rank_that_left_is_the_culprit_not_those_that_wait():
    boards = {r: board(r, Phase.ENDED if r == 2 else Phase.IN_CALL, 1) for r in range(4)}
    left = postmortem(simulated("skipped_barrier"), boards, {}, 1, {})

    assert (left.culprits, [f.code for f in left.findings]) == ((2,), ["DS302"])


def test_what_a_rank_waits_for_is_what_nobody_has_posted():
    program = build_program(
        2,
        {
            0: [{"op": "isend", "peer": 1, "numel": 4, "handle": "a"}, {"op": "isend", "peer": 1, "numel": 4, "handle": "b"},
                {"op": "wait", "handles": ["a", "b"]}],
            1: [{"op": "recv", "peer": None, "numel": 4}, {"op": "barrier"}],
        },
    )  # fmt: skip
    found = waits(program, (3, 2), [(0, 2), (1, 1)], {})

    assert found.at == {(0, 2): Wait((Need(1, -1, (1,)),), (1,)), (1, 1): Wait((Need(1, -1, (0,)),), (0,))}
    assert found.unreceived == ((0, 1, -1),)


def test_of_a_batch_the_parts_that_nobody_answers_are_missing():
    ways = [{"op": "isend", "peer": 1, "numel": 4}, {"op": "irecv", "peer": 1, "numel": 4}]
    program = build_program(2, {0: [{"op": "batch_isend_irecv", "ops": ways}], 1: [{"op": "recv", "peer": 0, "numel": 4}]})

    assert waits(program, (1, 1), [(0, 0)], {}).at[0, 0].needs == (Need(0, 1, (1,)),)
    assert waits(program, (1, 0), [(0, 0)], {}).at[0, 0].needs == (Need(0, 0, (1,)), Need(0, 1, (1,)))


def test_a_receive_from_any_source_misses_any_one_until_a_message_is_there():
    send = {"op": "send", "peer": 0, "numel": 4}
    receive = {"op": "recv", "peer": None, "numel": 4}
    program = build_program(3, {0: [receive, receive], 1: [send], 2: [send]})

    assert waits(program, (1, 0, 0), [(0, 0)], {}).at[0, 0].needs == (Need(0, -1, (1, 2), True),)
    assert waits(program, (1, 0, 1), [(0, 0)], {}).at[0, 0].needs == ()
    told = {Request(0, 0, -1): 2}
    assert waits(program, (2, 1, 1), [(0, 1), (1, 0)], told).at == {(0, 1): Wait(), (1, 0): Wait((), (0,))}
    assert waits(program, (1, 1, 1), [(1, 0), (2, 0)], told).at[1, 0].needs == (Need(0, -1, (0,)),)


def test_merging_shifts_clocks_matches_calls_and_starts_a_transfer_when_the_last_has_come(tmp_path):
    program = build_program(2, {0: [{"op": "send", "peer": 1, "numel": 4}], 1: [{"op": "recv", "peer": 0, "numel": 4}]})
    tables = {}
    for rank, (posted, done) in enumerate(((1000, 1900), (3500, 3950))):
        times = CallTimes(tmp_path / f"{rank}", 1)
        times.cells[0], times.cells[1], times.cells[2] = posted, done, done
        tables[rank] = RankTimes((tmp_path / f"{rank}").read_bytes(), (500, 2600)[rank])
    trace = merged(program, tables, NOTHING, "completes", {"backend": "gloo", "cluster": ""})

    assert trace["posted_ns"].tolist() == [500, 900]
    assert trace["started_ns"].tolist() == [900, 900]
    assert trace["finished_ns"].tolist() == [1400, 1350]
    assert trace["match"].tolist() == [0, 0]
    assert (trace.header["source"], trace.makespan_ns) == ("recorded", 1400)


def test_a_call_that_never_came_back_has_a_post_and_no_finish(tmp_path):
    program = build_program(2, {0: [{"op": "send", "peer": 1, "numel": 4}], 1: [{"op": "recv", "peer": 0, "numel": 4}]})
    times = CallTimes(tmp_path / "0", 1)
    times.cells[0] = 10
    trace = merged(
        program, {0: RankTimes((tmp_path / "0").read_bytes(), 0)}, NOTHING, "hangs", {"backend": "gloo", "cluster": ""}
    )

    assert trace["posted_ns"].tolist() == [10, NEVER]
    assert trace["finished_ns"].tolist() == [NEVER, NEVER]
