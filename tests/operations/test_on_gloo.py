"""Every row's torch call, run on gloo with 2 and 4 processes: what the buffers hold afterwards is
what the row's effect says.
"""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import pytest

from distsim.operations.core.collective_results import numpy_dtype
from distsim.operations.core.resolved_call import (
    REDUCE_OPS,
    RankGroup,
    ResolvedCall,
    TensorBuffer,
    first_reason,
)
from distsim.operations.registry import OPERATIONS
from tests.support import gloo_cases

pytest.importorskip("torch", reason="torch is not installed (extra `real`): its calls can't be run")

LIMIT_S = 600.0  # for one world; then its processes are killed
TIMEOUT_NS = 20 * 10**9  # of every group


class Report(NamedTuple):
    """What one rank tells: the bytes of its buffers after each case, the names it took from
    torch.distributed, its fault.
    """

    rank: int
    after: dict[str, dict[str, bytes]]
    used: set[str]
    fault: str | None


class Recorder:
    """torch.distributed, remembering which names were asked for."""

    def __init__(self, dist: Any) -> None:
        self._dist, self.used = dist, set()

    def __getattr__(self, name: str) -> Any:
        self.used.add(name)
        return getattr(self._dist, name)


def groups(size: int) -> tuple[RankGroup, RankGroup]:
    """The world, and a sub-group of two that does not start at rank 0 where there are more."""
    return RankGroup(0, "world", tuple(range(size))), RankGroup(
        1, "sub", (0, 1) if size == 2 else (1, 3)
    )


# --- one rank ---


def run_rank(rank: int, size: int, store: str, pipe: Any) -> None:
    import torch
    import torch.distributed

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist, after, fault = Recorder(torch.distributed), {}, None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)  # a row calls what this torch calls it
            _run_cases(dist, rank, size, store, after)
    except Exception:
        fault = traceback.format_exc()
    pipe.send(Report(rank, after, dist.used, fault))
    pipe.close()


def _run_cases(
    dist: Recorder, rank: int, size: int, store: str, after: dict[str, dict[str, bytes]]
) -> None:
    world, sub = groups(size)

    def step(op: str, group: Any = None, **fields: Any) -> Any:
        return OPERATIONS[op].torch_call(
            dist, ResolvedCall(op=op, rank=rank, group=world, **fields), {}, group
        )

    step("init_process_group", backend="gloo", init_method=f"file://{store}", timeout_ns=TIMEOUT_NS)
    made = {0: None, 1: step("new_group", name="sub", ranks=sub.ranks, timeout_ns=TIMEOUT_NS)}
    for case in gloo_cases.cases(world, sub):
        memory = {buffer: _to_torch(array) for buffer, array in case.before.get(rank, {}).items()}
        works: list[Any] = []
        for call in case.calls.get(rank, []):
            result = OPERATIONS[call.op].torch_call(dist, call, memory, made[call.group.id])
            if call.is_async or OPERATIONS[call.op].nonblocking:
                works += result if isinstance(result, list) else [result]
        OPERATIONS["wait"].torch_call(
            dist, ResolvedCall(op="wait", rank=rank, group=world), memory, None, works
        )
        after[case.name] = {buffer.label: _to_bytes(tensor) for buffer, tensor in memory.items()}
    step("barrier")
    step("destroy_process_group")


def _to_torch(array: gloo_cases.Array) -> Any:
    import torch

    dtype = getattr(torch, str(array.dtype))
    if not array.size:
        return torch.empty(array.shape, dtype=dtype)
    return torch.frombuffer(bytearray(array.tobytes()), dtype=dtype).reshape(array.shape)


def _to_bytes(tensor: Any) -> bytes:
    import torch

    flat = tensor.contiguous().flatten()
    return bytes(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else b""


# --- the world ---


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def reports(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Report]:
    """What all ranks of a world tell after the whole table."""
    store = tmp_path_factory.mktemp("store") / "file"
    found = sorted(run_world(request.param, store))
    faults = [f"rank {report.rank}: {report.fault}" for report in found if report.fault]
    silent = sorted(set(range(request.param)) - {report.rank for report in found})
    assert not faults, "\n".join(faults)
    assert not silent, f"no report in time from ranks {silent}"
    return found


def run_world(size: int, store: Path) -> Iterator[Report]:
    """Start the ranks, yield their reports, and end every process that was started."""
    import torch.multiprocessing

    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch.distributed", "ml_dtypes", "distsim.operations.registry"]
    )
    started = []
    for rank in range(size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=run_rank, args=(rank, size, str(store), theirs), daemon=True
        )
        process.start()
        theirs.close()
        started.append((process, ours))
    end = monotonic() + LIMIT_S
    try:
        for _, pipe in started:
            with suppress(EOFError):  # a rank that died without a word gives no report
                if pipe.poll(max(end - monotonic(), 0)):
                    yield pipe.recv()
    finally:
        for process, pipe in started:
            process.join(max(min(end - monotonic(), 5), 0))
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()


# --- the claims ---


def test_real_gloo_has_the_effect_that_the_row_declares(reports: list[Report]) -> None:
    """Bit for bit, on every rank, for every case."""
    wrong = []
    for case in gloo_cases.cases(*groups(len(reports))):
        for report in reports:
            for buffer, array in case.after.get(report.rank, {}).items():
                if case.op == "reduce" and report.rank != case.calls[report.rank][0].root:
                    continue  # gloo overwrites the tensors of the other ranks with partial sums
                there = _from_bytes(report.after[case.name][buffer.label], buffer)
                if there.tobytes() != array.tobytes():
                    wrong.append(
                        f"{case.name} rank {report.rank} {buffer.label}: {there.tolist()}, expected {array.tolist()}"
                    )
    assert not wrong, "\n".join(wrong)


def _from_bytes(found: bytes, buffer: TensorBuffer) -> gloo_cases.Array:
    if (
        buffer.dtype == "bool"
    ):  # gloo adds the bytes of booleans: true and true make a 2, which is true
        return (np.frombuffer(found, dtype=np.uint8) != 0).reshape(buffer.shape)
    return np.frombuffer(found, dtype=numpy_dtype(buffer.dtype)).reshape(buffer.shape)


def test_every_row_with_a_torch_call_was_run(reports: list[Report]) -> None:
    used = set().union(*(report.used for report in reports))
    for op, row in OPERATIONS.items():
        if row.torch_name is not None and op != "wait":  # wait is a method of a Work
            assert used & {row.torch_name, *row.aliases}, op


def test_every_row_that_moves_data_has_a_case(reports: list[Report]) -> None:
    """Also every reduce op, every root and the sub-group: the plan is not poorer than the table."""
    plan = gloo_cases.cases(*groups(len(reports)))
    of_torch = {
        row.op for row in OPERATIONS.values() if row.kind == "collective" and row.torch_name
    }
    assert of_torch <= {case.op for case in plan}
    made = {call.op for case in plan for calls in case.calls.values() for call in calls}
    assert {"send", "recv", "isend", "irecv", "batch_isend_irecv"} <= made
    assert {op for _, op in gloo_cases.REDUCTIONS} == set(REDUCE_OPS)


def test_calls_that_work_on_gloo_have_no_fault(reports: list[Report]) -> None:
    """`faults` and `cross_faults` are silent where torch is content, and the parties agree."""
    for case in gloo_cases.cases(*groups(len(reports))):
        calls = [call for rank in sorted(case.calls) for call in case.calls[rank]]
        assert first_reason(OPERATIONS[call.op].faults(call) for call in calls) is None, case.name
        row = OPERATIONS[case.op]
        if row.kind == "collective":
            assert row.mismatched_pairs(calls) == [], case.name
            if "uneven" not in case.name:
                assert len({tuple(row.agreement(call).items()) for call in calls}) == 1, case.name
