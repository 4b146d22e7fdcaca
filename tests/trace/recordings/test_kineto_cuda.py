"""Profiles of CUDA jobs: launches, streams, NCCL kernels that spin, and stragglers among ranks."""

from __future__ import annotations

import json

import numpy as np

import distsim
from distsim.trace.recordings.read_recording import read_recording

#: Microseconds of the kernels of a step on a usual rank.
FORWARD, BACKWARD, REDUCE = 2000, 4000, 500
STEPS = 6


def profile(rank: int, slow: float, slowest: float) -> dict[str, object]:
    """A rank whose kernels take ``slow`` times as long; the slowest rank decides when it goes on."""
    events: list[dict[str, object]] = []
    correlation = 0

    def put(cat, name, tid, ts, dur, **args):
        event = {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": tid, "ts": ts, "dur": dur}
        events.append({**event, "args": args})

    def kernel(name, stream, launch, ts, dur, **args):
        nonlocal correlation
        correlation += 1
        put("cuda_runtime", "cudaLaunchKernel", 1, launch, 5, correlation=correlation)
        put("kernel", name, stream, ts, dur, stream=stream, correlation=correlation, **args)

    step_us = (FORWARD + BACKWARD) * slowest + REDUCE + 200
    for step in range(STEPS):
        begin = 1000 + step * step_us
        put("user_annotation", f"ProfilerStep#{step}", 1, begin, step_us)
        put("cpu_op", "autograd::engine::evaluate_function: X", 2, begin + 40, 40)
        kernel("gemm", 7, begin + 10, begin + 30, FORWARD * slow)
        kernel("gemm", 7, begin + 50, begin + 30 + FORWARD * slow, BACKWARD * slow)
        arrival = begin + 40 + (FORWARD + BACKWARD) * slow
        end = begin + 40 + (FORWARD + BACKWARD) * slowest + REDUCE
        kernel(
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 20, begin + 90, arrival, end - arrival,
            **{"Collective name": "allreduce", "In msg nelems": 1000, "Process Group Ranks": "[0, 1, 2]"},
        )  # fmt: skip
        put("cuda_runtime", "cudaDeviceSynchronize", 1, begin + 100, end - begin - 95)
    info = {"backend": "nccl", "rank": rank, "world_size": 3, "pg_config": []}
    return {"distributedInfo": info, "baseTimeNanoseconds": 0, "traceEvents": events}


def write_job(folder, factors):
    for rank, slow in enumerate(factors):
        data = profile(rank, slow, max(factors))
        (folder / f"rank{rank}.json").write_text(json.dumps(data))
    return folder


def test_a_job_replays_exactly_with_every_gap_at_least_zero(tmp_path):
    graph = read_recording([write_job(tmp_path, (1.0, 1.5, 1.0))]).graph
    start, end = graph.replay()

    assert np.array_equal(start, graph.columns.start)
    assert np.array_equal(end, graph.columns.end)
    assert len(graph.negative_gaps()) == 0


def test_the_slow_gpu_is_found_although_its_own_nccl_kernel_is_the_shortest(tmp_path):
    answer = distsim.slow(write_job(tmp_path, (1.0, 1.5, 1.0)))

    assert answer.verdict == "straggler"
    assert answer.findings[0].ranks == (1,)
    assert abs(answer.findings[0].cost_ns - 3e6) < 0.1e6
    assert "All phases are slow" in answer.findings[0].hints[0]


def test_equal_gpus_have_no_straggler(tmp_path):
    assert distsim.slow(write_job(tmp_path, (1.0, 1.0, 1.0))).verdict == "none"
