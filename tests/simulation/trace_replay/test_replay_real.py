"""Traces run again on torch.distributed: the same calls, the pauses and computes of the trace, and
the way it ended.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distsim.backends import default_cluster
from distsim.hardware.cost import CostModel
from distsim.operations.registry import OPERATIONS
from distsim.program.from_calls import build_program
from distsim.program.model import Program
from distsim.real.run import RealRunOptions, RealRunRefused, run_simulation
from distsim.real.worker.rank_tensors import tensor_bytes
from distsim.scenario import Scenario, loads
from distsim.simulation.simulate_scenario import Simulation, simulate, simulate_program
from distsim.simulation.trace_replay import (
    RealReplay,
    ReplayScale,
    prepare_real_replay,
    replay_trace,
)
from distsim.simulation.trace_replay.rebuild import rebuild_program
from distsim.trace.jsonl import parse_trace, read_trace, trace_lines
from distsim.trace.model import TEXT_COLUMNS, TIME_COLUMNS, Trace
from tests.support import real_runs
from tests.support.command_json import checked_json

pytest.importorskip("torch", reason="torch is not installed (extra `real`): nothing runs for real")

ROOT = Path(__file__).resolve().parents[3]
WORLD = 3


@pytest.fixture(autouse=True)
def nothing_is_left() -> Any:
    real_runs.forget_others()
    yield
    assert (real_runs.children(), real_runs.folders()) == (set(), [])


def calls_of(op: str, rank: int) -> list[dict[str, Any]]:
    """Calls of one operation, blocking and async, that complete on three ranks. Empty for one that
    ends the program.
    """
    row = OPERATIONS[op]
    next_, before = (rank + 1) % WORLD, (rank - 1) % WORLD
    wait = {"op": "wait", "handle": "h"}
    if row.coalesces is not None:
        numels = [6, 12]
        return [
            {"op": op, "numels": numels, "dtype": "int32"},
            {"op": op, "numels": numels, "async": True, "handle": "h"},
            wait,
        ]
    if row.kind == "collective":
        call = {"op": op, "numel": 6 if row.pairwise else 4, "root": 1, "dtype": "int32"}
        return [
            call,
            *(
                [{**call, "async": True, "handle": "h"}, wait]
                if row.gives != "none" or op == "barrier"
                else []
            ),
        ]
    if op == "batch_isend_irecv":
        ops = [
            {"op": "isend", "peer": next_, "numel": 5, "tag": 3},
            {"op": "irecv", "peer": before, "numel": 5, "tag": 3},
        ]
        return [{"op": op, "ops": ops}, {"op": op, "ops": ops, "handle": "h"}, wait]
    if row.kind == "p2p":
        other = {"send": "recv", "recv": "send", "isend": "irecv", "irecv": "isend"}[op]
        mine = {0: op, 1: other}.get(rank)
        if mine is None:
            return []
        message = {"op": mine, "peer": 1 - rank, "numel": 4, "tag": 2, "dtype": "bfloat16"}
        return [{**message, "handle": "h"}, wait] if OPERATIONS[mine].nonblocking else [message]
    if op == "new_group":
        return [
            {"op": op, "name": "pair", "ranks": [0, 2]},
            *([{"op": "all_reduce", "group": "pair"}] if rank != 1 else []),
        ]
    local = {
        "compute": {"time_ns": 100_000, "name": "f"},
        "sleep": {"time_ns": 100_000},
        "synchronize": {},
        "assign": {},
        "wait_stream": {"stream": "side"},
    }
    return [{"op": op, **local[op]}] if op in local else []


def made(program: Program) -> Simulation:
    scenario = Scenario(name=program.name, world=program.world_size, backend="gloo", program=[])
    cost = CostModel(default_cluster("gloo"), program.world_size, program.local_size)
    return simulate_program(scenario, program, cost, with_values=False)


def for_real(simulation: Simulation, program: Program | None = None) -> Trace:
    run, status = run_simulation(
        simulation,
        RealRunOptions(backend="gloo", timeout_ns=20 * real_runs.SECOND),
        program=program,
    )
    assert run is not None
    assert (run.outcome, status, run.differences) == ("completes", 0, ())
    return run.trace


def through_a_file(trace: Trace) -> Trace:
    return parse_trace("".join(trace_lines(trace)).splitlines(True))


def meetings(trace: Trace) -> set[frozenset[int]]:
    """Rows that met."""
    found = defaultdict(set)
    for row, match in enumerate(trace["match"].tolist()):
        found[match].add(row)
    return {frozenset(rows) for match, rows in found.items() if match >= 0 and len(rows) > 1}


def assert_same_calls(a: Trace, b: Trace) -> None:
    """All that a trace says of its calls but the times, and who met."""
    for name in a.columns:
        if name not in (*TIME_COLUMNS, "match", "queue"):
            texts = [
                [t.text(name, i) for i in t[name].tolist()]
                if name in TEXT_COLUMNS
                else t[name].tolist()
                for t in (a, b)
            ]
            assert texts[0] == texts[1], name
    assert meetings(a) == meetings(b)


PLAYED = [
    op
    for op, row in OPERATIONS.items()
    if row.kind != "block"
    and not (row.bindings.get("gloo") and row.bindings["gloo"].refused)
    and op not in ("exit", "fail", "init_process_group", "destroy_process_group", "wait")
]


def test_every_recorded_operation_is_replayed_for_real_with_the_same_calls() -> None:
    """One program with all rows of the table: what `build_program` and a replay make of it is what
    torch takes.
    """
    known = [op for op in PLAYED if any(calls_of(op, rank) for rank in range(WORLD))]
    program = build_program(
        WORLD,
        {rank: [call for op in known for call in calls_of(op, rank)] for rank in range(WORLD)},
    )
    recorded = through_a_file(for_real(made(program)))
    ready = prepare_real_replay(recorded, "a.jsonl", backend="gloo")

    again = ready.rows_of(for_real(ready.simulation, ready.program))

    assert known == PLAYED
    assert_same_calls(recorded, through_a_file(again))
    assert (again.header["source"], again.header["complete"]) == ("recorded", True)
    assert not (again["finished_ns"] < 0).any()
    assert "values" not in again.header


def test_a_simulated_trace_runs_for_real_and_is_recorded_with_its_own_rows() -> None:
    simulation = simulate(real_runs.scenario("hybrid"), backend="gloo")
    ready = prepare_real_replay(through_a_file(simulation.run.trace), "a.jsonl", backend="gloo")

    again = ready.rows_of(for_real(ready.simulation, ready.program))

    assert_same_calls(simulation.run.trace, again)
    assert (again.header["file"], again.header["mesh"]) == (
        simulation.scenario.file,
        {"replica": 2, "stage": 2},
    )


# --- what the program of a real replay is made of ---


def ready_of(text: str, **more: Any) -> RealReplay:
    return prepare_real_replay(
        through_a_file(simulate(loads(text), with_values=False).run.trace),
        "a.jsonl",
        backend="gloo",
        **more,
    )


STEPS = """
name: steps
world: 2
backend: gloo
program:
  - compute: {name: forward, time: 30 ms}
  - sleep: 3 ms
  - all_reduce: {tensor: {shape: [8], dtype: float32}}
"""


def test_compute_lasts_its_recorded_time_times_the_scale() -> None:
    plain, half = ready_of(STEPS), ready_of(STEPS, scale=ReplayScale(compute=0.5))

    for ready, lasts in ((plain, 30_000_000), (half, 15_000_000)):
        times = [(c.op, c.time_ns) for _, c in ready.simulation.program.calls_of(0) if c.time_ns]
        assert times == [("compute", lasts), ("sleep", 3_000_000)]


def test_pauses_of_a_recording_are_replayed_except_those_of_every_process() -> None:
    trace = simulate(loads(STEPS), with_values=False).run.trace
    columns = {name: column.copy() for name, column in trace.columns.items()}
    for name in TIME_COLUMNS:
        columns[name] = np.where(columns[name] >= 0, columns[name] + 5_000_000, columns[name])
        columns[name][2::3] += np.int64(
            15_000
        )  # before the all_reduce, as short as a process is late by itself
    recorded = Trace({**trace.header, "source": "recorded"}, trace.tables, columns)

    def pauses(scale: ReplayScale, real: bool) -> list[int]:
        rebuilt = rebuild_program(recorded, backend="gloo", scale=scale, real=real)
        return [
            c.time_ns
            for _, c in rebuilt.program.calls_of(0)
            if c.op == "sleep" and c.time_ns != 3_000_000
        ]

    assert pauses(ReplayScale(), True) == [5_000_000]
    assert pauses(ReplayScale(), False) == [5_000_000, 15_000]


def test_concurrent_requests_never_share_memory_and_completed_ones_release_theirs() -> None:
    sends = [{"op": "isend", "peer": 1, "numel": 8, "tag": k, "handle": f"h{k}"} for k in range(3)]
    receives = [{**call, "op": "irecv", "peer": 0} for call in sends]
    waits = [{"op": "wait", "handles": ["h0", "h1", "h2"]}]
    program = build_program(2, {0: (sends + waits) * 4, 1: (receives + waits) * 4})
    ready = prepare_real_replay(made(program).run.trace, "a.jsonl", backend="gloo")

    names = [c.inputs[0].name for _, c in ready.program.calls_of(0) if c.op == "isend"]

    assert "" not in names
    assert [len(set(names[k : k + 3])) for k in (0, 3, 6, 9)] == [3, 3, 3, 3]
    assert len(set(names)) == 3


def test_the_timeout_of_a_group_is_in_the_trace_so_a_late_rank_times_out_again() -> None:
    """The group gives up after 5 ms, in a simulated run, in its replay and in the program of a real
    one.
    """
    text = """
    world: 3
    backend: gloo
    groups: {pair: {ranks: [0, 1], timeout: 5 ms}}
    program:
      - compute: {time: 20 ms}
        ranks: [1, 2]
      - all_reduce: {tensor: {shape: [4]}, group: pair}
        ranks: [0, 1]
    """
    done = simulate(loads(text), with_values=False)
    trace = through_a_file(done.run.trace)

    again = replay_trace(trace)
    program = rebuild_program(trace, backend="gloo", real=True).program

    assert done.outcome == again.run.outcome == "raises"
    assert trace.header["group_options"] == {"1": {"timeout_ns": 5_000_000}}
    assert [g.timeout_ns for g in program.groups] == [None, 5_000_000]
    with pytest.raises(RealRunRefused):
        run_simulation(
            prepare_real_replay(trace, "a.jsonl", backend="gloo").simulation,
            RealRunOptions(backend="gloo"),
        )


def test_a_trace_from_before_group_options_is_read() -> None:
    trace = simulate(loads(STEPS), with_values=False).run.trace
    header = {name: value for name, value in trace.header.items() if name != "group_options"}

    assert (
        replay_trace(through_a_file(Trace(header, trace.tables, trace.columns))).run.outcome
        == "completes"
    )


# --- traces of runs that went wrong ---


def test_the_trace_of_a_hang_is_refused_and_hangs_again_if_forced(cli: Any, tmp_path: Path) -> None:
    hung, again = tmp_path / "hung.jsonl", tmp_path / "again.jsonl"
    ring = "scenarios/head_to_head_sends.yaml"
    first = cli(
        "run", ring, "--real", "--backend", "gloo", "--force", "--timeout", "1 s", "--trace", hung
    )

    refused = cli("replay", hung, "--real")
    forced = cli(
        "replay",
        hung,
        "--real",
        "--force",
        "--timeout",
        "1 s",
        "--trace",
        again,
        "--format",
        "json",
    )

    assert (first.returncode, refused.returncode, forced.returncode) == (1, 1, 1)
    assert "DS301" in refused.stdout
    assert "--force" in refused.stderr
    data = checked_json("replay", forced.stdout)
    assert (data["outcome"], data["replay_of"]["source"], data["complete"]) == (
        "hangs",
        "recorded",
        False,
    )
    assert_same_calls(read_trace(hung), read_trace(again))


def test_a_killed_rank_of_a_trace_is_killed_for_real() -> None:
    trace = simulate(
        real_runs.scenario("killed_at_iteration_3"), backend="gloo", with_values=False
    ).run.trace
    ready = prepare_real_replay(through_a_file(trace), "a.jsonl", backend="gloo")

    run, status = run_simulation(
        ready.simulation,
        program=ready.program,
        options=RealRunOptions(backend="gloo", force=True, timeout_ns=5 * real_runs.SECOND),
    )

    assert run is not None
    assert status == 1
    assert [end.rank for end in run.final_state.ends if end.status == "killed"] == [2]
    assert [2, "killed"] in [end[:2] for end in ready.rows_of(run.trace).header["ends"]]


def test_unfinished_compute_calls_are_counted() -> None:
    trace = simulate(loads(STEPS), with_values=False).run.trace
    columns = {name: column.copy() for name, column in trace.columns.items()}
    columns["finished_ns"][0] = columns["returned_ns"][0] = -1

    ready = prepare_real_replay(
        Trace(trace.header, trace.tables, columns), "a.jsonl", backend="gloo"
    )

    assert ready.rebuilt.untimed == 1


# --- the command ---


def test_the_command_replays_for_real_and_names_the_trace(cli: Any, tmp_path: Path) -> None:
    again = tmp_path / "again.jsonl"

    done = cli(
        "replay",
        "traces/hybrid_gloo_4.jsonl",
        "--real",
        "--scale",
        "compute=0.5",
        "--repeat",
        2,
        "--trace",
        again,
    )
    compared = cli("compare", "traces/hybrid_gloo_4.jsonl", again, "--format", "json")

    assert done.returncode == 0
    assert "traces/hybrid_gloo_4.jsonl" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    data = json.loads(compared.stdout)
    assert (data["aligned"], data["only_a"], data["only_b"]) == (22, 0, 0)
    assert {p["kind"] for p in data["divergences"]} <= {"time"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--launcher", "fork"), "--launcher: only valid for a run on torch.distributed"),
        (("--backend", "auto"), "--backend auto: only valid for a run"),
        (("--real", "--timeout", "soon"), "--timeout"),
        (("--real", "--trace", "nowhere/x.jsonl"), "the folder nowhere does not exist"),
        (("--real", "--trace", "x.txt"), "unknown file type for a trace"),
    ],
)
def test_inconsistent_options_are_refused(cli: Any, words: tuple[str, ...], said: str) -> None:
    done = cli("replay", "traces/ring_gloo_4.jsonl", *words)

    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_trace_without_calls_is_refused(cli: Any, tmp_path: Path) -> None:
    trace = simulate(loads(STEPS), with_values=False).run.trace
    empty = tmp_path / "empty.jsonl"
    empty.write_text(
        json.dumps({"format": "distsim-trace", **trace.header, "calls": 0}) + "\n", encoding="utf-8"
    )

    done = cli("replay", empty, "--real")

    assert done.returncode == 2
    assert "has no calls" in done.stderr


def test_a_real_replay_makes_the_simulated_calls() -> None:
    ready = ready_of(STEPS)

    ops = [c.op for _, c in ready.program.calls_of(0)]

    assert (
        [c.op for _, c in ready.simulation.program.calls_of(0)]
        == ops
        == ["compute", "sleep", "all_reduce"]
    )
    assert [end.position for end in ready.simulation.run.final_state.ends] == [len(ops)] * 2


def short_and_small(path: Path) -> RealReplay | None:
    """A scenario's trace made ready, if it completes on gloo in a moment, in little memory; what
    can't run is no matter here.
    """
    scenario = real_runs.load(str(path))
    if scenario.world.size > 8:
        return None
    done = simulate(scenario, backend="gloo", with_values=False)
    if done.run.outcome != "completes" or not len(done.run.trace):
        return None
    ready = prepare_real_replay(through_a_file(done.run.trace), str(path), backend="gloo")
    invalid = ready.simulation.verdict is not None and ready.simulation.verdict.verdict == "invalid"
    small = tensor_bytes(ready.program, range(scenario.world.size)) < 1 << 29
    return ready if small and not invalid and ready.simulation.makespan_ns < 300_000_000 else None


@pytest.mark.slow
def test_the_trace_of_every_short_scenario_runs_for_real_as_simulated() -> None:
    ran = 0
    for path in sorted(real_runs.SCENARIOS.rglob("*.yaml")):
        ready = short_and_small(path)
        if ready is not None:
            assert ready.simulation.outcome == "completes", path
            run, _ = run_simulation(
                ready.simulation,
                RealRunOptions(backend="gloo", timeout_ns=60 * real_runs.SECOND),
                program=ready.program,
            )
            assert run is not None
            assert (run.outcome, run.differences) == ("completes", ()), path
            ran += 1
    assert ran > 100
