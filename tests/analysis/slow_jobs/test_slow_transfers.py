"""A communication that is slow again and again, although no rank is late."""

from __future__ import annotations

import pytest

from distsim.analysis.slow_jobs.analyze import analyze_recording
from distsim.hardware.cluster import preset
from distsim.output.text.slow_job import slow_text
from distsim.trace.recordings.graph_builder import EventRow, GraphBuilder
from distsim.trace.recordings.recording import Recording

MS = 1e6


def recording(
    steps: int,
    slow: dict[tuple[int, int], float],
    *,
    checkpoint_step: int = -1,
    **options: object,
) -> Recording:
    """Two ranks; each step has two rounds of 10 ms of work and an all_reduce of 1 ms.

    ``slow``: (step, round) -> further ms of that transfer. The ranks save for 500 ms at the
    beginning of ``checkpoint_step``.
    """
    builder = GraphBuilder()
    time = 0.0
    last: dict[int, list[int]] = {0: [], 1: []}
    for step in range(steps):
        if step == checkpoint_step:
            for rank in (0, 1):
                saved = EventRow(rank, 0, "checkpoint", step, time, time + 500 * MS)
                last[rank] = [builder.add(saved, last[rank])]
            time += 500 * MS
        for part in range(2):
            work_end = time + 10 * MS
            end = work_end + (1 + slow.get((step, part), 0.0)) * MS
            for rank in (0, 1):
                work = builder.add(EventRow(rank, 0, "forward", step, time, work_end), last[rank])
                meeting = (step, part)
                row = EventRow(rank, 1, "all_reduce", step, work_end, end, meeting, 4096)
                last[rank] = [builder.add(row, [work])]
            time = end
    graph = builder.graph(list(range(steps)), {})
    return Recording(graph, "test", ("f",), world_size=2, **options)


def test_a_transfer_that_is_slow_in_every_third_step_is_named_with_its_steps():
    job = analyze_recording(recording(12, dict.fromkeys([(s, 1) for s in range(0, 12, 3)], 60.0)))
    (finding,) = job.findings

    assert (job.verdict, finding.phase, finding.ranks) == (
        "slow communication",
        "all_reduce",
        (0, 1),
    )
    assert finding.slow_steps == (0, 3, 6, 9)
    assert finding.cost_ns == pytest.approx(4 * 60 * MS / 12)
    text = slow_text(job)
    assert text.startswith("all_reduce is slow in 4 of 12 steps: this costs 20 ms")
    assert "takes 61 ms after its last member" in text


@pytest.mark.parametrize(
    "slow",
    [
        pytest.param({(s, s % 2): 60.0 for s in range(0, 12, 3)}, id="each time another transfer"),
        pytest.param({(4, 0): 60.0, (8, 0): 60.0}, id="in too few steps"),
        pytest.param(dict.fromkeys([(s, 1) for s in range(0, 12, 3)], 2.0), id="little"),
    ],
)
def test_noise_is_no_slow_communication(slow):
    assert analyze_recording(recording(12, slow)).findings == ()


def test_a_transfer_that_is_slow_in_every_step_needs_a_prediction():
    always = recording(5, dict.fromkeys([(s, 1) for s in range(5)], 60.0))
    with_cluster = analyze_recording(always, cluster=preset("cpu-10gbe"))

    assert analyze_recording(always).findings == ()
    assert with_cluster.findings[0].kind == "slow communication"
    assert with_cluster.findings[0].cost_ns == pytest.approx(60 * MS, rel=0.05)
    # 4 KiB between two nodes take less than the usual millisecond.
    row = next(one for one in with_cluster.breakdown if one.name == "slow communication")
    assert row.cost_ns == pytest.approx(62 * MS, rel=0.05)


def test_steps_with_other_operations_are_set_apart_with_their_length():
    job = analyze_recording(recording(6, {}, checkpoint_step=3))

    assert (job.counted_steps, job.findings) == (5, ())
    assert "1 step with other operations than most steps" in slow_text(job)
    assert "522 ms per step" in " ".join(slow_text(job).split())


def test_a_meeting_without_one_member_shows_no_slow_communication():
    slow = dict.fromkeys([(s, 1) for s in range(0, 12, 3)], 60.0)
    missing = dict.fromkeys(range(24), (2,))
    job = analyze_recording(recording(12, slow, missing_members=missing))

    assert "slow communication" not in {finding.kind for finding in job.findings}
