"""Boards, tables of times, and what is made of them, without any process."""

from __future__ import annotations

import socket

import pytest

from distsim.common.errors import EnvironmentFault
from distsim.findings.final_state import FinalState, RankEnd, RankEndStatus, WaitDependency
from distsim.program.from_calls import build_program
from distsim.real.results.merge_tables import RankTimeTable, merge_rank_tables
from distsim.real.results.posted_calls import (
    DivergingReceive,
    PostedRequest,
    RankWait,
    analyze_waits,
    diverging_receives,
)
from distsim.real.results.postmortem import postmortem
from distsim.real.results.simulated_vs_real import compare_with_simulation, outcome_of
from distsim.real.results.value_check import BufferCheck
from distsim.real.shared.job import pack_record, unpack_record
from distsim.real.shared.progress_file import (
    ROW_WIDTH,
    TIME_COLUMNS,
    CallTimeTable,
    ControlFile,
    ProgressField,
    ProgressFile,
    ProgressSnapshot,
    RankPhase,
    parse_snapshot,
    read_call_times,
)
from distsim.real.shared.rendezvous import check_rendezvous_file, listen
from distsim.scenario import loads
from distsim.simulation.simulate_scenario import Simulation, simulate
from distsim.trace.model import NEVER
from tests.support.real_runs import scenario

NOTHING = FinalState((), ())


def board(
    rank: int, phase: RankPhase, position: int, message: str = "", since_ns: int = 10
) -> ProgressSnapshot:
    return ProgressSnapshot(rank, 1, phase, position, 1, since_ns, 0, 0, 0, message)


def test_a_progress_file_returns_what_was_last_written(tmp_path):
    mine = ProgressFile(tmp_path / "b", create=True)
    theirs = ProgressFile(tmp_path / "b")
    mine.words[ProgressField.PID] = 77
    mine.advance(RankPhase.IN_CALL, 3, 123)
    mine.write_message("lost — ü")

    assert theirs.snapshot(2)[:6] == (2, 77, RankPhase.IN_CALL, 3, 1, 123)
    assert theirs.snapshot(2).message == "lost — ü"
    assert parse_snapshot(theirs.raw(), 2) == mine.snapshot(2)


def test_a_repetition_starts_at_the_signal_of_the_launcher(tmp_path):
    control_file, reader = ControlFile(tmp_path / "b", create=True), ControlFile(tmp_path / "b")
    assert reader.started_ns(0) == 0
    control_file.start_repetition(0, 55)
    assert (reader.started_ns(0), reader.started_ns(1), reader.stopped) == (55, 0, False)
    control_file.stop()
    assert reader.stopped


def test_a_table_of_times_is_readable_from_its_file_and_where_it_was_cut(tmp_path):
    times = CallTimeTable(tmp_path / "s", 3)
    times.cells[1 * ROW_WIDTH] = 5
    data = (tmp_path / "s").read_bytes()

    assert list(read_call_times(data)["posted"]) == [-1, 5, -1]
    assert list(read_call_times(data[:-3])["posted"]) == [-1, 5]
    assert set(read_call_times(data)) == set(TIME_COLUMNS)


def test_records_survive_serialisation():
    record = {"a": b"", "b c": b"\x00\xff" * 100, "ü": b"x"}
    assert unpack_record(pack_record(record)) == record


def test_an_occupied_port_is_replaced_or_named():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        door, port = listen("127.0.0.1", taken, allow_other_port=True)
        door.close()
        assert port != taken
        with pytest.raises(EnvironmentFault, match=str(taken)):
            listen("127.0.0.1", taken, allow_other_port=False)


def test_a_stale_file_is_named(tmp_path):
    stale = tmp_path / "stale"
    check_rendezvous_file(stale.as_uri())
    stale.write_bytes(b"old")
    with pytest.raises(EnvironmentFault, match="stale"):
        check_rendezvous_file(stale.as_uri())


def simulated(name: str) -> Simulation:
    return simulate(scenario(name), backend="gloo")


def test_progress_files_of_a_cycle_are_diagnosed_like_by_check():
    left = postmortem(
        simulated("head_to_head_sends"),
        {r: board(r, RankPhase.IN_CALL, 0) for r in (0, 1)},
        {},
        1,
        {},
    )

    assert [f.code for f in left.findings] == ["DS301"]
    assert left.culprits == (0, 1)
    assert left.final_state.stuck == (0, 1)


def test_a_killed_rank_is_the_cause_not_the_one_whose_connection_closed_first():
    boards = {
        0: board(0, RankPhase.RAISED, 0, "RuntimeError: Connection closed by peer", 5),
        1: board(1, RankPhase.IN_CALL, 0, since_ns=9),
    }
    left = postmortem(simulated("head_to_head_sends"), boards, {0: 1, 1: -9}, 1, {})

    assert left.culprits == (1,)
    assert [end.status for end in left.final_state.ends] == ["raised", "killed"]


TAKES = """world: 3
backend: gloo
tensors: {x: {shape: [4]}}
program:
  - {recv: {tensor: x}, ranks: 0}
  - {recv: {tensor: x, src: 1}, ranks: 0}
  - {compute: 1 ms, ranks: 1}
  - {send: {tensor: x, dst: 0}, ranks: rank > 0}
"""


def test_a_wildcard_receive_that_took_the_message_of_another_is_reported_as_the_cause() -> None:
    """Simulated, rank 2 comes first and all is well; for real it was rank 1, whose message the next
    receive waits for.
    """
    simulation = simulate(loads(TAKES))
    boards = {
        0: board(0, RankPhase.IN_CALL, 1),
        1: board(1, RankPhase.ENDED, 2),
        2: board(2, RankPhase.IN_CALL, 0),
    }
    sources = {PostedRequest(0, 0, -1): 1}
    left = postmortem(simulation, boards, {}, 1, sources)

    assert [f.code for f in left.findings] == ["DS304"]
    assert left.culprits == (0,)
    assert "took rank 1's message" in left.findings[0].message
    assert diverging_receives(sources, simulation.run.trace) == (
        DivergingReceive(PostedRequest(0, 0, -1), 1, 2),
    )
    assert diverging_receives({PostedRequest(0, 0, -1): 2}, simulation.run.trace) == ()
    together = compare_with_simulation(simulation, "hangs", left.final_state.ends, ())
    assert (
        together.differences,
        "the outcome depends on the order of events" in together.agreement,
    ) == (
        (),
        True,
    )


def test_consequences_of_a_mismatch_are_listed_under_it() -> None:
    """And it is what follows for real: the simulated consequences are not told of a real run."""
    simulation = simulated("zoo/f14_expert_without_tokens")
    stood = {one.rank: one.position for one in simulation.run.final_state.blocked}
    left = postmortem(
        simulation, {r: board(r, RankPhase.IN_CALL, at) for r, at in stood.items()}, {}, 1, {}
    )

    assert [f.code for f in left.findings] == ["DS201"]
    assert [line for line in left.findings[0].message.splitlines() if "as a result" in line] == [
        "  as a result, ranks 0 → 2 → 0 wait for each other in a cycle"
    ]


@pytest.mark.parametrize(
    ("outcome", "status", "wrong", "differs", "said"),
    [
        ("hangs", "blocked", 0, (), ""),
        ("raises", "raised", 0, (), "a race: which blocked rank"),
        ("hangs", "blocked", 1, ("1 buffer with values other than simulated",), ""),
        (
            "completes",
            "ended",
            0,
            (
                "the outcome is completes, simulated: hangs",
                "ranks 0 and 1: finished, simulated: blocked",
            ),
            "",
        ),
    ],
)
def test_a_run_either_agrees_with_its_simulation_or_reports_where_it_differs(
    outcome: str, status: RankEndStatus, wrong: int, differs: tuple[str, ...], said: str
) -> None:
    simulation = simulated("head_to_head_sends")
    ends = [
        RankEnd(r, status, 0 if status != "ended" else 2, message="Connection closed by peer")
        for r in (0, 1)
    ]
    found = compare_with_simulation(
        simulation, outcome, ends, [BufferCheck(0, "x", "differs")] * wrong
    )

    assert found.differences == differs
    assert said in found.agreement
    assert not (found.differences and found.agreement)


def test_different_values_are_not_wrong_if_wildcard_receives_took_other_messages() -> None:
    simulation = simulate(
        loads(
            "world: 3\nbackend: gloo\ntensors: {x: {shape: [2], value: rank}, y: {shape: [2], value: rank}}\nprogram:\n"
            "  - {recv: {tensor: x}, ranks: 0}\n  - {recv: {tensor: y}, ranks: 0}\n  - {send: {tensor: x, dst: 0}, ranks: rank > 0}\n"
        )
    )
    ends, swapped = (
        simulation.run.final_state.ends,
        [BufferCheck(0, "x", "differs"), BufferCheck(0, "y", "differs")],
    )
    taken = [
        DivergingReceive(PostedRequest(0, 0, -1), 2, 1),
        DivergingReceive(PostedRequest(0, 1, -1), 1, 2),
    ]
    outcomes = [outcome_of(ends, swapped, simulation.outcome, took) for took in ((), taken)]

    assert outcomes == ["wrong-data", "completes"]
    assert compare_with_simulation(simulation, outcomes[0], ends, swapped).differences
    assert compare_with_simulation(
        simulation, "completes", ends, swapped, taken
    ).agreement.endswith("the outcome depends on the order of events")


def test_a_rank_ended_by_sigterm_is_the_cause_unless_a_launcher_sent_it_after_a_failure() -> None:
    boards = {r: board(r, RankPhase.IN_CALL, 0) for r in (0, 1)}
    alone = postmortem(simulated("head_to_head_sends"), boards, {1: -15}, 1, {})
    after = postmortem(simulated("head_to_head_sends"), boards, {0: -9, 1: -15}, 1, {})

    assert (
        alone.culprits,
        alone.final_state.ends[1].status,
        alone.final_state.ends[1].message,
    ) == (
        (1,),
        "killed",
        "ended by SIGTERM",
    )
    assert (after.culprits, after.final_state.ends[1].status) == ((0,), "blocked")


def test_a_rank_that_exited_is_the_cause_not_those_that_wait():
    boards = {r: board(r, RankPhase.ENDED if r == 2 else RankPhase.IN_CALL, 1) for r in range(4)}
    left = postmortem(simulated("skipped_barrier"), boards, {}, 1, {})

    assert (left.culprits, [f.code for f in left.findings]) == ((2,), ["DS302"])


def test_a_rank_that_aborts_after_its_end_has_crashed():
    """What it left running in the background may still be sent more than there is room for (run: an
    asynchronous all_gather).
    """
    boards = {r: board(r, RankPhase.ENDED if r == 2 else RankPhase.IN_CALL, 1) for r in range(4)}
    exits = {2: -6}
    assert (
        postmortem(simulated("skipped_barrier"), boards, exits, 1, {}).final_state.ends[2].status
        == "crashed"
    )
    exits = {2: -9}  # its launcher's
    assert (
        postmortem(simulated("skipped_barrier"), boards, exits, 1, {}).final_state.ends[2].status
        == "ended"
    )


def test_a_rank_waits_for_what_no_rank_has_posted():
    program = build_program(
        2,
        {
            0: [
                {"op": "isend", "peer": 1, "numel": 4, "handle": "a"},
                {"op": "isend", "peer": 1, "numel": 4, "handle": "b"},
                {"op": "wait", "handles": ["a", "b"]},
            ],
            1: [{"op": "recv", "peer": None, "numel": 4}, {"op": "barrier"}],
        },
    )
    found = analyze_waits(program, (3, 2), [(0, 2), (1, 1)], {})

    assert found.at == {
        (0, 2): RankWait((WaitDependency(1, -1, (1,)),), (1,)),
        (1, 1): RankWait((WaitDependency(1, -1, (0,)),), (0,)),
    }
    assert found.unreceived == ((0, 1, -1),)


def test_only_unanswered_parts_of_a_batch_are_missing():
    ways = [{"op": "isend", "peer": 1, "numel": 4}, {"op": "irecv", "peer": 1, "numel": 4}]
    program = build_program(
        2,
        {0: [{"op": "batch_isend_irecv", "ops": ways}], 1: [{"op": "recv", "peer": 0, "numel": 4}]},
    )

    assert analyze_waits(program, (1, 1), [(0, 0)], {}).at[0, 0].needs == (
        WaitDependency(0, 1, (1,)),
    )
    assert analyze_waits(program, (1, 0), [(0, 0)], {}).at[0, 0].needs == (
        WaitDependency(0, 0, (1,)),
        WaitDependency(0, 1, (1,)),
    )


def test_a_wildcard_receive_waits_for_any_rank_until_a_message_arrives():
    send = {"op": "send", "peer": 0, "numel": 4}
    receive = {"op": "recv", "peer": None, "numel": 4}
    program = build_program(3, {0: [receive, receive], 1: [send], 2: [send]})

    assert analyze_waits(program, (1, 0, 0), [(0, 0)], {}).at[0, 0].needs == (
        WaitDependency(0, -1, (1, 2), True),
    )
    assert analyze_waits(program, (1, 0, 1), [(0, 0)], {}).at[0, 0].needs == ()
    told = {PostedRequest(0, 0, -1): 2}
    assert analyze_waits(program, (2, 1, 1), [(0, 1), (1, 0)], told).at == {
        (0, 1): RankWait(),
        (1, 0): RankWait((), (0,)),
    }
    assert analyze_waits(program, (1, 1, 1), [(1, 0), (2, 0)], told).at[1, 0].needs == (
        WaitDependency(0, -1, (0,)),
    )


def test_merging_shifts_clocks_matches_calls_and_starts_transfers_at_the_last_arrival(tmp_path):
    program = build_program(
        2, {0: [{"op": "send", "peer": 1, "numel": 4}], 1: [{"op": "recv", "peer": 0, "numel": 4}]}
    )
    tables = {}
    for rank, (posted, done) in enumerate(((1000, 1900), (3500, 3950))):
        times = CallTimeTable(tmp_path / f"{rank}", 1)
        times.cells[0], times.cells[1], times.cells[2] = posted, done, done
        tables[rank] = RankTimeTable((tmp_path / f"{rank}").read_bytes(), (500, 2600)[rank])
    trace = merge_rank_tables(
        program, tables, NOTHING, "completes", {"backend": "gloo", "cluster": ""}
    )

    assert trace["posted_ns"].tolist() == [500, 900]
    assert trace["started_ns"].tolist() == [900, 900]
    assert trace["finished_ns"].tolist() == [1400, 1350]
    assert trace["match"].tolist() == [0, 0]
    assert (trace.header["source"], trace.makespan_ns) == ("recorded", 1400)


def test_a_call_that_never_returned_has_a_post_and_no_finish(tmp_path):
    program = build_program(
        2, {0: [{"op": "send", "peer": 1, "numel": 4}], 1: [{"op": "recv", "peer": 0, "numel": 4}]}
    )
    times = CallTimeTable(tmp_path / "0", 1)
    times.cells[0] = 10
    trace = merge_rank_tables(
        program,
        {0: RankTimeTable((tmp_path / "0").read_bytes(), 0)},
        NOTHING,
        "hangs",
        {"backend": "gloo", "cluster": ""},
    )

    assert trace["posted_ns"].tolist() == [10, NEVER]
    assert trace["finished_ns"].tolist() == [NEVER, NEVER]
