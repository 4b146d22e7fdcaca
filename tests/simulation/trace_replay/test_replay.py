"""A trace simulated again: exactly as it was, faster, elsewhere; recorded traces keep what the
hosts did between calls.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distsim.backends import BACKEND_PROFILES
from distsim.common.errors import UsageError
from distsim.engine import SimulatedRun, run_program
from distsim.hardware.cluster import cluster_from, preset
from distsim.hardware.cost import CostModel
from distsim.program.from_calls import build_program
from distsim.scenario import load, loads
from distsim.simulation.simulate_scenario import simulate
from distsim.simulation.trace_replay import ReplayResult, ReplayScale, replay_trace
from distsim.trace.jsonl import parse_trace, trace_lines
from distsim.trace.model import TIME_COLUMNS, Trace
from tests.support.harness import draws
from tests.support.random_programs import valid_programs

ROOT = Path(__file__).resolve().parents[3]
SCENARIOS = sorted((ROOT / "scenarios").rglob("*.yaml"))
FOLDERS = sorted({file.parent for file in SCENARIOS})
BACKENDS = ("gloo", "nccl", "mpi")


def built(
    programs: Any, backend: str = "gloo", cluster: Any = "cpu-10gbe", **more: Any
) -> SimulatedRun:
    program = build_program(len(programs), programs, backend=backend, **more)
    return run_program(
        program,
        BACKEND_PROFILES[backend],
        CostModel(cluster_from(cluster), program.world_size, program.local_size),
    )


def through_a_file(trace: Trace) -> Trace:
    return parse_trace("".join(trace_lines(trace)).splitlines(keepends=True))


def as_recorded(trace: Trace, **columns: Any) -> Trace:
    changed = {name: np.array(values) for name, values in columns.items()}
    return Trace({**trace.header, "source": "recorded"}, trace.tables, {**trace.columns, **changed})


def meetings(trace: Trace) -> set[tuple[int, ...]]:
    found: dict[int, list[int]] = {}
    for row, match in enumerate(trace["match"].tolist()):
        if match >= 0:
            found.setdefault(match, []).append(row)
    return {tuple(rows) for rows in found.values()}


def unlike(source: Trace, again: ReplayResult) -> list[str]:
    """In what a run and its replay differ: columns, who met whom, outcome and makespan."""
    found = [name for name in TIME_COLUMNS if not np.array_equal(source[name], again.trace[name])]
    found += ["match"] if meetings(source) != meetings(again.trace) else []
    ends = (again.run.outcome, again.makespan_ns), (source.header["outcome"], source.makespan_ns)
    return found + ([f"{ends[0]} for {ends[1]}"] if ends[0] != ends[1] else [])


def assert_the_same_again(source: Trace, again: ReplayResult) -> None:
    assert unlike(source, again) == []


#: Each operation has a scenario in the first folder; of the other folders, the fast tests replay every
#: fourth scenario.
REPLAYED = [
    *(
        pytest.param(folder, 1 if folder.name == "scenarios" else 4, id=folder.name)
        for folder in FOLDERS
    ),
    *(
        pytest.param(folder, 1, id=f"all of {folder.name}", marks=pytest.mark.slow)
        for folder in FOLDERS
        if folder.name != "scenarios"
    ),
]


@pytest.mark.parametrize(("folder", "distance"), REPLAYED)
def test_a_trace_of_a_completing_scenario_is_replayed_exactly(folder: Path, distance: int) -> None:
    """Under its own cluster, by way of a file; those of at most 2 ranks under every backend, those of
    at most 16 under their own.
    """
    wrong, compared = {}, 0
    for file in sorted(folder.glob("*.yaml"))[::distance]:
        scenario = load(file)
        if scenario.world.size > 16:
            continue
        for backend in BACKENDS if scenario.world.size <= 2 else (scenario.backend,):
            done = simulate(scenario, backend=backend, with_verdict=False, with_values=False)
            if done.run.outcome == "completes":
                compared += 1
                wrong[file.stem, backend] = unlike(
                    done.run.trace, replay_trace(through_a_file(done.run.trace))
                )

    assert {key: differences for key, differences in wrong.items() if differences} == {}
    assert compared


@given(valid_programs(), st.sampled_from(BACKENDS))
@settings(max_examples=draws(60), deadline=None)
def test_any_valid_program_is_replayed_exactly(plain: Any, backend: str) -> None:
    done = built(plain.programs, backend, groups=plain.groups)

    assert_the_same_again(done.trace, replay_trace(through_a_file(done.trace)))


def test_the_trace_contains_its_costs_so_a_replay_needs_no_cluster() -> None:
    slow = {"preset": "cpu-10gbe", "name": "slow", "call_overhead": "1 ms"}
    done = built(
        {0: [{"op": "all_reduce", "numel": 4}], 1: [{"op": "all_reduce", "numel": 4}]}, cluster=slow
    )

    again = replay_trace(through_a_file(done.trace))

    assert again.cost.name == "slow"
    assert again.makespan_ns == done.makespan_ns > 1_000_000


def test_compute_is_scaled_and_communication_is_not() -> None:
    calls = [
        {"op": "compute", "time_ns": 1_000_000, "name": "f"},
        {"op": "all_reduce", "numel": 1000},
    ]
    done = built({0: calls, 1: calls})

    half = replay_trace(done.trace, scale=ReplayScale(compute=0.5))

    assert done.makespan_ns - half.makespan_ns == 500_000


def test_work_costs_what_the_cluster_of_the_replay_needs_unless_something_else_changed_it() -> None:
    """A slow rank, and `scale`, keep the recorded durations."""
    text = """
world: 2
backend: nccl
cluster: dgx-h100
program:
  - compute: {work: [{flops: 2 TFLOP, bytes: 1 GB, dtype: bfloat16}, {bytes: 8 GB, kernels: 2}]}
"""
    faulty = text + "faults: [{rank: 1, kind: slow, factor: 2}]"
    trace = simulate(loads(faulty)).run.trace

    found = replay_trace(through_a_file(trace), cluster="dgx-a100").trace
    here, there = (
        simulate(loads(text), cluster=name).makespan_ns for name in ("dgx-h100", "dgx-a100")
    )
    a100 = preset("dgx-a100").device
    computing = 2e12 / a100.flop_per_ns("bfloat16")
    copying = 8e9 / (a100.memory_bytes_per_ns * a100.memory_efficiency)
    launching = 3 * CostModel(preset("dgx-a100"), 1, 1).launch_ns
    assert there == pytest.approx(computing + copying + launching, abs=2)
    assert [c.finished_ns - c.started_ns for c in found.rows()] == [there, 2 * here]
    scaled = replay_trace(trace, cluster="dgx-a100", scale=ReplayScale(compute=0.5)).trace
    assert [c.finished_ns - c.started_ns for c in scaled.rows()] == [round(here / 2), here]


def test_replay_on_another_cluster_recomputes_communication_costs() -> None:
    calls = [{"op": "compute", "time_ns": 1_000_000}, {"op": "all_reduce", "numel": 1 << 20}]
    done = built({0: calls, 1: calls}, "nccl", "dgx-a100")

    there = replay_trace(done.trace, cluster="cpu-10gbe")
    price = CostModel(preset("cpu-10gbe"), 2, 2)

    assert there.cost.name == "cpu-10gbe"
    assert there.makespan_ns > done.makespan_ns
    assert there.trace["nbytes"].tolist() == done.trace["nbytes"].tolist()
    assert there.makespan_ns - 1_000_000 < 2 * price.p2p_ns(0, 1, 4 << 20) + 1_000_000


def test_replay_on_another_backend_follows_its_rules() -> None:
    """Both send first: gloo's rendezvous hangs where mpi's small messages go ahead."""
    done = built(
        {
            0: [{"op": "send", "peer": 1}, {"op": "recv", "peer": 1}],
            1: [{"op": "send", "peer": 0}, {"op": "recv", "peer": 0}],
        },
        "mpi",
    )

    assert done.outcome == "completes"
    assert replay_trace(done.trace, backend="gloo").run.outcome == "hangs"


def test_pauses_between_the_calls_of_a_recording_are_kept() -> None:
    calls = [{"op": "barrier"}, {"op": "barrier"}]
    done = built({0: calls, 1: calls})
    late = done.trace["posted_ns"] + np.array([7_000, 50_000, 7_000, 50_000])

    again = replay_trace(as_recorded(done.trace, posted_ns=late, returned_ns=late + 1_000))

    assert again.trace["posted_ns"][0] == 7_000
    gap_ns = late[1] - (late[0] + 1_000)
    assert again.trace["posted_ns"][1] == again.trace["returned_ns"][0] + gap_ns
    assert len(again.trace) == len(done.trace)
    without = replay_trace(
        as_recorded(done.trace, posted_ns=late, returned_ns=late + 1_000), scale=ReplayScale(gaps=0)
    )
    assert without.trace["posted_ns"][1] == without.trace["returned_ns"][0]


def test_issuing_a_request_takes_its_recorded_time() -> None:
    calls = [{"op": "all_reduce", "async": True, "handle": "h"}, {"op": "wait", "handles": ["h"]}]
    done = built({0: calls, 1: calls})
    columns = {name: done.trace[name].copy() for name in ("returned_ns", "posted_ns")}
    columns["returned_ns"][[0, 2]] = 3_000
    columns["posted_ns"][[1, 3]] = 4_000

    again = replay_trace(as_recorded(done.trace, **columns))

    assert again.trace["posted_ns"].tolist() == [0, 4_000, 0, 4_000]


def test_a_wildcard_receive_takes_its_recorded_message_even_if_another_arrives_first() -> None:
    """Rank 2 was first; with its compute stretched, rank 1's message would be."""
    programs = {
        0: [{"op": "recv", "peer": None}, {"op": "recv", "peer": None}],
        1: [{"op": "compute", "time_ns": 500_000}, {"op": "send", "peer": 0}],
        2: [{"op": "send", "peer": 0}],
    }
    done = built(programs)
    assert next(c.match for c in done.trace.rows() if c.rank == 2) == done.trace["match"][0]
    posted = done.trace["posted_ns"].copy()
    posted[3], posted[4] = 0, 0  # the recording shows rank 1 quick

    again = replay_trace(as_recorded(done.trace, posted_ns=posted), scale=ReplayScale(compute=0))

    assert again.trace["match"][0] == again.trace["match"][4]


def test_the_order_in_which_a_wait_completes_its_requests_is_kept() -> None:
    programs = {
        0: [
            {"op": "isend", "peer": 1, "handle": "a"},
            {"op": "isend", "peer": 1, "tag": 1, "handle": "b"},
            {"op": "wait", "handles": ["b", "a"]},
        ],
        1: [
            {"op": "recv", "peer": 0},
            {"op": "compute", "time_ns": 9_000},
            {"op": "recv", "peer": 0, "tag": 1},
        ],
    }
    done = built(programs)

    assert_the_same_again(done.trace, replay_trace(done.trace))
    assert replay_trace(done.trace).program.code(0).calls[2].waits == (1, 2)


def test_uneven_parts_are_kept() -> None:
    splits = {0: ([1, 3], [1, 2]), 1: ([2, 2], [3, 2])}
    programs = {
        r: [{"op": "all_to_all_single", "numel": 4, "in_splits": i, "out_splits": o}]
        for r, (i, o) in splits.items()
    }
    again = replay_trace(through_a_file(built(programs).trace))

    calls = [again.program.call(rank, 0) for rank in (0, 1)]
    assert [(c.input_splits, c.output_splits) for c in calls] == [
        ((1, 3), (1, 2)),
        ((2, 2), (3, 2)),
    ]
    assert again.run.outcome == "completes"


def test_an_old_trace_without_later_columns_is_read_and_its_waits_are_found_by_times() -> None:
    programs = {
        0: [
            {"op": "isend", "peer": 1, "handle": "a"},
            {"op": "isend", "peer": 1, "handle": "b"},
            {"op": "wait", "handles": ["a", "b"]},
        ],
        1: [
            {"op": "recv", "peer": 0},
            {"op": "compute", "time_ns": 9_000},
            {"op": "recv", "peer": 0},
        ],
    }
    done = built(programs)
    lines = [
        line.replace(', "ended_by": 2', "").replace(', "ended_by": -1', "")
        for line in "".join(trace_lines(done.trace)).splitlines(True)
    ]
    old = parse_trace(
        [line.split(', "args"')[0] + "}\n" if ', "args"' in line else line for line in lines]
    )

    assert old["ended_by"].tolist() == [-1] * len(old)
    assert_the_same_again(old, replay_trace(old))


def test_groups_with_the_same_name_are_kept_apart() -> None:
    done = simulate(
        load(ROOT / "scenarios" / "two_groups.yaml"),
        backend="gloo",
        with_verdict=False,
        with_values=False,
    )

    again = replay_trace(through_a_file(done.run.trace))

    assert [g.ranks for g in again.program.groups] == [g.ranks for g in done.program.groups]


def test_a_killed_rank_is_killed_in_the_replay() -> None:
    done = simulate(
        load(ROOT / "scenarios" / "killed_at_iteration_3.yaml"),
        with_verdict=False,
        with_values=False,
    )

    again = replay_trace(done.run.trace)

    assert_the_same_again(done.run.trace, again)
    assert [end.rank for end in again.run.final_state.ends if end.status == "killed"] == [2]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [('"op": "barrier"', '"op": "bow"', "operation `bow`"), ('"gloo"', '"ucc"', "backend `ucc`")],
)
def test_unknown_facts_are_reported(old: str, new: str, message: str) -> None:
    done = built({0: [{"op": "barrier"}], 1: [{"op": "barrier"}]})
    trace = parse_trace(
        [line.replace(old, new) for line in "".join(trace_lines(done.trace)).splitlines(True)]
    )

    with pytest.raises(UsageError, match=message):
        replay_trace(trace)


def test_the_command_replays_and_writes_an_equal_trace(cli: Any, tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"

    made = cli("simulate", "scenarios/hybrid.yaml", "--trace", first)
    again = cli("replay", first, "--trace", second)
    same = cli("compare", first, second)

    assert (made.returncode, again.returncode, same.returncode) == (0, 0, 0)
    assert "the same" in same.stdout
    assert max(map(len, again.stdout.splitlines())) <= 80
    assert cli("replay", first, "--scale", "compute").returncode == 2
