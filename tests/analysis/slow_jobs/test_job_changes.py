"""What-ifs on recorded jobs: a rank like its peers, scaled work, communication of a cluster."""

from __future__ import annotations

import pytest

import distsim
from tests.support.nsight_exports import BACKWARD, FORWARD, REDUCE, write_job


def test_a_rank_like_its_peers_gives_the_step_without_the_slowdown():
    answer = distsim.slow("sample", what_if=["like-peers=2"])
    finding = answer.findings[0]

    expected = answer.raw.step_ns - finding.cost_ns
    assert answer.raw.what_if.step_ns == pytest.approx(expected, abs=1)
    assert "With like-peers=2, a step would take 23.01 ms instead of 141.2 ms." in answer.to_text()
    assert answer.to_json()["what_if"]["changes"] == ["like-peers=2"]


def test_the_work_of_a_rank_can_be_shortened(tmp_path):
    folder = write_job(tmp_path, (1.0, 1.0, 1.5))
    answer = distsim.slow(folder, what_if=["compute@2=0.8"])

    # 1.5 × 0.8 = 1.2 times the work of the other ranks, and the transfer; the host works between.
    saved = (FORWARD + BACKWARD) * 0.3 * 1e3
    assert answer.raw.step_ns - answer.raw.what_if.step_ns == pytest.approx(saved, rel=0.02)


def test_a_cluster_predicts_the_communication_of_a_gpu_profile(tmp_path):
    folder = write_job(tmp_path, (1.0, 1.0, 1.0))
    answer = distsim.slow(folder, what_if=["cluster=dgx-h100"])

    # An all_reduce of 1 MiB takes less than the recorded 500 µs.
    saved = answer.raw.step_ns - answer.raw.what_if.step_ns
    assert 0.8 * REDUCE * 1e3 < saved < REDUCE * 1e3
    assert answer.raw.what_if.unpredicted == 0


def test_communication_of_unknown_size_keeps_its_time_and_is_counted(tmp_path):
    folder = write_job(tmp_path, (1.0, 1.0), nccl="kernels")
    answer = distsim.slow(folder, what_if=["cluster=dgx-h100"])

    assert answer.raw.what_if.step_ns == pytest.approx(answer.raw.step_ns)
    assert "10 communications of unknown kind or size" in answer.to_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("like-peers=9", "rank 9 is not in this recording"),
        ("compute@2=-1", "has no factor"),
        ("compute@x=1", "is not a list of numbers"),
        ("faster", "unknown change 'faster'"),
        ("cluster=no-such", "no-such"),
    ],
)
def test_changes_that_make_no_sense_are_refused(change, message):
    with pytest.raises(distsim.UsageError, match=message):
        distsim.slow("sample", what_if=[change])


def test_a_rank_without_peers_cannot_be_like_them(tmp_path):
    scenario = tmp_path / "stages.yaml"
    scenario.write_text(
        "world: 2\nbackend: gloo\ntensors: {x: {shape: [8]}}\nprogram:\n"
        "- {compute: {time: 1 ms, name: head}, ranks: rank == 0}\n"
        "- {compute: {time: 1 ms, name: tail}, ranks: rank == 1}\n- all_reduce: x\n"
    )
    trace = distsim.simulate(scenario, verdict=False).trace

    with pytest.raises(distsim.UsageError, match="no other rank does the same work as rank 1"):
        distsim.replay(trace, as_recorded=True, what_if=["like-peers=1"])
