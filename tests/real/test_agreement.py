"""How the end and the values of a real run are compared with those of its simulation.

No process is started: the ends are made up.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from distsim.findings.final_state import RankEnd, RankEndStatus
from distsim.program.from_calls import build_program
from distsim.real.results.rank_ends import rank_end
from distsim.real.results.simulated_vs_real import compare_with_simulation, outcome_of
from distsim.real.results.value_check import BufferCheck, check_values
from distsim.real.shared.job import pack_record
from distsim.real.shared.progress_file import ProgressSnapshot, RankPhase
from distsim.simulation.simulate_scenario import Simulation, simulate
from tests.support.real_runs import scenario, written

WRONG = [BufferCheck(0, "x", "differs")]


@pytest.mark.parametrize(
    ("statuses", "values", "simulated", "outcome"),
    [
        (("killed", "raised", "crashed"), [], "completes", "crashes"),
        (("killed", "raised", "blocked"), [], "completes", "raises"),
        (("killed", "blocked"), [], "completes", "hangs"),
        (("silent", "ended"), [], "completes", "hangs"),
        (("killed", "ended"), [], "completes", "crashes"),
        (("ended", "ended"), [], "wrong-data", "wrong-data"),
        (("ended", "ended"), WRONG, "completes", "wrong-data"),
        (("ended", "ended"), [BufferCheck(0, "x", "close")], "completes", "completes"),
    ],
)
def test_the_outcome_of_a_run_is_the_worst_of_what_its_ranks_did(
    statuses: Sequence[RankEndStatus], values: list[BufferCheck], simulated: str, outcome: str
) -> None:
    ends = [RankEnd(rank, status, 0) for rank, status in enumerate(statuses)]

    assert outcome_of(ends, values, simulated) == outcome


@pytest.fixture(scope="module")
def cycle() -> Simulation:
    """Two ranks whose first sends wait for each other."""
    return simulate(scenario("head_to_head_sends"), backend="gloo")


def test_a_rank_blocked_in_another_call_than_simulated_is_a_difference(cycle: Simulation) -> None:
    ends = [RankEnd(0, "blocked", 0), RankEnd(1, "silent", 1)]

    assert compare_with_simulation(cycle, "hangs", ends, ()).differences == (
        "rank 1 is blocked in call 1, simulated: in call 0",
    )


def test_ranks_that_differ_in_the_same_way_share_a_line(cycle: Simulation) -> None:
    ends = [RankEnd(0, "crashed", 0), RankEnd(1, "raised", 0, message="ValueError: mine")]

    assert compare_with_simulation(cycle, "crashes", ends, ()).differences == (
        "the outcome is crashes, simulated: hangs",
        "rank 0: crashed, simulated: blocked",
        "rank 1: raised an error of its own, simulated: blocked",
    )


def test_several_buffers_with_other_values_are_counted(cycle: Simulation) -> None:
    ends = cycle.run.final_state.ends

    assert compare_with_simulation(cycle, "hangs", ends, WRONG * 2).differences == (
        "2 buffers with values other than simulated",
    )
    close = [BufferCheck(0, "x", "close")]
    assert compare_with_simulation(cycle, "hangs", ends, close) == ((), "")


#: Rank 1 crashes because gloo sends it more than its buffer holds.
CRASH = (
    "world: 3\nbackend: gloo\ntensors: {big: {shape: [8]}, small: {shape: [4]}}\nprogram:\n"
    "  - {broadcast: {tensor: big, src: 0}, ranks: rank != 1}\n"
    "  - {broadcast: {tensor: small, src: 0}, ranks: 1}\n  - barrier\n"
)


def test_how_far_other_ranks_get_while_a_process_crashes_is_a_race() -> None:
    simulation = simulate(written(CRASH))
    simulated = simulation.run.final_state.ends
    crashed = [end.rank for end in simulated if end.status == "crashed"]
    assert crashed
    others = [
        end if end.rank in crashed else RankEnd(end.rank, "ended", 2, message=end.message)
        for end in simulated
    ]
    killed = [end if end.rank in crashed else RankEnd(end.rank, "killed", 1) for end in simulated]

    assert compare_with_simulation(simulation, "crashes", others, ()).differences == ()
    assert compare_with_simulation(simulation, "crashes", killed, ()).differences


#: Both processes claim rank 0, so one of them never gets in.
SAME_RANK_TWICE = (
    "world: 2\nbackend: gloo\nprogram:\n"
    "  - init_process_group: {init_method: 'tcp://127.0.0.1:29511', rank: 0, world_size: 2, timeout: 2 s}\n"
)


def test_processes_that_bring_the_same_to_a_start_up_are_interchangeable() -> None:
    simulation = simulate(written(SAME_RANK_TWICE))
    simulated = simulation.run.final_state.ends
    assert len({end.status for end in simulated}) == 2, "one of the two fares worse"
    exchanged = [
        RankEnd(0, simulated[1].status, simulated[1].position, message=simulated[1].message),
        RankEnd(1, simulated[0].status, simulated[0].position, message=simulated[0].message),
    ]

    assert compare_with_simulation(simulation, simulation.outcome, exchanged, ()) == ((), "")
    both_ended = [RankEnd(rank, "ended", 1) for rank in (0, 1)]
    assert compare_with_simulation(simulation, "completes", both_ended, ()).differences


def snapshot(phase: RankPhase, message: str = "", since_ns: int = 100) -> ProgressSnapshot:
    return ProgressSnapshot(0, 1, phase, 1, 1, since_ns, 0, 0, 0, message)


@pytest.mark.parametrize(
    ("phase", "exit_code", "status", "message"),
    [
        (RankPhase.NEW, None, "absent", ""),
        (RankPhase.IN_CALL, None, "blocked", ""),
        (RankPhase.IN_CALL, -9, "killed", "ended by SIGKILL"),
        (RankPhase.IN_CALL, -11, "crashed", "ended by SIGSEGV"),
        (RankPhase.IN_CALL, -99, "crashed", "ended by signal 99"),
        (RankPhase.IN_CALL, 3, "crashed", ""),
        (RankPhase.EXITED, 3, "ended", ""),
        (RankPhase.STRUCK, None, "killed", ""),
    ],
)
def test_the_status_and_the_signal_of_a_process_say_how_its_rank_ended(
    phase: RankPhase, exit_code: int | None, status: str, message: str
) -> None:
    program = build_program(1, {0: [{"op": "barrier"}, {"op": "barrier"}]})

    end = rank_end(program, 0, snapshot(phase), exit_code, 40)

    assert (end.status, end.message) == (status, message)
    assert end.at_ns == (60 if status != "absent" else 0)


def test_a_rank_that_failed_before_the_common_start_did_so_at_time_zero() -> None:
    program = build_program(1, {0: [{"op": "barrier"}]})
    waiting = snapshot(RankPhase.IN_CALL)

    assert rank_end(program, 0, waiting, None, 0).at_ns == 0
    assert rank_end(program, 0, waiting, None, 300).at_ns == 0


# --- values ---


def compared(folder: Path, value: str, dtype: str, real: np.ndarray) -> BufferCheck:
    """Buffer x of one rank after one all_reduce of three ranks, compared with the simulated one."""
    text = (
        f"world: 3\nbackend: gloo\ntensors: {{x: {{shape: [3], dtype: {dtype}, value: {value}}}}}\n"
        "program: [all_reduce: {tensor: x}]\n"
    )
    simulation = simulate(written(text))
    index = {"overhead_ns": 7, "buffers": {"x": [list(real.shape), dtype]}}
    file = folder / "result"
    file.write_bytes(pack_record({"index": json.dumps(index).encode(), "buffer x": real.tobytes()}))
    program = simulation.program
    without = check_values(program, None, 1, file, "gloo")
    assert (without.buffers, without.known_values, without.overhead_ns) == ([], [], 7)
    found = check_values(program, simulation.values, 1, file, "gloo")
    assert [one.label for one in found.known_values] == ["x"]
    return found.buffers[0]


@pytest.mark.parametrize(
    ("value", "dtype", "real", "state", "detail"),
    [
        ("rank", "float32", np.float32([3, 3, 3]), "equal", ""),
        ("rank", "float32", np.float32([3, 3 + 2**-22, 3]), "close", ""),
        (
            "rank",
            "float32",
            np.float32([3, 2, 1]),
            "differs",
            "element 1 is 2.0, simulated 3.0; 2 of 3 differ",
        ),
        (
            "rank",
            "int64",
            np.int64([3, 3, 2]),
            "differs",
            "element 2 is 2, simulated 3; 1 of 3 differ",
        ),
        ("rank", "float32", np.float32([1, 1]), "differs", "shape [2], simulated [3]"),
    ],
)
def test_a_buffer_is_equal_close_within_rounding_or_differs_at_a_named_element(
    value: str, dtype: str, real: np.ndarray, state: str, detail: str, tmp_path: Path
) -> None:
    assert compared(tmp_path, value, dtype, real) == BufferCheck(1, "x", state, detail)


def test_a_rank_without_a_result_file_has_no_values(tmp_path: Path) -> None:
    simulation = simulate(scenario("all_reduce"))

    found = check_values(simulation.program, simulation.values, 0, tmp_path / "none", "gloo")

    assert found == ([], [], 0)
