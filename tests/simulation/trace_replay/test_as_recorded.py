"""A replay with recorded communication is exact, also for failed runs and profiles."""

from __future__ import annotations

import numpy as np
import pytest

import distsim
from distsim.trace.jsonl import parse_trace, trace_lines
from distsim.trace.model import TIME_COLUMNS, Trace
from tests.support.sample_profiles import copy_of_sample
from tests.support.source_trees import ROOT


@pytest.fixture(scope="module")
def profile():
    """The sample profiles as a trace."""
    return distsim.replay("sample", as_recorded=True).raw.source


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize(
    "name", ["hybrid", "killed_at_iteration_3", "strategies/pipeline_1f1b", "put_and_signal"]
)
def test_a_replay_as_recorded_has_the_times_of_the_trace(name, backend):
    file = ROOT / "scenarios" / f"{name}.yaml"
    trace = distsim.simulate(file, backend=backend, verdict=False).trace
    again = distsim.replay(trace, as_recorded=True)

    for column in TIME_COLUMNS:
        assert np.array_equal(trace[column], again.trace[column])
    assert distsim.compare(trace, again.trace).same


def test_half_the_compute_time_moves_what_waits_for_it():
    # No transfers overlap here, so their costs do not depend on the speed of compute.
    trace = distsim.simulate(ROOT / "scenarios" / "killed_at_iteration_3.yaml", verdict=False).trace
    as_recorded = distsim.replay(trace, as_recorded=True, compute=0.5)
    simulated = distsim.replay(trace, compute=0.5)

    assert as_recorded.raw.makespan_ns < trace.makespan_ns
    assert as_recorded.raw.makespan_ns == simulated.raw.makespan_ns


def test_profiles_become_a_trace_with_the_recorded_times(profile):
    graph = distsim.slow("sample").raw.recording.graph

    assert profile.makespan_ns == graph.columns.end.max()
    collectives = profile.ops("all_reduce")
    assert sorted(profile["finished_ns"][collectives]) == sorted(graph.columns.end[~graph.is_work])
    # The file format takes it: groups, requests and arguments are those of a trace.
    text = "".join(trace_lines(profile))
    again = parse_trace(text.splitlines(keepends=True), "sample.jsonl")
    assert distsim.compare(profile, again).same
    assert distsim.slow("sample").raw.step_ns * 6 == pytest.approx(profile.makespan_ns, rel=0.01)


def test_commands_that_read_traces_take_profiles(profile):
    assert distsim.check("sample").verdict == "ok"
    assert distsim.compare("sample", distsim.replay(profile, as_recorded=True).trace).same
    assert distsim.replay("sample").outcome == "completes"


@pytest.mark.parametrize("command", [distsim.replay, distsim.check, distsim.report])
def test_a_recording_that_is_no_run_of_calls_is_refused_and_slow_is_named(command, tmp_path):
    folder = copy_of_sample(tmp_path / "job")
    (folder / "rank2.json.gz").unlink()

    with pytest.raises(distsim.UsageError, match="rank 2 has no readable file") as error:
        command(folder)

    assert "distsim slow" in error.value.remedy


def test_an_operation_table_is_refused_and_slow_is_named(tmp_path):
    table = tmp_path / "job.csv"
    table.write_text(
        "step,dp_rank,stage,rank,optype,start_ts,duration,seq_id,mc,mb_id,gmc\n"
        "0,0,0,0,forward-compute,0.0,0.1,0,0,0,0\n"
    )

    with pytest.raises(distsim.UsageError, match="do not follow each other"):
        distsim.replay(table)


def test_calls_that_a_killed_rank_never_joined_have_no_match():
    file = ROOT / "scenarios" / "killed_at_iteration_3.yaml"
    simulated = distsim.simulate(file, verdict=False).trace
    # A recording numbers the calls that the surviving ranks posted for the same all_reduce.
    match = simulated["match"].copy()
    never_ended = (simulated["posted_ns"] >= 0) & (simulated["finished_ns"] < 0)
    never_ended &= simulated.ops("all_reduce")
    assert never_ended.sum() == 3
    match[never_ended] = match.max() + 1
    recorded = Trace(simulated.header, simulated.tables, {**simulated.columns, "match": match})

    assert distsim.compare(recorded, simulated).same


def test_another_backend_contradicts_a_replay_as_recorded():
    trace = distsim.simulate(ROOT / "scenarios" / "all_reduce.yaml", verdict=False).trace

    with pytest.raises(distsim.UsageError, match="keeps the rules of the recorded backend"):
        distsim.replay(trace, as_recorded=True, backend="mpi")


# --- recorded compute with other communication, and other compute ---


@pytest.mark.parametrize("cluster", ["dgx-a100", "cpu-10gbe"])
@pytest.mark.parametrize("name", ["hybrid", "pipeline_1f1b", "strategies/pipeline_1f1b"])
def test_recorded_compute_on_a_cluster_takes_as_long_as_a_simulated_replay_there(name, cluster):
    scenario = ROOT / "scenarios" / f"{name}.yaml"
    trace = distsim.simulate(scenario, backend="gloo", verdict=False).trace
    mixed = distsim.replay(trace, as_recorded=True, cluster=cluster)
    simulated = distsim.replay(trace, cluster=cluster)

    assert mixed.raw.makespan_ns == pytest.approx(simulated.raw.makespan_ns, rel=1e-6)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_the_cluster_of_the_recording_changes_nothing(backend):
    scenario = ROOT / "scenarios" / "hybrid.yaml"
    trace = distsim.simulate(scenario, backend=backend, cluster="dgx-a100", verdict=False).trace
    mixed = distsim.replay(trace, as_recorded=True, cluster="dgx-a100")

    for column in TIME_COLUMNS:
        assert np.array_equal(mixed.trace[column], trace[column])


def slow_rank_trace(milliseconds: str):
    return distsim.simulate(
        "world: 4\nbackend: gloo\ntensors: {x: {shape: [65536]}}\nprogram:\n"
        f"- repeat: {{times: 6, steps: [{{compute: {{time: '{milliseconds}'}}}}, {{all_reduce: x}}]}}\n",
        verdict=False,
    ).trace


def test_a_rank_that_computes_like_its_peers_gives_the_run_without_the_slowdown():
    trace = slow_rank_trace("(rank == 2) * 6 ms + 4 ms")
    replayed = distsim.replay(trace, as_recorded=True, what_if=["like-peers=2"])

    assert replayed.raw.makespan_ns == slow_rank_trace("4 ms").makespan_ns


def test_a_factor_on_the_compute_of_ranks_is_that_of_a_run_with_it():
    trace = slow_rank_trace("4 ms")
    replayed = distsim.replay(trace, as_recorded=True, what_if=["compute@1-2=2", "compute@3=0.5"])

    assert (
        replayed.raw.makespan_ns
        == slow_rank_trace("(rank == 1 or rank == 2) * 4 ms + 4 ms").makespan_ns
    )


def test_what_ifs_need_a_replay_as_recorded():
    with pytest.raises(distsim.UsageError, match="what-ifs change a replay as recorded"):
        distsim.replay(slow_rank_trace("4 ms"), what_if=["like-peers=1"])
