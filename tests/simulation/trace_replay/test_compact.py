"""A trace written as a scenario has the calls, the verdict and the times of the trace's replay, in
fewer lines.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distsim.backends import BACKEND_PROFILES
from distsim.checker.verdict import verdict_of
from distsim.common.errors import UsageError
from distsim.common.expressions import parse_expression
from distsim.engine import SimulatedRun, run_program
from distsim.hardware.cluster import cluster_from
from distsim.hardware.cost import CostModel
from distsim.program.from_calls import build_program
from distsim.scenario import load, loads
from distsim.simulation.simulate_scenario import simulate
from distsim.simulation.trace_replay import replay_trace
from distsim.simulation.trace_replay.compact import compact_trace
from distsim.simulation.trace_replay.compact.call_forms import CallForm, CallItem
from distsim.simulation.trace_replay.compact.loops import CallLoop, find_loops
from distsim.simulation.trace_replay.compact.rank_expressions import (
    RankVariables,
    fit_expression,
    fit_selector,
)
from distsim.trace.model import TIME_COLUMNS, Trace
from tests.support.harness import draws
from tests.support.random_programs import any_programs

ROOT = Path(__file__).resolve().parents[3]
SCENARIOS = sorted((ROOT / "scenarios").rglob("*.yaml"))
#: Scenarios whose traces tell less than they do: a wait without a request of its rank, a call after
#: the end, no calls at all.
UNTOLD = {
    "ds105_waited_twice",
    "ds106_handle_of_another_rank",
    "ds108_after_destroy",
    "ds109_initialised_twice",
    "ds901_nobody_selected",
}


def built(programs: Any, backend: str = "gloo", **more: Any) -> SimulatedRun:
    program = build_program(len(programs), programs, backend=backend, **more)
    return run_program(
        program,
        BACKEND_PROFILES[backend],
        CostModel(cluster_from("cpu-10gbe"), program.world_size, program.local_size),
    )


def unlike(trace: Trace, with_verdict: bool = True) -> list[str]:
    """In what the written scenario and the replay of its trace differ: outcome, makespan, calls,
    times of every call, verdict.
    """
    written, again = (
        simulate(loads(compact_trace(trace).text), with_values=False, with_verdict=with_verdict),
        replay_trace(trace),
    )
    mine, theirs = written.run.trace, again.run.trace
    found = (
        []
        if (written.run.outcome, written.makespan_ns) == (again.run.outcome, again.makespan_ns)
        else ["outcome or makespan"]
    )
    if len(mine) != len(theirs):
        return [*found, f"{len(mine)} calls for {len(theirs)}"]
    found += [
        name
        for name in (*TIME_COLUMNS, "rank", "peer", "tag", "nbytes", "part")
        if not np.array_equal(mine[name], theirs[name])
    ]
    found += [
        name for name in ("op", "dtype", "reduce_op") if _texts(mine, name) != _texts(theirs, name)
    ]
    if with_verdict:
        program = again.program
        before = verdict_of(program)
        assert written.verdict is not None
        found += (
            []
            if written.verdict.verdict == before.verdict
            else [f"{written.verdict.verdict} for {before.verdict}"]
        )
    return found


def _texts(trace: Trace, name: str) -> list[str]:
    return [trace.text(name, i) for i in trace[name].tolist()]


def of_files(files: list[Path], most: int) -> dict[str, list[str]]:
    wrong = {}
    for file in files:
        scenario = load(file)
        if scenario.world.size <= most and file.stem not in UNTOLD:
            wrong[file.stem] = unlike(
                simulate(scenario, with_verdict=False, with_values=False).run.trace
            )
    assert wrong
    return {name: found for name, found in wrong.items() if found}


def test_traces_of_scenarios_are_reconstructed_with_calls_verdict_and_times() -> None:
    """Those that complete as well as those that hang, raise or are killed."""
    assert of_files([file for file in SCENARIOS if file.parent.name == "scenarios"], 16) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "folder", sorted({file.parent for file in SCENARIOS}), ids=lambda f: f.name
)
def test_traces_of_every_scenario_are_reconstructed(folder: Path) -> None:
    assert of_files(sorted(folder.glob("*.yaml")), 64) == {}


@given(any_programs(), st.sampled_from(("gloo", "nccl", "mpi")))
@settings(max_examples=draws(40), deadline=None)
def test_any_program_is_reconstructed_whether_it_completes_or_not(plain: Any, backend: str) -> None:
    done = built(plain.programs, backend, groups=plain.groups)

    if len(done.trace):
        assert unlike(done.trace) == []


def test_equal_ranks_share_a_program_and_rounds_become_loops() -> None:
    """Eight ranks, a ring of twenty rounds: its file has a repeat of four steps and names peers by
    expressions.
    """
    ring = {
        r: [
            call
            for _ in range(20)
            for call in (
                {"op": "isend", "peer": (r + 1) % 8, "handle": "h"},
                {"op": "recv", "peer": (r - 1) % 8},
                {"op": "wait", "handles": ["h"]},
                {"op": "compute", "time_ns": 1000},
            )
        ]
        for r in range(8)
    }
    found = compact_trace(built(ring).trace)

    assert (found.calls, found.steps) == (640, 4)
    assert "times: 20" in found.text
    assert "dst: (rank + 1) % world_size" in found.text
    assert "src: (rank - 1) % world_size" in found.text


@pytest.mark.parametrize(
    "name", ["hybrid", "ddp_by_hand", "pipeline_1f1b", "two_groups", "any_source_ring"]
)
def test_reconstructed_files_are_no_longer_than_hand_written_ones(name: str) -> None:
    file = ROOT / "scenarios" / f"{name}.yaml"
    trace = simulate(load(file), with_verdict=False, with_values=False).run.trace

    assert len(compact_trace(trace).text.splitlines()) <= len(
        file.read_text(encoding="utf-8").splitlines()
    )


def test_durations_of_a_recording_are_means_and_the_file_states_it() -> None:
    calls = [{"op": "compute", "time_ns": t} for t in (1_000_000, 1_000_400, 999_600)]
    trace = built({0: calls, 1: calls}).trace
    recorded = Trace({**trace.header, "source": "recorded"}, trace.tables, trace.columns)

    found = compact_trace(recorded)

    assert "compute: 1 ms" in found.text
    assert found.steps == 1
    assert "means" in found.notes[1]
    assert compact_trace(recorded, exact=True).steps == 3


def test_a_wildcard_receive_stays_open_unless_the_trace_is_to_be_followed() -> None:
    done = built({0: [{"op": "recv", "peer": None}], 1: [{"op": "send", "peer": 0}]})

    assert "src" not in compact_trace(done.trace).text
    assert "src: 1" in compact_trace(done.trace, resolve=True).text


def test_loops_nest() -> None:
    items = [CallItem(CallForm(op, ()), (), ()) for op in "aaabaaabc"]
    outer, last = find_loops(items, exact=True)

    assert isinstance(outer, CallLoop)
    assert isinstance(outer.body[0], CallLoop)
    assert (outer.times, outer.body[0].times) == (2, 3)
    assert last == find_loops(items[-1:], exact=True)[0]


@given(st.integers(2, 12), st.data())
@settings(max_examples=draws(150), deadline=None)
def test_an_expression_is_used_only_if_it_gives_every_value(size: int, data: st.DataObject) -> None:
    """Random numbers and selections, on a mesh where the size has a divisor."""
    split = data.draw(st.sampled_from([k for k in range(1, size + 1) if size % k == 0]))
    names = RankVariables.of(size, {"a": split, "b": size // split})
    ranks = np.array(sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1))))
    kind = data.draw(st.sampled_from(("free", "ring", "mesh")))
    free = np.array(
        data.draw(st.lists(st.integers(-3, 9), min_size=len(ranks), max_size=len(ranks)))
    )
    values = {
        "free": free,
        "ring": (ranks + 2) % size,
        "mesh": 3 * names.axes["a"][ranks] - names.axes["b"][ranks] + 7,
    }[kind]
    mask = free > 2
    env = {
        "rank": ranks,
        "world_size": size,
        "a_size": split,
        "b_size": size // split,
        **{k: v[ranks] for k, v in names.axes.items()},
    }

    found = fit_expression(values, ranks, names)
    chosen = fit_selector(mask, ranks, names) if mask.any() else None

    if isinstance(found, dict):
        assert [found.get(int(r), found.get("else")) for r in ranks] == values.tolist()
    else:
        assert (
            np.broadcast_to(parse_expression(str(found)).evaluate(env), len(ranks)) == values
        ).all()
    if isinstance(chosen, str):
        assert (np.broadcast_to(parse_expression(chosen).evaluate(env), len(ranks)) == mask).all()
    elif chosen is not None:
        assert np.array_equal(np.isin(ranks, chosen), mask)


def test_a_trace_without_calls_is_refused() -> None:
    trace = simulate(
        load(ROOT / "scenarios" / "findings" / "ds901_nobody_selected.yaml"), with_values=False
    ).run.trace

    with pytest.raises(UsageError, match="no calls"):
        compact_trace(trace)


def test_the_command_writes_a_scenario_that_gives_the_same_time(cli: Any, tmp_path: Path) -> None:
    trace, file = tmp_path / "t.jsonl", tmp_path / "s.yaml"
    before = cli("simulate", "scenarios/pipeline_1f1b.yaml", "--trace", trace)

    made = cli("replay", trace, "-o", file)
    again = cli("simulate", file)

    assert made.returncode == again.returncode == 0
    assert again.stdout.splitlines()[0] == before.stdout.splitlines()[0]
    assert cli("replay", trace, "-o", tmp_path / "s.txt").returncode == 2
