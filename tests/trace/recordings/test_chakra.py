"""Chakra execution traces: linked host and device, messages, start times, and damaged files."""

from __future__ import annotations

import gzip
import tarfile
from pathlib import Path

import numpy as np
import pytest

import distsim
from distsim.trace.recordings.read_recording import read_recording
from tests.support.chakra_traces import (
    COLLECTIVE,
    COMPUTE,
    KERNELS,
    RECV,
    SEND,
    Node,
    chakra_file,
    write_linked_job,
)

pytest.importorskip("google.protobuf")
SAMPLES = Path("/work/shared/samples/chakra-et")


def write_job(folder, *ranks):
    for rank, nodes in enumerate(ranks):
        (folder / f"job.{rank}.et").write_bytes(chakra_file(nodes))
    return folder


def replays_exactly(graph):
    start, end = graph.replay()
    same = np.array_equal(start, graph.columns.start) and np.array_equal(end, graph.columns.end)
    return same and not len(graph.negative_gaps())


def test_the_straggler_of_linked_traces_costs_what_its_kernels_take_longer(tmp_path):
    answer = distsim.slow(write_linked_job(tmp_path, (1.0, 1.0, 2.0, 1.0)))

    forward, backward, _ = KERNELS
    assert answer.verdict == "straggler"
    assert answer.findings[0].ranks == (2,)
    assert answer.findings[0].cost_ns == pytest.approx((forward + backward) * 1e3, rel=0.01)
    assert answer.raw.counted_steps == 4
    assert replays_exactly(answer.raw.recording.graph)


def test_equal_ranks_have_no_straggler(tmp_path):
    assert distsim.slow(write_linked_job(tmp_path, (1.0, 1.0, 1.0))).verdict == "none"


def test_the_transfer_of_a_kernel_that_spins_is_that_of_the_last_rank(tmp_path):
    graph = read_recording([write_linked_job(tmp_path, (1.0, 2.0))]).graph

    assert set(graph.own[~graph.is_work]) == {KERNELS[2] * 1e3}


def test_process_groups_meet_by_name(tmp_path):
    def rank(group, duration):
        call = {"comm_type": 0, "comm_size": 8, "pg_name": group}
        return [Node(1, "mm", COMPUTE, (), duration), Node(2, "ar", COLLECTIVE, (1,), 5, 0, call)]

    recording = read_recording([write_job(tmp_path, rank("a", 10), rank("b", 90), rank("a", 30))])

    groups = {partners.ranks for partners in recording.partners.values()}
    assert groups == {(0, 2), (1,)}
    ends = recording.graph.columns.end[~recording.graph.is_work]
    assert ends.tolist() == [35_000, 95_000, 35_000]


def test_messages_of_a_ring_meet_by_rank_tag_and_order_and_can_be_simulated(tmp_path):
    def rank(number):
        to, source = (number + 1) % 3, (number - 1) % 3
        return [
            Node(0, "send", SEND, (), 0, 0, {"comm_dst": to, "comm_size": 4096, "comm_tag": 3}),
            Node(1, "recv", RECV, (0,), 20, 0, {"comm_src": source, "comm_size": 4096, "comm_tag": 3}),
            Node(2, "add", COMPUTE, (1,), 100),
            Node(3, "send", SEND, (2,), 0, 0, {"comm_dst": to, "comm_size": 4096, "comm_tag": 3}),
            Node(4, "recv", RECV, (3,), 20, 0, {"comm_src": source, "comm_size": 4096, "comm_tag": 3}),
        ]  # fmt: skip

    folder = write_job(tmp_path, *map(rank, range(3)))
    graph = read_recording([folder]).graph

    assert replays_exactly(graph)
    assert graph.columns.end.max() == 140_000
    assert distsim.replay(folder, as_recorded=True).raw.largest_change_ns == 0
    assert distsim.replay(folder, cluster="dgx-h100").outcome == "completes"
    assert distsim.check(folder).verdict == "ok"


def test_recorded_start_times_are_kept(tmp_path):
    def rank(arrival):
        call = {"comm_type": 0, "comm_size": 8}
        nodes = [Node(1, "mm", COMPUTE, (), arrival - 100, 100)]
        return [*nodes, Node(2, "ar", COLLECTIVE, (1,), 400 - arrival, arrival, call)]

    graph = read_recording([write_job(tmp_path, rank(150), rank(350))]).graph

    assert replays_exactly(graph)
    assert graph.own[~graph.is_work].tolist() == [50_000, 50_000]
    assert graph.waited.max() == 200_000


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no Chakra execution trace"),
        (b"plain text, and more of it than any number says", "cut off|no Chakra"),
        (b"\x05\x0a\x03abc", "no metadata with a version"),
        (chakra_file([]), "contains no nodes"),
        (chakra_file([Node(1, "mm", COMPUTE)])[:-3], "cut off after 0 nodes"),
        (chakra_file([Node(1, "mm", COMPUTE), Node(1, "mm", COMPUTE)]), "two nodes 1"),
        (chakra_file([Node(1, "a", 4, (2,)), Node(2, "b", 4, (1,))]), "form a cycle with node 1"),
        (chakra_file([Node(1, "mm", COMPUTE, (), 1 << 60)]), "which is no time"),
        (chakra_file([Node(1, "process group", 1)]), "metadata only"),
        (gzip.compress(chakra_file([Node(1, "mm", COMPUTE)]))[:-9], "cannot be read"),
    ],
    # Names, because gzip writes the time into the content, and all workers need the same ids.
    ids=[
        *("empty", "text", "no metadata", "no nodes", "cut off", "equal ids", "cycle"),
        *("long time", "only metadata", "cut gzip"),
    ],
)
def test_a_foreign_or_damaged_file_is_refused_in_one_line(tmp_path, content, reason):
    file = tmp_path / "job.0.et"
    file.write_bytes(content)

    with pytest.raises(distsim.UsageError, match=reason) as error:
        distsim.slow(file)

    assert error.value.message.startswith(str(file))
    assert "\n" not in error.value.message


def test_a_trace_without_a_rank_in_its_name_says_how_to_name_it(tmp_path):
    (tmp_path / "trace.et").write_bytes(chakra_file([Node(1, "mm", COMPUTE)]))

    with pytest.raises(distsim.UsageError, match="without a rank") as error:
        distsim.slow(tmp_path)

    assert "<job>.<rank>.et" in error.value.remedy


def test_messages_without_a_partner_are_noted(tmp_path):
    nodes = [Node(1, "mm", COMPUTE, (), 10), Node(2, "send", SEND, (1,), 5)]
    recording = read_recording([write_job(tmp_path, nodes, nodes)])

    assert "2 messages name no other rank, so they wait for none" in recording.notes


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="the folder of samples is absent")
@pytest.mark.parametrize(
    ("name", "rows", "meetings"),
    [("astra-all-reduce-4npus-1MB", 4, 1), ("astra-custom-ring-allreduce-8npus", 280, 112)],
)
def test_published_traces_replay_exactly(name, rows, meetings):
    graph = read_recording([SAMPLES / name]).graph

    assert replays_exactly(graph)
    assert (len(graph), graph.meeting_count) == (rows, meetings)


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="the folder of samples is absent")
def test_a_real_linked_trace_replays_exactly(tmp_path):
    with tarfile.open(SAMPLES / "chakra-feeder-rank0.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    recording = read_recording([tmp_path])

    assert replays_exactly(recording.graph)
    assert len(recording.graph) == 3664
    assert recording.graph.meeting_count == 7
