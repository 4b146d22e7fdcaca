"""The recorded sample: four Gloo ranks under DDP, rank 2 sleeps 120 ms in each forward pass."""

from __future__ import annotations

import shutil

import pytest

import distsim
from tests.support.sample_profiles import change_profile, copy_of_sample


@pytest.fixture
def folder(tmp_path):
    """A copy of the sample that a test may change."""
    return copy_of_sample(tmp_path / "job")


def test_the_straggler_is_found_with_rank_phase_place_and_length():
    answer = distsim.slow("sample")
    (finding,) = answer.findings

    assert (answer.verdict, finding.ranks, finding.phase) == ("straggler", (2,), "forward")
    assert (finding.place.after, finding.place.before) == ("end aten::relu", "begin aten::linear")
    assert finding.place.excess_ns == pytest.approx(120e6, rel=0.02)
    assert finding.steps == finding.counted_steps == 6


def test_the_replay_is_exact_and_the_breakdown_adds_up():
    job = distsim.slow("sample").raw

    assert job.replay_error_ns == 0
    assert len(job.recording.graph.negative_gaps()) == 0
    assert sum(row.cost_ns for row in job.breakdown) == pytest.approx(job.step_ns)
    assert sum(row.share for row in job.breakdown) == pytest.approx(1)


def test_the_breakdown_names_every_loss_and_sorts_them_by_cost():
    ideal, *losses = distsim.slow("sample").raw.breakdown
    costs = [row.cost_ns for row in losses]

    assert ideal.name == "ideal compute and transfers"
    assert {row.name for row in losses} == {
        "late starts",
        "uneven work",
        "ranks slower than peers",
        "unequal stages",
        "slow communication",
    }
    assert costs == sorted(costs, reverse=True)


def test_clocks_shifted_by_an_hour_change_nothing_beyond_half_a_millisecond(folder):
    before = distsim.slow(folder)
    for rank, hours in ((1, 1), (3, -1)):
        shift = hours * 3600 * 10**9

        def move(data, shift=shift):
            data["baseTimeNanoseconds"] += shift

        change_profile(folder / f"rank{rank}.json.gz", move)

    after = distsim.slow(folder)

    assert after.findings[0].ranks == (2,)
    assert after.findings[0].cost_ns == pytest.approx(before.findings[0].cost_ns, abs=0.5e6)
    assert after.raw.step_ns == pytest.approx(before.raw.step_ns, abs=0.5e6)


def test_without_the_straggler_file_the_missing_rank_or_its_network_is_named(folder):
    (folder / "rank2.json.gz").unlink()
    answer = distsim.slow(folder)

    assert answer.verdict == "missing rank"
    assert answer.findings[0].ranks == (2,)
    assert "rank 2 (no trace available) or the" in answer.to_text()


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_without_a_healthy_rank_only_the_straggler_is_named(folder, rank):
    (folder / f"rank{rank}.json.gz").unlink()
    answer = distsim.slow(folder)

    assert [finding.ranks for finding in answer.findings] == [(2,)]
    assert answer.verdict == "straggler"


def test_only_selected_steps_count():
    answer = distsim.slow("sample", steps="3-4")

    assert answer.raw.counted_steps == 2
    with pytest.raises(distsim.UsageError, match="no step of this recording is in 90"):
        distsim.slow("sample", steps="90")


def test_a_profile_of_another_job_is_refused(folder):
    (folder / "rank0.json.gz").rename(folder / "a.json.gz")
    shutil.copy(folder / "a.json.gz", folder / "b.json.gz")

    with pytest.raises(distsim.UsageError, match="both of rank 0"):
        distsim.slow(folder)


def test_an_unknown_file_gives_one_line_with_the_reason(folder):
    (folder / "notes.json").write_text("{}")
    (folder / "gpu.nsys-rep").write_bytes(b"x")

    notes = distsim.slow(folder).raw.recording.notes

    assert any("notes.json: unrecognised JSON" in note for note in notes)
    assert any(
        "gpu.nsys-rep: export Nsight Systems reports with `nsys export --type sqlite`" in note
        for note in notes
    )


def test_results_look_like_the_others():
    answer = distsim.slow("sample")

    assert repr(answer) == "<SlowAnswer: straggler, 84% of a step>"
    assert answer.to_json()["verdict"] == "straggler"
    assert "Rank 2 is a straggler" in answer._repr_html_()
    assert list(answer.to_pandas()["rank"]) == [0, 1, 2, 3]
